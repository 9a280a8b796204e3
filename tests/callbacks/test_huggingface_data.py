"""What is watched in the loader of Hugging Face's Trainer, with plain DataLoaders; `tests/hosts` has the real Trainer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from ckptmgr.callbacks import huggingface
from ckptmgr.callbacks.huggingface_data import TrainingData, of_all_ranks, of_this_rank
from ckptmgr.callbacks.huggingface_loader import ANEW, LoaderWatch
from ckptmgr.callbacks.huggingface_rng import CpuRng

ROWS, BATCH = 8, 2


class Stream(IterableDataset[torch.Tensor]):
    """Numbers from 0, with a state; counts what it yields."""

    def __init__(self, *, fails: bool = False) -> None:
        self.at = self.start = 0
        self.fails = fails
        self.yielded: list[int] = []

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.at, self.start = self.start, 0
        while self.at < ROWS:
            self.at += 1
            self.yielded.append(self.at - 1)
            yield torch.tensor(self.at - 1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.fails and state["at"]:
            raise RuntimeError("another version's")
        self.start = state["at"]


def numbers(batches: Iterator[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def skipping(loader: DataLoader[Any], count: int) -> DataLoader[Any]:
    """As accelerate's `skip_first_batches`: another loader of some of its parts."""

    class Skip(BatchSampler):
        def __init__(self) -> None: ...

        def __iter__(self) -> Iterator[list[int]]:
            return islice(iter(loader.batch_sampler), count, None)  # type: ignore[arg-type, unused-ignore]

    return DataLoader(loader.dataset, batch_sampler=Skip(), collate_fn=loader.collate_fn)


def draw() -> list[float]:
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


class TestRandomStates:
    @pytest.mark.parametrize("gauss", [False, True])
    def test_come_back_from_json(self, gauss: bool) -> None:
        """Python's, NumPy's and torch's, with the second Gaussian that the first two keep in hand."""
        if gauss:
            random.gauss(0, 1)
            np.random.standard_normal()
        states = CpuRng.now()
        document = json.loads(json.dumps(states.as_document()))
        drawn = [*draw(), random.gauss(0, 1), float(np.random.standard_normal())]
        CpuRng.of_document(document).go_back()
        assert [*draw(), random.gauss(0, 1), float(np.random.standard_normal())] == drawn
        assert CpuRng.of_document(document) == states
        assert CpuRng.now() != states

    @pytest.mark.parametrize("document", [{}, {"python": 3, "cpu": ""}, {"python": [3, "AAAA", None]}])
    def test_that_are_none(self, document: dict[str, Any]) -> None:
        """Found out before anything is set."""
        before = CpuRng.now()
        with pytest.raises((ValueError, KeyError, TypeError)):
            CpuRng.of_document(document)
        assert CpuRng.now() == before


class TestWatch:
    def loader(self, **options: Any) -> DataLoader[Any]:
        return DataLoader(torch.arange(ROWS), batch_size=BATCH, **options)  # type: ignore[arg-type]

    def test_the_loader_yields_what_it_did(self) -> None:
        """Order, content, and the random numbers that are drawn for it."""

        def run(*, watched: bool) -> tuple[list[list[int]], list[float]]:
            torch.manual_seed(3)
            random.seed(3)
            np.random.seed(3)
            loader = self.loader(shuffle=True)
            if watched:
                LoaderWatch(loader)
            assert len(loader) == 4
            return numbers(iter(loader)), draw()

        assert run(watched=True) == run(watched=False)

    def test_it_is_taken_off_again(self) -> None:
        loader = self.loader()
        sampler, collate = loader.batch_sampler, loader.collate_fn
        # The second one over the first, which ended without a word.
        LoaderWatch(loader)
        watch = LoaderWatch(loader)
        assert loader.batch_sampler is not sampler
        watch.remove()
        assert loader.batch_sampler is sampler
        assert loader.collate_fn is collate

    def test_the_next_batch_is_known_until_it_is_used(self) -> None:
        loader = self.loader()
        watch = LoaderWatch(loader)
        iterator = iter(loader)
        assert watch.next_batch() == {"why": "the loader has not loaded it yet"}
        next(iterator)
        first = watch.next_batch()
        assert first.keys() == {"samples", "content"}
        next(iterator)
        assert watch.next_batch() == first
        watch.use()
        second = watch.next_batch()
        assert second["content"] != first["content"]
        assert second["samples"] != first["samples"]

    def test_a_batch_without_a_digest(self) -> None:
        loader = self.loader(collate_fn=lambda samples: object())
        watch = LoaderWatch(loader)
        next(iter(loader))
        assert watch.next_batch().keys() == {"samples"}

    def test_an_end_before_the_first_batch(self) -> None:
        loader = self.loader()
        watch = LoaderWatch(loader)
        assert watch.end_early()
        assert numbers(iter(loader)) == []

    @pytest.mark.parametrize("loader", [[1, 2], object(), DataLoader(Stream(), batch_size=None)])
    def test_a_loader_of_another_kind_is_left_alone(self, loader: Any) -> None:
        """Nothing is known, nothing fails."""
        watch = LoaderWatch(loader)
        assert watch.next_batch() == {"why": "the loader is not one that can be watched"}
        assert not watch.end_early()
        watch.use()
        watch.remove()

    def test_what_fails_in_the_watch_fails_no_training(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It runs within the loader, whose exceptions end a training."""
        loader = self.loader()
        watch = LoaderWatch(loader)
        monkeypatch.setattr(CpuRng, "now", lambda: 1 / 0)
        assert numbers(iter(loader)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert "cannot be watched" in caplog.text
        assert "division by zero" in watch.next_batch()["why"]


class TestStream:
    """An iterable dataset, gone on with after 2 of 4 batches; the Trainer drops the first 2 that it gets."""

    def run(self, stream: Stream, **start: Any) -> list[list[int]]:
        loader = DataLoader(stream, batch_size=BATCH)
        watch = LoaderWatch(loader)
        watch.begin_epoch(2, **start)
        return numbers(iter(loader))[2:]

    def test_with_its_state_it_is_not_run_through(self) -> None:
        stream = Stream()
        assert self.run(stream, state={"at": 4}) == [[4, 5], [6, 7]]
        assert stream.yielded == [4, 5, 6, 7]

    def test_without_it_is(self) -> None:
        stream = Stream()
        assert self.run(stream) == [[4, 5], [6, 7]]
        assert stream.yielded == list(range(8))

    def test_a_last_batch_that_is_not_full(self) -> None:
        assert self.run(Stream(), state={"at": 7}) == [[7]]

    def test_anew(self) -> None:
        """The checkpoint was made at its end."""
        assert self.run(Stream(), state=ANEW) == [[0, 1], [2, 3], [4, 5], [6, 7]]

    @pytest.mark.parametrize("state", [{"at": ROWS}, {"other": 1}])
    def test_a_state_that_leads_nowhere(self, state: dict[str, int], caplog: pytest.LogCaptureFixture) -> None:
        """Nothing comes after it, or the dataset refuses it: run through from the start, as without it."""
        assert self.run(Stream(), state=state) == [[4, 5], [6, 7]]
        assert ("does not take the state" in caplog.text) == ("other" in state)

    def test_a_dataset_that_refuses_it(self) -> None:
        assert self.run(Stream(fails=True), state={"at": 4}) == [[4, 5], [6, 7]]

    def test_the_batches_that_are_dropped_are_made_once(self) -> None:
        """However many they are: a collator may be slow, and draw."""
        made: list[Any] = []

        def collate(samples: list[torch.Tensor]) -> torch.Tensor:
            made.append(random.random())
            return torch.stack(samples)

        loader = DataLoader(Stream(), batch_size=BATCH, collate_fn=collate)
        watch = LoaderWatch(loader)
        watch.begin_epoch(50, state={"at": 4})
        batches = numbers(iter(loader))
        assert batches[50:] == [[4, 5], [6, 7]]
        assert len(batches) == 52
        assert len(made) == 3
        # The batch that is used draws what it would have drawn without those before it.
        assert made[1] == made[0]

    def test_the_state_before_the_batch_in_hand_is_what_is_saved(self) -> None:
        """The loader is ahead of the training."""
        loader = DataLoader(Stream(), batch_size=BATCH)
        watch = LoaderWatch(loader)
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        assert watch.dataset_state() == {"at": 0}
        watch.use()
        assert watch.dataset_state() == {"at": 2}


def arguments(**options: Any) -> SimpleNamespace:
    return SimpleNamespace(gradient_accumulation_steps=1, max_steps=-1, **options)


class TestPlace:
    def saved(self, used: int) -> tuple[dict[str, Any], list[list[int]]]:
        """What is saved after `used` micro-batches, one of them in hand as with accelerate, and the epoch's rest."""
        torch.manual_seed(1)
        loader: DataLoader[Any] = DataLoader(range(ROWS), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
        data = TrainingData(loader, arguments(), step=0, saved=None)
        data.epoch_begins()
        iterator = iter(loader)
        taken = [next(iterator) for _ in range(min(used + 1, 4))]
        for _ in range(used):
            data.step_begins()
            data.batch_used()
        document = json.loads(json.dumps(data.as_document(used, at_edge=True)))
        return document, numbers(iter([*taken[used:], *iterator]))

    def resumed(self, document: Any, step: int, **options: Any) -> tuple[TrainingData, list[list[int]]]:
        """As the Trainer does: its own seed, an index sampler that skips, the random states of the save set at the end."""
        torch.manual_seed(99)
        loader: DataLoader[Any] = DataLoader(range(ROWS), batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]
        data = TrainingData(loader, arguments(**options), step=step, saved=document)
        data.epoch_begins()
        batches = numbers(iter(skipping(loader, step % 4)))
        data.step_begins()
        return data, batches

    def test_the_order_comes_back(self) -> None:
        document, rest = self.saved(1)
        data, found = self.resumed(document, 1)
        assert found == rest
        assert data.proof == "equal"

    def test_at_the_end_of_an_epoch(self) -> None:
        document, _ = self.saved(4)
        assert document["next"] == {"why": "the epoch ended"}
        data, found = self.resumed(document, 4)
        assert len(found) == 4
        assert data.proof == "none: the epoch ended with the checkpoint"

    def test_another_place(self) -> None:
        """The Trainer's arithmetic leads elsewhere."""
        document, _ = self.saved(1)
        document["batches"] = 2
        data, _ = self.resumed(document, 1)
        assert "made after micro-batch 2 of epoch 0, and the Trainer goes on after micro-batch 1" in data.notes[0]

    def test_ignore_data_skip(self) -> None:
        document, _ = self.saved(1)
        data, _ = self.resumed(document, 1, ignore_data_skip=True)
        assert data.proof.startswith("none: ignore_data_skip")
        assert "ignore_data_skip" in data.notes[0]

    @pytest.mark.parametrize("document", [None, {}, {"version": 99}, {"version": 1, "step": 3}])
    def test_a_checkpoint_that_does_not_say(self, document: Any) -> None:
        """Of another version, of none of ours, or saved when nobody expected it."""
        data, found = self.resumed(document, 1)
        assert len(found) == 3
        assert data.proof == "none: the checkpoint does not tell the batch after it"

    def test_states_that_cannot_be_read(self, caplog: pytest.LogCaptureFixture) -> None:
        """Training goes on as it would without them."""
        document, _ = self.saved(1)
        document["epoch_rng"] = {"python": "?"}
        data, found = self.resumed(document, 1)
        assert len(found) == 3
        assert "the epoch_rng of the checkpoint cannot be read" in caplog.text
        assert data.proof == "different"


class TestEnding:
    def state(self, **ending: Any) -> SimpleNamespace:
        known = {"step": 6, "max_steps": 12, "interrupted": False, **ending}
        return SimpleNamespace(
            global_step=6,
            stateful_callbacks={
                "TrainerControl": {"args": {"should_training_stop": True}},
                "ckptmgr": {"args": {}, "attributes": {"ending": known}},
            },
        )

    def test_by_a_callback(self) -> None:
        assert huggingface.stopped_by(self.state()) == "a callback"

    def test_by_early_stopping(self) -> None:
        state = self.state()
        saved = {
            "args": {"early_stopping_patience": 2},
            "attributes": {"early_stopping_patience_counter": 2},
        }
        state.stateful_callbacks["EarlyStoppingCallback"] = [saved]
        assert huggingface.stopped_by(state) == "EarlyStoppingCallback"

    @pytest.mark.parametrize("ending", [{"interrupted": True}, {"max_steps": 6}, {"step": 5}, {"step": None}])
    def test_by_something_else(self, ending: dict[str, Any]) -> None:
        """A preemption, its last step, or nobody who was asked."""
        assert huggingface.stopped_by(self.state(**ending)) is None

    def test_not_at_all(self) -> None:
        state = self.state()
        state.stateful_callbacks["TrainerControl"]["args"]["should_training_stop"] = False
        assert huggingface.stopped_by(state) is None
        del state.stateful_callbacks["TrainerControl"]
        assert huggingface.stopped_by(state) is None


@pytest.mark.parametrize(
    ("paths", "missing"),
    [
        (["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"], []),
        (["model.safetensors", "trainer_state.json"], ["optimizer", "lr_scheduler", "random states"]),
        (
            [
                "model-00001-of-00002.safetensors",
                "optimizer.bin",
                "scheduler.pt",
                "rng_state_0.pth",
                "trainer_state.json",
            ],
            ["random states"],
        ),
        (["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"], ["trainer state"]),
        (["global_step4/zero_pp_rank_0.pt", "rng_state.pth", "trainer_state.json"], []),
    ],
)
def test_the_parts_of_a_checkpoint(paths: list[str], missing: list[str]) -> None:
    """By the names that the Trainer looks for."""
    parts = huggingface.parts_of(paths, SimpleNamespace(scaler=None))
    assert [name for name, there in parts.items() if not there] == missing
    assert huggingface.parts_of(paths, SimpleNamespace(scaler=object())).keys() - parts.keys() == {"scaler"}


class TestRanks:
    """Each has its own document, and rank 0's file has all of them."""

    DOCUMENTS = (
        {"version": 1, "batches": 2, "next": {"samples": "a"}, "edge_rng": "same", "epoch_own": ["x"]},
        {"version": 1, "batches": 2, "next": {"samples": "b"}, "edge_rng": "same", "load_rng": "mine", "epoch_own": []},
    )

    def told(self, monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> dict[str, Any]:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(world))
        kept: dict[str, Any] = json.loads(json.dumps(of_all_ranks(self.DOCUMENTS)))
        # What all have alike is there once.
        assert kept["ranks"] == [{"next": {"samples": "b"}, "load_rng": "mine", "epoch_own": []}]
        return {name: value for name, value in of_this_rank(kept).items() if name != "ranks"}

    @pytest.mark.parametrize("rank", [0, 1])
    def test_each_gets_its_own(self, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
        assert self.told(monkeypatch, rank, 2) == self.DOCUMENTS[rank]

    @pytest.mark.parametrize(("rank", "world"), [(0, 1), (0, 3), (2, 3)])
    def test_another_number_of_ranks(self, monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
        """Only the place; and the batch that comes next on rank 0."""
        found = self.told(monkeypatch, rank, world)
        assert {"version": 1, "batches": 2}.items() <= found.items()
        assert found.keys() == {"version", "batches", "next"}
        assert found["next"] == (
            {"samples": "a"} if rank == 0 else {"why": "the checkpoint tells the main process's batch"}
        )
