"""Downloads that go from the socket to the file through a pipe, and those that cannot."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptmgr.backends.http import Answer, HttpError, HttpPool, StalledError
from ckptmgr.backends.parts import PartPlan, download_parts
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import DiskFullError, TransientBackendError
from ckptmgr.testing.scripted import Peer, Server

pytestmark = pytest.mark.skipif(not hasattr(os, "splice"), reason="only Linux splices")

T = TypeVar("T")
MIB = 1 << 20
DATA = os.urandom(5 * MIB + 4321)
PLAN = PartPlan(size=len(DATA), part_bytes=2 * MIB)
RETRIER = Retrier(RetryPolicy(attempts=3), sleep=lambda seconds: None)


class Range:
    """The body of an answer, with errors as a backend's."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer

    def readinto(self, view: memoryview, /) -> int:
        return self._translated(lambda: self.answer.readinto(view))

    def splice(self, pipe: int, most: int, /) -> int | None:
        return self._translated(lambda: self.answer.splice(pipe, most))

    def close(self) -> None:
        self.answer.close()

    def _translated(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except HttpError as error:
            raise TransientBackendError(str(error)) from error


class Store:
    """Serves ranges of DATA.

    Attributes:
        asked: the ranges, as (offset, length).
        breaks: after so many bytes of an answer the connection is closed, once each; in the order of asking.
    """

    def __init__(self, server: Server) -> None:
        self.asked: list[tuple[int, int]] = []
        self.breaks: list[int | None] = []
        self.is_chunked = False
        self.pool = HttpPool("127.0.0.1", server.port, connect_s=20, stall_s=20)
        server.play = self._play

    def open_range(self, offset: int, length: int) -> Range:
        self.asked.append((offset, length))
        head = f"GET /f HTTP/1.1\r\nhost: x\r\nrange: bytes={offset}-{offset + length - 1}\r\n\r\n"
        return Range(self.pool.request(head.encode()))

    def _play(self, peer: Peer) -> None:
        while True:
            head, _ = peer.request()
            found = re.search(rb"bytes=(\d+)-(\d+)", head)
            if found is None:
                return
            body = DATA[int(found[1]) : int(found[2]) + 1]
            cut = self.breaks.pop(0) if self.breaks else None
            if self.is_chunked:
                half = len(body) // 2
                chunks = [b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (body[:half], body[half:])]
                peer.send(b"HTTP/1.1 206 OK\r\ntransfer-encoding: chunked\r\n\r\n", *chunks, b"0\r\n\r\n")
            else:
                # Some of the body comes with the head.
                peer.send(b"HTTP/1.1 206 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body[:7])
                peer.send(body[7:cut])
            if cut is not None:
                return


@pytest.fixture
def store() -> Iterator[Store]:
    with Server() as server:
        made = Store(server)
        yield made
        made.pool.close()


class Splices:
    """What `os.splice` moved: bytes into pipes, and bytes into files. `to_file` and `to_pipe` are errors to raise instead."""

    def __init__(self) -> None:
        self.piped = self.written = 0
        self.to_file: int | None = None
        self.to_pipe: int | None = None
        self._splice = os.splice

    def __call__(self, source: int, target: int, count: int, **options: Any) -> int:
        is_to_file = "offset_dst" in options
        number = self.to_file if is_to_file else self.to_pipe
        if number is not None:
            raise OSError(number, os.strerror(number))
        moved = self._splice(source, target, count, **options)
        if is_to_file:
            self.written += moved
        else:
            self.piped += moved
        return moved


@pytest.fixture
def splices(monkeypatch: pytest.MonkeyPatch) -> Splices:
    made = Splices()
    monkeypatch.setattr(os, "splice", made)
    return made


def download(store: Store, path: Path, **options: Any) -> bytes:
    """What a follower saw, which is what is in the file."""
    seen = bytearray()
    with open(path, "w+b") as file:
        download_parts(store.open_range, PLAN, file.fileno(), what="f", retrier=RETRIER, follow=seen.extend, **options)
    assert path.read_bytes() == seen
    return bytes(seen)


@pytest.mark.parametrize("workers", [1, 4])
def test_what_is_long_enough_goes_through_a_pipe(store: Store, splices: Splices, tmp_path: Path, workers: int) -> None:
    """All but what came with the heads, and what there was of those parts in the same segment."""
    told: list[int] = []
    assert download(store, tmp_path / "got", workers=workers, progress=told.append) == DATA
    assert sum(told) == len(DATA)
    assert splices.piped == splices.written > len(DATA) // 2


def test_a_torn_connection_loses_nothing(store: Store, splices: Splices, tmp_path: Path) -> None:
    """What the pipe had taken is in the file, and the next request begins behind it."""
    store.breaks = [MIB + 77, 3 * MIB // 4]
    assert download(store, tmp_path / "got", workers=1) == DATA
    assert store.asked[:2] == [(0, 2 * MIB), (MIB + 77, MIB - 77)]
    assert splices.written


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("where", ["to_pipe", "to_file"])
def test_who_cannot_splice_reads(store: Store, splices: Splices, tmp_path: Path, where: str, number: int) -> None:
    """Also where that is noticed when the pipe is full."""
    setattr(splices, where, number)
    assert download(store, tmp_path / "got") == DATA
    assert splices.written == 0


def test_a_system_without_it_reads(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As all but Linux."""
    monkeypatch.delattr(os, "splice")
    assert download(store, tmp_path / "got") == DATA


def test_chunks_are_read(store: Store, splices: Splices, tmp_path: Path) -> None:
    """Their lengths are between them."""
    store.is_chunked = True
    assert download(store, tmp_path / "got") == DATA
    assert splices.piped == 0


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_a_full_disk_is_said_and_leaves_no_pipe(store: Store, splices: Splices, tmp_path: Path) -> None:
    """The error is the one that writing has."""
    before = len(os.listdir("/proc/self/fd"))
    splices.to_file = errno.ENOSPC
    with pytest.raises(DiskFullError):
        download(store, tmp_path / "got", workers=1)
    store.pool.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_silence_is_cut() -> None:
    """The limit holds for a pipe as for a buffer."""
    with Server() as server:

        def play(peer: Peer) -> None:
            peer.request()
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
            peer.gone.wait(60)

        server.play = play
        pool = HttpPool("127.0.0.1", server.port, connect_s=20, stall_s=0.1)
        answer = pool.request(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        end_out, end_in = os.pipe()
        try:
            with pytest.raises(StalledError):
                answer.splice(end_in, 9)
        finally:
            os.close(end_out)
            os.close(end_in)
