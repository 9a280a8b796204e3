"""Who on this machine is reading or moving a checkpoint: flock per checkpoint, released by the kernel when the holder dies.

Readers share, clean-up and replication exclude. The lock files are the machine's, not the store's: a lock in a bucket would outlive its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

Purpose = Literal["read", "upload"]


def _lock_dir(run_uuid: str) -> Path:
    base = os.environ.get("CKPTMGR_LOCK_DIR") or os.path.join(tempfile.gettempdir(), f"ckptmgr-locks-{os.getuid()}")
    path = Path(base) / run_uuid
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


@contextlib.contextmanager
def reading(run_uuid: str, stem: object) -> Iterator[None]:
    """Hold `stem` against pruning on this machine while it is read. Waits for a clean-up that is under way."""
    with _locked(run_uuid, f"{stem}.read", fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def exclusive(run_uuid: str, stem: object, purpose: Purpose) -> Iterator[bool]:
    """Try to be the only one; yields False at once if somebody else on this machine holds it.

    `read`: nobody reads it (for clean-up). `upload`: nobody else replicates it.
    """
    try:
        with _locked(run_uuid, f"{stem}.{purpose}", fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield True
            return
    except BlockingIOError:
        pass
    yield False


@contextlib.contextmanager
def _locked(run_uuid: str, name: str, how: int) -> Iterator[None]:
    path = _lock_dir(run_uuid) / name
    while True:
        # No lock is inherited by a forked worker: the file is closed on exec, and fork children never unlock (flock is per open file).
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if _is_current(fd, path):
                yield
                if how & fcntl.LOCK_EX:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)  # while still held, so that nobody locks a name that is about to vanish
                return
        finally:
            os.close(fd)


def _is_current(fd: int, path: Path) -> bool:
    """Whether `path` still names the file behind `fd`: its last holder may have unlinked it between open and flock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
