"""K125: a training that a callback ended early stays ended when it is resumed, unless it is told to go on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr import CheckpointManager, EveryNSteps
from ckptmgr.callbacks import Callback, CallbackManager, Priority, SaveModelCallback, TrainerControl, TrainerState
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training import state as training_state


class EarlyStopping(Callback):
    """Ends a training at the n-th evaluation, which it counts over all of the run."""

    priority = Priority.STOP

    def __init__(self, at: int = 6) -> None:
        self.at = at
        self.evaluations = 0

    def on_evaluate(self, control: TrainerControl, **kwargs: Any) -> None:
        self.evaluations += 1
        if self.evaluations == self.at:
            control.should_training_stop = True

    def state_dict(self) -> dict[str, Any]:
        return {"evaluations": self.evaluations}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluations = state["evaluations"]


class Events(Callback):
    """The names of the hooks that were called."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_begin(self, **kwargs: Any) -> None:
        self.seen.append("train_begin")

    def on_step_begin(self, **kwargs: Any) -> None:
        self.seen.append("step_begin")

    def on_train_end(self, **kwargs: Any) -> None:
        self.seen.append("train_end")


class Saves(Callback):
    """Saves every step into a directory of its own; knows what the state said at each."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.stopped: dict[int, str | None] = {}

    def on_epoch_end(self, control: TrainerControl, **kwargs: Any) -> None:
        control.should_save = True

    def on_save(self, state: TrainerState, checkpoint: Any, **kwargs: Any) -> None:
        self.stopped[state.global_step] = state.stopped
        training_state.write(training_state.capture(checkpoint()), self.root / str(state.global_step))


def build(callbacks: Any, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return Trainer(
        model,
        TrainingArguments(**{"eval_steps": 2, "logging_steps": None, **options}),
        train_dataloader=[torch.ones(1, 1)] * 20,
        eval_dataloader=[torch.ones(1, 1)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=callbacks,
    )


def test_k125_it_stays_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stopped at evaluation 6, step 12 of 20: resumed by itself it runs no step, and says why; callbacks see its begin and end."""

    def manager() -> CheckpointManager:
        return CheckpointManager(tmp_path / "run", local_dir=tmp_path / "local", save=EveryNSteps(5), transfer="thread")

    first = build([SaveModelCallback(manager(), preemption=False), EarlyStopping()])
    result = first.train()
    assert (result.global_step, result.stopped) == (12, "EarlyStopping")
    before = first.model.weight.tolist()  # type: ignore[operator]
    events, saving = Events(), manager()
    resumed = build([SaveModelCallback(saving, preemption=False), EarlyStopping(), events])
    result = resumed.train(saving.resume_path())
    assert (result.global_step, result.steps_run, result.stopped) == (12, 0, "EarlyStopping")
    assert events.seen == ["train_begin", "train_end"]
    assert resumed.model.weight.tolist() == before  # type: ignore[operator]
    assert "already stopped (EarlyStopping): step 12 was the last" in caplog.text


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_k125_it_goes_on_when_told(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the end, and then it is not stopped any more."""
    build([Saves(tmp_path), EarlyStopping()]).train()
    if how == "environment":
        monkeypatch.setenv("CKPTMGR_CONTINUE_STOPPED", "1")
    saves = Saves(tmp_path)
    trainer = build([saves, EarlyStopping()], continue_stopped=how == "argument")
    result = trainer.train(tmp_path / "12")
    assert (result.global_step, result.steps_run, result.stopped) == (20, 8, None)
    assert saves.stopped == {20: None}


def test_saves_before_the_stop_are_not_stopped(tmp_path: Path) -> None:
    """The save of the edge at which it stopped says so; one before it leads to the same stop."""
    saves = Saves(tmp_path)

    class Early(Callback):
        priority = Priority.FIRST

        def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_save = state.global_step == 11

    build([Early(), saves, EarlyStopping()]).train()
    assert saves.stopped == {11: None, 12: "EarlyStopping"}
    again = build([EarlyStopping()]).train(tmp_path / "11")
    assert (again.steps_run, again.stopped) == (1, "EarlyStopping")


def test_looking_at_a_stopped_training_does_not_start_it_again(tmp_path: Path) -> None:
    """Evaluating and predicting after `restore` call hooks too."""
    build([Saves(tmp_path), EarlyStopping()]).train()
    trainer = build([EarlyStopping()])
    trainer.restore(tmp_path / "12")
    trainer.evaluate()
    assert trainer.train().steps_run == 0


def test_an_end_that_a_restart_gets_over_is_no_stop(tmp_path: Path) -> None:
    """A limit of time, say: the resumed run goes on by itself."""

    class Limit(Callback):
        stop_is_final = False

        def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    result = build([Saves(tmp_path), Limit()]).train()
    assert (result.global_step, result.stopped) == (3, None)
    assert build([]).train(tmp_path / "3").global_step == 20


def test_the_last_step_and_an_interruption_are_no_stop(tmp_path: Path) -> None:
    """max_steps may be raised later; a preemption is gone on from."""
    saves = Saves(tmp_path)
    assert build([saves], max_steps=4).train().stopped is None
    assert saves.stopped == {4: None}
    assert build([]).train(tmp_path / "4").steps_run == 16

    class Notice(Callback):
        def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_interrupt = state.global_step == 3

    interrupted = build([Notice(), saves]).train()
    assert (interrupted.interrupted, interrupted.stopped) == (True, None)
    assert saves.stopped[3] is None


def test_a_stop_that_is_taken_back_is_none(tmp_path: Path) -> None:
    """A later callback of the same event clears the flag."""

    class Back(Callback):
        priority = Priority.LOG

        def on_evaluate(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop = False

    result = build([EarlyStopping(1), Back()]).train()
    assert (result.global_step, result.stopped) == (20, None)


def test_the_name_comes_through_a_manager_of_callbacks() -> None:
    """A group of callbacks is itself one callback; named is the one that stopped, and a temporary end in it is none."""
    assert build([CallbackManager([EarlyStopping(1)])]).train().stopped == "EarlyStopping"
    lasting = EarlyStopping(1)
    lasting.stop_is_final = False
    assert build([CallbackManager([lasting])]).train().stopped is None


def test_a_failed_upload_budget_is_no_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """SaveModelCallback ends a training whose uploads fail for too long: the next start goes on."""
    caplog.set_level(logging.CRITICAL)
    manager = CheckpointManager(tmp_path / "run", local_dir=tmp_path / "local", transfer="thread")
    type_of = type(manager)

    class Failing(type_of):  # type: ignore[valid-type, misc]
        should_stop = "uploads have failed for an hour"

    manager.__class__ = Failing
    result = build([SaveModelCallback(manager, preemption=False)]).train()
    assert (result.global_step, result.stopped) == (1, None)
