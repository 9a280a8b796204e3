"""The bytes of a file as the body of a request: read as they are sent, never held whole.

They are read a second time, after the pass that digested them. The store compares what arrives with the CRC of the first pass, and where it does
not, `FileBody` does (I10).
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.pace import Pace, Watch
from ckptmgr.core.checksums import CrcFunction
from ckptmgr.core.errors import CkptmgrError

#: What is sent at a time.
SEND_BYTES = 1 << 20
# A block must get onto the wire within the client's time limit. On a link too slow for that, the next try makes smaller ones.
_CAREFUL_BYTES = 64 << 10


class BodyCutError(CkptmgrError):
    """The body is not wanted any more; raised into the request that was sending it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BodyDigest:
    """What the first pass over a body's bytes has found.

    Attributes:
        crc: of the kind that the store keeps, 16 hexadecimal digits; None if this machine cannot compute it.
        seen: the CRC that `FileBody` is compared with; the same one if there is.
        md5: 32 hexadecimal digits; None if it was not asked for.
    """

    crc: str | None
    seen: str
    md5: str | None = None


class FileBody:
    """The bytes `[offset, offset + length)` of an open file, as botocore, requests and urllib3 take a body: `read`, `seek`, `tell`, `len`, iteration.

    HTTP libraries ask for 16 KiB at a time to send; they get a block of 1 MiB, for each one costs a system call and two turns of the interpreter lock.
    Who has a buffer uses `readinto`, which makes no new memory.
    One thread at a time; `sent` may be read from any.

    Args:
        crc: counts what is sent, for `sent_crc`.
        cut: when set, the next read raises BodyCutError.
        told: called with the number of bytes of each block handed out for sending, those of a further try left out; it may raise.
        pace: has every block handed out for sending, those of a further try too, wait for its turn.

    Attributes:
        source: the file.
        sent: bytes handed out for sending in the present try.
    """

    def __init__(
        self,
        source: SourceFile,
        offset: int,
        length: int,
        *,
        crc: CrcFunction,
        cut: threading.Event | None = None,
        told: Callable[[int], object] | None = None,
        pace: Pace | None = None,
    ) -> None:
        self.source = source
        self.sent = 0
        # What reading met, or was told. Libraries wrap it in an error of theirs, as if the network had failed.
        self._failure: BaseException | None = None
        self._told = told
        self._pace = pace
        self._watch: Watch | None = None
        self._most = 0
        self._offset = offset
        self._length = length
        self._crc = crc
        self._cut = cut
        self._at = 0
        self._block_bytes = SEND_BYTES
        self._sending = False
        self._watching = False
        self._value, self._is_whole = 0, True

    def restart(self, *, careful: bool = False) -> None:
        """Be ready for a further try.

        Args:
            careful: the last one failed, perhaps because the link is slow.
        """
        self._block_bytes = _CAREFUL_BYTES if careful else SEND_BYTES
        self._watching = False
        # Of the last try: what is worth a further one, as a connection that trickled, is not to be blamed for that one's end.
        self._failure = None
        self.rewind()

    def rewind(self) -> None:
        """Be at the beginning, and not yet sent."""
        self._sending = False
        self.seek(0)

    def watch(self) -> None:
        """Note the CRC of what is sent: whoever receives it does not check it."""
        self._watching = True

    def start_sending(self) -> None:
        """What is read from now on is sent. Before, a client may read all of it to sign it."""
        self._sending = True
        if self._pace is not None:
            self._block_bytes = min(self._block_bytes, self._pace.block_bytes)
            self._watch = self._pace.watch(*([] if self._cut is None else [self._cut]))

    @property
    def sent_crc(self) -> str | None:
        """The CRC of all the bytes that were sent; None unless watched to the end."""
        known = self._sending and self._watching and self._is_whole and self._at == self._length
        return f"{self._value:016x}" if known else None

    def __len__(self) -> int:
        return self._length

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self.sent = self._at if self._sending else 0
        # A client that goes back goes back to the beginning; from anywhere else the CRC would not be that of the whole.
        self._value, self._is_whole = 0, self._at == 0
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """The next block; to be sent, it may have more than `size` bytes. b"" at the end."""
        left = self._length - self._at
        if size is None or size < 0:
            wanted = left
        else:
            # Whoever signs a body may have room for no more than it asks for; whoever sends it takes what there is.
            wanted = min(left, max(size, self._block_bytes) if size and self._sending else size)
        if wanted <= 0:
            return b""
        try:
            self._stop_if_cut()
            block = self.source.read_at(self._offset + self._at, wanted)
            self._at += wanted
            if self._sending:
                self._count(block)
        except BaseException as error:
            self._failure = error
            raise
        return block

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes at the beginning of `view`, never more than a block; how many, 0 at the end."""
        wanted = min(len(view), self._length - self._at, self._block_bytes)
        if wanted <= 0:
            return 0
        try:
            self._stop_if_cut()
            block = view[:wanted]
            self.source.readinto_at(self._offset + self._at, block)
            self._at += wanted
            if self._sending:
                self._count(block)
        except BaseException as error:
            self._failure = error
            raise
        return wanted

    def sha256(self) -> str:
        """Of all the bytes, in hexadecimal; to sign them. Leaves the body at its end."""
        self.rewind()
        sums, view = hashlib.sha256(), memoryview(bytearray(min(SEND_BYTES, max(1, self._length))))
        while count := self.readinto(view):
            sums.update(view[:count])
        return sums.hexdigest()

    def _stop_if_cut(self) -> None:
        if self._cut is not None and self._cut.is_set():
            raise BodyCutError("this upload was given up")

    def _count(self, block: bytes | memoryview) -> None:
        self.sent = self._at
        if self._watching:
            self._value = self._crc(block, self._value)
        if self._told is not None and self.sent > self._most:
            news, self._most = self.sent - self._most, self.sent
            self._told(news)
        if self._watch is not None:
            self._watch.moved(len(block))

    def __iter__(self) -> Iterator[bytes]:
        while block := self.read(self._block_bytes):
            yield block

    def check(self, cause: BaseException) -> None:
        """After a failed request: raise what is not the store's fault, and no further try mends.

        Raises:
            SourceChangedError: the file was written to, and so the store may rightly have refused it.
        """
        if self._failure is not None:
            raise self._failure from cause
        try:
            self.source.check_unchanged()
        except CkptmgrError as error:
            raise error from cause
