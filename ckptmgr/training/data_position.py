"""Where in the data a training is, and how to get back there exactly.

A position is an epoch and the number of micro-batches taken from it, with the random states at that epoch's start. Coming back means:
set those states, make the iterator (which draws its seed and the permutation from them, as it did then), take the same micro-batches
again and drop them, and only then set the states of the moment of the save. Dataset code with random augmentation, and worker
processes, thereby end up where they were. Skipping in the sampler alone would be faster and is not exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch

from ckptmgr.core.errors import ConfigError, IncompatibleStateError
from ckptmgr.training.rng import capture_rng, restore_rng

_log = logging.getLogger(__name__)


def end_workers(iterator: Iterator[Any]) -> None:
    """End the worker processes of a DataLoader's iterator at once, unless they are persistent: then they are the loader's.

    Otherwise torch waits for them, five seconds for each one that hangs. Done by their parent, it is no error.
    """
    if not getattr(iterator, "_persistent_workers", False):
        for worker in getattr(iterator, "_workers", ()):
            with suppress(OSError, ValueError, AttributeError):
                worker.terminate()


class DataPosition:
    """Takes micro-batches from a loader, epoch by epoch, and knows how to come back to any step edge.

    Counts are micro-batches, not optimizer steps: another accumulation after a resume goes on at the right sample (K001). Calls `set_epoch` of
    the sampler, batch sampler or dataset where there is one. Generators that the loader or its samplers own are part of the position.

    Exact for loaders whose order depends on those generators and the global random states only. Not exact: random augmentation inside
    *persistent* workers after their first epoch, whose state no other process can see.

    Args:
        loader: a DataLoader, or anything that can be iterated once per epoch.

    Attributes:
        waiting: makes the context in which the next micro-batch is waited for; may be left by an exception at any moment.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self._loader: Any = loader
        self._iterator: Iterator[Any] | None = None
        self._start: Mapping[str, Any] | None = None
        self._generators_to_set: list[torch.Tensor] | None = None
        self._ended = False
        self.epoch = 0
        self.batches = 0

    @property
    def length(self) -> int | None:
        """Micro-batches per epoch; None when the loader does not know (an iterable dataset)."""
        try:
            return len(self._loader)
        except TypeError:
            return None

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further batch. Without a length that is known only after a `take` that came short."""
        return self._ended or (self.length is not None and self.batches >= self.length)

    @property
    def epochs(self) -> float:
        """Epochs gone by, a fraction within one if the length is known."""
        return self.epoch + (self.batches / self.length if self.length else 0.0)

    def warm_up(self) -> None:
        """Start persistent workers, before the random states are set: their first start draws a seed, which later epochs do not draw."""
        if self.epoch and getattr(self._loader, "persistent_workers", False) and self._loader._iterator is None:
            iter(self._loader)

    def begin(self, rng: Mapping[str, Any] | None = None) -> None:
        """Make the iterator of the present epoch, and go back to the present batch in it.

        Args:
            rng: the random states to go on with after a replay (`capture_rng`); None leaves those that the replay ends with.

        Raises:
            IncompatibleStateError: the loader has fewer batches than were taken from it.
        """
        for holder in self._holders():
            if callable(getattr(holder, "set_epoch", None)):
                holder.set_epoch(self.epoch)
        if self._generators_to_set is not None:
            self._set_generators(self._generators_to_set)
            self._generators_to_set = None
        replay = self.batches if self._start is not None else 0
        if replay and self._start is not None:
            self._set_generators(self._start["generators"])
            restore_rng(self._start["rng"])
        self._start = {"rng": capture_rng(), "generators": self._generator_states()}
        self._iterator = iter(self._loader)
        self._ended = False
        if replay:
            self._skip(replay)
            if rng is not None:
                restore_rng(rng)

    def take(self, count: int) -> list[Any]:
        """The next `count` micro-batches, fewer at the end of the epoch, none after it.

        They count only once `advance` is called: a step that was interrupted is done again from its first micro-batch.
        """
        if self._iterator is None:
            raise ConfigError("no epoch was begun", hint="call begin() first")
        left = count if self.length is None else min(count, self.length - self.batches)
        taken: list[Any] = []
        while len(taken) < left and not self._ended:
            try:
                with self.waiting():
                    taken.append(next(self._iterator))
            except StopIteration:
                self._ended = True
        return taken

    def advance(self, count: int) -> None:
        """Count `count` micro-batches as used."""
        self.batches += count

    def end(self) -> None:
        """Take up that the epoch has no further batch, which a loader without a length had shown before a resume."""
        self._ended = True

    def go_back(self) -> None:
        """Go back to where the last `advance` left it, or to the start of the epoch: what was taken since then is taken again.

        Worker processes are ended at once.
        """
        if self._iterator is not None:
            end_workers(self._iterator)
        if not self.batches and self._start is not None:
            # The iterator drew its seed and its order from them.
            self._set_generators(self._start["generators"])
        self.close()

    def finish_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.batches = 0
        self.close()

    def close(self) -> None:
        """Let go of the iterator, and with it of its worker processes; the position stays."""
        self._iterator = None
        self._ended = False
        if not self.batches:
            self._start = None

    def state_dict(self) -> dict[str, Any]:
        """The position at this moment, which must be a step edge."""
        return {
            "epoch": self.epoch,
            "batches": self.batches,
            "length": self.length,
            # At an epoch's start the states of the moment are those of the start: `rng` is in the checkpoint anyway.
            "start": self._start if self.batches else {"rng": None, "generators": self._generator_states()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved position; `begin` goes there."""
        length, saved = self.length, state["length"]
        if saved is not None and length is not None and saved != length:
            _log.warning(
                "the loader has %d batches per epoch, the checkpoint was made with %d: the order of the data is not that of "
                "an uninterrupted run",
                length,
                saved,
            )
        self.close()
        self.epoch = state["epoch"]
        self.batches = state["batches"]
        self._start = state["start"] if self.batches else None
        self._generators_to_set = list(state["start"]["generators"])

    def _skip(self, count: int) -> None:
        _log.info(
            "replaying %d micro-batches of epoch %d to get back to where the checkpoint was made", count, self.epoch
        )
        assert self._iterator is not None
        for done in range(count):
            try:
                with self.waiting():
                    next(self._iterator)
            except StopIteration:
                raise IncompatibleStateError(
                    f"the loader ended after {done} batches, the checkpoint was made after {count} batches of epoch {self.epoch}",
                    hint="resume with the dataset and batch size of the checkpoint",
                    piece="data",
                ) from None

    def _holders(self) -> list[Any]:
        """The loader and everything in it that may own a generator or want the epoch's number."""
        batch_sampler = getattr(self._loader, "batch_sampler", None)
        found = [
            self._loader,
            getattr(self._loader, "sampler", None),
            batch_sampler,
            getattr(batch_sampler, "sampler", None),
            getattr(self._loader, "dataset", None),
        ]
        return list({id(holder): holder for holder in found if holder is not None}.values())

    def _generators(self) -> list[torch.Generator]:
        found = [getattr(holder, "generator", None) for holder in self._holders()]
        return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        generators = self._generators()
        if len(generators) != len(states):
            raise IncompatibleStateError(
                f"the loader has {len(generators)} generators of its own, the checkpoint was made with {len(states)}",
                hint="build the loader as it was when the checkpoint was made",
                piece="data",
            )
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
