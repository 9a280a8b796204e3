"""Watching the loader of Hugging Face's Trainer from within: what it is about to load, what it has loaded, and with which random numbers.

No event of transformers brings a batch, and on a resume the Trainer builds another loader from parts of the first one (`skip_first_batches` of
accelerate). It keeps the dataset, the batch sampler (of a map-style dataset) and the function that makes a batch of samples; so these are what is
watched. The batch sampler runs in the main process, the others only if the loader has no workers.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import chain, count, cycle, islice
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, IterableDataset

from ckptmgr.callbacks.huggingface_rng import CpuRng
from ckptmgr.training.first_batch import Undigestible, digest

_log = logging.getLogger(__name__)
ANEW: Any = object()
"""In place of an iterable dataset's state: it is to begin anew."""

_F = TypeVar("_F", bound=Callable[..., Any])


def _harmless(method: _F) -> _F:
    """Whatever goes wrong in `method` is logged and ends the watch, not the training (I9): it runs within the loader."""

    @wraps(method)
    def guarded(self: LoaderWatch, *arguments: Any) -> None:
        if self.failure is not None:
            return
        try:
            method(self, *arguments)
        except Exception as error:  # noqa: BLE001 - see above
            self.failure = f"the loader cannot be watched: {error!r}"
            _log.exception("the loader cannot be watched; training goes on")

    return guarded  # type: ignore[return-value]


class LoaderWatch:
    """Numbers the micro-batches of an epoch from 0, and knows each one until it is used.

    Args:
        loader: that of the training, a DataLoader or accelerate's wrapper of one. It yields the same as without the watch.

    Attributes:
        in_process: whether samples are loaded in this process, and not by workers.
        by_samples: whether there is a batch sampler, so that the Trainer skips batches on a resume without loading them.
        failure: why nothing is known; None as long as all is well.
    """

    def __init__(self, loader: Any) -> None:
        base: Any = getattr(loader, "base_dataloader", loader)
        sampler: Any = getattr(base, "batch_sampler", None)
        self._base = base
        self._collate: Any = _inside(getattr(base, "collate_fn", None))
        self._sampler: Any = _inside(sampler)
        self._dataset: Any = _inside(getattr(base, "dataset", None))
        # Else a "sample" of the loader is a list of indices: it does not make batches by itself.
        usual = sampler is not None and not isinstance(getattr(base, "sampler", None), BatchSampler)
        is_iterable = isinstance(self._dataset, IterableDataset)
        self.by_samples = usual and not is_iterable
        self.in_process = usual and getattr(base, "num_workers", None) == 0 and callable(self._collate)
        known = self.by_samples or self.in_process
        self.failure = None if known else "the loader is not one that can be watched"
        # accelerate's dispatcher fails when there is nothing to dispatch.
        self._may_be_empty = known and type(loader).__name__ != "DataLoaderDispatcher"
        self._closed = False
        # DataLoader refuses to have them set, as there might be an iterator that would not hear of it; there is none yet.
        if self.by_samples:
            object.__setattr__(base, "batch_sampler", _WatchedSampler(self._sampler, self))
        elif known:
            object.__setattr__(base, "dataset", _WatchedDataset(self._dataset, base.batch_size, self))
        if self.in_process:
            base.collate_fn = _WatchedCollate(self._collate, self)
        self.begin_epoch(0)

    def begin_epoch(
        self,
        skipped: int,
        *,
        first_rng: CpuRng | None = None,
        second_rng: CpuRng | None = None,
        state: Any = None,
    ) -> None:
        """An epoch is about to be iterated.

        Args:
            skipped: micro-batches that the Trainer will pass over.
            first_rng: the random states to load the first one after those with.
            second_rng: those to load the second one with.
            state: that of an iterable dataset right before the first one, or `ANEW`; with it, nothing is loaded of what is passed over.
        """
        self._skipped = self._used = skipped
        self._loaded_count = skipped if self.by_samples else 0
        self._given = {skipped: first_rng, skipped + 1: second_rng}
        self._samples: dict[int, list[Any]] = {}
        self._rngs: dict[int, CpuRng] = {}
        self._batches: dict[int, Any] = {}
        self._states: dict[int, Any] = {} if state is None or state is ANEW else {skipped: state}
        self._start = state
        self._is_way_back = not (first_rng is None and second_rng is None and state is None)
        self._ended = False
        # The micro-batch that was in hand at the save; -1 if none was. The uninterrupted run had loaded it before, and only the ones after it since.
        self._in_hand = skipped if second_rng is not None else -1
        # Right after what was loaded since the save; None if that is nothing, and in every epoch but that of a resume.
        self.loaded_rng: CpuRng | None = None

    @property
    def used(self) -> int:
        """How many micro-batches of the epoch are behind, passed over or used."""
        return self._used

    def use(self) -> None:
        """The next micro-batch was used."""
        self._used += 1
        for known in (self._samples, self._rngs, self._batches, self._states):
            for number in [number for number in known if number < self._used]:
                del known[number]

    @property
    def is_exhausted(self) -> bool:
        """Whether an iterable dataset has shown that no further micro-batch comes."""
        return self._ended and self._used >= self._loaded_count

    def load_rng(self) -> CpuRng | None:
        """The random states right before the next micro-batch was loaded; None if it was not loaded here yet, or its samples have no numbers."""
        return self._rngs.get(self._used) if self._used in self._batches else None

    def dataset_state(self) -> Any:
        """The state of an iterable dataset that has one right before the next micro-batch was loaded, or is; None if nobody knows."""
        if self._used in self._states:
            return self._states[self._used]
        return None if self.by_samples or self.failure is not None or self._batches else _state_of(self._dataset)

    def next_batch(self) -> dict[str, str]:
        """What the next micro-batch is, as JSON: digests of its `samples`' numbers and of its `content`, or `why` nothing of it is known."""
        if self.failure is not None:
            return {"why": self.failure}
        found: dict[str, str] = {}
        try:
            if self._used in self._samples:
                found["samples"] = digest(self._samples[self._used])
            if self._used in self._batches:
                found["content"] = digest(self._batches[self._used])
        except Undigestible as error:
            return found or {"why": f"it holds {error.what}, which has no digest"}
        return found or {"why": "the loader has not loaded it yet"}

    def end_early(self) -> bool:
        """Have the loader yield nothing from now on; False if this one cannot."""
        self._closed = self._may_be_empty
        return self._closed

    def remove(self) -> None:
        """Watch no longer."""
        if self.by_samples:
            object.__setattr__(self._base, "batch_sampler", self._sampler)
        elif isinstance(getattr(self._base, "dataset", None), _WatchedDataset):
            object.__setattr__(self._base, "dataset", self._dataset)
        if self.in_process:
            self._base.collate_fn = self._collate

    # --- told by the loader -----------------------------------------------------------------------------------------------

    @_harmless
    def asked_for(self, number: int, samples: Any) -> None:
        """The samples of micro-batch `number` are about to be loaded, or to be passed over; None: those of an iterable dataset, without numbers."""
        if number < self._skipped:
            return
        if samples is not None:
            self._samples[number] = list(samples)
        else:
            state = _state_of(self._dataset)
            if state is not None:
                self._states.setdefault(number, state)
        if self.in_process:
            given = self._given.pop(number, None)
            if given is not None:
                given.go_back()
            self._rngs[number] = CpuRng.now()

    @_harmless
    def loaded(self, batch: Any) -> None:
        """The next micro-batch was loaded in this process."""
        number = self._loaded_count
        self._loaded_count += 1
        if number >= self._used:
            self._batches[number] = batch
            if self._is_way_back and number != self._in_hand:
                self.loaded_rng = CpuRng.now()

    @_harmless
    def no_more(self) -> None:
        """An iterable dataset has come to its end."""
        self._ended = True
        if self._is_way_back and self._loaded_count > self._in_hand:
            self.loaded_rng = CpuRng.now()

    def take_start(self) -> tuple[int, Any]:
        """How many micro-batches an iterable dataset is to pass over without loading them, and its state after them; (0, None) if none. Once."""
        start, self._start = self._start, None
        return (0, None) if start is None else (self._skipped, start)

    def is_passed_over(self) -> bool:
        """Whether the micro-batch that is made now is one that the Trainer drops."""
        return self._loaded_count < self._skipped

    @property
    def is_closed(self) -> bool:
        """Whether the loader is to yield nothing."""
        return self._closed


class _WatchedSampler(BatchSampler):
    """A batch sampler that tells of each batch; in everything else it is the one inside."""

    def __init__(self, inner: Any, watch: LoaderWatch) -> None:
        # Not that of BatchSampler: its attributes would hide those of `inner`.
        self.inner = inner
        self._watch = watch

    def __iter__(self) -> Iterator[list[Any]]:
        if self._watch.is_closed:
            return
        for number, samples in enumerate(self.inner):
            self._watch.asked_for(number, samples)
            yield samples

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class _WatchedDataset(IterableDataset[Any]):
    """An iterable dataset that tells of each batch of samples; in everything else it is the one inside."""

    def __init__(self, inner: Any, batch_size: int, watch: LoaderWatch) -> None:
        self.inner = inner
        self._batch_size = batch_size
        self._watch = watch

    def __iter__(self) -> Iterator[Any]:
        if self._watch.is_closed:
            return
        passed, source = self._go_on(*self._watch.take_start())
        if passed:
            first = list(islice(source, self._batch_size))
            loaded = CpuRng.now()
            # The Trainer drops as many batches as were used: it gets full ones of the first samples after them.
            yield from islice(cycle(first), passed * self._batch_size)
            loaded.go_back()
            yield from first
            if len(first) < self._batch_size:
                self._watch.no_more()
                return
            passed += 1
        for number in count(passed):
            self._watch.asked_for(number, None)
            left = self._batch_size
            for sample in islice(source, self._batch_size):
                left -= 1
                yield sample
            if left:
                self._watch.no_more()
                return

    def _go_on(self, passed: int, state: Any) -> tuple[int, Iterator[Any]]:
        """The dataset's iterator, from `state` on; and `passed`, or 0 if it has to be run through from its start after all."""
        if state is None or state is ANEW:
            return 0 if state is None else passed, iter(self.inner)
        start = _state_of(self.inner)
        try:
            self.inner.load_state_dict(state)
            source = iter(self.inner)
            self._watch.asked_for(passed, None)
            first = next(source, None)
            if first is not None:
                return passed, chain([first], source)
        except Exception:  # noqa: BLE001 - the user's code
            _log.exception("the dataset does not take the state of the checkpoint, and is run through from its start")
        # Or nothing comes after the checkpoint: the Trainer has to find that out by itself.
        self.inner.load_state_dict(start)
        return 0, iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.inner, name)


class _WatchedCollate:
    """A function from samples to a batch that tells of each batch."""

    def __init__(self, inner: Callable[[Any], Any], watch: LoaderWatch) -> None:
        self.inner = inner
        self._watch = watch
        self._again: tuple[Any, Any] | None = None

    def __call__(self, samples: Any) -> Any:
        batch = self._made(samples)
        self._watch.loaded(batch)
        return batch

    def _made(self, samples: list[Any]) -> Any:
        """The batch of `samples`; of those that come again and again, to be dropped, made once."""
        if not self._watch.is_passed_over():
            self._again = None
            return self.inner(samples)
        again = self._again
        if again is None or len(samples) != len(again[0]) or not all(map(operator.is_, samples, again[0])):
            self._again = again = (samples, self.inner(samples))
        return again[1]


def _inside(part: Any) -> Any:
    """What is watched, if `part` is a watch of an earlier training that ended without a word."""
    return part.inner if isinstance(part, (_WatchedSampler, _WatchedDataset, _WatchedCollate)) else part


def _state_of(dataset: Any) -> Any:
    has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return dataset.state_dict() if has_state else None
