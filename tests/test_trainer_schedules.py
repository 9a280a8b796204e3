"""When the embedded Trainer steps the learning rate's scheduler, and that a resumed one goes on with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from ckptmgr.callbacks import Callback, TrainerState
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training import state as training_state
from ckptmgr.training.scheduling import Schedule


class Killed(BaseException):
    """Stands for the end of a process."""


class Rates(Callback):
    """The learning rate that each step was made with, and each epoch ended with; saves every epoch and dies after one."""

    priority = 0

    def __init__(self, root: Path | None = None, die_after_epoch: float | None = None) -> None:
        self.by_step: dict[int, float] = {}
        self.by_epoch: dict[float, float] = {}
        self.root = root
        self.die_after_epoch = die_after_epoch

    def on_pre_optimizer_step(self, state: TrainerState, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        self.by_step[state.global_step + 1] = optimizer.param_groups[0]["lr"]

    def on_epoch_end(self, state: TrainerState, optimizer: Any, control: Any, **kwargs: Any) -> None:
        self.by_epoch[state.epoch] = optimizer.param_groups[0]["lr"]
        control.should_save = True

    def on_save(self, state: TrainerState, checkpoint: Any, **kwargs: Any) -> None:
        if self.root is not None:
            training_state.write(training_state.capture(checkpoint()), self.root / f"{state.epoch:g}")
        if state.epoch == self.die_after_epoch:
            raise Killed


class Stream(IterableDataset[torch.Tensor]):
    """Six batches, and nobody knows that beforehand."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(6.0).unsqueeze(1))


def build(scheduler: Any, callbacks: Any = (), *, batches: Any = None, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    return Trainer(
        model,
        TrainingArguments(**{"num_train_epochs": 2, "logging_steps": None, **options}),
        train_dataloader=[torch.ones(1, 1)] * 6 if batches is None else batches,
        eval_dataloader=[torch.ones(1, 1)],
        optimizer=optimizer,
        lr_scheduler=scheduler(optimizer),
        loss_fn=lambda model, batch: model(batch).square().mean() * 1e-3,
        callbacks=callbacks,
    )


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def powers(*exponents: int) -> list[float]:
    return [0.5**exponent for exponent in exponents]


@pytest.mark.parametrize(
    ("interval", "exponents"),
    [
        # Two epochs of six micro-batches, four to a step: the second step of each epoch has two.
        ("step", [0, 1, 2, 3]),
        ("batch", [0, 4, 6, 10]),
        ("epoch", [0, 0, 1, 1]),
        ("evaluation", [0, 0, 1, 1]),
    ],
)
def test_intervals(interval: Any, exponents: list[int]) -> None:
    """Each step is made with the rate after all that came before it."""
    rates = Rates()
    build(halving, [rates], gradient_accumulation_steps=4, eval_epochs=1, lr_scheduler_interval=interval).train()
    assert list(rates.by_step.values()) == powers(*exponents)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_an_epoch_of_unknown_length_counts_too(accumulation: int) -> None:
    """A stream shows its end only after its last step, or in it; the scheduler steps once for every epoch."""
    rates = Rates()
    build(
        halving,
        [rates],
        batches=DataLoader(Stream(), batch_size=None),
        num_train_epochs=3,
        gradient_accumulation_steps=accumulation,
        lr_scheduler_interval="epoch",
    ).train()
    assert rates.by_epoch == {1.0: 0.5, 2.0: 0.25, 3.0: 0.125}


def test_an_epoch_that_is_cut_short_counts_too() -> None:
    """A callback ends each epoch after two of six steps."""

    class Short(Callback):
        def on_step_end(self, state: TrainerState, control: Any, **kwargs: Any) -> None:
            control.should_epoch_stop = state.global_step % 2 == 0

    rates = Rates()
    result = build(halving, [rates, Short()], lr_scheduler_interval="epoch").train()
    assert list(rates.by_step.values()) == powers(0, 0, 1, 1)
    assert result.global_step == 4


@pytest.mark.parametrize("interval", ["step", "batch"])
def test_an_overflow_skips_the_scheduler_with_the_optimizer(interval: Any) -> None:
    """An infinite gradient in the first step."""
    rates = Rates()
    batches = [torch.full((1, 1), torch.inf), *[torch.ones(1, 1)] * 2]
    build(
        halving, [rates], batches=batches, num_train_epochs=1, grad_scaler=True, lr_scheduler_interval=interval
    ).train()
    assert list(rates.by_step.values()) == powers(0, 0, 1)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


class Metrics:
    """An evaluation that gives these, one after the other."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)

    def __call__(self, model: torch.nn.Module, loader: Any) -> Mapping[str, float]:
        return {"loss": next(self.values), "accuracy": 0.5}


def test_a_plateau_goes_by_the_metric_and_resumes(tmp_path: Path) -> None:
    """Best value and patience come back: interrupted after evaluation 3 of 6, the rates are those of the whole run."""
    losses = [3.0, 2.0, 2.5, 2.5, 1.0, 1.5]
    options: dict[str, Any] = {"num_train_epochs": 6, "eval_epochs": 1, "lr_scheduler_interval": "evaluation"}

    def run(rates: Rates, metrics: Metrics, resume: Path | None = None) -> Trainer:
        trainer = build(plateau, [rates], **options)
        trainer._eval_fn = metrics
        trainer.train(resume)
        return trainer

    whole = run(rates := Rates(), Metrics(*losses))
    assert list(rates.by_step.values())[::6] == powers(0, 0, 0, 0, 1, 1)
    with pytest.raises(Killed):
        # A callback's Killed is no Exception: it passes like the end of a process.
        run(Rates(tmp_path, 3.0), Metrics(*losses))
    resumed = run(again := Rates(), Metrics(*losses[3:]), tmp_path / "3")
    assert again.by_step == {step: rate for step, rate in rates.by_step.items() if step > 18}
    assert resumed.lr_scheduler.state_dict() == whole.lr_scheduler.state_dict()


@pytest.mark.parametrize("epoch", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("eval_epochs", [None, 2])
def test_k028_milestones_come_at_the_same_epoch(epoch: int, eval_epochs: int | None, tmp_path: Path) -> None:
    """K028: MultiStepLR with a milestone at epoch 4, resumed from each epoch's end, with and without evaluations every second one."""

    def milestone(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [4])

    options: dict[str, Any] = {"num_train_epochs": 6, "eval_epochs": eval_epochs, "lr_scheduler_interval": "epoch"}
    build(milestone, [whole := Rates()], **options).train()
    assert list(whole.by_step.values())[::6] == pytest.approx([1, 1, 1, 1, 0.1, 0.1])
    with pytest.raises(Killed):
        build(milestone, [Rates(tmp_path, float(epoch))], **options).train()
    build(milestone, [again := Rates()], **options).train(tmp_path / f"{epoch}")
    assert again.by_step == {step: rate for step, rate in whole.by_step.items() if step > 6 * epoch}
    assert again.by_epoch == {done: rate for done, rate in whole.by_epoch.items() if done > epoch}


def test_a_plateau_needs_evaluations() -> None:
    """It cannot step without a metric; said when the trainer is built."""
    with pytest.raises(ConfigError, match="ReduceLROnPlateau steps by a metric, but lr_scheduler_interval is 'step'"):
        build(plateau)


def test_evaluations_need_data() -> None:
    """A scheduler that would never step is refused."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with pytest.raises(ConfigError, match="there is no eval_dataloader"):
        Trainer(
            model,
            TrainingArguments(lr_scheduler_interval="evaluation"),
            train_dataloader=[],
            optimizer=optimizer,
            lr_scheduler=plateau(optimizer),
        )


def test_a_scheduler_that_may_never_step_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Only a callback could ask for an evaluation."""
    build(plateau, lr_scheduler_interval="evaluation")
    assert "neither eval_steps nor eval_epochs" in caplog.text


def test_another_metric_may_be_named() -> None:
    """With or without its prefix; a name that no evaluation gives is an error that says which there are."""
    options: dict[str, Any] = {"num_train_epochs": 3, "eval_epochs": 1, "lr_scheduler_interval": "evaluation"}
    for name in ("accuracy", "eval_accuracy"):
        trainer = build(plateau, **options, lr_scheduler_metric=name)
        trainer._eval_fn = Metrics(3.0, 2.0, 1.0)
        trainer.train()
        assert trainer.lr_scheduler.best == 0.5
    trainer = build(plateau, **options, lr_scheduler_metric="f1")
    trainer._eval_fn = Metrics(3.0)
    with pytest.raises(ConfigError, match="goes by 'f1'") as raised:
        trainer.train()
    assert "eval_accuracy, eval_loss" in str(raised.value.hint)


def test_evaluating_by_hand_steps_nothing() -> None:
    """`trainer.evaluate()` between two trainings is no evaluation of the schedule."""
    trainer = build(halving, lr_scheduler_interval="evaluation", eval_epochs=1)
    trainer.evaluate()
    assert trainer.optimizer.param_groups[0]["lr"] == 1.0


def test_ranks_go_by_one_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has evaluated its own part; the mean decides, so that their rates stay the same."""
    steps: list[float] = []

    class Plateau:
        def step(self, metrics: float) -> None:
            steps.append(metrics)

    monkeypatch.setattr("ckptmgr.training.ranks.gather_rows", lambda row: [list(row), [1.0, 4.0]])
    args = TrainingArguments(lr_scheduler_interval="evaluation", eval_epochs=1)
    Schedule(Plateau(), args, evaluates=True).evaluated({"eval_loss": 1.0})
    assert steps == [2.5]
