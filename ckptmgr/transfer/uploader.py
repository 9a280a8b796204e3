"""The uploader: a thread of the trainer that has the local tier replicated to the store in the background.

The queue *is* the local tier: a committed save without an `uploaded` mark. The thread starts the transfer process, feeds it, starts it again when it
dies, and mirrors what it says; or it runs the replication loop itself. Nothing is lost when either dies: the next start, or a drain, goes on from the
journal. Failures never reach training (I9): they are logged at once, kept in `status()`, and returned by `poll_errors()`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable

from ckptmgr.core.errors import CkptmgrError, UploadError
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.child import LOG_FILE, TransferProcess
from ckptmgr.transfer.ending import call_at_end, end_soon, exit_with, is_interrupted
from ckptmgr.transfer.loop import ReplicationLoop
from ckptmgr.transfer.messages import (
    Close,
    Event,
    Failed,
    Hurry,
    Logged,
    Moved,
    Notify,
    Ready,
    Refused,
    Superseded,
    Task,
    why_not_portable,
)
from ckptmgr.transfer.status import UploadStatus
from ckptmgr.transfer.tally import Tally

logger = logging.getLogger(__name__)
_LAST_BLOCK_S = 5.0
_KEPT_ERRORS = 1000


class Uploader:
    """Uploads what is pending in `tier` whenever `notify` says that something is.

    The thread starts with the first `notify`, so a process that only reads starts none, and is not a daemon: a main program that ends
    without `close()` has its queue drained, not cut off. It takes no collective, holds no lock across a fork, and a forked child never owns it:
    there, nothing is uploaded.

    Args:
        tier: the local tier; also read by others, written by this process.
        run: where the saves go. Its backend retries by itself; `stop` ends those retries.
        stop: the event given to the backend's retries; set when `close` runs out of time.
        task: what a transfer process is to do; None: the thread does it itself.
        committed: called after each commit (retention) where the thread does it itself; its errors are logged and kept, and stop nothing.
        pause_s: how long a failure that may pass keeps the queue waiting, unless something new is saved.
        exit_timeout_s: as for `close`, when the program ends without it.
        strict: a program that ends without `close`, and has something pending after that time, exits with 6.
        observe: called with each event, in the thread.
    """

    def __init__(
        self,
        tier: LocalTier,
        run: RunDirectory,
        *,
        stop: threading.Event,
        task: Task | None = None,
        committed: Callable[[Stem], None] = lambda stem: None,
        pause_s: float = 30.0,
        exit_timeout_s: float | None = 600.0,
        strict: bool = False,
        observe: Callable[[Event], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.superseded = False
        self._tier = tier
        self._run = run
        self._stop = stop
        self._task = task
        self._after_commit = committed
        self._pause_s = pause_s
        self._exit_timeout_s = exit_timeout_s
        self._strict = strict
        self._observe = observe
        self._clock = clock
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._child: TransferProcess | None = None
        self._loop: ReplicationLoop | None = None
        self._closing = self._hurrying = self._let_go = self._ended = False
        self._errors: deque[CkptmgrError] = deque(maxlen=_KEPT_ERRORS)
        self.tally = Tally()

    # --- from any thread of the trainer -----------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something may be pending. Returns at once; starts the thread if need be, also when it has died of something unexpected."""
        if os.getpid() != self._owner:
            return
        with self._changed:
            if self._closing:
                return
            if self._thread is None or not self._thread.is_alive():
                self._start()
            elif self._child is not None:
                self._child.send(Notify())
            elif self._loop is not None:
                self._loop.notify()

    def hurry(self) -> None:
        """This machine is about to go: from now on the newest save comes first, all others wait, and nothing is cleaned up."""
        with self._changed:
            self._hurrying = True
            if self._child is not None:
                self._child.send(Hurry())
            elif self._loop is not None:
                self._loop.hurry()

    def poll_errors(self) -> list[CkptmgrError]:
        """Failures since this was last called, the newest thousand at most."""
        errors = []
        with contextlib.suppress(IndexError):
            while True:
                errors.append(self._errors.popleft())
        return errors

    def status(self) -> UploadStatus:
        """What it is doing now; reads the local tier."""
        host = "process" if self._child is not None else "" if self._loop is None else "thread"
        return self.tally.status(self._tier, self._run.url, host)

    def close(self, timeout_s: float | None) -> list[Stem]:
        """Upload what is pending, for `timeout_s` at most (None: as long as it takes), and end the thread.

        Out of time, the transfer process goes on by itself for as long as it may linger. KeyboardInterrupt ends it at once and is raised on.

        Returns:
            What is left, newest first; it stays pending in the local tier. Safe to call twice.
        """
        if os.getpid() == self._owner:
            self._finish(timeout_s)
        return [manifest.stem for manifest, _ in self._tier.pending(self._run.url)]

    # --- ending -----------------------------------------------------------------------------------------------------------

    def _finish(self, timeout_s: float | None) -> None:
        with self._changed:
            self._closing = True
            thread, child, loop = self._thread, self._child, self._loop
            if child is not None:
                child.send(Close())
            elif loop is not None:
                loop.close()
            self._changed.notify_all()
        if thread is None or thread is threading.current_thread() or not thread.is_alive():
            return
        self._say_what_for(timeout_s)
        try:
            thread.join(timeout_s)
        except BaseException:  # Ctrl-C while waiting: the second one, or the user is tired of it
            self._cut(kill=True)
            end_soon()
            raise
        if thread.is_alive():
            self._cut(kill=False)
            thread.join(_LAST_BLOCK_S)

    def _say_what_for(self, timeout_s: float | None) -> None:
        waiting = len(self._tier.pending(self._run.url))
        if waiting:
            level = logging.WARNING if is_interrupted() else logging.INFO
            limit = "" if timeout_s is None else f", {timeout_s:.0f} s at most"
            logger.log(level, "waiting for %d upload(s) to %s%s; Ctrl-C ends at once", waiting, self._run.url, limit)

    def _cut(self, *, kill: bool) -> None:
        """No further request of this process; a transfer process is let go, or killed."""
        with self._changed:
            self._let_go = True
            self._stop.set()
            if self._loop is not None:
                self._loop.halt()
            if self._child is not None:
                if kill:
                    self._child.kill()
                self._child.let_go()
            self._changed.notify_all()

    def _end(self) -> None:
        """The program is over, and nobody has called `close`."""
        if self._closing or os.getpid() != self._owner:
            return
        left = self.close(self._exit_timeout_s)
        if left:
            names = ", ".join(map(str, left))
            logger.warning("not in %s yet: %s - run `ckptmgr drain %s`", self._run.url, names, self._tier.root)
            if self._strict:
                exit_with(UploadError.exit_code)

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        died = self._thread is not None and not self._ended
        self._ended = False
        self._thread = threading.Thread(target=self._main, name="ckptmgr-uploader", daemon=False)
        self._thread.start()
        if died:
            logger.warning("the uploader thread of %s is started again", self._run.url)
        else:
            call_at_end(self._end)

    def _main(self) -> None:
        try:
            if self._task is None or not self._supervise(self._task):
                self._replicate_here()
            self._ended = True
        except BaseException as error:
            # The next save starts a new one: this thread's death must not silently end uploads for the rest of the run.
            logger.exception("the uploader thread of %s died", self._run.url)
            self._note(UploadError(f"the uploader thread died: {error!r}", hint="it is started again by the next save"))
        finally:
            with self._changed:
                self._child = self._loop = None

    def _replicate_here(self) -> None:
        """Run the loop in this thread, until closed, or until the main program is over."""
        loop = ReplicationLoop(
            self._tier,
            self._run,
            stop=self._stop,
            report=self._take,
            after_commit=self._after_commit,
            pause_s=self._pause_s,
            retries=lambda: self._run.fs.retries,
            abandoned=lambda: not threading.main_thread().is_alive(),
            clock=self._clock,
        )
        with self._changed:
            self._loop = loop
            loop.notify()
            if self._hurrying:
                loop.hurry()
            if self._closing:
                loop.close()
        loop.run()

    def _supervise(self, task: Task) -> bool:
        """Run a transfer process until it is done; False if there can be none."""
        problem = why_not_portable(task)
        if problem is not None:
            logger.warning("uploads run in the trainer, not in a process of their own: %s", problem)
            return False
        deaths = 0
        while True:
            try:
                child = TransferProcess(task)
            except OSError as error:
                logger.warning("uploads run in the trainer, for a transfer process cannot be started: %s", error)
                return False
            outcome = self._mirror(child)
            code = child.finish(0 if self._let_go else _LAST_BLOCK_S)
            with self._changed:
                self._child = None
            self.tally.note(Moved(stem=None))
            if isinstance(outcome, Refused):
                logger.warning("uploads run in the trainer, not in a process of their own: %s", outcome.why)
                return False
            if self._let_go or code == 0:
                return True
            deaths += 1
            self._note(
                UploadError(f"the transfer process {child.pid} died ({_ending(code)})", hint="it is started again")
            )
            logger.error("the transfer process of %s died (%s)", self._run.url, _ending(code))
            if not self._wait_before_restart(deaths):
                return True

    def _mirror(self, child: TransferProcess) -> Refused | None:
        with self._changed:
            self._child = child
            child.send(Notify())
            if self._hurrying:
                child.send(Hurry())
            if self._closing:
                child.send(Close())
        for event in child.events():
            if isinstance(event, Refused):
                return event
            self._take(event)
        return None

    def _wait_before_restart(self, deaths: int) -> bool:
        """At once after the first death, later after a growing pause; False when closing: twice is enough then."""
        pause_s = 0.0 if deaths == 1 else min(600.0, self._pause_s * 2 ** (deaths - 2))
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=pause_s)
            return deaths == 1 or not self._closing

    # --- what the loop says -----------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, Logged):
            logging.getLogger(event.name).log(event.level, "%s", event.text)
            return
        self.tally.note(event)
        if isinstance(event, Superseded):
            self.superseded = True
        if isinstance(event, Failed):
            self._errors.append(event.error)
        if isinstance(event, Ready):
            logger.debug("the transfer process of %s runs", self._run.url)
        with contextlib.suppress(Exception):  # an observer is bookkeeping
            self._observe(event)

    def _note(self, error: CkptmgrError) -> None:
        """Keep a failure of the thread's own."""
        self._take(Failed(error=error))


def _ending(code: int | None) -> str:
    """An exit status for a reader."""
    if code is None:
        return "it closed its line and hangs"
    return f"signal {-code}" if code < 0 else f"exit code {code}; see {LOG_FILE} in the local tier"
