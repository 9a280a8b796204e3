"""Pull: a plain copy of a checkpoint, or of a part of it, for whatever needs the files: serving, evaluation, conversion, another machine.

Like `resume` it fills a directory beside its final name, which appears only when every file was verified. Unlike `resume` it may leave files out,
and never takes another checkpoint than the one that is meant.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

from ckptmgr.backends.atomic import link_or_copy
from ckptmgr.core import protocol
from ckptmgr.core.errors import CheckpointNotFoundError, IntegrityError, ManifestError, ManifestVersionError
from ckptmgr.core.files import FileEntry, Role
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.protocol import Fetched, Unusable
from ckptmgr.core.selectors import Selector
from ckptmgr.run import locks, notes
from ckptmgr.run.candidates import candidates
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive, file_problem
from ckptmgr.run.resume import Progress, Silent
from ckptmgr.run.sidecar import Sidecar
from ckptmgr.run.target import Target

logger = logging.getLogger(__name__)

ROLES: tuple[str, ...] = get_args(Role)
# Of a checkpoint that is pruned while it is pulled there is a newer one, as often as somebody prunes that fast.
_LOOKS = 3
_NAMED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Pulled:
    """Files of one checkpoint on local disk, every byte checked.

    Attributes:
        directory: where they are, and nothing else is; the sidecar lies beside it.
        manifest: the whole checkpoint.
        files: those of it that are there.
        fetched_bytes: how much of it came from the store now; the rest was there.
    """

    directory: Path
    manifest: Manifest
    files: tuple[FileEntry, ...]
    fetched_bytes: int

    @property
    def is_part(self) -> bool:
        return len(self.files) < len(self.manifest.files)


def pull(
    run: RunDirectory,
    selector: Selector,
    to: Path,
    *,
    only: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Pulled:
    """Put the files of the checkpoint that `selector` means into the directory `to`, verified.

    The final name appears when all are right, so that a kill leaves no half-filled directory; a repeat takes up what was already fetched. A
    directory that holds exactly these files is left as it is.

    Args:
        only: roles, or patterns of paths, as for `chosen_files`; none: everything.
        overwrite: replace whatever else `to` holds; what is right of it is kept.

    Raises:
        CheckpointNotFoundError: nothing matches `selector`, or one of `only`; or it was removed meanwhile.
        NotCommittedError: there is data, but nothing committed.
        ManifestError: the manifest of what is meant cannot be read.
        IntegrityError: a file that is wanted is damaged.
        CheckpointExistsError: `to` holds something else; nothing was changed.
        ConfigError: `to` cannot be used; nothing was changed.
        DiskFullError: no room for it; nothing was fetched.
        BackendError: the store could not be asked (I7).
    """
    progress = progress or Silent()
    target = Target(Path(os.path.abspath(to)))
    if run.fs.capabilities.is_local:
        target.refuse_run(Path(run.root))
    removed: Unusable | None = None
    for _ in range(1 if selector.is_explicit else _LOOKS):
        manifest = _meant(run, selector)
        if removed is not None and removed.stem == manifest.stem:
            break
        files = chosen_files(manifest, only)
        outcome = _bring(run, target, manifest, files, selector, overwrite=overwrite, progress=progress)
        if not isinstance(outcome, Unusable):
            return Pulled(directory=target.directory, manifest=manifest, files=files, fetched_bytes=outcome)
        if not outcome.removed:
            raise IntegrityError(
                f"{outcome.stem} of {run.url} is damaged: {outcome.file} {outcome.why}",
                hint="choose another of `ckptmgr ls --check`; nothing was changed",
                stem=outcome.stem,
            )
        removed = outcome
        logger.warning("%s of %s %s", outcome.stem, run.url, outcome.why)
    assert removed is not None
    raise CheckpointNotFoundError(
        f"{removed.stem} of {run.url} {removed.why}", hint="it was pruned meanwhile; choose another of `ckptmgr ls`"
    )


def chosen_files(manifest: Manifest, only: Iterable[str]) -> tuple[FileEntry, ...]:
    """The files of `manifest` that any of `only` means, in order; all if there is none.

    A role (`weights`, `optimizer`, `tokenizer`, …) means the files that were given it. Anything else is a pattern with `*`, `?` and `[…]`, in
    which `*` also stands for slashes: one with a slash is compared with the whole path, one without with the file's name.

    Raises:
        CheckpointNotFoundError: one of them means nothing here; a misspelled one must not quietly leave something out.
    """
    wanted: set[str] = set()
    patterns = list(only)
    for pattern in patterns:
        found = {entry.path for entry in manifest.files if _is_meant(entry, pattern)}
        if not found:
            raise CheckpointNotFoundError(
                f"checkpoint {manifest.id} has no file that --only {pattern} means; it has {_what_there_is(manifest)}",
                hint=f"name one of these roles ({', '.join(ROLES)}), or a pattern such as '*.safetensors'",
                only=pattern,
            )
        wanted |= found
    return tuple(entry for entry in manifest.files if not patterns or entry.path in wanted)


def _is_meant(entry: FileEntry, pattern: str) -> bool:
    if entry.path == pattern:
        return True
    if pattern in ROLES:
        return entry.role == pattern
    return fnmatchcase(entry.path if "/" in pattern else entry.path.rsplit("/", 1)[-1], pattern)


def _what_there_is(manifest: Manifest) -> str:
    """Every role that there is, with its files, as far as they can be read at a glance."""
    by_role: dict[str, list[str]] = {}
    for entry in manifest.files:
        by_role.setdefault(entry.role, []).append(entry.path)
    room = max(1, _NAMED // len(by_role))
    parts = []
    for role, paths in sorted(by_role.items()):
        more = [f"{len(paths) - room} more"] if len(paths) > room else []
        parts.append(f"{role} ({', '.join([*paths[:room], *more])})")
    return ", ".join(parts)


def _meant(run: RunDirectory, selector: Selector) -> Manifest:
    wanted, history = candidates(selector, run, None, fall_back=False)
    stem: Stem = wanted[0][0].stem
    if stem not in history.manifests:
        why = history.broken[stem]
        if isinstance(why, ManifestVersionError):
            raise why
        raise ManifestError(
            f"{stem} of {run.url} is damaged: {why.message}",
            hint="choose another of `ckptmgr ls --check`; nothing was changed",
            stem=stem,
        ) from why
    return history.manifests[stem]


def _bring(
    run: RunDirectory,
    target: Target,
    manifest: Manifest,
    files: tuple[FileEntry, ...],
    selector: Selector,
    *,
    overwrite: bool,
    progress: Progress,
) -> int | Unusable:
    """Fill the directory with `files`; returns how many bytes were fetched for that."""
    part = replace(manifest, files=files)
    sidecar = Sidecar(
        manifest=part,
        how="explicit" if selector.is_explicit else "auto",
        is_part=len(files) < len(manifest.files),
    )
    fetched = 0

    def moved(count: int) -> None:
        nonlocal fetched
        fetched += count
        progress.moved(count)

    with target.alone():
        difference = target.difference(sidecar)
        if difference is None:
            return 0
        target.check(replace=overwrite, difference=difference)
        progress.started(part, "remote")
        with target.partial_copy(part) as partial, locks.reading(run.uuid, manifest.stem):
            if overwrite:
                _keep_what_is_right(target.directory, partial, files)
            target.check_room(part, linked_from=None)
            steps = protocol.fetch(manifest.stem, run.uuid, only={entry.path for entry in files})
            outcome = drive(steps, StoreDriver(run, target=partial, moved=moved))
            if isinstance(outcome, Fetched):
                target.publish(sidecar)
                return fetched
    if not outcome.removed and any(entry.path == outcome.file for entry in files):
        notes.remember(run.url, manifest.stem, outcome.file, outcome.why)
    return outcome


def _keep_what_is_right(old: Path, partial: Path, files: Iterable[FileEntry]) -> None:
    """Take from a directory that is about to be replaced what need not be fetched again."""
    for entry in files:
        there, here = old / entry.path, partial / entry.path
        if here.exists() or there.is_symlink() or not there.is_file() or file_problem(there, entry) is not None:
            continue
        here.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(there, here, sync=False)
