"""Learning rates: what each schedule sets, over the host's own scheduler, and after a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments


def optimizer_of(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates])


def rates(callback: LRSchedulerCallback, steps: int, *, base: float = 1.0) -> list[float]:
    """What is set before each step of a training of so many."""
    optimizer, state, control = optimizer_of(base), TrainerState(max_steps=steps), TrainerControl()
    callback.on_train_begin(None, state, control, optimizer=optimizer)
    found = []
    for state.global_step in range(steps):
        callback.on_step_begin(None, state, control, optimizer=optimizer)
        found.append(optimizer.param_groups[0]["lr"])
    return found


half = 0.5 * (1 + math.cos(math.pi / 4))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "constant", "warmup_steps": 2}, [0, 0.5, 1, 1]),
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "linear", "warmup_steps": 2}, [0, 0.5, 1, 0.5]),
        ({"schedule": "linear", "warmup_ratio": 0.3}, [0, 0.5, 1, 0.5]),
        ({"schedule": "linear", "min_lr": 0.2}, [1, 0.8, 0.6, 0.4]),
        ({"schedule": "linear", "min_lr": 3.0}, [1, 1, 1, 1]),
        ({"schedule": "linear", "total_steps": 2, "min_lr": 0.5}, [1, 0.75, 0.5, 0.5]),
        ({"schedule": "cosine"}, [1, half, 0.5, 1 - half]),
        ({"schedule": "cosine", "cycles": 2}, [1, 0.5, 1, 0.5]),
        ({"schedule": "cosine", "warmup_steps": 2, "min_lr": 0.5}, [0, 0.5, 1, 0.75]),
        ({"schedule": "plateau", "warmup_steps": 2}, [0, 0.5, 1, 1]),
    ],
)
def test_schedules(options: dict[str, Any], expected: list[float]) -> None:
    assert rates(LRSchedulerCallback(**options), 4) == pytest.approx(expected)


def test_every_group_has_its_own_base_rate() -> None:
    """`initial_lr`, which a scheduler has left, counts for more than what it has made of it."""
    callback, optimizer = LRSchedulerCallback("linear", total_steps=4), optimizer_of(1.0, 0.1)
    optimizer.param_groups[1].update(initial_lr=0.2)
    callback.on_train_begin(None, TrainerState(), TrainerControl(), optimizer=optimizer)
    callback.on_step_begin(None, TrainerState(global_step=2), TrainerControl(), optimizer=optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == callback.last_lr == [0.5, 0.1]


def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    callback, optimizer = LRSchedulerCallback("linear", total_steps=4), optimizer_of(1.0)
    rate = optimizer.param_groups[0]["lr"] = torch.tensor(0.3)
    callback.on_train_begin(None, TrainerState(), TrainerControl(), optimizer=optimizer)
    for step in (0, 1, 2):
        callback.on_step_begin(None, TrainerState(global_step=step), TrainerControl(), optimizer=optimizer)
    assert rate.item() == pytest.approx(0.15)
    assert not callback.state_dict()["conflict_said"]


class Used(Callback):
    """The rate that the optimizer steps with."""

    priority = Priority.LOG

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_pre_optimizer_step(self, optimizer: Any, **kwargs: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


def build(
    callback: Any, *, scheduler: Any = None, accumulation: int = 1, steps: int = 4, **options: Any
) -> tuple[Trainer, Used]:
    model, used = torch.nn.Linear(1, 1), Used()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Trainer(
        model,
        TrainingArguments(gradient_accumulation_steps=accumulation, logging_steps=1, max_steps=steps, **options),
        train_dataloader=[torch.ones(1)] * (steps * accumulation),
        optimizer=optimizer,
        lr_scheduler=None if scheduler is None else scheduler(optimizer),
        loss_fn=lambda model, batch: model(batch).sum() * 0,
        callbacks=[callback, used],
    )
    return trainer, used


def test_in_the_trainer_with_accumulation() -> None:
    trainer, used = build(LRSchedulerCallback("linear"), accumulation=3)
    trainer.train()
    assert used.rates == [1, 0.75, 0.5, 0.25]
    assert [entry["learning_rate"] for entry in trainer.state.log_history] == used.rates
    assert trainer.callbacks.failures == {}


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0), False),
        (lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5), True),
    ],
    ids=["constant", "falling"],
)
def test_the_hosts_scheduler_is_overruled(
    scheduler: Callable[..., Any], said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One that changes the rate is named, once; both answer with what is set here."""
    trainer, used = build(LRSchedulerCallback("linear"), scheduler=scheduler)
    trainer.train()
    assert used.rates == [1, 0.75, 0.5, 0.25]
    lines = [r.getMessage() for r in caplog.records if "overruled" in r.getMessage()]
    assert len(lines) == said
    assert all("was 0.5 after step 1, not 1 as" in line and "StepLR" in line for line in lines)


def test_the_hosts_scheduler_answers_with_what_is_set() -> None:
    """As Hugging Face's Trainer asks it for its logs, through Accelerate's wrapper."""
    optimizer = optimizer_of(1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callback = LRSchedulerCallback("linear", total_steps=4)
    callback.on_train_begin(None, TrainerState(), TrainerControl(), optimizer=optimizer)
    for wrapped in (scheduler, SimpleNamespace(scheduler=scheduler)):
        callback.on_step_begin(
            None, TrainerState(global_step=1), TrainerControl(), optimizer=optimizer, lr_scheduler=wrapped
        )
        assert scheduler.get_last_lr() == [0.75]


def test_plateau_through_a_manager() -> None:
    """Reduced after `patience` + 1 evaluations that are not better, and never below `min_lr`."""
    callback = LRSchedulerCallback("plateau", factor=0.5, patience=1, min_lr=0.3)
    manager, optimizer, state = CallbackManager([callback]), optimizer_of(1.0), TrainerState()
    found = []
    arguments: dict[str, Any] = {"args": None, "state": state, "control": TrainerControl(), "optimizer": optimizer}
    manager.call("on_train_begin", **arguments)
    for state.global_step, loss in enumerate([1.0, 1.0, math.nan, 0.9, 0.9, 0.9, 0.9, 0.9]):
        manager.call("on_step_begin", **arguments)
        found.append(optimizer.param_groups[0]["lr"])
        manager.call("on_evaluate", metrics={"eval_loss": loss}, **arguments)
    assert found == [1, 1, 1, 0.5, 0.5, 0.5, 0.3, 0.3]
    assert manager.failures == {}


@given(
    st.lists(st.sampled_from([0.5, 0.9, 1.0, 1.1, 2.0]), max_size=30),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["min", "max"]),
    st.integers(0, 30),
)
def test_plateau_is_torchs(values: list[float], patience: int, cooldown: int, mode: Any, resumed_at: int) -> None:
    """The same rates after each evaluation, also if the callback is another one from some evaluation on."""
    theirs, mine = optimizer_of(1.0), optimizer_of(1.0)
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(
        theirs, mode, factor=0.5, patience=patience, cooldown=cooldown, eps=0
    )

    def make() -> LRSchedulerCallback:
        return LRSchedulerCallback(
            "plateau", monitor="score", mode=mode, factor=0.5, patience=patience, cooldown=cooldown
        )

    callback, state, control = make(), TrainerState(), TrainerControl()
    callback.on_train_begin(None, state, control, optimizer=mine)
    for step, value in enumerate(values):
        state.global_step = step
        if step == resumed_at:
            saved = json.loads(json.dumps(callback.state_dict()))
            callback = make()
            callback.load_state_dict(saved)
            callback.on_train_begin(None, state, control, optimizer=mine)
        reference.step(value)
        callback.on_evaluate(None, state, control, metrics={"score": value})
        callback.on_step_begin(None, state, control, optimizer=mine)
        assert mine.param_groups[0]["lr"] == pytest.approx(theirs.param_groups[0]["lr"])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_a_resumed_run_has_the_rates_of_the_whole_one(schedule: Any) -> None:
    """The optimizer comes back with the rate of the step that was saved, which is no base rate."""
    whole = rates(LRSchedulerCallback(schedule, warmup_steps=2), 8, base=0.5)
    first, second = (LRSchedulerCallback(schedule, warmup_steps=2) for _ in range(2))
    optimizer, state = optimizer_of(0.5), TrainerState(max_steps=8)
    first.on_train_begin(None, state, TrainerControl(), optimizer=optimizer)
    state.global_step = 4
    first.on_step_begin(None, state, TrainerControl(), optimizer=optimizer)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found = []
    second.on_train_begin(None, state, TrainerControl(), optimizer=optimizer)
    for state.global_step in range(5, 8):
        second.on_step_begin(None, state, TrainerControl(), optimizer=optimizer)
        found.append(optimizer.param_groups[0]["lr"])
    assert found == whole[5:]


def test_without_an_end_no_step_is_run() -> None:
    """It is critical there: a training at a rate that nobody meant is no training to go on with."""

    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter([torch.ones(1)])

    model, ran = torch.nn.Linear(1, 1), Used()
    trainer = Trainer(
        model,
        TrainingArguments(num_train_epochs=2),
        train_dataloader=torch.utils.data.DataLoader(Endless(), batch_size=None),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        callbacks=[LRSchedulerCallback("cosine"), ran],
    )
    with pytest.raises(ConfigError, match="total_steps, or max_steps"):
        trainer.train()
    assert ran.rates == []


def test_other_groups_than_in_the_checkpoint_are_said(caplog: pytest.LogCaptureFixture) -> None:
    callback = LRSchedulerCallback("constant")
    callback.load_state_dict({"base": [1.0], "conflict_said": False})
    callback.on_train_begin(None, TrainerState(), TrainerControl(), optimizer=optimizer_of(0.5, 0.25))
    assert "2 parameter groups, in the checkpoint it had 1" in caplog.text
    assert callback.rates_at(0) == [0.5, 0.25]


@pytest.mark.parametrize(
    "options",
    [
        {"schedule": "exponential"},
        {"warmup_steps": -1},
        {"warmup_ratio": 1.1},
        {"warmup_steps": 1, "warmup_ratio": 0.1},
        {"warmup_steps": 50, "total_steps": 40},
        {"total_steps": 0},
        {"min_lr": -1},
        {"cycles": 0},
        {"schedule": "linear", "cycles": 2},
        {"schedule": "plateau", "factor": 1.0},
        {"schedule": "plateau", "factor": 0},
        {"schedule": "plateau", "patience": -1},
        {"schedule": "plateau", "monitor": "accuracy"},
    ],
)
def test_arguments_are_looked_at(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LRSchedulerCallback(**options)
    assert "LRSchedulerCallback: " in str(caught.value)
    assert caught.value.hint


def test_two_are_refused() -> None:
    """The second would overrule the first at each step."""
    manager = CallbackManager([LRSchedulerCallback()])
    with pytest.raises(ConfigError, match="two LRSchedulerCallbacks"):
        manager.add(LRSchedulerCallback("linear"))
