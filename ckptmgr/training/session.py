"""One attempt that saves: what exists between `CheckpointManager.begin` and `close`, and what it says of itself."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from ckptmgr.core.errors import CkptmgrError, ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import host_name
from ckptmgr.run.tier import LocalTier
from ckptmgr.training.ending import say_what_is_left
from ckptmgr.training.parent import Parent
from ckptmgr.training.ranks import rank
from ckptmgr.training.report import CloseReport, ManagerStatus
from ckptmgr.training.saving import Facts, Saved, Saver, Watcher
from ckptmgr.training.settings import Settings
from ckptmgr.training.staging import available_memory_bytes
from ckptmgr.transfer.alarm import Alarm
from ckptmgr.transfer.ending import LeftS, no_limit
from ckptmgr.transfer.hosting import record_upload
from ckptmgr.transfer.messages import Committed, Event, Failed, Task
from ckptmgr.transfer.metrics import MetricsLog
from ckptmgr.transfer.queue import EMERGENCIES, QueueRules, Room, shortage
from ckptmgr.transfer.tidying import Tidying
from ckptmgr.transfer.uploader import Uploader

logger = logging.getLogger(__name__)


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
        self._settings = settings
        self._report: CloseReport | None = None
        self.save_failures = 0
        self.last_save_error = ""
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
            unwanted=tidying.unwanted,
            pause_s=settings.retry_after_s,
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

    def save(self, facts: Facts, begin_to: Callable[[Saver, Facts, bool], str | None], *, wait: bool) -> str | None:
        """Begin a save, and wait for it if that is asked for, or if it is an emergency.

        Args:
            begin_to: begins it, given the saver, the facts, and whether it is an emergency.

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
            begun = begin_to(self.saver, facts, urgent)
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

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Get the buffers for saves of `state` ready in the background; warns when the memory or the disk is too small for it."""
        if not self.is_closed:
            warn_of_shortage(self.tier, self.saver.reserve(state), self._settings.queue)

    def hurry(self, deadline_s: float | None = None) -> None:
        """This machine is about to go, in `deadline_s`, if that is known."""
        if deadline_s is not None:
            logger.info("uploads hurry: %.0f s are left", deadline_s)
        self.saver.hurry()
        self.uploader.hurry()

    def why_stop(self) -> str | None:
        """Why training should end, by the failure budget; says it, or that it is used up, in the log."""
        why = self.alarm.check()
        if why is not None:
            logger.error("%s", why)
        return self.alarm.exceeded if self._settings.failures.action == "stop" else None

    def status(self) -> ManagerStatus:
        """What is pending, what failed, and whether a newer attempt has taken over. Reads the local tier only, never the store."""
        return ManagerStatus(
            run=self.run.url,
            local_dir=str(self.tier.root),
            attempt=self.attempt,
            superseded=self.superseded,
            saved=self.saved_count,
            skipped=self.skipped_count,
            save_failures=self.save_failures,
            last_save_error=self.last_save_error,
            uploads=self.uploader.status(),
        )

    # --- ending -----------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called, and not interrupted."""
        return self._report is not None

    def close(self, timeout_s: float | None = None, *, left_s: LeftS = no_limit) -> CloseReport:
        """Write and upload what is pending, let go of the local tier, and say what was done and what is left. The second time it only says so.

        Args:
            timeout_s: seconds to wait; None for the `close_timeout_s` of the settings.
            left_s: asked while waiting; the smaller of the two counts.

        Raises:
            KeyboardInterrupt: what is left is named; the next call tries again.
            CkptmgrError: a save failed in the background, and that is to be raised; everything is closed.
        """
        if self._report is not None:
            return self._report
        try:
            pending = self._let_go(self._settings.close_timeout_s if timeout_s is None else timeout_s, left_s)
        except KeyboardInterrupt:
            say_what_is_left(self.run.url, self.tier.root, [each.stem for each, _ in self.tier.pending(self.run.url)])
            raise
        uploads = self.uploader.tally.progress("")
        self._report = report = CloseReport(
            pending=tuple(str(stem) for stem in pending),
            errors=tuple(self.uploader.poll_errors()),
            saved=self.saved_count,
            committed=uploads.committed,
            skipped=self.skipped_count,
            dropped=uploads.dropped,
            save_failures=self.save_failures,
            upload_failures=uploads.failures,
        )
        logger.log(logging.WARNING if report.exit_code else logging.INFO, "%s closed: %s", self.run.url, report)
        self.raise_late()
        return report

    def _let_go(self, timeout_s: float, left_s: LeftS) -> list[Stem]:
        started = time.monotonic()
        try:
            self.saver.hurry()
            is_written = self.saver.close(timeout_s, left_s=left_s)
            spent = time.monotonic() - started
            if not is_written:
                logger.error("a save was still being written after %.0f s; it goes on until the program ends", spent)
            return self.uploader.close(max(0.0, timeout_s - spent), left_s=left_s)
        except BaseException:  # Ctrl-C, maybe before there was an upload to wait for
            self.uploader.give_up()
            raise
        finally:
            self.tier.release()
            self._metrics.flush()

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
        if self._settings.on_save_error == "raise":
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
        pause_s=settings.retry_after_s,
        log_level=logging.getLogger("ckptmgr").getEffectiveLevel(),
        labels=_labels(run, attempt),
    )
