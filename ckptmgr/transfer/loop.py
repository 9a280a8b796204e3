"""The replication loop: uploads what is pending in a local tier, newest first, for as long as it is told to.

One loop, three hosts: the transfer process (`worker.py`, the default), a thread of the trainer, or a drain. It keeps nothing that the local tier does
not have: when its host dies, the next one goes on from the journal. What it does it reports as events of `messages.py`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from ckptmgr.core.errors import (
    CkptmgrError,
    PermanentBackendError,
    SourceChangedError,
    TransientBackendError,
    UploadError,
)
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import utc_now
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.messages import Busy, Committed, Event, Failed, Moved
from ckptmgr.transfer.queue import is_emergency
from ckptmgr.transfer.status import Meter, age_s
from ckptmgr.transfer.upload import REFUSALS, Outcome, abort_given_up, in_turn, upload_one

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
    """Replicates `tier` to `run`. One thread calls `run`; the other methods are safe from any thread and return at once (with `give_way`, `notify`
    reads the tier first, if an upload is under way).

    Newest first: a save that comes while an older one waits for the next try of a request goes before it; in a hurry also before one that is being sent.

    Args:
        tier: the local tier; saves appear in it while the loop runs.
        run: where they go. Its backend retries by itself.
        stop: ends everything: no further block is sent.
        report: called with each event, also by the threads that send parts. Must not raise.
        after_commit: clean-up after each commit; its failure is reported, and stops nothing.
        unwanted: as for `upload_one`; asked, with the upload's lock held, of older saves that no emergency took, and not in a hurry. Must not raise.
        pause_s: how long a failure that may pass keeps the queue waiting, unless something new is saved.
        retries: how many requests the backend has repeated so far.
        abandoned: asked about once a second; True ends an idle loop.
        give_way: the event that the backend's retries watch: set to have an upload that waits for its next try give way, or end.
    """

    def __init__(
        self,
        tier: LocalTier,
        run: RunDirectory,
        *,
        stop: threading.Event,
        report: Callable[[Event], None],
        after_commit: Callable[[Stem], None] = lambda stem: None,
        unwanted: Callable[[Manifest], str] = lambda manifest: "",
        pause_s: float = 30.0,
        retries: Callable[[], int] = lambda: 0,
        abandoned: Callable[[], bool] = lambda: False,
        give_way: threading.Event | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._target = run
        self._stop = stop
        self._report = report
        self._after_commit = after_commit
        self._unwanted = unwanted
        self._pause_s = pause_s
        self._retries = retries
        self._abandoned = abandoned
        self._give_way = give_way
        self._clock = clock
        self._changed = threading.Condition()
        self._work = False
        self._closing = False
        self._persisting = False
        self._hurrying = False
        self._look_again = False
        self._retry_at: float | None = None
        # In the hands of others, and told so.
        self._left: set[Stem] = set()
        # Of this round, and of the upload under way.
        self._tried: set[Stem] = set()
        self._spoilt: set[Stem] = set()
        self._current: Manifest | None = None
        self._meter = Meter(clock=clock)
        self._told_at = 0.0

    # --- from any thread --------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something may be pending."""
        with self._changed:
            self._work = self._look_again = True
            self._changed.notify_all()
        self._press()

    def hurry(self) -> None:
        """From now on the newest save comes first: an older one under way gives way to it, and nothing is cleaned up. One that waits for its next try
        is tried now."""
        with self._changed:
            self._hurrying = self._look_again = self._work = True
            if self._give_way is not None and self._current is not None:
                self._give_way.set()
            self._changed.notify_all()

    def close(self, *, persist: bool = False) -> None:
        """Give everything pending a last try, then end.

        Args:
            persist: try what fails for a reason that may pass again and again, until `stop` is set or nothing is pending.
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
            if self._give_way is not None:
                self._give_way.set()
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
                self._fail(exc if isinstance(exc, CkptmgrError) else UploadError(f"uploading failed: {exc!r}"))
                logger.exception("the uploads to %s go on after an unexpected failure", self._target.url)
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
                left_s = _IDLE_S if self._retry_at is None else self._retry_at - self._clock()
                self._changed.wait(min(_IDLE_S, left_s))

    def _round(self) -> None:
        """Upload everything pending; what fails waits for the next round."""
        self._tried = set()
        refusals = 0
        while not self._stop.is_set() and refusals < REFUSALS:
            # Looked up again each time: a newer save goes first.
            queue = [(m, e) for m, e in self._queue() if m.stem not in self._tried | self._spoilt]
            if not queue:
                break
            manifest, entry = queue[0]
            self._tried.add(manifest.stem)
            try:
                outcome = self._upload(manifest, entry)
            except CkptmgrError as exc:
                self._failed(manifest, exc)
                refusals += isinstance(exc, PermanentBackendError)
                continue
            self._has_given_way()
            if outcome == "busy":
                self._leave_to_others(manifest.stem)
            elif not self._hurrying:
                self._clean_up(manifest)
        if not (self._hurrying or self._stop.is_set()):
            with contextlib.suppress(CkptmgrError):  # it keeps no upload waiting, and the next round tries again
                abort_given_up(self._tier, self._target)

    def _leave_to_others(self, stem: Stem) -> None:
        """Another process of this machine has it, such as the transfer process of an earlier life: it may yet fail."""
        if stem not in self._left:
            self._left.add(stem)
            logger.info("step %d (%s) is in the hands of another process", stem.step, stem)
            self._report(Busy(stem=stem))
        self._again_in(_BUSY_S, busy=True)

    def _failed(self, manifest: Manifest, error: CkptmgrError) -> None:
        """An upload has given up for now, unless that was to give way, or because everything ends."""
        if self._has_given_way():
            if not self._stop.is_set():
                # It was in trouble. Saves that come faster than tries are given up would otherwise hide a store that is down.
                self._fail(error, manifest.stem)
                logger.warning("step %d is not in %s yet, others go first: %s", manifest.step, self._target.url, error)
            raise UploadInterrupted from error
        self._fail(error, manifest.stem)
        if isinstance(error, SourceChangedError):
            # Its files are not what was saved, and will not be again: said once, not every half minute. It stays, for a person to look at.
            self._spoilt.add(manifest.stem)
        logger.error("step %d failed: %s is not in %s: %s", manifest.step, manifest.id, self._target.url, error)
        self._again_in(self._pause_s, lasts=not isinstance(error, TransientBackendError))

    def _has_given_way(self) -> bool:
        """Whether the upload that has ended had to give way; from now on the backend, which others use too, tries again what fails."""
        with self._changed:
            if self._give_way is None or not self._give_way.is_set():
                return False
            if not self._stop.is_set():
                self._give_way.clear()
            return True

    def _queue(self) -> list[tuple[Manifest, UploadEntry]]:
        pending = self._tier.pending(self._target.url)
        return pending if self._hurrying else in_turn(pending)

    def _upload(self, manifest: Manifest, entry: UploadEntry) -> Outcome:
        started, retries = self._clock(), self._retries()
        self._has_given_way()  # the one before
        with self._changed:
            self._current, self._look_again = manifest, True
        self._meter.restart()
        self._tell()
        try:
            outcome = upload_one(
                self._tier, self._target, manifest, entry, moved=self._moved, unwanted=self._why_unwanted
            )
        finally:
            with self._changed:
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

    def _why_unwanted(self, manifest: Manifest) -> str:
        """As `unwanted`; empty for what is sent whatever retention says."""
        current = self._current
        if self._hurrying or is_emergency(manifest) or current is None or current.stem == max(self._tier.run.stems()):
            return ""
        return self._unwanted(manifest)

    def _moved(self, count: int) -> None:
        """Progress of the upload under way; called by the threads that send its parts, too."""
        if self._stop.is_set() or (self._hurrying and self._look_again and self._is_outrun()):
            raise UploadInterrupted
        self._meter.moved(count)
        if self._clock() - self._told_at >= _TELL_S:
            self._tell()

    def _is_outrun(self) -> bool:
        """Whether a newer save has come since. One that was tried already, and failed, is none: the two would take turns without end."""
        self._look_again = False
        current = self._current
        if current is None:
            return False
        newer = (m.stem for m, _ in self._tier.pending(self._target.url) if m.stem > current.stem)
        return any(stem not in self._tried for stem in newer)

    def _press(self) -> None:
        """Have an upload that waits for its next try give way to a newer save: it tells no progress meanwhile, and so is not asked."""
        current = self._current
        if self._give_way is None or current is None:
            return
        with contextlib.suppress(CkptmgrError, OSError):  # the loop meets it too, and says so
            if self._is_outrun():
                with self._changed:
                    self._look_again = True
                    if self._current is current:
                        self._give_way.set()

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
            self._fail(failed)
            logger.error("clean-up after step %d (%s): %s", manifest.step, manifest.id, failed, exc_info=trace)

    def _fail(self, error: CkptmgrError, stem: Stem | None = None) -> None:
        self._report(Failed(error=error, stem=stem))

    def _again_in(self, seconds: float, *, busy: bool = False, lasts: bool = True) -> None:
        """Look again after `seconds`, or earlier when something new comes.

        Args:
            busy: it is in the hands of another process, which a closing loop waits for.
            lasts: it failed for a reason that another try now would meet again; a loop that closes and persists tries the others.
        """
        with self._changed:
            if self._closing and not busy and (lasts or not self._persisting):
                return
            if self._persisting:
                seconds = min(seconds, _PERSIST_S)
            at = self._clock() + seconds
            self._retry_at = at if self._retry_at is None else min(self._retry_at, at)
