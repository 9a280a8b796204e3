"""Learning rates after a resume are those of the uninterrupted run, whatever sets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import DataLoader, TensorDataset

from ckptmgr.callbacks.base import Callback, TrainerState
from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.state import capture, restore, write

pytestmark = pytest.mark.filterwarnings(
    # torch's own, of a scheduler that calls others with a number it says not to give.
    "ignore:The epoch parameter:UserWarning"
)

STEPS = 14
Make = Callable[[torch.optim.Optimizer], Any]
MAKES: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: schedulers.StepLR(o, 3),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [4, 8, 9]),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, total_iters=5),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=5),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 10),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, 10, power=2.0),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.1, total_steps=STEPS + 1),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, T_mult=2),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=5), schedulers.CosineAnnealingLR(o, 10)], [5]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.LinearLR(o, total_iters=5), schedulers.ExponentialLR(o, 0.9)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=1),
}


class Plain:
    """A loop of two parameter groups, as a fresh process would build it."""

    def __init__(self, make: Make) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        groups = [
            {"params": layer.parameters(), "lr": rate} for layer, rate in zip(self.model, (0.1, 0.05), strict=True)
        ]
        self.optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
        self.scheduler = make(self.optimizer)
        self.rates: list[list[str]] = []

    def pieces(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(5, 3)).square().mean()
        loss.backward()
        self.optimizer.step()
        if isinstance(self.scheduler, schedulers.ReduceLROnPlateau):
            # NumPy's, as many metrics are: `best` is one then.
            self.scheduler.step(np.float32(1 + len(self.rates) % 3))
        else:
            self.scheduler.step()
        self.rates.append([float(group["lr"]).hex() for group in self.optimizer.param_groups])

    def weights(self) -> list[bytes]:
        return [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]


@pytest.mark.parametrize("name", MAKES)
def test_every_scheduler_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    """At three places of its course: all further learning rates, and the weights, to the last bit."""
    whole = Plain(MAKES[name])
    for step in range(STEPS):
        if step in (1, 5, 9):
            write(capture(whole.pieces()), tmp_path / str(step))
        whole.step()
    assert len({tuple(rates) for rates in whole.rates}) > 1
    for step in (1, 5, 9):
        resumed = Plain(MAKES[name])
        assert restore(tmp_path / str(step), resumed.pieces()).notes == ()
        for _ in range(STEPS - step):
            resumed.step()
        assert resumed.rates == whole.rates[step:]
        assert resumed.weights() == whole.weights()


def test_another_scheduler_is_told_apart(tmp_path: Path) -> None:
    """Where torch itself would load anything that is a dict: what is missed, and what is not known, are named."""
    write(capture(Plain(MAKES["MultiStepLR"]).pieces()), tmp_path)
    with pytest.raises(
        IncompatibleStateError, match=r"'scheduler' does not fit: it has gamma, milestones, .*CosineAnn.* T_max"
    ) as caught:
        restore(tmp_path, Plain(MAKES["CosineAnnealingLR"]).pieces())
    assert caught.value.piece == "scheduler"  # type: ignore[attr-defined]


class Rates(Callback):
    """The learning rate that each epoch is trained with, and a checkpoint at the end of each."""

    def __init__(self, root: Path | None) -> None:
        self.root = root
        self.by_epoch: dict[int, float] = {}

    def on_epoch_begin(self, state: TrainerState, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        self.by_epoch[round(state.epoch)] = optimizer.param_groups[0]["lr"]

    def on_epoch_end(self, state: TrainerState, control: Any, **kwargs: Any) -> None:
        control.should_save = True

    def on_save(self, state: TrainerState, checkpoint: Any, **kwargs: Any) -> None:
        if self.root is not None:
            write(capture(checkpoint()), self.root / str(round(state.epoch)))


@pytest.fixture
def _exact() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def trained(make: Make, rates: Rates, resume_from: Path | None = None, **arguments: Any) -> dict[int, float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(6, 3)), batch_size=2, shuffle=True)
    trainer = Trainer(
        model,
        TrainingArguments(num_train_epochs=8, logging_steps=None, **arguments),
        train_dataloader=loader,
        eval_dataloader=loader if "eval_epochs" in arguments else None,
        optimizer=optimizer,
        lr_scheduler=make(optimizer),
        loss_fn=lambda model, batch: model(batch[0]).square().mean(),
        callbacks=[rates],
    )
    trainer.train(resume_from)
    return rates.by_epoch


@pytest.mark.usefixtures("_exact")
@pytest.mark.parametrize("evaluated", [{}, {"eval_epochs": 2}], ids=["alone", "evaluated every 2 epochs"])
def test_k028_a_scheduler_that_steps_per_epoch_is_neither_ahead_nor_behind(
    evaluated: dict[str, int], tmp_path: Path
) -> None:
    """K028: MultiStepLR with a milestone at epoch 4, saved at the end of each epoch, resumed from each of them."""
    make: Make = lambda optimizer: schedulers.MultiStepLR(optimizer, [4])
    options: dict[str, Any] = {"lr_scheduler_interval": "epoch", **evaluated}
    whole = trained(make, Rates(tmp_path), **options)
    assert whole == {epoch: 0.1 if epoch < 4 else pytest.approx(0.01) for epoch in range(8)}
    for epoch in range(1, 8):
        resumed = trained(make, Rates(None), tmp_path / str(epoch), **options)
        assert resumed == {later: whole[later] for later in range(epoch, 8)}
