"""Which checkpoint a directory is, told by its content alone."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.records import AttemptRecord
from ckptmgr.run import ancestry
from ckptmgr.run.ancestry import identify, is_copy
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier

UUID = "00000000-0000-4000-8000-000000000001"
Save = Callable[..., Stem]


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier.open_or_create(tmp_path / "tier", uuid=UUID)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes a trainer's directory: small files that tell about it, weights that do not have to."""

    def make(step: int, *, losses: str = "a", weights: bytes = b"w", under: str = "out") -> Path:
        directory = tmp_path / under / f"checkpoint-{step}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "trainer_state.json").write_text(f'{{"global_step": {step}, "log_history": "{losses}"}}')
        (directory / "model.safetensors").write_bytes(weights * 1000)
        return directory

    return make


@pytest.fixture
def save(tier: LocalTier) -> Save:
    """Commits a copy of a directory into the run."""
    seq = [0]

    def commit(directory: Path, *, attempt: int = 1) -> Stem:
        seq[0] += 1
        stem = Stem(attempt, int(directory.name.split("-")[-1]), seq[0], f"{seq[0]:08x}")
        prepared = tier.prepare(stem)
        shutil.copytree(directory, prepared, dirs_exist_ok=True)
        tier.commit(Manifest(stem=stem, run_uuid=UUID, files=describe(prepared)), prepared, target="")
        return stem

    return commit


def what_is(directory: Path, run: RunDirectory) -> Stem | None:
    return identify(directory, run, run.history())


def test_a_directory_is_known_by_its_content(tier: LocalTier, write: Callable[..., Path], save: Save) -> None:
    """Wherever it lies and whatever it is called, with files of the user's own beside."""
    stems = {step: save(write(step, losses="x" * step)) for step in (10, 20)}
    moved = write(20, losses="x" * 20).rename(tier.root.parent / "elsewhere")
    (moved / "notes.txt").write_text("the good one")
    assert what_is(moved, tier.run) == stems[20]
    assert what_is(write(10, losses="x" * 10), tier.run) == stems[10]


@pytest.mark.parametrize("damage", ["another loss", "another size", "a missing file", "no directory", "a file"])
def test_what_is_not_a_copy_is_not_taken_for_one(
    tier: LocalTier, write: Callable[..., Path], save: Save, damage: str
) -> None:
    """One small file, one size or one name is enough."""
    directory = write(10)
    save(directory)
    if damage == "another loss":
        (directory / "trainer_state.json").write_text('{"global_step": 10, "log_history": "b"}')
    elif damage == "another size":
        (directory / "model.safetensors").write_bytes(b"w" * 999)
    elif damage == "a missing file":
        (directory / "model.safetensors").unlink()
    else:
        shutil.rmtree(directory)
        if damage == "a file":
            directory.write_bytes(b"")
    assert what_is(directory, tier.run) is None


def test_large_files_are_compared_by_size_unless_there_are_no_others(
    tier: LocalTier, write: Callable[..., Path], save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a large model would keep each start waiting; the small files beside it tell enough."""
    monkeypatch.setattr(ancestry, "_READ_BYTES", 500)
    directory = write(10)
    stem = save(directory)
    other = write(10, weights=b"v", under="other")
    assert what_is(other, tier.run) == stem
    (directory / "trainer_state.json").unlink()
    (other / "trainer_state.json").unlink()
    bare = save(directory)
    assert what_is(directory, tier.run) in (stem, bare)
    tier.run.fs.rm_file(tier.run.path(f"manifests/{stem}.json"))
    assert what_is(directory, tier.run) == bare
    assert what_is(other, tier.run) is None


def test_of_equal_ones_the_newest_of_the_lineage_is_meant(
    tier: LocalTier, write: Callable[..., Path], save: Save
) -> None:
    """A rerun to the last bit saves the same bytes again."""
    directory = write(10)
    first = save(directory)
    second = save(directory, attempt=2)
    assert what_is(directory, tier.run) == second
    # Attempt 3 turned away from attempt 2.
    tier.note_attempt(AttemptRecord(number=3, how="explicit", parent=first))
    assert what_is(directory, tier.run) == first


def test_other_runs_and_empty_ones(tier: LocalTier, write: Callable[..., Path], save: Save, tmp_path: Path) -> None:
    """What another run has is none of this one's."""
    directory = write(10)
    assert what_is(directory, tier.run) is None
    save(directory)
    other = RunDirectory.open_or_create(str(tmp_path / "other"))
    assert identify(directory, other, tier.run.history()) is None


def test_a_sidecar_may_outlive_its_directory(tier: LocalTier, write: Callable[..., Path], save: Save) -> None:
    """What it says is checked: a trainer wrote another checkpoint under the same name."""
    directory = write(10)
    (manifest,) = [tier.run.manifest(save(directory))]
    assert isinstance(manifest, Manifest)
    assert is_copy(directory, manifest)
    write(10, losses="b")
    assert not is_copy(directory, manifest)
    assert not is_copy(directory / "nothing", manifest)
