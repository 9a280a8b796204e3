"""The transfer process: hosts the replication loop in a process of its own, started by the uploader of a trainer (`child.py`).

Of its own because the bytes must not move in the trainer's: a Python transfer loop beside a Python training loop fights for the interpreter lock.
It imports no torch, runs in its own session at low priority, and takes the locks. Standard input is a socket to the trainer (`line.py`). When the
trainer is gone it finishes what is pending, for `linger_s` at most, and leaves; at once, when the local tier is gone as well.

Signals: while the trainer lives they are its business, also when they are sent to the whole job; it says on the socket what is to be done.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.layout import RUN_FILE
from ckptmgr.core.redaction import without_secrets
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.hosting import HostFile, record_upload
from ckptmgr.transfer.line import Line
from ckptmgr.transfer.logfile import keep_small
from ckptmgr.transfer.loop import ReplicationLoop
from ckptmgr.transfer.messages import (
    Close,
    Ended,
    Event,
    Hurry,
    Logged,
    Notify,
    Ready,
    Refused,
    Superseded,
    Task,
    decode,
)
from ckptmgr.transfer.metrics import MetricsLog
from ckptmgr.transfer.tally import Tally
from ckptmgr.transfer.tidying import Tidying

logger = logging.getLogger(__name__)
_NICE = 10
_LOOK_S = 1.0
_LINGER_LOOK_S = 0.2
_LAST_S = 2.0
_REFUSED = 3
_LONGEST_TEXT = 20_000


class Trainer:
    """The process that this one works for.

    Attributes:
        line: to it.
        is_gone: it has died, or does not listen any more.
        signalled: a signal has come since then that asks this process to end.
    """

    def __init__(self, line: Line, pid: int) -> None:
        self.line = line
        self.is_gone = False
        self.signalled = False
        self._pid = pid

    def heard(self, number: int, frame: FrameType | None) -> None:
        """A signal has reached this process. Notes it and no more: it may have interrupted the very code that holds a lock."""
        if self.is_gone or os.getppid() != self._pid:
            self.signalled = True

    def messages(self) -> Iterator[object]:
        """What it says, and None about once a second, until it is gone and everything that it had said was handed out."""
        while True:
            try:
                data = self.line.receive(_LOOK_S)
            except EOFError:
                break
            # Its end of the socket may stay open: a process that it forked has it, too.
            if data is None and os.getppid() != self._pid:
                break
            yield None if data is None else decode(data)
        self.is_gone = True


class _ToTrainer(logging.Handler):
    """Hands log records to the trainer, whose logging is the user's; without a trainer, standard error is this process's log file."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self._trainer = trainer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = without_secrets(self.format(record))[:_LONGEST_TEXT]
            self._trainer.line.send(Logged(name=record.name, level=record.levelno, text=text))
            if self._trainer.is_gone:
                at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
                print(at, record.levelname, text, file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - a full disk must not stop the uploads
            self.handleError(record)


class _Host:
    """One task, from the first message to the end."""

    def __init__(self, task: Task, trainer: Trainer) -> None:
        self._task = task
        self._trainer = trainer
        self._stop = threading.Event()
        give_way = threading.Event()
        fs, root = open_store(task.url, policy=task.retry, stop=give_way)
        if task.wrap_backend is not None:
            fs = task.wrap_backend(fs)
        run = RunDirectory(fs=fs, root=root, url=task.url, record=task.record)
        self._tier = LocalTier.open(task.local_dir)
        self._tally = Tally()
        self._file = HostFile(self._tier, task.url, "process", self._tally)
        self._metrics = MetricsLog(self._tier.root, labels=task.labels)
        self._tidying = Tidying(run, self._tier, attempt=task.attempt, retention=task.retention)
        self._superseded = False
        self._loop = ReplicationLoop(
            self._tier,
            run,
            stop=self._stop,
            report=self._report,
            after_commit=self._tidying,
            unwanted=self._tidying.unwanted,
            pause_s=task.pause_s,
            retries=lambda: fs.retries,
            give_way=give_way,
        )

    def run(self, messages: Iterator[object]) -> None:
        """Until the trainer says so, or, when it is gone, until nothing is pending or the time is over."""
        threading.Thread(target=self._listen, args=(messages,), name="ckptmgr-commands", daemon=True).start()
        self._trainer.line.send(Ready())
        self._file.update()
        self._loop.run()
        self._file.close()
        self._trainer.line.send(Ended())
        self._trainer.line.flush(_LAST_S)

    def _listen(self, messages: Iterator[object]) -> None:
        for command in messages:
            try:
                self._obey(command)
            except Exception:  # this thread also sees to the end of the process
                logger.exception("%s was not understood", command)
            keep_small(self._tier.root)
        self._linger()

    def _obey(self, command: object) -> None:
        if isinstance(command, Notify):
            self._loop.notify()
        elif isinstance(command, Hurry):
            self._loop.hurry()
        elif isinstance(command, Close):
            self._loop.close()

    def _linger(self) -> None:
        """The trainer is gone. This thread ends the process in time, whatever the loop is stuck in: the journal stands a kill."""
        until = time.monotonic() + self._task.linger_s
        logger.info("the trainer is gone: going on with what is pending for %g s at most", self._task.linger_s)
        self._loop.close(persist=True)
        while time.monotonic() < until and self._has_tier() and not self._trainer.signalled:
            self._stop.wait(_LINGER_LOOK_S)
            keep_small(self._tier.root)
        self._loop.halt()
        if self._has_tier():
            threading.Event().wait(_LAST_S)
        os._exit(0)

    def _has_tier(self) -> bool:
        return (self._tier.root / RUN_FILE).exists()

    def _report(self, event: Event) -> None:
        self._tally.note(event)
        self._trainer.line.send(event)
        self._file.update(event)
        if self._trainer.is_gone:  # else it records what it hears
            record_upload(self._metrics, event)
        if self._tidying.superseded and not self._superseded:
            self._superseded = True
            self._trainer.line.send(Superseded())


def main(trainer_pid: int) -> int:
    """Do the task that comes on standard input; the exit status."""
    # The socket moves away from standard input, where something might read it by mistake.
    trainer = Trainer(Line(Connection(os.dup(0))), trainer_pid)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.enable()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, trainer.heard)
    # The thread that started us may have had some of them blocked.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    messages = trainer.messages()
    try:
        task = next((message for message in messages if message is not None), None)
        if not isinstance(task, Task):
            return 0  # the trainer has died before it could say what to do
        logging.getLogger("ckptmgr").setLevel(task.log_level)
        logging.getLogger("ckptmgr").addHandler(_ToTrainer(trainer))
        host = _Host(task, trainer)
    except Exception as error:  # noqa: BLE001 - a class of the user's that cannot be unpickled raises anything
        trainer.line.send(Refused(why=str(error) if isinstance(error, CkptmgrError) else repr(error)))
        return _REFUSED
    host.run(messages)
    return 0
