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
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.ending import (
    INTERRUPTED,
    LeftS,
    call_at_end,
    end_soon,
    exit_with,
    is_interrupted,
    no_limit,
    slices,
)
from ckptmgr.transfer.hosting import HostFile
from ckptmgr.transfer.loop import ReplicationLoop
from ckptmgr.transfer.messages import Event, Failed, Logged, Superseded, Task, why_not_portable
from ckptmgr.transfer.status import UploadStatus
from ckptmgr.transfer.supervisor import Supervisor
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
        run: where the saves go. Its backend retries by itself.
        stop: the event that those retries watch; set when an upload has to give way to a newer one, and when `close` runs out of time.
        task: what a transfer process is to do; None: the thread does it itself.
        committed: called after each commit (retention) where the thread does it itself; its errors are logged and kept, and stop nothing.
        unwanted: as for `ReplicationLoop`, where the thread does it itself.
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
        unwanted: Callable[[Manifest], str] = lambda manifest: "",
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
        self._unwanted = unwanted
        self._pause_s = pause_s
        self._exit_timeout_s = exit_timeout_s
        self._strict = strict
        self._observe = observe
        self._clock = clock
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._host: Supervisor | ReplicationLoop | None = None
        self._closing = self._hurrying = self._let_go = self._killed = self._ended = self._is_waited_for = False
        self._errors: deque[CkptmgrError] = deque(maxlen=_KEPT_ERRORS)
        self.tally = Tally()

    # --- from any thread of the trainer -----------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something may be pending. Returns at once; starts the thread if need be, also when it has died of something unexpected."""
        if not self._is_ours():
            return
        with self._lock:
            if self._closing:
                return
            if self._thread is None or not self._thread.is_alive():
                self._start()
            elif self._host is not None:
                self._host.notify()

    def hurry(self) -> None:
        """This machine is about to go: from now on the newest save comes first, all others wait, and nothing is cleaned up."""
        if not self._is_ours():
            return
        with self._lock:
            self._hurrying = True
            if self._host is not None:
                self._host.hurry()

    def poll_errors(self) -> list[CkptmgrError]:
        """Failures since this was last called, the newest thousand at most."""
        errors = []
        with contextlib.suppress(IndexError):
            while True:
                errors.append(self._errors.popleft())
        return errors

    def status(self) -> UploadStatus:
        """What it is doing now; reads the local tier."""
        if not self._is_ours():
            return UploadStatus()
        host = self._host
        name = "" if host is None else "process" if isinstance(host, Supervisor) else "thread"
        return self.tally.status(self._tier, self._run.url, name)

    def close(self, timeout_s: float | None, *, left_s: LeftS = no_limit) -> list[Stem]:
        """Upload what is pending, for `timeout_s` at most (None: as long as it takes), and end the thread.

        Out of time, the transfer process goes on by itself for as long as it may linger. KeyboardInterrupt ends it at once and is raised on.

        Args:
            left_s: asked while waiting; the smaller of the two counts.

        Returns:
            What is left, newest first; it stays pending in the local tier. Safe to call twice.
        """
        if self._is_ours():
            self._finish(timeout_s, left_s)
        return [manifest.stem for manifest, _ in self._tier.pending(self._run.url)]

    def give_up(self) -> None:
        """The user will not wait for anything any more: end the uploads at once, and the program soon after its main module."""
        if self._is_ours() and not self._killed:
            self._closing = True
            self._cut(kill=True)
            end_soon()

    def _is_ours(self) -> bool:
        # Before any lock is touched: one that another thread held at a fork stays locked in the child for ever.
        return os.getpid() == self._owner

    # --- ending -----------------------------------------------------------------------------------------------------------

    def _finish(self, timeout_s: float | None, left_s: LeftS) -> None:
        with self._lock:
            self._closing = True
            if self._thread is not None and not (self._thread.is_alive() or self._ended):
                self._start()  # it has died of something unexpected: what is pending gets its last try all the same
            thread = self._thread
            if self._host is not None:
                self._host.close()
        if thread is None or thread is threading.current_thread() or not thread.is_alive():
            return
        try:
            self._say_what_for(timeout_s)
            for slice_s in slices(timeout_s, left_s):
                thread.join(slice_s)
                if not thread.is_alive():
                    break
        except BaseException:  # Ctrl-C while waiting: the second one, or the user is tired of it
            self.give_up()
            raise
        if thread.is_alive():
            self._cut(kill=False)
            thread.join(_LAST_BLOCK_S)

    def _say_what_for(self, timeout_s: float | None) -> None:
        waiting = 0
        with contextlib.suppress(
            CkptmgrError, OSError
        ):  # a tier that cannot be read is told of by the uploads, which go on
            waiting = len(self._tier.pending(self._run.url))
        if waiting:
            level = logging.WARNING if is_interrupted() else logging.INFO
            limit = "" if timeout_s is None else f", {timeout_s:.0f} s at most"
            logger.log(level, "waiting for %d upload(s) to %s%s; Ctrl-C ends at once", waiting, self._run.url, limit)

    def _cut(self, *, kill: bool) -> None:
        """No further request of this process; a transfer process is let go, or killed."""
        with self._lock:
            self._let_go = True
            self._killed = self._killed or kill
            self._stop.set()
            if self._host is not None:
                self._cut_host(self._host)

    def _cut_host(self, host: Supervisor | ReplicationLoop) -> None:
        if isinstance(host, Supervisor):
            host.cut(kill=self._killed)
        else:
            host.halt()

    def _end(self) -> None:
        """The program is over, and nobody has called `close`."""
        if self._closing or not self._is_ours():
            return
        code = UploadError.exit_code if self._strict else 0
        try:
            left = self.close(self._exit_timeout_s)
        except KeyboardInterrupt:
            code, left = INTERRUPTED, self.close(0)
        if left:
            names = ", ".join(map(str, left))
            logger.warning("not in %s yet: %s - run `ckptmgr drain %s`", self._run.url, names, self._tier.root)
            if code:
                exit_with(code)

    # --- the thread -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start the thread; with the lock held."""
        died = self._thread is not None and not self._ended
        thread = threading.Thread(target=self._main, name="ckptmgr-uploader", daemon=False)
        self._ended = False
        try:
            thread.start()
        except RuntimeError as error:  # a limit of the machine, or a program that is ending: what is pending stays so
            self._ended = not died
            logger.error("nothing is uploaded to %s: %s", self._run.url, error)
            self._note(UploadError(f"the uploader thread cannot be started: {error}", hint="the next save tries again"))
            return
        self._thread = thread
        if died:
            logger.warning("the uploader thread of %s is started again", self._run.url)
        if not self._is_waited_for:
            self._is_waited_for = True
            call_at_end(self._end)

    def _main(self) -> None:
        try:
            self._replicate()
            self._ended = True
        except BaseException as error:
            # The next save starts a new one: this thread's death must not silently end uploads for the rest of the run.
            logger.exception("the uploader thread of %s died", self._run.url)
            self._note(UploadError(f"the uploader thread died: {error!r}", hint="it is started again by the next save"))
        finally:
            with self._lock:
                self._host = None

    def _replicate(self) -> None:
        """Have a process do it, or do it here."""
        if self._task is not None:
            why = why_not_portable(self._task) or self._supervise(self._task)
            if why is None:
                return
            self._task = None
            logger.warning("uploads run in the trainer, not in a process of their own: %s", why)
        self._replicate_here()

    def _supervise(self, task: Task) -> str | None:
        """Run a transfer process until it is done; why that cannot be, or None."""
        supervisor = Supervisor(
            task, take=self._take, pause_s=self._pause_s, abandoned=_program_is_over, clock=self._clock
        )
        self._adopt(supervisor)
        return supervisor.run()

    def _replicate_here(self) -> None:
        """Run the loop in this thread, until closed, or until the main program is over."""
        file = HostFile(self._tier, self._run.url, "thread", self.tally)

        def report(event: Event) -> None:
            self._take(event)
            file.update(event)

        loop = ReplicationLoop(
            self._tier,
            self._run,
            stop=threading.Event(),
            give_way=self._stop,
            report=report,
            after_commit=self._after_commit,
            unwanted=self._unwanted,
            pause_s=self._pause_s,
            retries=lambda: self._run.fs.retries,
            abandoned=_program_is_over,
            clock=self._clock,
        )
        self._adopt(loop)
        try:
            loop.run()
        finally:
            file.close()

    def _adopt(self, host: Supervisor | ReplicationLoop) -> None:
        """From now on this is told what is to be done; and first, what was said before."""
        with self._lock:
            self._host = host
            host.notify()
            if self._hurrying:
                host.hurry()
            if self._closing:
                host.close()
            if self._let_go:
                self._cut_host(host)

    # --- what the host says -----------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        if isinstance(event, Logged):
            with contextlib.suppress(Exception):  # a filter of the user's may raise
                logging.getLogger(event.name).log(event.level, "%s", event.text)
            return
        self.tally.note(event)
        if isinstance(event, Superseded):
            self.superseded = True
        if isinstance(event, Failed):
            self._errors.append(event.error)
        with contextlib.suppress(Exception):  # an observer is bookkeeping
            self._observe(event)

    def _note(self, error: CkptmgrError) -> None:
        """Keep a failure of the thread's own."""
        self._take(Failed(error=error))


def _program_is_over() -> bool:
    return not threading.main_thread().is_alive()
