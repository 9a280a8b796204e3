"""Resume: choose, fetch beside the target, verify, publish. What it returns is whole and right, or it does not return."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from ckptmgr.core import protocol
from ckptmgr.core.errors import BackendError, CheckpointNotFoundError, IntegrityError
from ckptmgr.core.history import History
from ckptmgr.core.layout import CHECKPOINTS, Stem, manifest_key
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.protocol import Fetched, Unusable
from ckptmgr.core.selectors import Selector
from ckptmgr.run import locks, notes
from ckptmgr.run.candidates import Candidate, candidates
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.loose import Names, names_below
from ckptmgr.run.sidecar import Sidecar
from ckptmgr.run.target import Target
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)
How = Literal["auto", "explicit"]


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
        skipped: newer ones that could not be used, or were never committed.
        how: `auto` or `explicit`.
        attempt: the highest attempt of the run at that moment; 0 if there is none.
    """

    path: Path
    directory: Path
    manifest: Manifest
    source: Literal["local", "remote"] | None
    how: How
    skipped: tuple[Skipped, ...] = field(default_factory=tuple)
    attempt: int = 0


class Progress(Protocol):
    """How `resume` tells what it does."""

    def started(self, manifest: Manifest, source: str) -> None:
        """The transfer of one checkpoint begins."""

    def moved(self, count: int) -> None:
        """`count` more bytes of it have arrived."""


class Silent:
    """A `Progress` that tells nobody."""

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
    durable: bool = False,
    lasting: bool = True,
    progress: Progress | None = None,
    check: Callable[[Manifest], None] | None = None,
) -> Resumed:
    """Put the checkpoint that `selector` means into a directory of its own, verified, and say where.

    For `latest`, one that is damaged, incomplete or removed meanwhile is named and passed over for the next older of the lineage. Bytes arrive in
    `<directory>.partial`; the final name appears only when all are right, so a kill leaves no half-restored directory, and a repeat
    takes up what was already fetched.

    Args:
        to: the checkpoint directory; None for `checkpoint-<step>` in `under`.
        under: None for `default_place`.
        tier: a local tier to look in first.
        strict: for `latest`, fail instead of falling back.
        replace: replace whatever else `to` holds.
        durable: only what the store has counts, which other machines can get as well; bytes may still come from `tier`.
        lasting: the directory is to survive a power cut. Without it nothing is synced: for one that no later process will take for whole.
        check: is shown the manifest of each checkpoint before anything of it is fetched; what it raises ends the resume, with nothing changed.

    Raises:
        CheckpointNotFoundError: nothing matches (`empty` is True on a run without any data), or it was removed meanwhile.
        NotCommittedError: there is data, but nothing committed.
        ManifestError: the manifest of what is meant cannot be read.
        IntegrityError: what is meant is damaged, or all are.
        CheckpointExistsError: `to` holds something else; nothing was changed.
        ConfigError: `to` cannot be used; nothing was changed.
        DiskFullError: no room for it; nothing was fetched.
        BackendError: the store could not be asked (I7).
    """
    progress = progress or Silent()
    how: How = "explicit" if selector.is_explicit else "auto"
    wanted, history = candidates(selector, run, tier, fall_back=not strict, durable=durable)
    roots = [
        Path(place.root) for place in (run, tier.run if tier else None) if place and place.fs.capabilities.is_local
    ]
    skipped: list[Skipped] = []
    removed = True
    for places in wanted:
        stem = places[0].stem
        directory = to if to is not None else (under or default_place(run)) / f"checkpoint-{stem.step}"
        target = Target(Path(os.path.abspath(directory)), lasting=lasting)
        for root in roots:
            target.refuse_run(root)
        if check is not None and (known := history.manifests.get(stem)) is not None:
            check(known)
        outcome = _restore(places, target, history, replace, how, progress)
        if not isinstance(outcome, Unusable):
            manifest, source = outcome
            if how == "auto":
                skipped = [*_unfinished(run, tier, history, after=stem), *skipped]
            return Resumed(
                path=_entry_point(target.directory, manifest),
                directory=target.directory,
                manifest=manifest,
                source=source,
                how=how,
                skipped=tuple(skipped),
                attempt=history.highest_attempt or 0,
            )
        why = f"{outcome.file} {outcome.why}".strip()
        if how == "explicit" or strict:
            raise _failure(stem, run, why, outcome.removed)
        logger.warning("step %d (%s) of %s is passed over: %s", stem.step, stem, run.url, why)
        skipped.append(Skipped(stem=stem, why=why))
        removed = removed and outcome.removed
    raise _none_left(run, skipped, removed)


def default_place(run: RunDirectory) -> Path:
    """Where checkpoints are put if nothing else is said: `./<run>`; `./<run>-resumed` where that is the run itself, on local disk."""
    place = Path(run.name)
    if run.fs.capabilities.is_local and os.path.realpath(place) == os.path.realpath(run.root):
        return Path(f"{run.name}-resumed")
    return place


def _unfinished(run: RunDirectory, tier: LocalTier | None, history: History, *, after: Stem) -> list[Skipped]:
    """Saves newer than `after` whose data is there and whose manifest is not, newest first: no checkpoints (I1), but somebody may miss them."""
    known = {*history.manifests, *history.broken, *history.closed}
    found: dict[Stem, str] = {}
    for place in (run, tier.run if tier is not None else None):
        if place is None:
            continue
        try:
            names = Names(data=names_below(place, CHECKPOINTS), top=[])
            stems = [data.stem for data in place.loose_data(known, names) if data.state == "uncommitted"]
            # Looked for again: another process may have committed it since the history was read.
            newer = [stem for stem in stems if stem and stem > after and place.read(manifest_key(stem)) is None]
        except BackendError as exc:
            logger.warning("whether %s holds anything newer, uncommitted, is not known: %s", place.url, exc)
            continue
        for stem in newer:
            found.setdefault(stem, f"incomplete: it was never committed in {place.url}")
    for stem, why in found.items():
        logger.warning("step %d (%s) is passed over: %s", stem.step, stem, why)
    return [Skipped(stem=stem, why=found[stem]) for stem in sorted(found, reverse=True)]


def _failure(stem: Stem, run: RunDirectory, why: str, removed: bool) -> CheckpointNotFoundError | IntegrityError:
    if removed:
        return CheckpointNotFoundError(
            f"{stem} of {run.url}: {why}", hint="it was pruned meanwhile; choose another of `ckptmgr ls`"
        )
    return IntegrityError(
        f"{stem} of {run.url} is damaged: {why}",
        hint="choose another of `ckptmgr ls --check`; nothing was changed",
        stem=stem,
    )


def _none_left(
    run: RunDirectory, skipped: Sequence[Skipped], removed: bool
) -> CheckpointNotFoundError | IntegrityError:
    if removed:
        return CheckpointNotFoundError(
            f"all checkpoints of {run.url} were removed meanwhile", hint="look again with `ckptmgr ls`"
        )
    return IntegrityError(
        f"none of the {len(skipped)} checkpoints of {run.url} can be used; the newest, {skipped[0].stem}: {skipped[0].why}",
        hint="see `ckptmgr verify`; nothing was changed",
        skipped=tuple(skipped),
    )


def _restore(
    places: Sequence[Candidate], target: Target, history: History, replace: bool, how: How, progress: Progress
) -> tuple[Manifest, Literal["local", "remote"] | None] | Unusable:
    """Bring one checkpoint to `target`, from the first of its places that has it whole."""
    stem = places[0].stem
    manifest = history.manifests.get(stem)
    if manifest is None:
        return Unusable(stem, str(history.broken[stem]))
    with target.alone():
        difference = target.difference(Sidecar(manifest=manifest, how=how))
        if difference is None:
            return manifest, None
        target.check(replace=replace, difference=difference)
        problems: list[Unusable] = []
        for place in places:
            target.check_room(manifest, linked_from=Path(place.run.root) if place.source == "local" else None)
            progress.started(manifest, place.source)
            outcome = _fetch(place, target, manifest, how, progress)
            if isinstance(outcome, Fetched):
                return outcome.manifest, place.source
            problems.append(outcome)
            if len(places) > len(problems):
                logger.warning(
                    "the copy of %s in %s cannot be used: %s %s", stem, place.run.url, outcome.file, outcome.why
                )
    # The store's word is the one that counts: what was there is either gone from it or damaged in it.
    return problems[-1]


def _fetch(place: Candidate, target: Target, manifest: Manifest, how: How, progress: Progress) -> Fetched | Unusable:
    # A local copy that is damaged says nothing about the one in the store, which is the one that notes are about.
    run, stem, is_stored = place.run, place.stem, place.source == "remote"
    note = notes.noted(run.url, [stem]).get(stem) if is_stored else None
    with target.partial_copy(manifest) as partial, locks.reading(run.uuid, stem):
        outcome = drive(
            protocol.fetch(stem, run.uuid, first=note.file if note is not None else ""),
            StoreDriver(
                run, target=partial, link=place.source == "local", lasting=target.lasting, moved=progress.moved
            ),
        )
        if isinstance(outcome, Fetched):
            target.publish(Sidecar(manifest=outcome.manifest, how=how))
            if note is not None:
                notes.forget(run.url, stem)
        elif is_stored and not outcome.removed and outcome.file != manifest_key(stem):
            notes.remember(run.url, stem, outcome.file, outcome.why)
        return outcome


def _entry_point(directory: Path, manifest: Manifest) -> Path:
    """What a trainer is given: the only file of a one-file checkpoint, else the directory."""
    return directory / manifest.files[0].path if len(manifest.files) == 1 else directory
