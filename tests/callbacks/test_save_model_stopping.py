"""The saving callback when something asks for the end: a notice of preemption, or a failure budget that is spent."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import CheckpointError
from ckptmgr.core.policies import EveryMinutes, EveryNSteps
from ckptmgr.training import ranks
from ckptmgr.training.preemption import Preemption

Fake = Callable[..., Any]


class HfControl:
    """The flags that Hugging Face's control has; a host that cannot leave in the middle."""

    def __init__(self) -> None:
        self.should_training_stop = self.should_epoch_stop = False
        self.should_save = self.should_evaluate = self.should_log = False


class Loop:
    """A host that calls the callback directly, without isolation: what a hook raises comes out."""

    def __init__(self, callback: SaveModelCallback, control: Any = None) -> None:
        self.callback = callback
        self.state = TrainerState(max_steps=100)
        self.control: Any = HfControl() if control is None else control

    def call(self, event: str, **arguments: Any) -> None:
        getattr(self.callback, event)(None, self.state, self.control, **arguments)

    def step_end(self, step: int) -> None:
        self.state.global_step, self.state.epoch = step, step / 1000
        self.call("on_step_end")

    def save(self) -> None:
        if self.control.should_save:
            self.control.should_save = False
            self.call("on_save", checkpoint=lambda: {"step": self.state.global_step})

    def end(self) -> None:
        self.call("on_epoch_end")
        self.save()
        self.call("on_train_end")


def began(callback: SaveModelCallback, control: Any = None) -> Loop:
    loop = Loop(callback, control)
    loop.call("on_train_begin")
    return loop


def test_a_notice_saves_the_step_and_ends_the_process(
    fake_manager: Fake, preemption: Any, notice: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """One emergency save with the source as its reason, uploads told to hurry, closed within the time that is left, and the exit code."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager, EveryNSteps(50)))
    loop.step_end(1)
    assert not loop.control.should_training_stop
    preemption.notice, preemption.left_s = notice("sigterm"), 20.0
    loop.step_end(2)
    assert loop.control.should_training_stop
    assert manager.hurried == [20.0]
    assert "sigterm: training ends at step 2" in caplog.text
    loop.save()
    preemption.left_s = 11.0
    with pytest.raises(SystemExit) as ended:
        loop.end()
    assert ended.value.code == 143
    assert [(save["step"], save["reasons"]) for save in manager.saves] == [(2, ("sigterm",))]
    assert manager.close_calls == [11.0]
    assert preemption.calls == ["install", "uninstall"]


def test_k096_a_notice_at_a_step_that_is_saved_anyway(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """One save with both reasons."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager, EveryNSteps(2), close_timeout_s=5.0))
    preemption.notice = notice("ec2")
    loop.step_end(2)
    loop.save()
    with pytest.raises(SystemExit):
        loop.end()
    assert [save["reasons"] for save in manager.saves] == [("ec2", "every_n_steps:2")]
    assert manager.close_calls == [5.0]


def test_after_a_second_signal_nothing_is_saved(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """Not even what the policy asks for; what is saved already is uploaded."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager, EveryNSteps(2)))
    preemption.notice, preemption.save_wanted = notice(), False
    loop.step_end(2)
    assert (loop.control.should_training_stop, loop.control.should_save) == (True, False)
    with pytest.raises(SystemExit):
        loop.end()
    assert (manager.saves, len(manager.close_calls)) == ([], 1)


def test_a_second_signal_after_the_decision_changes_nothing(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """Other ranks would save, and wait for this one."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager))
    preemption.notice = notice()
    loop.step_end(2)
    preemption.save_wanted = False
    loop.save()
    assert [save["step"] for save in manager.saves] == [2]


@pytest.mark.parametrize("event", ["on_step_end", "on_substep_end", "on_prediction_step"])
def test_when_time_is_up_the_process_leaves_at_once(
    fake_manager: Fake, preemption: Any, notice: Fake, caplog: pytest.LogCaptureFixture, event: str
) -> None:
    """In the middle of an evaluation as well, which Hugging Face's Trainer cannot leave; without a save, and without a wait."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager))
    preemption.notice, preemption.left_s = notice(), 0.0
    loop.state.global_step = 7
    with pytest.raises(SystemExit) as ended:
        loop.call(event)
    assert ended.value.code == 143
    assert (manager.saves, manager.close_calls) == ([], [0.0])
    assert preemption.calls == ["install", "uninstall"]
    assert "what was done since the last save, up to step 7, is lost" in caplog.text


def test_leaving_does_not_depend_on_the_manager(
    fake_manager: Fake, preemption: Any, notice: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A close that fails is logged; the machine goes all the same."""
    manager = fake_manager(preemption=preemption)

    def fail(timeout_s: float | None = None) -> None:
        raise CheckpointError("the disk is gone")

    monkeypatch.setattr(manager, "close", fail)
    loop = began(SaveModelCallback(manager))
    preemption.notice, preemption.left_s = notice(), 0.0
    with pytest.raises(SystemExit):
        loop.call("on_substep_end")
    assert "the disk is gone" in caplog.text


@pytest.mark.parametrize("event", ["on_substep_end", "on_prediction_step"])
def test_with_time_left_the_edge_is_waited_for(fake_manager: Fake, preemption: Any, notice: Fake, event: str) -> None:
    """Nothing is decided between two edges, for other ranks may be elsewhere; but uploads hurry."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager))
    preemption.notice = notice()
    loop.call(event)
    loop.call(event)
    assert not loop.control.should_training_stop
    assert (manager.saves, manager.hurried, manager.close_calls) == ([], [20.0], [])


def test_a_notice_during_an_evaluation_counts_after_it(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """The step is saved with the metrics, and training ends."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager))
    loop.step_end(3)
    preemption.notice = notice("sigusr1")
    loop.call("on_evaluate", metrics={"eval_loss": 0.5})
    assert loop.control.should_training_stop
    loop.save()
    assert [(save["reasons"], save["metrics"]) for save in manager.saves] == [(("sigusr1",), {"eval_loss": 0.5})]


class TestEvaluation:
    """An evaluation that is due at the step of the notice."""

    def due(self, manager: Any, preemption: Any, *, took_s: float | None, left_s: float) -> bool:
        """Whether it is still due after the step's end."""
        now = [0.0]
        loop = began(SaveModelCallback(manager, clock=lambda: now[0]))
        if took_s is not None:
            loop.control.should_evaluate = True
            loop.step_end(1)
            loop.control.should_evaluate = False
            now[0] += took_s
            loop.call("on_evaluate", metrics={})
        preemption.notice, preemption.left_s = preemption.given, left_s
        loop.control.should_evaluate = True
        loop.step_end(2)
        return bool(loop.control.should_evaluate)

    @pytest.mark.parametrize(("took_s", "left_s", "due"), [(None, 1e6, False), (9.0, 20.0, True), (11.0, 20.0, False)])
    def test_it_is_left_out_unless_it_leaves_half_of_the_time(
        self, fake_manager: Fake, preemption: Any, notice: Fake, took_s: float | None, left_s: float, due: bool
    ) -> None:
        """Hugging Face's Trainer evaluates before it saves. With it, the resumed run equals the uninterrupted one; without it, the save is safe."""
        preemption.given = notice()
        manager = fake_manager(preemption=preemption)
        assert self.due(manager, preemption, took_s=took_s, left_s=left_s) is due


class TestHostThatLooksItself:
    """The embedded Trainer looks at more edges than callbacks see, leaves an evaluation in the middle, and evaluates again after the resume."""

    def test_it_is_given_the_preemption(self, fake_manager: Fake, preemption: Any) -> None:
        """Through the dispatcher as well."""
        callback = SaveModelCallback(fake_manager(preemption=preemption))
        assert callback.preemption is preemption
        assert CallbackManager([callback]).preemption is preemption
        assert SaveModelCallback(fake_manager(), preemption=False).preemption is None

    def test_nothing_is_decided_for_it(self, fake_manager: Fake, preemption: Any, notice: Fake) -> None:
        """Neither a flag nor a collective: it has asked the other ranks itself."""
        loop = began(SaveModelCallback(fake_manager(preemption=preemption)), TrainerControl())
        preemption.notice = notice()
        preemption.agreed = None
        loop.control.should_evaluate = True
        loop.step_end(2)
        loop.call("on_evaluate", metrics={})
        loop.call("on_epoch_end")
        assert loop.control == TrainerControl(should_evaluate=True)
        assert loop.callback.failures == 0

    def test_it_saves_with_the_reason(self, fake_manager: Fake, preemption: Any, notice: Fake) -> None:
        """The last edge, besides the reasons that its step had; the process ends after that."""
        manager = fake_manager(preemption=preemption)
        loop = began(SaveModelCallback(manager, EveryNSteps(4)), TrainerControl())
        loop.step_end(4)
        preemption.notice, preemption.left_s = notice(), 9.0
        loop.control.should_interrupt = True
        loop.call("on_save", checkpoint=dict)
        with pytest.raises(SystemExit) as ended:
            loop.call("on_train_end")
        assert ended.value.code == 143
        assert [(save["step"], save["reasons"]) for save in manager.saves] == [(4, ("every_n_steps:4", "sigterm"))]
        assert manager.close_calls == [9.0]

    def test_an_edge_that_was_saved_is_not_saved_again(self, fake_manager: Fake, preemption: Any, notice: Fake) -> None:
        """The notice came in the middle of the next step."""
        manager = fake_manager(preemption=preemption)
        loop = began(SaveModelCallback(manager, EveryNSteps(4)), TrainerControl())
        loop.step_end(4)
        loop.save()
        preemption.notice = notice()
        loop.call("on_save", checkpoint=dict)
        assert [save["reasons"] for save in manager.saves] == [("every_n_steps:4",)]


def test_a_training_that_ended_by_itself_is_no_preempted_one(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """The notice came while the last uploads went on: they get the time that is left, and the program goes on."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager))
    loop.control.should_training_stop = True
    loop.step_end(99)
    loop.call("on_epoch_end")
    loop.save()
    preemption.notice, preemption.left_s = notice(), 8.0
    loop.call("on_train_end")
    assert [save["reasons"] for save in manager.saves] == [("train_end",)]
    assert manager.close_calls == [8.0]


def test_a_notice_at_the_last_step_leaves_nothing_to_resume(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """Training is complete: saved, and no exit code that would have it started again."""
    manager = fake_manager(preemption=preemption)
    loop = began(SaveModelCallback(manager))
    preemption.notice = notice()
    loop.control.should_training_stop = True
    loop.step_end(100)
    loop.save()
    loop.end()
    assert [(save["step"], save["reasons"]) for save in manager.saves] == [(100, ("sigterm",))]


def test_others_have_their_end_before_the_process_ends(fake_manager: Fake, preemption: Any, notice: Fake) -> None:
    """A log that is closed last is closed also when training was preempted."""
    ended: list[str] = []

    class Log(Callback):
        priority = 100

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            ended.append("log")

    callbacks = CallbackManager([Log(), SaveModelCallback(fake_manager(preemption=preemption))])
    state, control = TrainerState(global_step=1, max_steps=9), HfControl()
    callbacks.call("on_train_begin", args=None, state=state, control=control)
    preemption.notice = notice()
    callbacks.call("on_step_end", args=None, state=state, control=control)
    with pytest.raises(SystemExit):
        callbacks.call("on_train_end", args=None, state=state, control=control)
    assert ended == ["log"]


def test_whose_preemption_it_is(fake_manager: Fake, preemption: Any) -> None:
    """As asked for, else the manager's, else one with the usual signals, else none."""
    others = type(preemption)()
    loop = began(SaveModelCallback(fake_manager(preemption=preemption), preemption=others))
    loop.call("on_train_end")
    assert (preemption.calls, others.calls) == ([], ["install", "uninstall"])
    began(SaveModelCallback(fake_manager(preemption=preemption), preemption=False)).call("on_train_end")
    assert preemption.calls == []
    assert isinstance(SaveModelCallback(fake_manager(preemption=None)).preemption, Preemption)


def test_a_refused_begin_leaves_no_handler_behind(fake_manager: Fake, preemption: Any) -> None:
    """Hugging Face's Trainer would never call on_train_end."""
    loop = Loop(SaveModelCallback(fake_manager(preemption=preemption, begin_error=CheckpointError("no"))))
    with pytest.raises(CheckpointError):
        loop.call("on_train_begin")
    assert preemption.calls == []


def test_a_spent_failure_budget_ends_the_training_in_order(
    fake_manager: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is logged once, the last step saved, and the process does not exit: its program goes on."""
    manager = fake_manager()
    loop = began(SaveModelCallback(manager))
    loop.step_end(1)
    manager.should_stop = "no durable checkpoint for 60 minutes"
    loop.step_end(2)
    assert loop.control.should_training_stop
    loop.end()
    assert [(save["step"], save["reasons"]) for save in manager.saves] == [(2, ("train_end",))]
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == ["training ends at step 2: no durable checkpoint for 60 minutes"]


class Ranks:
    """Two ranks, of which this is one: `others` says what the other one answers to each question in turn."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *others: bool) -> None:
        self.asked: list[bool] = []
        self.others = list(others)
        monkeypatch.setattr(ranks, "can_agree", lambda: True)
        monkeypatch.setattr(ranks, "any_rank", self.any_rank)

    def any_rank(self, flag: bool) -> bool:
        self.asked.append(flag)
        return flag or (self.others.pop(0) if self.others else False)


class TestRanks:
    """What all ranks must do alike."""

    def test_another_rank_has_had_a_second_signal(
        self, fake_manager: Fake, preemption: Any, notice: Fake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """None of them saves."""
        manager = fake_manager(preemption=preemption)
        loop = began(SaveModelCallback(manager))
        Ranks(monkeypatch, True)
        preemption.notice = notice()
        loop.step_end(1)
        assert (loop.control.should_training_stop, loop.control.should_save) == (True, False)

    def test_on_another_rank_the_evaluation_takes_too_long(
        self, fake_manager: Fake, preemption: Any, notice: Fake, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """None of them evaluates."""
        loop = began(SaveModelCallback(fake_manager(preemption=preemption)))
        loop.callback._stopping._evaluation_s = 0.1
        Ranks(monkeypatch, False, False, True)
        preemption.notice = notice()
        loop.control.should_evaluate = True
        loop.step_end(1)
        assert not loop.control.should_evaluate

    def test_the_budget_is_asked_for_now_and_then(self, fake_manager: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another rank than the main one learns of it by the answer alone."""
        manager = fake_manager(should_stop="what it says is the main process's business")
        loop = began(SaveModelCallback(manager))
        loop.state.is_world_process_zero = False
        talk = Ranks(monkeypatch, True)
        for step in range(1, 10):
            loop.step_end(step)
        assert talk.asked == []
        loop.step_end(10)
        assert talk.asked == [False]
        assert loop.control.should_training_stop

    @pytest.mark.parametrize("is_main", [True, False])
    def test_the_main_process_says_when_time_has_come(
        self, fake_manager: Fake, monkeypatch: pytest.MonkeyPatch, is_main: bool
    ) -> None:
        """EveryMinutes: clocks differ, and a rank that saves alone waits for ever."""
        now = [0.0]
        loop = began(SaveModelCallback(fake_manager(), EveryMinutes(1), clock=lambda: now[0]))
        loop.step_end(1)
        loop.state.is_world_process_zero = is_main
        talk = Ranks(monkeypatch, not is_main)
        # By its own clock the main process is due, the other one not yet; and the reverse is of no account.
        now[0] = 61.0 if is_main else 30.0
        loop.step_end(2)
        assert (talk.asked, loop.control.should_save) == ([is_main], True)
        loop.control.should_save = False
        now[0] += 61.0 if not is_main else 1.0
        loop.step_end(3)
        assert (talk.asked[1], loop.control.should_save) == (False, False)
