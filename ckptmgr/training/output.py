"""A file that is digested while it is written."""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING

from ckptmgr.backends.localfile import open_target, write_all
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core.checksums import Digester, Digests

if TYPE_CHECKING:
    from typing_extensions import Self

# Large: after each block the thread asks for the GIL up to four times, and beside a thread that runs Python each takes 5 ms. With 4 MiB
# a GiB took 6.5 s there, with 32 MiB 1.7 s; alone both take 0.9 s.
BLOCK_BYTES = 32 << 20
# What is smaller is collected: a copy is quicker than those requests.
_DIRECT_BYTES = 4 << 20
_COLLECTED_BYTES = 16 << 20


class DigestingFile:
    """A new file at `path`, for `torch.save` to write to, in order. A context manager; use from one thread.

    Its `write` never raises an OSError: torch's C++ code would turn it into one about positions, or end the process. The first one is kept,
    nothing is written after it, and `finish` raises it.

    Args:
        needed_bytes: about what the file will take, for the error when the disk is full.
    """

    def __init__(self, path: str | os.PathLike[str], *, needed_bytes: int | None = None) -> None:
        self.path = os.fspath(path)
        self._needed_bytes = needed_bytes
        self._digester = Digester()
        self._collected = bytearray()
        self._error: OSError | None = None
        self._fd = open_target(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append `data`; all of it, as far as the caller is concerned."""
        size = len(data)
        if size < _DIRECT_BYTES:
            self._collected += data
            if len(self._collected) >= _COLLECTED_BYTES:
                self._put_collected()
            return size
        self._put_collected()
        view = memoryview(data)
        for start in range(0, size, BLOCK_BYTES):
            self._put(view[start : start + BLOCK_BYTES])
        return size

    def flush(self) -> None:
        """Nothing: `finish` does it."""

    def finish(self) -> Digests:
        """Make the bytes durable; the digests of all of them.

        Raises:
            DiskFullError, AccessDeniedError, PermanentBackendError: something was not written, or did not get to the disk. The kernel may have
                dropped the bytes then, so there is no second try on this file.
        """
        self._put_collected()
        with os_errors("write", self.path, needed_bytes=self._needed_bytes):
            if self._error is not None:
                raise self._error
        with os_errors("fsync", self.path, needed_bytes=self._needed_bytes):
            os.fsync(self._fd)
        return self._digester.digests()

    def _put_collected(self) -> None:
        if self._collected:
            collected, self._collected = self._collected, bytearray()
            self._put(memoryview(collected))

    def _put(self, block: memoryview) -> None:
        if self._error is not None:
            return
        try:
            write_all(self._fd, block)
        except OSError as error:
            # Without its frames: they refer to the block, whose memory is gone when torch has its answer.
            self._error = error.with_traceback(None)
            return
        self._digester.update(block)
