"""One attempt that saves: what exists between `CheckpointManager.begin` and `close`."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import CkptmgrError, ConfigError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import host_name
from ckptmgr.run.start import claim_attempt, refuse_unrestored
from ckptmgr.run.tier import LocalTier, next_seq
from ckptmgr.training.parent import Parent
from ckptmgr.training.ranks import rank
from ckptmgr.training.report import CloseReport
from ckptmgr.training.saving import Facts, Saved, Saver, Watcher
from ckptmgr.training.staging import available_memory_bytes
from ckptmgr.transfer.alarm import Alarm, FailureBudget
from ckptmgr.transfer.ending import LeftS, no_limit
from ckptmgr.transfer.hosting import record_upload
from ckptmgr.transfer.messages import Committed, Event, Failed, Task
from ckptmgr.transfer.metrics import MetricsLog
from ckptmgr.transfer.queue import EMERGENCIES, QueueRules, Room, shortage
from ckptmgr.transfer.tidying import Retention, Tidying
from ckptmgr.transfer.uploader import Uploader

logger = logging.getLogger(__name__)


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
    raise_save_errors: bool
    retry: RetryPolicy
    wrap_backend: Callable[[Backend], Backend] | None
    prometheus: Path | None


class Session(Watcher):
    """A claimed attempt with its local tier, its writer and its uploader. Made by `begin_session`.

    Attributes:
        saved_count, skipped_count: saves committed locally, and saves that the queue's rules did not let happen.
        save_failures, last_save_error: saves that failed, and why the last one did.
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
    ) -> None:
        self.run = run
        self.tier = tier
        self.attempt = attempt
        self.saved_count = self.skipped_count = 0
        self.alarm = Alarm(settings.failures)
        self._stops = settings.failures.action == "stop"
        self.save_failures = 0
        self.last_save_error = ""
        self._raises = settings.raise_save_errors
        self._unraised: CkptmgrError | None = None
        labels = _labels(run, attempt)
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

    def save(self, facts: Facts, begin_to: Callable[[Saver, bool], str | None], *, wait: bool) -> str | None:
        """Begin a save, and wait for it if that is asked for, or if it is an emergency.

        Args:
            begin_to: begins it, given the saver and whether it is an emergency.

        Returns:
            The id; None if nothing is saved, for a reason that is logged and counted.

        Raises:
            ConfigError: the state cannot be saved: a mistake in the program.
            CkptmgrError: this save failed, or an earlier one did in the background, where that is to be raised.
        """
        self.raise_late()
        started = time.monotonic()
        urgent = not EMERGENCIES.isdisjoint(facts.reasons)
        if urgent:
            self.hurry()
        failures = self.save_failures
        try:
            begun = begin_to(self.saver, urgent)
        except CkptmgrError as exc:
            self.failed(facts.step, exc)
            if isinstance(exc, ConfigError):
                self._unraised = exc
            begun = None
        if wait or urgent:
            self.saver.wait()
        saved = begun if self.save_failures == failures else None
        if urgent:
            sources = EMERGENCIES.intersection(facts.reasons)
            self._metrics.record(
                "preempted",
                step=facts.step,
                source=min(sources),
                save_s=time.monotonic() - started,
                saved=saved is not None,
            )
        if wait or urgent or begun is None:
            self.raise_late()
        return saved

    def raise_late(self) -> None:
        """Raise what a save in the background failed by, once, where that is to be raised."""
        error, self._unraised = self._unraised, None
        if error is not None:
            raise error

    def hurry(self) -> None:
        """This machine is about to go."""
        self.saver.hurry()
        self.uploader.hurry()

    def why_stop(self) -> str | None:
        """Why training should end, by the failure budget; says it, or that it is used up, in the log."""
        why = self.alarm.check()
        if why is not None:
            logger.error("%s", why)
        return self.alarm.exceeded if self._stops else None

    def close(self, timeout_s: float | None, *, left_s: LeftS = no_limit) -> list[Stem]:
        """Write and upload what is pending, for `timeout_s` at most, and let go of the local tier; what is left, newest first.

        Args:
            left_s: asked while waiting; the smaller of the two counts.
        """
        started = time.monotonic()
        try:
            self.saver.hurry()
            is_written = self.saver.close(timeout_s, left_s=left_s)
            spent = time.monotonic() - started
            if not is_written:
                logger.error("a save was still being written after %.0f s; it goes on until the program ends", spent)
            return self.uploader.close(None if timeout_s is None else max(0.0, timeout_s - spent), left_s=left_s)
        except BaseException:  # Ctrl-C, maybe before there was an upload to wait for
            self.uploader.give_up()
            raise
        finally:
            self.tier.release()
            self._metrics.flush()

    def report(self, pending: Sequence[Stem]) -> CloseReport:
        """What this session did, and left behind: `pending`, which `close` returned. Errors in it count as polled."""
        uploads = self.uploader.tally.progress("")
        return CloseReport(
            pending=tuple(str(stem) for stem in pending),
            errors=tuple(self.uploader.poll_errors()),
            saved=self.saved_count,
            committed=uploads.committed,
            skipped=self.skipped_count,
            dropped=uploads.dropped,
            save_failures=self.save_failures,
            upload_failures=uploads.failures,
        )

    # --- what becomes of saves (writer thread) ----------------------------------------------------------------------------

    def saved(self, saved: Saved) -> None:
        manifest = saved.manifest
        # "queued", and no stronger word: it is durable in the store only when its manifest is there (K043).
        logger.info("step %d queued: %s (%s)", manifest.step, manifest.id, ", ".join(manifest.reasons))
        self.saved_count += 1
        self.alarm.saved(manifest.stem)
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
        self.save_failures += 1
        self.last_save_error = str(error)
        if self._raises:
            self._unraised = error
        elif not isinstance(error, ConfigError):  # that one is raised
            logger.error("step %d was not saved (failure %d), training goes on: %s", step, self.save_failures, error)
        self._metrics.record("save_failed", step=step, error=str(error))

    def skipped(self, step: int, why: str) -> None:
        self.skipped_count += 1
        logger.warning("step %d is not saved (skipped: %d so far): %s", step, self.skipped_count, why)
        self._metrics.record("skip", step=step, why=why)

    def dropped(self, room: Room) -> None:
        self.uploader.tally.dropped(len(room.dropped))
        for stem in room.dropped:
            self._metrics.record("drop", id=str(stem), step=stem.step)

    # --- what becomes of uploads (uploader thread) ------------------------------------------------------------------------

    def _observe(self, event: Event) -> None:
        if isinstance(event, Committed):
            self.alarm.committed(event.stem)
        elif isinstance(event, Failed) and event.stem is not None:
            self.alarm.failed(error=str(event.error))
        record_upload(self._metrics, event)


def begin_session(
    run: RunDirectory,
    tier: LocalTier,
    parent: Parent,
    *,
    new_lineage: bool,
    settings: Settings,
    stop: threading.Event,
    expected_bytes: int | None = None,
) -> Session:
    """Look, refuse what would go wrong, claim an attempt, tidy the tier, and begin to drain it.

    Args:
        new_lineage: begin one of its own over existing commits instead of refusing (I12).
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
        _warn_of_going_back(run, history, parent)
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
    )
    session.uploader.notify()
    return session


def _warn_of_going_back(run: RunDirectory, history: History, parent: Parent) -> None:
    """A path that was right when it was written down need not be so any more: it must not leave newer work behind in silence."""
    newest = history.newest()
    if parent.how == "auto" and parent.stem is not None and newest is not None and newest != parent.stem:
        logger.warning(
            "training goes on from %s, and the newest checkpoint of %s is %s: what was done after the former is done again",
            parent.stem,
            run.url,
            newest,
        )


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


def _labels(run: RunDirectory, attempt: int) -> dict[str, str]:
    return {"run": run.url, "host": host_name(), "rank": str(rank()), "attempt": str(attempt)}


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
        labels=_labels(run, attempt),
    )
