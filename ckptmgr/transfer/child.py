"""A transfer process, as the trainer has it: start it, and end it or let it go. What it is told and says goes over its `line`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from ckptmgr.transfer.line import Line
from ckptmgr.transfer.logfile import log_file
from ckptmgr.transfer.messages import Task

# `-c`, for two reasons. Python would put the working directory first with `-m`, where a file of the user's may be named like a module of ours; and the
# module search path must not go through PYTHONPATH, which a program that fetches credentials, of another Python perhaps, would be given as well.
_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[2:]; from ckptmgr.transfer.worker import main; sys.exit(main(int(sys.argv[1])))"
)


class TransferProcess:
    """A running transfer process. `kill` is safe from any thread.

    Args:
        task: what it is to do, sent as the first message.

    Attributes:
        line: to it; ends with it.

    Raises:
        OSError, ValueError, RuntimeError: it cannot be started.
    """

    def __init__(self, task: Task) -> None:
        command = [*_python(), "-c", _PROGRAM, str(os.getpid()), *_search_path()]
        self.line, theirs = Line.pair()
        try:
            with theirs, log_file(Path(task.local_dir)) as log:
                # exec, not fork alone: a fork would share the trainer's threads' locks, multiprocessing's spawn would run its program again.
                self._process: subprocess.Popen[bytes] = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=log, stderr=log, env=_environment(), start_new_session=True
                )
        except BaseException:
            self.line.close()
            raise
        self.pid = self._process.pid
        self.line.send(task)

    def is_alive(self) -> bool:
        """Whether it has not ended. The end of its line does not tell: a process forked at the wrong moment may hold its end of it."""
        return self._process.poll() is None

    def kill(self) -> None:
        """End it at once. What it had not committed stays pending."""
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGKILL)

    def finish(self, wait_s: float) -> int | None:
        """Hang up and collect its exit status; None if it goes on after `wait_s`."""
        self.line.hang_up()
        self.line.close()
        try:
            return self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return None

    def leave(self) -> None:
        """It goes on without us. Not worth subprocess's warning about a child that nobody waited for."""
        if self._process.returncode is None:
            self._process.returncode = 0


def _python() -> list[str]:
    """The interpreter that runs this program, with the options it was given.

    Raises:
        OSError: it is none that could run anything else.
    """
    if not sys.executable:
        raise OSError("this program embeds Python and names no interpreter")
    if getattr(sys, "frozen", False):
        raise OSError("this program was frozen into one file, which would run itself again")
    options: list[str] = getattr(subprocess, "_args_from_interpreter_flags", list)()
    return [sys.executable, *options]


def _search_path() -> list[str]:
    """The trainer's: the process imports the same ckptmgr, and the same modules of the user's, from wherever the trainer did."""
    found = []
    for path in sys.path:
        with contextlib.suppress(OSError):  # the working directory is gone
            if isinstance(path, str) and os.path.exists(path or "."):
                found.append(os.path.abspath(path))
    return found


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}
