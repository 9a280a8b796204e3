"""Lightning's Trainer with two ranks that draw, load and evaluate each for itself: they save, end and go on together, and exactly."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

RANKS = """
import errno, logging, random, signal
from pathlib import Path
join()
os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0")
sys.path.insert(0, "hosts")
import lightning
from lightning.pytorch.plugins.io import TorchCheckpointIO
from ckptmgr.callbacks import EarlyStoppingCallback, LogCallback, LossMonitorCallback
from ckptmgr.callbacks.lightning_events import LightningCallbacks
from ckptmgr.core.policies import Best, EveryNSteps
from test_lightning_positions import Trainings, differing

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)

def trainings(name, **options):
    # Eight steps of two micro-batches, four in an epoch.
    how = {"batches": 16, "accumulation": 2, "evaluate_every": 4}
    return Trainings(Path(sys.argv[1]) / name, devices=2, strategy="ddp", **how, **options)

def saved(made):
    return [[manifest.step, manifest.reasons, manifest.world_size] for manifest in made.manager(None).list()]

class Signal(lightning.Callback):
    def on_train_batch_start(self, trainer, *rest):
        if rank == 1 and trainer.global_step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

class Score(lightning.Callback):
    # Better with each step on rank 0, worse on rank 1.
    def on_validation_epoch_end(self, trainer, module):
        module.log("score", float(-trainer.global_step if rank == 0 else trainer.global_step))

class FullDisk(TorchCheckpointIO):
    full = rank == 0
    def save_checkpoint(self, *given, **how):
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, "no space left")
        super().save_checkpoint(*given, **how)

def exact():
    made = trainings("exact")
    whole = made.run()
    code = None
    try:
        made.run(EveryNSteps(3), callbacks=[Signal()])
    except SystemExit as end:
        code = end.code
    here = saved(made)
    resumed = made.run(EveryNSteps(100), resume="latest")
    return {
        "code": code, "saved": here, "differing": differing(whole, resumed, 6), "proof": made.callback.proof,
        "steps": len([name for name in resumed if name.endswith("weights")]), "batches": whole["3 batches"],
    }

def ours():
    early = EarlyStoppingCallback("score", patience=1, mode="min")
    made = trainings("ours")
    facts = made.run(EveryNSteps(100), callbacks=[
        Score(), LightningCallbacks([LossMonitorCallback(log_interval=2), early, LogCallback(directory=made.folder / "logs")])
    ])
    return {
        "steps": len([name for name in facts if name.endswith("weights")]), "stopped": early.stopped_step,
        "logs": sorted(path.name for path in (made.folder / "logs").iterdir()),
    }

def best():
    made = trainings("best")
    made.run(Best("score", mode="min"), callbacks=[Score()])
    return saved(made)

def full():
    made = trainings("full", plugins=[FullDisk()])
    made.failures = 1
    made.run(EveryNSteps(3))
    return saved(made)

found = {"exact": exact(), "ours": ours(), "best": best(), "full": full()}
"""


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """In place of that for the tests of the other hosts."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed; CI runs these tests in an environment of their own")


@pytest.fixture(scope="module")
def found(in_two_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank saw in each training."""
    return in_two_ranks(RANKS, tmp_path_factory.mktemp("trainings"), deadline_s=500.0)


def test_interrupted_and_resumed_is_as_uninterrupted(found: list[dict[str, Any]]) -> None:
    """Rank 1 alone is signalled; both end after the step. Losses, samples, weights, optimizer and random states of each rank are those of the whole run."""
    for rank in (each["exact"] for each in found):
        assert rank["code"] == 143
        assert rank["saved"] == [[3, ["every_n_steps:3"], 2], [5, ["sigterm"], 2]]
        assert (rank["differing"], rank["steps"]) == ([], 3)
    first, second = (each["exact"] for each in found)
    assert first["proof"] == "equal"
    assert "different" not in second["proof"]
    # The test would not tell much of ranks that do the same.
    assert first["batches"] != second["batches"]


def test_callbacks_of_ours_end_both_at_once(found: list[dict[str, Any]]) -> None:
    """By the mean of what they have measured, which does not get better."""
    for rank in (each["ours"] for each in found):
        assert (rank["steps"], rank["stopped"]) == (4, 4)
        assert rank["logs"] == ["log.jsonl"]


def test_metrics_that_nobody_has_averaged(found: list[dict[str, Any]]) -> None:
    """Rank 0's count, in Lightning as elsewhere; a rank that goes by its own would save, and wait, alone."""
    for each in found:
        assert each["best"] == [[step, ["best:score"], 2] for step in (2, 4, 6, 8)]


def test_a_full_disk(found: list[dict[str, Any]]) -> None:
    """Rank 0 cannot write; the save of step 3 fails on both, and training goes on."""
    for each in found:
        assert [step for step, _, _ in each["full"]] == [6]
