"""Coming back to a place within an epoch without loading what was used already, where that is exact."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ckptmgr.core.errors import ConfigError
from ckptmgr.training.random_sources import generators, hidden_in, holders
from ckptmgr.training.rng import capture_rng, same_rng
from ckptmgr.training.trees import TreeCopier

_log = logging.getLogger(__name__)

Skip: TypeAlias = Literal["auto", "indices", "replay"]
# How to come back: by the loader's own state, by the dataset's, by taking indices from the sampler and no samples, or by loading everything again.
Way: TypeAlias = Literal["loader", "dataset", "indices", "replay"]
# What a save says of the next batch when the loader had no further one.
NO_MORE = "the epoch has no further batch"
# Drawing an iterator of them once more changes nothing but the states of generators.
_PLAIN_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    BatchSampler,
    DistributedSampler,
)


class NotExact(Exception):
    """Indices cannot be taken without the samples of theirs; says why."""


def has_state(value: Any) -> bool:
    """Whether `value` can tell its position and go back to one."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_map_style(loader: Any) -> bool:
    """Whether `loader` is a DataLoader that asks its dataset for samples by index."""
    return _is_torchs(loader) and not isinstance(loader.dataset, IterableDataset)


def in_this_process(loader: Any) -> bool:
    """Whether `loader` is a DataLoader without workers."""
    return _is_torchs(loader) and bool(loader.num_workers == 0)


def _is_torchs(loader: Any) -> bool:
    """Whether its iterators are torch's own. Accelerate's loaders derive from DataLoader and have others, which fetch a batch ahead."""
    return isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__


def samplers_are_plain(loader: Any) -> bool:
    """Whether making one more iterator of its samplers changes nothing but the states of generators."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    found = [loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)]
    return all(each is None or type(each) in _PLAIN_SAMPLERS or isinstance(each, range) for each in found)


def loader_state(loader: Any) -> dict[str, Any] | None:
    """The loader's own state as plain values; None if it has none that can be saved."""
    return _own_state(loader) if has_state(loader) else None


def gives_dataset_state(loader: Any) -> bool:
    """Whether this process iterates an iterable dataset with a state."""
    return in_this_process(loader) and not is_map_style(loader) and has_state(loader.dataset)


def keeps_state(loader: Any) -> bool:
    """Whether `loader` is a DataLoader, of any make, whose iterable dataset is iterated in this process and has a state."""
    return (
        isinstance(loader, DataLoader)
        and loader.num_workers == 0
        and isinstance(loader.dataset, IterableDataset)
        and has_state(loader.dataset)
    )


def place_in_dataset(loader: Any, iterator: Any) -> dict[str, Any] | None:
    """The state of an iterable dataset within its iteration, from which another one goes on; None if it has none, or one that does not bring back the order."""
    # A last batch that came short has ended the dataset's iteration: its state may be that of a new one.
    if not gives_dataset_state(loader) or iterator._dataset_fetcher.ended:
        return None
    return dataset_state(loader)


def dataset_state(loader: Any) -> dict[str, Any] | None:
    """As `place_in_dataset`, of any moment: once the iteration has ended, what the next one begins with."""
    return None if not keeps_state(loader) or _has_shuffle_buffer(loader.dataset) else _own_state(loader.dataset)


def is_at_end(loader: Any, iterator: Any, batches: int) -> bool:
    """Whether a DataLoader's iterator of this process is known to have no further batch, after `batches` of them."""
    if not in_this_process(loader) or getattr(iterator, "_dataset_fetcher", None) is None:
        return False
    if is_map_style(loader):
        return batches_per_epoch(loader) == batches
    return bool(getattr(iterator._dataset_fetcher, "ended", False))


def _own_state(owner: Any) -> dict[str, Any] | None:
    name = type(owner).__name__
    try:
        state = owner.state_dict()
        # A copy: some give the object that they go on changing.
        copied = TreeCopier().copy(state, f"the state of {name}")
    except ConfigError as error:
        _log.warning("%s: a resumed run loads again what was used of the epoch", error)
        return None
    except Exception as error:  # noqa: BLE001 - the state of a loader is other people's code; without it the position is still known
        _log.warning(
            "the state of %s cannot be had (%r): a resumed run loads again what was used of the epoch", name, error
        )
        return None
    return copied if isinstance(copied, dict) else None


def _has_shuffle_buffer(dataset: Any) -> bool:
    """Whether a `datasets.IterableDataset` shuffles through a buffer, which its state does not have.

    Source: https://huggingface.co/docs/datasets/stream#save-a-dataset-checkpoint-and-resume-iteration
    """
    open_, seen = [getattr(dataset, "_ex_iterable", None)], 0
    while open_ and seen < 100:
        part = open_.pop()
        seen += 1
        if "Buffer" in type(part).__name__:
            return True
        inner = [getattr(part, "ex_iterable", None), *(getattr(part, "ex_iterables", None) or ())]
        open_ += [each for each in inner if each is not None]
    return False


def way_back(loader: Any, saved: Mapping[str, Any] | None, skip: Skip) -> Way:
    """How to come back to the middle of an epoch that a position saved; `saved` is None for a place that only this process knows."""
    known = saved or {}
    if skip == "replay":
        return "replay"
    if known.get("loader") is not None and has_state(loader):
        return "loader"
    if known.get("dataset") is not None and gives_dataset_state(loader):
        return "dataset"
    if not is_map_style(loader):
        return "replay"
    if skip == "indices":
        return "indices"
    # Checkpoints of 0.1 do not tell how the generators were.
    exact = known.get("generators") is not None and in_this_process(loader)
    return "indices" if exact and hidden_in(loader, generators(loader)) is None else "replay"


def nothing_left(loader: Any, saved: Mapping[str, Any], batches: int) -> bool:
    """Whether the epoch has no further batch, and what its end led to is known without it: in the samples' own process, or in workers that are gone."""
    if not isinstance(loader, DataLoader) or saved.get("generators") is None:
        return False
    if (saved.get("next") or {}).get("why") != NO_MORE and not (
        saved["length"] == batches == batches_per_epoch(loader)
    ):
        return False
    if loader.num_workers > 0:
        return not loader.persistent_workers
    # Checkpoints made before `end` was saved do not say it.
    known = saved["end"] is not None if "end" in saved else saved.get("dataset") is None
    return known and in_this_process(loader) and hidden_in(loader, generators(loader)) is None


def batches_per_epoch(loader: Any) -> int | None:
    """How many batches `loader` says it has; None if it does not know (an iterable dataset)."""
    try:
        return len(loader)
    except TypeError:
        return None


def check_samplers(loader: Any, at_edge: Sequence[torch.Tensor]) -> None:
    """That the generators of the samplers are as the save saw them, when indices were taken and no samples. A dataset's own may differ.

    Raises:
        NotExact: they are not.
    """
    of_samplers = [getattr(each, "generator", None) for each in holders(loader) if each is not loader.dataset]
    for generator, state in zip(generators(loader), at_edge, strict=True):
        if any(each is generator for each in of_samplers) and not torch.equal(generator.get_state(), state):
            raise NotExact("the samples draw from the sampler's generator, its indices cannot be had without them")


def skip_indices(iterator: Any, count: int, *, checked: bool) -> int:
    """Take `count` batches of indices from the sampler of a DataLoader's iterator of this process, and no samples.

    Returns:
        How many there were.

    Raises:
        NotExact: if `checked`, random numbers were drawn after the first ones: what model and samples draw comes in between, in a training.
    """
    after_first = None
    for done in range(count):
        try:
            iterator._next_index()
        except StopIteration:
            return done
        if checked and after_first is None:
            after_first = capture_rng()
    if after_first is not None and not same_rng(after_first, capture_rng()):
        raise NotExact("the sampler draws random numbers as it goes, its indices cannot be had without the samples")
    return count


def iterator_from(loader: Any, count: int) -> Iterator[Any]:
    """An iterator of a DataLoader whose first `count` batches are not loaded, by worker processes either.

    Draws from the random states what an iterator from the start would draw. The workers' own begin as at the start.
    """
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    whole = getattr(loader, name)
    rest = _Rest(whole, count)
    running = loader._iterator if loader.persistent_workers else None
    # A DataLoader refuses to have it set, and workers fetch ahead as soon as they exist.
    loader.__dict__[name] = rest
    try:
        if running is not None:
            running._index_sampler = rest
        iterator: Any = iter(loader)
    finally:
        loader.__dict__[name] = whole
        if running is not None:
            running._index_sampler = whole
    iterator._index_sampler = whole
    return iterator  # type: ignore[no-any-return]


class _Rest:
    """A sampler without its first batches."""

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler = sampler
        self._count = count

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(iter(self._sampler), self._count, None)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def fetch(iterator: Any, index: Any) -> Any:
    """The batch of `index` from a DataLoader's iterator of this process, as its next one."""
    iterator._next_index = lambda: index  # in place of the method, for this once
    try:
        return next(iterator)
    finally:
        del iterator._next_index
