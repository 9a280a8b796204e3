"""An upload in parts in memory: what the loop of `ckptmgr.backends.partupload` talks to, and the journal of one file."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable

from ckptmgr.backends.base import CrcKind
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.parts import Part, Receipt
from ckptmgr.core.checksums import crc_function

Fail = Callable[[str, int], None]


def crc64xz(data: bytes | bytearray | memoryview, initial: int, /) -> int:
    """A CRC that every machine can compute."""
    crc = crc_function("crc64xz")
    assert crc is not None
    return crc(data, initial)


class MemoryJournal:
    """A `PartJournal` that lasts as long as this object; `begun` are the ids of all uploads so far."""

    def __init__(self) -> None:
        self.upload_id: str | None = None
        self.begun: list[str] = []

    def began(self, upload_id: str) -> None:
        """Keep the id."""
        self.begun.append(upload_id)
        self.upload_id = upload_id

    def ended(self) -> None:
        """Forget it."""
        self.upload_id = None


class MemorySender:
    """A `PartSender` that keeps the parts, and at the end the object.

    Args:
        fail: asked before each step ("begin", "stored", "send", "finish", "abort") with the number of the part, else 0; may raise.

    Attributes:
        parts, object: what the store would hold.
        sent: the numbers of all parts that were sent, in order.
        refused: the numbers of those whose sender was told that they failed.
        most_held: how many were under way at a time.
        answers_crc: whether the store says the CRC of a part.
        known: whether the store knows the upload.
    """

    crc_kind: CrcKind = "crc64xz"
    crc = staticmethod(crc64xz)
    is_stores_crc = True

    def __init__(self, fail: Fail = lambda step, number: None) -> None:
        self.fail = fail
        self.parts: dict[int, bytes] = {}
        self.object: bytes | None = None
        self.sent: list[int] = []
        self.refused: list[int] = []
        self.begun = 0
        self.aborted = 0
        self.held = 0
        self.most_held = 0
        self.answers_crc = True
        self.known = True
        self._lock = threading.Lock()

    def begin(self) -> str:
        self.fail("begin", 0)
        self.begun += 1
        self.known = True
        self.parts.clear()
        return f"id-{self.begun}"

    def stored(self, upload_id: str) -> list[Receipt] | None:
        self.fail("stored", 0)
        if not self.known or upload_id != f"id-{self.begun}":
            return None
        return [self._receipt(number, data) for number, data in sorted(self.parts.items())]

    def is_complete(self, size: int, crc: str | None) -> bool:
        return self.object is not None and (len(self.object), f"{crc64xz(self.object, 0):016x}") == (size, crc)

    def send(self, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt | None:
        assert len(body) == part.length
        with self._lock:
            self.sent.append(part.number)
            self.held += 1
            self.most_held = max(self.most_held, self.held)
        try:
            self.fail("send", part.number)
            if not self.known:
                return None
            body.start_sending()
            data = b"".join(body)
            assert digest.crc == f"{crc64xz(data, 0):016x}"
            self.parts[part.number] = data
        except BaseException:
            self.refused.append(part.number)
            raise
        finally:
            with self._lock:
                self.held -= 1
        return self._receipt(part.number, data)

    def _receipt(self, number: int, data: bytes) -> Receipt:
        crc = f"{crc64xz(data, 0):016x}" if self.answers_crc else None
        return Receipt(number=number, etag=f'"{hashlib.md5(data).hexdigest()}"', crc=crc, size=len(data))

    def finish(self, upload_id: str, receipts: list[Receipt], size: int, crc: str | None) -> None:
        self.fail("finish", 0)
        assert [receipt.number for receipt in receipts] == sorted(self.parts)
        self.object = b"".join(self.parts[receipt.number] for receipt in receipts)
        self.known = False
        assert self.is_complete(size, crc)

    def abort(self, upload_id: str) -> None:
        assert self.held == 0, "a part under way would land after the abort"
        self.aborted += 1
        self.fail("abort", 0)


def failing(step: str, number: int, times: int, error: BaseException) -> Fail:
    """Raises `error` at the first `times` tries of one step."""
    left = times

    def fail(at: str, part: int) -> None:
        nonlocal left
        if (at, part) == (step, number) and left:
            left -= 1
            raise error

    return fail
