"""Which rank this is. No collective is called."""

from __future__ import annotations

import os
import sys


def rank() -> int:
    """This process's rank: from torch.distributed when it is set up, else from RANK as torchrun sets it, else 0."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    value = os.environ.get("RANK", "0")
    return int(value) if value.isdecimal() else 0


def world_size() -> int:
    """How many ranks train; 1 without torch.distributed."""
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    value = os.environ.get("WORLD_SIZE", "1")
    return int(value) if value.isdecimal() else 1


def is_main_process() -> bool:
    """Whether this is rank 0, the one that saves."""
    return rank() == 0
