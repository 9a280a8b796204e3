"""Where in the data a training is, and how to get back there exactly.

A position is an epoch and the number of micro-batches taken from it, with the random states at that epoch's start. Coming back means:
set those states, make the iterator (which draws its seed and the permutation from them, as it did then), get to the place, and only then set
the states of the moment of the save. There are four ways to the place, the first that is exact is taken:

    loader    the loader has a state of its own (torchdata's StatefulDataLoader): it is the position
    dataset   an iterable dataset, iterated in this process, has one (`state_dict`, `load_state_dict`)
    indices   a map-style dataset, loaded in this process, whose samples depend on nothing but their index and the random generators: the
              sampler is asked for the indices that were used, the dataset for nothing
    replay    take the same micro-batches again and drop them. Random augmentation in worker processes ends up where it was

The digest of the next batch is saved too, and compared with what a resumed run gets first.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from ckptmgr.core.errors import ConfigError, IncompatibleStateError
from ckptmgr.training import fast_forward, lookahead
from ckptmgr.training.fast_forward import NotExact, Skip, Way, way_back
from ckptmgr.training.lookahead import Ahead
from ckptmgr.training.random_sources import Moment, generators, hidden_in, holders, set_epoch
from ckptmgr.training.rng import capture_rng, restore_rng

_log = logging.getLogger(__name__)
_VERSION = 2


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

    Attributes:
        waiting: makes the context in which the next micro-batch is waited for; may be left by an exception at any moment.
        proof: what the first batch after a resume showed: "equal", "different", or "none: " and why nobody knows. "" before it.
        way: how the last `begin` came to its place; "" for an epoch from its start.
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
        self.waiting: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.proof = ""
        self.way: Way | Literal[""] = ""
        self.epoch = 0
        self.batches = 0
        self._loader: Any = inner._loader if isinstance(inner, DataPosition) else loader
        self._skip: Skip = skip
        self._raises = on_mismatch == "raise"
        self._proves = proof
        self._iterator: Iterator[Any] | None = None
        self._start: Mapping[str, Any] | None = None
        # What was loaded, until the position moves from there.
        self._saved: Mapping[str, Any] | None = None
        self._ahead: Ahead | None = None
        # What is saved of the edge that `_ahead` was taken at.
        self._edge: Mapping[str, Any] | None = None
        # Taken and not advanced over, and the loader's generators before that.
        self._open = 0
        self._own_at_edge: list[torch.Tensor] = []
        self._finished_here = False
        self._ended = False
        # The epoch before this one had gone to its end; and how things are at that of this one, as a save at its last batch told.
        self._ended_before = False
        self._end: Mapping[str, Any] | None = None
        # The state of an end of its iteration that the dataset was given, and has not been iterated since.
        self._dataset_at_end: Mapping[str, Any] | None = None
        # When the epoch's iterator had been made, until its first batch is asked for.
        self._made: Moment | None = None

    @property
    def length(self) -> int | None:
        """Micro-batches per epoch; None when the loader does not know (an iterable dataset)."""
        return fast_forward.batches_per_epoch(self._loader)

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
        if self._saved is not None and self.batches and way_back(self._loader, self._saved, self._skip) == "loader":
            return
        if self.epoch and getattr(self._loader, "persistent_workers", False) and self._loader._iterator is None:
            iter(self._loader)

    def begin(self, rng: Mapping[str, Any] | None = None) -> None:
        """Make the iterator of the present epoch, and go back to the present batch in it.

        After `load_state_dict` the first batch is loaded as well and compared with what the save expected; `proof` says what came of it.

        Args:
            rng: the random states to go on with after coming back (`capture_rng`); None leaves those that a replay ends with.

        Raises:
            IncompatibleStateError: the loader has fewer batches than were taken from it, or (`on_mismatch="raise"`) another first batch.
        """
        set_epoch(holders(self._loader), self.epoch)
        saved, self._saved = self._saved, None
        self._drop_ahead()
        self._open, self._ended, self.way = 0, False, ""
        if saved is not None:
            self._set_generators(saved["start"]["generators"])
        if self._start is not None and self.batches:
            self._come_back(saved, rng)
            return
        self._start = {"rng": capture_rng(), "generators": self._generator_states()}
        if saved is not None and saved.get("loader") is not None and fast_forward.has_state(self._loader):
            self._loader.load_state_dict(saved["loader"])
        self._take_up_end(saved)
        self._iterator = iter(self._loader)
        if self._dataset_at_end is not None:
            self._pass_over_nothing(self._dataset_at_end)
        self._made = Moment.now(self._generators())
        if saved is not None:
            self._conclude(self._prove(saved, Moment(rng=self._start["rng"], own=self._start["generators"])))

    def take(self, count: int) -> list[Any]:
        """The next `count` micro-batches, fewer at the end of the epoch, none after it.

        They count only once `advance` is called: a step that was interrupted is done again from its first micro-batch. When there is none left,
        the loader's iterator is let end, as `let_end` does.
        """
        if self._iterator is None:
            raise ConfigError("no epoch was begun", hint="call begin() first")
        left = count if self.length is None else min(count, self.length - self.batches - self._open)
        if self._made is not None:
            self._note_first(self._made)
        if not self._open:
            self._own_at_edge = self._generator_states()
        taken: list[Any] = []
        while len(taken) < left and not self._ended:
            try:
                taken.append(self._take_one(self._iterator))
                self._open += 1
            except StopIteration:
                self._ended = True
        if not left:
            self.let_end()
        return taken

    def _note_first(self, made: Moment) -> None:
        """Note what the first batch is loaded from, if others have drawn since the iterator was made: `zip` makes all of its iterators first.

        A sampler draws its order when the first batch is asked for.
        """
        self._made = None
        now = Moment.now(self._generators())
        if now == made or self._start is None:
            return
        if self._ahead is not None:
            # It was loaded to be compared, in the order that the sampler drew then.
            self._drop_ahead()
            self._make_anew()
            now.go_back(self._generators())
        self._start = {**self._start, "first": {"rng": now.rng, "generators": list(now.own)}}

    def let_end(self) -> None:
        """Once all batches of the epoch are used, ask the iterator for one more: what it does after its last one is part of the epoch.

        A generator runs what follows its last `yield` then, a sampler may draw from its generator. `take` goes by the length, and would not ask.
        """
        if self._iterator is None or self._ended or self._open or not self.exhausted:
            return
        ahead, self._ended = self._ahead, True
        self._drop_ahead()
        try:
            # Not under `waiting`: the step is done, and nothing is left to be waited for.
            next(self._iterator) if ahead is None else ahead.hand_out()
        except StopIteration:
            return
        _log.warning("the loader has more batches than the %d of its length: those are left out", self.batches)

    def advance(self, count: int) -> None:
        """Count `count` micro-batches as used."""
        self.batches += count
        self._open = max(0, self._open - count)

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
        elif self._open:
            self._set_generators(self._own_at_edge)
        self.close()

    def finish_epoch(self) -> None:
        """Go to the start of the next epoch."""
        if self._saved is not None and self.batches:
            at_edge = self._saved.get("generators")
            self._set_generators(self._saved["start"]["generators"] if at_edge is None else at_edge)
            self._take_up_end(self._saved)
        self._saved = None
        self._ended_before = self._ended
        self.epoch += 1
        self.batches = 0
        self._finished_here = True
        self.close()

    def close(self) -> None:
        """Let go of the iterator, and with it of its worker processes; the position stays."""
        self._iterator = None
        self._drop_ahead()
        self._open, self._ended, self._end, self._made = 0, False, None, None
        if not self.batches and self._saved is None:
            self._start = None

    def state_dict(self) -> dict[str, Any]:
        """The position at this moment, which must be a step edge.

        With `proof`, it may wait for the next batch, which the next step would do anyway. A batch that cannot be loaded fails that step, and
        not the save.
        """
        if self._saved is not None:
            return dict(self._saved)
        following = self._following() if self._proves else lookahead.unknown("it was not asked for")
        end = self._known_end()
        return {
            "version": _VERSION,
            "epoch": self.epoch,
            "batches": self.batches,
            "length": self.length,
            # At an epoch's start the states of the moment are those of the start: `rng` is in the checkpoint anyway.
            "start": self._start if self.batches else {"rng": None, "generators": self._generator_states()},
            **(self._edge or self._edge_now()),
            "end": end,
            "next": following,
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
        start = state["start"]
        self.close()
        self.epoch = state["epoch"]
        self.batches = state["batches"]
        self._start = start if self.batches else None
        self._saved = {**state, "start": {**start, "generators": list(start["generators"])}}
        self._finished_here = self._ended_before = False
        self._dataset_at_end = None
        self.proof, self.way = "", ""

    def _come_back(self, saved: Mapping[str, Any] | None, rng: Mapping[str, Any] | None) -> None:
        """To the present batch of the present epoch, whose start was at `_start`."""
        if (
            saved is not None
            and rng is not None
            and self._skip != "replay"
            and fast_forward.nothing_left(self._loader, saved, self.batches)
        ):
            self._set_generators(saved["generators"])
            self._take_up_end(saved)
            self._end = saved.get("end")
            self._iterator = iter(())
            restore_rng(rng)
            self.proof = f"none: {fast_forward.NO_MORE}"
            return
        way = way_back(self._loader, saved, self._skip) if rng is not None or self._skip == "indices" else "replay"
        try:
            self._go(way, saved, rng)
        except NotExact as why:
            _log.info("%s", why)
            way = "replay"
            self._go(way, saved, rng)
        if saved is None:
            return
        found = self._prove(saved, Moment.now(self._generators()))
        if found == "different" and way == "indices" and self._skip == "auto":
            _log.info("the first batch is not the expected one, its samples depend on more than their index")
            self._go("replay", saved, rng)
            found = self._prove(saved, Moment.now(self._generators()))
        self._conclude(found)

    def _take_up_end(self, saved: Mapping[str, Any] | None) -> None:
        """Have generators and dataset as the end of an epoch, at or after which `saved` was made, had left them."""
        end = (saved or {}).get("end") or {}
        if end.get("generators") is not None:
            self._set_generators(end["generators"])
        if end.get("dataset") is not None and fast_forward.keeps_state(self._loader):
            self._dataset_at_end = end["dataset"]
            self._loader.dataset.load_state_dict(copy.deepcopy(end["dataset"]))

    def _pass_over_nothing(self, state: Mapping[str, Any]) -> None:
        """Make the iterator anew, past an iteration that gives nothing: some datasets take their state of an end for the place to go on from.

        In the uninterrupted run, the iteration that ended there was that one.
        """
        self._dataset_at_end = None
        is_nothing = self._look_ahead().is_end
        self._drop_ahead()
        if not is_nothing:
            self._loader.dataset.load_state_dict(copy.deepcopy(state))
        self._make_anew()

    def _make_anew(self) -> None:
        """Make the iterator of the epoch's start once more."""
        assert self._start is not None
        Moment(rng=self._start["rng"], own=self._start["generators"]).go_back(self._generators())
        self._iterator = iter(self._loader)

    def _known_end(self) -> Mapping[str, Any] | None:
        """What is saved of the end of an epoch that has no further batch, or of the one before this one's start: the states that it led to."""
        loader = self._loader
        if not self.batches:
            state = fast_forward.dataset_state(loader) if self._ended_before else None
            return None if state is None else {"generators": None, "dataset": state}
        if self._end is not None or self._iterator is None or self._open:
            return self._end
        if self._ahead is None and fast_forward.is_at_end(loader, self._iterator, self.batches):
            self._look_ahead()
        at_end = None if self._ahead is None else self._ahead.own_at_end
        return None if at_end is None else {"generators": at_end, "dataset": fast_forward.dataset_state(loader)}

    def _go(self, way: Way, saved: Mapping[str, Any] | None, rng: Mapping[str, Any] | None) -> None:
        """From the start of the epoch, with the states of then, to the present batch; then the states are `rng`."""
        assert self._start is not None
        loader, count = self._loader, self.batches
        verb = "replaying" if way == "replay" else f"skipping (by {way})"
        _log.info(
            "%s %d micro-batches of epoch %d to get back to where the checkpoint was made", verb, count, self.epoch
        )
        self.way = way
        self._drop_ahead()
        self._set_generators(self._start["generators"])
        restore_rng(self._start["rng"])
        at_edge = None if saved is None else saved.get("generators")
        if way == "indices" and not fast_forward.in_this_process(loader):
            self._iterator = fast_forward.iterator_from(loader, count)
        else:
            if saved is not None and way in ("loader", "dataset"):
                (loader if way == "loader" else loader.dataset).load_state_dict(saved[way])
            self._iterator = iter(loader)
            if (first := self._start.get("first")) is not None:
                self._set_generators(first["generators"])
                restore_rng(first["rng"])
            if way == "indices":
                self._check_count(fast_forward.skip_indices(self._iterator, count, checked=self._skip == "auto"))
                if at_edge is not None and self._skip == "auto":
                    fast_forward.check_samplers(loader, at_edge)
            elif way == "replay":
                self._replay(count)
        if at_edge is not None:
            self._set_generators(at_edge)
        if rng is not None:
            restore_rng(rng)

    def _replay(self, count: int) -> None:
        assert self._iterator is not None
        for done in range(count):
            try:
                with self.waiting():
                    next(self._iterator)
            except StopIteration:
                self._check_count(done)

    def _check_count(self, done: int) -> None:
        if done < self.batches:
            raise IncompatibleStateError(
                f"the loader ended after {done} batches, the checkpoint was made after {self.batches} batches of epoch {self.epoch}",
                hint="resume with the dataset and batch size of the checkpoint",
                piece="data",
            )

    def _take_one(self, iterator: Iterator[Any]) -> Any:
        ahead = self._ahead
        if ahead is None:
            with self.waiting():
                return next(iterator)
        self._drop_ahead()
        return ahead.hand_out()

    def _drop_ahead(self) -> None:
        self._ahead = self._edge = None

    def _look_ahead(self) -> Ahead:
        """Take the next batch before its time, with what the present edge is."""
        assert self._iterator is not None
        self._edge = self._edge_now()
        loader = self._loader
        self._ahead = Ahead(
            self._iterator,
            self._generators(),
            single=fast_forward.is_map_style(loader) and fast_forward.in_this_process(loader),
            # Not of `self`: a cycle keeps worker processes until garbage is collected, and torch then waits five seconds for each of them.
            repeatable=lambda: hidden_in(loader, generators(loader)) is None,
            waiting=self.waiting,
        )
        return self._ahead

    def _following(self) -> dict[str, Any]:
        """What is saved about the next batch."""
        loader = self._loader
        if not self.batches:
            if not self._finished_here:
                return lookahead.unknown("there was no training yet")
            why = lookahead.why_not_first(loader) or self._hidden()
            return lookahead.unknown(why) if why else lookahead.first_of_epoch(loader, self.epoch)
        if self._ahead is None:
            if self._iterator is None or self._open:
                return lookahead.unknown("the loader was closed")
            if self.exhausted:
                return lookahead.unknown(fast_forward.NO_MORE)
            if lookahead.is_own_iterator(loader, self._iterator):
                # What is taken from it and never asked for would be lost.
                return lookahead.unknown("the loader is its own iterator")
        ahead = self._ahead or self._look_ahead()
        return lookahead.expected(ahead.digest(), ahead.before)

    def _prove(self, saved: Mapping[str, Any], moment: Moment) -> str:
        """Load the first batch, and compare it with the expected one: what `proof` will be. `moment`: before its loading."""
        expected = saved.get("next")
        why = lookahead.why_not_comparable(expected)
        if why is not None or expected is None or self._iterator is None:
            return f"none: {why}"
        return lookahead.compared(expected, self._look_ahead().digest(), moment)

    def _conclude(self, proof: str) -> None:
        self.proof = proof
        if proof == "equal":
            _log.info("the first batch is the one that the checkpoint expected")
        elif proof != "different":
            _log.info("whether the first batch is the right one is not known: %s", proof.removeprefix("none: "))
        else:
            what = f"batch {self.batches} of epoch {self.epoch} is not the one that the checkpoint expected"
            hint = "resume with the dataset, loader and preprocessing of the checkpoint"
            if self._raises:
                raise IncompatibleStateError(what, hint=hint, piece="data")
            _log.error("%s: the resumed run does not equal an uninterrupted one - %s", what, hint)

    def _edge_now(self) -> dict[str, Any]:
        """What else is saved of this edge."""
        loader, taking = self._loader, self._iterator is not None and not self._open
        # Between epochs a DataLoader starts anew, whatever its state says; of others, only they know.
        within = taking if self.batches else not isinstance(loader, DataLoader)
        return {
            "generators": self._generator_states(),
            "loader": fast_forward.loader_state(loader) if within else None,
            "dataset": fast_forward.place_in_dataset(loader, self._iterator) if self.batches and taking else None,
        }

    def _hidden(self) -> str | None:
        return hidden_in(self._loader, self._generators())

    def _generators(self) -> list[torch.Generator]:
        return generators(self._loader)

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        own = self._generators()
        if len(own) != len(states):
            raise IncompatibleStateError(
                f"the loader has {len(own)} generators of its own, the checkpoint was made with {len(states)}",
                hint="build the loader as it was when the checkpoint was made",
                piece="data",
            )
        for generator, state in zip(own, states, strict=True):
            generator.set_state(state)
