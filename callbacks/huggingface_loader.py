"""Watching the loader of Hugging Face's Trainer from within: what it is about to load, what it has loaded, and with which random numbers.

No event of transformers brings a batch, and on a resume the Trainer builds another loader from parts of the first one (`skip_first_batches` of
accelerate). Two of these parts, the batch sampler and the function that makes a batch of samples, are all that it keeps; so these are what is watched.
Both run in the main process, the second one only if the loader has no workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any, TypeVar

from torch.utils.data import BatchSampler, IterableDataset

from ckptmgr.callbacks.huggingface_rng import CpuRng
from ckptmgr.training.first_batch import Undigestible, digest

_log = logging.getLogger(__name__)
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
        base = getattr(loader, "base_dataloader", loader)
        self._base = base
        sampler: Any = getattr(base, "batch_sampler", None)
        collate: Any = getattr(base, "collate_fn", None)
        # A list of indices for a sample: the loader does not make batches by itself.
        usual = sampler is not None and not isinstance(getattr(base, "sampler", None), BatchSampler)
        self.by_samples = usual and not isinstance(getattr(base, "dataset", None), IterableDataset)
        self.in_process = usual and getattr(base, "num_workers", None) == 0 and callable(collate)
        self.failure = (
            None if usual and (self.by_samples or self.in_process) else "the loader is not one that can be watched"
        )
        self._closed = False
        self._sampler = sampler.inner if isinstance(sampler, _WatchedSampler) else sampler
        self._collate = collate.inner if isinstance(collate, _WatchedCollate) else collate
        if self.by_samples:
            # DataLoader refuses to have it set, as accelerate's loader would not hear of it: there is none yet.
            object.__setattr__(base, "batch_sampler", _WatchedSampler(self._sampler, self))
        if self.in_process and self._collate is not None:
            base.collate_fn = _WatchedCollate(self._collate, self)
        self.begin_epoch(0)

    def begin_epoch(self, skipped: int, *, first_rng: CpuRng | None = None, second_rng: CpuRng | None = None) -> None:
        """An epoch is about to be iterated.

        Args:
            skipped: micro-batches that the Trainer will pass over.
            first_rng: the random states to load the first one after those with.
            second_rng: those to load the second one with.
        """
        self._skipped = self._used = skipped
        self._loaded_count = skipped if self.by_samples else 0
        self._given = {skipped: first_rng, skipped + 1: second_rng}
        self._samples: dict[int, list[Any]] = {}
        self._rngs: dict[int, CpuRng] = {}
        self._batches: dict[int, Any] = {}
        self.loaded_rng: CpuRng | None = None

    @property
    def used(self) -> int:
        """How many micro-batches of the epoch are behind, passed over or used."""
        return self._used

    def use(self) -> None:
        """The next micro-batch was used."""
        self._used += 1
        for known in (self._samples, self._rngs, self._batches):
            for number in [number for number in known if number < self._used]:
                del known[number]

    def load_rng(self) -> CpuRng | None:
        """The random states right before the next micro-batch was loaded; None if it was not loaded here yet, or its samples have no numbers."""
        return self._rngs.get(self._used) if self._used in self._batches else None

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
        self._closed = self.by_samples
        return self._closed

    def remove(self) -> None:
        """Watch no longer."""
        if isinstance(getattr(self._base, "batch_sampler", None), _WatchedSampler):
            object.__setattr__(self._base, "batch_sampler", self._sampler)
        if isinstance(getattr(self._base, "collate_fn", None), _WatchedCollate):
            self._base.collate_fn = self._collate

    # --- told by the loader -----------------------------------------------------------------------------------------------

    @_harmless
    def asked_for(self, number: int, samples: Any) -> None:
        """The samples of micro-batch `number` are about to be loaded, or to be passed over."""
        if number < self._skipped:
            return
        self._samples[number] = list(samples)
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
            self.loaded_rng = CpuRng.now()

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


class _WatchedCollate:
    """A function from samples to a batch that tells of each batch."""

    def __init__(self, inner: Callable[[Any], Any], watch: LoaderWatch) -> None:
        self.inner = inner
        self._watch = watch

    def __call__(self, samples: Any) -> Any:
        batch = self.inner(samples)
        self._watch.loaded(batch)
        return batch
