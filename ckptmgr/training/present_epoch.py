"""The epoch of a loader that a training is in: its iterator, the batch that is fetched ahead, and its end."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils.data import DataLoader

from ckptmgr.core.errors import ConfigError
from ckptmgr.training import fast_forward
from ckptmgr.training.lookahead import Ahead
from ckptmgr.training.random_sources import Moment, generator_states, generators, hidden_in, set_generators

_log = logging.getLogger(__name__)


class PresentEpoch:
    """One epoch after the other of a loader, in order, of which it knows the present one. Not thread-safe.

    An edge is where no micro-batch is open: all that were taken are used. Only there a batch may be fetched ahead, and be kept until it is asked for.

    Attributes:
        loader: a DataLoader, or anything that can be iterated once per epoch.
        waiting: makes the context in which the next micro-batch is waited for; may be left by an exception at any moment.
        number: of the epoch, from 0.
        used: micro-batches of it that were used.
        start: the random states that its iterator was made from, "rng" and "generators" (the loader's), and "first", those that its first batch
            was loaded from, if they were others; None before.
        iterator: what gives its batches; None while there is none.
        ahead: the next batch, fetched before its time.
        ended: whether the iterator has shown that it has no further batch.
        end: what is saved of its end, if a checkpoint of its last batch told; see `position_document`.
        previous_ended: whether the epoch before it went to its end, and was not left; None if none was finished since the process began
            or came to a saved place.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.number = 0
        self.used = 0
        self.start: Mapping[str, Any] | None = None
        self.iterator: Iterator[Any] | None = None
        self.ahead: Ahead | None = None
        self.ended = False
        self.end: Mapping[str, Any] | None = None
        self.previous_ended: bool | None = None
        # What is saved of the edge that `ahead` was fetched at.
        self._edge: Mapping[str, Any] | None = None
        # Taken and not used, and the loader's generators before that.
        self._open = 0
        self._own_at_edge: list[torch.Tensor] = []
        # When the iterator had been made, until its first batch is asked for.
        self._made: Moment | None = None

    @property
    def length(self) -> int | None:
        """Micro-batches of a whole epoch; None when the loader does not know (an iterable dataset)."""
        return fast_forward.batches_per_epoch(self.loader)

    @property
    def exhausted(self) -> bool:
        """Whether there is no further batch. Without a length that is known only after a `take` that came short."""
        return self.ended or (self.length is not None and self.used >= self.length)

    @property
    def at_edge(self) -> bool:
        """Whether there is an iterator, and all that was taken from it is used."""
        return self.iterator is not None and not self._open

    def note_start(self) -> Moment:
        """The random states of now are those that the iterator is made from."""
        now = Moment.now(generators(self.loader))
        self.start = {"rng": now.rng, "generators": list(now.own)}
        return now

    def note_made(self) -> None:
        """The iterator has been made, and nothing was asked of it."""
        self._made = Moment.now(generators(self.loader))

    def make_anew(self) -> None:
        """Make the iterator of the epoch's start once more."""
        assert self.start is not None
        Moment(rng=self.start["rng"], own=self.start["generators"]).go_back(generators(self.loader))
        self.iterator = iter(self.loader)

    def take(self, count: int) -> list[Any]:
        """The next `count` micro-batches, fewer at the end, none after it; open until `advance` is called.

        Raises:
            ConfigError: there is no iterator.
        """
        if self.iterator is None:
            raise ConfigError("no epoch was begun", hint="call begin() first")
        left = count if self.length is None else min(count, self.length - self.used - self._open)
        if self._made is not None:
            self._note_first(self._made)
        if not self._open:
            self._own_at_edge = generator_states(self.loader)
        taken: list[Any] = []
        while len(taken) < left and not self.ended:
            try:
                taken.append(self._take_one(self.iterator))
                self._open += 1
            except StopIteration:
                self.ended = True
        if not left:
            self.let_end()
        return taken

    def _note_first(self, made: Moment) -> None:
        """Note what the first batch is loaded from, if others have drawn since the iterator was made: `zip` makes all of its iterators first.

        A sampler draws its order when the first batch is asked for.
        """
        self._made = None
        now = Moment.now(generators(self.loader))
        if now == made or self.start is None:
            return
        if self.ahead is not None:
            # It was loaded to be compared, in the order that the sampler drew then.
            self.drop_ahead()
            self.make_anew()
            now.go_back(generators(self.loader))
        self.start = {**self.start, "first": {"rng": now.rng, "generators": list(now.own)}}

    def _take_one(self, iterator: Iterator[Any]) -> Any:
        ahead = self.ahead
        if ahead is None:
            with self.waiting():
                return next(iterator)
        self.drop_ahead()
        return ahead.hand_out()

    def let_end(self) -> None:
        """Once all batches are used, ask the iterator for one more: what it does after its last one is part of the epoch.

        A generator runs what follows its last `yield` then, a sampler may draw from its generator. `take` goes by the length, and would not ask.
        """
        if self.iterator is None or self.ended or self._open or not self.exhausted:
            return
        ahead, self.ended = self.ahead, True
        self.drop_ahead()
        try:
            # Not under `waiting`: the step is done, and nothing is left to be waited for.
            next(self.iterator) if ahead is None else ahead.hand_out()
        except StopIteration:
            return
        _log.warning("the loader has more batches than the %d of its length: those are left out", self.used)

    def advance(self, count: int) -> None:
        """Count `count` micro-batches as used."""
        self.used += count
        self._open = max(0, self._open - count)

    def set_back(self) -> None:
        """Have the loader's generators as they were at the last edge, or at the start of the epoch if that is the edge."""
        if not self.used and self.start is not None:
            # The iterator drew its seed and its order from them.
            set_generators(self.loader, self.start["generators"])
        elif self._open:
            set_generators(self.loader, self._own_at_edge)

    def close(self) -> None:
        """Let go of the iterator, and with it of its worker processes; what was used stays."""
        self.iterator = None
        self.drop_ahead()
        self._open, self.ended, self.end, self._made = 0, False, None, None
        if not self.used:
            self.start = None

    def move_on(self) -> None:
        """To the next epoch."""
        self.previous_ended = self.ended
        self.number += 1
        self.used = 0
        self.close()

    def move_to(self, number: int, used: int, start: Mapping[str, Any]) -> None:
        """To a place in any epoch, whose iterator is not made yet."""
        self.previous_ended = None
        self.number, self.used = number, used
        self.close()
        self.start = start if used else None

    def fetch_ahead(self) -> Ahead:
        """Take the next batch before its time, with what the present edge is."""
        assert self.iterator is not None
        self._edge = self._edge_now()
        loader = self.loader
        self.ahead = Ahead(
            self.iterator,
            generators(loader),
            single=fast_forward.is_map_style(loader) and fast_forward.in_this_process(loader),
            # Not of `self`: a cycle keeps worker processes until garbage is collected, and torch then waits five seconds for each of them.
            repeatable=lambda: hidden_in(loader, generators(loader)) is None,
            waiting=self.waiting,
        )
        return self.ahead

    def drop_ahead(self) -> None:
        """Forget the batch that was fetched ahead, which nobody will get."""
        self.ahead = self._edge = None

    def edge(self) -> Mapping[str, Any]:
        """The states of the present edge, which a batch that was fetched ahead may have changed since.

        Returns:
            "generators": the loader's; "loader", "dataset": what those say of their place themselves, None if nothing that leads back there.
        """
        return self._edge or self._edge_now()

    def _edge_now(self) -> Mapping[str, Any]:
        loader = self.loader
        # Between epochs a DataLoader starts anew, whatever its state says; of others, only they know.
        within = self.at_edge if self.used else not isinstance(loader, DataLoader)
        return {
            "generators": generator_states(loader),
            "loader": fast_forward.loader_state(loader) if within else None,
            "dataset": fast_forward.place_in_dataset(loader, self.iterator) if self.used and self.at_edge else None,
        }
