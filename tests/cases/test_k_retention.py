"""Cases of retention and save policies: what is saved when, and what stays."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.backends.base import Backend
from ckptmgr.callbacks.base import Callback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import Best, EveryNEpochs, EveryNSteps
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.testing.faulty import FaultyBackend
from ckptmgr.testing.stores import Store
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager

Cli = Callable[..., subprocess.CompletedProcess[str]]
Tree = Callable[[str, Mapping[str, bytes]], Path]
Ask = Callable[..., Any]


def toy_trainer(steps_per_epoch: int, arguments: TrainingArguments, *callbacks: Any) -> Trainer:
    """A trainer of one weight, with as many batches per epoch as steps."""
    model = torch.nn.Linear(1, 1)
    batches = [torch.ones(1, 1)] * steps_per_epoch
    return Trainer(
        model,
        arguments,
        train_dataloader=batches,
        eval_dataloader=batches[:1],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=callbacks,
    )


@pytest.mark.parametrize(
    ("style", "first"),
    [("checkpoint_{}", 0), ("global_step{}", 8), ("iter_{:07}", 8)],
    ids=["hf", "deepspeed", "megatron"],
)
def test_k017_the_last_three_are_the_highest_numbers(
    store: Store, ask: Ask, tree: Tree, style: str, first: int
) -> None:
    """Numbers count as numbers, also behind an underscore or zeros: 9, 10 and 11 remain, not 8."""
    url = f"{store.url}/run"
    run = RunDirectory.open_or_create(url)
    for number in range(first, 11):
        push(tree(style.format(number), {"model.bin": b"%d" % number}), run)
    ask("push", tree(style.format(11), {"model.bin": b"11"}), url)
    done = ask("prune", url, "--keep-last", 3, "--yes")
    assert [item["step"] for item in done["delete"]] == list(range(first, 9))
    kept = [item["id"] for item in done["keep"]]
    assert store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{stem}/model.bin": b"%d" % number for stem, number in zip(kept, (9, 10, 11), strict=True)
    }
    assert [row["step"] for row in ask("ls", url)["checkpoints"]] == [9, 10, 11]


def test_k038_steps_count_over_the_whole_run(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Every 120 steps of epochs of 110, no metric: 120 and 240, and the end of training as documented."""
    url = f"{store.url}/run"
    manager = CheckpointManager(url, local_dir=tmp_path / "disk", save=EveryNSteps(120))
    result = toy_trainer(110, TrainingArguments(num_train_epochs=3), SaveModelCallback(manager)).train()
    assert result.global_step == 330
    assert [(row["step"], row["reasons"]) for row in ask("ls", url)["checkpoints"]] == [
        (120, ["every_n_steps:120"]),
        (240, ["every_n_steps:120"]),
        (330, ["train_end"]),
    ]
    assert len(store.keys("run/manifests/")) == 3


class StopOnSigterm(Callback):
    """What a job script does about a preemption notice: at step 100 the platform sends SIGTERM; training ends at that step."""

    def __init__(self, at_step: int) -> None:
        self._at_step = at_step
        self._told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: Any) -> None:
        self._told = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        if self._told:
            control.should_save = control.should_training_stop = True


@pytest.fixture
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_sigterm")
def test_k096_several_triggers_of_one_step_make_one_save(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Every 100 steps, the best metric, the end of an epoch and SIGTERM, all at step 100: one checkpoint with all reasons."""
    url = f"{store.url}/run"
    behind: list[FaultyBackend] = []

    def watched(backend: Backend) -> Backend:
        behind.append(FaultyBackend(backend))
        return behind[-1]

    policy = EveryNSteps(100) | Best("eval_loss", mode="min") | EveryNEpochs(1)
    manager = CheckpointManager(url, local_dir=tmp_path / "disk", save=policy, wrap_backend=watched)
    arguments = TrainingArguments(num_train_epochs=3, eval_steps=100)
    trainer = toy_trainer(100, arguments, StopOnSigterm(100), SaveModelCallback(manager))
    assert trainer.train().global_step == 100

    (row,) = ask("ls", url)["checkpoints"]
    assert row["step"] == 100
    assert set(row["reasons"]) == {"every_n_steps:100", "best:eval_loss", "every_n_epochs:1", "train_end"}
    assert len(row["reasons"]) == 4
    assert store.keys("run/manifests/") == [f"run/manifests/{row['id']}.json"]
    calls = [call for backend in behind for call in backend.log]
    sent = [call.path.rsplit("/run/", 1)[1] for call in calls if call.verb == "put_file"]
    assert sorted(f"run/{path}" for path in sent) == store.keys("run/checkpoints/")
    assert len(sent) == row["files"]
    assert len([call for call in calls if call.verb == "pipe_file" and "/manifests/" in call.path]) == 1
