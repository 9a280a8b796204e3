"""transformers' Trainer, resumed from every position of an epoch: nothing depends on how many batches of it are left."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("offline", "one_thread"),
]

# To pytest, the folders of tests are packages.
hf: Any = importlib.import_module("tests.hosts.hf_trainings")

EPOCHS = 3


def own_loader(*, prepared: bool = False, generator: bool = False) -> Callable[[Any], None]:
    """Have the Trainer use a loader of the user's; one that accelerate did not prepare is not fetched ahead of."""

    def change(trainer: Any) -> None:
        import torch
        from torch.utils.data import DataLoader

        def make() -> Any:
            loader = DataLoader(
                trainer.train_dataset,
                batch_size=hf.BATCH,
                shuffle=True,
                collate_fn=trainer.data_collator,
                generator=torch.Generator().manual_seed(5) if generator else None,
            )
            return trainer.accelerator.prepare(loader) if prepared else loader

        trainer.get_train_dataloader = make

    return change


# Name: what makes the data, arguments, what is changed of the Trainer.
DATA: dict[str, tuple[Callable[[int], Any], dict[str, Any], Callable[[Any], None]]] = {
    "plain": (lambda rows: hf.Rows(rows=rows), {}, lambda trainer: None),
    "augmentation": (lambda rows: hf.Rows(rows=rows, noise=True), {}, lambda trainer: None),
    "workers": (lambda rows: hf.Rows(rows=rows), {"dataloader_num_workers": 2}, lambda trainer: None),
    "order from the main generator": (
        lambda rows: hf.Rows(rows=rows, noise=True),
        {"accelerator_config": {"use_seedable_sampler": False}},
        lambda trainer: None,
    ),
    "grouped by length": (
        lambda rows: hf.Rows(rows=rows, lengths=True),
        {"train_sampling_strategy": "group_by_length"},
        lambda trainer: None,
    ),
    "own loader": (lambda rows: hf.Rows(rows=rows, noise=True), {}, own_loader()),
    "own loader, prepared": (lambda rows: hf.Rows(rows=rows, noise=True), {}, own_loader(prepared=True)),
    "own loader with a generator": (lambda rows: hf.Rows(rows=rows), {}, own_loader(generator=True)),
    "own loader with a generator, prepared": (
        lambda rows: hf.Rows(rows=rows),
        {},
        own_loader(prepared=True, generator=True),
    ),
    "iterable": (lambda rows: hf.make_stream(rows=rows), {}, lambda trainer: None),
    "iterable with state": (
        lambda rows: hf.make_stream(rows=rows, states=True, noise=True),
        {},
        lambda trainer: None,
    ),
    "iterable with state, without length": (
        lambda rows: hf.make_stream(rows=rows, states=True, noise=True, length=False),
        {},
        lambda trainer: None,
    ),
    "iterable without dispatch": (
        lambda rows: hf.make_stream(rows=rows, states=True, noise=True),
        {"accelerator_config": {"dispatch_batches": False}},
        lambda trainer: None,
    ),
}
ROWS = {"full": 16, "a short last batch": 15, "odd": 14}
EVALUATIONS: dict[str, dict[str, Any]] = {
    "no evaluation": {"eval_strategy": "no"},
    "evaluations": {"eval_strategy": "steps", "eval_steps": 2},
}
# Rows, accumulation and evaluation: steps whose last one in an epoch has one, two and three batches, as many as the others or fewer.
SIZES = [
    ("full", 1, "no evaluation"),
    ("full", 3, "evaluations"),
    ("odd", 2, "evaluations"),
    ("odd", 3, "no evaluation"),
    ("a short last batch", 1, "evaluations"),
]
CASES = [(data, *size) for data, size in product(DATA, SIZES)]
USUAL = [
    ("plain", "full", 1, "no evaluation"),
    ("plain", "full", 3, "evaluations"),
    ("augmentation", "odd", 2, "evaluations"),
    ("augmentation", "odd", 3, "no evaluation"),
    ("workers", "odd", 2, "evaluations"),
    ("order from the main generator", "odd", 2, "evaluations"),
    ("own loader", "odd", 2, "evaluations"),
    ("own loader with a generator", "odd", 3, "no evaluation"),
    ("own loader with a generator, prepared", "odd", 3, "no evaluation"),
    ("iterable", "odd", 3, "no evaluation"),
    ("iterable with state", "a short last batch", 1, "evaluations"),
    ("iterable with state, without length", "odd", 2, "evaluations"),
    ("iterable without dispatch", "a short last batch", 1, "evaluations"),
]


def sweep(folder: Path, case: tuple[str, str, int, str], steps: Callable[[int, int], Iterator[int]]) -> None:
    """A training that saves each step, equal to one without anything of ours; resumed from `steps`, each goes on as that one did."""
    data, size, accumulation, evaluations = case
    make, options, change = DATA[data]
    rows = ROWS[size]
    batches = -(-rows // hf.BATCH)
    per_epoch = -(-batches // accumulation)
    last = EPOCHS * per_epoch
    limits = {"max_steps": last, "gradient_accumulation_steps": accumulation}
    trainings = hf.Trainings(folder, {**limits, **EVALUATIONS[evaluations], **options}, lambda: make(rows), change)
    whole = trainings.run(save_every=None, out="whole")
    assert trainings.run(save_every=1).facts == whole.facts
    differing = {}
    # From the last one down: each begins a lineage of its own, in which later steps are none.
    for step in sorted(steps(per_epoch, last), reverse=True):
        resumed = trainings.run(save_every=last + 1, resume=step, out=f"from-{step}")
        try:
            hf.assert_exact(whole, resumed, step + 1, last)
            assert trainings.callback.proof != "different"
        except AssertionError as error:
            differing[step] = str(error)
    assert differing == {}, f"resumed from {list(differing)} of {last} steps, {per_epoch} in an epoch"


def edges(per_epoch: int, last: int) -> Iterator[int]:
    """With two, one and no steps left of the first epoch, and with one left of the second."""
    yield from range(max(per_epoch - 2, 1), per_epoch + 1)
    yield 2 * per_epoch - 1


def all_of_them(per_epoch: int, last: int) -> Iterator[int]:
    yield from range(1, last)


@pytest.mark.parametrize("case", USUAL, ids=lambda case: ", ".join(map(str, case)))
def test_the_edges_of_an_epoch(tmp_path: Path, case: tuple[str, str, int, str]) -> None:
    sweep(tmp_path, case, edges)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
def test_every_position(tmp_path: Path, case: tuple[str, str, int, str]) -> None:
    sweep(tmp_path, case, all_of_them)
