"""Whether a power cut could take away what a manifest or a journal speaks of: the order of writes, fsyncs and names, as strace saw it."""

from __future__ import annotations

import re
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
        """All of it in `folders`, but for the names of temporary files."""
        names = [path for path in self.names if not is_temp(path.name)]
        return sorted(str(path) for path in [*names, *self.bytes] if any(folder in path.parents for folder in folders))


def records(calls: Sequence[Call], folders: Sequence[Path]) -> list[str]:
    """Which records got their names in `folders`, in order: everything that came before one is synced, and at the end everything is."""
    unsynced, found = Unsynced(), []
    for call in calls:
        before = unsynced.below(folders)
        path = unsynced(call)
        if path is not None and path.parent.name in (layout.MANIFESTS, layout.UPLOADS):
            assert before == [], call
            found.append(path.parent.name)
    assert unsynced.below(folders) == []
    return found


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
    assert records(done.calls, [tier.root]) == [layout.UPLOADS, layout.MANIFESTS]


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
    done = tracer(with_places({"do": "drain"}, tier, run, tmp_path))
    assert done.said == ["acknowledged"]
    assert records(done.calls, [tier.root, Path(run.root)]) == [
        *[layout.UPLOADS] * (1 + len(FILES)),
        layout.MANIFESTS,
        layout.UPLOADS,
    ]


def with_places(job: Mapping[str, Any], tier: LocalTier, run: RunDirectory, tmp_path: Path) -> dict[str, Any]:
    return {**job, "tier": str(tier.root), "url": run.url, "locks": str(tmp_path / "locks")}
