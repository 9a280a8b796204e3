"""Copies from GPUs that the training thread does not wait for."""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Protocol

import torch

logger = logging.getLogger(__name__)


class Arrival(Protocol):
    """Copies on their way from devices to the host."""

    def copy(self, target: torch.UntypedStorage, source: torch.UntypedStorage, *, made_now: bool) -> None:
        """Start copying `source` into `target`, of the same size, after what its device was asked to do before. Returns at once.

        Args:
            made_now: see `HostMemory.copy`.
        """

    def seal(self) -> None:
        """All copies are started. What the devices are asked to do from here on comes after them, so that it cannot tear them."""

    def wait(self) -> None:
        """Block until all copies have arrived. Any thread; again is a no-op."""


class Devices(Protocol):
    """The devices whose copies need not be waited for."""

    def has(self, device_type: str) -> bool:
        """Whether copies from such a device go this way."""

    def start(self) -> Arrival:
        """The copies of one snapshot."""

    def pin(self, address: int, size_bytes: int) -> bool:
        """See `Pinner`."""

    def unpin(self, address: int) -> None:
        """See `Pinner`."""

    def here(self) -> Any:
        """A context for another thread of this process, in which it uses the same device as the calling thread now."""


class Cuda:
    """Copies from CUDA devices into pinned memory, each device on a stream of its own. Not thread-safe, except `wait` of its arrivals.

    Memory is registered by CUDA rather than allocated by torch: torch's pinned allocator rounds each size up to a power of two, and keeps
    what is freed for ever.
    """

    _PORTABLE = 1  # cudaHostRegisterPortable: for all contexts of this process

    def __init__(self, cuda: Any = torch.cuda) -> None:
        self._cuda = cuda
        self._streams: dict[Any, Any] = {}
        self._can_pin = True

    def has(self, device_type: str) -> bool:
        """See `Devices`."""
        return device_type == "cuda"

    def start(self) -> Arrival:
        """See `Devices`."""
        return _CudaArrival(self)

    def here(self) -> Any:
        """See `Devices`."""
        return self._cuda.device(self._cuda.current_device())

    def pin(self, address: int, size_bytes: int) -> bool:
        """See `Devices`. After one failure it is not tried again: the limit on locked memory does not go away."""
        if not self._can_pin:
            return False
        try:
            code = int(self._cuda.cudart().cudaHostRegister(address, size_bytes, self._PORTABLE))
        except RuntimeError as error:
            return self._cannot_pin(error)
        return True if code == 0 else self._cannot_pin(f"CUDA error {code}")

    def unpin(self, address: int) -> None:
        """See `Devices`. Errors mean that CUDA is gone already, as at the program's end."""
        with contextlib.suppress(Exception):
            self._cuda.cudart().cudaHostUnregister(address)

    def stream(self, device: Any) -> Any:
        """The stream of the copies from `device`."""
        if device not in self._streams:
            self._streams[device] = self._cuda.Stream(device=device)
        return self._streams[device]

    def _cannot_pin(self, why: object) -> bool:
        self._can_pin = False
        logger.warning(
            "memory for saves cannot be pinned, so each save stops training for its copy from the GPU: %s "
            "(raise the limit on locked memory, ulimit -l)",
            why,
        )
        return False


class _CudaArrival:
    def __init__(self, devices: Cuda) -> None:
        self._devices = devices
        self._used: dict[Any, Any] = {}
        self._events: list[Any] = []
        # Until the copies have arrived: memory that is freed may be used again at once by another stream.
        self._sources: list[torch.UntypedStorage] = []

    def copy(self, target: torch.UntypedStorage, source: torch.UntypedStorage, *, made_now: bool) -> None:
        cuda, device = self._devices._cuda, source.device
        stream = self._devices.stream(device)
        if device not in self._used or made_now:
            stream.wait_stream(cuda.current_stream(device))
        self._used[device] = stream
        self._sources.append(source)
        with cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def seal(self) -> None:
        for device, stream in self._used.items():
            # Blocking: the thread that waits for it sleeps instead of spinning.
            event = self._devices._cuda.Event(blocking=True)
            event.record(stream)
            self._devices._cuda.current_stream(device).wait_event(event)
            self._events.append(event)
        self._used.clear()

    def wait(self) -> None:
        for event in list(self._events):
            event.synchronize()
        self._events.clear()
        self._sources.clear()
