"""Verify: does the store (or a directory) still hold the bytes that the manifests describe?"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.checksums import Digester
from ckptmgr.core.errors import CheckpointNotFoundError, ManifestError, ObjectNotFoundError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem, data_key, manifest_key
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest
from ckptmgr.run import notes
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import check_stored, digest_problem, file_problem
from ckptmgr.run.sidecar import read_sidecar

_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong with one checkpoint: `file`, relative to it (or its manifest's key), `why`."""

    stem: Stem
    file: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much to read: `quick` asks the store (presence, size, its checksum) and downloads nothing; `sample` reads
    that share (0 to 1) of the files in full and asks about the rest; by default everything is read."""

    quick: bool = False
    sample: float | None = None

    @property
    def is_full(self) -> bool:
        return not self.quick and self.sample is None


def verify_run(
    run: RunDirectory,
    history: History,
    stems: Iterable[Stem],
    depth: Depth,
    *,
    tick: Callable[[FileEntry], None] = lambda entry: None,
) -> list[Damage]:
    """Check each of `stems`; returns everything that is wrong, in their order. One that is pruned meanwhile is passed over.

    Args:
        tick: called after each file.

    Raises:
        BackendError: the store could not be asked; nothing is called damaged because of that (I7).
    """
    found: list[Damage] = []
    for stem in stems:
        if stem in history.broken:
            found.append(Damage(stem=stem, file=manifest_key(stem), why=str(history.broken[stem])))
            continue
        problems = []
        for entry in history.manifests[stem].files:
            why = _check(run, stem, entry, depth)
            if why is not None:
                problems.append(Damage(stem=stem, file=entry.path, why=why))
            tick(entry)
        if problems and _is_still_committed(run, stem):
            notes.remember(run.url, stem, problems[0].file, problems[0].why)
            found.extend(problems)
        elif not problems and depth.is_full:
            notes.forget(run.url, stem)
    return found


def damage_of(run: RunDirectory, manifest: Manifest) -> list[Damage]:
    """What the store itself reports as wrong with one checkpoint, without a download; what prune asks before it deletes (I8)."""
    history = History(run_uuid=run.uuid, manifests={manifest.stem: manifest})
    return verify_run(run, history, [manifest.stem], Depth(quick=True))


def noted_damage(run: RunDirectory, manifest: Manifest) -> list[Damage]:
    """What this machine has seen to be wrong with one checkpoint and finds wrong again, by reading that one file."""
    note = notes.noted(run.url, [manifest.stem]).get(manifest.stem)
    entries = [entry for entry in manifest.files if note is not None and entry.path == note.file]
    problems = ((entry, _check(run, manifest.stem, entry, Depth())) for entry in entries)
    return [Damage(stem=manifest.stem, file=entry.path, why=why) for entry, why in problems if why is not None]


def verify_directory(directory: Path) -> tuple[Manifest, list[Damage]]:
    """Check a directory that `resume` made against the manifest beside it: every file, and that there is no other.

    Raises:
        CheckpointNotFoundError: no manifest lies beside it.
        ManifestError: that one is damaged.
    """
    manifest = read_sidecar(directory).manifest
    root = directory.parent if directory.is_file() else directory
    found = [
        Damage(stem=manifest.stem, file=entry.path, why=why)
        for entry in manifest.files
        if (why := file_problem(root / entry.path, entry)) is not None
    ]
    wanted = {entry.path for entry in manifest.files}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if not path.is_dir() and name not in wanted:
            found.append(Damage(stem=manifest.stem, file=name, why="is not part of the checkpoint"))
    return manifest, found


def _check(run: RunDirectory, stem: Stem, entry: FileEntry, depth: Depth) -> str | None:
    key = data_key(stem, entry.path)
    problem = check_stored(run, key, entry)
    if problem is not None or depth.quick:
        return problem
    # Which files are sampled is a matter of chance on purpose: repeated runs get round to all of them.
    if depth.sample is not None and random.random() >= depth.sample:
        return None
    if run.fs.capabilities.is_local:
        return file_problem(Path(run.path(key)), entry)
    return _read_through(run, key, entry)


def _read_through(run: RunDirectory, key: str, entry: FileEntry) -> str | None:
    """How a stored object differs from `entry`, by reading all of it, block by block: a shard need not fit on this machine's disk."""
    digester = Digester()
    try:
        for start in range(0, entry.size, _BLOCK_BYTES):
            digester.update(run.fs.cat_file(run.path(key), start, min(start + _BLOCK_BYTES, entry.size)))
    except ObjectNotFoundError:
        return "is missing"
    return digest_problem(digester.digests(), entry)


def _is_still_committed(run: RunDirectory, stem: Stem) -> bool:
    try:
        return not isinstance(run.manifest(stem), ClosingRecord)
    except CheckpointNotFoundError:
        return False
    except ManifestError:
        return True
