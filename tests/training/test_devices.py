"""Copies from CUDA: what is asked of the device, and in which order. No device is needed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from ckptmgr.training.devices import Cuda


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for the event of {event.of}")


class FakeEvent:
    def __init__(self, log: list[str], blocking: bool) -> None:
        self.log, self.of, self.blocking = log, "", blocking

    def record(self, stream: FakeStream) -> None:
        self.of = stream.name

    def synchronize(self) -> None:
        assert self.blocking
        self.log.append(f"host waits for the event of {self.of}")


class FakeCuda:
    """torch.cuda as far as it is used, which logs what it is asked."""

    def __init__(self, code: int = 0) -> None:
        self.log: list[str] = []
        self.code = code
        self.current = "none"

    def Stream(self, device: str) -> FakeStream:
        self.log.append(f"new stream on {device}")
        return FakeStream(self.log, f"side:{device}")

    def Event(self, blocking: bool) -> FakeEvent:
        return FakeEvent(self.log, blocking)

    def current_stream(self, device: str) -> FakeStream:
        return FakeStream(self.log, f"main:{device}")

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self.current, before = stream.name, self.current
        yield
        self.current = before

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.log.append(f"register {size} at {address}, {flags}")
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.log.append(f"unregister {address}")
        return 0


class Storage:
    def __init__(self, cuda: FakeCuda, device: str, name: str) -> None:
        self.cuda, self.device, self.name = cuda, device, name

    def copy_(self, source: Any, non_blocking: bool) -> None:
        assert non_blocking
        self.cuda.log.append(f"copy {source.name} on {self.cuda.current}")


@pytest.fixture
def cuda() -> FakeCuda:
    return FakeCuda()


def test_copies_come_after_the_work_before_and_before_the_work_after(cuda: FakeCuda) -> None:
    """On streams of their own, which wait for the training's; the training's waits for them; the host does only when asked."""
    devices: Any = Cuda(cuda)
    arrival = devices.start()
    host = Storage(cuda, "cpu", "host")
    for device, name in (("cuda:0", "a"), ("cuda:1", "b"), ("cuda:0", "c")):
        arrival.copy(host, Storage(cuda, device, name), made_now=False)
    arrival.seal()
    assert cuda.log == [
        "new stream on cuda:0",
        "side:cuda:0 waits for main:cuda:0",
        "copy a on side:cuda:0",
        "new stream on cuda:1",
        "side:cuda:1 waits for main:cuda:1",
        "copy b on side:cuda:1",
        "copy c on side:cuda:0",
        "main:cuda:0 waits for the event of side:cuda:0",
        "main:cuda:1 waits for the event of side:cuda:1",
    ]
    cuda.log.clear()
    arrival.wait()
    assert cuda.log == ["host waits for the event of side:cuda:0", "host waits for the event of side:cuda:1"]
    arrival.wait()
    arrival.seal()
    assert len(cuda.log) == 2


def test_what_was_made_a_moment_ago_is_waited_for(cuda: FakeCuda) -> None:
    """Its kernel was started after the first copy."""
    devices: Any = Cuda(cuda)
    arrival = devices.start()
    for name, made_now in (("a", False), ("b", True), ("c", False)):
        arrival.copy(Storage(cuda, "cpu", "host"), Storage(cuda, "cuda:0", name), made_now=made_now)
    wait = "side:cuda:0 waits for main:cuda:0"
    copies = [f"copy {name} on side:cuda:0" for name in "abc"]
    assert cuda.log[1:] == [wait, copies[0], wait, copies[1], copies[2]]


def test_the_next_snapshot_uses_the_same_streams(cuda: FakeCuda) -> None:
    """And waits for the work that came in between."""
    devices: Any = Cuda(cuda)
    for _ in range(2):
        arrival = devices.start()
        arrival.copy(Storage(cuda, "cpu", "host"), Storage(cuda, "cuda:0", "a"), made_now=False)
        arrival.seal()
        arrival.wait()
    assert cuda.log.count("new stream on cuda:0") == 1
    assert cuda.log.count("side:cuda:0 waits for main:cuda:0") == 2


def test_sources_stay_until_their_copies_have_arrived(cuda: FakeCuda) -> None:
    """A state dict made on the fly is not freed, and its memory not used again, under the copy."""
    import weakref

    devices: Any = Cuda(cuda)
    arrival = devices.start()
    source = Storage(cuda, "cuda:0", "a")
    known = weakref.ref(source)
    arrival.copy(Storage(cuda, "cpu", "host"), source, made_now=False)
    arrival.seal()
    del source
    assert known() is not None
    arrival.wait()
    assert known() is None


def test_memory_that_cannot_be_registered_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """And asked for once: the limit does not go away."""
    cuda = FakeCuda(code=2)
    devices = Cuda(cuda)
    assert [devices.pin(4096, 100), devices.pin(8192, 100)] == [False, False]
    assert cuda.log == ["register 100 at 4096, 1"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "CUDA error 2" in caplog.text
    assert "ulimit -l" in caplog.text


def test_a_runtime_that_raises_is_the_same(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    """As torch does where there is no driver; at the end of a program nobody minds."""

    def gone() -> Any:
        raise RuntimeError("no CUDA driver")

    cuda.cudart = gone  # type: ignore[method-assign]
    devices = Cuda(cuda)
    assert not devices.pin(4096, 100)
    assert "no CUDA driver" in caplog.text
    devices.unpin(4096)


def test_registered_memory_is_unregistered(cuda: FakeCuda) -> None:
    """For all contexts of the process (flag 1)."""
    devices = Cuda(cuda)
    assert devices.pin(4096, 100)
    devices.unpin(4096)
    assert cuda.log == ["register 100 at 4096, 1", "unregister 4096"]
    assert (devices.has("cuda"), devices.has("cpu"), devices.has("mps")) == (True, False, False)
