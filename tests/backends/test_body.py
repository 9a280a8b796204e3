"""A file as the body of a request: how it is read, and what is noticed on the way."""

from __future__ import annotations

import hashlib
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptmgr.backends.body import SEND_BYTES, BodyCutError, FileBody
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.pace import Pace
from ckptmgr.core.errors import BackendTimeoutError, SourceChangedError, TransientBackendError
from ckptmgr.testing.memory_parts import crc64xz

OFFSET = 12345
DATA = os.urandom(3 * SEND_BYTES + 777)
PART = DATA[OFFSET:]
CAUSE = TransientBackendError("the request failed")


@pytest.fixture
def source(tmp_path: Path) -> Iterator[SourceFile]:
    (tmp_path / "f").write_bytes(DATA)
    with SourceFile(tmp_path / "f") as opened:
        yield opened


def body_of(source: SourceFile, **options: object) -> FileBody:
    return FileBody(source, OFFSET, len(PART), crc=crc64xz, **options)  # type: ignore[arg-type]


def test_it_reads_as_a_file_does(source: SourceFile) -> None:
    """Length, position and every kind of read and seek are those of a file with these bytes: signers may rely on it."""
    body, model = body_of(source), io.BytesIO(PART)
    assert len(body) == len(PART)
    for size in (10, 4096, 0, SEND_BYTES + 1, 1):
        assert body.read(size) == model.read(size)
        assert body.tell() == model.tell()
    for offset, whence in ((5, os.SEEK_SET), (7, os.SEEK_CUR), (-3, os.SEEK_END), (0, os.SEEK_END)):
        assert body.seek(offset, whence) == model.seek(offset, whence)
        assert body.read() == model.read()
    assert body.read(100) == b""
    assert body.sent == 0


def test_it_is_read_into_a_buffer(source: SourceFile) -> None:
    """As much as the buffer takes, at most a block, from where it is; what is read to be signed is not sent."""
    body, got = body_of(source), bytearray()
    assert body.sha256() == hashlib.sha256(PART).hexdigest()
    body.rewind()
    view = memoryview(bytearray(SEND_BYTES + 100))
    assert body.readinto(view[:10]) == 10
    got += view[:10]
    while count := body.readinto(view):
        assert count <= SEND_BYTES
        got += view[:count]
    assert got == PART
    assert body.readinto(view) == 0
    assert body.sent == 0


@pytest.mark.parametrize(("careful", "block_bytes"), [(False, SEND_BYTES), (True, 64 << 10)])
def test_it_is_sent_in_large_blocks(source: SourceFile, careful: bool, block_bytes: int) -> None:
    """Libraries ask for 16 KiB at a time and get a block: 1 MiB, and after a failure 64 KiB, which even a very slow link takes in time."""
    body = body_of(source)
    body.restart(careful=careful)
    body.start_sending()
    blocks = []
    while block := body.read(16384):
        blocks.append(block)
        assert body.sent == sum(map(len, blocks))
    assert b"".join(blocks) == PART
    assert {len(block) for block in blocks[:-1]} == {block_bytes}
    body.rewind()
    assert b"".join(body) == PART


def test_the_crc_is_of_what_was_sent(source: SourceFile) -> None:
    """Not of what was read to sign it, nor of an earlier try; and none of a part of it."""
    body, right = body_of(source), f"{crc64xz(PART, 0):016x}"
    body.restart()
    body.watch()
    body.read()
    body.seek(0)
    assert body.sent_crc is None
    body.start_sending()
    body.read(SEND_BYTES)
    assert body.sent_crc is None
    body.seek(0)
    while body.read(16384):
        pass
    assert body.sent_crc == right
    body.restart()
    body.start_sending()
    body.read()
    assert body.sent_crc is None


def test_each_byte_is_told_once(source: SourceFile) -> None:
    """A further try tells only what goes beyond the first."""
    told: list[int] = []
    body = body_of(source, told=told.append)
    body.read()
    body.rewind()
    assert told == []
    body.start_sending()
    body.read(1)
    body.restart(careful=True)
    body.start_sending()
    while body.read(1):
        pass
    assert sum(told) == len(PART)


def test_reading_into_a_buffer_counts_as_reading(source: SourceFile) -> None:
    """CRC, progress and position are those of what was handed out for sending, by either way."""
    told: list[int] = []
    body, view = body_of(source, told=told.append), memoryview(bytearray(SEND_BYTES))
    body.watch()
    body.readinto(view)
    body.rewind()
    body.start_sending()
    body.read(1)
    while body.readinto(view):
        assert body.sent == body.tell() == sum(told)
    assert body.sent_crc == f"{crc64xz(PART, 0):016x}"
    body.restart(careful=True)
    body.start_sending()
    assert body.readinto(view) == 64 << 10
    assert sum(told) == len(PART)


class _Waits:
    """Seconds that a pace has slept, and its clock."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def clock(self) -> float:
        return self.slept_s

    def sleep(self, seconds: float) -> None:
        self.slept_s += seconds


@pytest.mark.parametrize("how", ["read", "readinto"])
def test_a_limit_holds_for_what_is_sent(source: SourceFile, how: str) -> None:
    """Each block waits for its turn, those of a further try too, in blocks small enough for a steady stream; signing waits for nothing."""
    waits = _Waits()
    pace = Pace(max_bytes_s=1 << 20, clock=waits.clock, sleep=waits.sleep)
    body, view = body_of(source, pace=pace), memoryview(bytearray(SEND_BYTES))
    body.sha256()
    assert waits.slept_s == 0
    for tries in (1, 2):
        body.restart()
        body.start_sending()
        while count := len(body.read(16384)) if how == "read" else body.readinto(view):
            assert count <= pace.block_bytes < SEND_BYTES
        assert abs(waits.slept_s - tries * len(PART) / (1 << 20)) < 0.2


def send_all(body: FileBody, way: str) -> None:
    view = memoryview(bytearray(SEND_BYTES))
    while body.read() if way == "read" else body.readinto(view):
        pass


@pytest.mark.parametrize("way", ["read", "readinto"])
@pytest.mark.parametrize("how", ["cut", "told", "short"])
def test_what_is_not_the_networks_fault_is_found_again(source: SourceFile, how: str, way: str) -> None:
    """An HTTP library reports whatever a body raises as a broken connection; `check` raises what it was."""

    class Stopped(BaseException):
        pass

    def stop(count: int) -> None:
        raise Stopped

    cut = threading.Event()
    body = body_of(source, cut=cut, told=stop if how == "told" else None)
    if how == "cut":
        cut.set()
    elif how == "short":
        os.truncate(source.path, SEND_BYTES)
    body.start_sending()
    kind = {"cut": BodyCutError, "told": Stopped, "short": SourceChangedError}[how]
    with pytest.raises(kind):
        send_all(body, way)
    with pytest.raises(kind) as caught:
        body.check(CAUSE)
    assert caught.value.__cause__ is CAUSE


def test_a_source_that_was_written_to_is_found(source: SourceFile) -> None:
    """The store may have refused the body because it is not what it was."""
    body = body_of(source)
    body.check(CAUSE)
    with open(source.path, "r+b") as file:
        file.write(b"other")
    with pytest.raises(SourceChangedError):
        body.check(CAUSE)


def test_a_body_that_trickles_is_cut_and_may_be_sent_again(source: SourceFile) -> None:
    """Row 22: two minutes for a block of 64 KiB: the request is ended, by an error that may pass, and the next try is not blamed for it."""
    now = [0.0]
    pace = Pace(clock=lambda: now[0])
    body = body_of(source, pace=pace)
    body.restart(careful=True)
    body.start_sending()
    now[0] += 121.0
    with pytest.raises(BackendTimeoutError, match="trickles"):
        body.read(16384)
    with pytest.raises(BackendTimeoutError, match="trickles"):
        body.check(CAUSE)
    body.restart(careful=True)
    body.start_sending()
    assert b"".join(body) == PART
    body.check(CAUSE)
