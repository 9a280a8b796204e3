"""Large files in parts: how a file is cut, and how its parts come down.

The plan is pure. The loop down is here and calls a fetch function; the loop up is `partupload.py`. Both retry each part by itself, and hold no part in
memory.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html (10,000 parts; 5 MiB to 5 GiB each but the last)
Source: https://www.alibabacloud.com/help/en/oss/user-guide/multipart-upload (10,000 parts; 100 KB to 5 GB each but the last)
Source: https://developers.cloudflare.com/r2/api/s3/api (R2: all parts but the last have the same size)
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ckptmgr.backends.oserrors import os_errors
from ckptmgr.backends.retry import Retrier

PART_BYTES = 32 << 20
MAX_PARTS = 10_000
MAX_PART_BYTES = 5 << 30
# Room below the limit, so that a plan never sits on it; and sizes that stay multiples of a file system's blocks.
_PLANNED_PARTS = 9_000
_ROUND_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The bytes `[offset, offset + length)` of a file; `number` counts from 1."""

    number: int
    offset: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """How a file of `size` bytes is cut: equal parts of `part_bytes`, the last one shorter. A file of 0 bytes has no part."""

    size: int
    part_bytes: int

    @property
    def count(self) -> int:
        return -(-self.size // self.part_bytes)

    def __iter__(self) -> Iterator[Part]:
        for index in range(self.count):
            offset = index * self.part_bytes
            yield Part(number=index + 1, offset=offset, length=min(self.part_bytes, self.size - offset))


def plan_parts(size: int, part_bytes: int = PART_BYTES) -> PartPlan:
    """A plan of parts of `part_bytes`, or of larger ones where that would be more than 9,000 of them.

    Never parts of more than 5 GiB, as long as 10,000 of those hold the file; no store takes a larger one.
    """
    if part_bytes * _PLANNED_PARTS < size:
        least = -(-size // _PLANNED_PARTS)
        part_bytes = -(-least // _ROUND_BYTES) * _ROUND_BYTES
        if part_bytes > MAX_PART_BYTES:
            part_bytes = max(MAX_PART_BYTES, -(-size // MAX_PARTS))
    return PartPlan(size=size, part_bytes=part_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What the store says of one part that it holds.

    Attributes:
        crc: of the store's kind, 16 hexadecimal digits; None where it says none.
        size: in bytes; None where it does not say.
    """

    number: int
    etag: str
    crc: str | None = None
    size: int | None = None


class PartJournal(Protocol):
    """Where the id of a multipart upload is kept on this machine, so that a later try of the same file goes on with it, also after a kill.

    Used by the thread that called `put_file`, never by two at once.
    """

    @property
    def upload_id(self) -> str | None:
        """The upload that is under way, or was when the last try ended."""

    def began(self, upload_id: str) -> None:
        """Keep the id of a new upload, durably, before its first part is sent."""

    def ended(self) -> None:
        """The upload has become the object, or was given up. Need not be durable: an id that the store does not know any more is found out."""


#: Fetches the bytes of one part from `offset` on, calling the sink with each block as it arrives.
Fetch = Callable[[int, int, Callable[[bytes], None]], None]


def download_parts(
    fetch: Fetch,
    plan: PartPlan,
    fd: int,
    *,
    what: str,
    retrier: Retrier,
    workers: int = 4,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write all parts of `plan` to `fd`, several at a time. A part that breaks off goes on where it stopped.

    Every byte of the plan is written exactly once when this returns; after a failure an unknown part of them is.
    """
    with ThreadPoolExecutor(min(workers, max(1, plan.count)), thread_name_prefix="ckptmgr-part") as pool:
        futures = [pool.submit(_fetch_part, fetch, part, fd, what, retrier) for part in plan]
        try:
            for future in futures:
                length = future.result()
                if progress is not None:
                    progress(length)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _fetch_part(fetch: Fetch, part: Part, fd: int, what: str, retrier: Retrier) -> int:
    done = 0

    def write(block: bytes) -> None:
        nonlocal done
        view = memoryview(block)
        with os_errors("write", f"the download of {what}"):
            while view:
                count = os.pwrite(fd, view, part.offset + done)
                done += count
                view = view[count:]

    retrier(f"part {part.number} of {what}", lambda: fetch(part.offset + done, part.length - done, write))
    return part.length


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close `fd` at the end, whatever happened."""
    try:
        yield fd
    finally:
        os.close(fd)
