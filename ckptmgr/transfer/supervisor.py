"""Keeps a transfer process running for a trainer: starts it, mirrors what it says, starts it again when it dies."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ckptmgr.core.errors import UploadError
from ckptmgr.transfer.child import TransferProcess
from ckptmgr.transfer.logfile import LOG_FILE
from ckptmgr.transfer.messages import (
    Close,
    Command,
    Committed,
    Ended,
    Event,
    Failed,
    Hurry,
    Moved,
    Notify,
    Ready,
    Refused,
    Task,
    decode,
)

logger = logging.getLogger(__name__)
_LOOK_S = 1.0
_GONE_S = 5.0
# A cluster's file server, on the morning of a thousand starts.
_READY_S = 300.0
_LONGEST_PAUSE_S = 600.0
_UNREADY = 2
_LAST_TRIES = 2


@dataclass(slots=True)
class _Life:
    """How one transfer process did.

    Attributes:
        ready: it had understood its task.
        ended: it said that nothing was left to do.
        refused: why it cannot do the task.
        hung: it said nothing at all for a long time, and was killed.
    """

    ready: bool = False
    ended: bool = False
    refused: str | None = None
    hung: bool = False


class Supervisor:
    """Has a transfer process do a task. One thread calls `run`; the other methods are safe from any thread, and return at once.

    Args:
        take: called with each event of the process, in the thread of `run`.
        pause_s: how long it waits after a second death, and twice as long after each further one. A commit in between begins the count anew.
        abandoned: asked about once a second; True closes, for nobody else will.
    """

    def __init__(
        self,
        task: Task,
        *,
        take: Callable[[Event], None],
        pause_s: float = 30.0,
        abandoned: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._take = take
        self._pause_s = pause_s
        self._abandoned = abandoned
        self._clock = clock
        self._changed = threading.Condition()
        self._child: TransferProcess | None = None
        self._closing = self._hurrying = self._let_go = self._killed = self._woken = False
        self._deaths = self._unready = self._last_tries = 0

    # --- from any thread --------------------------------------------------------------------------------------------------

    def notify(self) -> None:
        """Something may be pending."""
        with self._changed:
            self._tell(Notify())

    def hurry(self) -> None:
        """The newest save first. A process that is to be started again later is started now."""
        with self._changed:
            self._hurrying = self._woken = True
            self._tell(Hurry())
            self._changed.notify_all()

    def close(self) -> None:
        """Everything pending gets a last try; then `run` ends."""
        with self._changed:
            self._closing = True
            self._tell(Close())
            self._changed.notify_all()

    def cut(self, *, kill: bool = False) -> None:
        """`run` ends at once; the process goes on by itself for as long as it may linger, or is killed. One that is being started now, too."""
        with self._changed:
            self._let_go = True
            self._killed = self._killed or kill
            if self._child is not None:
                self._part_from(self._child)
            self._changed.notify_all()

    def _tell(self, command: Command) -> None:
        if self._child is not None:
            self._child.line.send(command)

    def _part_from(self, child: TransferProcess) -> None:
        if self._killed:
            child.kill()
        child.line.hang_up()

    # --- the thread -------------------------------------------------------------------------------------------------------

    def run(self) -> str | None:
        """Have the task done, until closed or cut; returns why no process can do it, or None when one has, as far as it got."""
        while not self._killed:
            try:
                child = TransferProcess(self._task)
            except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: the interpreter is ending
                return f"a transfer process cannot be started: {error}"
            life = _Life()
            try:
                self._mirror(child, life)
            except BaseException:
                self._drop(child)
                raise
            code = self._end(child, life)
            if life.refused is not None:
                return life.refused
            if self._let_go or (life.ended and self._closing):
                return None
            if life.hung:
                return f"a transfer process did not answer for {_READY_S:g} s; see {LOG_FILE} in the local tier"
            self._unready = 0 if life.ready else self._unready + 1
            if self._unready == _UNREADY:
                return f"a transfer process does not start ({_ending(code)})"
            self._note_death(child, code)
            if not self._may_go_on():
                return None
        return None

    def _mirror(self, child: TransferProcess, life: _Life) -> None:
        """Pass on what `child` says, until it is gone."""
        self._adopt(child)
        started, is_dead = self._clock(), False
        while True:
            try:
                data = child.line.receive(0.0 if is_dead else _LOOK_S)
            except EOFError:
                return
            if data is not None:
                self._hear(data, life)
            elif is_dead:
                return
            elif not life.ready and self._clock() - started > _READY_S:
                life.hung = True
                return
            else:
                # Then it may still have said something since.
                is_dead = not child.is_alive()
            if not self._closing and self._abandoned():
                self.close()

    def _adopt(self, child: TransferProcess) -> None:
        with self._changed:
            self._child = child
            child.line.send(Notify())
            if self._hurrying:
                child.line.send(Hurry())
            if self._closing:
                child.line.send(Close())
            if self._let_go:
                self._part_from(child)

    def _hear(self, data: bytes, life: _Life) -> None:
        try:
            event = decode(data)
        except Exception as error:  # noqa: BLE001 - an error of the user's that cannot be made again here
            logger.warning("something that the transfer process said cannot be read: %r", error)
            return
        if isinstance(event, Refused):
            life.refused = event.why
        elif isinstance(event, Ready):
            life.ready = True
        elif isinstance(event, Ended):
            life.ended = True
        else:
            if isinstance(event, Committed):
                self._deaths = 0
            self._take(event)  # type: ignore[arg-type]

    def _end(self, child: TransferProcess, life: _Life) -> int | None:
        """Part from a process whose line has ended, or that is of no more use; its exit status, if it has one."""
        if life.hung:
            child.kill()
        code = child.finish(_GONE_S if self._killed or not self._let_go else 0.0)
        if code is None and not (self._let_go or life.ended):
            child.kill()  # its line is gone, and it is not: nobody would hear of what it does
            code = child.finish(_GONE_S)
        self._drop(child)
        self._take(Moved(stem=None))
        return code

    def _drop(self, child: TransferProcess) -> None:
        """Let it linger, if it still lives."""
        with self._changed:
            self._child = None
        child.finish(0.0)
        child.leave()

    def _note_death(self, child: TransferProcess, code: int | None) -> None:
        self._deaths += 1
        told = f"the transfer process {child.pid} died ({_ending(code)})"
        logger.error("%s; it uploaded to %s, and is started again", told, self._task.url)
        self._take(Failed(error=UploadError(told, hint="it is started again")))

    def _may_go_on(self) -> bool:
        """Wait before the next start, after all deaths but the first; False if there should be none."""
        pause_s = 0.0 if self._deaths == 1 else min(_LONGEST_PAUSE_S, self._pause_s * 2.0 ** min(self._deaths - 2, 32))
        until = self._clock() + pause_s
        with self._changed:
            self._woken = False
            while not (self._closing or self._let_go or self._woken) and (left_s := until - self._clock()) > 0:
                self._changed.wait(min(left_s, _LOOK_S))
                self._closing = self._closing or self._abandoned()
            self._last_tries += self._closing
            return not self._let_go and self._last_tries < _LAST_TRIES


def _ending(code: int | None) -> str:
    """An exit status for a reader."""
    if code is None:
        return "it does not end"
    if code >= 0:
        return f"exit code {code}; see {LOG_FILE} in the local tier"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"
