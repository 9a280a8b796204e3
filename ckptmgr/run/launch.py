"""Run the user's training command: signals pass through, its exit code passes through."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from ckptmgr.core.errors import ConfigError

PLACEHOLDER = "{}"
RESUME_ENV = "CKPTMGR_RESUME_FROM"
# The highest attempt of the run when that was chosen: once there is a higher one, COMMAND has begun from it, and a process that it starts again has not.
ATTEMPT_ENV = "CKPTMGR_RESUME_ATTEMPT"
LOCAL_DIR_ENV = "CKPTMGR_LOCAL_DIR"
# The run that `ckptmgr resume` was given: a COMMAND that saves to another one is told.
RUN_ENV = "CKPTMGR_RESUME_RUN"
# A file in which COMMAND says that it refused to go on for a drift: a traceback's 1 would be taken for a failure that may pass.
REFUSAL_ENV = "CKPTMGR_REFUSAL_FILE"
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)


def fill_in(command: Sequence[str], path: str | None) -> list[str]:
    """`command` with `{}` replaced by `path`.

    Without a path, `{}` is dropped together with an option right before it (`--resume {}`), and an argument that contains it
    (`--resume={}`) as a whole.
    """
    if path is not None:
        return [argument.replace(PLACEHOLDER, path) for argument in command]
    result: list[str] = []
    for argument in command:
        if argument == PLACEHOLDER:
            if result[1:] and result[-1].startswith("-"):
                result.pop()
        elif PLACEHOLDER not in argument:
            result.append(argument)
    return result


def tell_refusal(why: str) -> None:
    """In COMMAND: leave word for `ckptmgr resume` that nothing is trained, because something is not as it was. Does nothing elsewhere, and never fails."""
    path = os.environ.get(REFUSAL_ENV)
    if path:
        with contextlib.suppress(OSError):
            Path(path).write_text(why, encoding="utf-8")


def told_refusal(path: Path) -> str | None:
    """What a COMMAND that was given `path` in REFUSAL_ENV has said; None if it refused nothing."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def launch(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run `command` to its end and return its exit code, 128 + n if signal n killed it. Call it from the main thread.

    Signals that reach this process are sent on to the command, except Ctrl-C at a terminal, which the terminal sends to both. A signal that this
    process was started to ignore (`nohup`) is ignored by both.

    Raises:
        ConfigError: it cannot be started.
    """
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if number in (signal.SIGINT, signal.SIGQUIT) and _at_terminal():
            return
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    # Before the command exists: a signal that came in between would end this process and leave the command behind.
    heard = [number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
    previous = {number: signal.signal(number, forward) for number in heard}
    previous[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
    try:
        try:
            child = subprocess.Popen(list(command), env={**os.environ, **environment})
        except OSError as exc:
            raise ConfigError(f"cannot run {command[0]!r}: {exc.strerror}", hint="check the command after --") from exc
        for number in early:
            child.send_signal(number)
        code = _wait(child)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 128 - code if code < 0 else code


def _wait(child: subprocess.Popen[bytes]) -> int:
    """Wait for `child` with an ear for signals.

    `child.wait()` would be deaf to one that comes in the moment before it blocks: Python's handler runs between two system calls, not in one. Here
    each signal, SIGCHLD included, leaves a byte that the next `select` finds.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        while (code := child.poll()) is None:
            select.select([reader], [], [])
            os.read(reader, 4096)
        return code
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


def _at_terminal() -> bool:
    """Whether a terminal delivers its signals to this process group, and so to the command as well."""
    try:
        return sys.stdin is not None and sys.stdin.isatty() and os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False
