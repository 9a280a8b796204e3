"""The uploader: a thread that replicates the local tier to the store in the background, newest first.

The queue *is* the local tier: a committed save without an `uploaded` mark. Nothing is lost when this process dies; the next start, or
a drain, goes on from the journal. Failures never reach training (I9): they are logged at once, kept in `status()`, and returned by `poll_errors()`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptmgr.core.errors import CkptmgrError, PermanentBackendError, UploadError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.drain import REFUSALS, Outcome, in_turn, upload_one
from ckptmgr.transfer.ending import call_at_end

logger = logging.getLogger(__name__)
_IDLE_S = 1.0
_LAST_REQUEST_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStatus:
    """What the uploader is doing.

    Attributes:
        pending: saves that are only on this disk, newest first.
        pending_bytes: their size.
        uploading: the one on its way.
        sent_bytes: bytes of it that were sent so far.
        committed: how many this process committed.
        failures: how many uploads failed, counting each try that gave up.
        last_error: the newest failure, one line.
    """

    pending: tuple[Stem, ...] = ()
    pending_bytes: int = 0
    uploading: Stem | None = None
    sent_bytes: int = 0
    committed: int = 0
    failures: int = 0
    last_error: str = ""


class Uploader:
    """Uploads what is pending in `tier` whenever `notify` says that something is.

    The thread starts with the first `notify`, so a process that only reads starts none, and is not a daemon: a main program that ends
    without `close()` has its queue drained, not cut off. It takes no collective, holds no lock across a fork, and a forked child never owns it:
    there, nothing is uploaded.

    Args:
        tier: the local tier; also read by others, written by this process.
        run: where the saves go. Its backend retries by itself; `stop` ends those retries.
        stop: the event given to the backend's retries; set when `close` runs out of time.
        committed: called in the uploader's thread after each commit (retention); its errors are logged and kept, and stop nothing.
        pause_s: how long a failure that may pass keeps the queue waiting, unless something new is saved.
        exit_timeout_s: as for `close`, when the program ends without it.
    """

    def __init__(
        self,
        tier: LocalTier,
        run: RunDirectory,
        *,
        stop: threading.Event,
        committed: Callable[[Stem], None] = lambda stem: None,
        pause_s: float = 30.0,
        exit_timeout_s: float | None = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self._run = run
        self._stop = stop
        self._committed = committed
        self._pause_s = pause_s
        self._exit_timeout_s = exit_timeout_s
        self._owner = os.getpid()
        self._clock = clock
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._work = False
        self._closing = False
        self._retry_at: float | None = None
        self._errors: list[CkptmgrError] = []
        self._uploading: Stem | None = None
        self._sent = 0
        self._count = 0
        self._failures = 0
        self._last_error = ""

    def notify(self) -> None:
        """Something may be pending. Returns at once; starts the thread if need be."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._closing:
                return
            self._work = True
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._main, name="ckptmgr-uploader", daemon=False)
                self._thread.start()
                call_at_end(self._end)
            self._changed.notify_all()

    def poll_errors(self) -> list[CkptmgrError]:
        """Failures since this was last called."""
        with self._changed:
            errors, self._errors = self._errors, []
            return errors

    def status(self) -> UploadStatus:
        """What it is doing now; reads the local tier."""
        pending = self._tier.pending(self._run.url)
        with self._changed:
            return UploadStatus(
                pending=tuple(manifest.stem for manifest, _ in pending),
                pending_bytes=sum(manifest.size_bytes for manifest, _ in pending),
                uploading=self._uploading,
                sent_bytes=self._sent,
                committed=self._count,
                failures=self._failures,
                last_error=self._last_error,
            )

    def close(self, timeout_s: float | None) -> list[Stem]:
        """Upload what is pending, for `timeout_s` at most (None: as long as it takes), and end the thread.

        Returns:
            What is left, newest first; it stays pending in the local tier. Safe to call twice.
        """
        if os.getpid() == self._owner:
            self._finish(timeout_s)
        return [manifest.stem for manifest, _ in self._tier.pending(self._run.url)]

    def _finish(self, timeout_s: float | None) -> None:
        with self._changed:
            self._closing = True
            self._retry_at = None
            self._work = True  # what failed before gets a last try
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            try:
                thread.join(timeout_s)
            finally:
                # Out of time, or Ctrl-C while waiting: no further try begins; the request under way ends by its own time-outs.
                if thread.is_alive():
                    self._stop.set()
                    thread.join(_LAST_REQUEST_S)

    def _end(self) -> None:
        """The program is over, and nobody has called `close`."""
        if self._closing or os.getpid() != self._owner:
            return
        left = self.close(self._exit_timeout_s)
        if left:
            names = ", ".join(map(str, left))
            logger.warning("not in %s yet: %s - run `ckptmgr drain %s`", self._run.url, names, self._tier.root)

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _main(self) -> None:
        while self._wait_for_work():
            try:
                self._round()
            except Exception as exc:
                # An unreadable tier, a bug: ending here would silently stop uploads for the rest of the run.
                self._note(exc if isinstance(exc, CkptmgrError) else UploadError(f"uploading failed: {exc!r}"))
                self._again_later()
                logger.exception("the uploader of %s goes on after an unexpected failure", self._run.url)

    def _wait_for_work(self) -> bool:
        """Block until there is something to do; False when the thread should end."""
        with self._changed:
            while True:
                if self._stop.is_set():
                    return False
                if self._work:
                    self._work = False
                    return True
                if self._retry_at is not None and self._clock() >= self._retry_at:
                    self._retry_at = None
                    return True
                if self._closing or not threading.main_thread().is_alive():
                    return False
                # Woken by notify; the time-out is for the retry time and for a main program that ended without close().
                self._changed.wait(_IDLE_S)

    def _round(self) -> None:
        """Upload everything pending; what fails waits for the next round."""
        tried: set[Stem] = set()
        refusals = 0
        while not self._stop.is_set():
            # Looked up again each time: a newer save goes first.
            queue = [(m, e) for m, e in in_turn(self._tier.pending(self._run.url)) if m.stem not in tried]
            if not queue or refusals == REFUSALS:
                return
            manifest, entry = queue[0]
            tried.add(manifest.stem)
            try:
                outcome = self._upload(manifest, entry)
            except CkptmgrError as exc:
                self._note(exc, failures=1)
                self._again_later()
                logger.error("step %d failed: %s is not in %s: %s", manifest.step, manifest.id, self._run.url, exc)
                if isinstance(exc, PermanentBackendError):
                    refusals += 1
                continue
            if outcome == "busy":
                self._again_later()
            else:
                self._tidy(manifest)

    def _upload(self, manifest: Manifest, entry: UploadEntry) -> Outcome:
        with self._changed:
            self._uploading, self._sent = manifest.stem, 0
        try:
            outcome = upload_one(self._tier, self._run, manifest, entry, moved=self._moved)
        finally:
            with self._changed:
                self._uploading = None
        if outcome == "committed":
            with self._changed:
                self._count += 1
        return outcome

    def _tidy(self, manifest: Manifest) -> None:
        """Retention. Its failure is not the upload's: what is committed stays so, and the others go on."""
        try:
            self._committed(manifest.stem)
        except Exception as exc:
            failed = exc if isinstance(exc, CkptmgrError) else UploadError(f"unexpected: {exc!r}")
            trace = None if isinstance(exc, CkptmgrError) else exc
            self._note(failed)
            logger.error("clean-up after step %d (%s): %s", manifest.step, manifest.id, failed, exc_info=trace)

    def _moved(self, count: int) -> None:
        self._sent += count  # only this thread writes it; a reader may see it a block late

    def _note(self, exc: CkptmgrError, *, failures: int = 0) -> None:
        """Keep a failure, before it is logged: who reads the log finds it in the status."""
        with self._changed:
            self._errors.append(exc)
            self._failures += failures
            self._last_error = str(exc)

    def _again_later(self) -> None:
        with self._changed:
            if not self._closing:
                self._retry_at = self._clock() + self._pause_s
