"""Whether a power cut could take away what a manifest or a journal speaks of: the order of writes, fsyncs and names, as strace saw it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends.atomic import is_temp
from ckptmgr.core import layout
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.stores import Store

if TYPE_CHECKING:
    from tests.faults.conftest import Call, Tracer

LocalSave = Callable[..., Stem]

# The marks that the traced calls lie between.
BEGIN, END = "/ckptmgr-trace-begin", "/ckptmgr-trace-end"
FILES = {"model.bin": "weights " * 1000, "sub/optimizer.bin": "momenta " * 9, "state.json": "{}"}


class Unsynced:
    """What a power cut could still take away after some calls: names in folders, and bytes of files, that no fsync has confirmed."""

    def __init__(self) -> None:
        self.names: set[Path] = set()
        self.bytes: set[Path] = set()

    def __call__(self, call: Call) -> Path | None:
        """Note the effect of `call`; the path that it publishes, if it gives something its final name."""
        named = [Path(path) for path in re.findall(r'"(/[^"]*)"', call.line)]
        opened = [Path(path) for path in re.findall(r"^\w+\(\d+<([^>]*)>", call.line)]
        if call.name in ("write", "pwrite64"):
            self.bytes.update(opened)
        elif call.name in ("fsync", "fdatasync"):
            self.bytes.difference_update(opened)
            self.names = {path for path in self.names if path.parent not in opened}
        elif call.name in ("rename", "link"):
            self._give(*named, keep=call.name == "link")
            return named[1]
        elif call.name == "unlink":
            self.names.discard(named[0])
            self.bytes.discard(named[0])
        elif call.is_change:
            self.names.add(named[0])
        return None

    def _give(self, old: Path, new: Path, *, keep: bool) -> None:
        for paths in (self.names, self.bytes):
            moved = {path for path in paths if path == old or old in path.parents}
            paths |= {new / path.relative_to(old) for path in moved}
            if not keep:
                paths -= moved
        self.names.add(new)

    def below(self, folders: Sequence[Path]) -> list[str]:
        """All of it in `folders`, and their own names; but for the names of temporary files."""
        paths = [*(path for path in self.names if not is_temp(path.name)), *self.bytes]
        return sorted(str(path) for path in paths if any(folder in (path, *path.parents) for folder in folders))


def kept(root: Path) -> list[Path]:
    """Where checkpoints and what is said of them lie. What a process notes of itself beside them may be lost."""
    return [root / name for name in (layout.CHECKPOINTS, layout.MANIFESTS, layout.UPLOADS)]


def records(calls: Sequence[Call], folders: Sequence[Path]) -> list[str]:
    """Which records got their names in `folders`, in order: everything of that save that came before is synced, and at the end everything is."""
    unsynced, found = Unsynced(), []
    for call in calls:
        before = unsynced.below(folders)
        path = unsynced(call)
        if path is not None and path.parent in folders and path.parent.name in (layout.MANIFESTS, layout.UPLOADS):
            assert [name for name in before if not is_of_another(name, path.stem)] == [], call
            found.append(path.parent.name)
    assert unsynced.below(folders) == []
    return found


def is_of_another(path: str, stem: str) -> bool:
    """Whether a path belongs to another save than `stem`: the transfer process may have that one in hand."""
    named = re.findall(r"[0-9]{6}-[0-9]{12}-[0-9]{6}-[0-9a-f]{8}", path)
    return bool(named) and stem not in named


@pytest.mark.parametrize("earlier", [0, 1])
def test_what_a_local_commit_speaks_of_is_on_disk(
    tracer: Tracer,
    make_store: Callable[[str], Store],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: LocalSave,
    tmp_path: Path,
    earlier: int,
) -> None:
    """Files, folders and their names before the journal's entry, that before the manifest, and that before `commit` returns."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    for step in range(earlier):
        local_save(tier, run, step)
    job = {"do": "commit", "stem": str(Stem(1, 200, 2, "0123abcd")), "files": FILES}
    done = tracer(with_places(job, tier, run, tmp_path))
    assert done.said == ["acknowledged"]
    assert records(done.calls, kept(tier.root)) == [layout.UPLOADS, layout.MANIFESTS]


def test_what_a_commit_in_a_local_store_speaks_of_is_on_disk(
    tracer: Tracer,
    make_store: Callable[[str], Store],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: LocalSave,
    tmp_path: Path,
) -> None:
    """Each object before the journal confirms it, all of them before the manifest, and that before the journal says uploaded."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    local_save(tier, run, 100, {name: text.encode() for name, text in FILES.items()})
    done = tracer(with_places({"do": "upload"}, tier, run, tmp_path))
    assert done.said == ["acknowledged"]
    assert records(done.calls, [*kept(tier.root), *kept(Path(run.root))]) == [
        *[layout.UPLOADS] * (1 + len(FILES)),
        layout.MANIFESTS,
        layout.UPLOADS,
    ]


def with_places(job: Mapping[str, Any], tier: LocalTier, run: RunDirectory, tmp_path: Path) -> dict[str, Any]:
    return {**job, "tier": str(tier.root), "url": run.url, "locks": str(tmp_path / "locks")}


TRAINER = f"""
import os, sys
from pathlib import Path
import torch
from ckptmgr import CheckpointManager

url, disk, trained = sys.argv[1:]
weights = {{"w": torch.arange(100_000.0)}}
with CheckpointManager(url, local_dir=disk) as manager:
    manager.begin()
    os.access({BEGIN!r}, os.F_OK)
    manager.save(1, {{"model": weights, "note": "small"}}, wait=True)
    directory = Path(trained, "checkpoint-2")
    directory.mkdir(parents=True)
    (directory / "model.bin").write_bytes(bytes(100_000))
    (directory / "state.json").write_text("{{}}")
    manager.take(2, directory, wait=True)
    os.access({END!r}, os.F_OK)
"""


def test_what_a_trainer_saves_and_what_it_gives_away_is_on_disk(
    tracer: Tracer, make_store: Callable[[str], Store], tmp_path: Path
) -> None:
    """As `CheckpointManager` writes a state, and takes by link the files of a directory that a framework wrote and did not sync."""
    store, disk = make_store("local"), tmp_path / "disk"
    command = [sys.executable, "-c", TRAINER, f"{store.url}/run", str(disk), str(tmp_path / "trained")]
    calls = tracer.program(*command)
    # The transfer process is at work as well; what it writes into the tier has a test of its own.
    assert records(calls, [disk / layout.CHECKPOINTS, disk / layout.MANIFESTS]) == [layout.MANIFESTS] * 2
    taken = [call for call in calls if call.name == "link" and str(tmp_path / "trained") in call.line]
    assert len(taken) == 2
