"""Local files at the two ends of a transfer.

A source is digested in order, and refused if it is not, or not any more, what was described (I10). A target is always a new file.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from ckptmgr.backends.crc import combine
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core.checksums import CrcFunction, Digester, Digests
from ckptmgr.core.errors import SourceChangedError

if TYPE_CHECKING:
    from typing_extensions import Self

    from ckptmgr.backends.base import CrcKind


#: What is digested at a time. Half of it would cost a little less; but beside a thread that runs Python, each block waits for that one several times.
BLOCK_BYTES = 2 << 20
# Where only a CRC is computed, reading is what it costs: of a block that stays in the processor's cache, the least.
_PASS_BYTES = 512 << 10


class SourceFile:
    """The file at `path`, open for reading. A context manager; use from one thread, except `read_at` and `check_unchanged`.

    Attributes:
        size: in bytes, when it was opened; exactly this many bytes are read.
        expected: what it was when it was described.

    Raises:
        AccessDeniedError: the file may not be read.
        SourceChangedError: the file is missing, is not a regular file, or its size is not that of `expected`.
    """

    def __init__(self, path: str | os.PathLike[str], expected: Digests | None = None) -> None:
        self.path = os.fspath(path)
        self.expected = expected
        self._digester = Digester()
        self._digested = 0
        with os_errors("open", self.path):
            try:
                # O_NONBLOCK: opening a FIFO would wait for its writer for ever. It has no effect on regular files.
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except (FileNotFoundError, NotADirectoryError) as error:
                raise SourceChangedError(f"{self.path!r} is gone", path=self.path) from error
        try:
            self._stat = os.fstat(self._fd)
            if not stat.S_ISREG(self._stat.st_mode):
                raise SourceChangedError(f"{self.path!r} is not a regular file", path=self.path)
            self.size = self._stat.st_size
            if expected is not None and self.size != expected.size:
                raise self.changed(f"has {self.size} bytes instead of {expected.size}")
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)

    def read_at(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`, not digested. Safe from any thread."""
        blocks = []
        while length:
            with os_errors("open", self.path):
                block = os.pread(self._fd, length, offset)
            if not block:
                raise self.changed("became shorter while it was read")
            blocks.append(block)
            offset += len(block)
            length -= len(block)
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    def readinto_at(self, offset: int, view: memoryview) -> None:
        """As `read_at`, into all of `view`."""
        while view:
            with os_errors("open", self.path):
                count = os.preadv(self._fd, [view], offset)
            if not count:
                raise self.changed("became shorter while it was read")
            offset += count
            view = view[count:]

    def blocks(self, block_bytes: int) -> Iterator[bytes]:
        """The whole file in order, in blocks of `block_bytes` (the last may be shorter), each one digested."""
        for offset in range(0, self.size, block_bytes):
            yield self.digest_at(offset, min(block_bytes, self.size - offset))

    def digest_at(self, offset: int, length: int) -> bytes:
        """As `read_at`, and digested. Each byte of the file must be asked for once, in order."""
        if offset != self._digested:
            raise ValueError(f"digesting must go on at {self._digested}, not at {offset}")
        block = self.read_at(offset, length)
        self._digester.update(block)
        self._digested += length
        return block

    def check_unchanged(self) -> None:
        """Raise SourceChangedError if the file was written to since it was opened."""
        now = os.fstat(self._fd)
        # ctime is not compared: taking a hard link changes it, and so does a rename over the path, which leaves our descriptor's
        # bytes alone.
        if (now.st_size, now.st_mtime_ns) != (self._stat.st_size, self._stat.st_mtime_ns):
            raise self.changed("was written to while it was read")

    def finish(self) -> Digests:
        """The digests, once everything was read.

        Raises:
            SourceChangedError: what was read is not `expected`, or the file was written to in the meantime.
        """
        if self._digested != self.size:
            raise ValueError(f"{self._digested} of {self.size} bytes were read")
        # A writer that goes on writing leaves a mixture of old and new bytes behind the reader.
        self.check_unchanged()
        digests = self._digester.digests()
        expected = self.expected
        if expected is not None and digests.blake3 != expected.blake3:
            raise self.changed(
                f"has BLAKE3 {digests.blake3} instead of {expected.blake3}",
                expected=expected.blake3,
                actual=digests.blake3,
            )
        return digests

    def changed(self, what: str, **facts: object) -> SourceChangedError:
        """The error for a file that is not what it was."""
        return SourceChangedError(
            f"{self.path!r} {what}",
            hint="a checkpoint's files must stay as they are until uploaded",
            path=self.path,
            **facts,
        )


class SourcePass:
    """One reading of a source in order, for a store that keeps a CRC: at its end it is known whether the file is what was described.

    The CRC says so, which accident does not fake and costs a fifth of a BLAKE3; that one is computed only when the description lacks this CRC.

    Args:
        kind: of the CRC.
    """

    def __init__(self, source: SourceFile, kind: CrcKind, crc: CrcFunction) -> None:
        self._source = source
        self._kind = kind
        self._crc = crc
        self._whole = self._seen = 0
        self._needs_all = source.expected is not None and getattr(source.expected, kind) is None
        self._buffer = memoryview(bytearray(max(1, min(_PASS_BYTES, source.size))))

    def crc_of(self, length: int, seen: Callable[[memoryview], object] | None = None) -> int:
        """The CRC of the next `length` bytes alone.

        Args:
            seen: called with each block, which changes after the call.
        """
        value, end = 0, self._seen + length
        while self._seen < end:
            block = self._buffer[: min(len(self._buffer), end - self._seen)]
            if self._needs_all:
                block[:] = self._source.digest_at(self._seen, len(block))
            else:
                self._source.readinto_at(self._seen, block)
            value = self._crc(block, value)
            self._seen += len(block)
            if seen is not None:
                seen(block)
        # Of the first piece, and so of every small file, nothing is to be combined.
        self._whole = value if end == length else combine(self._kind, self._whole, value, length)
        return value

    def finish(self) -> str:
        """The CRC of the whole, 16 hexadecimal digits, once everything was read.

        Raises:
            SourceChangedError: the file is not what was expected, or was written to in the meantime.
        """
        if self._seen != self._source.size:
            raise ValueError(f"{self._seen} of {self._source.size} bytes were read")
        if self._needs_all:
            self._source.finish()
        self._source.check_unchanged()
        crc = f"{self._whole:016x}"
        wanted = None if self._source.expected is None else getattr(self._source.expected, self._kind)
        if wanted is not None and wanted != crc:
            raise self._source.changed(f"has the {self._kind} {crc} instead of {wanted}", expected=wanted, actual=crc)
        return crc


def open_target(path: str | os.PathLike[str]) -> int:
    """A descriptor of a new, empty file at `path`, open for writing and reading back; the caller closes it. What was there is unlinked first.

    Truncating it in place instead would reach through a hard link and empty a file that shares its bytes.
    """
    path = os.fspath(path)
    with os_errors("write", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)


def write_all(fd: int, data: bytes | bytearray | memoryview) -> None:
    """Write all of `data`; a single write(2) moves at most 2 GiB and is short when a disk fills up."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close `fd` at the end, whatever happened."""
    try:
        yield fd
    finally:
        os.close(fd)
