"""`SaveModelCallback(save_final=True)`: the final model is an artifact, linked from where it came, or stays where it is named."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptmgr import Trainer, TrainingArguments
from ckptmgr.callbacks.base import Callback, TrainerControl
from ckptmgr.callbacks.final_model import artifact_url, push_final
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.run.artifacts import pull_artifact, show_artifact
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.preemption import Preemption

Make = Callable[..., tuple[Trainer, SaveModelCallback]]


class Tokenizer:
    """Writes itself, as transformers' do."""

    def save_pretrained(self, directory: str) -> None:
        Path(directory, "tokenizer.json").write_text("{}")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A trainer of four steps that saves to a store on disk."""

    def trainer(*callbacks: Any, run: str = "run", **options: Any) -> tuple[Trainer, SaveModelCallback]:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 1)
        manager = CheckpointManager(
            str(tmp_path / "store" / run),
            local_dir=tmp_path / f"local-{run}",
            transfer="thread",
            on_existing="new-lineage",
        )
        saver = SaveModelCallback(manager, EveryNSteps(2), **{"save_final": True, "preemption": False, **options})
        made = Trainer(
            model,
            TrainingArguments(max_steps=4),
            train_dataloader=[torch.ones(2, 4)] * 8,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=lambda module, batch: module(batch).square().mean(),
            processing_class=Tokenizer(),
            callbacks=[saver, *callbacks],
        )
        return made, saver

    return trainer


def test_the_final_model_is_an_artifact_linked_from_its_checkpoint(make: Make, tmp_path: Path) -> None:
    """Weights and tokenizer, with the step, from the checkpoint of the last step; nothing is left on the disk."""
    trainer, saver = make()
    trainer.train()
    assert saver.failures == 0
    url = str(tmp_path / "store" / "run-final")
    shown = show_artifact(url)
    assert shown.version == 1
    assert shown.source is not None
    assert (shown.source.stem.step, shown.source.run) == (4, "run")
    pulled = tmp_path / "pulled"
    pull_artifact(url, pulled)
    assert sorted(path.name for path in pulled.iterdir()) == ["model.safetensors", "tokenizer.json"]
    weights = load_file(pulled / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in trainer.model.state_dict().items())
    assert not (tmp_path / "local-run.final").exists()


def test_a_training_that_a_callback_ended_has_one_too_with_the_weights_of_its_end(make: Make, tmp_path: Path) -> None:
    """Step 3 is no step of the policy; it is saved as the end, and linked."""

    class Enough(Callback):
        def on_step_end(self, state: Any, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    trainer, _ = make(Enough())
    trainer.train()
    shown = show_artifact(str(tmp_path / "store" / "run-final"))
    assert shown.source is not None
    assert shown.source.stem.step == 3


class At2(Callback):
    """Does something at the second step."""

    critical = True

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.action()


def fail() -> None:
    raise RuntimeError("bad node")


def test_an_exception_leaves_none(make: Make, tmp_path: Path) -> None:
    """What broke is no final model."""
    trainer, _ = make(At2(fail))
    with pytest.raises(RuntimeError, match="bad node"):
        trainer.train()
    assert not (tmp_path / "store" / "run-final").exists()


def test_an_interruption_leaves_none(make: Make, tmp_path: Path) -> None:
    """The next start goes on."""
    trainer, _ = make(At2(lambda: os.kill(os.getpid(), signal.SIGTERM)), preemption=Preemption())
    with pytest.raises(SystemExit):
        trainer.train()
    assert trainer.state.global_step == 2
    assert not (tmp_path / "store" / "run-final").exists()


def test_the_same_model_again_is_the_same_version(make: Make, tmp_path: Path) -> None:
    """A training that is run again to the same bits."""
    make()[0].train()
    make()[0].train()
    assert show_artifact(str(tmp_path / "store" / "run-final")).version == 1


def test_a_model_that_cannot_be_pushed_stays_and_its_place_is_said(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Training ends as if nothing had happened, but for the log and the count."""
    blocked = tmp_path / "store" / "taken"
    blocked.parent.mkdir()
    blocked.write_text("no directory")
    trainer, saver = make(save_final="taken")
    result = trainer.train()
    assert (result.global_step, saver.failures) == (4, 1)
    left = tmp_path / "local-run.final"
    assert (left / "model.safetensors").is_file()
    assert f"the final model stays in {left}; push it with `ckptmgr artifact push {left} " in caplog.text
    assert "push of the final model failed" in caplog.text


def test_a_model_that_writes_itself_and_one_that_is_wrapped(tmp_path: Path) -> None:
    """transformers' models write their configuration as well; DDP and torch.compile are no part of a model."""

    class Pretrained(torch.nn.Linear):
        def save_pretrained(self, directory: str) -> None:
            Path(directory, "config.json").write_text(json.dumps({"in": self.in_features}))

    class DistributedDataParallel(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    wrapped = SimpleNamespace(_orig_mod=DistributedDataParallel(Pretrained(4, 1)))
    manager: Any = SimpleNamespace(url=f"file://{tmp_path}/store/run", local_dir=tmp_path / "local")
    pushed = push_final(
        manager,
        "best-model",
        wrapped,
        None,
        checkpoint_id=None,
        metrics={"eval_loss": 1.0},
        metadata={"step": 4},
    )
    assert pushed.url.endswith("/store/best-model")
    assert [entry.path for entry in pushed.manifest.files] == ["config.json"]
    assert pushed.manifest.metrics == {"eval_loss": 1.0}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (True, "s3://b/exp/run-final"),
        ("model", "s3://b/exp/model"),
        ("oss://c/model", "oss://c/model"),
        ("/mnt/model", "/mnt/model"),
    ],
)
def test_where_it_goes(name: str | bool, expected: str) -> None:
    """Beside the run, or anywhere."""
    assert artifact_url("s3://b/exp/run", name) == expected
