"""Which rank this is, and the few things that ranks agree on. Only functions that say so call a collective."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from typing import Any


def rank() -> int:
    """This process's rank: from torch.distributed when it is set up, else from RANK as torchrun sets it, else 0. No collective."""
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_rank())
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0


def world_size() -> int:
    """How many ranks train; 1 without torch.distributed. No collective."""
    distributed = _distributed()
    if distributed is not None:
        return int(distributed.get_world_size())
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdecimal() else 1


def is_size_told() -> bool:
    """Whether `world_size` is more than a guess: a process group is set up, or a launcher has set WORLD_SIZE. No collective."""
    return _distributed() is not None or os.environ.get("WORLD_SIZE", "").isdecimal()


def is_main_process() -> bool:
    """Whether this is rank 0, the one that saves. No collective."""
    return rank() == 0


def can_agree() -> bool:
    """Whether there are other ranks, and torch.distributed is set up to talk to them. No collective."""
    distributed = _distributed()
    return distributed is not None and distributed.get_world_size() > 1


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank. A collective if `can_agree`: every rank must call it at the same point.

    On the CPU where the process group has a backend for it (gloo, or `cpu:gloo,cuda:nccl`); else on the group's device, and the call then
    waits for what is queued there.
    """
    if not can_agree():
        return flag
    mine = _tensor([int(flag)], "int64")
    _distributed().all_reduce(mine, op=_distributed().ReduceOp.MAX)
    return bool(mine.item())


def same_on_all_ranks(value: int) -> bool:
    """Whether `value` is the same everywhere. A collective if `can_agree`, as `any_rank`."""
    if not can_agree():
        return True
    mine = _tensor([value, -value], "int64")
    _distributed().all_reduce(mine, op=_distributed().ReduceOp.MAX)
    largest, negated_smallest = mine.tolist()
    return bool(largest == -negated_smallest)


def sums(values: Sequence[float]) -> list[float]:
    """Each of `values` summed over all ranks, in float64; all of one length. A collective if `can_agree`, as `any_rank`."""
    if not can_agree():
        return [float(value) for value in values]
    mine = _tensor(values, "float64")
    _distributed().all_reduce(mine)
    return [float(value) for value in mine.tolist()]


def gather_rows(row: Sequence[float]) -> list[list[float]]:
    """The `row` of every rank, in the order of ranks, as float64; all of one length. A collective if `can_agree`, as `any_rank`."""
    if not can_agree():
        return [list(row)]
    mine = _tensor(row, "float64")
    rows = [mine.clone() for _ in range(world_size())]
    _distributed().all_gather(rows, mine)
    return [each.tolist() for each in rows]


def mean_of_ranks(value: float | None) -> float | None:
    """The mean of `value` over the ranks that have one; None if none has. A collective if `can_agree`, as `any_rank`.

    Exactly `value` where all have the same; not finite if one is not.
    """
    rows = gather_rows([0.0, 0.0] if value is None else [1.0, value])
    values = [value for there, value in rows if there]
    if not values:
        return None
    return values[0] if len(set(values)) == 1 else sum(values) / len(values)


def gather_bytes(mine: bytes) -> list[bytes]:
    """The bytes of every rank, in the order of ranks; of any length. Two collectives if `can_agree`, as `any_rank`."""
    if not can_agree():
        return [mine]
    torch: Any = sys.modules["torch"]
    sizes = [int(size) for (size,) in gather_rows([len(mine)])]
    padded = torch.frombuffer(bytearray(mine.ljust(max(sizes, default=0) or 1, b"\0")), dtype=torch.uint8).to(_device())
    everyones = [torch.empty_like(padded) for _ in sizes]
    _distributed().all_gather(everyones, padded)
    here = [each.cpu() for each in everyones]
    return [ctypes.string_at(each.data_ptr(), size) for each, size in zip(here, sizes, strict=True)]


def _distributed() -> Any:
    """torch.distributed, if it is imported and a process group is set up; torch is not imported for it."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed if ready else None


def _tensor(values: Sequence[float], dtype: str) -> Any:
    torch: Any = sys.modules["torch"]
    return torch.tensor(values, dtype=getattr(torch, dtype), device=_device())


def _device() -> str:
    # "cpu:gloo,cuda:nccl": the kinds of device, each with its backend.
    kinds = [pair.partition(":")[0] for pair in _distributed().get_backend_config().split(",")]
    return "cpu" if "cpu" in kinds else str(kinds[0])
