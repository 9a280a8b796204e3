"""The writer: a thread of the trainer that serialises and commits snapshots, one at a time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from ckptmgr.transfer.ending import call_at_end

logger = logging.getLogger(__name__)


class BackgroundWriter:
    """Runs jobs in the background, in the order of submitting, never more than one.

    A caller first gets the one slot (`acquire`), then either hands over a job (`submit`) or gives the slot back. Between them it may prepare
    what the job needs, and be sure that nobody else writes.

    The thread lives as long as there is work, so an idle writer costs nothing and keeps no program alive. It is not a daemon: a program that
    ends with a job in flight finishes it first, before the uploader looks for the last time. A forked child never owns it: there, no slot is
    to be had and nothing is waited for. Any thread may call any method.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str = "ckptmgr-writer") -> None:
        self._name = name
        self._owner = os.getpid()
        self._changed = threading.Condition()
        self._job: Callable[[], None] | None = None
        self._taken = False
        self._closed = False
        self._is_waited_for = False

    def acquire(self, timeout_s: float | None) -> bool:
        """Get the slot; False if the job in flight took longer than `timeout_s` (0: do not wait, None: as long as it takes), or after `close`."""
        if not self._is_ours():
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._closed or not self._taken, timeout_s)
            if self._closed or self._taken:
                return False
            self._taken = True
            return True

    def submit(self, job: Callable[[], None]) -> None:
        """Have `job` run; returns at once. The caller has the slot, which becomes free when the job is done.

        Where no thread can be started (a limit of the machine, a program that is ending), the job runs here and now: a save is not lost for
        that. What a job raises is logged, and the next one runs all the same.

        Raises:
            RuntimeError: the caller has not got the slot.
        """
        with self._changed:
            if not self._taken or self._job is not None:
                raise RuntimeError("submit() without acquire()")
            self._job = job
        if not self._is_waited_for:
            self._is_waited_for = True
            call_at_end(self._end)
        try:
            threading.Thread(target=self._run, args=(job,), name=self._name, daemon=False).start()
        except RuntimeError as error:
            logger.warning("the save is written by the training thread, for no other can be started: %s", error)
            self._run(job)

    def give_back(self) -> None:
        """Free the slot: nothing will be submitted for it."""
        with self._changed:
            if self._job is None:
                self._taken = False
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until what was submitted is done; False if that takes longer than `timeout_s`."""
        if not self._is_ours():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout_s)

    def close(self, timeout_s: float | None) -> bool:
        """As `wait`; from now on there is no slot. What is not done in time goes on, and a program that ends waits for it. Safe to call twice."""
        if not self._is_ours():
            return True
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        return self.wait(timeout_s)

    def _is_ours(self) -> bool:
        # Before any lock is touched: one that another thread held at the fork stays locked in the child for ever.
        return os.getpid() == self._owner

    def _run(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # jobs handle their own errors; one that does not must not cost the next save
            logger.exception("a job of the thread %s failed", self._name)
        finally:
            with self._changed:
                self._job = None
                self._taken = False
                self._changed.notify_all()

    def _end(self) -> None:
        """The program is over. The uploader registered before the writer did, so it looks for the last time after this."""
        if self._is_ours() and not self.wait(0):
            logger.info("waiting for the last save to be written")
            self.wait()
