"""Which checkpoint to go on from, on disk and verified: one answer for all ranks.

Rank 0 chooses and fetches, and tells the others. A rank that does not see rank 0's files is on another machine: there the first rank fetches the same
checkpoint by its id. What only rank 0's local tier has, it could not get; so with several machines only what the store has can be chosen, after what
waits in local tiers was uploaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from ckptmgr.core.errors import CheckpointNotFoundError, CkptmgrError, ConflictError, IntegrityError, NotCommittedError
from ckptmgr.core.layout import RUN_FILE, Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.records import AttemptRecord
from ckptmgr.core.selectors import Selector, parse_selector
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import host_name
from ckptmgr.run.launch import ATTEMPT_ENV, RESUME_ENV
from ckptmgr.run.resume import How, Resumed, Skipped, resume
from ckptmgr.run.sidecar import read_sidecar, sidecar_path
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import verify_directory
from ckptmgr.training.agreeing import on_all_ranks
from ckptmgr.training.ranks import can_agree, rank, world_size
from ckptmgr.transfer.drain import drain

logger = logging.getLogger(__name__)
Check: TypeAlias = Callable[[Manifest], None]
_warned = threading.Event()


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The checkpoint that all ranks go on from, where this rank has it.

    Attributes:
        tier: the local tier that it was chosen with; None on ranks that did not choose.
        is_own: whether this rank has put it there.
    """

    resumed: Resumed
    tier: LocalTier | None
    is_own: bool


class Chooser:
    """Chooses for one manager.

    Args:
        open_places: opens the run, and the local tier, which is at `local_dir`; given an event that the run's requests watch, or None.
        url: the run.
        new_lineage: data without a commit is no reason to stop.
        drain_s: how long uploads of what waits may take before the choice, with several machines.
    """

    def __init__(
        self,
        open_places: Callable[[threading.Event | None], tuple[RunDirectory, LocalTier]],
        local_dir: Path,
        *,
        url: str,
        new_lineage: bool,
        drain_s: float,
    ) -> None:
        self._open = open_places
        self._local_dir = local_dir
        self._url = url
        self._new_lineage = new_lineage
        self._drain_s = drain_s

    def choose(self, selector: str, check: Check) -> Chosen | None:
        """Put the checkpoint that `selector` means on this rank's disk; None on a run without any data. A collective if `can_agree`.

        Args:
            selector: rank 0's counts.
            check: is shown the manifest before anything is fetched, and on each rank before anything can be loaded; what it raises ends the choice.

        Raises:
            CkptmgrError: as `ckptmgr.run.resume.resume`; the same on all ranks, whichever it happened on.
        """
        if can_agree():
            return self._choose_for_all(selector, check)
        if world_size() > 1 and not _warned.is_set():
            _warned.set()
            logger.warning(
                "torch.distributed is not set up: each of %d ranks chooses its checkpoint for itself, and they may choose different ones; "
                "call init_process_group before",
                world_size(),
            )
        chosen = parse_selector(selector)
        run, tier = self._open(None)
        resumed = self._find(chosen, run, tier, check)
        return None if resumed is None else Chosen(resumed=resumed, tier=tier, is_own=True)

    def is_behind(self, directory: Path) -> bool:
        """Whether `directory` is what `ckptmgr resume` had put on disk for COMMAND, and training has gone on from it since; see
        `CheckpointManager.newer_than`. A collective if `can_agree`: rank 0 looks."""
        return on_all_ranks(lambda: (not can_agree() or rank() == 0) and self._is_behind(directory), aside=True)[0]

    # --- one answer for all -----------------------------------------------------------------------------------------------

    def _choose_for_all(self, selector: str, check: Check) -> Chosen | None:
        opened: list[tuple[RunDirectory, LocalTier]] = []

        def open_on_rank_0() -> _File | None:
            if rank() != 0:
                return None
            opened.append(self._open(None))
            return _File.at(opened[0][1].root / RUN_FILE)

        tier_of_rank_0 = on_all_ranks(open_on_rank_0, aside=True)[0]
        rows = on_all_ranks(lambda: (host_name(), tier_of_rank_0 is not None and tier_of_rank_0.is_here()))
        apart = _first_of_each_host(rows)
        waiting: list[Stem] = []
        if apart:
            drains = {0, *apart.values()}
            left = on_all_ranks(lambda: self._drain() if rank() in drains else (), aside=True)
            waiting = sorted({stem for each in left for stem in each}, reverse=True)

        def choose_on_rank_0() -> _Place | None:
            if rank() != 0:
                return None
            resumed = self._find(parse_selector(selector), *opened[0], check, durable=bool(apart))
            return None if resumed is None else _Place.of(_with_waiting(resumed, waiting))

        place = on_all_ranks(choose_on_rank_0, aside=True)[0]
        if place is None:
            return None
        return self._have(place, check, tier=opened[0][1] if opened else None)

    def _have(self, place: _Place, check: Check, *, tier: LocalTier | None) -> Chosen:
        """What rank 0 has at `place`, where this rank sees it, or has brought it."""
        here, is_own = place.here(), tier is not None
        while True:
            rows = on_all_ranks(lambda: (host_name(), here is not None))  # noqa: B023 - called at once
            lacking = _first_of_each_host(rows)
            if not lacking:
                break
            is_mine = rank() in lacking.values()
            brought = on_all_ranks(lambda: self._bring(place) if is_mine else None, aside=True)  # noqa: B023
            nearest = lacking.get(host_name())
            if here is None and nearest is not None:
                here, is_own = (brought[nearest] or place).here(), is_mine

        def checked() -> str:
            if here is None:
                raise ConflictError(f"checkpoint {place.stem} is gone again from {place.directory}")
            check(here.manifest)
            return here.manifest.id

        ids = on_all_ranks(checked)
        if here is None or len(set(ids)) > 1:
            raise ConflictError(f"the ranks have different checkpoints: {', '.join(ids)}", hint="start again")
        return Chosen(resumed=here, tier=tier, is_own=is_own)

    def _bring(self, place: _Place) -> _Place:
        """Rank 0's checkpoint, on this machine's disk."""
        run, tier = self._open(None)
        named = rewound_by_command(run)
        if named is None or named.manifest.stem != place.stem:
            logger.info("rank %d fetches %s, for rank 0's %s is not on its disk", rank(), place.stem, place.directory)
            chosen = parse_selector(f"id:{place.stem}")
            named = resume(run, chosen, under=tier.resume_folder(), tier=tier, lasting=False)
        return _Place.of(replace(named, how=place.how, skipped=place.skipped, attempt=place.attempt))

    def _drain(self) -> tuple[Stem, ...]:
        """Upload what waits in the local tier; what still does after `drain_s`, newest first."""
        tier = LocalTier.find(self._local_dir)
        if tier is None or not tier.pending(self._url):
            return ()
        stop = threading.Event()
        timer = threading.Timer(self._drain_s, stop.set)
        timer.daemon = True
        timer.start()
        try:
            run, tier = self._open(stop)
            done = drain(tier, run, wait_s=self._drain_s, stop=stop)
        finally:
            timer.cancel()
        for stem in done.pending:
            why = done.errors.get(stem, f"not uploaded within {self._drain_s:.0f} s")
            logger.warning("%s is only in %s, where other machines cannot get it: %s", stem, tier.root, why)
        return done.pending

    # --- one rank's choice ------------------------------------------------------------------------------------------------

    def _find(
        self, selector: Selector, run: RunDirectory, tier: LocalTier, check: Check, *, durable: bool = False
    ) -> Resumed | None:
        if not selector.is_explicit and (named := rewound_by_command(run)) is not None:
            check(named.manifest)
            return named
        try:
            folder = tier.resume_folder()
            return resume(run, selector, under=folder, tier=tier, check=check, durable=durable, lasting=False)
        except CheckpointNotFoundError as exc:
            if not getattr(exc, "empty", False):
                raise
            logger.info("%s has no checkpoint yet: starting from scratch", run.url)
        except NotCommittedError as exc:
            if not self._new_lineage or hasattr(exc, "only_in"):
                raise
            logger.warning("%s: starting a new lineage", exc)
        return None

    def _is_behind(self, directory: Path) -> bool:
        named = os.environ.get(RESUME_ENV)
        if not named or Path(os.path.abspath(named)) != Path(os.path.abspath(directory)):
            return False
        try:
            sidecar = read_sidecar(directory)
        except CheckpointNotFoundError:
            return False
        run, tier = self._open(None)
        stem = sidecar.manifest.stem
        if sidecar.manifest.run_uuid != run.uuid or (
            sidecar.how == "explicit" and not _has_begun(run.attempts(), stem)
        ):
            return False
        chain = merged(*look(run, tier)).chain()
        if stem not in chain[1:]:
            return False
        logger.warning(
            "this process was started again: it goes on from %s, not from %s, which was the one to resume from at first",
            chain[0],
            stem,
        )
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A file as one rank sees it. On another disk a file with this path was not changed in the same nanosecond."""

    path: str
    inode: int
    size: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def at(cls, path: Path) -> _File:
        found = os.stat(path)
        return cls(
            path=os.fspath(path),
            inode=found.st_ino,
            size=found.st_size,
            modified_ns=found.st_mtime_ns,
            changed_ns=found.st_ctime_ns,
        )

    def is_here(self) -> bool:
        with contextlib.suppress(OSError):
            return self.at(Path(self.path)) == self
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A `Resumed` as other ranks are told of it. Its manifest, which may be long, they read where they see the directory."""

    path: str
    directory: str
    sidecar: _File
    stem: Stem
    source: Literal["local", "remote"] | None
    skipped: tuple[Skipped, ...]
    how: How
    attempt: int

    @classmethod
    def of(cls, resumed: Resumed) -> _Place:
        return cls(
            path=os.fspath(resumed.path),
            directory=os.fspath(resumed.directory),
            sidecar=_File.at(sidecar_path(resumed.directory)),
            stem=resumed.manifest.stem,
            source=resumed.source,
            skipped=resumed.skipped,
            how=resumed.how,
            attempt=resumed.attempt,
        )

    def here(self) -> Resumed | None:
        """What this rank sees there; None if it is on another disk, or cannot be read."""
        if not self.sidecar.is_here():
            return None
        try:
            manifest = read_sidecar(Path(self.directory)).manifest
        except (CkptmgrError, OSError) as error:
            logger.warning("what rank 0 has put into %s cannot be read here: %s", self.directory, error)
            return None
        return Resumed(
            path=Path(self.path),
            directory=Path(self.directory),
            manifest=manifest,
            source=self.source,
            skipped=self.skipped,
            how=self.how,
            attempt=self.attempt,
        )


def _first_of_each_host(rows: Iterable[tuple[str, bool]]) -> dict[str, int]:
    """Of the ranks that lack something, the first one of each host; `rows` has the host of each rank, and whether it has the thing."""
    first: dict[str, int] = {}
    for number, (host, has_it) in enumerate(rows):
        if not has_it:
            first.setdefault(host, number)
    return first


def _with_waiting(resumed: Resumed, waiting: Sequence[Stem]) -> Resumed:
    """`resumed` with those of `waiting` named that would have been chosen, were they in the store."""
    if resumed.how != "auto":
        return resumed
    late = [stem for stem in waiting if stem > resumed.manifest.stem]
    skipped = [Skipped(stem=stem, why="not in the store yet, where other machines could get it") for stem in late]
    return replace(resumed, skipped=(*skipped, *resumed.skipped))


def rewound_by_command(run: RunDirectory) -> Resumed | None:
    """The checkpoint that `ckptmgr resume RUN SELECTOR -- COMMAND` named and put on disk for this process; None if there is none.

    Only for an explicit selector: an automatic one meant the newest, and that is what a restart within COMMAND should get as well. For the same
    reason a rewind counts once: when an attempt has begun from it, the newest of that lineage is the one to go on from.

    Raises:
        IntegrityError: the directory is not what was put there.
    """
    named = os.environ.get(RESUME_ENV)
    if not named:
        return None
    path = Path(os.path.abspath(named))
    try:
        sidecar = read_sidecar(path)
    except CheckpointNotFoundError:
        return None
    manifest = sidecar.manifest
    if sidecar.how != "explicit" or manifest.run_uuid != run.uuid:
        return None
    if _has_begun(run.attempts(), manifest.stem):
        return None
    _, damage = verify_directory(path)
    if damage:
        raise IntegrityError(
            f"{path} is no longer checkpoint {manifest.id}: {damage[0].file} {damage[0].why}",
            hint="run `ckptmgr resume` again with --replace",
        )
    directory = path.parent if path.is_file() else path
    return Resumed(path=path, directory=directory, manifest=manifest, source=None, how="explicit")


def _has_begun(attempts: Mapping[int, AttemptRecord], stem: Stem) -> bool:
    """Whether an attempt has begun from `stem` since `ckptmgr resume` has put it on disk for COMMAND by an explicit selector."""
    chosen_at = os.environ.get(ATTEMPT_ENV, "")
    if chosen_at.isdecimal():
        return max(attempts, default=0) > int(chosen_at)
    # Set by hand, or by an older version: the last rewind of the present lineage was this one.
    record = attempts.get(max(attempts, default=0))
    while record is not None and record.how == "auto" and record.parent is not None:
        record = attempts.get(record.parent.attempt)
    return record is not None and record.how == "explicit" and record.parent == stem
