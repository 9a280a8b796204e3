"""Where in the data a training is, and how to get back there exactly.

A position is an epoch and the number of its micro-batches that were used. That alone brings back no batch: which samples are in it depends on
random states. So these are saved with it (`position_document`): those that the epoch's iterator was made from, and those of the place.

Coming back (`ComingBack`) means: set the states of the epoch's start, make the iterator (which draws its seed and the permutation from them, as it
did then), get to the place, and only then set the states of the moment of the save. There are four ways to the place, the first that is exact is taken:

    loader    the loader has a state of its own (torchdata's StatefulDataLoader): it is the position
    dataset   an iterable dataset, iterated in this process, has one (`state_dict`, `load_state_dict`)
    indices   a map-style dataset, loaded in this process, whose samples depend on nothing but their index and the random generators: the
              sampler is asked for the indices that were used, the dataset for nothing
    replay    take the same micro-batches again and drop them. Random augmentation in worker processes ends up where it was

The digest of the next batch is saved too, and compared with what a resumed run gets first. That batch is fetched ahead (`PresentEpoch`), for a save
and for the comparison; the training gets it when it asks for it, and notices nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any, Literal

from ckptmgr.core.errors import ConfigError
from ckptmgr.training.coming_back import ComingBack
from ckptmgr.training.fast_forward import Skip, Way
from ckptmgr.training.position_document import saved_position
from ckptmgr.training.present_epoch import PresentEpoch


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

    `begin`, then `take` and `advance` until `exhausted`, then `finish_epoch`; between two steps `state_dict`. A resumed process calls
    `load_state_dict` before its first `begin`. Not thread-safe.

    Counts are micro-batches, not optimizer steps: another accumulation after a resume goes on at the right sample (K001). Calls `set_epoch` of
    the sampler, batch sampler or dataset where there is one. Generators that the loader or its samplers own are part of the position.

    Exact for loaders whose order depends on those generators and the global random states only. Not exact: random augmentation inside
    *persistent* workers after their first epoch, and inside the workers of a StatefulDataLoader, whose states no other process can see; order
    that a sampler makes up as it goes, from the global generators.

    Args:
        loader: a DataLoader, or anything that can be iterated once per epoch. Of a `ResumableLoader`, the loader within.
        skip: how to come back to the middle of an epoch. "auto": the first way of the module's docstring that is exact. Of `indices`, that cannot
            be proven: nothing is seen in the dataset that would be otherwise, and the first batch is right, or all is replayed after all.
            "indices": never replay, also with workers: you say that samples depend on nothing but their index (and, without workers, the global
            generators). "replay": always replay.
        on_mismatch: what `begin` does when the first batch is not that which the save expected: "log" an error and go on, or "raise".
        proof: whether `state_dict` says what the next batch is. It is loaded for that, and kept.

    Raises:
        ConfigError: `skip` or `on_mismatch` is none of these.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        *,
        skip: Skip = "auto",
        on_mismatch: Literal["log", "raise"] = "log",
        proof: bool = True,
    ) -> None:
        if skip not in ("auto", "indices", "replay"):
            raise ConfigError(f"skip={skip!r} is no way to come back", hint="give 'auto', 'indices' or 'replay'")
        if on_mismatch not in ("log", "raise"):
            raise ConfigError(f"on_mismatch={on_mismatch!r} is unknown", hint="give 'log' or 'raise'")
        inner = getattr(loader, "position", None)
        self._epoch: PresentEpoch = PresentEpoch(inner._epoch.loader if isinstance(inner, DataPosition) else loader)
        self._back = ComingBack(self._epoch, skip=skip, raises=on_mismatch == "raise")
        self._proves = proof

    @property
    def epoch(self) -> int:
        """The number of the present epoch, from 0. May be set before `begin`, by a host that counts them itself."""
        return self._epoch.number

    @epoch.setter
    def epoch(self, number: int) -> None:
        self._epoch.number = number

    @property
    def batches(self) -> int:
        """Micro-batches of the present epoch that were used."""
        return self._epoch.used

    @property
    def length(self) -> int | None:
        """Micro-batches per epoch; None when the loader does not know (an iterable dataset)."""
        return self._epoch.length

    @property
    def exhausted(self) -> bool:
        """Whether the epoch has no further batch. Without a length that is known only after a `take` that came short."""
        return self._epoch.exhausted

    @property
    def epochs(self) -> float:
        """Epochs gone by, a fraction within one if the length is known."""
        return self.epoch + (self.batches / self.length if self.length else 0.0)

    @property
    def proof(self) -> str:
        """What the first batch after a resume showed: "equal", "different", or "none: " and why nobody knows. "" before it."""
        return self._back.proof

    @property
    def way(self) -> Way | Literal[""]:
        """How the last `begin` came to its place; "" for an epoch from its start."""
        return self._back.way

    @property
    def waiting(self) -> Callable[[], AbstractContextManager[Any]]:
        """Makes the context in which the next micro-batch is waited for; may be left by an exception at any moment. May be set."""
        return self._epoch.waiting

    @waiting.setter
    def waiting(self, waiting: Callable[[], AbstractContextManager[Any]]) -> None:
        self._epoch.waiting = waiting

    def warm_up(self) -> None:
        """Start persistent workers, before the random states are set: their first start draws a seed, which later epochs do not draw."""
        self._back.warm_up()

    def begin(self, rng: Mapping[str, Any] | None = None) -> None:
        """Make the iterator of the present epoch, and go back to the present batch in it.

        After `load_state_dict` the first batch is loaded as well and compared with what the save expected; `proof` says what came of it.

        Args:
            rng: the random states to go on with after coming back (`capture_rng`); None leaves those that a replay ends with.

        Raises:
            IncompatibleStateError: the loader has fewer batches than were taken from it, another number of generators, or
                (`on_mismatch="raise"`) another first batch.
        """
        self._back.begin(rng)

    def take(self, count: int) -> list[Any]:
        """The next `count` micro-batches, fewer at the end of the epoch, none after it.

        They count only once `advance` is called: a step that was interrupted is done again from its first micro-batch. When there is none left,
        the loader's iterator is let end, as `let_end` does.

        Raises:
            ConfigError: `begin` was not called.
        """
        return self._epoch.take(count)

    def advance(self, count: int) -> None:
        """Count `count` micro-batches as used."""
        self._epoch.advance(count)

    def let_end(self) -> None:
        """Once all batches of the epoch are used, ask the iterator for one more: what it does after its last one is part of the epoch."""
        self._epoch.let_end()

    def end(self) -> None:
        """Take up that the epoch has no further batch, which a loader without a length had shown before a resume."""
        self._epoch.ended = True

    def go_back(self) -> None:
        """Go back to where the last `advance` left it, or to the start of the epoch: what was taken since then is taken again.

        Worker processes are ended at once.
        """
        if self._epoch.iterator is not None:
            end_workers(self._epoch.iterator)
        self._epoch.set_back()
        self.close()

    def finish_epoch(self) -> None:
        """Go to the start of the next epoch, from wherever in this one."""
        self._back.pass_over()
        self._epoch.move_on()

    def close(self) -> None:
        """Let go of the iterator, and with it of its worker processes; the position stays."""
        self._epoch.close()

    def state_dict(self) -> dict[str, Any]:
        """The position at this moment, which must be a step edge; see `position_document`.

        With `proof`, it may wait for the next batch, which the next step would do anyway. A batch that cannot be loaded fails that step, and
        not the save.
        """
        saved = self._back.saved
        return saved_position(self._epoch, proof=self._proves) if saved is None else dict(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a saved position; `begin` goes there. An epoch that is under way ends."""
        self._back.take_up(state)
