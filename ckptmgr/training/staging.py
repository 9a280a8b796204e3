"""Staging: the copy of the training state into host memory, which is all that a save stops training for.

Buffers are used again from save to save: in fresh memory the copy takes several times as long, for the system has to find and clear each page.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import Any, NamedTuple

import torch

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.training.buffers import SMALL_BYTES, BufferPool
from ckptmgr.training.devices import Arrival, Cuda, Devices
from ckptmgr.training.memory import available_memory_bytes
from ckptmgr.training.state import Snapshot, collect, copy_trees
from ckptmgr.training.trees import Census, FreshMemory, is_whole

__all__ = ["Stager", "available_memory_bytes", "state_bytes"]


def state_bytes(pieces: Mapping[str, Any]) -> int:
    """What a snapshot of `pieces` will take, and about what its files will; nothing is copied.

    Raises:
        ConfigError, CheckpointError: as `ckptmgr.training.state.capture`.
    """
    return Census.of(collect(pieces, rng=False)).size_bytes


class Stager:
    """Captures states into buffers that it uses again. Its methods are for one thread; what it returns may be released from any.

    It holds one state's size at most, besides the snapshots that are not released. A forked child begins with nothing.

    Attributes:
        reused_bytes: how much of the last capture went into memory used before.
        allocated_bytes: the rest of it, which went into new memory.
        last_stage_s: how long the last capture blocked.
    """

    def __init__(self, devices: Devices | None = None) -> None:
        self.reused_bytes = 0
        self.allocated_bytes = 0
        self.last_stage_s = 0.0
        self._devices: Devices = Cuda() if devices is None else devices
        self._owner = os.getpid()
        self._pools = _pools(self._devices)
        self._reserving: _Reserving | None = None

    @property
    def free_bytes(self) -> int:
        """Memory that waits for the next capture."""
        return sum(pool.free_bytes for pool in self._pools)

    def capture(self, pieces: Mapping[str, Any], *, rng: bool = True) -> Snapshot:
        """As `ckptmgr.training.state.capture`, into buffers used before where there are some of the right size.

        Copies from CUDA devices may still be on their way when it returns: `Snapshot.ready` waits for them. Training may go on at once all
        the same: what it asks of the devices comes after these copies. The snapshot's memory is its own until it is released.

        Raises:
            ConfigError, CheckpointError: as there, and where there is no memory; the buffers are free again.
        """
        started = perf_counter()
        trees = collect(pieces, rng=rng)
        self._settle()
        lease = _Lease(self._pools, self._devices, trees)
        try:
            snapshot = copy_trees(trees, memory=lease, hold=lease)
            lease.seal()
        except BaseException:
            lease.release()
            raise
        self.reused_bytes = lease.reused_bytes
        self.allocated_bytes = snapshot.size_bytes - lease.reused_bytes
        self.last_stage_s = perf_counter() - started
        return snapshot

    def reserve(self, pieces: Mapping[str, Any]) -> int:
        """Make buffers for a state like `pieces` ready, in a background thread, so that also the first capture costs the copy only.

        A capture that comes meanwhile takes those that are ready. Call it when the optimizer has its state, after the first step. Where the
        memory is not there, nothing is made: it is left to the save to fail, or to succeed when there is room again.

        Returns:
            The bytes of the whole state.

        Raises:
            ConfigError, CheckpointError: as `capture`.
        """
        census = Census.of(collect(pieces, rng=False))
        self._settle()
        missing = [
            (size, pool)
            for pool, sizes in zip(self._pools, _sizes(census, self._devices), strict=True)
            for size in pool.plan(sizes)
        ]
        available = available_memory_bytes()
        if missing and (available is None or sum(size for size, _ in missing) <= available):
            pinned = any(pool is self._pools.pinned for _, pool in missing)
            self._reserving = _Reserving(missing, self._devices.here() if pinned else contextlib.nullcontext())
        return census.size_bytes

    def clear(self) -> None:
        """Give all memory back to the system: what is free now, and what is in use as soon as it is released. A later capture begins anew."""
        self._settle()
        for pool in self._pools:
            pool.plan([])

    def _settle(self) -> None:
        """End a reservation; in a forked child forget the buffers, which it does not have (see `Slab`)."""
        if os.getpid() != self._owner:
            self._owner, self._pools, self._reserving = os.getpid(), _pools(self._devices), None
        if self._reserving is not None:
            self._reserving.end()
            self._reserving = None


class _Pools(NamedTuple):
    """For copies of CPU tensors (and of devices without a way of their own), and for those that a device makes."""

    ordinary: BufferPool
    pinned: BufferPool


def _pools(devices: Devices) -> _Pools:
    return _Pools(BufferPool(), BufferPool(devices))


def _sizes(census: Census, devices: Devices) -> tuple[list[int], list[int]]:
    """The buffers that a state takes from each pool."""
    ordinary = [size for size, device in census.storages if size > SMALL_BYTES and not devices.has(device)]
    pinned = [size for size, device in census.storages if size > 0 and devices.has(device)]
    return ordinary, pinned


class _Lease:
    """The buffers of one snapshot, and the copies into them."""

    def __init__(self, pools: _Pools, devices: Devices, trees: Mapping[str, Any]) -> None:
        self.reused_bytes = 0
        self._devices = devices
        self._ordinary, self._pinned = pools.ordinary.borrow(), pools.pinned.borrow()
        self._trees: Mapping[str, Any] = trees
        self._expected: tuple[list[int], list[int]] | None = None
        self._fresh = FreshMemory()
        self._arrival: Arrival | None = None
        self._lock = threading.Lock()
        self._is_released = False

    def copy(self, source: torch.Tensor, *, made_now: bool) -> torch.Tensor:
        """See `HostMemory`."""
        storage = source.untyped_storage()
        size = storage.nbytes()
        by_device = self._devices.has("cpu" if source.is_cpu else source.device.type)
        if size <= (0 if by_device else SMALL_BYTES):
            return self._fresh.copy(source, made_now=made_now)
        if by_device:
            return self._send(source, storage, made_now)
        buffer, used_before = self._ordinary.take(size, lambda: self._sizes()[0])
        self.reused_bytes += size if used_before else 0
        copy = buffer.tensor_like(source)
        if source.is_cpu and is_whole(source):
            copy.copy_(source)
        else:
            buffer.fill(storage)
        return copy

    def seal(self) -> None:
        """All copies are started."""
        if self._arrival is not None:
            self._arrival.seal()
        self._ordinary.settle()
        self._pinned.settle()
        # They hold the live tensors.
        self._trees = {}

    def ready(self) -> None:
        """See `Hold`."""
        if self._is_released:
            raise RuntimeError("this snapshot was released: its memory belongs to another one")
        if self._arrival is not None:
            self._arrival.wait()

    def release(self) -> None:
        """See `Hold`."""
        with self._lock:
            if self._is_released:
                return
            self._is_released = True
        if self._arrival is not None:
            # A copy on its way would end up in the next snapshot.
            self._arrival.seal()
            self._arrival.wait()
        self._ordinary.give_back()
        self._pinned.give_back()

    def _send(self, source: torch.Tensor, storage: torch.UntypedStorage, made_now: bool) -> torch.Tensor:
        size = storage.nbytes()
        buffer, used_before = self._pinned.take(size, lambda: self._sizes()[1])
        self.reused_bytes += size if used_before else 0
        self._arrival = self._arrival or self._devices.start()
        self._arrival.copy(buffer.storage, storage, made_now=made_now)
        return buffer.tensor_like(source)

    def _sizes(self) -> tuple[list[int], list[int]]:
        if self._expected is None:
            self._expected = _sizes(Census.of(self._trees), self._devices)
        return self._expected


class _Reserving:
    """A thread that makes buffers ready, one by one."""

    def __init__(self, missing: Iterable[tuple[int, BufferPool]], device: AbstractContextManager[Any]) -> None:
        self._missing = sorted(missing, key=lambda item: -item[0])
        # Of the training thread: a thread that knows nothing better makes a context on device 0, which is another rank's.
        self._device = device
        self._is_wanted = True
        self._thread = threading.Thread(target=self._run, name="ckptmgr-reserve", daemon=False)
        with contextlib.suppress(RuntimeError):  # no thread to be had: the first save is slower, that is all
            self._thread.start()

    def end(self) -> None:
        """Stop after the buffer at hand, and wait for that."""
        self._is_wanted = False
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with self._device, contextlib.suppress(CkptmgrError):
            for size, pool in self._missing:
                if not self._is_wanted or not threading.main_thread().is_alive():
                    return
                pool.add(size)
