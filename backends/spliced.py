"""From a socket to a file without a copy in this program: through a pipe, whose pages the kernel hands on (`splice`, Linux).

What arrives is otherwise copied to a buffer and from there to the file. Saved is the first of these, a sixth of a download's processor time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

# As much as anybody may have without privileges; who may not gets what a pipe has by itself.
_PIPE_BYTES = 1 << 20
# For less, a pipe is not worth its making.
_LEAST_BYTES = 1 << 20
_READ_BYTES = 64 << 10
#: How a kernel or a file system says that it cannot splice this.
CANNOT = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM})


@runtime_checkable
class Spliceable(Protocol):
    """Bytes on their way from the store that a pipe may take."""

    def splice(self, pipe: int, most: int, /) -> int | None:
        """Put what arrives into an empty pipe, at most `most` bytes; how many, 0 at the end, None if what comes next must be read."""


class Pipe:
    """For one thread and one answer: what a failure leaves in it must not come out for another. Made by `pipe_for`."""

    def __init__(self, source: Spliceable, end_in: int, end_out: int) -> None:
        self._source = source
        self._in = end_in
        self._out = end_out
        self._is_able = True

    def fill(self, most: int) -> int | None:
        """As `Spliceable.splice`; everything must be emptied before the next call."""
        return self._source.splice(self._in, min(most, _PIPE_BYTES)) if self._is_able else None

    def empty(self, fd: int, offset: int, count: int) -> None:
        """Write the `count` bytes that are in it to `fd` at `offset`.

        Raises:
            OSError: they cannot be written; an unknown part of them is.
        """
        end = offset + count
        while offset < end:
            try:
                offset += os.splice(self._out, fd, end - offset, offset_dst=offset)
            except OSError as error:
                if error.errno not in CANNOT:
                    raise
                # This file system takes bytes from a program only: these, and from the next on they are read.
                self._is_able = False
                block = memoryview(os.read(self._out, min(end - offset, _READ_BYTES)))
                while block:
                    written = os.pwrite(fd, block, offset)
                    offset, block = offset + written, block[written:]


@contextlib.contextmanager
def pipe_for(incoming: object, size: int) -> Iterator[Pipe | None]:
    """A pipe for `size` bytes of `incoming`, or None where they are read: there are few, or it or this system knows no other way."""
    if size < _LEAST_BYTES or not hasattr(os, "splice") or not isinstance(incoming, Spliceable):
        yield None
        return
    try:
        end_out, end_in = os.pipe()
    except OSError:
        # Too many files are open: the file itself already is.
        yield None
        return
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(end_in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        yield Pipe(incoming, end_in, end_out)
    finally:
        os.close(end_in)
        os.close(end_out)
