"""Callbacks beside the training: it never waits for them, and they change nothing in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ckptmgr.callbacks.background import Background
from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.dpo_accuracy import DPOAccuracyCallback
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.gradient_clip import GradientClipCallback
from ckptmgr.callbacks.isolation import Failures
from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.profiler import PerformanceProfilerCallback
from ckptmgr.core.errors import ConfigError

DEADLINE_S = 60.0


class Watches(Callback):
    """Notes steps in another thread, each when it is let."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.got: list[dict[str, Any]] = []
        self.threads: set[int] = set()
        self.may_go = threading.Semaphore(0)
        self.has_begun = threading.Event()

    def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.has_begun.set()
        assert self.may_go.acquire(timeout=DEADLINE_S)
        self.threads.add(threading.get_ident())
        self.seen.append(state.global_step)
        self.got.append(kwargs)

    def state_dict(self) -> dict[str, Any]:
        return {"seen": list(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen = list(state["seen"])


def step_end(manager: CallbackManager, step: int, **more: Any) -> TrainerControl:
    control = TrainerControl()
    manager.call("on_step_end", args=None, state=TrainerState(global_step=step), control=control, **more)
    return control


def end(manager: CallbackManager) -> None:
    manager.call("on_train_end", args=None, state=TrainerState(), control=TrainerControl())


def test_training_goes_on_while_a_hook_is_stuck_and_the_order_is_kept() -> None:
    """Ten steps pass while the first hook has not come back; at the end all were seen, in order, in one other thread."""
    watches = Watches()
    manager = CallbackManager()
    manager.add(watches, run_async=True)
    for step in range(1, 11):
        step_end(manager, step)
    assert watches.seen == []
    watches.may_go.release(10)
    end(manager)
    assert watches.seen == list(range(1, 11))
    assert len(watches.threads) == 1
    assert threading.get_ident() not in watches.threads


def test_it_sees_the_state_of_its_event_and_nothing_that_training_goes_on_using() -> None:
    """The trainer counts on meanwhile; a model or a batch would be another one by then."""
    watches = Watches()
    manager = CallbackManager()
    manager.add(watches, run_async=True)
    state = TrainerState(global_step=1, log_history=[{"loss": 1.0}])
    metrics = {"eval_loss": 1.0}
    arguments = {"model": object(), "batch": object(), "outputs": object(), "metrics": metrics}
    manager.call("on_step_end", args="args", state=state, control=TrainerControl(), **arguments)
    state.global_step = 2
    metrics["eval_loss"] = 2.0
    watches.may_go.release()
    end(manager)
    assert watches.seen == [1]
    assert watches.got == [{"args": "args", "metrics": {"eval_loss": 1.0}}]


def test_too_many_events_are_left_out_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The queue is bounded; the end always gets through."""
    watches = Watches()
    failures = Failures("Watches", None)
    background = Background(watches, failures, capacity=3)
    submit = background.on_step_end
    submit(state=TrainerState(global_step=1), control=None)
    assert watches.has_begun.wait(DEADLINE_S)
    for step in range(2, 8):
        submit(state=TrainerState(global_step=step), control=None)
    assert background.left_out == 3
    assert [record.getMessage() for record in caplog.records] == [
        "callback Watches is too slow: 3 events wait for it, on_step_end was left out (1 so far)",
        "callback Watches is too slow: 3 events wait for it, on_step_end was left out (2 so far)",
    ]
    watches.may_go.release(10)
    background.on_train_end(state=TrainerState(), control=None)
    assert watches.seen == [1, 2, 3, 4]


def test_the_end_waits_no_longer_than_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """What is left is counted."""
    watches = Watches()
    background = Background(watches, Failures("Watches", None), end_timeout_s=0.0)
    background.on_step_end(state=TrainerState(global_step=1), control=None)
    background.on_step_end(state=TrainerState(global_step=2), control=None)
    assert watches.has_begun.wait(DEADLINE_S)
    background.on_train_end(state=TrainerState(), control=None)
    assert "has not done with the training after 0 s: 3 events are left" in caplog.text
    watches.may_go.release(2)


def test_flags_have_no_effect_and_this_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """It could only act at some later step, on some ranks."""

    class Stops(Callback):
        def on_step_end(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop = True

    manager = CallbackManager()
    manager.add(Stops(), run_async=True)
    assert not step_end(manager, 1).should_training_stop
    assert not step_end(manager, 2).should_training_stop
    end(manager)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        "callback Stops runs beside the training (run_async): that it set should_training_stop has no effect"
    ]


def test_failures_are_isolated_counted_and_lead_to_an_end(caplog: pytest.LogCaptureFixture) -> None:
    """As in the training thread."""

    class Sick(Callback):
        def __init__(self) -> None:
            self.calls = 0

        def on_step_end(self, **kwargs: Any) -> None:
            self.calls += 1
            raise ValueError("sick")

    sick = Sick()
    manager = CallbackManager(most_failures=3)
    manager.add(sick, run_async=True)
    for step in range(6):
        step_end(manager, step)
    end(manager)
    assert (sick.calls, manager.failures, manager.disabled) == (3, {"Sick": 3}, ("Sick",))
    assert "callback Sick is disabled from step 2 on" in caplog.text


def test_saving_does_not_wait_for_a_hook_and_the_state_comes_back() -> None:
    """The state is that after the last hook that came back."""
    watches = Watches()
    manager = CallbackManager()
    manager.add(watches, run_async=True)
    watches.may_go.release()
    step_end(manager, 1)
    wait_for(lambda: manager.state_dict() == {"Watches": {"seen": [1]}})
    watches.has_begun.clear()
    step_end(manager, 2)
    assert watches.has_begun.wait(DEADLINE_S)
    assert manager.state_dict() == {"Watches": {"seen": [1]}}
    watches.may_go.release()
    end(manager)
    again = Watches()
    fresh = CallbackManager()
    fresh.add(again, run_async=True)
    fresh.load_state_dict(manager.state_dict())
    assert again.seen == [1, 2]
    assert fresh.state_dict() == {"Watches": {"seen": [1, 2]}}


def test_a_critical_one_is_refused() -> None:
    """It could not end the training at its event."""
    watches = Watches()
    watches.critical = True
    with pytest.raises(ConfigError, match="is critical, and cannot run beside the training"):
        CallbackManager().add(watches, run_async=True)


def wait_for(condition: Callable[[], bool]) -> None:
    """Until another thread has come so far."""
    tick = threading.Event()
    for _ in range(int(DEADLINE_S / 0.01)):
        if condition():
            return
        tick.wait(0.01)
    raise AssertionError("it never came so far")


@pytest.mark.parametrize(
    "callback",
    [
        EarlyStoppingCallback(),
        GradientClipCallback(1.0),
        PerformanceProfilerCallback(),
        LossMonitorCallback(on_spike="save"),
        DPOAccuracyCallback(stop=True),
    ],
    ids=lambda callback: type(callback).__name__,
)
def test_one_that_acts_or_measures_is_refused(callback: Any) -> None:
    """It would say that training ends, and it would not."""
    with pytest.raises(ConfigError, match="acts on the training, or measures it, and cannot run beside the training"):
        CallbackManager().add(callback, run_async=True)


@pytest.mark.parametrize("callback", [LossMonitorCallback(), DPOAccuracyCallback()])
def test_one_that_only_watches_is_not(callback: Any) -> None:
    CallbackManager().add(callback, run_async=True)
