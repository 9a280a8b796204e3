"""What is said of a loader's data without asking it for a sample."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
)

from ckptmgr.training.dataset_facts import dataset_facts, fingerprint


class Untouchable(Dataset[torch.Tensor]):
    """Its length may be known; reading it is a side effect."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        raise AssertionError("the dataset was read")


class Endless(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        raise AssertionError("the dataset was read")


def rows(count: int = 100) -> torch.Tensor:
    return torch.arange(count * 3, dtype=torch.float32).reshape(count, 3)


def test_batch_size_and_length_are_those_of_the_loader() -> None:
    facts = dataset_facts(DataLoader(Untouchable(), batch_size=4))
    assert (facts.batch_size, facts.dataset_length, facts.dataset_fingerprint) == (4, 12, None)


def test_a_batch_sampler_tells_its_size() -> None:
    loader = DataLoader(Untouchable(), batch_sampler=BatchSampler(SequentialSampler(range(12)), 5, False))
    assert dataset_facts(loader).batch_size == 5


@pytest.mark.parametrize("loader", [[1, 2, 3], iter([]), DataLoader(Endless(), batch_size=None)])
def test_what_is_not_known_is_none(loader: Any) -> None:
    facts = dataset_facts(loader)
    assert facts.dataset_length is None
    assert facts.dataset_fingerprint is None
    assert facts.batch_size is None


def test_a_fingerprint_of_the_datasets_library_is_taken_as_it_is() -> None:
    assert fingerprint(SimpleNamespace(_fingerprint="1f3a")) == "1f3a"


def test_tensors_in_memory_have_a_fingerprint_that_tells_them_apart() -> None:
    """Equal content, equal fingerprint, in whatever object; another length, value or type, another one."""
    assert fingerprint(TensorDataset(rows())) == fingerprint(TensorDataset(rows().clone()))
    changed = rows()
    changed[0, 0] = 7
    others = [
        TensorDataset(rows()),
        TensorDataset(rows(99)),
        TensorDataset(changed),
        TensorDataset(rows().double()),
        TensorDataset(rows(), rows()),
        Subset(TensorDataset(rows()), range(50)),
        Subset(TensorDataset(rows()), range(50, 100)),
        list(rows()),
        [(row, 1) for row in rows()],
    ]
    found = [fingerprint(each) for each in others]
    assert all(each is not None and len(each) == 32 for each in found)
    assert len(set(found)) == len(others)


@pytest.mark.parametrize("dataset", [Subset(Untouchable(), range(3)), [object()], [1, 2], TensorDataset()])
def test_others_have_none(dataset: Any) -> None:
    assert fingerprint(dataset) is None
