"""The transfer process: hosts the replication loop in a process of its own. `python -m ckptmgr.transfer.worker PID`, started by the
uploader of the trainer PID.

Of its own because the bytes must not move in the trainer's: a Python transfer loop beside a Python training loop fights for the interpreter lock.
It imports no torch, runs in its own session at low priority, and takes the locks. Standard input is a socket to the trainer (`messages.py`). When the
trainer is gone it finishes what is pending, for `linger_s` at most, and leaves.

Signals: while the trainer lives they are its business, also when they are sent to the whole job; it says on the socket what is to be done.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection
from types import FrameType

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.loop import ReplicationLoop
from ckptmgr.transfer.messages import (
    Close,
    Ended,
    Event,
    Hurry,
    Logged,
    Moved,
    Notify,
    Ready,
    Refused,
    Superseded,
    Task,
)
from ckptmgr.transfer.status import TransferFile
from ckptmgr.transfer.tally import Tally
from ckptmgr.transfer.tidying import Tidying

logger = logging.getLogger(__name__)
_NICE = 10
_LOOK_S = 1.0
_REFUSED = 3


class Line:
    """The socket to the trainer. Sending never fails: when nobody listens any more, what is sent is lost."""

    def __init__(self, connection: Connection, trainer: int) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._trainer = trainer

    def send(self, event: Event) -> None:
        """Tell the trainer. Any thread."""
        with contextlib.suppress(OSError, ValueError), self._sending:
            self._connection.send(event)

    def receive(self) -> object | None:
        """The next command; None when the trainer is gone."""
        while not self.is_orphaned():
            try:
                if self._connection.poll(_LOOK_S):
                    return self._connection.recv()  # type: ignore[no-any-return]
            except (EOFError, OSError):
                return None
        return None

    def is_orphaned(self) -> bool:
        """Whether the trainer has died. Its end of the socket may still be open: a DataLoader worker that it forked has it, too."""
        return os.getppid() != self._trainer


class _ToTrainer(logging.Handler):
    """Hands log records to the trainer, whose logging is the user's; without a trainer, standard error is this process's log file."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            self._line.send(Logged(name=record.name, level=record.levelno, text=text))
            if self._line.is_orphaned():
                print(record.levelname, text, file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001 - a full disk must not stop the uploads
            self.handleError(record)


class _Host:
    """One task, from the first message to the end."""

    def __init__(self, task: Task, line: Line) -> None:
        self._task = task
        self._line = line
        self._stop = threading.Event()
        fs, root = open_store(task.url, policy=task.retry, stop=self._stop)
        if task.wrap_backend is not None:
            fs = task.wrap_backend(fs)
        run = RunDirectory(fs=fs, root=root, url=task.url, record=task.record)
        tier = LocalTier.open(task.local_dir)
        self._file = TransferFile(tier.root)
        self._writing = threading.Lock()
        self._tally = Tally()
        self._tidying = Tidying(run, tier, attempt=task.attempt, retention=task.retention)
        self._superseded = False
        self.loop = ReplicationLoop(
            tier,
            run,
            stop=self._stop,
            report=self._report,
            after_commit=self._tidying,
            pause_s=task.pause_s,
            retries=lambda: fs.retries,
        )

    def run(self) -> None:
        """Until the trainer says so, or, when it is gone, until nothing is pending or the time is over."""
        threading.Thread(target=self._listen, name="ckptmgr-commands", daemon=True).start()
        self._line.send(Ready())
        self._write_file()
        self.loop.run()
        self._write_file()
        self._file.close()

    def _write_file(self, *, force: bool = True) -> None:
        progress = self._tally.progress("process")
        self._file.write(progress, target=self._task.url, durable=self._tally.durable, force=force)

    def leave(self) -> None:
        """A signal has reached this process. The trainer's uploads must not end by it; without a trainer it means what it says."""
        if self._line.is_orphaned():
            self.loop.halt()

    def _listen(self) -> None:
        while (command := self._line.receive()) is not None:
            if isinstance(command, Notify):
                self.loop.notify()
            elif isinstance(command, Hurry):
                self.loop.hurry()
            elif isinstance(command, Close):
                self.loop.close()
        self._linger()

    def _linger(self) -> None:
        logger.warning("the trainer is gone: going on with what is pending for %g s at most", self._task.linger_s)
        self.loop.close(persist=True)
        self._stop.wait(self._task.linger_s)
        self.loop.halt()

    def _report(self, event: Event) -> None:
        self._tally.note(event)
        self._line.send(event)
        # What nobody sees again is written at once, progress once a second.
        with self._writing:
            self._write_file(force=not isinstance(event, Moved) or event.stem is None)
        if self._tidying.superseded and not self._superseded:
            self._superseded = True
            self._line.send(Superseded())


def main() -> int:
    # The socket moves away from standard input, where something might read it by mistake.
    line = Line(Connection(os.dup(0)), trainer=int(sys.argv[1]))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    host: _Host | None = None

    def heard(number: int, frame: FrameType | None) -> None:
        if host is not None:
            # In a thread: the handler may have interrupted the very code that holds the locks which this needs.
            threading.Thread(target=host.leave, daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, heard)
    try:
        task = line.receive()
        if not isinstance(task, Task):
            return 0  # the trainer died meanwhile
        logging.getLogger("ckptmgr").setLevel(task.log_level)
        logging.getLogger("ckptmgr").addHandler(_ToTrainer(line))
        host = _Host(task, line)
    except Exception as error:  # noqa: BLE001 - a class of the user's that cannot be unpickled raises anything
        line.send(Refused(why=str(error) if isinstance(error, CkptmgrError) else repr(error)))
        return _REFUSED
    host.run()
    line.send(Ended())
    return 0


if __name__ == "__main__":
    sys.exit(main())
