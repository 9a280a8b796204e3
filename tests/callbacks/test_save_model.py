"""The saving callback: one save per step with all reasons, and no failure that ends a training."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import CheckpointError, ConflictError
from ckptmgr.core.policies import Best, EveryMinutes, EveryNEpochs, EveryNSteps

Fake = Callable[..., Any]


class Host:
    """A training loop in HF's order, without a training."""

    def __init__(self, callback: SaveModelCallback, *, steps_per_epoch: int = 100) -> None:
        self.manager = CallbackManager([callback])
        self.state = TrainerState()
        self.control = TrainerControl()
        self.steps_per_epoch = steps_per_epoch

    def call(self, event: str, **arguments: Any) -> None:
        self.manager.call(event, args=None, state=self.state, control=self.control, **arguments)

    def step(self, step: int, *, metrics: Mapping[str, Any] | None = None) -> None:
        """Finish `step`: step end, evaluation if there are metrics, end of epoch, and the save if one was asked for."""
        self.state.global_step = step
        self.state.epoch = step / self.steps_per_epoch
        self.call("on_step_end")
        if metrics is not None:
            self.call("on_evaluate", metrics=metrics)
        if step % self.steps_per_epoch == 0 or self.control.should_training_stop:
            self.call("on_epoch_end")
        if self.control.should_save:
            self.control.should_save = False
            self.call("on_save", checkpoint=lambda: {"model": {"step": step}})


def test_several_reasons_at_one_step_make_one_save_with_all_of_them(fake_manager: Fake) -> None:
    """K096: every 100 steps, a best metric and the end of the epoch all at step 100."""
    manager = fake_manager(save_policy=EveryNSteps(100) | Best("eval_loss") | EveryNEpochs(1))
    host = Host(SaveModelCallback(manager))
    for step in range(1, 101):
        host.step(step, metrics={"eval_loss": 0.5, "eval_note": "text"} if step == 100 else None)
    assert manager.saves == [
        {
            "step": 100,
            "state": {"model": {"step": 100}},
            "epoch": 1.0,
            "metrics": {"eval_loss": 0.5},
            "reasons": ("every_n_steps:100", "best:eval_loss", "every_n_epochs:1"),
            "metric_modes": {"eval_loss": "min"},
        }
    ]


def test_reasons_and_metrics_belong_to_their_step(fake_manager: Fake) -> None:
    """What a step gathered is not carried over to the next save."""
    manager = fake_manager()
    host = Host(SaveModelCallback(manager, Best("eval_loss") | EveryNSteps(7)))
    host.step(5, metrics={"eval_loss": 0.5})
    host.step(6, metrics={"eval_loss": 0.9})
    host.step(7)
    assert [(save["step"], save["reasons"], save["metrics"]) for save in manager.saves] == [
        (5, ("best:eval_loss",), {"eval_loss": 0.5}),
        (7, ("every_n_steps:7",), {}),
    ]


def test_a_save_that_somebody_else_asked_for_is_made(fake_manager: Fake) -> None:
    """`control.should_save` set by another callback is reason enough."""
    manager = fake_manager()
    host = Host(SaveModelCallback(manager))
    host.control.should_save = True
    host.step(3)
    assert [(save["step"], save["reasons"]) for save in manager.saves] == [(3, ("requested",))]


def test_a_second_save_of_the_same_step_is_not_made(fake_manager: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """Hosts that save at the step end and again at the end of the epoch make one checkpoint."""
    manager = fake_manager(save_policy=EveryNSteps(10) | EveryNEpochs(1))
    host = Host(SaveModelCallback(manager), steps_per_epoch=1000)
    host.step(10)
    host.state.epoch = 1.0
    host.call("on_epoch_end")
    host.call("on_save", checkpoint=dict)
    assert len(manager.saves) == 1
    assert not host.control.should_save
    assert "step 10 is saved already; every_n_epochs:1 asked for it as well" in caplog.text


def test_an_epoch_cut_short_does_not_count_as_finished(fake_manager: Fake) -> None:
    """`every_n_epochs` needs a whole epoch; the last step is saved anyway, and says why."""
    manager = fake_manager(save_policy=EveryNEpochs(1))
    host = Host(SaveModelCallback(manager))
    host.control.should_training_stop = True
    host.step(50)
    assert [save["reasons"] for save in manager.saves] == [("train_end",)]


def test_the_last_save_can_be_declined(fake_manager: Fake) -> None:
    """`save_at_end=False` leaves it to the policy alone."""
    manager = fake_manager(save_policy=EveryNSteps(40))
    host = Host(SaveModelCallback(manager, save_at_end=False))
    host.step(40)
    host.control.should_training_stop = True
    host.step(50)
    assert [save["step"] for save in manager.saves] == [40]


def test_only_the_main_process_saves(fake_manager: Fake) -> None:
    """Other ranks use neither the manager nor their state."""
    manager = fake_manager(save_policy=EveryNSteps(1))
    host = Host(SaveModelCallback(manager))
    host.state.is_world_process_zero = False
    host.call("on_train_begin", resume_from=None)
    host.step(1)
    host.call("on_train_end")
    assert (manager.saves, manager.began, manager.close_calls) == ([], [], [])


def test_a_refused_begin_ends_the_training(fake_manager: Fake) -> None:
    """I12: a run with checkpoints that this training would abandon."""
    manager = fake_manager(begin_error=ConflictError("the run has checkpoints"))
    with pytest.raises(ConflictError):
        Host(SaveModelCallback(manager)).call("on_train_begin", resume_from=None)


def test_begin_is_told_what_is_resumed_from(fake_manager: Fake, tmp_path: Path) -> None:
    """The manager finds the manifest beside that directory."""
    manager = fake_manager()
    host = Host(SaveModelCallback(manager))
    host.call("on_train_begin", resume_from=str(tmp_path))
    host.call("on_train_begin", resume_from=None)
    assert manager.began == [tmp_path, None]


@pytest.mark.parametrize("error", [CheckpointError("disk full"), TypeError("unexpected")])
def test_a_failed_save_is_logged_and_counted_and_training_goes_on(
    fake_manager: Fake, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """I9, also in a host that calls the callback directly and has no isolation of its own."""
    manager = fake_manager(save_error=error)
    callback = SaveModelCallback(manager)
    state = TrainerState(global_step=8)
    callback.on_save(None, state, TrainerControl(), checkpoint=dict)
    assert callback.failures == 1
    assert "save of step 8 failed (failure 1), training goes on" in caplog.text
    assert str(error) in caplog.text
    manager.save_error = None
    state.global_step = 9
    callback.on_save(None, state, TrainerControl(), checkpoint=dict)
    assert [save["step"] for save in manager.saves] == [9]


def test_errors_of_the_background_show_at_the_next_step(fake_manager: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """K119: an upload that failed is said at once, not at the end; as an error it was logged where it happened."""
    manager = fake_manager(background=[CheckpointError("upload of step 10 failed")])
    callback = SaveModelCallback(manager)
    host = Host(callback)
    host.step(11)
    assert "1 more failed in the background (1 in all), the last: upload of step 10 failed" in caplog.text
    assert [r for r in caplog.records if r.levelno >= logging.ERROR] == []
    assert (callback.background_failures, str(callback.last_background_error)) == (1, "upload of step 10 failed")
    assert callback.failures == 0


def test_a_manager_that_cannot_be_asked_does_not_end_the_training(
    fake_manager: Fake, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I9, in a host without isolation: every look at a manager may fail."""
    manager = fake_manager()

    def fail() -> None:
        raise RuntimeError("broken pipe")

    monkeypatch.setattr(manager, "poll_errors", fail)
    callback = SaveModelCallback(manager, EveryNSteps(1))
    control = TrainerControl()
    callback.on_step_end(None, TrainerState(global_step=1), control)
    assert (callback.failures, control.should_save) == (1, True)
    assert "broken pipe" in caplog.text


def test_buffers_are_reserved_once_the_optimizer_has_its_state(fake_manager: Fake) -> None:
    """After the first step, for a host that hands over its pieces; before that the optimizer has none."""
    manager = fake_manager()
    host = Host(SaveModelCallback(manager))
    host.call("on_train_begin")
    assert manager.reserved == []
    for step in (1, 2):
        host.state.global_step = step
        host.call("on_step_end", checkpoint=lambda: {"model": 1})
    assert manager.reserved == [{"model": 1}]


def test_the_manager_learns_how_large_a_checkpoint_will_be(fake_manager: Fake) -> None:
    """K069: so that it can warn before the first step. Weights once, and twice more where they are trained."""

    class Parameter:
        def __init__(self, count: int, trained: bool) -> None:
            self.count, self.requires_grad = count, trained

        def numel(self) -> int:
            return self.count

        def element_size(self) -> int:
            return 4

    class Model:
        def parameters(self) -> list[Parameter]:
            return [Parameter(100, True), Parameter(1000, False)]

    manager = fake_manager()
    host = Host(SaveModelCallback(manager))
    host.call("on_train_begin", model=Model())
    assert manager.expected_bytes == 4 * (100 + 1000 + 200)
    host.call("on_train_begin", model=object())
    assert manager.expected_bytes is None


def test_time_based_policies_get_the_time(fake_manager: Fake) -> None:
    """EveryMinutes counts seconds of training, from the beginning of it."""
    now = [1000.0]
    manager = fake_manager(save_policy=EveryMinutes(1))
    host = Host(SaveModelCallback(manager, clock=lambda: now[0]))
    host.call("on_train_begin")
    for step in range(1, 9):
        now[0] += 25.0
        host.step(step)
    assert [save["step"] for save in manager.saves] == [4, 7]


def test_nothing_is_called_saved_or_committed_by_the_callback(
    fake_manager: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """K043: the manager says "queued" after the local commit; stronger words belong to the store."""
    caplog.set_level(logging.DEBUG)
    host = Host(SaveModelCallback(fake_manager(save_policy=EveryNSteps(1))))
    host.step(1)
    assert "saved" not in caplog.text
    assert "committed" not in caplog.text


def test_the_end_names_what_is_not_in_the_store(
    closed: Fake, fake_manager: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """What is left is named by id, with what to do."""
    manager = fake_manager(closed=closed(pending=["a-1", "a-2"], errors=[CheckpointError("no route to store")]))
    Host(SaveModelCallback(manager, close_timeout_s=3.0)).call("on_train_end")
    assert manager.close_calls == [3.0]
    assert "2 checkpoint(s) not in the store yet: a-1, a-2" in caplog.text
    assert "ckptmgr drain" in caplog.text
    assert "no route to store" in caplog.text


def test_a_host_without_state_is_told_so(fake_manager: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """A save that cannot be made is an error in the log, not silence."""
    callback = SaveModelCallback(fake_manager())
    callback.on_save(None, TrainerState(global_step=1), TrainerControl())
    assert callback.failures == 1
    assert "does not hand over its state" in caplog.text


def test_a_save_nobody_made_is_reported(fake_manager: Fake, caplog: pytest.LogCaptureFixture) -> None:
    """A host that ignores `should_save` does not go unnoticed."""
    callback = SaveModelCallback(fake_manager(save_policy=EveryNSteps(2)))
    for step in (2, 3, 4):
        callback.on_step_end(None, TrainerState(global_step=step), TrainerControl())
    assert "step 2 was not saved although every_n_steps:2 asked for it" in caplog.text


def test_a_resumed_run_decides_as_the_uninterrupted_one(fake_manager: Fake) -> None:
    """K061: the policy's memory is part of the callback's state, and survives JSON."""
    values = {100: 0.3, 200: float("nan"), 300: 0.2, 400: 0.2, 500: 0.2, 600: 0.1}

    def run(steps: Sequence[int], state: Mapping[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        manager = fake_manager(save_policy=Best("eval_loss", k=2))
        callback = SaveModelCallback(manager)
        host = Host(callback, steps_per_epoch=1000)
        if state is not None:
            host.manager.load_state_dict(state)
        for step in steps:
            host.step(step, metrics={"eval_loss": values[step]})
        return [save["step"] for save in manager.saves], json.loads(json.dumps(host.manager.state_dict()))

    whole, final = run(sorted(values), None)
    assert whole == [100, 300, 400, 600]
    first, state = run([100, 200, 300], None)
    second, resumed_final = run([400, 500, 600], state)
    assert first + second == whole
    assert resumed_final == final
