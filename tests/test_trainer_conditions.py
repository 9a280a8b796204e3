"""What the embedded Trainer trains under: in the manifest of each checkpoint, compared when it resumes; and what its evaluations carry on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from ckptmgr import CheckpointManager, EveryNSteps
from ckptmgr.callbacks import Callback, SaveModelCallback, TrainerState
from ckptmgr.core.conditions import Drift
from ckptmgr.core.errors import ConfigError, DriftError, IncompatibleStateError
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training import state as training_state


def data(size: int = 12) -> TensorDataset:
    return TensorDataset(torch.arange(float(size)).unsqueeze(1))


def build(
    callbacks: Any = (), *, rows: Any = None, batch_size: int = 2, evaluation: Any = None, **options: Any
) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return Trainer(
        model,
        TrainingArguments(**{"logging_steps": None, **options}),
        train_dataloader=DataLoader(data() if rows is None else rows, batch_size=batch_size, shuffle=True),
        eval_dataloader=evaluation,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss_fn=lambda model, batch: model(batch[0]).square().mean(),
        callbacks=callbacks,
    )


def manager(root: Path) -> CheckpointManager:
    return CheckpointManager(root / "run", local_dir=root / "local", save=EveryNSteps(3), transfer="thread")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a checkpoint as a resume makes it, its manifest beside it."""
    build([SaveModelCallback(manager(tmp_path), preemption=False)], max_steps=3).train()
    path = manager(tmp_path).resume_path()
    assert path is not None
    return path


def test_a_manifest_says_what_the_trainer_knows(saved: Path) -> None:
    """Read from the file beside the checkpoint, as any tool would."""
    conditions = json.loads(saved.with_name(f"{saved.name}.ckptmgr.json").read_bytes())["conditions"]
    assert {name: conditions[name] for name in ("world_size", "batch_size", "accumulation", "dataset_length")} == {
        "world_size": 1,
        "batch_size": 2,
        "accumulation": 1,
        "dataset_length": 12,
    }
    assert len(conditions["dataset_fingerprint"]) == 32
    assert conditions["versions"]["torch"] == metadata.version("torch")
    assert conditions["pieces"]["optimizer"] == "torch.optim.sgd.SGD"


def test_nothing_has_changed(saved: Path) -> None:
    """The same training elsewhere: no drift, all pieces, and the first batch is the expected one."""
    result = build().train(saved)
    assert result.restored is not None
    assert (result.restored.drift, result.restored.changed, result.restored.missing) == ((), (), ())
    assert result.restored.restored == ("model", "optimizer", "trainer", "data", "callbacks", "rng")
    assert (result.steps_run, result.first_batch) == (3, "equal")


def test_what_has_changed_is_said(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the report, and in the log a line for each; training goes on."""
    report = build(rows=data(16), batch_size=4, gradient_accumulation_steps=2).restore(saved)
    now = {each.what: each for each in report.drift}
    assert now.keys() == {"batch_size", "accumulation", "dataset_length", "dataset_fingerprint"}
    assert now["batch_size"] == Drift(what="batch_size", saved="2", now="4")
    assert "changed: accumulation: 1 in the checkpoint, 2 now" in caplog.text
    assert "changed: dataset_length: 12 in the checkpoint, 16 now" in caplog.text


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_chosen_changes_are_refused(how: str, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded, with both values; others are still only said."""
    options: dict[str, Any] = {}
    if how == "argument":
        options["refuse_drift"] = ("batch_size",)
    else:
        monkeypatch.setenv("CKPTMGR_REFUSE_DRIFT", "batch_size")
    trainer = build(batch_size=4, **options)
    before = trainer.model.state_dict()["weight"].clone()
    with pytest.raises(DriftError, match="batch_size: 2 in the checkpoint, 4 now"):
        trainer.train(saved)
    assert torch.equal(trainer.model.state_dict()["weight"], before)
    assert trainer.state.global_step == 0
    assert build(gradient_accumulation_steps=2, **options).train(saved).steps_run == 2


def test_a_drift_that_does_not_exist_is_refused() -> None:
    """A misspelled one would never be found."""
    with pytest.raises(ConfigError, match="batchsize"):
        TrainingArguments(refuse_drift=["batchsize"])


def test_a_directory_of_another_time_has_no_conditions(saved: Path, tmp_path: Path) -> None:
    """A sidecar of a checkpoint that is gone lies beside another one: it says nothing about that."""
    other = tmp_path / "other"
    build([Saves(other)], max_steps=2, eval_steps=2, evaluation=DataLoader(data(2))).train()
    (other / "2").rename(saved.with_name("2"))
    saved.with_name(f"{saved.name}.ckptmgr.json").rename(saved.with_name("2.ckptmgr.json"))
    report = build(batch_size=4).restore(saved.with_name("2"))
    assert report.drift == ()


def test_other_data_is_noticed_at_its_first_batch(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A dataset whose content changed: a run goes on with an error in its log, or ends before its first step."""
    changed = data()
    changed.tensors[0].add_(0.5)
    result = build(rows=changed).train(saved)
    assert (result.steps_run, result.first_batch) == (3, "different")
    assert "is not the one that the checkpoint expected" in caplog.text
    with pytest.raises(IncompatibleStateError, match="not the one that the checkpoint expected"):
        build(rows=changed, on_data_mismatch="raise").train(saved)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 1)])
def test_k001_another_accumulation_trains_as_many_epochs(before: int, after: int, saved: Path, tmp_path: Path) -> None:
    """K001: the rest of the data is what is left, whatever a step is made of now."""

    used: list[int] = []

    def make(callbacks: Any, accumulation: int) -> Trainer:
        trainer = build(
            callbacks, rows=data(24), num_train_epochs=2, gradient_accumulation_steps=accumulation, batch_size=1
        )

        def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            used.append(int(batch[0]))
            return model(batch[0]).square().mean()  # type: ignore[no-any-return]

        trainer._loss_fn = loss_fn
        return trainer

    root = tmp_path / "saves"
    assert make([Saves(root, at=24 // before)], before).train().global_step == 48 // before
    used.clear()
    trainer = make([], after)
    result = trainer.train(root / f"{24 // before}")
    assert sorted(used) == list(range(24))
    assert result.epoch == 2.0
    assert result.global_step == trainer.state.max_steps == 24 // before + 24 // after


class Saves(Callback):
    """Saves at a step, or at the end, into a directory of its own."""

    def __init__(self, root: Path, at: int | None = None) -> None:
        self.root = root
        self.at = at

    def on_step_end(self, state: TrainerState, control: Any, **kwargs: Any) -> None:
        control.should_save = control.should_training_stop if self.at is None else state.global_step == self.at

    def on_save(self, state: TrainerState, checkpoint: Any, **kwargs: Any) -> None:
        training_state.write(training_state.capture(checkpoint()), self.root / str(state.global_step))


def test_a_process_that_is_started_again_is_not_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`torchrun --max-restarts` within one COMMAND: CKPTMGR_RESUME_FROM still names the checkpoint that was the newest at first."""
    options: dict[str, Any] = {"num_train_epochs": 2}

    class Dies(Callback):
        def on_step_begin(self, state: TrainerState, **kwargs: Any) -> None:
            if state.global_step == 8:
                raise KeyboardInterrupt

    build([SaveModelCallback(manager(tmp_path), preemption=False)], max_steps=3).train()
    first = manager(tmp_path).resume_path()
    assert first is not None
    named = first.rename(tmp_path / "checkpoint-3")
    first.with_name(f"{first.name}.ckptmgr.json").rename(tmp_path / "checkpoint-3.ckptmgr.json")
    monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(named))
    monkeypatch.setenv("CKPTMGR_RESUME_ATTEMPT", "1")
    with pytest.raises(KeyboardInterrupt):
        build([SaveModelCallback(manager(tmp_path), preemption=False), Dies()], **options).train(named)
    result = build([SaveModelCallback(manager(tmp_path), preemption=False)], **options).train(named)
    assert (result.global_step, result.steps_run) == (12, 6)
    assert "this process was started again: it goes on from" in caplog.text


# --- what evaluations carry on --------------------------------------------------------------------------------------------


def with_generators() -> DataLoader[Any]:
    rows = data(8)
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(5))
    return DataLoader(rows, batch_size=2, sampler=sampler, generator=torch.Generator().manual_seed(6))


def with_workers() -> DataLoader[Any]:
    return DataLoader(data(8), batch_size=2, shuffle=True, num_workers=1, persistent_workers=True)


@pytest.mark.parametrize("make", [with_generators, with_workers])
def test_evaluations_go_on_in_their_own_order(make: Callable[[], DataLoader[Any]], tmp_path: Path) -> None:
    """The order of every evaluation, and of the training between them, is that of the whole run: the first evaluation of a resumed run is not its first."""

    def run(at: int | None = None, resume: Path | None = None) -> list[tuple[str, list[float]]]:
        seen: list[tuple[str, list[float]]] = []
        trainer = build(
            [] if at is None else [Saves(tmp_path, at=at)], evaluation=make(), eval_steps=2, num_train_epochs=2
        )

        def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
            seen.append(("train" if model.training else "evaluation", batch[0].flatten().tolist()))
            return model(batch[0]).square().mean()  # type: ignore[no-any-return]

        trainer._loss_fn = loss_fn
        trainer.train(resume)
        return seen

    whole = run(at=5)
    resumed = run(resume=tmp_path / "5")
    assert resumed == whole[-len(resumed) :]
    assert len(resumed) == 7 + 4 * 4


def test_another_evaluation_loader_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its order cannot come back; training goes on."""
    build([Saves(tmp_path, at=2)], evaluation=with_generators(), eval_steps=2).train()
    result = build(evaluation=DataLoader(data(8)), eval_steps=2).train(tmp_path / "2")
    assert result.steps_run == 4
    assert "the eval_dataloader has 0 generators of its own, the checkpoint was made with 2" in caplog.text


def test_what_is_known_is_what_a_manager_is_told() -> None:
    """Of pieces, those that have conditions are asked; the trainer's piece is one."""
    trainer = build(gradient_accumulation_steps=3)
    assert trainer.pieces()["trainer"].conditions() == trainer.conditions()
    assert replace(trainer.conditions(), dataset_fingerprint=None).as_document() == {
        "world_size": 1,
        "batch_size": 2,
        "accumulation": 3,
        "dataset_length": 12,
    }
