"""Large files in parts: how a file is cut, and the loops that move the parts up and down.

The plan is pure. The loops know nothing of S3 or OSS: they call a `PartSender` or a fetch function, retry each part by itself,
and keep a bounded number of parts in memory.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html (10,000 parts; 5 MiB to 5 GiB each but the last)
Source: https://www.alibabacloud.com/help/en/oss/user-guide/multipart-upload (10,000 parts; 100 KB to 5 GB each but the last)
Source: https://developers.cloudflare.com/r2/api/s3/api (R2: all parts but the last have the same size)
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.backends.retry import Retrier
from ckptmgr.core.checksums import Digests
from ckptmgr.core.errors import CkptmgrError

PART_BYTES = 32 << 20
MAX_PARTS = 10_000
MAX_PART_BYTES = 5 << 30
# Room below the limit, so that a plan never sits on it; and sizes that stay multiples of a file system's blocks.
_PLANNED_PARTS = 9_000
_ROUND_BYTES = 8 << 20

log = logging.getLogger("ckptmgr.backends")


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
    """What the store answered for one part."""

    number: int
    etag: str
    crc: str | None = None


class PartSender(Protocol):
    """The four calls of a multipart upload to one key. `send` is called from several threads."""

    def begin(self) -> str:
        """Start an upload; its id."""

    def send(self, upload_id: str, part: Part, data: bytes) -> Receipt:
        """Store one part; sent again it replaces the earlier one."""

    def finish(self, upload_id: str, receipts: list[Receipt], digests: Digests) -> None:
        """Make the object visible, all parts at once, and check that the store holds `digests`."""

    def abort(self, upload_id: str) -> None:
        """Throw the parts away."""


def upload_parts(
    source: SourceFile,
    plan: PartPlan,
    sender: PartSender,
    *,
    what: str,
    retrier: Retrier,
    workers: int = 4,
    progress: Callable[[int], object] | None = None,
) -> Digests:
    """Upload `source` in the parts of `plan`; the object becomes visible at the end or not at all.

    The file is read and digested once, in order, by the calling thread; at most `workers` + 1 parts are in memory. On any
    failure the upload is aborted, so that no invisible parts stay behind and are paid for.

    Raises:
        SourceChangedError: the file is not, or no longer, what was described; nothing became visible.
    """
    upload_id = retrier(f"begin {what}", sender.begin)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="ckptmgr-part")
    try:
        receipts: list[Receipt] = []
        pending: deque[tuple[Part, Future[Receipt]]] = deque()

        def settle() -> None:
            part, future = pending.popleft()
            receipts.append(future.result())
            if progress is not None:
                progress(part.length)

        for part in plan:
            data = source.digest_at(part.offset, part.length)
            if len(pending) >= workers:
                settle()
            pending.append((part, pool.submit(_send, sender, upload_id, part, data, what, retrier)))
            del data
        while pending:
            settle()
        digests = source.finish()
        sender.finish(upload_id, receipts, digests)
    except BaseException:
        # Parts under way would land after the abort and stay: wait for them first.
        pool.shutdown(wait=True, cancel_futures=True)
        _abort(sender, upload_id, what)
        raise
    pool.shutdown()
    return digests


def _send(sender: PartSender, upload_id: str, part: Part, data: bytes, what: str, retrier: Retrier) -> Receipt:
    return retrier(f"part {part.number} of {what}", lambda: sender.send(upload_id, part, data))


def _abort(sender: PartSender, upload_id: str, what: str) -> None:
    try:
        sender.abort(upload_id)
    except CkptmgrError as error:
        log.warning("the abandoned parts of %s (upload %s) stay in the store: %s", what, upload_id, error)


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
