"""How a file gets into an object store: in one request, or in parts. Built from the single requests of `objectrequests.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ckptmgr.backends.base import CrcKind, WriteMode
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.localfile import SourceFile, SourcePass
from ckptmgr.backends.objectrequests import DamagedInTransitError, ObjectRequests, Stored
from ckptmgr.backends.parts import Part, Receipt
from ckptmgr.backends.partupload import UploadGoneError
from ckptmgr.backends.retry import Retrier
from ckptmgr.core.checksums import CrcFunction, crc_function
from ckptmgr.core.errors import (
    BackendError,
    ObjectNotFoundError,
    SizeMismatchError,
)

T = TypeVar("T")

# Up to this size a file is read once, and sent from memory.
_HELD_BYTES = 1 << 20

# The store has joined the parts, and the whole is not what was sent.
_DAMAGED = {"BadDigest", "XAmzContentChecksumMismatch"}
# The store has dropped the parts; or another write of the key came between, and S3 wants all of them again.
# Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
_GONE = {"NoSuchUpload", "ConditionalRequestConflict"}
_BETWEEN = "was written to between being digested and being sent"


class ObjectUploads(ObjectRequests):
    """What the two ways have in common: the checks around them. A path is `bucket/key`."""

    _retrier: Retrier

    @property
    def concurrency(self) -> int:
        return self._retrier.pace.concurrency

    def _put_whole(
        self, source: SourceFile, path: str, mode: WriteMode, progress: Callable[[int], object] | None
    ) -> None:
        """Store all of `source` at `path` in one request. A small file is read once and held; of another, a block at a time, twice."""
        kind, crc = self._known_crc()
        reading = SourcePass(source, kind, crc)
        held = bytearray()
        reading.crc_of(source.size, held.extend if source.size <= _HELD_BYTES else None)
        known = reading.finish()
        stores_crc = known if kind == self.crc_kind else None
        if source.size <= _HELD_BYTES:
            answer = self._put(path, bytes(held), stores_crc, mode)
            if progress is not None:
                progress(source.size)
        else:
            answer = self._put_body(source, path, mode, progress, known, stores_crc)
        self._confirm(path, source.size, stores_crc, answer)

    def _put_body(
        self,
        source: SourceFile,
        path: str,
        mode: WriteMode,
        progress: Callable[[int], object] | None,
        known: str,
        stores_crc: str | None,
    ) -> Stored:
        _, crc = self._known_crc()
        body = FileBody(source, 0, source.size, crc=crc, told=progress, pace=self._retrier.pace)
        if not self._store_checks:
            body.watch()
        try:
            answer = self._put(path, body, stores_crc, mode)
        except BackendError as error:
            body.check(error)
            raise
        if body.sent_crc not in (None, known):
            self.rm_file(path)
            raise source.changed(_BETWEEN)
        return answer

    def _confirm(self, path: str, size: int, crc: str | None, answer: Stored) -> None:
        """Check that the store holds what was sent; damaged bytes are removed."""
        stored = answer
        if crc is None or answer.crc is None:
            stored = self._head(path)
            if answer.etag and stored.etag != answer.etag:
                # Somebody has overwritten it meanwhile, as one may with a tag. Theirs is not ours to judge, even less to remove.
                return
        if stored.size is not None and stored.size != size:
            self.rm_file(path)
            text = f"{self._url(path)} has {stored.size} bytes after {size} were sent"
            raise SizeMismatchError(text, expected=size, actual=stored.size, key=path)
        if crc is not None and stored.crc is not None and stored.crc != crc:
            self.rm_file(path)
            raise self._damaged(path, crc, stored.crc)

    def _damaged(self, path: str, expected: str | None, actual: str) -> DamagedInTransitError:
        text = f"{self._url(path)} was stored with {self.crc_kind} {actual} instead of {expected}"
        facts = {"backend": self.kind, "operation": "write", "key": path}
        return DamagedInTransitError(text, expected=expected, actual=actual, **facts)

    def _known_crc(self) -> tuple[CrcKind, CrcFunction]:
        """The CRC of the store's kind, or one that this machine can compute."""
        crc = crc_function(self.crc_kind)
        if crc is not None:
            return self.crc_kind, crc
        other = crc_function("crc64xz")
        assert other is not None
        return "crc64xz", other

    def _head(self, path: str) -> Stored:
        """What the store says about an object."""
        return self._head_once(path)

    def _url(self, path: str) -> str:
        return f"{self.kind}://{path}"


class ObjectUpload:
    """The `PartSender` of one key."""

    def __init__(self, requests: ObjectUploads, path: str, mode: WriteMode, retrier: Retrier) -> None:
        self.crc_kind, self.crc = requests._known_crc()
        self.is_stores_crc = self.crc_kind == requests.crc_kind
        self._requests = requests
        self._path = path
        self._mode: WriteMode = mode
        self._retrier = retrier

    def begin(self) -> str:
        return self._requests._begin(self._path, self._mode)

    def stored(self, upload_id: str) -> list[Receipt] | None:
        return _unless_gone(lambda: self._requests._list_parts(self._path, upload_id))

    def send(self, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt | None:
        if not self._requests._store_checks:
            body.watch()
        receipt = _unless_gone(lambda: self._requests._send_part(self._path, upload_id, part, body, digest))
        if body.sent_crc not in (None, digest.seen):
            raise body.source.changed(_BETWEEN)
        return receipt

    def finish(self, upload_id: str, receipts: list[Receipt], size: int, crc: str | None) -> None:
        requests, path = self._requests, self._path
        tries = 0

        def complete() -> Stored | BackendError:
            nonlocal tries
            tries += 1
            try:
                return requests._complete(path, upload_id, receipts, crc, self._mode)
            except BackendError as error:
                # An earlier try may have been applied and its answer lost: the upload has become the object, and stores
                # answer differently to completing it again (success, no such upload, the object exists).
                if tries > 1 and self.is_complete(size, crc):
                    return Stored(etag="")
                # These parts will never amount to anything else: tried again, it is with new ones.
                code = getattr(error, "code", "")
                if code in _DAMAGED:
                    return requests._damaged(path, crc, "another")
                if code in _GONE:
                    return UploadGoneError(
                        f"the upload of {requests._url(path)} is void: {code}", hint="it begins anew"
                    )
                raise

        answer = self._retrier(f"complete {requests._url(path)}", complete)
        if isinstance(answer, BackendError):
            raise answer
        requests._confirm(path, size, crc, answer)

    def is_complete(self, size: int, crc: str | None) -> bool:
        try:
            stored = self._requests._head(self._path)
        except ObjectNotFoundError:
            return False
        return stored.size == size and crc is not None and stored.crc == crc

    def abort(self, upload_id: str) -> None:
        self._requests._abort(self._path, upload_id)


def _unless_gone(call: Callable[[], T]) -> T | None:
    try:
        return call()
    except BackendError as error:
        if getattr(error, "code", "") != "NoSuchUpload":
            raise
        return None
