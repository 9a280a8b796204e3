"""Large files in parts: how a file is cut, and how its parts come down.

The plan is pure. The loop down is here and opens ranges; the loop up is `partupload.py`. Both retry each part by itself, and hold no part in memory.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html (10,000 parts; 5 MiB to 5 GiB each but the last)
Source: https://www.alibabacloud.com/help/en/oss/user-guide/multipart-upload (10,000 parts; 100 KB to 5 GB each but the last)
Source: https://developers.cloudflare.com/r2/api/s3/api (R2: all parts but the last have the same size)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from ckptmgr.backends.oserrors import os_errors
from ckptmgr.backends.pace import Watch
from ckptmgr.backends.retry import Retrier
from ckptmgr.backends.spliced import Pipe, pipe_for
from ckptmgr.core.errors import CkptmgrError, SizeMismatchError, TransientBackendError

PART_BYTES = 32 << 20
MAX_PARTS = 10_000
MAX_PART_BYTES = 5 << 30
# Room below the limit, so that a plan never sits on it; and sizes that stay multiples of a file system's blocks.
_PLANNED_PARTS = 9_000
_ROUND_BYTES = 8 << 20
# What is received, digested and written at a time.
# Small enough for all that are under way to stay in the processor's cache between being received and being written.
_BUFFER_BYTES = 64 << 10
# A part that got so much further since its tries began is worth further ones.
_PROGRESS_BYTES = 64 << 10
# As for uploads: how often progress is told, and an interruption heard, in seconds.
_TICK_S = 0.2
_SYNC_FILE_RANGE_WRITE = 2
# Below, a full disk is noticed soon enough.
_RESERVED_BYTES = 1 << 20

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


class Incoming(Protocol):
    """Bytes on their way from the store; for one thread. Close it, also when it was read to its end."""

    def readinto(self, view: memoryview, /) -> int:
        """Put what arrives at the beginning of `view`: as many bytes as there are now, without waiting for more; how many, 0 at the end."""

    def close(self) -> None:
        """Nothing more is wanted."""


#: Asks for so many bytes from an offset on.
OpenRange = Callable[[int, int], Incoming]


class DownloadEndedError(CkptmgrError):
    """Nobody wants the rest of this download any more; raised into the parts that are under way."""


def download_parts(
    open_range: OpenRange,
    plan: PartPlan,
    fd: int,
    *,
    what: str,
    retrier: Retrier,
    workers: int = 4,
    progress: Callable[[int], object] | None = None,
    follow: Callable[[memoryview], object] | None = None,
    is_whole: bool = False,
    lasting: bool = True,
) -> None:
    """Write all parts of `plan` to `fd`, several at a time. A part that breaks off goes on where it stopped.

    Every byte of the plan is written when this returns; after a failure an unknown part of them is. Tries end as the retrier's policy says, but not
    while a part gets further. A single part is received by the calling thread.

    Args:
        progress: called by the calling thread with the number of bytes written since the last call, several times a second where there is
            more than one part. What it raises ends the download.
        follow: called by the calling thread with all bytes of the file in order, read back from `fd` as soon as they and all before them have
            arrived, while further parts do; the block changes after the call.
        lasting: the file will be synced, so the disk begins with each part.
        is_whole: the plan is one part, and what is opened is the whole object, whatever it is by then: after a break it is received from its beginning.

    Raises:
        DiskFullError: there is no room for the file.
        SizeMismatchError: the whole object has another size.
    """
    _Download(open_range, plan, fd, what, retrier, progress, follow, is_whole, lasting).run(workers)


class _PartDown:
    """How far one part is."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.done = 0
        self.has_ended = False


class _Download:
    def __init__(
        self,
        open_range: OpenRange,
        plan: PartPlan,
        fd: int,
        what: str,
        retrier: Retrier,
        progress: Callable[[int], object] | None,
        follow: Callable[[memoryview], object] | None,
        is_whole: bool,
        lasting: bool,
    ) -> None:
        self._open_range = open_range
        self._plan = plan
        self._fd = fd
        self._what = what
        self._retry = retrier
        self._progress = progress
        self._follow = follow
        self._followed = 0
        self._is_whole = is_whole
        self._lasting = lasting
        self._ended = threading.Event()
        # One write at a time: file systems take them one by one anyway, and those that wait in the kernel spin (twice the processor time, measured).
        self._writing = threading.Lock()
        self._parts = [_PartDown(part) for part in plan]
        self._buffers: deque[memoryview] = deque()
        self._pending: dict[Future[None], _PartDown] = {}
        self._settled = self._told = 0

    def run(self, workers: int) -> None:
        if self._plan.size >= _RESERVED_BYTES:
            with os_errors("write", f"the download of {self._what}", needed_bytes=self._plan.size):
                reserve(self._fd, self._plan.size)
        if len(self._parts) > 1:
            self._run_many(min(workers, self._retry.pace.concurrency))
        elif self._parts:
            self._fetch(self._parts[0], self._tell)
            self._parts[0].has_ended = True
            self._catch_up()

    def _run_many(self, workers: int) -> None:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="ckptmgr-part")
        try:
            for down in self._parts:
                while len(self._pending) >= workers:
                    self._settle()
                self._pending[pool.submit(self._fetch, down)] = down
                self._catch_up()
            while self._pending:
                self._settle()
                self._catch_up()
        except BaseException:
            # The others write to a descriptor that is about to be closed: they must have ended.
            self._ended.set()
            pool.shutdown(wait=True, cancel_futures=True)
            raise
        pool.shutdown()

    def _settle(self) -> None:
        """Wait for a part to end, or for some time."""
        done, _ = wait(self._pending, timeout=_TICK_S, return_when=FIRST_COMPLETED)
        for future in done:
            down = self._pending.pop(future)
            future.result()
            self._settled += down.done
            down.has_ended = True
        self._tell(sum(down.done for down in self._pending.values()))

    def _catch_up(self) -> None:
        """Have the follower see what has arrived without a gap."""
        if self._follow is None:
            return
        while self._followed < len(self._parts) and self._parts[self._followed].has_ended:
            part = self._parts[self._followed].part
            buffer = self._take_buffer()
            with os_errors("read", f"the download of {self._what}"):
                for offset in range(part.offset, part.offset + part.length, len(buffer)):
                    block = buffer[: min(len(buffer), part.offset + part.length - offset)]
                    if os.preadv(self._fd, [block], offset) != len(block):
                        raise OSError(errno.EIO, os.strerror(errno.EIO))
                    self._follow(block)
            self._buffers.append(buffer)
            self._followed += 1

    def _tell(self, under_way: int) -> None:
        if self._progress is not None:
            # A part that began anew is not told twice.
            total = max(self._told, self._settled + under_way)
            news, self._told = total - self._told, total
            self._progress(news)

    def _fetch(self, down: _PartDown, told: Callable[[int], object] = lambda done: None) -> None:
        buffer = self._take_buffer()
        name = f"part {down.part.number} of {self._what}" if len(self._parts) > 1 else self._what
        while True:
            before = down.done
            try:
                self._retry(name, lambda: self._receive(down, buffer, told), ended=self._ended, slot=True)
            except TransientBackendError as error:
                is_over = self._ended.is_set() or self._retry.stop.is_set()
                if is_over or self._is_whole or down.done < before + _PROGRESS_BYTES:
                    raise
                log.info("%s got to %d of %d bytes and goes on: %s", name, down.done, down.part.length, error)
                continue
            self._buffers.append(buffer)
            if self._lasting:
                start_writeback(self._fd, down.part.offset, down.part.length)
            return

    def _take_buffer(self) -> memoryview:
        try:
            return self._buffers.pop()
        except IndexError:
            return memoryview(bytearray(min(_BUFFER_BYTES, self._plan.part_bytes, max(1, self._plan.size))))

    def _receive(self, down: _PartDown, buffer: memoryview, told: Callable[[int], object]) -> None:
        """Go on with a part; one try."""
        part = down.part
        if self._is_whole:
            down.done = 0
        elif down.done == part.length:
            # It broke between the last byte and its end.
            return
        watch = self._retry.pace.watch(self._retry.stop, self._ended)
        left = part.length - down.done
        with (
            contextlib.closing(self._open_range(part.offset + down.done, left)) as incoming,
            pipe_for(incoming, left) as pipe,
        ):
            while down.done < part.length:
                room = min(self._retry.pace.block_bytes, part.length - down.done)
                filled = None if pipe is None else self._splice(down, room, pipe, watch)
                is_short = filled == 0
                if filled is None:
                    room = min(room, len(buffer))
                    is_short = self._fill(down, buffer[:room], incoming, watch) < room
                told(down.done)
                if is_short:
                    raise self._wrong(part, "fewer")
            if incoming.readinto(buffer[:1]):
                # Whoever ignores the range sends all of it, and what was written is from its beginning.
                down.done = 0
                raise self._wrong(part, "more")

    def _fill(self, down: _PartDown, block: memoryview, incoming: Incoming, watch: Watch) -> int:
        """Receive and write a block, or what there is of it; how many bytes."""
        filled = 0
        try:
            while filled < len(block):
                self._check_wanted()
                count = incoming.readinto(block[filled:])
                if not count:
                    break
                filled += count
                watch.moved(count)
        finally:
            # Also what came before the connection broke.
            self._write(down, block[:filled])
        return filled

    def _splice(self, down: _PartDown, most: int, pipe: Pipe, watch: Watch) -> int | None:
        """Receive and write what there is, past this program's memory; how many bytes, None if what comes next must be read."""
        self._check_wanted()
        count = pipe.fill(most)
        if count:
            with os_errors("write", f"the download of {self._what}"), self._writing:
                pipe.empty(self._fd, down.part.offset + down.done, count)
            down.done += count
            watch.moved(count)
        return count

    def _check_wanted(self) -> None:
        if self._ended.is_set():
            raise DownloadEndedError(f"the download of {self._what} has ended")

    def _wrong(self, part: Part, how: str) -> CkptmgrError:
        """The error for an answer that ended, as it says itself, where it should not have."""
        if self._is_whole:
            text = f"{self._what} has {how} bytes than the {part.length} that it should have"
            return SizeMismatchError(text, expected=part.length, key=self._what, how=how)
        text = f"{self._what} was answered with {how} bytes than the {part.length} asked for from {part.offset} on"
        return TransientBackendError(text)

    def _write(self, down: _PartDown, block: memoryview) -> None:
        with os_errors("write", f"the download of {self._what}"):
            while block:
                with self._writing:
                    count = os.pwrite(self._fd, block, down.part.offset + down.done)
                down.done += count
                block = block[count:]


@cache
def _system_call(name: str, *arguments: type) -> Any:
    """A function of the C library that Python has not; None where there is none."""
    try:
        call = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (OSError, AttributeError):
        return None
    call.argtypes = arguments
    return call


def reserve(fd: int, size: int) -> None:
    """Make room for `size` bytes, so that a full disk is noticed before the first of them arrives; nothing where the file system cannot.

    Raises:
        OSError: there is no room.
    """
    # glibc's posix_fallocate, which Python has, writes to every block where the file system has no such call.
    call = _system_call("fallocate", ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    if call is None:
        return
    while call(fd, 0, 0, size):
        number = ctypes.get_errno()
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise OSError(number, os.strerror(number))
        if number != errno.EINTR:
            return


def start_writeback(fd: int, offset: int, length: int) -> None:
    """Have the kernel begin to write this range to the disk, so that the sync at the end has less to wait for. Promises nothing."""
    call = _system_call("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    if call is not None:
        call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)
