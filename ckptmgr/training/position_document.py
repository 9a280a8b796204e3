"""What is saved of a place in the data: plain values and tensors.

The document of a `DataPosition`, by key:

    version     2. Older ones lack what came later, and are told apart by that: those of 0.1 end with `start`, some have no `end`
    epoch       its number, from 0
    batches     micro-batches of it that were used
    length      micro-batches of a whole epoch; None if the loader does not know
    start       what the epoch's iterator was made from: `rng` as `capture_rng` gives it (None at an epoch's start: the checkpoint has it anyway),
                `generators`, the loader's own; and `first`, the same of the moment its first batch was loaded, if others had drawn in between
    generators  the loader's own, at the place
    loader      the loader's own state there; None if it has none
    dataset     an iterable dataset's own state there; None if it has none
    end         what the end of an epoch led to, when that has no further batch, or when the place is the start of the one after it: `generators`
                and `dataset`, each None if it is not known
    next        the digest of the next batch, and of the random states it was loaded from; or None, and why it is not known
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ckptmgr.training import fast_forward, lookahead
from ckptmgr.training.present_epoch import PresentEpoch
from ckptmgr.training.random_sources import generator_states, generators, hidden_in

_VERSION = 2


def saved_position(epoch: PresentEpoch, *, proof: bool) -> dict[str, Any]:
    """The present place of `epoch`, which must be an edge.

    With `proof`, it may wait for the next batch, which is fetched ahead. One that cannot be loaded fails the step that asks for it, and not the save.
    """
    following = _following(epoch) if proof else lookahead.unknown("it was not asked for")
    end = _end(epoch)
    return {
        "version": _VERSION,
        "epoch": epoch.number,
        "batches": epoch.used,
        "length": epoch.length,
        "start": epoch.start if epoch.used else {"rng": None, "generators": generator_states(epoch.loader)},
        **epoch.edge(),
        "end": end,
        "next": following,
    }


def _following(epoch: PresentEpoch) -> dict[str, Any]:
    """What is saved about the next batch."""
    loader = epoch.loader
    if not epoch.used:
        if epoch.previous_ended is None:
            return lookahead.unknown("there was no training yet")
        why = lookahead.why_not_first(loader) or hidden_in(loader, generators(loader))
        return lookahead.unknown(why) if why else lookahead.first_of_epoch(loader, epoch.number)
    if epoch.ahead is None:
        if not epoch.at_edge:
            return lookahead.unknown("the loader was closed")
        if epoch.exhausted:
            return lookahead.unknown(fast_forward.NO_MORE)
        if lookahead.is_own_iterator(loader, epoch.iterator):
            # What is taken from it and never asked for would be lost.
            return lookahead.unknown("the loader is its own iterator")
    ahead = epoch.ahead or epoch.fetch_ahead()
    return lookahead.expected(ahead.digest(), ahead.before)


def _end(epoch: PresentEpoch) -> Mapping[str, Any] | None:
    """What is saved of the end of an epoch that has no further batch, or of the one before this one's start: the states that it led to."""
    loader = epoch.loader
    if not epoch.used:
        state = fast_forward.dataset_state(loader) if epoch.previous_ended else None
        return None if state is None else {"generators": None, "dataset": state}
    if epoch.end is not None or not epoch.at_edge:
        return epoch.end
    if epoch.ahead is None and fast_forward.is_at_end(loader, epoch.iterator, epoch.used):
        epoch.fetch_ahead()
    at_end = None if epoch.ahead is None else epoch.ahead.own_at_end
    return None if at_end is None else {"generators": at_end, "dataset": fast_forward.dataset_state(loader)}
