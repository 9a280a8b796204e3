"""The saving callback, a real manager and a real signal in the embedded Trainer: what reaches the store, and how the process ends."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import Callback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.run.directory import RunDirectory
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.preemption import Preemption


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """No test leaves a handler behind."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)}
    yield
    # What torch says of dead workers stays held back, on purpose: a death may be reported late.
    after = {number: signal.getsignal(number) for number in before if number != signal.SIGCHLD}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == {number: before[number] for number in after}


class Send(Callback):
    """Sends SIGTERM to this process at one event of one step, `times` times."""

    priority = 10

    def __init__(self, event: str, step: int, times: int = 1) -> None:
        self.event, self.step, self.left = event, step, times

    def _act(self, event: str, state: Any) -> None:
        if (event, state.global_step) == (self.event, self.step) and self.left:
            for _ in range(self.left):
                os.kill(os.getpid(), signal.SIGTERM)
            self.left = 0

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        self._act("step_end", state)

    def on_substep_end(self, state: Any, **kwargs: Any) -> None:
        self._act("substep_end", state)

    def on_prediction_step(self, state: Any, **kwargs: Any) -> None:
        self._act("prediction_step", state)


class Weights(Callback):
    """The weights after every step, to the last bit."""

    def __init__(self) -> None:
        self.by_step: dict[int, bytes] = {}

    def on_step_end(self, state: Any, model: torch.nn.Module, **kwargs: Any) -> None:
        self.by_step[state.global_step] = b"".join(p.detach().numpy().tobytes() for p in model.parameters())


def train(tmp_path: Path, *callbacks: Any, save: int = 100, repeat_s: float = 1.0) -> None:
    """Twelve steps of two micro-batches with dropout, resumed if there is something; the evaluation comes every four."""
    manager = CheckpointManager(
        tmp_path / "store/run",
        local_dir=tmp_path / "disk",
        save=EveryNSteps(save),
        transfer="thread",
        preemption=Preemption(repeat_s=repeat_s),
    )
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
    data = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=12, gradient_accumulation_steps=2, eval_steps=4),
        train_dataloader=torch.utils.data.DataLoader(data, batch_size=4, shuffle=True),  # type: ignore[arg-type]
        eval_dataloader=[data[:8], data[8:16]],
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=[*callbacks, SaveModelCallback(manager)],
    )
    manager.restore(trainer.pieces())
    trainer.train()


def stored(tmp_path: Path) -> list[tuple[int, tuple[str, ...]]]:
    manifests = RunDirectory.open(str(tmp_path / "store/run")).history().manifests
    return [(manifest.step, manifest.reasons) for _, manifest in sorted(manifests.items())]


@pytest.mark.parametrize(
    ("event", "step", "saved"), [("step_end", 6, 6), ("substep_end", 6, 6), ("prediction_step", 8, 8)]
)
def test_a_signal_is_saved_committed_and_resumed_exactly(tmp_path: Path, event: str, step: int, saved: int) -> None:
    """At a step's end, between micro-batches and in an evaluation; one save, in the store before the process ends with 143."""
    whole, first, second = Weights(), Weights(), Weights()
    train(tmp_path / "whole", whole)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, first, Send(event, step))
    assert ended.value.code == 143
    assert stored(tmp_path) == [(saved, ("sigterm",))]
    train(tmp_path, second)
    assert sorted(second.by_step) == list(range(saved + 1, 13))
    assert {**first.by_step, **second.by_step} == whole.by_step
    assert stored(tmp_path)[1:] == [(12, ("train_end",))]


def test_a_second_signal_skips_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was saved before is in the store; nothing else is."""
    caplog.set_level(logging.INFO)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, Send("substep_end", 6, times=2), save=4, repeat_s=0.0)
    assert ended.value.code == 143
    assert stored(tmp_path) == [(4, ("every_n_steps:4",))]
