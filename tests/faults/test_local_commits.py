"""The local tier: a kill or a failure anywhere in a save leaves no checkpoint or a whole one, and the next start tidies up."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.atomic import TEMP_PREFIX
from ckptmgr.core.errors import DiskFullError
from ckptmgr.core.layout import Stem
from ckptmgr.run import tier as tier_module
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import file_problem
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.stores import Store
from ckptmgr.training.manager import CheckpointManager

Kill = Callable[..., bool]
LocalSave = Callable[..., Stem]

FILES = {"model.bin": "weights " * 1000, "state.json": "{}"}
MOST_OPERATIONS = 60


def everything(root: Path) -> dict[str, bytes]:
    """Every file below `root` but the lock, by relative path."""
    found = {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    return {name: data for name, data in found.items() if name != ".lock"}


def assert_whole(tier: LocalTier, stem: Stem) -> None:
    """The checkpoint `stem` has every byte that its manifest names."""
    manifest = tier.run.history().manifests[stem]
    assert [file_problem(tier.data_dir(stem) / entry.path, entry) for entry in manifest.files] == [None] * len(
        manifest.files
    )


def test_a_save_killed_at_every_operation_is_there_or_not(
    make_store: Callable[[str], Store], kill: Kill, local_save: LocalSave, tmp_path: Path
) -> None:
    """Killed before its 1st, 2nd, … change of the file system: none or all of it, the earlier one untouched, and nothing left over."""
    store = make_store("local")
    outcomes = []
    for nth in range(1, MOST_OPERATIONS):
        url = f"{store.url}/run-{nth}"
        run = RunDirectory.open_or_create(url)
        tier = LocalTier.open_or_create(tmp_path / f"disk-{nth}", uuid=run.uuid)
        earlier, stem = local_save(tier, run, 100), Stem(1, 200, 2, "0123abcd")
        before = everything(tier.root)
        killed = kill("save", url=url, tier=str(tier.root), stem=str(stem), files=FILES, nth=nth)

        committed = stem in tier.run.history().manifests
        outcomes.append((killed, committed))
        after = everything(tier.root)
        assert {name: after.get(name) for name in before} == before
        if committed:
            assert_whole(tier, stem)
            assert [entry.stem for _, entry in tier.pending(run.url)] == [stem, earlier]

        # The next start resumes the newest that is whole, throws away the rest, and uploads.
        with CheckpointManager(url, local_dir=tier.root) as manager:
            path = manager.resume_path()
            assert path is not None
            assert path.name == ("checkpoint-200" if committed else "checkpoint-100")
            manager.begin()
            assert manager.close().pending == ()
        there = {earlier, stem} if committed else {earlier}
        assert set(RunDirectory.open(url).stems()) == there
        assert leftovers(tier, kept={max(there)}) == []
        if not killed:
            break
    # Each point before the commit was hit, and the last save was not killed at all.
    assert outcomes[0] == (True, False)
    assert outcomes[-1] == (False, True)
    assert (True, False) in outcomes[-6:]
    assert outcomes == sorted(outcomes, key=lambda outcome: (outcome[1], not outcome[0]))


def leftovers(tier: LocalTier, *, kept: set[Stem]) -> list[str]:
    """What lies in the tier besides its own records and the checkpoints `kept`."""
    mine = {"run.json", *(f"attempts/{n:06}.json" for n in range(1, 9))}
    mine |= {"restored.json", "transfer.json", ".transfer.lock", "transfer.log", "metrics.jsonl"}
    return [
        name
        for name in everything(tier.root)
        if name not in mine
        and not name.startswith("resumed/")
        and not any(
            name in (f"manifests/{stem}.json", f"uploads/{stem}.json") or name.startswith(f"checkpoints/{stem}/")
            for stem in kept
        )
    ] + [str(path) for path in (tier.root / "checkpoints").iterdir() if path.name not in {str(stem) for stem in kept}]


@pytest.mark.parametrize("step", ["prepare", "files", "rename", "journal", "manifest"])
def test_each_named_step_of_a_local_commit(
    make_store: Callable[[str], Store], kill: Kill, local_save: LocalSave, tmp_path: Path, step: str
) -> None:
    """After prepare, files, rename and journal there is no checkpoint; after the manifest there is; the next start uploads what is."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)
    stem = Stem(1, 100, 1, "0123abcd")

    def reached() -> str:
        if (tier.root / f"manifests/{stem}.json").exists():
            return "manifest"
        if (tier.root / f"uploads/{stem}.json").exists():
            return "journal"
        if tier.data_dir(stem).exists():
            return "rename"
        partial = tier.data_dir(stem).with_name(f"{stem}.partial")
        return (
            "" if not partial.exists() else "files" if {p.name for p in partial.iterdir()} == set(FILES) else "prepare"
        )

    nth = 1
    while True:
        killed = kill("save", url=run.url, tier=str(tier.root), stem=str(stem), files=FILES, nth=nth)
        if reached() == step:
            break
        assert killed, f"{step} was never reached"
        tier.clean()
        nth += 1
    assert (stem in tier.run.history().manifests) == (step == "manifest")
    with CheckpointManager(run.url, local_dir=tier.root) as manager:
        assert (manager.resume_path() is not None) == (step == "manifest")
        manager.begin()
    assert run.stems() == ([stem] if step == "manifest" else [])


def test_a_start_leaves_the_temporary_file_of_a_living_process(
    make_store: Callable[[str], Store], tmp_path: Path
) -> None:
    """Another process that drains this tier is writing; one that is dead is not."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)
    living, own = (tier.root / f"{TEMP_PREFIX}{pid}-00ff" for pid in (os.getppid(), os.getpid()))
    for path in (living, own):
        path.write_bytes(b"half")
    tier.clean()
    assert living.exists()
    assert not own.exists()


@pytest.mark.parametrize("fails_at", ["journal", "manifest"])
def test_a_local_commit_that_fails_leaves_nothing(
    make_store: Callable[[str], Store],
    local_save: LocalSave,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fails_at: str,
) -> None:
    """No room for the journal, or for the manifest: the room that the data took is free again, the earlier save is untouched."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)
    local_save(tier, run, 100)
    before = everything(tier.root)

    def full(*args: Any, **kwargs: Any) -> None:
        raise DiskFullError("no space left on device")

    if fails_at == "journal":
        monkeypatch.setattr(tier.journal, "write", full)
    else:
        monkeypatch.setattr(tier_module, "write_atomic", full)
    with pytest.raises(DiskFullError):
        local_save(tier, run, 200)
    assert {name: data for name, data in everything(tier.root).items() if ".partial/" not in name} == before
    assert [path.name for path in (tier.root / "checkpoints").iterdir() if not path.name.endswith(".partial")] == [
        str(stem) for stem in tier.run.stems()
    ]
