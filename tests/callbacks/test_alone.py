"""Built-in callbacks in Hugging Face's Trainer without a manager: each has its own place in the trainer's state."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import IncompatibleStateError


def state_of(step: int, stateful_callbacks: dict[str, Any] | None = None) -> Any:
    """That of the Trainer, after it has come from JSON."""
    kept = json.loads(json.dumps(stateful_callbacks or {}, allow_nan=False))
    return SimpleNamespace(global_step=step, epoch=0.5, is_world_process_zero=True, stateful_callbacks=kept)


def evaluate(callback: Any, state: Any, **metrics: float) -> None:
    callback.on_evaluate(None, state, TrainerControl(), metrics=metrics)


def test_two_of_a_class_do_not_mix() -> None:
    """In the order in which they were added, in each training."""

    def make() -> list[EarlyStoppingCallback]:
        return [EarlyStoppingCallback("loss"), EarlyStoppingCallback("score", mode="max")]

    callbacks, state = make(), state_of(0)
    for callback in callbacks:
        callback.on_train_begin(None, state, TrainerControl())
    state.global_step = 3
    for callback in callbacks:
        evaluate(callback, state, loss=0.5, score=0.25)
    resumed, state = make(), state_of(3, state.stateful_callbacks)
    for callback in resumed:
        callback.on_train_begin(None, state, TrainerControl())
    assert [callback.best for callback in resumed] == [0.5, 0.25]
    assert [callback.state_dict() for callback in resumed] == [callback.state_dict() for callback in callbacks]


def test_a_manager_keeps_the_state_of_its_own() -> None:
    """It is there once."""
    callback, state = EarlyStoppingCallback("loss"), state_of(3)
    manager = CallbackManager([callback])
    control = TrainerControl(should_save=True)
    manager.call("on_train_begin", args=None, state=state, control=control)
    manager.call("on_evaluate", args=None, state=state, control=control, metrics={"loss": 1.0})
    assert list(state.stateful_callbacks) == ["ckptmgr.callbacks"]
    assert state.stateful_callbacks["ckptmgr.callbacks"]["attributes"]["EarlyStoppingCallback"]["best"] == 1.0


def test_another_host_has_no_such_place() -> None:
    callback, state = EarlyStoppingCallback("loss"), TrainerState()
    callback.on_train_begin(None, state, TrainerControl())
    evaluate(callback, state, loss=1.0)
    assert state == TrainerState()


def test_a_state_that_does_not_fit_is_refused() -> None:
    """Before the first step, by name."""
    state = state_of(3, {"ckptmgr.callbacks/EarlyStoppingCallback": {"args": {}, "attributes": {"monitor": "loss"}}})
    with pytest.raises(IncompatibleStateError, match="callback EarlyStoppingCallback refused its saved state"):
        EarlyStoppingCallback("loss").on_train_begin(None, state, TrainerControl())


def test_a_second_training_from_scratch_begins_anew() -> None:
    """The callbacks of a program that trains twice, or whose Trainer tries again with a smaller batch size."""
    callback = EarlyStoppingCallback("loss", patience=1)
    first, control = state_of(0), TrainerControl()
    callback.on_train_begin(None, first, control)
    for first.global_step, loss in ((1, 0.1), (2, 0.5)):
        callback.on_evaluate(None, first, control, metrics={"loss": loss})
    assert (control.should_training_stop, callback.best, callback.stopped_step) == (True, 0.1, 2)
    second, control = state_of(0), TrainerControl()
    callback.on_train_begin(None, second, control)
    assert (callback.best, callback.stopped_step) == (None, None)
    second.global_step = 2  # where the first ended
    callback.on_evaluate(None, second, control, metrics={"loss": 0.5})
    assert (control.should_training_stop, callback.best, callback.best_step) == (False, 0.5, 2)
