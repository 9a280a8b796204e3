"""Resume: choose, fetch beside the target, verify, publish. What it returns is whole and right, or it does not return."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ckptmgr.backends.atomic import fsync_dir, fsync_file, make_dirs_durable
from ckptmgr.core import protocol
from ckptmgr.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    DiskFullError,
    IntegrityError,
    ManifestError,
)
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.protocol import Fetched, Unusable
from ckptmgr.core.selectors import Selector
from ckptmgr.run import locks
from ckptmgr.run.candidates import Candidate, candidates
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive, file_problem
from ckptmgr.run.sidecar import Sidecar, read_sidecar, write_sidecar
from ckptmgr.run.tier import PARTIAL, LocalTier

logger = logging.getLogger(__name__)
_KEEP_FREE = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    stem: Stem
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A checkpoint on local disk, every byte checked.

    Attributes:
        path: what to hand to the trainer: the directory, or the file of a checkpoint that is one file.
        directory: the directory; its sidecar lies beside it.
        manifest: what it is.
        source: where the bytes came from; None when they were already there.
        skipped: newer ones that could not be used.
        how: `auto` or `explicit`.
    """

    path: Path
    directory: Path
    manifest: Manifest
    source: Literal["local", "remote"] | None
    how: Literal["auto", "explicit"]
    skipped: tuple[Skipped, ...] = field(default_factory=tuple)


class Progress(Protocol):
    """How `resume` tells what it does."""

    def started(self, manifest: Manifest, source: str) -> None:
        """The transfer of one checkpoint begins."""

    def moved(self, count: int) -> None:
        """`count` more bytes of it have arrived."""


class _Silent:
    def started(self, manifest: Manifest, source: str) -> None:
        pass

    def moved(self, count: int) -> None:
        pass


def resume(
    run: RunDirectory,
    selector: Selector,
    *,
    to: Path | None = None,
    under: Path | None = None,
    tier: LocalTier | None = None,
    strict: bool = False,
    replace: bool = False,
    progress: Progress | None = None,
) -> Resumed:
    """Put the checkpoint that `selector` means into a directory of its own, verified, and say where.

    For `latest`, one that is damaged, incomplete or removed meanwhile is named and passed over for the next older of the lineage. Bytes arrive in
    `<directory>.partial`; the final name appears only when all are right, so a kill leaves no half-restored directory, and a repeat
    takes up what was already fetched.

    Args:
        to: the checkpoint directory; None for `checkpoint-<step>` in `under`.
        under: None for `./<run>`.
        tier: a local tier to look in first.
        strict: for `latest`, fail instead of falling back.
        replace: replace whatever else `to` holds.

    Raises:
        CheckpointNotFoundError: nothing matches (`empty` is True on a run without any data).
        NotCommittedError: there is data, but nothing committed.
        IntegrityError: what is meant is damaged, or all are.
        CheckpointExistsError: `to` holds something else; nothing was changed.
        DiskFullError: no room for it; nothing was fetched.
        BackendError: the store could not be asked (I7).
    """
    progress = progress or _Silent()
    how: Literal["auto", "explicit"] = "explicit" if selector.is_explicit else "auto"
    wanted, history = candidates(selector, run, tier, fall_back=not strict)
    skipped: list[Skipped] = []
    for places in wanted:
        stem = places[0].stem
        directory = to if to is not None else (under or Path(run.name)) / f"checkpoint-{stem.step}"
        directory = Path(os.path.abspath(directory))
        problems: list[str] = []
        removed = True
        for place in places:
            outcome = _restore(place, directory, history.manifests.get(stem), replace, how, progress)
            if isinstance(outcome, Unusable):
                logger.warning(
                    "%s in %s cannot be used: %s%s",
                    stem,
                    place.run.url,
                    f"{outcome.file} " if outcome.file else "",
                    outcome.why,
                )
                problems.append(f"{place.source}: {outcome.file + ' ' if outcome.file else ''}{outcome.why}")
                removed = removed and outcome.removed
                continue
            manifest, source = outcome
            return Resumed(
                path=_entry_point(directory, manifest),
                directory=directory,
                manifest=manifest,
                source=source,
                how=how,
                skipped=tuple(skipped),
            )
        why = "; ".join(problems)
        if how == "explicit" or strict:
            raise _failure(stem, run, why, removed)
        skipped.append(Skipped(stem=stem, why=why))
    raise IntegrityError(
        f"none of the {len(skipped)} checkpoints of {run.url} can be used; the newest, {skipped[0].stem}: {skipped[0].why}",
        hint="see `ckptmgr verify`; nothing was changed",
        skipped=tuple(skipped),
    )


def _failure(stem: Stem, run: RunDirectory, why: str, removed: bool) -> CheckpointNotFoundError | IntegrityError:
    if removed:
        return CheckpointNotFoundError(
            f"{stem} of {run.url} {why}", hint="it was pruned meanwhile; choose another of `ckptmgr ls`"
        )
    return IntegrityError(
        f"{stem} of {run.url} is damaged: {why}",
        hint="choose another of `ckptmgr ls --check`; nothing was changed",
        stem=stem,
    )


def _restore(
    place: Candidate,
    directory: Path,
    known: Manifest | None,
    replace: bool,
    how: Literal["auto", "explicit"],
    progress: Progress,
) -> tuple[Manifest, Literal["local", "remote"] | None] | Unusable:
    """Bring one checkpoint from one place to `directory`."""
    if known is not None and _already_there(directory, known, how):
        return known, None
    _check_target(directory, replace)
    if known is not None:
        _check_room(place, directory, known)
        progress.started(known, place.source)
    partial = directory.with_name(directory.name + PARTIAL)
    make_dirs_durable(partial)
    with locks.reading(place.run.uuid, place.stem):
        outcome = drive(
            protocol.fetch(place.stem, place.run.uuid),
            StoreDriver(place.run, target=partial, link=place.source == "local", moved=progress.moved),
        )
    if isinstance(outcome, Fetched):
        _publish(partial, directory, Sidecar(manifest=outcome.manifest, how=how))
        return outcome.manifest, place.source
    return outcome


def _already_there(directory: Path, manifest: Manifest, how: Literal["auto", "explicit"]) -> bool:
    """Whether `directory` holds exactly this checkpoint, by reading all of it; how it was chosen is brought up to date."""
    if not directory.is_dir():
        return False
    try:
        there = read_sidecar(directory)
    except (CheckpointNotFoundError, ManifestError):
        return False
    if there.manifest.stem != manifest.stem or not there.manifest.same_content(manifest):
        return False
    names = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if not path.is_dir()}
    if names != {entry.path for entry in manifest.files}:
        return False
    if any(file_problem(directory / entry.path, entry) is not None for entry in manifest.files):
        return False
    if there.how != how:
        write_sidecar(directory, Sidecar(manifest=there.manifest, how=how))
    return True


def _check_target(directory: Path, replace: bool) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if os.path.lexists(directory) and not replace:
        what = "holds something else" if directory.is_dir() else "is a file"
        raise CheckpointExistsError(
            f"{directory} {what}", hint="give another --to, or --replace to replace it; nothing was changed"
        )
    if not os.access(next(parent for parent in directory.parents if parent.exists()), os.W_OK):
        raise ConfigError(f"{directory.parent} is not writable", hint="give another --to")


def _check_room(place: Candidate, directory: Path, manifest: Manifest) -> None:
    """Refuse before the first byte when the disk cannot hold it (K069). Hard links from a local tier need no room."""
    parent = next(parent for parent in directory.parents if parent.exists())
    if place.source == "local" and os.stat(place.run.root).st_dev == os.stat(parent).st_dev:
        return
    partial = directory.with_name(directory.name + PARTIAL)
    have = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.is_dir() else 0
    needed, free = manifest.size_bytes - have + _KEEP_FREE, shutil.disk_usage(parent).free
    if needed > free:
        raise DiskFullError(
            f"{parent} has {free} bytes free, but checkpoint {manifest.id} needs {manifest.size_bytes}",
            hint="free some space or give another --to; nothing was fetched",
            needed_bytes=needed,
            free_bytes=free,
        )


def _publish(partial: Path, directory: Path, sidecar: Sidecar) -> None:
    """Give the fetched files their final name. Synced first: a name that survives a power cut must have its bytes."""
    wanted = {entry.path for entry in sidecar.manifest.files}
    for path in sorted(partial.rglob("*"), reverse=True):
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()  # left over from another checkpoint
        elif path.relative_to(partial).as_posix() not in wanted:
            path.unlink()
    for entry in sidecar.manifest.files:
        fsync_file(partial / entry.path)
    for folder in {partial, *(path for path in partial.rglob("*") if path.is_dir())}:
        fsync_dir(folder)
    # The sidecar comes first: without it the directory would be "something else" to a repeat after a kill between the two.
    write_sidecar(directory, sidecar)
    old: Path | None = None
    if directory.is_dir() and not any(directory.iterdir()):
        directory.rmdir()
    elif os.path.lexists(directory):
        old = directory.with_name(f"{directory.name}.replaced-{os.getpid()}")
        os.rename(directory, old)
    os.rename(partial, directory)
    fsync_dir(directory.parent)
    if old is not None:
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()


def _entry_point(directory: Path, manifest: Manifest) -> Path:
    """What a trainer is given: the only file of a one-file checkpoint, else the directory."""
    return directory / manifest.files[0].path if len(manifest.files) == 1 else directory
