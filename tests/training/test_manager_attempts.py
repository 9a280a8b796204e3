"""CheckpointManager: the attempt that a process claims, what it descends from, what is refused, and what retention leaves."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ckptmgr.core.errors import ConfigError, ConflictError, IncompatibleStateError, ManifestError
from ckptmgr.core.policies import Best, EveryNSteps, StepEnded
from ckptmgr.core.retention import KeepBest, KeepLast
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.run.tier import LocalTier
from ckptmgr.training.manager import CheckpointManager

Make = Callable[..., CheckpointManager]

STATE = {"model": {"w": torch.ones(3)}}


def steps_in(run_dir: Path) -> list[int]:
    """The steps of the manifests in the store, in their order, closed ones not counted."""
    manifests = [json.loads(path.read_bytes()) for path in sorted((run_dir / "manifests").iterdir())]
    return [int(manifest["id"].split("-")[1]) for manifest in manifests if "closed" not in manifest]


class TestBegin:
    def test_a_start_over_commits_is_refused(self, manager: Make, run_dir: Path) -> None:
        """I12: names the newest step; nothing is claimed."""
        with manager() as first:
            first.save(10, STATE)
        attempts = sorted(os.listdir(run_dir / "attempts"))
        with manager() as second, pytest.raises(ConflictError, match="step 10"):
            second.begin()
        assert sorted(os.listdir(run_dir / "attempts")) == attempts
        with pytest.raises(ConfigError, match="on_existing"):
            manager(on_existing="overwrite")

    def test_a_new_lineage_stands_beside_the_old_one(self, manager: Make, run_dir: Path) -> None:
        """Asked for: the old commits stay, the new attempt has no parent, and the next restore finds the new ones."""
        with manager() as first:
            old = first.save(10, STATE)
        with manager(on_existing="new-lineage") as second:
            new = second.save(5, STATE)
        assert [manifest.id for manifest in manager().list()] == [new]
        assert json.loads((run_dir / "attempts/000002.json").read_bytes())["how"] == "fresh"
        assert steps_in(run_dir) == [10, 5]
        with manager() as third:
            restored = third.restore(STATE)
            assert restored is not None
            assert restored.id == new != old

    def test_a_best_that_is_saved_and_not_kept_is_warned_of(
        self, manager: Make, caplog: pytest.LogCaptureFixture
    ) -> None:
        """K104's kind: retention would remove it like any other one, hours after the configuration was written."""
        save = EveryNSteps(5) | Best("eval_loss") | Best("accuracy", mode="max")
        with manager(save=save, keep=KeepLast(1) | KeepBest("eval_loss")) as saving:
            saving.begin()
        (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert line.startswith("checkpoints are saved for their accuracy, and none is kept for it")

    def test_everything_is_kept_or_the_best_is(self, manager: Make, caplog: pytest.LogCaptureFixture) -> None:
        """Nothing to warn of."""
        for keep in (None, KeepBest("eval_loss")):
            with manager(save=Best("eval_loss"), keep=keep) as saving:
                saving.begin()
        assert [record for record in caplog.records if record.levelno == logging.WARNING] == []

    def test_k124_a_rewind_that_died_before_its_first_save_is_not_forgotten(self, manager: Make) -> None:
        """K124: its first step has been told, so the next start goes on from where it had gone back to."""
        with manager() as first:
            first.save(10, STATE)
            first.save(20, STATE)
        with manager(save=EveryNSteps(100)) as looking:
            assert looking.restore(STATE, "10") is not None
        with manager(save=EveryNSteps(100)) as rewound:
            restored = rewound.restore(STATE)
            assert restored is not None
            assert restored.step == 20, "who only looks changes nothing"
        with manager(save=EveryNSteps(100)) as rewound:
            assert rewound.restore(STATE, "10") is not None
            assert rewound.should_save(StepEnded(step=11)) == ()
        with manager() as again:
            restored = again.restore(STATE)
            assert restored is not None
            assert restored.step == 10

    def test_a_plain_loop_that_would_abandon_commits_is_refused_at_its_first_step(self, manager: Make) -> None:
        """I12: not after the hours that it takes to the first save."""
        with manager() as first:
            first.save(10, STATE)
        with manager(save=EveryNSteps(100)) as second, pytest.raises(ConflictError, match="step 10"):
            second.should_save(StepEnded(step=1))

    @pytest.mark.parametrize(("selector", "how"), [("latest", "auto"), ("10", "explicit")])
    def test_the_attempt_knows_what_it_descends_from(
        self, manager: Make, run_dir: Path, selector: str, how: str
    ) -> None:
        """`latest` is automatic; any other selector is the user's decision."""
        with manager() as first:
            ids = {step: first.save(step, STATE) for step in (10, 20)}
        with manager() as second:
            second.restore(STATE, selector)
            second.begin()
        record = json.loads((run_dir / "attempts/000002.json").read_bytes())
        assert (record["how"], record["parent"]) == (how, ids[20 if how == "auto" else 10])
        assert (record["attempt"], record["previous"]) == (2, 1)

    def test_resume_path_is_a_directory_of_its_own_that_a_trainer_may_write_to(
        self, manager: Make, run_dir: Path
    ) -> None:
        """With its sidecar beside it; begin learns from it; the store and the tier do not change with it."""
        with manager() as first:
            stem = first.save(10, STATE)
        with manager() as second:
            path = second.resume_path()
            assert path is not None
            assert path.name == "checkpoint-10"
            assert read_sidecar(path).manifest.id == stem
            stored = {p.name: p.read_bytes() for p in (run_dir / "checkpoints" / str(stem)).iterdir()}
            assert {p.name: p.read_bytes() for p in path.iterdir()} == stored
            second.begin()
        assert json.loads((run_dir / "attempts/000002.json").read_bytes())["parent"] == stem

    def test_a_directory_of_ours_is_recognised_by_its_sidecar(
        self, manager: Make, run_dir: Path, tmp_path: Path
    ) -> None:
        """What one process resumed, another one's begin takes for what it is, wherever it lies."""
        with manager() as first:
            stem = first.save(10, STATE)
        with manager() as second:
            path = second.resume_path("10")
        assert path is not None
        moved = tmp_path / "elsewhere"
        path.rename(moved)
        path.with_name("checkpoint-10.ckptmgr.json").rename(tmp_path / "elsewhere.ckptmgr.json")
        with manager() as third:
            third.begin(resume_from=moved)
        record = json.loads((run_dir / "attempts/000002.json").read_bytes())
        assert (record["how"], record["parent"]) == ("explicit", stem)

    @pytest.mark.parametrize("foreign", ["no sidecar", "another run's"])
    def test_a_foreign_directory_does_not_count_as_restored(
        self, manager: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, foreign: str
    ) -> None:
        """On a run with commits it is refused like a start from scratch; on an empty one it begins a lineage without a parent."""
        if foreign == "no sidecar":
            path = tmp_path / "checkpoint-99"
            path.mkdir()
        else:
            with CheckpointManager(tmp_path / "store/other", local_dir=tmp_path / "other-disk") as other:
                other.save(99, STATE)
            with CheckpointManager(tmp_path / "store/other", local_dir=tmp_path / "other-disk") as other:
                found = other.resume_path()
            assert found is not None
            path = found
        with manager() as first:
            first.begin(resume_from=path)
            assert str(path) in caplog.text
            first.save(10, STATE)
        assert [manifest.parent for manifest in manager().list()] == [None]
        with manager() as second, pytest.raises(ConflictError):
            second.begin(resume_from=path)

    def test_it_restores_before_it_saves(self, manager: Make) -> None:
        """Once an attempt is claimed, its parent is settled."""
        with manager() as saving:
            saving.save(10, STATE)
            with pytest.raises(ConflictError):
                saving.restore(STATE)
            with pytest.raises(ConflictError):
                saving.resume_path()

    def test_a_failed_restore_does_not_count(self, manager: Make, run_dir: Path) -> None:
        """I12: the checkpoint did not fit; a program that goes on regardless starts from scratch, which is refused."""
        with manager() as first:
            first.save(10, STATE)
        with manager() as second:
            with pytest.raises(IncompatibleStateError):
                second.restore({"another": {}})
            with pytest.raises(ConflictError, match="restored none"):
                second.save(11, STATE)
        assert steps_in(run_dir) == [10]

    @pytest.mark.parametrize("local", [".", "inside", ".."])
    def test_the_local_directory_is_not_the_run(self, run_dir: Path, local: str) -> None:
        """Retention of the one would empty the other."""
        with pytest.raises(ConfigError, match="not apart"):
            CheckpointManager(run_dir, local_dir=run_dir / local)
        assert not run_dir.exists()

    def test_two_managers_on_one_tier(self, manager: Make) -> None:
        """The second one is refused while the first one lives, and goes on from it afterwards."""
        with manager() as first:
            first.save(10, STATE)
            with manager() as second:
                second.restore(STATE)
                with pytest.raises(ConflictError, match="this process is saving"):
                    second.begin()
        with manager() as third:
            third.restore(STATE)
            third.begin()

    def test_a_refused_start_does_not_keep_the_tier(self, manager: Make) -> None:
        """The script catches the refusal and decides otherwise, in the same process."""
        with manager() as first:
            first.save(10, STATE)
        refused = manager()
        with pytest.raises(ConflictError):
            refused.begin()
        with manager(on_existing="new-lineage") as allowed:
            allowed.begin()
        refused.close()

    def test_only_rank_0_touches_anything(
        self, manager: Make, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """I11: save and begin of another rank do nothing."""
        monkeypatch.setattr("ckptmgr.training.manager.is_main_process", lambda: False)
        with manager() as other:
            other.begin()
            assert other.save(10, STATE) is None
        assert not run_dir.exists()
        assert not (tmp_path / "disk").exists()

    def test_nothing_is_touched_before_it_is_needed(self, manager: Make, run_dir: Path, tmp_path: Path) -> None:
        """Making, closing and asking about an idle manager leaves no trace."""
        idle = manager()
        assert idle.poll_errors() == []
        assert idle.close().pending == ()
        assert not run_dir.exists()
        assert not (tmp_path / "disk").exists()


class TestRetention:
    def test_the_store_keeps_what_keep_says_and_the_disk_the_newest(
        self, manager: Make, run_dir: Path, tmp_path: Path
    ) -> None:
        """Two in the store with the best one, one on the disk."""
        with manager(keep=KeepLast(1) | KeepBest("eval_loss", mode="min")) as saving:
            for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 4.0)):
                saving.save(step, STATE, metrics={"eval_loss": loss})
        assert steps_in(run_dir) == [20, 40]
        data = {path.name.split("-")[1].lstrip("0") for path in (run_dir / "checkpoints").iterdir()}
        assert data == {"20", "40"}
        tier = LocalTier.open(tmp_path / "disk")
        assert [stem.step for stem in tier.run.stems()] == [40]

    def test_without_keep_the_store_keeps_everything(self, manager: Make, run_dir: Path, tmp_path: Path) -> None:
        """`keep_local` is the disk's own rule."""
        with manager(keep_local=KeepLast(2)) as saving:
            for step in (10, 20, 30):
                saving.save(step, STATE)
        assert steps_in(run_dir) == [10, 20, 30]
        assert [stem.step for stem in LocalTier.open(tmp_path / "disk").run.stems()] == [20, 30]

    def test_what_was_resumed_from_stays(self, manager: Make, run_dir: Path) -> None:
        """I8: until the attempt has enough of its own, the checkpoint it began from is all it can go back to."""
        with manager() as first:
            first.save(10, STATE)
        with manager(keep=KeepLast(1)) as second:
            second.restore(STATE)
            second.save(20, STATE)
            second.save(30, STATE)
        assert steps_in(run_dir) == [10, 30]


def test_a_local_tier_whose_own_record_is_garbled(manager: Make, run_dir: Path, tmp_path: Path) -> None:
    """A start names it and the way out; with the record moved away, everything that the tier held is still there, and training goes on."""
    with manager() as first:
        first.save(10, STATE)
        record = Path(first.local_dir, "run.json")
    record.write_text("xx")
    with (
        manager() as second,
        pytest.raises(ManifestError, match=r"local tier .* is not JSON .* - move that run.json away"),
    ):
        second.restore(STATE)
    record.rename(tmp_path / "garbled")
    with manager() as third:
        restored = third.restore(STATE)
        assert restored is not None
        assert restored.step == 10
        third.save(20, STATE)
    assert steps_in(run_dir) == [10, 20]
