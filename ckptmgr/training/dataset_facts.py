"""What can be said of a loader's data without reading it: how many samples in a batch, how many in all, and a fingerprint of them.

Nothing here may have a side effect: a dataset's `__getitem__` is other people's code, which may read, decode, draw random numbers or count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, TensorDataset

from ckptmgr.training.first_batch import Undigestible, digest

_LOOKED_AT = 16


class DatasetFacts(NamedTuple):
    """What is known of the data; None is unknown.

    Attributes:
        batch_size: samples per micro-batch.
        dataset_length: samples in the dataset.
        dataset_fingerprint: of its content, as far as that can be told without asking it for samples.
    """

    batch_size: int | None = None
    dataset_length: int | None = None
    dataset_fingerprint: str | None = None


def dataset_facts(loader: Any) -> DatasetFacts:
    """The facts of what `loader` loads: a DataLoader, one of its relatives, or a `ResumableLoader` of them. Draws nothing, reads no sample.

    The fingerprint is that of the `datasets` library where it has one; for tensors in memory a digest of 16 samples spread over them; else None.
    """
    dataset = getattr(loader, "dataset", None)
    if dataset is None:
        return DatasetFacts()
    return DatasetFacts(_batch_size(loader), length_of(dataset), fingerprint(dataset))


def fingerprint(dataset: Any) -> str | None:
    """Of a dataset's content, without asking it for samples; None if it has none."""
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str) and own:
        return own
    try:
        seen = _sample(dataset)
        return None if seen is None else digest(seen)[:32]
    except Undigestible:
        return None


def _batch_size(loader: Any) -> int | None:
    sampler = getattr(loader, "batch_sampler", None)
    for holder in (loader, sampler):
        size = getattr(holder, "batch_size", None)
        if isinstance(size, int) and not isinstance(size, bool):
            return size
    return None


def length_of(sized: Any) -> int | None:
    """The length of a dataset or loader of others; None if it is not known, for whatever reason."""
    try:
        return len(sized)
    except Exception:  # noqa: BLE001 - other people's code: an unknown length may be a TypeError, or anything else
        return None


def _sample(dataset: Any) -> Any:
    """What stands for the whole of `dataset`; None unless it is of tensors in memory, whose reading changes nothing."""
    if type(dataset) is TensorDataset:
        return ["tensors", *(_rows(tensor) for tensor in dataset.tensors)] if dataset.tensors else None
    if type(dataset) is Subset:
        inner = fingerprint(dataset.dataset)
        return None if inner is None else ["subset", inner, len(dataset.indices), _spread(dataset.indices)]
    if isinstance(dataset, torch.Tensor):
        return ["tensor", _rows(dataset)]
    if type(dataset) in (list, tuple):
        found = _spread(dataset)
        return ["list", len(dataset), found] if found and all(map(_is_of_tensors, found)) else None
    return None


def _rows(tensor: torch.Tensor) -> Any:
    return [list(tensor.shape), _spread(tensor) if tensor.ndim else tensor]


def _spread(rows: Sequence[Any] | torch.Tensor) -> list[Any]:
    """At most 16 of `rows`, the first and the last among them."""
    count = len(rows)
    places = range(count) if count <= _LOOKED_AT else [k * (count - 1) // (_LOOKED_AT - 1) for k in range(_LOOKED_AT)]
    return [rows[place] for place in places]


def _is_of_tensors(sample: Any) -> bool:
    parts = sample.values() if type(sample) is dict else sample if type(sample) in (list, tuple) else [sample]
    return all(type(part) in (torch.Tensor, int, float, bool, str) for part in parts) and any(
        type(part) is torch.Tensor for part in parts
    )
