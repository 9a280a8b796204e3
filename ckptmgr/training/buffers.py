"""Host memory that is used again from save to save: touched once, so that a copy into it runs at the speed of memory."""

from __future__ import annotations

import contextlib
import mmap
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from ckptmgr.core.errors import CheckpointError
from ckptmgr.training.trees import tensor_over

# Up to this a copy of a CPU tensor into fresh memory costs less than finding a buffer; an optimizer has one such number per parameter.
SMALL_BYTES = 32 << 10
# Small buffers share slabs: a mapping of its own would take a page, and one registration with the device, for a few bytes.
_SLAB_BYTES = 1 << 20
_ALIGNMENT = 64


class Pinner(Protocol):
    """Makes memory known to a device, which can then copy into it by itself."""

    def pin(self, address: int, size_bytes: int) -> bool:
        """Register that range; False if it cannot be: it is ordinary memory then."""

    def unpin(self, address: int) -> None:
        """Take back a registration."""


class Slab:
    """A mapping of its own, given back to the system when nothing refers to it any more.

    A forked child does not get it. Otherwise every fork (DataLoader workers) would make each page copy-on-write, and the next save would
    fault them all in again: 0.65 s instead of 0.09 s per GiB, and the memory twice for as long as the child lives.
    """

    def __init__(self, size_bytes: int, pinner: Pinner | None) -> None:
        self._pinner: Pinner | None = None
        self._map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_DONTFORK"):
            with contextlib.suppress(OSError):  # a kernel without it only makes saves after a fork slower
                self._map.madvise(mmap.MADV_DONTFORK)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._used = 0
        if pinner is not None and pinner.pin(self._bytes.data_ptr(), size_bytes):
            self._pinner = pinner

    def __del__(self) -> None:
        if self._pinner is not None:
            self._pinner.unpin(self._bytes.data_ptr())

    def carve(self, size_bytes: int) -> torch.UntypedStorage | None:
        """The next free piece of that size; None if there is no such room left."""
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size_bytes > len(self._map):
            return None
        self._used = start + size_bytes
        return torch.frombuffer(self._map, dtype=torch.uint8, count=size_bytes, offset=start).untyped_storage()


class Buffer:
    """A storage that belongs to a pool."""

    __slots__ = ("_slab", "_tensor", "size_bytes", "storage")

    def __init__(self, storage: torch.UntypedStorage, slab: Slab) -> None:
        self.storage = storage
        self.size_bytes = storage.nbytes()
        self._slab = slab
        self._tensor: torch.Tensor | None = None

    def tensor_like(self, source: torch.Tensor) -> torch.Tensor:
        """A CPU tensor over this storage as `source` lies over its own. The next one may be the same object."""
        known = self._tensor
        if (
            known is not None
            and known.dtype is source.dtype
            and known.size() == source.size()
            and known.stride() == source.stride()
            and known.storage_offset() == source.storage_offset()
        ):
            return known
        self._tensor = tensor_over(self.storage, source)
        return self._tensor

    def fill(self, storage: torch.UntypedStorage) -> None:
        """Copy `storage`, of the same size, into it; blocks."""
        if storage.device.type == "cpu":
            _words(self.storage).copy_(_words(storage))
        else:
            self.storage.copy_(storage)

    def touch(self) -> None:
        """Have the system find a page for every address, which otherwise the first copy waits for. Releases the GIL."""
        _words(self.storage).zero_()


def _words(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of `storage` as one flat tensor, of whole words if possible: torch copies bytes 15 % slower than words."""
    size = storage.nbytes()
    width, dtype = (8, torch.int64) if size % 8 == 0 and storage.data_ptr() % 8 == 0 else (1, torch.uint8)
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, 0, (size // width,), (1,))


class BufferPool:
    """Free buffers by size. It keeps no more of them than the last snapshot had, or the next one is expected to have.

    `free_bytes` and `Loan.give_back` are safe from any thread; the rest is for one at a time.

    Args:
        pinner: of the device that copies into these buffers; None if no device does.
    """

    def __init__(self, pinner: Pinner | None = None) -> None:
        self._pinner = pinner
        self._lock = threading.Lock()
        self._free: dict[int, deque[Buffer]] = {}
        self._lent: Counter[int] = Counter()
        self._planned: Counter[int] = Counter()
        # For small buffers; it lives as long as one of them does.
        self._slab: weakref.ref[Slab] | None = None

    @property
    def free_bytes(self) -> int:
        """Of the buffers that wait to be used again."""
        with self._lock:
            return sum(size * len(buffers) for size, buffers in self._free.items())

    def borrow(self) -> Loan:
        """All free buffers, for one snapshot."""
        with self._lock:
            free, self._free = self._free, {}
        return Loan(self, free)

    def plan(self, sizes: Iterable[int]) -> list[int]:
        """From now on keep as many free buffers of each size as are named here; those that are neither free nor lent yet."""
        with self._lock:
            self._planned = Counter(sizes)
            surplus = self._take_surplus()
            have = self._lent + Counter({size: len(buffers) for size, buffers in self._free.items()})
            missing = self._planned - have
        del surplus  # outside the lock: it takes a while to give GiBs back
        return list(missing.elements())

    def add(self, size_bytes: int) -> None:
        """Make a free buffer with every page touched. Slow.

        Raises:
            CheckpointError: the system has no such memory.
        """
        buffer = self.make(size_bytes)
        buffer.touch()
        self._take_back([buffer])

    def make(self, size_bytes: int) -> Buffer:
        """A new buffer.

        Raises:
            CheckpointError: the system has no such memory.
        """
        try:
            if size_bytes <= SMALL_BYTES:
                return self._make_small(size_bytes)
            slab = Slab(size_bytes, self._pinner)
            return _carved(slab, size_bytes)
        except (OSError, MemoryError, RuntimeError) as error:
            raise CheckpointError(
                f"there is no memory for a copy of {size_bytes} bytes of the state: {error}",
                hint="a save needs as much free memory as the state is large: give the job more",
                size_bytes=size_bytes,
            ) from error

    def _make_small(self, size_bytes: int) -> Buffer:
        slab = None if self._slab is None else self._slab()
        storage = None if slab is None else slab.carve(size_bytes)
        if slab is None or storage is None:
            slab = Slab(_SLAB_BYTES, self._pinner)
            self._slab = weakref.ref(slab)
            return _carved(slab, size_bytes)
        return Buffer(storage, slab)

    def _settle(self, taken: Iterable[Buffer]) -> None:
        """A snapshot is complete: what it has is what the next one will need."""
        with self._lock:
            self._planned = Counter(buffer.size_bytes for buffer in taken)
            self._lent += self._planned
            surplus = self._take_surplus()
        del surplus

    def _take_back(self, buffers: Iterable[Buffer], *, lent: bool = False) -> None:
        with self._lock:
            for buffer in buffers:
                if lent:
                    self._lent[buffer.size_bytes] -= 1
                self._free.setdefault(buffer.size_bytes, deque()).append(buffer)
            surplus = self._take_surplus()
        del surplus

    def _take_surplus(self) -> list[Buffer]:
        """What is free beyond the plan, no longer free."""
        surplus = []
        for size, buffers in self._free.items():
            while len(buffers) > self._planned[size]:
                surplus.append(buffers.pop())
        self._free = {size: buffers for size, buffers in self._free.items() if buffers}
        return surplus


class Loan:
    """The buffers of one snapshot. `settle` once they are all taken; then, or instead, `give_back`."""

    def __init__(self, pool: BufferPool, free: dict[int, deque[Buffer]]) -> None:
        self._pool = pool
        self._free = free
        self._taken: list[Buffer] = []
        self._is_trimmed = False
        self._is_settled = False

    def take(self, size_bytes: int, expected: Callable[[], Iterable[int]]) -> tuple[Buffer, bool]:
        """A buffer, and whether it has been used before.

        Args:
            expected: asked for the sizes of all buffers that this loan will take, when one has to be made: what will not be needed is given
                back to the system first.

        Raises:
            CheckpointError: the system has no such memory.
        """
        free = self._free.get(size_bytes)
        # The oldest first: a state of the same shape then finds the bytes of each tensor where they were.
        if free:
            buffer = free.popleft()
            self._taken.append(buffer)
            return buffer, True
        if not self._is_trimmed:
            self._trim(Counter(expected()))
        buffer = self._pool.make(size_bytes)
        self._taken.append(buffer)
        return buffer, False

    def settle(self) -> None:
        """No more will be taken; what is left over goes back to the system."""
        self._is_settled = True
        self._free.clear()
        self._pool._settle(self._taken)

    def give_back(self) -> None:
        """Let the next snapshot have them. Once only."""
        self._pool._take_back(self._taken, lent=self._is_settled)
        self._pool._take_back(buffer for buffers in self._free.values() for buffer in buffers)

    def _trim(self, expected: Counter[int]) -> None:
        self._is_trimmed = True
        expected.subtract(buffer.size_bytes for buffer in self._taken)
        for size, buffers in self._free.items():
            while len(buffers) > max(0, expected[size]):
                buffers.pop()


def _carved(slab: Slab, size_bytes: int) -> Buffer:
    storage = slab.carve(size_bytes)
    assert storage is not None
    return Buffer(storage, slab)
