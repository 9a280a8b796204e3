"""Saving without stopping training.

    training thread: wait for the slot → stage (copy into reused host buffers)   |   writer thread: room → serialise, digest, fsync → local commit

The training thread pays for one copy. Everything that can be slow or fail, the disk above all, happens in the writer thread, whose failures are told
by callbacks. One save is in flight at a time, so that memory holds one state besides the live one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckptmgr.backends.atomic import fsync_file
from ckptmgr.core.conditions import Conditions
from ckptmgr.core.errors import CkptmgrError, DiskFullError, UploadError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import FileEntry, Manifest
from ckptmgr.run.contents import describe, storable_files
from ckptmgr.run.identity import host_name, new_nonce, utc_stamp
from ckptmgr.run.intake import take
from ckptmgr.run.tier import LocalTier
from ckptmgr.training import state as training_state
from ckptmgr.training.checking import epoch_of, metrics_of, reasons_of, step_of
from ckptmgr.training.ranks import world_size
from ckptmgr.training.staging import Stager
from ckptmgr.training.writer import BackgroundWriter
from ckptmgr.transfer.ending import LeftS, no_limit, slices
from ckptmgr.transfer.queue import QueueRules, Room, make_room, trim

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a manifest says of a save besides its files."""

    step: int
    epoch: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    reasons: Sequence[str] = ()
    metric_modes: Mapping[str, str] = field(default_factory=dict)
    framework: Mapping[str, str] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)

    @classmethod
    def checked(
        cls,
        step: int,
        *,
        epoch: float | None,
        metrics: Mapping[str, float] | None,
        reasons: Sequence[str],
        metric_modes: Mapping[str, str],
        framework: Mapping[str, str] | None = None,
    ) -> Facts:
        """What a caller hands in.

        Raises:
            ConfigError: it makes no sense.
        """
        return cls(
            step=step_of(step),
            epoch=epoch_of(epoch),
            metrics=metrics_of(metrics),
            reasons=reasons_of(reasons),
            metric_modes=metric_modes,
            framework=framework or {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A local commit, and what it took in seconds: `wait_s` for the save before it, `stage_s` for the copy, `write_s` until it was durable."""

    manifest: Manifest
    wait_s: float
    stage_s: float
    write_s: float

    @property
    def stall_s(self) -> float:
        """How long the training thread was held up."""
        return self.wait_s + self.stage_s


class Watcher:
    """What becomes of saves, told in the writer thread (`skipped` also in the training thread). Override what you need."""

    def saved(self, saved: Saved) -> None:
        """A save is committed locally."""

    def failed(self, step: int, error: CkptmgrError) -> None:
        """A save failed; nothing of it is left."""

    def skipped(self, step: int, why: str) -> None:
        """A save was not made, as the queue's rules say."""

    def dropped(self, room: Room) -> None:
        """Saves that were waiting to be uploaded gave way."""


class Saver:
    """Commits the saves of one attempt to the local tier. `save` and `take` are called by the training thread only.

    Args:
        target: URL of the run that the saves go to.
        parent: id of the checkpoint that the attempt descends from.
        seq: number of the first save.
        rules: what to do when the disk, the queue or the writer is full.
    """

    def __init__(
        self,
        tier: LocalTier,
        *,
        target: str,
        attempt: int,
        parent: Stem | None,
        seq: int,
        rules: QueueRules,
        watcher: Watcher,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._tier = tier
        self._target = target
        self._attempt = attempt
        self._parent = parent
        self._seq = seq
        self._rules = rules
        self._watcher = watcher
        self._clock = clock
        self._owner = os.getpid()
        self._hurried = False
        self._writer = BackgroundWriter()
        self._stager = Stager()

    def save(self, state: Mapping[str, Any], facts: Facts, *, urgent: bool = False) -> str | None:
        """Stage `state` and have it committed; the id it will have, or None if it was skipped.

        Args:
            urgent: an emergency: saved even where the queue's rules would skip it.

        Raises:
            ConfigError, CheckpointError: the state cannot be captured; nothing was saved.
        """
        started = self._clock()
        if not self._enter(facts.step, urgent):
            return None
        entered = self._clock()
        with self._slot():
            stem, created_at = self._next_stem(facts.step), utc_stamp()
            snapshot = self._stager.capture(state)
        staged = self._clock()

        def write() -> Saved | None:
            try:
                snapshot.ready()
                if not self._has_room(facts, snapshot.size_bytes, urgent):
                    return None
                prepared = self._tier.prepare(stem)
                files = self._or_discard(prepared, lambda: training_state.write(snapshot, prepared))
            finally:
                snapshot.release()
            entries = [FileEntry.of(file.path, file.digests) for file in files]
            times = (entered - started, staged - entered, staged)
            return self._commit(stem, facts, prepared, entries, created_at, times)

        self._submit(write, facts.step)
        return str(stem)

    def take(self, directory: Path, facts: Facts, *, final: bool = True, urgent: bool = False) -> str | None:
        """Have the files that a framework wrote to `directory` committed; the id they will have, or None if the save was skipped.

        They are linked (or copied, unless `final`) before this returns, so the framework may remove them at once.

        Raises:
            CkptmgrError: they could not be taken; nothing is left of it.
        """
        started = self._clock()
        if not self._enter(facts.step, urgent):
            return None
        entered = self._clock()
        with self._slot():
            stem, created_at = self._next_stem(facts.step), utc_stamp()
            prepared = take(self._tier, directory, stem, final=final)
        taken = self._clock()

        def write() -> Saved | None:
            def describe_all() -> Sequence[FileEntry]:
                # The framework has not synced them; a commit must not outlive a power cut that its files do not.
                names = storable_files(prepared)
                for name in names:
                    fsync_file(prepared / name)
                return describe(prepared)

            def admitted() -> bool:
                size = sum((prepared / name).stat().st_size for name in storable_files(prepared))
                # Links take no room on the disk, and a copy is there already.
                return self._has_room(facts, size, urgent, disk_bytes=0)

            if not self._or_discard(prepared, admitted):
                self._tier.discard(prepared)
                return None
            entries = self._or_discard(prepared, describe_all)
            times = (entered - started, taken - entered, taken)
            return self._commit(stem, facts, prepared, entries, created_at, times)

        self._submit(write, facts.step)
        return str(stem)

    def reserve(self, state: Mapping[str, Any]) -> int:
        """Make the buffers for `state` ready, in the background; the bytes that they take."""
        return self._stager.reserve(state)

    def hurry(self) -> None:
        """Wait no longer for uploads to make room: the machine is about to go, or the program to end."""
        self._hurried = True

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until what was saved is committed locally, or has failed; False if that took longer."""
        return self._writer.wait(timeout_s)

    def close(self, timeout_s: float | None, *, left_s: LeftS = no_limit) -> bool:
        """As `wait`, and end the writer thread; see `slices` for `left_s`."""
        done = self._writer.close(0.0) or any(self._writer.wait(slice_s) for slice_s in slices(timeout_s, left_s))
        self._stager.clear()
        return done

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _enter(self, step: int, urgent: bool) -> bool:
        if os.getpid() != self._owner:
            self._watcher.skipped(step, "this process is a fork of the one that saves")
            return False
        wait_s = 0.0 if self._rules.when_busy == "skip" and not urgent else self._rules.max_block_s
        if self._writer.acquire(wait_s):
            return True
        waited = f"after {wait_s:g} s" if wait_s else "and it is not waited for"
        self._watcher.skipped(step, f"the save before it is still being written {waited}")
        return False

    @contextlib.contextmanager
    def _slot(self) -> Iterator[None]:
        """Give the writer's slot back if nothing comes of it: no save after that would ever get it."""
        try:
            yield
        except BaseException:
            self._writer.give_back()
            raise

    def _next_stem(self, step: int) -> Stem:
        stem = Stem(self._attempt, step, self._seq, new_nonce())
        self._seq += 1
        return stem

    def _submit(self, write: Callable[[], Saved | None], step: int) -> None:
        def job() -> None:
            try:
                saved = write()
            except CkptmgrError as error:
                self._watcher.failed(step, error)
            except Exception as error:  # a bug, or a disk that fails in a way nobody foresaw: training goes on (I9)
                logger.exception("unexpected failure while saving step %d", step)
                self._watcher.failed(step, UploadError(f"the save of step {step} failed unexpectedly: {error!r}"))
            else:
                if saved is not None:
                    self._watcher.saved(saved)

        self._writer.submit(job)

    def _has_room(self, facts: Facts, incoming_bytes: int, urgent: bool, disk_bytes: int | None = None) -> bool:
        room = make_room(
            self._tier,
            self._target,
            incoming_bytes,
            self._rules,
            urgent=urgent,
            disk_bytes=disk_bytes,
            hurry=lambda: self._hurried,
        )
        if room.dropped:
            self._watcher.dropped(room)
        if room.disk_full:
            raise DiskFullError(
                room.why, hint="free some space", backend="file", operation="write", key=str(self._tier.root)
            )
        if not room.admitted:
            self._watcher.skipped(facts.step, room.why)
        return room.admitted

    def _trim(self) -> None:
        """The save that was the newest until now may have to go. Its own is committed already, whatever happens here."""
        try:
            room = trim(self._tier, self._target, self._rules)
        except CkptmgrError as error:
            logger.warning("the queue of uploads is over its limit, and could not be shortened: %s", error)
            return
        if room.dropped:
            self._watcher.dropped(room)

    def _or_discard(self, prepared: Path, write: Callable[[], Any]) -> Any:
        try:
            return write()
        except BaseException:
            self._tier.discard(prepared)
            raise

    def _commit(
        self,
        stem: Stem,
        facts: Facts,
        prepared: Path,
        files: Sequence[FileEntry],
        created_at: str,
        times: tuple[float, float, float],
    ) -> Saved:
        manifest = Manifest(
            stem=stem,
            run_uuid=self._tier.run.uuid,
            files=tuple(files),
            epoch=facts.epoch,
            parent=None if self._parent is None else str(self._parent),
            created_at=created_at,
            reasons=tuple(facts.reasons),
            metrics=dict(facts.metrics),
            metric_modes=dict(facts.metric_modes),
            world_size=world_size(),
            producer={**_producer(), **facts.framework},
            conditions=facts.conditions.as_document(),
        )
        self._or_discard(prepared, lambda: self._tier.commit(manifest, prepared, target=self._target))
        self._trim()
        wait_s, stage_s, staged_at = times
        return Saved(manifest=manifest, wait_s=wait_s, stage_s=stage_s, write_s=self._clock() - staged_at)


def _producer() -> dict[str, str]:
    from ckptmgr import __version__

    return {
        "framework": "ckptmgr",
        "ckptmgr": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": host_name(),
    }
