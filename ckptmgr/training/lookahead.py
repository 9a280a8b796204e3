"""One batch ahead of a training, so that a save can say what comes next; the training notices nothing of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from ckptmgr.training import fast_forward, ranks
from ckptmgr.training.first_batch import Undigestible, digest
from ckptmgr.training.preemption import Preempted
from ckptmgr.training.random_sources import Moment, generators, holders, set_epoch
from ckptmgr.training.rng import same_rng

_log = logging.getLogger(__name__)
# Beyond it, drawing an order once more at an epoch's end takes its time.
_CHEAP_ORDER = 1_000_000


class Ahead:
    """The next batch of an iterator, taken before its time and kept until it is asked for.

    Loading it may draw random numbers. They are put back, so that a checkpoint has the states of before, and everybody draws what they would have
    drawn. When the batch is handed out, the states are set to what loading it led to; if others have drawn in between, it is loaded again with what
    they left, as it would have been.

    Args:
        iterator: gives the batch.
        own: the loader's generators.
        single: the iterator is a DataLoader's of this process, over a map-style dataset: indices can be had apart from samples.
        repeatable: says whether loading the same indices again is loading the same batch, but for random numbers.
        waiting: makes the context in which the batch is waited for.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        own: Sequence[torch.Generator],
        *,
        single: bool,
        repeatable: Callable[[], bool],
        waiting: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self.before = Moment.now(own)
        self._iterator = iterator
        self._own = own
        self._single = single
        self._repeatable = repeatable
        self._waiting = waiting
        self._index: Any = None
        self._batch: Any = None
        self._error: BaseException | None = None
        try:
            with waiting():
                if single:
                    self._index = iterator._next_index()  # type: ignore[attr-defined]
                    self._indexed = Moment.now(own)
                    self._batch = fast_forward.fetch(iterator, self._index)
                else:
                    self._batch = next(iterator)
        except (Exception, Preempted) as error:  # noqa: BLE001 - whatever it is, the next step meets it, and not the save (I9)
            self._error = error
        self._after = Moment.now(own)
        self._drew = self._after != self.before
        if self._drew:
            self.before.go_back(own)

    @property
    def is_end(self) -> bool:
        """Whether there is no batch: the iterator has ended."""
        return isinstance(self._error, StopIteration)

    @property
    def own_at_end(self) -> Sequence[torch.Tensor] | None:
        """The loader's generators as the end of the iterator left them; None if it is no end, or one that drew other random numbers as well."""
        return self._after.own if self.is_end and same_rng(self.before.rng, self._after.rng) else None

    def digest(self) -> tuple[str | None, str]:
        """Of the batch: the digest, or None and why there is none."""
        if self.is_end:
            return None, fast_forward.NO_MORE
        if self._error is not None:
            _log.warning(
                "the next batch cannot be loaded, the checkpoint is saved without a digest of it: %r", self._error
            )
            return None, f"the next batch could not be loaded: {type(self._error).__name__}"
        return digest_or_why(self._batch)

    def hand_out(self) -> Any:
        """The batch, as if it were loaded now. Once.

        Raises:
            Whatever loading it raised, StopIteration too.
        """
        now = Moment.now(self._own) if self._drew else None
        if now == self.before:
            self._after.go_back(self._own)
        elif now is not None and self.own_at_end is not None:
            for generator, state in zip(self._own, self.own_at_end, strict=True):
                generator.set_state(state)
        elif now is not None and (self._error is None or self.is_end):
            self._load_again(now)
        if self._error is not None:
            raise self._error
        return self._batch

    def _load_again(self, now: Moment) -> None:
        if self.is_end or not (self._single and now.has_own(self.before.own) and self._repeatable()):
            _log.warning(
                "random numbers were drawn between a save and the next batch, which had been loaded for the save: "
                "without the save it would have been loaded with others"
            )
            return
        for generator, state in zip(self._own, self._indexed.own, strict=True):
            generator.set_state(state)
        with self._waiting():
            self._batch = fast_forward.fetch(self._iterator, self._index)


def expected(found: tuple[str | None, str], moment: Moment) -> dict[str, Any]:
    """What is saved of a next batch that was `found` from the random states of `moment`."""
    hexdigest, why = found
    return unknown(why) if hexdigest is None else {"digest": hexdigest, "moment": moment.digest(), "rank": ranks.rank()}


def unknown(why: str) -> dict[str, Any]:
    """What is saved when the next batch is not known."""
    return {"digest": None, "why": why}


def why_not_comparable(saved: Any) -> str | None:
    """Why a batch cannot be compared with what was saved of it; None if it can."""
    if not isinstance(saved, Mapping):
        return "the checkpoint does not say what comes next"
    if saved.get("digest") is None:
        return str(saved.get("why", "the checkpoint does not say what comes next"))
    if saved.get("rank") != ranks.rank():
        return f"the checkpoint has the digest of rank {saved.get('rank')}"
    return None


def compared(saved: Mapping[str, Any], found: tuple[str | None, str], moment: Moment) -> str:
    """Whether the batch `found` from `moment` is the one that was saved: "equal", "different", or "none: " and why that is not known."""
    if found[0] == saved["digest"]:
        return "equal"
    if moment.digest() != saved.get("moment"):
        return "none: random numbers were drawn since the restore, or their states were not restored"
    return "different"


def is_own_iterator(loader: Any, iterator: Any) -> bool:
    """Whether a batch that is taken and not asked for is lost, for there is no other iterator than this one."""
    fetcher = getattr(iterator, "_dataset_fetcher", None)
    return iterator is loader or getattr(fetcher, "dataset_iter", None) is getattr(loader, "dataset", loader)


def why_not_first(loader: Any) -> str | None:
    """Why the first batch of an epoch cannot be known before the epoch has begun; None if loading it changes nothing, and costs no more than itself."""
    if not (fast_forward.is_map_style(loader) and fast_forward.in_this_process(loader)):
        return "the first batch of an epoch is known only where the process itself loads it, by index"
    if not fast_forward.samplers_are_plain(loader) or callable(getattr(loader.dataset, "set_epoch", None)):
        return "making an iterator may have effects here"
    return "an order of so many samples takes too long to draw" if len(loader.sampler) > _CHEAP_ORDER else None


def first_of_epoch(loader: Any, epoch: int) -> dict[str, Any]:
    """What is saved of the first batch of `epoch`, which is loaded and dropped; the random states stay as they are."""
    own = generators(loader)
    before = Moment.now(own)
    try:
        set_epoch(holders(loader), epoch)
        found = digest_or_why(next(iter(loader)))
    except Exception as error:  # noqa: BLE001 - the next epoch meets it, and not the save (I9)
        found = None, f"the next batch could not be loaded: {type(error).__name__}"
    finally:
        before.go_back(own)
    return expected(found, before)


def digest_or_why(batch: Any) -> tuple[str | None, str]:
    """The digest of `batch`, or None and why it has none."""
    try:
        return digest(batch), ""
    except Undigestible as error:
        return None, f"the batch holds a {error.what}"
    except Exception as error:  # noqa: BLE001 - other people's containers; a save must not fail of them (I9)
        return None, f"the batch cannot be read: {error!r}"
