"""The embedded Trainer under preemption: wherever the signal comes, the resumed run equals the uninterrupted one to the last bit."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from ckptmgr.callbacks.base import EVENTS, Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.trainer import Trainer, TrainingArguments, TrainingResult
from ckptmgr.training import state as training_state
from ckptmgr.training.preemption import Preemption


@pytest.fixture(autouse=True)
def _handlers_as_before(exact_bits: None) -> Iterator[None]:
    """No test leaves a handler behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Trigger:
    """Sends SIGTERM to this process when `here` is called for the n-th time with the name of the place."""

    def __init__(self, place: str = "", nth: int = 0, number: int = signal.SIGTERM) -> None:
        self.at = (place, nth)
        self.number = number
        self.seen: dict[str, int] = {}

    def here(self, place: str) -> None:
        self.seen[place] = self.seen.get(place, 0) + 1
        if (place, self.seen[place]) == self.at:
            os.kill(os.getpid(), self.number)


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with random augmentation from all three global generators."""

    def __init__(self, size: int, trigger: Trigger | None = None) -> None:
        rows = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 6, generator=rows)
        self.y = torch.randn(size, 1, generator=rows)
        self.trigger = trigger or Trigger()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        self.trigger.here("sample")
        return self.x[index] + 0.01 * noise, self.y[index]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same rows without a length, in a random order."""

    def __init__(self, size: int, trigger: Trigger) -> None:
        self.rows = Noisy(size, trigger)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(len(self.rows)).tolist():
            yield self.rows[index]


def shuffled(size: int, trigger: Trigger, **options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(size, trigger), batch_size=4, shuffle=True, **options)


def with_own_generators(size: int, trigger: Trigger) -> DataLoader[Any]:
    rows = Noisy(size, trigger)
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(5))
    return DataLoader(rows, batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(6))


LOADERS: dict[str, Callable[[Trigger], DataLoader[Any]]] = {
    "shuffled": lambda trigger: shuffled(38, trigger),
    "own generators": lambda trigger: with_own_generators(38, trigger),
    "stream": lambda trigger: DataLoader(Stream(38, trigger), batch_size=4),
    "workers": lambda trigger: shuffled(38, trigger, num_workers=2),
}


@dataclass
class Saving(Callback):
    """Does what a callback has to do that saves on preemption, into directories named by their step."""

    root: Path
    preemption: Preemption = field(default_factory=lambda: Preemption(repeat_s=0.0))
    saves: list[int] = field(default_factory=list)
    events: list[str] = field(default_factory=list)

    priority = 25

    def on_train_begin(self, **kwargs: Any) -> None:
        self.preemption.install()

    def on_save(self, state: TrainerState, checkpoint: Callable[[], Mapping[str, Any]], **kwargs: Any) -> None:
        directory = self.root / f"{len(list(self.root.iterdir())):03}-{state.global_step}"
        training_state.write(training_state.capture(checkpoint()), directory)
        self.saves.append(state.global_step)

    def on_train_end(self, **kwargs: Any) -> None:
        self.events.append("train_end")
        self.preemption.uninstall()

    def on_exception(self, **kwargs: Any) -> None:
        self.events.append("exception")

    @property
    def newest(self) -> Path | None:
        return max(self.root.iterdir(), default=None)


class Seen(Callback):
    """Every step's loss to the last bit, and how often each hook ran: a state that hooks between two edges change as well."""

    def __init__(self, trigger: Trigger) -> None:
        self.trigger = trigger
        self.losses: dict[int, str] = {}
        self.counts: dict[str, int] = {}

    def _count(self, event: str) -> None:
        self.counts[event] = self.counts.get(event, 0) + 1
        self.trigger.here(event)

    def on_step_begin(self, **kwargs: Any) -> None:
        self._count("step_begin")

    def on_substep_end(self, **kwargs: Any) -> None:
        self._count("substep_end")

    def on_step_end(self, state: TrainerState, outputs: Mapping[str, torch.Tensor], **kwargs: Any) -> None:
        self.losses[state.global_step] = float(outputs["loss"]).hex()
        self._count("step_end")

    def on_evaluate_begin(self, **kwargs: Any) -> None:
        self._count("evaluate_begin")

    def on_prediction_step(self, **kwargs: Any) -> None:
        self._count("prediction_step")

    def on_evaluate(self, **kwargs: Any) -> None:
        self._count("evaluate")

    def on_epoch_end(self, **kwargs: Any) -> None:
        self._count("epoch_end")

    def state_dict(self) -> dict[str, Any]:
        return {"counts": self.counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.counts = dict(state["counts"])


class Draws(Callback):
    """Uses random numbers where a resumed run uses them once more than the whole one."""

    def on_train_begin(self, **kwargs: Any) -> None:
        torch.rand(17), random.random(), np.random.rand()

    def on_epoch_begin(self, **kwargs: Any) -> None:
        torch.rand(3)

    def on_evaluate_begin(self, **kwargs: Any) -> None:
        torch.rand(2)


def build(
    loader: DataLoader[Any],
    args: TrainingArguments,
    callbacks: Sequence[Any],
    trigger: Trigger,
    *,
    seed: int = 0,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> Trainer:
    """A trainer as a fresh process would build it."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = model or torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        trigger.here("forward" if model.training else "evaluation")
        return (model(batch[0]) - batch[1]).square().mean()  # type: ignore[no-any-return]

    options.setdefault("loss_fn", loss_fn)
    return Trainer(
        model,
        args,
        train_dataloader=loader,
        eval_dataloader=DataLoader(Noisy(12), batch_size=4, shuffle=True),
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9]),
        callbacks=callbacks,
        **options,
    )


def bits(trainer: Trainer) -> bytes:
    """Weights, buffers and momenta."""
    momenta = [value for state in trainer.optimizer.state.values() for value in state.values()]
    tensors = [tensor for _, tensor in sorted(trainer.model.state_dict().items())]
    return b"".join(tensor.detach().numpy().tobytes() for tensor in tensors + momenta)


@dataclass
class Whole:
    """The uninterrupted run."""

    losses: dict[int, str]
    counts: dict[str, int]
    bits: bytes
    log: list[dict[str, Any]]
    result: TrainingResult
    seen: dict[str, int]


def run_whole(make_loader: Callable[[Trigger], DataLoader[Any]], args: TrainingArguments, **options: Any) -> Whole:
    trigger = Trigger()
    seen = Seen(trigger)
    trainer = build(make_loader(trigger), args, [seen, Draws()], trigger, **options)
    result = trainer.train()
    return Whole(seen.losses, seen.counts, bits(trainer), trainer.state.log_history, result, trigger.seen)


def run_preempted(
    make_loader: Callable[[Trigger], DataLoader[Any]],
    args: TrainingArguments,
    triggers: Sequence[Trigger],
    root: Path,
    whole: Whole,
    **options: Any,
) -> list[Saving]:
    """Run under each trigger in turn, and then to the end; every time in a fresh trainer that resumes from the newest save. Must equal `whole`."""
    losses: dict[int, str] = {}
    parts = []
    for number, trigger in enumerate([*triggers, Trigger()]):
        saving, seen = Saving(root), Seen(trigger)
        # From scratch it starts as the whole one did; what it resumes from must bring all else.
        seed = 0 if saving.newest is None else 99 * number
        trainer = build(make_loader(trigger), args, [saving, seen, Draws()], trigger, seed=seed, **options)
        result = trainer.train(saving.newest)
        assert saving.events == ["train_end"]
        assert result.interrupted == (number < len(triggers))
        assert trainer.control.should_interrupt == result.interrupted
        losses |= seen.losses
        parts.append(saving)
    assert losses == whole.losses
    assert trainer.state.log_history == whole.log
    assert bits(trainer) == whole.bits
    assert seen.counts == whole.counts
    assert (result.global_step, result.epoch) == (whole.result.global_step, whole.result.epoch)
    return parts


ARGS = TrainingArguments(
    num_train_epochs=3, gradient_accumulation_steps=3, logging_steps=2, eval_steps=3, eval_epochs=1
)
"""10 batches an epoch: 4 steps, the last with a single micro-batch. Evaluations of 3 batches at 3, 4, 6, 8, 9, 12: within and at the end of epochs."""


@pytest.mark.parametrize("loader", ["shuffled", "own generators", "stream"])
def test_a_signal_at_any_forward_pass_is_exact(loader: str, tmp_path: Path) -> None:
    """All 30 micro-batches and all 18 evaluation batches: the cut window is repeated, the cut evaluation is done again."""
    whole = run_whole(LOADERS[loader], ARGS)
    assert (whole.seen["forward"], whole.seen["evaluation"]) == (30, 18)
    places = [("forward", n) for n in range(1, 31)] + [("evaluation", n) for n in range(1, 19)]
    for place, nth in places:
        root = tmp_path / f"{place}{nth}"
        root.mkdir()
        last = nth == whole.seen[place]
        trigger = Trigger(place, nth)
        if last and place == "evaluation":
            # Nothing is left to do after it: the training is complete in spite of the signal.
            saving, seen = Saving(root), Seen(trigger)
            trainer = build(LOADERS[loader](trigger), ARGS, [saving, seen, Draws()], trigger)
            assert not trainer.train().interrupted
            assert bits(trainer) == whole.bits
        else:
            run_preempted(LOADERS[loader], ARGS, [trigger], root, whole)


@pytest.mark.parametrize(
    "place", ["step_begin", "substep_end", "step_end", "evaluate_begin", "evaluate", "epoch_end", "sample"]
)
def test_a_signal_anywhere_else_is_exact(place: str, tmp_path: Path) -> None:
    """In hooks, and while a batch is loaded in this process, where random numbers were drawn already."""
    whole = run_whole(LOADERS["shuffled"], ARGS)
    count = whole.seen[place]
    for nth in {1, 2, count // 2, count - 1}:
        root = tmp_path / str(nth)
        root.mkdir()
        run_preempted(LOADERS["shuffled"], ARGS, [Trigger(place, nth)], root, whole)


def test_interrupted_again_and_again_is_exact(tmp_path: Path) -> None:
    """In a step, in the evaluation of the next one, in that evaluation again after the resume, and in the next epoch."""
    whole = run_whole(LOADERS["shuffled"], ARGS)
    triggers = [Trigger("forward", 8), Trigger("evaluation", 2), Trigger("evaluation", 1), Trigger("forward", 5)]
    parts = run_preempted(LOADERS["shuffled"], ARGS, triggers, tmp_path, whole)
    # The third has nothing that the second has not saved.
    assert [part.saves for part in parts] == [[2], [3], [], [5], []]


@pytest.mark.parametrize("place", [("forward", 5), ("evaluation", 2), ("step_end", 4)])
def test_workers_are_exact_too(place: tuple[str, int], tmp_path: Path) -> None:
    """Loaders with worker processes are left and made again."""
    args = TrainingArguments(num_train_epochs=2, gradient_accumulation_steps=3, eval_steps=3)
    whole = run_whole(LOADERS["workers"], args)
    run_preempted(LOADERS["workers"], args, [Trigger(*place)], tmp_path, whole)


def test_without_accumulation_the_step_is_finished(tmp_path: Path) -> None:
    """A step of one micro-batch has nothing to cut."""
    args = TrainingArguments(num_train_epochs=2, eval_steps=4)
    whole = run_whole(LOADERS["shuffled"], args)
    (first, _) = run_preempted(LOADERS["shuffled"], args, [Trigger("forward", 7)], tmp_path, whole)
    assert first.saves == [7]


def test_an_evaluation_of_ones_own_is_cut_too(tmp_path: Path) -> None:
    """`eval_fn` gets a loader that looks before each batch, and is otherwise the one that was given."""

    def options(trigger: Trigger) -> dict[str, Any]:
        def eval_fn(model: torch.nn.Module, loader: Any) -> dict[str, float]:
            total = 0.0
            assert len(loader.dataset) == 4 * len(loader) == 12
            try:
                for x, y in loader:
                    trigger.here("own")
                    total += float((model(x) - y).square().sum())
            except Exception:  # noqa: BLE001 - as careless code would
                pytest.fail("an interruption is no error")
            return {"own": total}

        return {"eval_fn": eval_fn}

    args = TrainingArguments(num_train_epochs=1, eval_steps=4)
    whole = run_whole(LOADERS["shuffled"], args, **options(Trigger()))
    trigger = Trigger("own", 2)
    saving = Saving(tmp_path)
    build(
        LOADERS["shuffled"](trigger), args, [saving, seen := Seen(trigger), Draws()], trigger, **options(trigger)
    ).train()
    assert saving.saves == [4]
    assert trigger.seen["own"] == 2
    again = build(
        LOADERS["shuffled"](Trigger()),
        args,
        [after := Seen(Trigger()), Draws()],
        Trigger(),
        seed=5,
        **options(Trigger()),
    )
    again.train(saving.newest)
    assert seen.losses | after.losses == whole.losses
    assert bits(again) == whole.bits
    assert again.state.log_history == whole.log


def test_the_trainer_goes_on_in_the_same_process(tmp_path: Path) -> None:
    """A scheduler that pauses a training instead of ending it: a second call of `train`, with nothing loaded, is exact as well."""
    for place in [("forward", 8), ("forward", 11), ("evaluation", 2)]:
        root = tmp_path / f"{place}"
        root.mkdir()
        whole = run_whole(LOADERS["own generators"], ARGS)
        trigger = Trigger(*place)
        saving, seen = Saving(root), Seen(trigger)
        trainer = build(LOADERS["own generators"](trigger), ARGS, [saving, seen], trigger)
        trainer.callbacks.add(Draws())
        assert trainer.train().interrupted
        saving.preemption = Preemption()
        assert not trainer.train().interrupted
        assert seen.losses == whole.losses
        assert bits(trainer) == whole.bits
        assert trainer.state.log_history == whole.log


def test_a_resumed_edge_ends_as_the_whole_one_does(tmp_path: Path) -> None:
    """The evaluation of the last step of an epoch is cut off: after it, the epoch ends, and what had asked for a save gets it; then the next one begins."""
    events: list[str] = []

    class Asks(Callback):
        def on_step_end(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_save = True

        def on_epoch_begin(self, **kwargs: Any) -> None:
            events.append("epoch_begin")

        def on_epoch_end(self, state: TrainerState, **kwargs: Any) -> None:
            events.append(f"epoch_end {state.epoch}")

        def on_evaluate(self, state: TrainerState, **kwargs: Any) -> None:
            events.append("evaluate")

        def on_save(self, state: TrainerState, **kwargs: Any) -> None:
            events.append(f"save {state.global_step}")

    for loader in ("shuffled", "stream"):
        root = tmp_path / loader
        root.mkdir()
        args = TrainingArguments(num_train_epochs=2, gradient_accumulation_steps=3, eval_steps=4, logging_steps=None)
        trigger = Trigger("evaluation", 2)
        first = Saving(root)
        build(LOADERS[loader](trigger), args, [first, Asks()], trigger).train()
        assert first.saves == [1, 2, 3, 4]
        events.clear()
        build(LOADERS[loader](Trigger()), args, [Saving(root), Asks()], Trigger(), seed=4).train(first.newest)
        assert events[:5] == ["evaluate", "epoch_end 1.0", "save 4", "epoch_begin", "save 5"], loader
        assert events[-3:] == ["evaluate", "epoch_end 2.0", "save 8"], loader


# --- what is saved, and what is called ----------------------------------------------------------------------------------------


def test_nothing_new_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A signal in the first step of a process: the state is the one that it began with."""
    trigger = Trigger("forward", 2)
    saving = Saving(tmp_path)
    result = build(LOADERS["shuffled"](trigger), ARGS, [saving], trigger).train()
    assert (result.interrupted, result.steps_run) == (True, 0)
    assert saving.saves == []
    assert "interrupted at step 0, where it began" in caplog.text


def test_a_second_signal_skips_the_save(tmp_path: Path) -> None:
    """It leaves at the next edge all the same."""
    saving = Saving(tmp_path)

    class Twice(Trigger):
        def here(self, place: str) -> None:
            super().here(place)
            if (place, self.seen[place]) == self.at:
                os.kill(os.getpid(), signal.SIGTERM)

    trigger = Twice("forward", 5)
    result = build(LOADERS["shuffled"](trigger), ARGS, [saving], trigger).train()
    assert (result.interrupted, result.global_step) == (True, 1)
    assert saving.saves == []
    assert saving.events == ["train_end"]


def test_events_of_an_interrupted_step(tmp_path: Path) -> None:
    """The save, and the end: no end of an epoch that has not ended, no exception."""
    events: list[str] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            if name not in EVENTS:
                raise AttributeError(name)
            return lambda **kwargs: events.append(name[3:])

        def __dir__(self) -> Sequence[str]:
            return EVENTS

    trigger = Trigger("forward", 5)
    build(LOADERS["shuffled"](trigger), ARGS, [Recorder(), Saving(tmp_path)], trigger).train()
    assert events[-6:] == ["step_end", "step_begin", "substep_end", "substep_end", "save", "train_end"]
    assert "epoch_end" not in events


def test_a_training_that_is_complete_is_not_interrupted(tmp_path: Path) -> None:
    """The signal comes in its last step: nothing is left to resume, and a job must not be run again for it."""
    trigger = Trigger("step_end", 10)
    trainer = build(LOADERS["shuffled"](trigger), TrainingArguments(), [Saving(tmp_path), Seen(trigger)], trigger)
    result = trainer.train()
    assert (result.interrupted, result.global_step) == (False, 10)
    assert not trainer.control.should_interrupt


def test_a_callback_may_ask_for_it(tmp_path: Path) -> None:
    """`should_interrupt` is a flag like the others; without a `Preemption` it ends the training at the step's edge."""
    saved: list[int] = []

    class Leaves(Callback):
        def on_substep_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            control.should_interrupt = state.global_step == 2

        def on_save(self, state: TrainerState, **kwargs: Any) -> None:
            saved.append(state.global_step)

    result = build(LOADERS["shuffled"](Trigger()), ARGS, [Leaves()], Trigger()).train()
    assert (result.interrupted, result.global_step, saved) == (True, 3, [3])


def test_the_preemption_may_be_in_a_manager_of_callbacks(tmp_path: Path) -> None:
    """A `CallbackManager` is a callback, and hands on what its callbacks have."""
    trigger = Trigger("forward", 5)
    saving = Saving(tmp_path)
    manager = CallbackManager([Draws(), saving])
    assert manager.preemption is saving.preemption
    assert CallbackManager([Draws()]).preemption is None
    assert build(LOADERS["shuffled"](trigger), ARGS, [manager], trigger).train().interrupted
    assert saving.saves == [1]


def test_an_exit_at_the_end_costs_nobody_the_end(tmp_path: Path) -> None:
    """The callback that ends the process with a code runs first; the others have their `on_train_end` all the same."""
    ended: list[str] = []

    class Exits(Callback):
        priority = 0

        def on_train_end(self, **kwargs: Any) -> None:
            raise SystemExit(75)

    class Ends(Callback):
        def on_train_end(self, **kwargs: Any) -> None:
            ended.append("end")

    with pytest.raises(SystemExit) as left:
        build(LOADERS["shuffled"](Trigger()), ARGS, [Ends(), Exits()], Trigger()).train()
    assert left.value.code == 75
    assert ended == ["end"]


def test_an_error_on_the_way_out_is_not_swallowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A critical callback fails in the emergency save, and the one that ends the process hides it: it is logged with its place."""

    class Fails(Callback):
        critical = True

        def on_save(self, **kwargs: Any) -> None:
            raise ValueError("no disk")

        def on_train_end(self, control: TrainerControl, **kwargs: Any) -> None:
            assert control.should_interrupt
            raise SystemExit(143)

    trigger = Trigger("forward", 5)
    saving = Saving(tmp_path)
    with pytest.raises(SystemExit):
        build(LOADERS["shuffled"](trigger), ARGS, [saving, Fails()], trigger).train()
    assert saving.events == ["exception", "train_end"]
    (record,) = [record for record in caplog.records if record.name == "ckptmgr.trainer"]
    assert record.exc_info is not None
    assert "no disk" in str(record.exc_info[1])


class Counts(torch.nn.Module):
    """Changes a parameter of its own in each forward pass, as codebooks do that are moved by averages."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)
        self.passes = torch.nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes.add_(1)
        return self.layer(x)  # type: ignore[no-any-return]


def test_a_step_that_cannot_be_taken_back_is_finished(tmp_path: Path) -> None:
    """Parameters are too large to copy at each step: a model that changes them in a forward pass is saved at the next step's edge."""
    trigger = Trigger("forward", 5)
    saving = Saving(tmp_path)
    trainer = build(LOADERS["shuffled"](trigger), ARGS, [saving], trigger, model=Counts())
    result = trainer.train()
    assert (result.interrupted, result.global_step) == (True, 2)
    assert saving.saves == [2]
    assert float(trainer.model.get_parameter("passes")) == 6
