"""A loop of one's own over a `ResumableLoader`: every batch and every random number as in the uninterrupted run, wherever it was saved."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler

from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training import state as training_state
from ckptmgr.training.loader import ResumableLoader
from ckptmgr.training.random_sources import holders, set_epoch

EPOCHS = 3


class Rows(Dataset[torch.Tensor]):
    """Rows with random augmentation from all three global generators; `seen` are the indices that this process was asked for."""

    def __init__(self, size: int = 23, own: torch.Generator | None = None) -> None:
        self.size = size
        self.generator = own
        self.seen: list[int] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(index)
        drawn = [torch.rand((), generator=self.generator).item(), random.random(), np.random.rand()]
        return torch.tensor([float(index), *drawn])


class Hiding(Rows):
    """Augments from a generator that nobody saves."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.source = random.Random(5)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + self.source.random()


class Counting(Rows):
    """Depends on how many samples were asked for before, in a way that nobody sees."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + 100 * len(self.seen)


class Stream(IterableDataset[torch.Tensor]):
    """The same rows one after the other, without a length; `started` counts its iterators."""

    def __init__(self) -> None:
        self.rows = Rows()
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist():
            yield self.rows[index]


class StatefulStream(Stream):
    """Knows its position."""

    def __init__(self) -> None:
        super().__init__()
        self.position = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        order = torch.randperm(23, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        while self.position < 23:
            self.position += 1
            yield self.rows[order[self.position - 1]]
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]


class Rounds(IterableDataset[torch.Tensor]):
    """Counts its passes by what it does after its last row; its state goes on where it was, also after an end."""

    def __init__(self, size: int = 23) -> None:
        self.rows = Rows(size)
        self.at = [0, 0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at[1] < self.rows.size:
            self.at[1] += 1
            yield self.rows[(self.at[1] * 7 + self.at[0] * 3) % self.rows.size]
        self.at = [self.at[0] + 1, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = list(state["at"])


class RoundsOfLength(Rounds):
    def __len__(self) -> int:
        return self.rows.size


class Places(Rounds):
    """Takes its state for the place that the next pass goes on from: after an end, nothing is left there."""

    _from = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        start, self._from = self._from, 0
        for number in range(start, self.rows.size):
            self.at[1] = number + 1
            yield self.rows[number]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._from = self.at[1]


class EpochSampler(Sampler[int]):
    """Orders by the epoch's number alone, as DistributedSampler does."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch)).tolist()


class Wandering(Sampler[int]):
    """Draws each index when it is asked for it."""

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        yield from (int(torch.randint(23, ())) for _ in range(20))


class Foreign:
    """A loader of another make, whose state has all that there is, the epoch too."""

    def __init__(self) -> None:
        self.dataset = Rows()
        self.at = [0, 0]

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.at[1] < 6:
            self.at[1] += 1
            yield self.dataset[self.at[0] * 6 + self.at[1]]
        self.at = [self.at[0] + 1, 0]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.at = list(state["at"])


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def shared() -> DataLoader[torch.Tensor]:
    own = generator()
    return DataLoader(Rows(own=own), 4, sampler=RandomSampler(range(23), generator=own))


def shared_as_it_goes() -> DataLoader[torch.Tensor]:
    own = generator()
    sampler = RandomSampler(range(23), replacement=True, num_samples=90, generator=own)
    return DataLoader(Rows(own=own), 4, sampler=sampler)


MAKERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: DataLoader(Rows(), 4),
    "shuffled": lambda: DataLoader(Rows(), 4, shuffle=True),
    "without the last": lambda: DataLoader(Rows(), 4, shuffle=True, drop_last=True),
    "batch sampler": lambda: DataLoader(Rows(), batch_sampler=BatchSampler(RandomSampler(range(23)), 5, False)),
    "no batches": lambda: DataLoader(Rows(7), batch_size=None, shuffle=True),
    "own generator": lambda: DataLoader(Rows(), 4, shuffle=True, generator=generator()),
    "dataset's generator": lambda: DataLoader(Rows(own=generator()), 4, shuffle=True),
    "shared generator": shared,
    "with replacement": lambda: DataLoader(
        Rows(), 4, sampler=RandomSampler(range(23), replacement=True, num_samples=90, generator=generator())
    ),
    "shared as it goes": shared_as_it_goes,
    "by epoch": lambda: DataLoader(Rows(), 4, sampler=EpochSampler(23)),
    "hidden generator": lambda: DataLoader(Hiding(), 4, shuffle=True),
    "iterable": lambda: DataLoader(Stream(), 4),
    "iterable with state": lambda: DataLoader(StatefulStream(), 4),
    "rounds": lambda: DataLoader(Rounds(), 4),
    "rounds of full batches": lambda: DataLoader(Rounds(24), 4),
    "rounds without the last": lambda: DataLoader(Rounds(), 4, drop_last=True),
    "rounds of a length": lambda: DataLoader(RoundsOfLength(24), 4),
    "rounds one by one": lambda: DataLoader(Rounds(7), batch_size=None),
    "places": lambda: DataLoader(Places(), 4),
    "places, full batches": lambda: DataLoader(Places(24), 4),
    "iterable without the last": lambda: DataLoader(Stream(), 4, drop_last=True),
    "own generator without the last": lambda: DataLoader(
        Rows(), 4, shuffle=True, drop_last=True, generator=generator()
    ),
    "list": lambda: [torch.full((2,), float(i)) for i in range(6)],
    "foreign": Foreign,
    "workers": lambda: DataLoader(Rows(), 4, shuffle=True, num_workers=2),
    "persistent": lambda: DataLoader(Plain(), 4, shuffle=True, num_workers=2, persistent_workers=True),
    "workers, iterable": lambda: DataLoader(Stream(), 4, num_workers=1),
    "a batch ahead": lambda: Ahead(Plain(), 4, shuffle=True),
}
WAYS = {
    "shuffled": "indices",
    "without the last": "indices",
    "batch sampler": "indices",
    "dataset's generator": "indices",
    "shared generator": "replay",
    "shared as it goes": "replay",
    "with replacement": "indices",
    "by epoch": "indices",
    "hidden generator": "replay",
    "iterable": "replay",
    "iterable with state": "dataset",
    "list": "replay",
    "foreign": "loader",
    "workers": "replay",
    "persistent": "replay",
    "a batch ahead": "replay",
}


class Plain(Rows):
    """No augmentation: persistent workers keep their random states from epoch to epoch, where nobody else sees them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Ahead(DataLoader[torch.Tensor]):
    """Has iterators of its own, which know the last batch by having fetched the next one: as Accelerate's loaders do."""

    def __iter__(self) -> Any:
        batches = super().__iter__()
        ready = next(batches)
        for batch in batches:
            yield ready
            ready = batch
        yield ready


@dataclass
class Run:
    """What a loop saw, and what it saved after which batch."""

    facts: list[Any] = field(default_factory=list)
    saves: dict[int, Path] = field(default_factory=dict)
    loader: ResumableLoader | None = None


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Run]:
    """`train(make, save_after=…, resume=directory, seed=…)`: all epochs, or the rest of them, with dropout's random numbers between the batches."""

    def loop(
        make: Callable[[], Any],
        *,
        save_after: tuple[int, ...] = (),
        resume: Path | None = None,
        seed: int = 0,
        stop_after: int | None = None,
        **options: Any,
    ) -> Run:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        run = Run()
        run.loader = loader = ResumableLoader(make(), **options)
        if resume is not None:
            training_state.restore(resume, {"data": loader})
        count = 0
        for epoch in range(loader.epoch, EPOCHS):
            for batch in loader:
                assert loader.epoch == epoch
                count += 1
                # The model's dropout, which draws between the batches.
                run.facts.append((epoch, batch.tolist(), torch.rand(()).item(), random.random(), np.random.rand()))
                if count in save_after:
                    run.saves[count] = tmp_path / f"{len(list(tmp_path.iterdir()))}-{count}"
                    training_state.write(training_state.capture({"data": loader}), run.saves[count])
                if count == stop_after:
                    return run
            # What follows an epoch draws as well.
            run.facts.append(("epoch", torch.rand(()).item()))
            if -epoch - 1 in save_after:
                run.saves[-epoch - 1] = tmp_path / f"{len(list(tmp_path.iterdir()))}-end-{epoch}"
                training_state.write(training_state.capture({"data": loader}), run.saves[-epoch - 1])
        return run

    return loop


def facts_after(whole: Run, batches: int) -> list[Any]:
    """What comes after the `batches`-th batch of a whole run."""
    places = [place for place, fact in enumerate(whole.facts) if fact[0] != "epoch"]
    return whole.facts[places[batches - 1] + 1 :]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", MAKERS)
def test_k018_every_batch_after_a_resume_is_that_of_the_uninterrupted_run(train: Callable[..., Run], kind: str) -> None:
    """K018: mid-epoch, in the last batch of an epoch, in the second epoch; and saving changes nothing."""
    make = MAKERS[kind]
    whole = train(make)
    per_epoch = len([fact for fact in whole.facts if fact[0] == 0])
    assert [fact[0] for fact in whole.facts] == [
        *[0] * per_epoch,
        "epoch",
        *[1] * per_epoch,
        "epoch",
        *[2] * per_epoch,
        "epoch",
    ]
    places = {"workers": [per_epoch + 3], "hidden generator": [2, per_epoch]}.get(kind, [2, per_epoch, per_epoch + 3])
    saved = train(make, save_after=places)
    assert saved.facts == whole.facts
    for place in places:
        resumed = train(make, resume=saved.saves[place], seed=99)
        assert resumed.facts == facts_after(whole, place)
        assert resumed.loader is not None
        assert resumed.loader.proof == ("equal" if place != per_epoch else "none: the epoch has no further batch")


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if not kind.startswith(("workers", "persistent", "hidden"))])
def test_what_is_saved_between_two_epochs_goes_on_with_the_next(train: Callable[..., Run], kind: str) -> None:
    make = MAKERS[kind]
    whole = train(make)
    saved = train(make, save_after=(-2,))
    assert saved.facts == whole.facts
    first = [fact[0] for fact in whole.facts].index(2)
    assert train(make, resume=saved.saves[-2], seed=99).facts == whole.facts[first:]


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if not kind.startswith(("workers", "persistent"))])
@pytest.mark.parametrize("saves", [False, True])
def test_it_gives_what_the_loader_itself_gives(kind: str, *, saves: bool) -> None:
    """Epoch after epoch, with what the loader's iterator does after its last batch; saved or not, and whatever is drawn after a save."""

    def passes(loader: Any, bare: Any) -> list[list[Any]]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        seen: list[list[Any]] = []
        for epoch in range(EPOCHS):
            set_epoch(holders(bare), epoch)
            seen.append([])
            for batch in loader:
                seen[-1].append(batch.tolist())
                if saves and loader is not bare:
                    loader.state_dict()
        return seen

    bare, wrapped = MAKERS[kind](), MAKERS[kind]()
    expected = passes(bare, bare)
    assert all(expected)
    assert passes(ResumableLoader(wrapped), wrapped) == expected


@pytest.mark.parametrize("place", [2, 6, 8, -1])
@pytest.mark.parametrize("kinds", [("shuffled", "own generator"), ("rounds", "shuffled"), ("iterable", "no batches")])
def test_loaders_side_by_side_come_back_together(tmp_path: Path, kinds: tuple[str, str], place: int) -> None:
    """`zip` makes both iterators before it asks for a batch: the first one's order is drawn after the second's iterator was made."""

    def loop(*, seed: int, resume: bool = False) -> list[Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        first, second = (ResumableLoader(MAKERS[kind]()) for kind in kinds)
        state = {"first": first, "second": second}
        if resume:
            training_state.restore(tmp_path / "saved", state)
        facts: list[Any] = []

        def save() -> None:
            training_state.write(training_state.capture(state), tmp_path / "saved")
            saved_at.append(len(facts))

        for epoch in range(first.epoch, EPOCHS):
            for one, other in zip(first, second, strict=False):
                facts.append((one.tolist(), other.tolist(), torch.rand(()).item()))
                if len(facts) == place and not resume:
                    save()
            first.end_epoch()
            second.end_epoch()
            if place == -epoch - 1 and not resume:
                save()
        return facts

    saved_at: list[int] = []
    whole = loop(seed=0)
    assert loop(seed=99, resume=True) == whole[saved_at[0] :]


def test_numbers_drawn_between_a_save_and_the_end_do_not_change_the_next_order() -> None:
    """The sampler draws from its generator once more when it ends, which a save at the last batch has seen."""

    def order(*, save: bool) -> list[list[float]]:
        loader = ResumableLoader(MAKERS["own generator without the last"]())
        for number, _ in enumerate(loader, 1):
            if save and number == len(loader):
                loader.state_dict()
                torch.rand(1)
        return [batch[:, 0].tolist() for batch in loader]

    assert order(save=True) == order(save=False)


def test_a_loader_with_more_batches_than_its_length_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Short(list[int]):
        def __len__(self) -> int:
            return 2

    assert list(ResumableLoader(Short([1, 2, 3]))) == [1, 2]
    assert "more batches than the 2 of its length" in caplog.text


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", WAYS)
def test_the_first_exact_way_is_taken(train: Callable[..., Run], kind: str) -> None:
    """What was used is not loaded again where that is exact; a run that ends in its first epoch shows how it came there."""
    saved = train(MAKERS[kind], save_after=(2,), stop_after=2)
    resumed = train(MAKERS[kind], resume=saved.saves[2], seed=99, stop_after=1)
    assert resumed.loader is not None
    assert resumed.loader.position.way == WAYS[kind]
    if WAYS[kind] in ("indices", "dataset"):
        seen = getattr(resumed.loader.dataset, "seen", None) or resumed.loader.dataset.rows.seen
        assert len(seen) == len(resumed.facts[0][1])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_indices_are_skipped_with_workers_if_told_so(train: Callable[..., Run], tmp_path: Path) -> None:
    for persistent in (False, True):

        def make(persistent: bool = persistent) -> Any:
            return DataLoader(Plain(), 4, shuffle=True, num_workers=2, persistent_workers=persistent)

        whole = train(make)
        saved = train(make, save_after=(9,), stop_after=9)
        resumed = train(make, resume=saved.saves[9], seed=99, skip="indices")
        assert resumed.facts == facts_after(whole, 9)
        assert resumed.loader is not None
        assert resumed.loader.proof == "equal"


def test_replay_can_be_asked_for(train: Callable[..., Run]) -> None:
    whole = train(MAKERS["shuffled"])
    saved = train(MAKERS["shuffled"], save_after=(2,), stop_after=2)
    resumed = train(MAKERS["shuffled"], resume=saved.saves[2], seed=99, skip="replay")
    assert resumed.facts == facts_after(whole, 2)
    assert len(resumed.loader.dataset.seen) == 23 * EPOCHS  # type: ignore[union-attr]


def test_another_first_batch_is_reported_once(train: Callable[..., Run], caplog: pytest.LogCaptureFixture) -> None:
    """The samples count how many there were, which nothing can bring back: training goes on, and the error says so."""

    def make() -> Any:
        return DataLoader(Counting(), 4, shuffle=True)

    saved = train(make, save_after=(8,), stop_after=8)
    resumed = train(make, resume=saved.saves[8], seed=99)
    assert resumed.loader is not None
    assert resumed.loader.proof == "different"
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    with pytest.raises(IncompatibleStateError, match="batch 2 of epoch 1 is not the one"):
        train(make, resume=saved.saves[8], on_mismatch="raise")


def test_numbers_drawn_between_a_save_and_the_next_batch_count(train: Callable[..., Run]) -> None:
    """The batch that was loaded for the save is loaded again with the random numbers that it would have been loaded with."""

    def loop(saving: bool) -> list[Any]:
        torch.manual_seed(0)
        loader = ResumableLoader(MAKERS["shuffled"]())
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch[:, :2].tolist())
            if number == 1:
                if saving:
                    loader.state_dict()
                torch.rand(3)  # a picture is painted after the save
        return seen

    assert loop(saving=True) == loop(saving=False)


def test_a_batch_that_cannot_be_loaded_fails_the_step_and_not_the_save(caplog: pytest.LogCaptureFixture) -> None:
    def batches() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    loader = ResumableLoader(_Batches(batches))
    running = iter(loader)
    assert next(running) == 1
    assert loader.state_dict()["next"] == {"digest": None, "why": "the next batch could not be loaded: OSError"}
    with pytest.raises(OSError, match="the disk is gone"):
        next(running)


def test_what_an_epoch_left_by_break_goes_on_with(train: Callable[..., Run]) -> None:
    """As with the loader itself, the next `for` begins an epoch."""
    loader = ResumableLoader([1, 2, 3])
    for batch in loader:
        if batch == 2:
            break
    assert (loader.epoch, loader.batches) == (0, 2)
    assert list(loader) == [1, 2, 3]
    assert loader.epoch == 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("kind", ["workers", "persistent"])
def test_who_lets_go_of_it_has_no_workers_left(kind: str) -> None:
    """In the middle of an epoch, with a batch ahead for a save: not only when garbage is collected, for then torch waits five seconds for each of them."""
    gc.disable()
    try:
        loader = ResumableLoader(MAKERS[kind]())
        batches = iter(loader)
        next(batches)
        loader.state_dict()
        workers = multiprocessing.active_children()
        assert len(workers) >= 2
        del loader, batches
        assert not any(worker.is_alive() for worker in workers)
    finally:
        gc.enable()


def test_a_checkpoint_of_0_1_is_replayed() -> None:
    loader = ResumableLoader(MAKERS["in order"]())
    next(running := iter(loader))
    old = {key: value for key, value in loader.state_dict().items() if key in ("epoch", "batches", "length", "start")}
    expected = next(running)[:, 0].tolist()
    again = ResumableLoader(MAKERS["in order"]())
    again.load_state_dict(old)
    assert next(iter(again))[:, 0].tolist() == expected
    assert again.position.way == "replay"
    assert again.proof == "none: the checkpoint does not say what comes next"


def test_conditions_are_those_of_the_data() -> None:
    conditions = ResumableLoader(DataLoader(torch.ones(10, 2), 4)).conditions()  # type: ignore[arg-type]
    assert (conditions.batch_size, conditions.dataset_length) == (4, 10)
    assert conditions.dataset_fingerprint is not None


class _Batches:
    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()
