"""The loss monitor: what is unusual, the same in every host, without waiting for a device."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckptmgr.callbacks import readings
from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments

Replay = Callable[..., Any]


def kinds(callback: LossMonitorCallback) -> list[tuple[str, int]]:
    return [(anomaly.kind, anomaly.step) for anomaly in callback.anomalies]


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.endswith("loss_monitor") and r.levelno == level]


def test_nan_and_inf_are_anomalies_and_poison_no_mean(replay: Replay, shape: str) -> None:
    """K111: the mean over the last 3 finite values, and the two events with their steps, in each host."""
    callback = LossMonitorCallback(1, window=3, gradients=False)
    means = []
    for at, loss in enumerate([1.0, 2.0, math.inf, 3.0, math.nan, 4.0]):
        replay(shape, callback, losses=[loss], first=at)
        means.append(callback.mean)
    assert means == [1, 1.5, 1.5, 2, 2, 3]
    assert kinds(callback) == [("nonfinite", 3), ("nonfinite", 5)]
    assert [anomaly.usual for anomaly in callback.anomalies] == [1.5, 2]


CALM = [1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0, 1.1, 0.9, 1.0]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([*CALM, 1.3], []),
        ([*CALM, 2.0, 1.0], [("spike", 11)]),
        ([*CALM[:8], 9.0], []),  # too few to compare with
        ([1.0] * 10 + [1.05], []),  # a deviation of 0 counts as 1 % of the mean
        ([1.0] * 10 + [1.07], [("spike", 11)]),
        ([-1.0] * 10 + [-0.93, -2.0], [("spike", 11)]),
        ([0.0] * 12, []),
    ],
)
def test_spikes(replay: Replay, shape: str, losses: list[float], expected: list[Any]) -> None:
    callback = LossMonitorCallback(1, gradients=False)
    replay(shape, callback, losses=losses)
    assert kinds(callback) == expected


def test_a_plateau_is_said_once_until_it_gets_better(replay: Replay, shape: str) -> None:
    callback = LossMonitorCallback(1, window=2, plateau_steps=3, plateau_delta=0.1, gradients=False)
    replay(shape, callback, losses=[1.0] * 8 + [0.5] * 6)
    # The window is full at step 2; at 9 its mean is 0.75, at 10 0.5.
    assert kinds(callback) == [("plateau", 5), ("plateau", 13)]


@pytest.mark.parametrize(
    ("actions", "stopped", "saves"),
    [("warn", None, []), ("save", None, [2, 4]), ("stop", 2, []), (["save", "stop"], 2, [2]), ([], None, [])],
)
def test_actions(
    replay: Replay, shape: str, actions: Any, stopped: int | None, saves: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    callback = LossMonitorCallback(1, on_nonfinite=actions, gradients=False)
    decided = replay(shape, callback, losses=[1.0, math.nan, 1.0, math.inf, 1.0])
    assert (decided.stopped, decided.saves) == (stopped, saves)
    lines = said(caplog)
    assert lines[:1] == (
        [] if not actions else ["step 2: the loss is nan, its mean was 1" + "; training ends" * bool(stopped)]
    )


def test_losses_are_read_once_per_interval(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`LossMonitorCallback(log_interval=50)` in the embedded Trainer: a NaN of step 3 is found at 50, with its step; lines are as many as intervals."""
    reads: list[int] = []
    read = readings.Pending.read

    def counted(pending: readings.Pending) -> list[tuple[int, float]]:
        reads.append(len(pending))
        return read(pending)

    monkeypatch.setattr(readings.Pending, "read", counted)
    model = torch.nn.Linear(1, 1, bias=False)
    callback = LossMonitorCallback(log_interval=50, on_nonfinite="stop")
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=200, logging_steps=None),
        train_dataloader=[torch.ones(1)] * 7,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn=lambda model, batch: model(batch).sum() * 0 + (math.nan if trainer.state.global_step == 2 else 1.0),
        callbacks=[callback],
    )
    assert trainer.train().stopped == "LossMonitorCallback"
    assert trainer.state.global_step == 50
    assert reads == [50, 1, 0, 0]  # losses and norms at the interval, and at the end
    assert kinds(callback) == [("nonfinite", 3), ("vanishing", 50)]
    assert said(caplog, logging.INFO) == ["step 50: loss 1, mean 1 of the last 49, gradient norm 0"]
    assert said(caplog)[0] == "step 3: the loss is nan, its mean was 1; training ends"


def test_accumulation_counts_steps() -> None:
    """The loss of a step is the mean over its micro-batches, the gradient that of all of them."""
    model = torch.nn.Linear(1, 1, bias=False)
    callback, weight = LossMonitorCallback(1), model.weight
    losses = iter([1.0, 3.0, 5.0, 7.0])
    Trainer(
        model,
        TrainingArguments(gradient_accumulation_steps=2),
        train_dataloader=[torch.ones(1)] * 4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn=lambda model, batch: (weight - weight.detach()).sum() * 3 + next(losses),
        callbacks=[callback],
    ).train()
    assert (callback.mean, callback.last, callback.grad_norm) == (4.0, 6.0, 3.0)


def test_the_norm_is_that_before_the_trainer_clips() -> None:
    """And it is there for each step."""
    model = torch.nn.Linear(1, 1, bias=False)
    callback = LossMonitorCallback(4)
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=4, max_grad_norm=0.5, logging_steps=None),
        train_dataloader=[torch.ones(1)] * 4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn=lambda model, batch: model(batch).sum() * (trainer.state.global_step + 1),
        callbacks=[callback],
    )
    trainer.train()
    assert callback.grad_norm == 4.0
    assert callback.state_dict()["detector"]["norms"] == [1.0, 2.0, 3.0, 4.0]


def test_gradients_explode_and_vanish() -> None:
    """Relative to the median of those before, of a model whose gradients are given."""
    norms = [1.0] * 10 + [11.0, 1.0, 1e-9, math.inf, math.nan, 9.0]
    model = torch.nn.Linear(1, 1, bias=False)
    callback, state, control = LossMonitorCallback(1), TrainerState(), TrainerControl()
    manager = CallbackManager([callback])
    for norm in norms:
        model.weight.grad = torch.full((1, 1), norm)
        manager.call("on_pre_optimizer_step", args=None, state=state, control=control, model=model)
        state.global_step += 1
        manager.call("on_step_end", args=None, state=state, control=control, outputs=torch.tensor(1.0))
    assert kinds(callback) == [("explosion", 11), ("vanishing", 13), ("explosion", 14), ("explosion", 15)]
    assert callback.grad_norm == 9.0


def test_the_norm_in_the_logs_is_taken_where_there_is_one() -> None:
    """As Hugging Face's Trainer, which logs it before it clips; nothing is measured there."""
    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.grad = torch.ones(1, 1)
    callback, state, control = LossMonitorCallback(1), TrainerState(), TrainerControl()
    for state.global_step in range(12):
        args: Any = SimpleNamespace(output_dir="out")
        callback.on_pre_optimizer_step(args, state, control, model=model)
        callback.on_log(
            args, state, control, logs={"loss": 1.0, "grad_norm": 200.0 if state.global_step == 11 else 2.0}
        )
    assert kinds(callback) == [("explosion", 11)]
    assert callback.grad_norm == 200.0


def test_where_both_come_the_logs_are_ignored() -> None:
    callback, state, control = LossMonitorCallback(1, gradients=False), TrainerState(), TrainerControl()
    for state.global_step in (1, 2):
        callback.on_step_end(None, state, control, outputs={"loss": 1.0})
        callback.on_log(None, state, control, logs={"loss": math.nan})
    assert (callback.mean, kinds(callback)) == (1.0, [])


losses_lists = st.lists(st.sampled_from([0.5, 0.875, 1.0, 1.125, 5.0, math.nan, math.inf]), min_size=1, max_size=20)
all_options = st.fixed_dictionaries(
    {
        "window": st.integers(1, 12),
        "on_nonfinite": st.sampled_from(["warn", "stop", ["save"], []]),
        "on_spike": st.sampled_from(["warn", ["save", "stop"]]),
        "on_plateau": st.sampled_from(["warn", "save", "stop"]),
        "plateau_steps": st.sampled_from([None, 1, 4]),
        "gradients": st.just(False),
    }
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(losses=losses_lists, options=all_options)
def test_every_host_decides_alike(replay: Replay, losses: list[float], options: dict[str, Any]) -> None:
    """The same losses, the same decisions, anomalies and windows."""
    seen = []
    for shape in ("embedded", "huggingface", "plain"):
        callback = LossMonitorCallback(1, **options)
        decided = replay(shape, callback, losses=losses)
        seen.append((decided, kinds(callback), callback.mean, repr(callback.last)))
    assert seen[0] == seen[1] == seen[2]


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(losses=losses_lists, options=all_options, at=st.integers(1, 20), interval=st.integers(1, 4))
def test_a_resumed_run_decides_as_an_uninterrupted_one(
    replay: Replay, losses: list[float], options: dict[str, Any], at: int, interval: int
) -> None:
    """In the middle of an interval too; the state goes through strict JSON."""

    def play(callback: LossMonitorCallback, losses: list[float], first: int = 0) -> Any:
        state, control = TrainerState(global_step=first), TrainerControl()
        saves = []
        for loss in losses:
            state.global_step += 1
            callback.on_step_end(None, state, control, outputs={"loss": loss})
            if control.should_save:
                saves.append(state.global_step)
            control.should_save = False
            if control.should_training_stop:
                break
        return state.global_step, control.should_training_stop, saves

    whole, first, second = (LossMonitorCallback(interval, **options) for _ in range(3))
    ended, stopped, _ = play(whole, losses)
    at = min(at, ended)
    assert play(first, losses[:at])[0] == at
    if at < ended:
        second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
        assert play(second, losses[at:], at)[:2] == (ended, stopped)
        assert [*kinds(first), *kinds(second)] == kinds(whole)
        assert second.state_dict() == whole.state_dict()


def test_ranks_stop_together(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One rank's NaN ends all, at the end of an interval; rank 0 says whose it was. Without actions for all nothing is asked of others."""
    asked: list[list[float]] = []

    def gather(row: Any) -> list[list[float]]:
        asked.append(list(row))
        return [list(row), [0.0, 1.0 if len(asked) == 2 else 0.0]]

    monkeypatch.setattr("ckptmgr.training.ranks.gather_rows", gather)
    monkeypatch.setattr("ckptmgr.training.ranks.rank", lambda: 0)
    callback, control, state = LossMonitorCallback(2, on_nonfinite="stop"), TrainerControl(), TrainerState()
    while not control.should_training_stop:
        state.global_step += 1
        callback.on_step_end(None, state, control, outputs={"loss": 1.0})
    assert state.global_step == 4
    assert asked == [[False, False]] * 2
    assert said(caplog) == ["step 4: rank 1 has found something unusual; training ends"]
    watching = LossMonitorCallback(1)
    watching.on_step_end(None, state, TrainerControl(), outputs={"loss": math.nan})
    assert len(asked) == 2


def test_lines_get_fewer(caplog: pytest.LogCaptureFixture) -> None:
    callback, state, control = LossMonitorCallback(1, gradients=False), TrainerState(), TrainerControl()
    for step in range(1, 41):
        state.global_step = step
        callback.on_step_end(None, state, control, outputs={"loss": math.nan})
    assert [line.split(":")[0] for line in said(caplog)] == [f"step {n}" for n in (1, 2, 3, 4, 8, 16, 32)]
    state = TrainerState(is_world_process_zero=False, global_step=64)
    caplog.clear()
    callback.on_step_end(None, state, control, outputs={"loss": math.nan})
    callback.on_train_end(None, state, control)
    assert said(caplog) == []


@pytest.mark.parametrize(("actions", "lines"), [("stop", 1), ("warn", 0)])
def test_a_host_that_hides_what_is_to_be_acted_on_is_named(
    actions: Any, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    args = SimpleNamespace(logging_nan_inf_filter=True)
    for callback, optimizer in (
        (LossMonitorCallback(on_nonfinite=actions, gradients=False), None),
        (LossMonitorCallback(on_nonfinite=actions), SimpleNamespace(scaler=object())),
    ):
        caplog.clear()
        callback.on_train_begin(args, TrainerState(), TrainerControl(), optimizer=optimizer)
        assert len(said(caplog)) == lines
        assert all("set logging_nan_inf_filter=False" in line for line in said(caplog))


@pytest.mark.parametrize("scaler", [None, object()])
def test_a_norm_that_is_not_finite_stands_for_the_loss_that_a_host_hides(
    scaler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Hugging Face's Trainer logs 0 for a loss that is NaN from the first step on; a scaler makes such norms by itself."""
    callback, control = LossMonitorCallback(1, on_nonfinite="stop"), TrainerControl()
    args, state = SimpleNamespace(logging_nan_inf_filter=True, output_dir="out"), TrainerState()
    callback.on_train_begin(args, state, control, optimizer=SimpleNamespace(scaler=scaler))
    assert said(caplog) == [] or scaler
    for logs in ({"loss": 2.0, "grad_norm": 1.0}, {"loss": 0.0, "grad_norm": math.nan}):
        state.global_step += 1
        callback.on_log(args, state, control, logs=logs)
    if scaler is None:
        assert (control.should_training_stop, callback.mean, kinds(callback)) == (True, 2, [("nonfinite", 2)])
        assert said(caplog) == ["step 2: the gradient's norm is nan; training ends"]
    else:
        assert (control.should_training_stop, callback.mean, kinds(callback)) == (False, 1, [("explosion", 2)])


def test_no_loss_at_all_is_said(caplog: pytest.LogCaptureFixture) -> None:
    callback = LossMonitorCallback()
    callback.on_step_end(None, TrainerState(global_step=1), TrainerControl())
    callback.on_train_end(None, TrainerState(global_step=1), TrainerControl())
    assert ["saw no loss" in line for line in said(caplog)] == [True]


@pytest.mark.parametrize(
    "options",
    [
        {"log_interval": 0},
        {"window": 0},
        {"on_spike": "shout"},
        {"on_spike": ["warn", "shout"]},
        {"on_spike": None},
        {"spike_factor": 0},
        {"plateau_steps": 0},
        {"plateau_delta": -0.1},
        {"explosion_factor": 1},
        {"vanishing_norm": -1},
        {"gradients": 1.5},
    ],
)
def test_arguments_are_looked_at(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LossMonitorCallback(**options)
    assert "LossMonitorCallback: " in str(caught.value)
    assert caught.value.hint
