"""CheckpointManager: save, restore, begin, list, status, close, and what it refuses."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.core.errors import (
    CheckpointNotFoundError,
    ConfigError,
    ConflictError,
    DiskFullError,
    IncompatibleStateError,
    IntegrityError,
    NotCommittedError,
)
from ckptmgr.core.policies import Best, Evaluated, EveryNSteps, StepEnded
from ckptmgr.core.retention import KeepLast
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.resume import resume
from ckptmgr.training.manager import CheckpointManager


class Toy:
    """A tiny training: a model, its optimizer, and plain values."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.rand(4, 3)).square().sum().backward()
        self.optimizer.step()

    def state(self, **values: Any) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": {"seen": 17, **values}}

    def numbers(self) -> list[float]:
        return [number for parameter in self.model.parameters() for number in parameter.detach().flatten().tolist()]


Make = Callable[..., CheckpointManager]


def steps_in(run_dir: Path) -> list[int]:
    """The steps of the manifests in the store, in their order, closed ones not counted."""
    manifests = [json.loads(path.read_bytes()) for path in sorted((run_dir / "manifests").iterdir())]
    return [int(manifest["id"].split("-")[1]) for manifest in manifests if "closed" not in manifest]


class TestSaveAndRestore:
    def test_what_was_saved_comes_back_bit_for_bit(self, manager: Make, run_dir: Path) -> None:
        """Weights, optimizer, plain values and the random states are those of the save; the bytes come from the local tier."""
        toy = Toy()
        with manager() as saving:
            stem = saving.save(10, toy.state(), epoch=0.5, metrics={"eval_loss": 1.5}, reasons=["because"])
        expected = toy.numbers()
        draws = torch.rand(3)
        toy.step()

        other = Toy(seed=1)
        with manager() as restoring:
            restored = restoring.restore(other.state())
        assert restored is not None
        assert torch.equal(torch.rand(3), draws)
        assert other.numbers() == expected
        assert restored.report.values["progress"] == {"seen": 17}
        assert set(restored.report.restored) == {"model", "optimizer", "progress", "rng"}
        assert (restored.id, restored.step, restored.epoch, restored.source) == (stem, 10, 0.5, "local")
        assert restored.metrics == {"eval_loss": 1.5}
        # It trains on as the first one did.
        torch.manual_seed(3)
        other.step()
        with manager() as again:
            toy_again = Toy(seed=2)
            again.restore(toy_again.state())
        torch.manual_seed(3)
        toy_again.step()
        assert toy_again.numbers() == other.numbers()
        assert [path for path in (Path(again.local_dir) / "resumed").rglob("*") if path.is_file()] == []

    def test_another_machine_restores_from_the_store(self, manager: Make, tmp_path: Path) -> None:
        """Nothing is left but the store."""
        toy = Toy()
        with manager() as saving:
            saving.save(10, toy.state())
        shutil.rmtree(tmp_path / "disk")
        other = Toy(seed=1)
        with manager() as restoring:
            restored = restoring.restore(other.state())
        assert restored is not None
        assert restored.source == "remote"
        assert other.numbers() == toy.numbers()

    def test_what_another_life_left_unsynced_is_never_used(
        self, manager: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A restore syncs nothing of its own copy, so a power cut may leave any bytes under the names of whole ones, and the process may have the
        same number again."""
        toy = Toy()
        with manager() as saving:
            saving.save(10, toy.state())
        shutil.rmtree(tmp_path / "disk")
        synced: list[str] = []
        fsync = os.fsync

        def noted(fd: int) -> None:
            synced.append(os.readlink(f"/proc/self/fd/{fd}"))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noted)
        other = Toy(seed=1)
        with manager() as restoring:
            left = Path(restoring.local_dir) / "resumed" / str(os.getpid()) / "checkpoint-10"
            left.mkdir(parents=True)
            (left / "model.safetensors").write_bytes(bytes(1000))
            restored = restoring.restore(other.state())
        assert restored is not None
        assert other.numbers() == toy.numbers()
        assert not left.exists()
        assert [path for path in synced if "/resumed/" in path] == []

    def test_a_run_without_data_restores_nothing(self, manager: Make) -> None:
        """None, not an error, and the state is untouched."""
        toy = Toy()
        before = toy.numbers()
        with manager() as fresh:
            assert fresh.restore(toy.state()) is None
            assert fresh.resume_path() is None
            assert toy.numbers() == before
            assert fresh.save(1, toy.state()) is not None

    def test_a_run_with_only_uncommitted_data_is_not_empty(self, manager: Make, run_dir: Path) -> None:
        """Data without a manifest is no checkpoint, and no start from scratch either, unless asked for."""
        with manager() as first:
            first.begin()
        loose = run_dir / "checkpoints" / "000001-000000000010-000001-0123abcd" / "model.safetensors"
        loose.parent.mkdir(parents=True)
        loose.write_bytes(b"half")
        with manager() as refused, pytest.raises(NotCommittedError):
            refused.restore(Toy().state())
        with manager(on_existing="new-lineage") as allowed:
            assert allowed.restore(Toy().state()) is None
            allowed.save(1, Toy().state())
        assert loose.read_bytes() == b"half"
        assert steps_in(run_dir) == [1]

    def test_a_damaged_newest_is_passed_over_and_named(self, manager: Make, tmp_path: Path, run_dir: Path) -> None:
        """Both copies of the newest are damaged: the older one is restored, and `skipped` says why."""
        toy = Toy()
        with manager(keep_local=KeepLast(9)) as saving:
            old = saving.save(10, toy.state())
            expected = toy.numbers()
            toy.step()
            new = saving.save(20, toy.state())
        for root in (run_dir, tmp_path / "disk"):
            (path,) = root.glob(f"checkpoints/{new}/model.safetensors")
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        other = Toy(seed=1)
        with manager() as restoring:
            restored = restoring.restore(other.state())
        assert restored is not None
        assert (restored.id, [skipped for skipped, _ in restored.skipped]) == (old, [new])
        assert "model.safetensors" in restored.skipped[0][1]
        assert other.numbers() == expected
        with manager() as explicit, pytest.raises(IntegrityError):
            explicit.restore(other.state(), "20")

    def test_a_selector_chooses(self, manager: Make) -> None:
        """A step, the best metric, an id; one that matches nothing is an error."""
        toy = Toy()
        with manager(keep_local=KeepLast(9)) as saving:
            ids = [saving.save(step, toy.state(), metrics={"eval_loss": loss}) for step, loss in ((10, 1.0), (20, 2.0))]
        for selector, wanted in (
            ("latest", ids[1]),
            ("10", ids[0]),
            ("best:eval_loss", ids[0]),
            (f"id:{ids[1]}", ids[1]),
        ):
            with manager() as restoring:
                restored = restoring.restore(toy.state(), selector)
                assert restored is not None
                assert restored.id == wanted
        with manager() as restoring:
            with pytest.raises(CheckpointNotFoundError):
                restoring.restore(toy.state(), "15")
            with pytest.raises(ConfigError):
                restoring.restore(toy.state(), "newest please")

    def test_a_checkpoint_that_lacks_a_piece_is_refused_unless_asked(self, manager: Make) -> None:
        """Strict by default; else the missing piece is reported."""
        toy = Toy()
        with manager() as saving:
            saving.save(10, {"model": toy.model})
        with manager() as restoring:
            with pytest.raises(IncompatibleStateError):
                restoring.restore(toy.state())
            restored = restoring.restore(toy.state(), strict=False)
        assert restored is not None
        assert set(restored.report.missing) == {"optimizer", "progress"}

    def test_a_save_takes_a_copy(self, manager: Make) -> None:
        """What training does to the tensors afterwards is not in the checkpoint."""
        toy = Toy()
        expected = toy.numbers()
        with manager() as saving:
            saving.save(10, toy.state())
            with torch.no_grad():
                for parameter in toy.model.parameters():
                    parameter.zero_()
        with manager() as restoring:
            restoring.restore(toy.state())
        assert toy.numbers() == expected

    def test_a_failed_save_leaves_nothing(self, manager: Make, tmp_path: Path, run_dir: Path) -> None:
        """A state that cannot be saved is refused by name; the next save is as if it had not been."""
        toy = Toy()
        with manager() as saving:
            first = saving.save(10, toy.state())
            with pytest.raises(ConfigError, match="progress"):
                saving.save(20, toy.state(bad=object()))
            second = saving.save(30, toy.state())
        assert steps_in(run_dir) == [10, 30]
        names = {path.name for path in (tmp_path / "disk/checkpoints").iterdir()}
        assert names <= {first, second}


class TestLookingAndEnding:
    def test_list_is_the_lineage_oldest_first(self, manager: Make) -> None:
        """Manifests with their facts."""
        with manager() as saving:
            assert saving.list() == []
            saving.save(10, Toy().state(), reasons=["a"])
            saving.save(20, Toy().state(), metrics={"eval_loss": 0.5}, metric_modes={"eval_loss": "min"})
        found = manager().list()
        assert [(m.step, m.reasons, dict(m.metrics)) for m in found] == [
            (10, ("a",), {}),
            (20, ("requested",), {"eval_loss": 0.5}),
        ]
        assert dict(found[1].metric_modes) == {"eval_loss": "min"}
        assert found[1].producer["torch"] == str(torch.__version__)

    def test_status_before_during_and_after(self, manager: Make, run_dir: Path, tmp_path: Path) -> None:
        """The run, the attempt, and what was committed."""
        saving = manager()
        before = saving.status()
        assert (before.attempt, before.superseded, before.uploads.pending) == (None, False, ())
        assert before.run == RunDirectory.open_or_create(str(run_dir)).url
        assert before.local_dir == str(tmp_path / "disk")
        saving.save(10, Toy().state())
        report = saving.close()
        assert (report.pending, report.errors) == ((), ())
        after = saving.status()
        assert (after.attempt, after.uploads.pending, after.uploads.committed) == (1, (), 1)
        assert (after.uploads.failures, after.uploads.last_error) == (0, "")

    def test_close_is_final_and_may_be_repeated(self, manager: Make) -> None:
        """A closed manager saves no more."""
        saving = manager()
        saving.save(10, Toy().state())
        assert saving.close() == saving.close()
        with pytest.raises(ConflictError, match="closed"):
            saving.save(20, Toy().state())
        # A second training with it, which would save nothing, is told before its first step.
        with pytest.raises(ConflictError, match="closed"):
            saving.begin()

    def test_the_context_closes_also_after_an_exception(self, manager: Make, run_dir: Path) -> None:
        """What was saved before the crash is uploaded."""

        def train() -> float:
            with manager() as saving:
                saving.save(10, Toy().state())
                return 1 / 0

        with pytest.raises(ZeroDivisionError):
            train()
        assert steps_in(run_dir) == [10]

    def test_the_policy_of_a_plain_loop_remembers_over_a_restart(self, manager: Make) -> None:
        """The best of before the restart still counts."""
        policy = EveryNSteps(10) | Best("eval_loss", mode="min")
        with manager(save=policy) as first:
            assert first.should_save(StepEnded(step=7)) == ()
            assert first.should_save(Evaluated(step=10, metrics={"eval_loss": 1.0})) == ("best:eval_loss",)
            assert first.should_save(StepEnded(step=10)) == ("every_n_steps:10",)
            first.save(10, Toy().state())
        with manager(save=policy) as second:
            restored = second.restore(Toy().state())
            assert restored is not None
            assert "best:eval_loss" not in second.should_save(Evaluated(step=20, metrics={"eval_loss": 2.0}))
            assert second.should_save(Evaluated(step=30, metrics={"eval_loss": 0.5})) == ("best:eval_loss",)
        with manager(on_existing="new-lineage") as without_policy:
            assert without_policy.should_save(StepEnded(step=10)) == ()


def test_a_save_that_fails_does_not_end_a_plain_loop(
    manager: Callable[..., CheckpointManager], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I9: it is logged at once, counted and readable; the next save works, and who wants the error can have it."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise DiskFullError("cannot write model.pt: no space left", hint="free some space")

    with manager() as saving:
        with monkeypatch.context() as patch:
            patch.setattr("ckptmgr.training.state.write", full)
            assert saving.save(1, {"n": {"value": 1}}, wait=True) is None
        assert "step 1 was not saved (failure 1), training goes on: cannot write model.pt" in caplog.text
        assert saving.status().save_failures == 1
        assert "no space left" in saving.status().last_save_error
        assert saving.save(2, {"n": {"value": 2}}) is not None
    with manager(on_save_error="raise") as strict:
        strict.restore({"n": {}})
        monkeypatch.setattr("ckptmgr.training.state.write", full)
        with pytest.raises(DiskFullError):
            strict.save(3, {"n": {"value": 3}}, wait=True)
        strict.save(4, {"n": {"value": 4}})
        assert strict.wait_saved(30)
        with pytest.raises(DiskFullError):  # of the save before
            strict.save(5, {"n": {"value": 5}})


def test_the_status_asks_no_store(manager: Callable[..., CheckpointManager], run_dir: Path) -> None:
    """What failed stays readable when the store is the thing that fails."""
    with manager() as saving:
        saving.save(1, {"n": {"value": 1}})
        run_dir.rename(run_dir.with_name("unmounted"))
        assert saving.status().attempt == 1
        assert saving.status().superseded is False
        run_dir.with_name("unmounted").rename(run_dir)


def _saved(manager: Callable[..., CheckpointManager], *steps: int) -> None:
    with manager() as saving:
        saving.restore({"n": {}})
        for step in steps:
            saving.save(step, {"n": {"value": step}})


def _resumed_by_command(run_dir: Path, selector: str, to: Path) -> None:
    resume(RunDirectory.open(str(run_dir)), parse_selector(selector), to=to)


def test_a_rewind_by_command_is_what_restore_gives(
    manager: Callable[..., CheckpointManager], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ckptmgr resume RUN 1 -- COMMAND`: the command's `restore` gets 1, not the newest, and begins a lineage there."""
    _saved(manager, 1, 2, 3)
    _resumed_by_command(run_dir, "1", tmp_path / "one")
    monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(tmp_path / "one"))
    with manager() as saving:
        restored = saving.restore({"n": {}})
        assert restored is not None
        assert restored.step == 1
        assert restored.report.values["n"] == {"value": 1}
        saving.save(2, {"n": {"value": 22}})
    assert (tmp_path / "one").is_dir()
    with manager() as restarted:
        again = restarted.restore({"n": {}})
        assert again is not None
        # A restart within the same COMMAND goes on from there, not back to 1 again.
        assert again.report.values["n"] == {"value": 22}


def test_an_automatic_resume_by_command_never_takes_a_restart_back(
    manager: Callable[..., CheckpointManager], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest when COMMAND began is not the newest when one of its processes is started again."""
    _saved(manager, 1)
    _resumed_by_command(run_dir, "latest", tmp_path / "one")
    monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(tmp_path / "one"))
    _saved(manager, 2)
    with manager() as restarted:
        restored = restarted.restore({"n": {}})
        assert restored is not None
        assert restored.step == 2


@pytest.mark.parametrize("attempt", ["3", None])
def test_a_rewind_by_command_counts_once_over_all_restarts(
    attempt: str | None,
    manager: Callable[..., CheckpointManager],
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second restart goes on from the first one's save, not back to 1. `attempt`: as COMMAND is told, or not, by an older version."""
    _saved(manager, 1, 2, 3)
    _saved(manager, 4)
    _saved(manager, 5)
    _resumed_by_command(run_dir, "1", tmp_path / "one")
    monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(tmp_path / "one"))
    if attempt is not None:
        monkeypatch.setenv("CKPTMGR_RESUME_ATTEMPT", attempt)
    for step in (2, 3, 4):
        with manager() as restarted:
            restored = restarted.restore({"n": {}})
            assert restored is not None
            assert restored.step == step - 1
            restarted.save(step, {"n": {"value": 10 * step}})


def test_the_same_rewind_can_be_asked_for_again(
    manager: Callable[..., CheckpointManager], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands, one after the other, both from 1: the second one's `restore` gets 1, too, and only its own restart what was saved since."""
    _saved(manager, 1, 2)
    for number in (1, 2):
        resumed = resume(RunDirectory.open(str(run_dir)), parse_selector("1"), to=tmp_path / f"{number}")
        assert resumed.attempt == number
        monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(resumed.path))
        monkeypatch.setenv("CKPTMGR_RESUME_ATTEMPT", str(resumed.attempt))
        with manager() as saving:
            restored = saving.restore({"n": {}})
            assert restored is not None
            assert restored.step == 1
            saving.save(3, {"n": {"value": number}})
    newer = manager().newer_than(tmp_path / "2")
    assert newer is not None
    assert json.loads((newer / "n.json").read_bytes()) == {"value": 2}


def test_only_the_path_of_the_command_is_replaced(
    manager: Callable[..., CheckpointManager], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that the user has written down is the user's decision; said at the begin if it leaves something behind."""
    _saved(manager, 1)
    _resumed_by_command(run_dir, "latest", tmp_path / "one")
    assert manager().newer_than(tmp_path / "one") is None
    monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(tmp_path / "one"))
    assert manager().newer_than(tmp_path / "one") is None
    _saved(manager, 2)
    assert manager().newer_than(tmp_path / "other") is None
    newer = manager().newer_than(tmp_path / "one")
    assert newer is not None
    assert json.loads((newer / "n.json").read_bytes()) == {"value": 2}


def test_going_back_is_said(
    manager: Callable[..., CheckpointManager], run_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An old path of an automatic resume; not so for a rewind that was asked for."""
    _saved(manager, 1)
    _resumed_by_command(run_dir, "latest", tmp_path / "one")
    _saved(manager, 2)
    with manager() as saving:
        saving.begin(resume_from=tmp_path / "one")
    assert "training goes on from 000001-000000000001" in caplog.text
    caplog.clear()
    _resumed_by_command(run_dir, "1", tmp_path / "rewound")
    with manager() as saving:
        saving.begin(resume_from=tmp_path / "rewound")
    assert "training goes on from" not in caplog.text


def test_a_rewind_whose_directory_was_changed_is_refused(
    manager: Callable[..., CheckpointManager], run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I5: nothing is loaded from bytes that are not the checkpoint's (any more)."""
    _saved(manager, 1, 2)
    _resumed_by_command(run_dir, "1", tmp_path / "one")
    (tmp_path / "one" / "n.json").write_text('{"value": 7}')
    monkeypatch.setenv("CKPTMGR_RESUME_FROM", str(tmp_path / "one"))
    with manager() as saving, pytest.raises(IntegrityError, match=r"n\.json"):
        saving.restore({"n": {}})


def test_a_training_that_saves_to_another_run_than_the_one_resumed_is_told(
    manager: Callable[..., CheckpointManager],
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """`ckptmgr resume A -- train`, where the training's own configuration says B: once, with both."""
    monkeypatch.setenv("CKPTMGR_RESUME_RUN", f"file://{run_dir}")
    with manager() as right:
        right.begin()
    assert "ckptmgr resume" not in caplog.text
    monkeypatch.setenv("CKPTMGR_RESUME_RUN", f"file://{run_dir}-other")
    with manager() as wrong:
        wrong.begin()
        wrong.list()
    told = [record.getMessage() for record in caplog.records if "ckptmgr resume" in record.getMessage()]
    assert told == [
        f"`ckptmgr resume file://{run_dir}-other` has started this process, which uses the run file://{run_dir}: is one of them a mistake?"
    ]
