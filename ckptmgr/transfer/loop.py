"""The replication loop: uploads what is pending in a local tier, newest first, for as long as it is told to.

One loop, two hosts: the transfer process (`worker.py`, the default), or a thread of the trainer. It keeps nothing that the local tier does not have:
when its host dies, the next one goes on from the journal. What it does it reports as events of `messages.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ckptmgr.core.errors import CkptmgrError, PermanentBackendError, UploadError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import utc_now
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.drain import REFUSALS, Outcome, in_turn, upload_one
from ckptmgr.transfer.messages import Committed, Event, Failed, Moved
from ckptmgr.transfer.status import Meter, age_s

logger = logging.getLogger(__name__)
_IDLE_S = 1.0
_BUSY_S = 1.0
_PERSIST_S = 5.0
_TELL_S = 0.5


class UploadInterrupted(BaseException):
    """Raised through an upload that has to give way, by its progress callback. What was sent stays sent, and the journal knows it.

    Not an Exception: no client library on the way may take it for a failed request and try again.
    """


class ReplicationLoop:
    """Replicates `tier` to `run`. One thread calls `run`; the other methods are safe from any thread and return at once.

    Args:
        tier: the local tier; saves appear in it while the loop runs.
        run: where they go. Its backend retries by itself.
        stop: ends everything: no retry, no further block. The backend's retries watch it too.
        report: called with each event, also by the threads that send parts. Must not raise.
        after_commit: clean-up after each commit; its failure is reported, and stops nothing.
        pause_s: how long a failure that may pass keeps the queue waiting, unless something new is saved.
        retries: how many requests the backend has repeated so far.
        abandoned: asked about once a second; True ends an idle loop.
    """

    def __init__(
        self,
        tier: LocalTier,
        run: RunDirectory,
        *,
        stop: threading.Event,
        report: Callable[[Event], None],
        after_commit: Callable[[Stem], None] = lambda stem: None,
        pause_s: float = 30.0,
        retries: Callable[[], int] = lambda: 0,
        abandoned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._target = run
        self._stop = stop
        self._report = report
        self._after_commit = after_commit
        self._pause_s = pause_s
        self._retries = retries
        self._abandoned = abandoned
        self._clock = clock
        self._changed = threading.Condition()
        self._work = False
        self._closing = False
        self._persisting = False
        self._hurrying = False
        self._look_again = False
        self._retry_at: float | None = None
        # Of the upload under way.
        self._current: Manifest | None = None
        self._meter = Meter(clock=clock)
        self._told_at = 0.0

    # --- from any thread --------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something may be pending."""
        with self._changed:
            self._work = self._look_again = True
            self._changed.notify_all()

    def hurry(self) -> None:
        """From now on the newest save comes first: an older one under way gives way to it, and nothing is cleaned up."""
        with self._changed:
            self._hurrying = self._look_again = self._work = True
            self._changed.notify_all()

    def close(self, *, persist: bool = False) -> None:
        """Give everything pending a last try, then end.

        Args:
            persist: try what fails again and again, until `stop` is set or nothing is pending.
        """
        with self._changed:
            self._closing = self._work = True
            self._persisting = persist
            self._retry_at = None
            self._changed.notify_all()

    def halt(self) -> None:
        """Set `stop`, and wake the loop."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()

    # --- the loop ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until closed, halted or abandoned."""
        while self._wait_for_work():
            try:
                self._round()
            except UploadInterrupted:
                self.notify()  # by a newer save, or for good: then the wait ends at once
            except Exception as exc:
                # An unreadable tier, a bug: ending here would silently stop uploads for the rest of the run.
                logger.exception("the uploads to %s go on after an unexpected failure", self._target.url)
                self._fail(exc if isinstance(exc, CkptmgrError) else UploadError(f"uploading failed: {exc!r}"))
                self._again_in(self._pause_s)

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when the loop should end."""
        with self._changed:
            while True:
                if self._stop.is_set():
                    return False
                if self._work:
                    self._work = False
                    return True
                if self._retry_at is not None:
                    if self._clock() >= self._retry_at:
                        self._retry_at = None
                        return True
                elif self._closing:
                    return False
                if self._abandoned():
                    return False
                # Woken by the methods above; the time-out is for the time of a retry and for `abandoned`.
                self._changed.wait(_IDLE_S)

    def _round(self) -> None:
        """Upload everything pending; what fails waits for the next round."""
        tried: set[Stem] = set()
        refusals = 0
        while not self._stop.is_set():
            # Looked up again each time: a newer save goes first.
            queue = [(m, e) for m, e in self._queue() if m.stem not in tried]
            if not queue or refusals == REFUSALS:
                return
            manifest, entry = queue[0]
            tried.add(manifest.stem)
            try:
                outcome = self._upload(manifest, entry)
            except CkptmgrError as exc:
                logger.error("step %d failed: %s is not in %s: %s", manifest.step, manifest.id, self._target.url, exc)
                self._fail(exc, manifest.stem)
                self._again_in(self._pause_s)
                if isinstance(exc, PermanentBackendError):
                    refusals += 1
                continue
            if outcome == "busy":
                # Another process of this machine has it, such as the transfer process of an earlier life: it may yet fail.
                self._again_in(_BUSY_S, last_try=False)
            elif not self._hurrying:
                self._clean_up(manifest)

    def _queue(self) -> list[tuple[Manifest, UploadEntry]]:
        pending = self._tier.pending(self._target.url)
        return pending if self._hurrying else in_turn(pending)

    def _upload(self, manifest: Manifest, entry: UploadEntry) -> Outcome:
        started, retries = self._clock(), self._retries()
        self._current, self._look_again = manifest, self._hurrying
        self._meter.restart()
        self._tell()
        try:
            outcome = upload_one(self._tier, self._target, manifest, entry, moved=self._moved)
        finally:
            self._current = None
            self._tell()
        if outcome == "committed":
            done = Committed(
                stem=manifest.stem,
                seconds=self._clock() - started,
                size_bytes=manifest.size_bytes,
                sent_bytes=self._meter.sent_bytes,
                retries=self._retries() - retries,
                created_at=manifest.created_at,
                lag_s=age_s(manifest.created_at, utc_now()),
            )
            self._report(done)
        return outcome

    def _moved(self, count: int) -> None:
        """Progress of the upload under way; called by the threads that send its parts, too."""
        if self._stop.is_set() or (self._look_again and self._gives_way()):
            raise UploadInterrupted
        self._meter.moved(count)
        if self._clock() - self._told_at >= _TELL_S:
            self._tell()

    def _gives_way(self) -> bool:
        """Whether a newer save has come in a hurry."""
        self._look_again = False
        if not self._hurrying:
            return False
        pending = self._tier.pending(self._target.url)
        return bool(pending) and self._current is not None and pending[0][0].stem != self._current.stem

    def _tell(self) -> None:
        self._told_at = self._clock()
        manifest = self._current
        if manifest is None:
            self._report(Moved(stem=None))
            return
        self._report(
            Moved(
                stem=manifest.stem,
                sent_bytes=self._meter.sent_bytes,
                total_bytes=manifest.size_bytes,
                rate_bytes_s=self._meter.rate(),
                eta_s=self._meter.eta_s(manifest.size_bytes),
            )
        )

    def _clean_up(self, manifest: Manifest) -> None:
        """Its failure is not the upload's: what is committed stays so, and the others go on."""
        try:
            self._after_commit(manifest.stem)
        except Exception as exc:
            failed = exc if isinstance(exc, CkptmgrError) else UploadError(f"unexpected: {exc!r}")
            trace = None if isinstance(exc, CkptmgrError) else exc
            logger.error("clean-up after step %d (%s): %s", manifest.step, manifest.id, failed, exc_info=trace)
            self._fail(failed)

    def _fail(self, error: CkptmgrError, stem: Stem | None = None) -> None:
        self._report(Failed(error=error, stem=stem))

    def _again_in(self, seconds: float, *, last_try: bool = True) -> None:
        """Look again after `seconds`, or earlier when something new comes.

        Args:
            last_try: a closing loop does not wait for it.
        """
        with self._changed:
            if self._persisting:
                seconds = min(seconds, _PERSIST_S)
            elif self._closing and last_try:
                return
            at = self._clock() + seconds
            self._retry_at = at if self._retry_at is None else min(self._retry_at, at)
