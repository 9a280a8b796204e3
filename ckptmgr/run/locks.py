"""Who on this machine is reading or moving a checkpoint: flock per checkpoint, released by the kernel when the holder dies.

Readers share, clean-up and replication exclude. The lock files are the machine's, not the store's: a lock in a bucket would outlive its holder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Literal

from ckptmgr.backends.oserrors import os_errors

Purpose = Literal["read", "upload"]
_COMMON = "/tmp"

# Open lock files of this process. A flock belongs to the open file, which a forked DataLoader worker shares: one that outlives a killed
# trainer by some seconds would keep the next start out. So a forked child closes them at once.
_held: set[int] = set()


def _close_in_child() -> None:
    for fd in _held:
        with contextlib.suppress(OSError):
            os.close(fd)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def open_lock(path: Path) -> int:
    """Open (and make) a lock file; hand the descriptor to `close_lock` in the end.

    Raises:
        DiskFullError, AccessDeniedError, PermanentBackendError: it cannot be made.
    """
    with os_errors("lock", str(path)):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    _held.add(fd)
    return fd


def close_lock(fd: int) -> None:
    """Close a lock file, and so release it."""
    if fd in _held:  # else this is a forked child, which has closed it already
        _held.discard(fd)
        os.close(fd)


def _common_folder() -> str:
    """The same one for all processes of this machine. TMPDIR is not: a scheduler gives each job its own, and two jobs, or a job and what an earlier one
    has left behind, would not see each other's locks."""
    return _COMMON if os.access(_COMMON, os.W_OK | os.X_OK) else tempfile.gettempdir()


def _lock_dir(run_uuid: str) -> Path:
    base = os.environ.get("CKPTMGR_LOCK_DIR") or os.path.join(_common_folder(), f"ckptmgr-locks-{os.getuid()}")
    # The name comes from a store: it must not lead out of the folder.
    path = Path(base) / (re.sub(r"[^A-Za-z0-9-]", "_", run_uuid)[:64] or "_")
    with os_errors("mkdir", str(path)):
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


@contextlib.contextmanager
def reading(run_uuid: str, stem: object) -> Iterator[None]:
    """Hold `stem` against pruning on this machine while it is read. Waits for a clean-up that is under way."""
    with _locked(run_uuid, f"{stem}.read", fcntl.LOCK_SH):
        yield


@contextlib.contextmanager
def waiting(group: str, what: str) -> Iterator[None]:
    """Hold `what` alone, after whoever holds it now."""
    with _locked(group, f"{sha256(what.encode('utf-8', 'surrogateescape')).hexdigest()[:32]}.alone", fcntl.LOCK_EX):
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


def is_held(run_uuid: str, stem: object, purpose: Purpose) -> bool:
    """Whether somebody on this machine holds it alone, just now; to be shown, not to be relied on."""
    return is_locked(_lock_dir(run_uuid) / f"{stem}.{purpose}")


def held_here(run_uuid: str, purpose: Purpose) -> list[str]:
    """What somebody on this machine holds alone for this purpose, just now."""
    found = []
    for path in sorted(_lock_dir(run_uuid).glob(f"*.{purpose}")):
        with contextlib.suppress(OSError):
            if is_locked(path):
                found.append(path.name.removesuffix(f".{purpose}"))
    return found


def is_locked(path: Path) -> bool:
    """Whether some process holds the lock file at `path` alone, just now. False if there is none.

    Raises:
        OSError: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        # Shared: two that look at once do not take each other for a holder.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _locked(run_uuid: str, name: str, how: int) -> Iterator[None]:
    path = _lock_dir(run_uuid) / name
    while True:
        fd = open_lock(path)
        try:
            fcntl.flock(fd, how)
            if _is_current(fd, path):
                yield
                if how & fcntl.LOCK_EX:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)  # while still held, so that nobody locks a name that is about to vanish
                return
        finally:
            close_lock(fd)


def _is_current(fd: int, path: Path) -> bool:
    """Whether `path` still names the file behind `fd`: its last holder may have unlinked it between open and flock."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False
