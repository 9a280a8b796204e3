"""The single requests that an object store's backend is made of; what is built upon them is in `objectstore.py`.

One method is one request and one try. Each translates its library's errors, and decides nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from ckptmgr.backends.base import Backend, CrcKind, WriteMode
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.parts import Incoming, Part, Receipt
from ckptmgr.core.checksums import crc_function
from ckptmgr.core.errors import BackendError, ChecksumMismatchError, TransientBackendError

#: A connection that moves no byte for so long is cut, in seconds; whoever used it tries again.
STALL_S = 30.0
CONNECT_S = 10.0


class DamagedInTransitError(ChecksumMismatchError, TransientBackendError):
    """The store received other bytes than were sent, and they were removed again: sending once more is safe and likely to help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What the store says about one object.

    Attributes:
        etag: changes with the content; without quotes.
        size: in bytes; None when the answer did not say.
        mtime: seconds since 1970 by the store's clock; None when the answer did not say.
        crc: of the whole object, 16 hexadecimal digits, of the store's kind; None when it keeps none.
    """

    etag: str
    size: int | None = None
    mtime: float | None = None
    crc: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One answer to a listing: keys with what is known of them, common prefixes, and where to go on (None at the end)."""

    objects: list[tuple[str, Stored]]
    prefixes: list[str]
    token: str | None


class ObjectRequests(Backend):
    """What a store must be able to do. A path is `bucket/key`.

    Attributes:
        crc_kind: the CRC that this store keeps of whole objects.
    """

    crc_kind: CrcKind

    @abstractmethod
    def _put(self, path: str, data: bytes | FileBody, crc: str | None, mode: WriteMode) -> Stored:
        """Store an object; `crc` goes along, so that the store can refuse what arrived damaged."""

    @abstractmethod
    def _head_once(self, path: str) -> Stored:
        """What the store says about an object. A 404 may also mean that there is no bucket: `_head` finds out."""

    def _head_again(self, path: str) -> Stored:
        """As `_head_once`, after one that was refused without a reason although the bucket can be listed."""
        return self._head_once(path)

    @abstractmethod
    def _read(self, path: str, etag: str | None, first: int, last: int | None) -> Iterator[bytes]:
        """The bytes `[first, last)` in blocks as they arrive; `last` None is the end.

        Raises:
            TransientBackendError: the connection broke, or the object's ETag is not `etag` (any more).
        """

    def _incoming(self, path: str, etag: str | None, first: int, last: int | None) -> Incoming:
        """As `_read`, into buffers of the caller's: no memory is made per block. The request is made by this call, or by the first read."""
        return _Blocks(self._read(path, etag, first, last))

    @abstractmethod
    def _page(self, bucket: str, prefix: str, delimiter: str, token: str | None, limit: int) -> Page:
        """One page of a listing."""

    @abstractmethod
    def _delete(self, path: str) -> None:
        """Remove an object; may raise ObjectNotFoundError when it is gone."""

    @abstractmethod
    def _delete_batch(self, bucket: str, keys: list[str]) -> dict[str, BackendError]:
        """Remove up to 1000 objects; what was refused, by path."""

    @abstractmethod
    def _copy(self, source: str, target: str) -> None:
        """Copy an object of up to `max_single_copy` bytes."""

    @abstractmethod
    def _begin(self, path: str, mode: WriteMode) -> str:
        """Begin a multipart upload; its id."""

    @abstractmethod
    def _send_part(self, path: str, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt:
        """Store one part; the CRC in `digest` goes along, or is compared with the answer."""

    @abstractmethod
    def _list_parts(self, path: str, upload_id: str) -> list[Receipt]:
        """What the store holds of an upload, with sizes. An unknown id is a BackendError with the code NoSuchUpload."""

    @abstractmethod
    def _copy_part(self, path: str, upload_id: str, part: Part, source: str) -> Receipt:
        """Store one part out of another object."""

    @abstractmethod
    def _complete(self, path: str, upload_id: str, receipts: list[Receipt], crc: str | None, mode: WriteMode) -> Stored:
        """Turn the parts into the object; `crc` is that of the whole."""

    @abstractmethod
    def _abort(self, path: str, upload_id: str) -> None:
        """Drop the parts; an unknown id is fine."""

    @property
    @abstractmethod
    def _store_checks(self) -> bool:
        """Whether this store is known to check, or to answer, the CRC of what it receives."""

    def _crc_of(self, data: bytes) -> str | None:
        """The CRC of the store's kind; None if this machine cannot compute it."""
        crc = crc_function(self.crc_kind)
        return None if crc is None else f"{crc(data, 0):016x}"


class _Blocks:
    """The `Incoming` of a client that hands out blocks of its own."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._rest = memoryview(b"")

    def readinto(self, view: memoryview, /) -> int:
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._rest = memoryview(block)
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count

    def close(self) -> None:
        close = getattr(self._blocks, "close", None)
        if close is not None:
            close()
