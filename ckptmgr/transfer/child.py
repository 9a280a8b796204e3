"""The trainer's side of the transfer process: start it, talk to it, let go of it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from ckptmgr.transfer.messages import Command, Event, Task

LOG_FILE = "transfer.log"
_LOG_BYTES = 1 << 20
_GONE_S = 5.0

# Sockets to transfer processes. A forked DataLoader worker closes its copies at once: it must not feed the process, nor keep the line open.
_lines: set[int] = set()


def _close_in_child() -> None:
    for fd in _lines:
        with contextlib.suppress(OSError):
            os.close(fd)
    _lines.clear()


os.register_at_fork(after_in_child=_close_in_child)


class TransferProcess:
    """A running transfer process. `send` and `kill` are safe from any thread.

    Args:
        task: what it is to do, sent as the first message.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, task: Task) -> None:
        ours, theirs = socket.socketpair()
        try:
            with _log_file(Path(task.local_dir)) as log:
                # exec, not fork alone: a fork would share the trainer's threads' locks, multiprocessing's spawn would run its program again.
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    [sys.executable, "-m", "ckptmgr.transfer.worker", str(os.getpid())],
                    stdin=theirs.fileno(),
                    stdout=log,
                    stderr=log,
                    env=_environment(),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._line = Connection(ours.detach())
        self._fd = self._line.fileno()
        _lines.add(self._fd)
        self._sending = threading.Lock()
        self.send(task)

    def send(self, command: Command) -> None:
        """Tell it something; nothing happens when it is dead, which `events` will show."""
        with contextlib.suppress(OSError, ValueError), self._sending:
            self._line.send(command)

    def events(self) -> Iterator[Event]:
        """What it says, until it is gone or let go. One thread only."""
        while True:
            try:
                yield self._line.recv()
            except (EOFError, OSError, TypeError):  # closed here, or there; TypeError: closed in the middle of a read
                return

    def let_go(self) -> None:
        """Close the line: it goes on by itself for its linger time."""
        with contextlib.suppress(OSError):
            # Not only close: another thread may be reading, and would not be woken by that.
            socket.socket(fileno=os.dup(self._fd)).shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End it at once. What it had not committed stays pending."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGKILL)

    def finish(self, wait_s: float = _GONE_S) -> int | None:
        """Close the line and collect its exit status; None if it goes on after `wait_s`."""
        _lines.discard(self._fd)
        with contextlib.suppress(OSError):
            self._line.close()
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            # Left behind on purpose: not worth subprocess's warning about a child that nobody waited for.
            self._process.returncode = 0
            return None


@contextlib.contextmanager
def _log_file(folder: Path) -> Iterator[int]:
    """Where its standard output goes: a file, for a terminal or a pipe of the trainer's would stay open as long as it lingers."""
    path = folder / LOG_FILE
    with contextlib.suppress(OSError):
        if path.stat().st_size > _LOG_BYTES:
            path.replace(path.with_name(f"{LOG_FILE}.old"))
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _environment() -> dict[str, str]:
    """The trainer's, with its module search path: the process imports the same ckptmgr, from wherever the trainer did."""
    paths = [os.path.abspath(path) for path in sys.path if isinstance(path, str) and os.path.exists(path or ".")]
    # Python would put the working directory first: a file of the user's named like a module of ours must not be imported in its place.
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONSAFEPATH": "1"}
