"""Which checkpoint of a run a directory is, when nothing beside it says so.

A trainer that resumes from its own output directory (`trainer.train(resume_from_checkpoint=True)`) reads files that were taken into the run when they were
written, but no sidecar lies beside them. What they are is then found out by their content: the next attempt must know what it descends from (I12).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from ckptmgr.backends.atomic import digest_file
from ckptmgr.core.errors import BackendError, SourceChangedError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import FileEntry, Manifest
from ckptmgr.run.directory import RunDirectory

# Read in full: what trainers write about themselves, random states, small models. Larger files are compared by their size: reading the weights of a
# large model would keep every start waiting.
_READ_BYTES = 8 << 20


def identify(directory: Path, run: RunDirectory, history: History) -> Stem | None:
    """The committed checkpoint of `run` that `directory` is a copy of; None if it is none.

    Every file of the checkpoint must be there with the right size; files up to 8 MiB must have the right BLAKE3, and all must if none is that
    small. Files that the checkpoint does not have do not count. `trainer_state.json` and its like, with the losses so far, are always among the
    small ones: two checkpoints that agree in them but not in their weights do not come from one training.

    Of several with the same content the one nearest to the newest of the present lineage is meant.

    Args:
        history: of the run, the local tier's included.
    """
    directory = Path(os.path.abspath(directory))
    if not directory.is_dir():
        return None
    chain = history.readable_chain()
    others = sorted(history.others(), key=lambda manifest: manifest.stem, reverse=True)
    known: dict[str, str | None] = {}
    for manifest in (*chain, *others):
        if manifest.run_uuid == run.uuid and _is_copy(directory, manifest, known):
            return manifest.stem
    return None


def is_copy(directory: Path, manifest: Manifest) -> bool:
    """Whether `directory` still is a copy of the checkpoint that `manifest` describes, judged as in `identify`.

    A sidecar outlives its directory: a trainer that rotates its checkpoints away and writes one under the same name later knows nothing of it.
    """
    return _is_copy(Path(os.path.abspath(directory)), manifest, {})


def _is_copy(directory: Path, manifest: Manifest, known: dict[str, str | None]) -> bool:
    """Whether `directory` holds the files of `manifest`.

    Args:
        known: digests read for other manifests, by path.
    """
    if any(_size(directory / entry.path) != entry.size for entry in manifest.files):
        return False
    return all(_digest(directory, entry.path, known) == entry.blake3 for entry in _telling(manifest.files))


def _telling(files: Iterable[FileEntry]) -> list[FileEntry]:
    """The files whose bytes decide, smallest first: most candidates are told apart by the first one."""
    ordered = sorted(files, key=lambda entry: (entry.size, entry.path))
    return [entry for entry in ordered if entry.size <= _READ_BYTES] or ordered


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


def _digest(directory: Path, path: str, known: dict[str, str | None]) -> str | None:
    if path not in known:
        try:
            known[path] = digest_file(directory / path).blake3
        except (SourceChangedError, BackendError):
            known[path] = None  # being written, or not to be read: whatever it is, it is not known to be ours
    return known[path]
