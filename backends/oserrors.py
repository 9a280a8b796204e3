"""Translation of the operating system's errors, at one place."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    BucketNotFoundError,
    CkptmgrError,
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    TransientBackendError,
)

_READS = {"read", "info", "ls", "find"}
_FULL = {errno.ENOSPC, errno.EDQUOT}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}
# Network file systems and exhausted tables: these pass.
_TRANSIENT = {errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOLCK, errno.ESTALE}
_TIMEOUT = {errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ECONNRESET, errno.ENETUNREACH}


@contextlib.contextmanager
def os_errors(operation: str, path: str, *, needed_bytes: int | None = None) -> Iterator[None]:
    """Raise any OSError of the body as one of ours; errors that are ours already pass."""
    try:
        yield
    except CkptmgrError:
        raise
    except OSError as error:
        raise translate_os_error(error, operation, path, needed_bytes=needed_bytes) from error


def translate_os_error(error: OSError, operation: str, path: str, *, needed_bytes: int | None = None) -> BackendError:
    """The error of ours that stands for `error`, met by `operation` ("read", "write", "mkdir", …) on `path`."""
    number = error.errno or 0
    facts = {"backend": "file", "operation": operation, "key": path}
    what = f"cannot {operation} {path!r}: {os.strerror(number) if number else error}"
    if number in _FULL:
        free = _free_bytes(path)
        room = "" if free is None else f" ({free} bytes free)"
        return DiskFullError(
            what + room,
            hint="free some space or choose another directory",
            needed_bytes=needed_bytes,
            free_bytes=free,
            **facts,
        )
    if number in _DENIED:
        return AccessDeniedError(
            what, hint="check the owner and mode of the path and whether it is mounted read-only", **facts
        )
    if number == errno.EEXIST:
        return ObjectExistsError(f"{path!r} exists already", **facts)
    if number in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR) and operation in _READS:
        # A key below a file, or the name of a directory, is not the key of an object.
        return ObjectNotFoundError(f"no file {path!r}", **facts)
    if number == errno.ENOENT:
        return BucketNotFoundError(f"cannot {operation} {path!r}: its directory does not exist", **facts)
    if number in _TIMEOUT:
        return BackendTimeoutError(what, **facts)
    if number in _TRANSIENT:
        return TransientBackendError(what, **facts)
    return PermanentBackendError(what, **facts)


def _free_bytes(path: str) -> int | None:
    """Bytes an unprivileged user may still write where `path` is or would be; None when the system does not say."""
    while path:
        try:
            stats = os.statvfs(path)
        except FileNotFoundError:
            parent = os.path.dirname(path)
            if parent == path:
                return None
            path = parent or "."
        except OSError:
            return None
        else:
            return stats.f_bavail * stats.f_frsize
    return None
