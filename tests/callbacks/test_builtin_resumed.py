"""The built-in callbacks in a training that is killed at some step and resumed: everything they do equals the uninterrupted training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import Callback, Priority
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.gradient_clip import GradientClipCallback
from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
from ckptmgr.callbacks.memory import MemoryCallback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager

STEPS = 20


class Crash(Exception):
    """The machine is gone."""


class Watch(Callback):
    """What each step did; ends the training by a crash, if asked to."""

    priority = Priority.LOG
    critical = True

    def __init__(self, crash_after: int | None) -> None:
        self.crash_after = crash_after
        self.facts: dict[int, Any] = {}

    def on_step_begin(self, state: Any, **kwargs: Any) -> None:
        if state.global_step == self.crash_after:
            raise Crash

    def on_pre_optimizer_step(self, model: torch.nn.Module, optimizer: Any, state: Any, **kwargs: Any) -> None:
        gradients = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
        self.facts[state.global_step + 1] = (gradients, [group["lr"] for group in optimizer.param_groups])

    def on_save(self, state: Any, control: Any, **kwargs: Any) -> None:
        self.facts[state.global_step] += (control.should_training_stop,)


def train(folder: Path, crash_after: int | None = None) -> tuple[Watch, dict[str, Any], Trainer]:
    """One process life: from the newest checkpoint to the end, or to a crash. What it did, and the states of callbacks in the end."""
    torch.manual_seed(0)
    model, watch = torch.nn.Linear(3, 1), Watch(crash_after)
    manager = CheckpointManager(
        folder / "store/run",
        local_dir=folder / "disk",
        save=EveryNSteps(1),
        keep_local=KeepLast(100),
        transfer="thread",
    )
    callbacks = [
        SaveModelCallback(manager),
        LossMonitorCallback(3, window=4, on_nonfinite="warn", plateau_steps=3),
        EarlyStoppingCallback("score", 4, mode="max", min_delta=0.01),
        LRSchedulerCallback("cosine", warmup_steps=3, cycles=2),
        GradientClipCallback(0.5, log_interval=7),
        MemoryCallback(),
    ]
    data: Any = torch.randn(2 * STEPS, 3, generator=torch.Generator().manual_seed(1))

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss * 0 + math.nan if trainer.state.global_step == 5 else loss

    trainer = Trainer(
        model,
        TrainingArguments(
            max_steps=STEPS, gradient_accumulation_steps=2, eval_steps=2, logging_steps=2, grad_scaler=True
        ),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=1),
        eval_dataloader=[data[:1]],
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        eval_fn=lambda model, loader: {"score": min(trainer.state.global_step, 6) / 10},
        callbacks=[*callbacks, watch],
    )
    try:
        trainer.train(resume_from=manager.resume_path())
    except Crash:
        assert crash_after is not None
    finally:
        manager.close()
    assert trainer.callbacks.failures == {"Watch": 1} if crash_after is not None else trainer.callbacks.failures == {}
    return (
        watch,
        {name: state for name, state in trainer.callbacks.state_dict().items() if name != "SaveModelCallback"},
        trainer,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Watch, dict[str, Any], Trainer]:
    """The uninterrupted training: the fourth evaluation that is not better ends it."""
    watch, states, trainer = train(tmp_path_factory.mktemp("whole"))
    assert trainer.state.stopped == "EarlyStoppingCallback"
    assert trainer.state.global_step == 14
    return watch, states, trainer


@pytest.mark.parametrize("kills", [(1,), (4,), (5, 6), (7, 8, 13)])
def test_it_equals_the_uninterrupted_training(
    whole: tuple[Watch, dict[str, Any], Trainer], kills: tuple[int, ...], tmp_path: Path
) -> None:
    """Within an interval, before and after the NaN, and more than once."""
    facts: dict[int, Any] = {}
    for kill in kills:
        watch, _, _ = train(tmp_path, kill)
        facts |= watch.facts
    watch, states, trainer = train(tmp_path)
    assert repr(facts | watch.facts) == repr(whole[0].facts)  # NaN is not equal to itself
    assert states == whole[1]
    assert (trainer.state.stopped, trainer.state.global_step) == ("EarlyStoppingCallback", 14)
    assert all(
        torch.equal(mine, theirs)
        for mine, theirs in zip(trainer.model.parameters(), whole[2].model.parameters(), strict=True)
    )
