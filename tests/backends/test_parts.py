"""How large files are cut, sent and fetched."""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends import parts
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.pace import Pace
from ckptmgr.backends.parts import MAX_PARTS, PART_BYTES, Incoming, PartPlan, download_parts, plan_parts
from ckptmgr.backends.partupload import upload_parts
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    DiskFullError,
    SizeMismatchError,
    TransientBackendError,
)
from ckptmgr.testing.memory_parts import MemorySender, failing

RETRIER = Retrier(RetryPolicy(attempts=3), sleep=lambda seconds: None)
GIB, TIB = 1 << 30, 1 << 40


@pytest.mark.parametrize(
    "size", [0, 1, PART_BYTES, PART_BYTES + 1, 5 * GIB + 1, 280 * GIB, 300 * GIB, TIB, 48 * TIB, 10_001 * PART_BYTES]
)
def test_a_plan_covers_the_file_within_the_limits(size: int) -> None:
    """At most 10,000 parts, all equal but the last, none larger than 5 GiB, together exactly the file."""
    plan = plan_parts(size)
    assert plan.count <= MAX_PARTS
    assert plan.part_bytes >= PART_BYTES
    assert plan.part_bytes <= 5 * GIB
    parts = list(plan)
    assert len(parts) == plan.count
    assert [part.number for part in parts] == list(range(1, len(parts) + 1))
    assert sum(part.length for part in parts) == size
    offset = 0
    for part in parts:
        assert part.offset == offset
        offset += part.length
    assert all(part.length == plan.part_bytes for part in parts[:-1])
    assert all(0 < part.length <= plan.part_bytes for part in parts[-1:])


def test_parts_grow_only_when_they_must() -> None:
    """Up to 280 GiB parts have 32 MiB, beyond that they grow in steps of 8 MiB."""
    assert plan_parts(280 * GIB).part_bytes == PART_BYTES
    grown = plan_parts(300 * GIB).part_bytes
    assert grown == 40 << 20
    assert plan_parts(TIB).part_bytes % (8 << 20) == 0


def _upload(
    path: Path, sender: MemorySender, workers: int = 4, progress: Callable[[int], object] | None = None
) -> None:
    with SourceFile(path) as source:
        plan = PartPlan(size=source.size, part_bytes=1000)
        upload_parts(source, plan, sender, what="f", retrier=RETRIER, workers=workers, progress=progress)


@pytest.mark.parametrize("workers", [1, 4, 100])
def test_upload(tmp_path: Path, workers: int) -> None:
    """Parts go up by several threads and come together in their order, at most `workers` at a time."""
    data = os.urandom(20_500)
    (tmp_path / "f").write_bytes(data)
    sender = MemorySender()
    _upload(tmp_path / "f", sender, workers)
    assert sender.object == data
    assert sender.aborted == 0
    assert sender.most_held <= workers


def test_one_part_is_sent_again_alone(tmp_path: Path) -> None:
    """A part that fails twice is sent three times; no other is sent again."""
    (tmp_path / "f").write_bytes(os.urandom(5000))
    sent: list[int] = []
    fail = failing("send", 3, 2, BackendTimeoutError("lost"))

    def watch(step: str, number: int) -> None:
        if step == "send":
            sent.append(number)
        fail(step, number)

    sender = MemorySender(watch)
    _upload(tmp_path / "f", sender)
    assert sender.object == (tmp_path / "f").read_bytes()
    assert sorted(sent) == [1, 2, 3, 3, 3, 4, 5]


@pytest.mark.parametrize(("step", "number"), [("send", 1), ("send", 5), ("finish", 0)])
def test_a_failed_upload_is_aborted_once(tmp_path: Path, step: str, number: int) -> None:
    """Whatever fails for good, the parts are dropped, after those under way have ended, and the first error is raised."""
    (tmp_path / "f").write_bytes(os.urandom(5000))
    sender = MemorySender(failing(step, number, 99, AccessDeniedError("no")))
    with pytest.raises(AccessDeniedError):
        _upload(tmp_path / "f", sender)
    assert sender.aborted == 1
    assert sender.object is None


def test_an_interrupt_aborts_too(tmp_path: Path) -> None:
    """Ctrl-C in the middle of an upload leaves no parts."""
    (tmp_path / "f").write_bytes(os.urandom(5000))
    sender = MemorySender()

    def interrupt(moved: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _upload(tmp_path / "f", sender, progress=interrupt)
    assert sender.aborted == 1


def test_a_failing_abort_does_not_hide_the_cause(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When even the abort fails, the first error is raised and the log says that parts stay behind."""
    (tmp_path / "f").write_bytes(os.urandom(5000))

    def fail(step: str, number: int) -> None:
        if step == "finish":
            raise AccessDeniedError("the cause")
        if step == "abort":
            raise BackendTimeoutError("also this")

    with pytest.raises(AccessDeniedError, match="the cause"):
        _upload(tmp_path / "f", MemorySender(fail))
    assert "stay in the store" in caplog.text


def test_begin_is_tried_again(tmp_path: Path) -> None:
    """An upload that could not begin at first begins later; if never, there is nothing to abort."""
    (tmp_path / "f").write_bytes(os.urandom(5000))
    sender = MemorySender(failing("begin", 0, 2, TransientBackendError("no")))
    _upload(tmp_path / "f", sender)
    assert sender.object is not None
    sender = MemorySender(failing("begin", 0, 99, TransientBackendError("no")))
    with pytest.raises(TransientBackendError):
        _upload(tmp_path / "f", sender)
    assert sender.aborted == 0


# --- down -----------------------------------------------------------------------------------------------------------------


class Served:
    """Serves `data` in blocks of 300 bytes; `breaks` are offsets at which the connection breaks, once each. `asked` are the requests."""

    def __init__(self, data: bytes, breaks: Iterable[int] = (), honest: bool = True) -> None:
        self.data = data
        self.breaks = list(breaks)
        self.honest = honest
        self.asked: list[tuple[int, int]] = []
        self.open = 0

    def __call__(self, offset: int, length: int) -> Incoming:
        self.asked.append((offset, length))
        self.open += 1
        end = offset + length if self.honest else len(self.data)
        return _Served(self, offset if self.honest else 0, end)


class _Served:
    def __init__(self, served: Served, at: int, end: int) -> None:
        self.served, self.at, self.end = served, at, end

    def readinto(self, view: memoryview, /) -> int:
        if self.at in self.served.breaks:
            self.served.breaks.remove(self.at)
            raise BackendTimeoutError("broke")
        block = self.served.data[self.at : min(self.end, self.at + 300, self.at + len(view))]
        view[: len(block)] = block
        self.at += len(block)
        return len(block)

    def close(self) -> None:
        self.served.open -= 1


def _download(served: Callable[[int, int], Incoming], size: int, path: Path, **options: Any) -> None:
    with open(path, "w+b") as file:
        plan = PartPlan(size=size, part_bytes=1000)
        download_parts(served, plan, file.fileno(), what="f", **{"retrier": RETRIER, "workers": 1, **options})


def test_a_download_goes_on_where_it_broke(tmp_path: Path) -> None:
    """Row 27: after a break only the missing bytes of the part are asked for."""
    data = os.urandom(2500)
    served = Served(data, breaks=[1300, 1600])
    _download(served, len(data), tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    assert served.asked == [(0, 1000), (1000, 1000), (1300, 700), (1600, 400), (2000, 500)]
    assert served.open == 0


def test_who_follows_sees_all_bytes_in_order(tmp_path: Path) -> None:
    """Once each, whatever broke on the way, and in whichever order the parts came; also of one part, and of none."""
    data = os.urandom(10_500)
    for served, size in (
        (Served(data, breaks=[300, 2600, 2900, 10_300]), len(data)),
        (Served(data[:700]), 700),
        (Served(b""), 0),
    ):
        seen = bytearray()
        _download(served, size, tmp_path / "got", workers=4, follow=seen.extend)
        assert (tmp_path / "got").read_bytes() == seen == data[:size]


def test_a_part_that_gets_further_is_not_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that breaks more often than there are tries, but not without having moved something; one that moves nothing ends it."""
    monkeypatch.setattr(parts, "_PROGRESS_BYTES", 300)
    data = os.urandom(6000)
    options: dict[str, Any] = {"retrier": Retrier(RetryPolicy(attempts=2), sleep=lambda seconds: None)}
    served = Served(data, breaks=range(300, 6000, 300))

    def at_once(offset: int, length: int) -> Incoming:
        return served(offset, length)

    with open(tmp_path / "got", "wb") as file:
        plan = PartPlan(size=len(data), part_bytes=6000)
        download_parts(at_once, plan, file.fileno(), what="f", workers=1, **options)
        assert (tmp_path / "got").read_bytes() == data
        served = Served(data, breaks=[3000] * 4)
        with pytest.raises(BackendTimeoutError):
            download_parts(at_once, plan, file.fileno(), what="f", workers=1, **options)
    assert served.asked == [(0, 6000), (3000, 3000), (3000, 3000), (3000, 3000)]


def test_a_store_that_ignores_the_range_is_noticed(tmp_path: Path) -> None:
    """It sends the whole from its beginning: an error, never the wrong bytes in the right place."""
    served = Served(os.urandom(2500), honest=False)
    with pytest.raises(TransientBackendError, match="more bytes"):
        _download(served, 2500, tmp_path / "got")
    assert set(served.asked) == {(0, 1000)}
    served = Served(os.urandom(900), breaks=[300], honest=False)
    _download(served, 900, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == served.data
    assert served.asked == [(0, 900), (300, 600), (0, 900)]


def test_an_answer_that_ends_too_early_is_asked_for_the_rest(tmp_path: Path) -> None:
    """A store that sends less than it was asked for: what came is kept, and the rest asked for, until nothing comes any more."""
    data = os.urandom(1000)
    served = Served(data)

    def short(offset: int, length: int) -> Incoming:
        return served(offset, min(length, 600))

    _download(short, 1000, tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == data
    assert served.asked == [(0, 600), (600, 400)]
    with pytest.raises(TransientBackendError, match="fewer bytes"):
        _download(Served(data[:700]), 1000, tmp_path / "got")


@pytest.mark.parametrize("size", [900, 1100])
def test_a_whole_object_of_another_size(tmp_path: Path, size: int) -> None:
    """An object that was to be of 1000 bytes, and asked for as a whole, is wrong at the first look; one that is cut is tried again from its beginning."""
    served = Served(os.urandom(size), honest=False)
    with pytest.raises(SizeMismatchError):
        _download(served, 1000, tmp_path / "got", is_whole=True)
    assert len(served.asked) == 1
    served = Served(os.urandom(1000), breaks=[600], honest=False)
    seen = bytearray()
    _download(served, 1000, tmp_path / "got", is_whole=True, follow=seen.extend)
    assert (tmp_path / "got").read_bytes() == seen == served.data


def test_parts_under_way_are_those_of_the_pace(tmp_path: Path) -> None:
    """Two slots for a download with eight workers, also beside another one: never more requests, and all bytes are there."""
    data = os.urandom(8000)
    pace, most, lock, meet = Pace(2), [0], threading.Lock(), threading.Barrier(2)

    def count(offset: int, length: int) -> Incoming:
        # The requests come in pairs that wait for each other: 16 in all.
        meet.wait(60)
        with lock:
            most[0] = max(most[0], pace.used)
        meet.wait(60)
        return Served(data)(offset, length)

    retrier = Retrier(RetryPolicy(), pace=pace)

    def down(name: str) -> None:
        _download(count, len(data), tmp_path / name, workers=8, retrier=retrier)

    threads = [threading.Thread(target=down, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [(tmp_path / name).read_bytes() for name in "ab"] == [data, data]
    assert most == [2]


def test_a_download_is_capped(tmp_path: Path) -> None:
    """What arrives is accounted for: 20 kB at 1 kB/s take 20 s, and blocks are small."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    data = os.urandom(20_000)
    retrier = Retrier(RetryPolicy(), pace=Pace(4, 1000.0, lambda: now[0], sleep))
    _download(Served(data), len(data), tmp_path / "got", retrier=retrier)
    assert now[0] == pytest.approx(20.0, abs=0.5)


def test_whoever_is_told_may_end_a_download(tmp_path: Path) -> None:
    """Several parts, of which one stands still: the others' bytes are told, and what that raises ends it at once, without a further try."""
    data = os.urandom(4000)
    standing, released = threading.Event(), threading.Event()

    class Standing:
        def readinto(self, view: memoryview, /) -> int:
            standing.set()
            assert released.wait(60)
            raise BackendTimeoutError("stood still")

        def close(self) -> None:
            pass

    tries: list[int] = []

    def serve(offset: int, length: int) -> Incoming:
        if offset != 1000:
            return Served(data)(offset, length)
        tries.append(offset)
        return Standing()

    told: list[int] = []

    def tell(count: int) -> None:
        told.append(count)
        if sum(told) == 3000 and standing.is_set():
            released.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _download(serve, len(data), tmp_path / "got", workers=3, progress=tell)
    assert tries == [1000]


def test_a_full_disk_ends_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No room for the bytes is the disk's error, and is not tried again."""
    served = Served(b"x" * 10)
    with open("/dev/full", "wb") as full:
        real = os.write
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data))
        plan = PartPlan(size=10, part_bytes=1000)
        with pytest.raises(DiskFullError):
            download_parts(served, plan, full.fileno(), what="f", retrier=RETRIER, workers=1)
    assert served.asked == [(0, 10)]


def test_a_disk_without_room_is_noticed_before_the_first_byte(disk_of: Callable[..., Path]) -> None:
    """4 MiB for a file of 8: nothing is asked for."""
    served = Served(b"")
    with pytest.raises(DiskFullError) as caught:
        _download(served, 8 << 20, disk_of(4096) / "got")
    assert served.asked == []
    assert caught.value.needed_bytes == 8 << 20  # type: ignore[attr-defined]


def test_a_file_system_that_reserves_nothing_is_used_all_the_same(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither a system without the call nor a file system that does not know it stands in the way."""

    def refuse(*arguments: int) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    data = os.urandom(2 << 20)
    for call in (None, refuse):
        monkeypatch.setattr(parts, "_system_call", lambda name, *types, call=call: call)
        with open(tmp_path / "got", "wb") as file:
            plan = PartPlan(size=len(data), part_bytes=1 << 20)
            served = Served(data)
            download_parts(served, plan, file.fileno(), what="f", retrier=RETRIER)
        assert (tmp_path / "got").read_bytes() == data
