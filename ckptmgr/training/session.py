"""One attempt that saves: what exists between `CheckpointManager.begin` and `close`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import CheckpointNotFoundError, CkptmgrError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem, parse_stem
from ckptmgr.core.manifest import How
from ckptmgr.run.ancestry import identify
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import host_name
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.run.start import claim_attempt, refuse_unrestored
from ckptmgr.run.tier import LocalTier, next_seq
from ckptmgr.training.ranks import rank
from ckptmgr.training.saving import Saved, Saver, Watcher
from ckptmgr.training.staging import available_memory_bytes
from ckptmgr.transfer.alarm import Alarm, FailureBudget
from ckptmgr.transfer.messages import Committed, Event, Failed, Task
from ckptmgr.transfer.metrics import MetricsLog
from ckptmgr.transfer.queue import QueueRules, Room, shortage
from ckptmgr.transfer.tidying import Retention, Tidying
from ckptmgr.transfer.uploader import Uploader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What this process restored, and so what its attempt descends from. `restored` is False for a start from scratch."""

    stem: Stem | None = None
    how: How = "auto"
    restored: bool = False

    def __str__(self) -> str:
        if self.how == "fresh":
            return "a new lineage"
        return "from scratch" if self.stem is None else f"from {self.stem}, {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an attempt saves and uploads; see `CheckpointManager`."""

    retention: Retention
    queue: QueueRules
    failures: FailureBudget
    in_process: bool
    linger_s: float
    pause_s: float
    close_timeout_s: float
    strict: bool
    retry: RetryPolicy
    wrap_backend: Callable[[Backend], Backend] | None
    prometheus: Path | None


def parent_of(directory: Path, run: RunDirectory, tier: LocalTier) -> Parent:
    """Which checkpoint of `run` the directory is that a trainer resumed from; one that is none of `run`'s does not count as restored."""
    stem = parse_stem(directory.name)
    if stem is not None and directory.parent == tier.data_dir(stem).parent:
        return Parent(stem=stem, restored=True)
    try:
        sidecar = read_sidecar(directory)
    except CheckpointNotFoundError:
        return _identified(directory, run, tier)
    if sidecar.manifest.run_uuid != run.uuid:
        logger.warning("%s is checkpoint %s of another run", directory, sidecar.manifest.id)
        return Parent()
    return Parent(stem=sidecar.manifest.stem, how=sidecar.how, restored=True)


def _identified(directory: Path, run: RunDirectory, tier: LocalTier) -> Parent:
    """A trainer's own directory, such as `output_dir/checkpoint-500`: it counts if a checkpoint of the run has the same bytes."""
    stem = identify(directory, run, merged(*look(run, tier)))
    if stem is None:
        logger.warning("%s is not a checkpoint of %s, as far as its files say", directory, run.url)
        return Parent()
    return Parent(stem=stem, restored=True)


class Session(Watcher):
    """A claimed attempt with its local tier, its writer and its uploader. Made by `begin_session`.

    Attributes:
        saved_count, skipped_count: saves committed locally, and saves that the queue's rules did not let happen.
    """

    def __init__(
        self,
        run: RunDirectory,
        tier: LocalTier,
        *,
        attempt: int,
        seq: int,
        parent: Parent,
        settings: Settings,
        stop: threading.Event,
        failed: Callable[[int, CkptmgrError], None],
    ) -> None:
        self.run = run
        self.tier = tier
        self.attempt = attempt
        self.saved_count = self.skipped_count = 0
        self.alarm = Alarm(settings.failures)
        self._stops = settings.failures.action == "stop"
        self._failed = failed
        labels = {"run": run.url, "host": host_name(), "rank": str(rank()), "attempt": str(attempt)}
        self._metrics = MetricsLog(tier.root, prometheus=settings.prometheus, labels=labels)
        tidying = Tidying(run, tier, attempt=attempt, retention=settings.retention)
        self.uploader = Uploader(
            tier,
            run,
            stop=stop,
            task=None if settings.in_process else _task(run, tier, attempt, settings),
            committed=tidying,
            pause_s=settings.pause_s,
            exit_timeout_s=settings.close_timeout_s,
            strict=settings.strict,
            observe=self._observe,
        )
        self._tidying = tidying
        self.saver = Saver(
            tier,
            target=run.url,
            attempt=attempt,
            parent=parent.stem,
            seq=seq,
            rules=settings.queue,
            watcher=self,
        )

    @property
    def superseded(self) -> bool:
        """Whether a newer attempt has been claimed (I12), as far as the last commit saw."""
        return self.uploader.superseded or self._tidying.superseded

    def why_stop(self) -> str | None:
        """Why training should end, by the failure budget; says it, or that it is used up, in the log."""
        why = self.alarm.check()
        if why is not None:
            logger.error("%s", why)
        return self.alarm.exceeded if self._stops else None

    def close(self, timeout_s: float | None) -> list[Stem]:
        """Write and upload what is pending, for `timeout_s` at most, and let go of the local tier; what is left, newest first."""
        self.saver.hurry()
        started = time.monotonic()
        if not self.saver.close(timeout_s):
            logger.error("a save was still being written after %g s; it goes on until the program ends", timeout_s)
        spent = time.monotonic() - started
        pending = self.uploader.close(None if timeout_s is None else max(0.0, timeout_s - spent))
        self.tier.release()
        return pending

    # --- what becomes of saves (writer thread) ----------------------------------------------------------------------------

    def saved(self, saved: Saved) -> None:
        manifest = saved.manifest
        # "queued", and no stronger word: it is durable in the store only when its manifest is there (K043).
        logger.info("step %d queued: %s (%s)", manifest.step, manifest.id, ", ".join(manifest.reasons))
        self.saved_count += 1
        self.alarm.saved()
        self.uploader.notify()
        self._metrics.record(
            "save",
            id=manifest.id,
            step=manifest.step,
            size_bytes=manifest.size_bytes,
            stall_s=saved.stall_s,
            wait_s=saved.wait_s,
            stage_s=saved.stage_s,
            write_s=saved.write_s,
        )

    def failed(self, step: int, error: CkptmgrError) -> None:
        self._failed(step, error)
        self._metrics.record("save_failed", step=step, error=str(error))

    def skipped(self, step: int, why: str) -> None:
        self.skipped_count += 1
        logger.warning("step %d is not saved (skipped: %d so far): %s", step, self.skipped_count, why)
        self._metrics.record("skip", step=step, why=why)

    def dropped(self, room: Room) -> None:
        for stem in room.dropped:
            self.uploader.tally.dropped(stem)
            self._metrics.record("drop", id=str(stem), step=stem.step)

    # --- what becomes of uploads (uploader thread) ------------------------------------------------------------------------

    def _observe(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.alarm.committed()
            self._metrics.record(
                "upload",
                id=str(event.stem),
                step=event.stem.step,
                size_bytes=event.size_bytes,
                sent_bytes=event.sent_bytes,
                seconds=event.seconds,
                retries=event.retries,
                lag_s=event.lag_s,
            )
        elif isinstance(event, Failed) and event.stem is not None:
            self.alarm.failed(error=str(event.error))
            self._metrics.record("upload_failed", id=str(event.stem), step=event.stem.step, error=str(event.error))


def begin_session(
    run: RunDirectory,
    tier: LocalTier,
    parent: Parent,
    *,
    new_lineage: bool,
    settings: Settings,
    stop: threading.Event,
    failed: Callable[[int, CkptmgrError], None],
    expected_bytes: int | None = None,
) -> Session:
    """Look, refuse what would go wrong, claim an attempt, tidy the tier, and begin to drain it.

    Args:
        new_lineage: begin one of its own over existing commits instead of refusing (I12).
        failed: called with the step and the error of each save that fails after it was staged, in the writer thread.
        expected_bytes: about what one checkpoint will take, if that is known.

    Raises:
        ConflictError: the run has commits and nothing of it was restored, or the tier is in use or another run's; nothing was changed.
        BackendError: the store could not be asked (I7).
    """
    tier.hold()
    try:
        history = merged(*look(run, tier))
        if not parent.restored and history.has_commits:
            if not new_lineage:
                refuse_unrestored(run, history)
            parent = Parent(how="fresh")
        record = claim_attempt(run, how=parent.how, parent=parent.stem)
        tier.note_attempt(record)
        for name in tier.clean():
            logger.info("removed %s, which an earlier process left half written", name)
    except BaseException:
        tier.release()
        raise
    logger.info("attempt %d of %s begins (%s)", record.number, run.url, parent)
    warn_of_shortage(tier, max(expected_bytes or 0, _last_size(history)), settings.queue)
    seq = next_seq([*history.manifests, *history.broken, *history.closed], record.number)
    session = Session(
        run,
        tier,
        attempt=record.number,
        seq=seq,
        parent=parent,
        settings=settings,
        stop=stop,
        failed=failed,
    )
    session.uploader.notify()
    return session


def warn_of_shortage(tier: LocalTier, needed_bytes: int, rules: QueueRules, *, staged: bool = True) -> None:
    """Say at the start, not after hours, that a checkpoint of `needed_bytes` does not fit the disk, or its copy the memory (K069)."""
    if needed_bytes == 0:
        return
    why = shortage(tier, needed_bytes, rules)
    if why is not None:
        logger.warning("saves may fail: %s", why)
    available = available_memory_bytes() if staged else None
    if available is not None and available < needed_bytes:
        logger.warning(
            "saves may fail: a copy of the state takes about %d bytes of memory, and %d are available",
            needed_bytes,
            available,
        )


def _last_size(history: History) -> int:
    newest = history.newest()
    manifest = None if newest is None else history.manifests.get(newest)
    return 0 if manifest is None else manifest.size_bytes


def _task(run: RunDirectory, tier: LocalTier, attempt: int, settings: Settings) -> Task:
    return Task(
        url=run.url,
        record=run.record,
        local_dir=os.fspath(tier.root),
        attempt=attempt,
        retention=settings.retention,
        retry=settings.retry,
        wrap_backend=settings.wrap_backend,
        linger_s=settings.linger_s,
        pause_s=settings.pause_s,
        log_level=logging.getLogger("ckptmgr").getEffectiveLevel(),
    )
