"""The random states of all ranks in a checkpoint that rank 0 writes, and each rank's own back from it.

Rank 0's states are in every checkpoint. Those of the others come along if all ranks call `gather_rng` where the checkpoint is made: at the same
point of the program, directly before the save. On a restore by all ranks from the same files, each takes up its own.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from typing import Any

import torch

from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training.ranks import can_agree, gather_bytes, rank, world_size
from ckptmgr.training.rng import capture_rng, restore_rng, same_rng

_log = logging.getLogger(__name__)
_RANKS = "ranks"


class _Gathered:
    """What the last `gather_rng` of this process brought, on rank 0 only.

    Attributes:
        mine: rank 0's states at that moment; None if nothing was brought.
        everyones: for each rank a file of `torch.save` with its states, as bytes. Whoever restores reads one of them, of thousands perhaps.
    """

    def __init__(self) -> None:
        self.mine: Mapping[str, Any] | None = None
        self.everyones: list[bytes] = []

    def take(self) -> Mapping[str, Any] | None:
        """`mine`, which is there once."""
        mine, self.mine = self.mine, None
        return mine


_gathered = _Gathered()


def gather_rng() -> None:
    """Bring the random states of all ranks to rank 0, for the save that follows. A collective: every rank must call it at the same point.

    Nothing without other ranks (`can_agree`). Draws no random number. Costs some 16 kB per rank on every rank, more with GPUs, and on a GPU-only
    process group (nccl) the wait for what is queued there. A save at another moment does not take up what was gathered: once rank 0 has drawn a
    number, it is out of date.

        if manager.should_save(moment):       # the same on all ranks, as it must be
            gather_rng()
            manager.save(step, state)         # does nothing on ranks other than 0
    """
    if not can_agree():
        return
    mine, file = capture_rng(), io.BytesIO()
    torch.save(mine, file)
    everyones = gather_bytes(file.getvalue())
    if rank() == 0:
        _gathered.mine, _gathered.everyones = mine, everyones


def capture_ranks() -> dict[str, Any]:
    """The random states for a checkpoint: this process's, and with them those of all ranks if `gather_rng` has brought them for this moment."""
    mine, gathered = capture_rng(), _gathered.take()
    if gathered is not None and same_rng(gathered, mine):
        return {**mine, _RANKS: [_tensor(each) for each in _gathered.everyones]}
    if gathered is not None:
        _log.warning(
            "random numbers were drawn between gather_rng() and the save: it holds the random states of this rank only"
        )
    return mine


def restore_ranks(states: Mapping[str, Any]) -> tuple[str, ...]:
    """Set this rank's generators to its own of what `capture_ranks` returned. No collective.

    A checkpoint of one rank, or without the states of the others, gives every rank those of rank 0. A rank that the checkpoint does not know
    keeps what it has.

    Returns:
        What could not be restored on this rank.

    Raises:
        IncompatibleStateError: these are no random states; some generators may be set already.
    """
    now, mine = world_size(), rank()
    saved = states.get(_RANKS) if isinstance(states, Mapping) else None
    if not isinstance(saved, list):
        notes = restore_rng(states)
        if now > 1:
            notes += (f"only the random states of rank 0 are in the checkpoint: all {now} ranks go on with them",)
        return notes
    notes = restore_rng(_tree(saved[mine])) if mine < len(saved) else ()
    if now > len(saved):
        more = f"ranks {len(saved)} to {now - 1}" if now > len(saved) + 1 else f"rank {now - 1}"
        notes += (f"the random states of {len(saved)} ranks were saved: {more} of {now} keep their own",)
    elif now < len(saved):
        notes += (f"the random states of {len(saved)} ranks were saved, and those of the first {now} restored",)
    return notes


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _tree(data: torch.Tensor) -> Mapping[str, Any]:
    try:
        tree: Mapping[str, Any] = torch.load(io.BytesIO(bytes(data.tolist())), map_location="cpu", weights_only=True)
    except Exception as error:  # as for any file of torch: damaged bytes raise whatever they come to
        raise IncompatibleStateError(
            f"the random states of rank {rank()} in the checkpoint cannot be read: {error!r}",
            hint="restore from another checkpoint",
            piece="rng",
        ) from error
    return tree
