"""Several ranks with random numbers of their own: each goes on with its own after a resume, in the Trainer and in a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

RANK = """
import random
from pathlib import Path
import numpy as np
from ckptmgr.callbacks import Callback
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.rank_rng import gather_rng
from ckptmgr.training.state import capture, restore, write

root = Path(sys.argv[1])
join()
found = {}

def seed(offset):
    random.seed(offset + rank), np.random.seed(offset + rank), torch.manual_seed(offset + rank)

def numbers():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]

# --- a plain loop: its second checkpoint is made without gather_rng, its third with one that is out of date
seed(10)
gather_rng()
if rank == 0:
    write(capture({}), root / "gathered")
    write(capture({}), root / "alone")
expected = numbers()
gather_rng()
numbers()
if rank == 0:
    write(capture({}), root / "late")
dist.barrier()
for name in ("gathered", "alone", "late"):
    seed(90)
    report = restore(root / name, {})
    found[name] = [numbers(), list(report.notes)]
found["expected"] = expected

# --- the Trainer, with dropout
class Saving(Callback):
    def __init__(self, folder):
        self.folder = folder
    def on_step_end(self, state, control, **kwargs):
        control.should_save = self.folder is not None and state.global_step == 3 and rank == 0
    def on_save(self, checkpoint, **kwargs):
        if rank == 0:
            write(capture(checkpoint()), self.folder)

class Masks(Callback):
    def __init__(self):
        self.by_step = {}
    def on_step_end(self, state, model, outputs, **kwargs):
        self.by_step[state.global_step] = float(outputs["loss"]).hex()

def train(folder=None, resume_from=None):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5)))
    seed(20)
    masks = Masks()
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=6, logging_steps=None),
        train_dataloader=[torch.ones(2, 4)] * 4,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, batch: model(batch).square().mean() * (1 + float(np.random.rand())),
        callbacks=[masks, Saving(folder)],
    )
    result = trainer.train(resume_from)
    return masks.by_step, trainer.model.module[0].weight.detach().numpy().tobytes().hex(), result.restored

steps, weights, _ = train(root / "trainer")
dist.barrier()
resumed, resumed_weights, report = train(resume_from=root / "trainer")
found["trainer"] = {
    "whole": steps, "resumed": resumed, "weights": weights, "resumed_weights": resumed_weights, "notes": list(report.notes)
}
"""


@pytest.fixture(scope="module")
def found(in_two_ranks: Callable[..., list[Any]], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks saw."""
    return in_two_ranks(RANK, tmp_path_factory.mktemp("saved"))


def test_each_rank_gets_its_own_states_back(found: list[dict[str, Any]]) -> None:
    """From one checkpoint, which rank 0 wrote: Python's, NumPy's and torch's next numbers are those that would have come."""
    assert [rank["gathered"] for rank in found] == [[rank["expected"], []] for rank in found]
    assert found[0]["expected"] != found[1]["expected"]


@pytest.mark.parametrize("name", ["alone", "late"])
def test_a_checkpoint_without_them_says_so(found: list[dict[str, Any]], name: str) -> None:
    """What was gathered serves one save of that very moment; all ranks get rank 0's states otherwise, and a note."""
    said = ["only the random states of rank 0 are in the checkpoint: all 2 ranks go on with them"]
    assert [rank[name][1] for rank in found] == [said, said]
    assert found[0][name][0] == found[1][name][0]


def test_the_trainer_gathers_them_where_it_saves(found: list[dict[str, Any]]) -> None:
    """Although only rank 0 wants the save: dropout and losses of each rank go on as in the uninterrupted run, to the last bit."""
    for rank in (each["trainer"] for each in found):
        assert rank["resumed"] == {step: rank["whole"][step] for step in ("4", "5", "6")}
        assert rank["resumed_weights"] == rank["weights"]
        assert rank["notes"] == []
    assert found[0]["trainer"]["whole"] != found[1]["trainer"]["whole"]
