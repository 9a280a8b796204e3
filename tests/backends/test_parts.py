"""How large files are cut, sent and fetched."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.parts import MAX_PARTS, PART_BYTES, PartPlan, download_parts, plan_parts
from ckptmgr.backends.partupload import upload_parts
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    DiskFullError,
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


def test_a_download_goes_on_where_it_broke(tmp_path: Path) -> None:
    """After a break only the missing bytes of the part are asked for."""
    data = os.urandom(2500)
    asked: list[tuple[int, int]] = []
    broken = [1, 1]

    def fetch(offset: int, length: int, sink: Callable[[bytes], None]) -> None:
        asked.append((offset, length))
        if offset >= 1000 and broken:
            broken.pop()
            sink(data[offset : offset + 300])
            raise BackendTimeoutError("broke")
        sink(data[offset : offset + length])

    with open(tmp_path / "got", "wb") as file:
        plan = PartPlan(size=len(data), part_bytes=1000)
        download_parts(fetch, plan, file.fileno(), what="f", retrier=RETRIER, workers=1)
    assert (tmp_path / "got").read_bytes() == data
    assert asked == [(0, 1000), (1000, 1000), (1300, 700), (1600, 400), (2000, 500)]


def test_a_full_disk_ends_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No room for the bytes is the disk's error, and is not tried again."""
    calls: list[int] = []

    def fetch(offset: int, length: int, sink: Callable[[bytes], None]) -> None:
        calls.append(offset)
        sink(b"x" * length)

    with open("/dev/full", "wb") as full:
        real = os.write
        monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: real(fd, data))
        with pytest.raises(DiskFullError):
            download_parts(
                fetch, PartPlan(size=10, part_bytes=1000), full.fileno(), what="f", retrier=RETRIER, workers=1
            )
    assert calls == [0]
