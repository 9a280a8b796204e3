"""Early stopping: the same decisions in every host, and after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments

Replay = Callable[..., Any]

CASE = [1.0, 1.1, 0.9, 1.0, 0.8, 0.9, 0.85]


def evaluations(values: Sequence[float], name: str = "eval_loss") -> list[dict[str, float]]:
    return [{name: value} for value in values]


@pytest.mark.parametrize(("min_delta", "stopped"), [(0.0, 7), (0.15, 3)])
def test_patience_begins_anew_at_each_improvement(replay: Replay, shape: str, min_delta: float, stopped: int) -> None:
    """K063: the case of the list, in each host."""
    callback = EarlyStoppingCallback(patience=2, mode="min", min_delta=min_delta)
    # Three more, for a host that would not stop.
    decided = replay(shape, callback, metrics=evaluations([*CASE, 0.7, 0.6, 0.5]))
    assert decided.stopped == callback.stopped_step == stopped
    assert (callback.best, callback.best_step) == ((0.8, 5) if min_delta == 0 else (1.0, 1))


@pytest.mark.parametrize(
    ("options", "values", "stopped"),
    [
        ({"patience": 2}, [1.0, 1.0, 1.0, 0.5], 3),  # ties
        ({"patience": 2}, [math.nan, math.nan, 0.5], 2),  # never better, from the first on
        ({"patience": 2}, [1.0, math.nan, 0.5, -math.inf, 0.4, math.inf, math.nan], 7),
        ({"patience": 2, "mode": "max"}, [0.5, 0.4, 0.6, 0.5, 0.6], 5),
        ({"patience": 9, "threshold": 0.5}, [1.0, 0.6, 0.5, 0.4], 3),
        ({"patience": 9, "threshold": 0.5, "mode": "max"}, [0.1, 0.2, 0.7], 3),
        ({"patience": 9, "threshold": 0.5, "mode": "max"}, [0.1, math.inf, 0.49], None),
        ({"patience": 2, "baseline": 0.52, "mode": "max"}, [0.5, 0.51, 0.9], 2),
        ({"patience": 2, "baseline": 0.52, "mode": "max"}, [0.5, 0.53, 0.51, 0.53, 0.9], 4),
        ({"patience": 2, "warmup": 3}, [0.1, 0.2, 0.3, 1.0, 0.9, 1.0, 0.9], 7),
        ({"patience": 2, "warmup": 3}, [0.1, 0.2, 0.3, 1.0, 0.9, 0.8, 0.7], None),
    ],
)
def test_rules(replay: Replay, shape: str, options: dict[str, Any], values: list[float], stopped: int | None) -> None:
    assert replay(shape, EarlyStoppingCallback(**options), metrics=evaluations(values)).stopped == stopped


def test_a_missing_metric_is_said_once_and_blocks_nothing(
    replay: Replay, shape: str, caplog: pytest.LogCaptureFixture
) -> None:
    """K115, for a callback: the names that are there, and it works from the evaluation that has the metric."""
    callback = EarlyStoppingCallback("f1", 2, mode="max")
    missing = [{"eval_loss": 1.0, "eval_accuracy": 0.5}] * 3
    decided = replay(shape, callback, metrics=[*missing, *evaluations([0.5, 0.4, 0.3, 0.2], "eval_f1")])
    assert decided.stopped == 6
    said = [record.getMessage() for record in caplog.records if "nothing to go by" in record.getMessage()]
    assert len(said) == 1
    assert "step 1 has no metric 'f1'; present: eval_accuracy, eval_loss" in said[0]


def test_the_metric_of_a_later_evaluation_set_is_not_missing(caplog: pytest.LogCaptureFixture) -> None:
    """Several sets are several evaluations of one step; what none of them has is said when the next step begins, with the names of all."""
    callback, other = EarlyStoppingCallback("b_loss", 2), EarlyStoppingCallback("c_loss", 2)
    state, control = TrainerState(), TrainerControl()
    state.global_step = 1
    for metrics in ({"eval_a_loss": 1.0}, {"eval_b_loss": 2.0}):
        for each in (callback, other):
            each.on_evaluate(None, state, control, metrics=metrics)
    assert caplog.messages == []
    for each in (callback, other):
        each.on_step_begin(None, state, control)
        each.on_train_end(None, state, control)
    (line,) = caplog.messages
    assert "the evaluation at step 1 has no metric 'c_loss'; present: eval_a_loss, eval_b_loss." in line
    assert (callback.best, callback.metric.missing_reported) == (2.0, False)


def test_a_step_that_is_evaluated_twice_counts_once() -> None:
    callback, state, control = EarlyStoppingCallback(patience=2), TrainerState(), TrainerControl()
    for state.global_step in (1, 1, 1, 2, 2):
        callback.on_evaluate(None, state, control, metrics={"eval_loss": 1.0})
    assert not control.should_training_stop
    assert callback.waited == 1


def test_logs_are_a_source_too() -> None:
    """TRL's accuracy that stays near chance; logs without it count for nothing and are not missed."""
    callback = EarlyStoppingCallback("rewards/accuracies", 2, mode="max", baseline=0.52, source="log")
    state, control = TrainerState(), TrainerControl()
    for step, logs in enumerate([{"loss": 1.0}, {"rewards/accuracies": 0.5}, {"eval_loss": 2.0}], 1):
        state.global_step = step
        callback.on_log(None, state, control, logs=logs)
        callback.on_evaluate(None, state, control, metrics={"rewards/accuracies": 0.1})
        assert not control.should_training_stop
    state.global_step = 4
    callback.on_log(None, state, control, logs={"rewards/accuracies": 0.51})
    assert control.should_training_stop
    assert not callback.metric.missing_reported


values_lists = st.lists(
    st.sampled_from([0.1, 0.2, 0.25, 0.3, 0.5, math.nan, math.inf, -math.inf]), min_size=1, max_size=12
)
all_options = st.fixed_dictionaries(
    {
        "patience": st.integers(1, 3),
        "mode": st.sampled_from(["min", "max"]),
        "min_delta": st.sampled_from([0.0, 0.1]),
        "threshold": st.sampled_from([None, 0.1, 0.5]),
        "baseline": st.sampled_from([None, 0.25]),
        "warmup": st.integers(0, 2),
    }
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=values_lists, options=all_options)
def test_every_host_decides_alike(replay: Replay, values: list[float], options: dict[str, Any]) -> None:
    """The same metrics, the same decisions, the same state."""
    seen = []
    for each in ("embedded", "huggingface", "plain"):
        callback = EarlyStoppingCallback(**options)
        seen.append((replay(each, callback, metrics=evaluations(values)), callback.state_dict()))
    assert seen[0] == seen[1] == seen[2]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=values_lists, options=all_options, at=st.integers(1, 12))
def test_a_resumed_run_decides_as_an_uninterrupted_one(
    replay: Replay, values: list[float], options: dict[str, Any], at: int
) -> None:
    """Whatever evaluation it was killed after; the state goes through JSON."""
    whole = EarlyStoppingCallback(**options)
    stopped = replay("plain", whole, metrics=evaluations(values)).stopped
    first, second = EarlyStoppingCallback(**options), EarlyStoppingCallback(**options)
    at = min(at, (stopped or len(values) + 1) - 1)
    replay("plain", first, metrics=evaluations(values[:at]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert replay("plain", second, metrics=evaluations(values[at:]), first=at).stopped == stopped
    assert second.state_dict() == whole.state_dict()


def test_gone_on_with_it_has_its_whole_patience_again() -> None:
    callback, control = EarlyStoppingCallback(patience=2), TrainerControl()
    stops = []
    for step in range(1, 8):
        control.should_training_stop = False
        callback.on_evaluate(None, TrainerState(global_step=step), control, metrics={"eval_loss": 1.0})
        stops.append(control.should_training_stop)
    assert stops == [False, False, True, False, True, False, True]


def test_another_metric_starts_anew(caplog: pytest.LogCaptureFixture) -> None:
    saved = EarlyStoppingCallback("eval_loss").state_dict() | {"best": 1.0, "waited": 2}
    callback = EarlyStoppingCallback("accuracy", mode="max")
    callback.load_state_dict(saved)
    assert (callback.best, callback.waited) == (None, 0)
    assert "went by eval_loss (min) in the checkpoint, now by accuracy (max)" in caplog.text


def test_ranks_end_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has metrics of its own; the mean decides, also where one does not have it."""
    others = iter([[1.0, 3.0], [0.0, 0.0], [1.0, 1.0]])
    monkeypatch.setattr("ckptmgr.training.ranks.gather_rows", lambda row: [list(row), next(others)])
    callback, state = EarlyStoppingCallback(patience=9), TrainerState()
    bests = []
    for state.global_step in (1, 2, 3):
        callback.on_evaluate(None, state, TrainerControl(), metrics={"eval_loss": 1.0})
        bests.append(callback.best)
    assert bests == [2.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "options",
    [
        {"patience": 0},
        {"patience": True},
        {"monitor": ""},
        {"monitor": "accuracy"},
        {"mode": "least"},
        {"min_delta": -1},
        {"min_delta": math.nan},
        {"threshold": "low"},
        {"warmup": -1},
        {"source": "logs"},
        {"restore_best": "yes"},
    ],
)
def test_arguments_are_looked_at(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        EarlyStoppingCallback(**options)
    assert "EarlyStoppingCallback: " in str(caught.value)
    assert caught.value.hint


class Final(Callback):
    """As a saving callback that pushes the model at the end."""

    priority = Priority.SAVE
    weight: float | None = None

    def on_train_end(self, model: Any, **kwargs: Any) -> None:
        self.weight = model.weight.item()


class Fails(Callback):
    critical = True

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("broken")


@pytest.mark.parametrize("broken", [False, True])
def test_the_best_weights_come_back_at_the_end_but_not_after_a_failure(broken: bool) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    losses = [1.0, 0.5, 0.7, 0.8]
    callback, final = EarlyStoppingCallback(patience=2, restore_best=True), Final()
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=8, eval_steps=1),
        train_dataloader=[torch.ones(1)],
        eval_dataloader=[torch.ones(1)],
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss_fn=lambda model, batch: model(batch).sum(),
        eval_fn=lambda model, loader: {"loss": losses[trainer.state.global_step - 1]},
        callbacks=[final, callback, *([Fails()] if broken else [])],
    )
    began = model.weight.item()
    if broken:
        with pytest.raises(RuntimeError):
            trainer.train()
        assert model.weight.item() == pytest.approx(began - 3)
    else:
        assert trainer.train().stopped == "EarlyStoppingCallback"
        # Each step takes 1 off; the best was step 2 of 4.
        assert final.weight == model.weight.item() == pytest.approx(began - 2)


def test_sharded_weights_come_back(tmp_path: Path) -> None:
    """FSDP2, one rank."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        model = torch.nn.Linear(2, 1)
        fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        callback, control = EarlyStoppingCallback(patience=1, restore_best=True), TrainerControl()
        weight: Any = model.weight
        best = weight.full_tensor().clone()
        for step, loss in enumerate([1.0, 2.0], 1):
            callback.on_evaluate(None, TrainerState(global_step=step), control, {"eval_loss": loss}, model)
            with torch.no_grad():
                weight.add_(1)
        callback.on_train_end(None, TrainerState(global_step=2), control, model)
        assert control.should_training_stop
        assert torch.equal(weight.full_tensor(), best)
    finally:
        dist.destroy_process_group()


def test_weights_from_before_a_resume_are_named(caplog: pytest.LogCaptureFixture) -> None:
    callback = EarlyStoppingCallback(restore_best=True)
    callback.load_state_dict(EarlyStoppingCallback().state_dict() | {"best": 0.5, "best_step": 40})
    model = torch.nn.Linear(1, 1)
    before = model.state_dict()["weight"].clone()
    callback.on_train_end(None, TrainerState(global_step=60), TrainerControl(), model=model)
    assert torch.equal(model.state_dict()["weight"], before)
    assert "of step 40, cannot be put back" in caplog.text


def test_it_says_nothing_on_other_ranks(caplog: pytest.LogCaptureFixture) -> None:
    callback, control = EarlyStoppingCallback(patience=1), TrainerControl()
    for step in (1, 2):
        state = SimpleNamespace(global_step=step, is_world_process_zero=False)
        callback.on_evaluate(None, state, control, metrics={"eval_loss": math.nan})  # type: ignore[arg-type]
        callback.on_evaluate(None, state, control, metrics={})  # type: ignore[arg-type]
    assert control.should_training_stop
    assert caplog.records == []


def test_a_preemption_beside_it_leaves_the_weights(caplog: pytest.LogCaptureFixture) -> None:
    """Hugging Face's control does not tell of it."""
    notified = SimpleNamespace(on_step_end=None, preemption=SimpleNamespace(notice=None))
    callback, model = EarlyStoppingCallback(restore_best=True), torch.nn.Linear(1, 1)
    manager = CallbackManager([notified, callback])
    control = TrainerControl()

    def call(event: str, step: int, **arguments: Any) -> None:
        manager.call(event, args=None, state=TrainerState(global_step=step), control=control, model=model, **arguments)

    call("on_evaluate", 1, metrics={"eval_loss": 1.0})
    with torch.no_grad():
        model.weight.add_(1)
    newest = model.weight.detach().clone()
    notified.preemption.notice = object()
    call("on_train_end", 2)
    assert torch.equal(model.weight, newest)
    assert "the model has the weights" not in caplog.text


def test_a_training_without_evaluations_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """At its beginning where that is known, else at its end."""
    callback = EarlyStoppingCallback()
    for strategy in ("no", "steps"):
        args = SimpleNamespace(eval_strategy=SimpleNamespace(value=strategy))
        callback.on_train_begin(args, TrainerState(), TrainerControl())
    callback.on_train_end(None, TrainerState(global_step=3), TrainerControl())
    EarlyStoppingCallback("score", mode="max", source="log").on_train_end(
        None, TrainerState(global_step=3), TrainerControl()
    )
    assert [record.getMessage() for record in caplog.records] == [
        "EarlyStoppingCallback goes by eval_loss of evaluations, and the trainer makes none (eval_strategy='no')",
        "EarlyStoppingCallback has had nothing to go by: there was no evaluation",
        "EarlyStoppingCallback has had nothing to go by: there was no log with 'score'",
    ]
