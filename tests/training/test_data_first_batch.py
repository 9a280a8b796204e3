"""A batch as a digest, and what in a dataset keeps a state between samples."""

from __future__ import annotations

import functools
import itertools
import random
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training.first_batch import Undigestible, digest
from ckptmgr.training.random_sources import generator_states, generators, hidden_source, set_generators

SOURCE = np.random.default_rng(1)


def test_equal_batches_have_equal_digests() -> None:
    """Whatever the strides, the kind of mapping, or the process."""
    rows = torch.arange(6.0).reshape(2, 3)
    one = {"x": rows, "y": [1, "a", None, 2.5, True, b"z"], "n": np.arange(3)}
    other = OrderedDict(x=rows.t().contiguous().t(), y=(1, "a", None, 2.5, True, b"z"), n=np.arange(6)[:3])
    assert digest(one) == digest(other)


def test_different_batches_have_different_digests() -> None:
    """Also those that differ in type, shape or nesting only."""
    batches: list[Any] = [
        torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.bfloat16),
        torch.zeros(4, dtype=torch.int32),
        -torch.zeros(4),
        [torch.zeros(4)],
        [[torch.zeros(4)]],
        {"x": torch.zeros(4)},
        {"y": torch.zeros(4)},
        np.zeros(4, np.float32),
        torch.zeros(0),
        0,
        0.0,
        -0.0,
        False,
        None,
        "",
        b"",
        [],
        {},
        ["ab", "c"],
        ["a", "bc"],
    ]
    assert len({digest(batch) for batch in batches}) == len(batches)


@pytest.mark.parametrize("batch", [object(), [object()], torch.eye(2).to_sparse(), np.array([object()])])
def test_what_has_no_bytes_of_its_own_is_refused(batch: Any) -> None:
    with pytest.raises(Undigestible):
        digest(batch)


def test_a_structure_without_an_end_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(Undigestible):
        digest(endless)


class Holding:
    """A dataset, or a transform of one, that holds `thing`."""

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __getitem__(self, index: int) -> float:
        return random.random() + float(np.random.rand()) + torch.rand(()).item()


class OfGlobal(Holding):
    def __getitem__(self, index: int) -> float:
        return float(SOURCE.random())


def closing_over(thing: Any) -> Any:
    return lambda sample: (sample, thing)


@pytest.mark.parametrize(
    "dataset",
    [
        Holding(random.Random(1)),
        Holding([{"deep": (np.random.default_rng(1),)}]),
        Holding(np.random.RandomState(1)),
        Holding(torch.Generator()),
        Holding(Holding(Holding(itertools.count()))),
        Holding(closing_over(random.Random(1))),
        Holding(functools.partial(print, random.Random(1))),
        Holding(OfGlobal(None).__getitem__),
        OfGlobal(None),
    ],
)
def test_a_hidden_source_is_seen(dataset: Any) -> None:
    assert hidden_source([dataset], ()) is not None


@pytest.mark.parametrize(
    "thing",
    [
        None,
        torch.rand(3),
        list(range(1000)),
        {"a": np.arange(3)},
        random.random,
        np.random.rand,
        torch.default_generator,
    ],
)
def test_the_global_generators_are_not_hidden(thing: Any) -> None:
    assert hidden_source([Holding(thing)], ()) is None


def test_a_known_generator_is_not_hidden() -> None:
    known = torch.Generator()
    assert hidden_source([Holding(known)], [known]) is None


def test_a_generator_within_batch_samplers_of_batch_samplers() -> None:
    """As accelerate has them with several ranks."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    own = torch.Generator()

    class OfARank(BatchSampler):
        def __init__(self, inner: BatchSampler) -> None:
            self.batch_sampler = inner

    rows: Any = list(range(4))
    sampler = OfARank(BatchSampler(RandomSampler(rows, generator=own), 2, drop_last=False))
    assert generators(DataLoader(rows, batch_sampler=OfARank(sampler))) == [own]


def test_the_states_of_another_number_of_generators_are_refused() -> None:
    from torch.utils.data import DataLoader

    rows: Any = list(range(4))
    loader = DataLoader(rows, generator=torch.Generator().manual_seed(1))
    before = generator_states(loader)
    with pytest.raises(
        IncompatibleStateError, match="the loader has 1 generators of its own, the checkpoint was made with 2"
    ):
        set_generators(loader, before * 2)
    assert torch.equal(generator_states(loader)[0], before[0])
