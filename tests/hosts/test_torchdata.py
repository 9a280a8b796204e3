"""torchdata's StatefulDataLoader in a loop of one's own: its state is the position, and what it does not restore is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from ckptmgr.training import state as training_state
from ckptmgr.training.loader import ResumableLoader

# torch deprecated what torchdata's newest release calls.
pytestmark = pytest.mark.filterwarnings("ignore")
EPOCHS = 3


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """Not here: this host is torchdata."""
    pytest.importorskip(
        "torchdata", reason="torchdata is not installed; CI runs these tests in an environment of their own"
    )


class Noisy(Dataset[torch.Tensor]):
    """Rows with random augmentation."""

    def __init__(self) -> None:
        self.seen = 0

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen += 1
        return torch.tensor([float(index), torch.rand(()).item()])


class Plain(Noisy):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[torch.Tensor]):
    """Knows its position; with workers, each has its part."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        while self.position * step + first < 23:
            self.position += 1
            yield torch.tensor([float((self.position - 1) * step + first)])
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


def train(
    dataset: Any, place: Path, workers: int, *, save_after: int = 0, resume: bool = False, **options: Any
) -> tuple[list[Any], ResumableLoader]:
    """All epochs, or what is left of them, with dropout's numbers between the batches."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found, unused-ignore]

    torch.manual_seed(99 if resume else 0)
    shuffle = {} if isinstance(dataset, IterableDataset) else {"shuffle": True}
    loader = ResumableLoader(StatefulDataLoader(dataset, 4, num_workers=workers, **shuffle), **options)
    if resume:
        training_state.restore(place, {"data": loader})
    facts = []
    for epoch in range(loader.epoch, EPOCHS):
        for batch in loader:
            facts.append((epoch, batch.tolist(), torch.rand(()).item()))
            if len(facts) == save_after:
                training_state.write(training_state.capture({"data": loader}), place)
    return facts, loader


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("after", [2, 6, 9])
@pytest.mark.parametrize("kind", [Noisy, Plain, Stream])
def test_it_goes_on_as_if_never_interrupted(tmp_path: Path, kind: type[Any], after: int, workers: int) -> None:
    """Mid-epoch, in the last batch of an epoch, in the next epoch; with workers where the samples draw nothing, see below."""
    if workers and kind is Noisy:
        pytest.skip("what workers draw is replayed only if asked for")
    whole, _ = train(kind(), tmp_path / "none", workers)
    saved, _ = train(kind(), tmp_path / "save", workers, save_after=after)
    assert saved == whole
    resumed, loader = train(kind(), tmp_path / "save", workers, resume=True)
    assert resumed == whole[after:]
    assert loader.proof == ("none: the epoch has no further batch" if after == 6 else "equal")


def test_what_was_used_is_not_loaded_again(tmp_path: Path) -> None:
    train(Noisy(), tmp_path / "save", 0, save_after=16)
    dataset = Noisy()
    resumed, loader = train(dataset, tmp_path / "save", 0, resume=True)
    assert len(resumed) == 2
    assert dataset.seen == 23 - 16
    assert loader.position.way == "loader"


def test_augmentation_in_workers_is_exact_when_replayed(tmp_path: Path) -> None:
    """The loader's own state lacks the random states of its workers: the digest notices it, and replay has them."""
    whole, _ = train(Noisy(), tmp_path / "save", 2, save_after=2)
    _, loader = train(Noisy(), tmp_path / "save", 2, resume=True)
    assert loader.proof == "different"
    resumed, loader = train(Noisy(), tmp_path / "save", 2, resume=True, skip="replay")
    assert resumed == whole[2:]
    assert loader.proof == "equal"
