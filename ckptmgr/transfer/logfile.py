"""Where the standard output and errors of a transfer process go: a file in the local tier, of bounded size.

Not the trainer's: a terminal or a pipe of its own would stay open for as long as the process lingers, and whoever waits for the end of that would wait.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ckptmgr.core import layout

LOG_FILE, OLD_LOG_FILE = layout.LOG_FILE, layout.OLD_LOG_FILE
MOST_BYTES = 1 << 20


@contextlib.contextmanager
def log_file(tier_root: Path) -> Iterator[int]:
    """A descriptor to append to; of nowhere, if the tier does not take one."""
    try:
        fd = _open(tier_root)
    except OSError:
        fd = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def keep_small(tier_root: Path, fds: tuple[int, ...] = (1, 2)) -> None:
    """Begin a new file when the one behind `fds` has grown too large; the old one takes the place of the one before. Cheap, never raises.

    By the process that writes it. Two may: a second one that has the same old file open moves on to the new one.
    """
    with contextlib.suppress(OSError):
        now = os.fstat(fds[-1])
        if not stat.S_ISREG(now.st_mode) or now.st_size <= MOST_BYTES:
            return
        path = tier_root / LOG_FILE
        try:
            if os.path.samestat(now, os.stat(path)):
                os.replace(path, tier_root / OLD_LOG_FILE)
            fd = _open(tier_root)
        except OSError:  # no name, or no room for a new one: then without the old lines
            os.ftruncate(fds[-1], 0)
            return
        for each in fds:
            os.dup2(fd, each)
        os.close(fd)


def _open(tier_root: Path) -> int:
    return os.open(tier_root / LOG_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
