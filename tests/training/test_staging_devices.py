"""Staging from a device: its copies are not waited for, and never end up in another snapshot."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.core.errors import ConfigError
from ckptmgr.training.staging import Stager
from ckptmgr.training.state import restore, write

DEADLINE_S = 60.0
PAGES = 1 << 16  # bytes of a storage that is worth a buffer


def floats(count: int = PAGES // 4) -> torch.Tensor:
    return torch.randn(count)


class FakeArrival:
    """Copies that come when they are waited for."""

    def __init__(self, devices: FakeDevices) -> None:
        self.devices = devices
        self.on_their_way: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []

    def copy(self, target: torch.UntypedStorage, source: torch.UntypedStorage, *, made_now: bool) -> None:
        self.devices.log.append("fresh copy" if made_now else "copy")
        self.on_their_way.append((target, source))

    def seal(self) -> None:
        self.devices.log.append("seal")

    def wait(self) -> None:
        self.devices.log.append("wait")
        for target, source in self.on_their_way:
            target.copy_(source, non_blocking=False)
        self.on_their_way.clear()


class FakeDevices:
    """All tensors are on a device."""

    def __init__(self, *, can_pin: bool = True) -> None:
        self.can_pin = can_pin
        self.log: list[str] = []
        self.pinned: dict[int, int] = {}

    def has(self, device_type: str) -> bool:
        return True

    def start(self) -> FakeArrival:
        self.log.append("start")
        return FakeArrival(self)

    def pin(self, address: int, size_bytes: int) -> bool:
        if self.can_pin:
            self.pinned[address] = size_bytes
        return self.can_pin

    def unpin(self, address: int) -> None:
        del self.pinned[address]

    def here(self) -> Any:
        return torch.no_grad()


def test_a_snapshot_is_ready_when_its_copies_have_arrived(tmp_path: Path) -> None:
    """Capturing starts them and waits for none; writing waits for all."""
    devices = FakeDevices()
    stager = Stager(devices)
    tree = {"large": floats() + 1, "small": torch.tensor([1.0, 2.0]), "conj": torch.tensor([1 + 2j]).conj()}
    snapshot = stager.capture({"tree": tree}, rng=False)
    assert devices.log == ["start", "copy", "copy", "fresh copy", "seal"]
    assert not snapshot.pieces["tree"]["large"].any()
    write(snapshot, tmp_path)
    assert devices.log[5:] == ["wait"]
    loaded = restore(tmp_path, {"tree": None}, rng=False).values["tree"]
    for name, expected in {**tree, "conj": torch.tensor([1 - 2j])}.items():
        assert torch.equal(loaded[name], expected)


def test_a_released_snapshot_has_no_copy_on_its_way() -> None:
    """It would end up in the next one, which has the same memory."""
    devices = FakeDevices()
    stager = Stager(devices)
    first = stager.capture({"t": [torch.full((PAGES,), 1.0)]}, rng=False)
    devices.log.clear()
    first.release()
    assert "wait" in devices.log
    second = stager.capture({"t": [torch.full((PAGES,), 2.0)]}, rng=False)
    assert second.pieces["t"][0].data_ptr() == first.pieces["t"][0].data_ptr()
    second.ready()
    assert (second.pieces["t"][0] == 2).all()


def test_a_failed_capture_has_no_copy_on_its_way() -> None:
    """Nor does it lose the buffers."""
    devices = FakeDevices()
    stager = Stager(devices)
    stager.capture({"t": [floats()]}, rng=False).release()
    devices.log.clear()
    with pytest.raises(ConfigError):
        stager.capture({"t": [floats(), object()]}, rng=False)
    assert devices.log == ["start", "copy", "seal", "wait"]
    assert stager.free_bytes == PAGES


def test_memory_for_devices_is_registered_once_and_given_back() -> None:
    """Small pieces share one registration; what is not used any more is unregistered."""
    devices = FakeDevices()
    stager = Stager(devices)
    state = {"t": [floats(), floats(), *(torch.tensor(float(i)) for i in range(500))]}
    for _ in range(3):
        snapshot = stager.capture(state, rng=False)
        snapshot.ready()
        assert [float(number) for number in snapshot.pieces["t"][2:]] == list(range(500))
        snapshot.release()
    assert sorted(devices.pinned.values()) == [PAGES, PAGES, 1 << 20]
    del snapshot
    stager.capture({"t": [floats()]}, rng=False).release()
    assert sorted(devices.pinned.values()) == [PAGES]
    del stager
    assert devices.pinned == {}


def test_without_registered_memory_saves_work() -> None:
    """In ordinary memory; it is not unregistered then."""
    devices = FakeDevices(can_pin=False)
    stager = Stager(devices)
    snapshot = stager.capture({"t": [torch.full((PAGES,), 3.0)]}, rng=False)
    snapshot.ready()
    assert (snapshot.pieces["t"][0] == 3).all()
    snapshot.release()
    del snapshot, stager


def test_a_reservation_for_devices_makes_their_memory() -> None:
    """Registered, small pieces too."""
    devices = FakeDevices()
    stager = Stager(devices)
    state = {"t": [floats(), torch.tensor(1.0), torch.empty(0)]}
    assert stager.reserve(state) == PAGES + 4
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-reserve":
            thread.join(DEADLINE_S)
    assert stager.free_bytes == PAGES + 4
    assert sorted(devices.pinned.values()) == [PAGES, 1 << 20]
    stager.capture(state, rng=False)
    assert (stager.reused_bytes, stager.allocated_bytes) == (PAGES + 4, 0)


def test_a_state_that_moves_to_a_device_leaves_no_memory_behind(caplog: pytest.LogCaptureFixture) -> None:
    """Buffers of the other kind are given back; nothing is logged about it."""
    caplog.set_level(logging.DEBUG)
    devices = FakeDevices()
    stager = Stager(devices)
    stager.capture({"t": [floats()]}, rng=False).release()
    devices.has = lambda device_type: False  # type: ignore[method-assign]
    snapshot = stager.capture({"t": [floats()]}, rng=False)
    snapshot.release()
    assert stager.free_bytes == PAGES
    assert devices.pinned == {}
    assert caplog.records == []
