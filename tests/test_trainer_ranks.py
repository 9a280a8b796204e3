"""The embedded Trainer under preemption with several ranks: one gets the signal, all leave at the same edge."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

RANK = """
import signal
from ckptmgr.callbacks import Callback
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.preemption import Preemption

join()

class Watching(Callback):
    def __init__(self):
        self.preemption = Preemption(repeat_s=0.0)
        self.saves = []
    def on_train_begin(self, **kwargs):
        self.preemption.install()
    def on_save(self, state, checkpoint, **kwargs):
        self.saves.append([state.global_step, checkpoint()["trainer"].state_dict()["open_edge"]])
    def on_train_end(self, **kwargs):
        self.preemption.uninstall()

def run(at, on_rank, sizes, own_eval):
    seen = {}
    def here(place):
        seen[place] = seen.get(place, 0) + 1
        if [place, seen[place]] == at and rank == on_rank:
            os.kill(os.getpid(), signal.SIGTERM)
    def loss_fn(model, batch):
        here("forward" if model.training else "evaluation")
        return model(batch).square().mean()
    def eval_fn(model, loader):
        for batch in loader:
            here("evaluation")
        return {"loss": 1.0}
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    watching = Watching()
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=4, gradient_accumulation_steps=3, eval_steps=2),
        train_dataloader=[torch.ones(1, 2)] * sizes[rank],
        eval_dataloader=[torch.ones(1, 2)] * 3,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=loss_fn,
        eval_fn=eval_fn if own_eval else None,
        callbacks=[watching],
    )
    result = trainer.train()
    notice = watching.preemption.notice
    return {"step": result.global_step, "interrupted": result.interrupted, "saves": watching.saves, "seen": seen,
            "source": notice and notice.source}

found = [run(*scenario) for scenario in json.loads(sys.argv[1])]
"""

EQUAL, UNEQUAL = [30, 30], [30, 33]
SCENARIOS: dict[str, tuple[Any, ...]] = {
    "in a step": (["forward", 5], 1, EQUAL, False),
    "in a step, unequal": (["forward", 5], 1, UNEQUAL, False),
    "in an evaluation": (["evaluation", 2], 0, EQUAL, False),
    "in an evaluation of ones own": (["evaluation", 2], 0, EQUAL, True),
    "nowhere": (["nowhere", 1], 0, EQUAL, False),
}


@pytest.fixture(scope="module")
def found(in_two_ranks: Callable[..., list[Any]]) -> dict[str, list[dict[str, Any]]]:
    """What each rank did in each scenario."""
    ranks = in_two_ranks(RANK, json.dumps(list(SCENARIOS.values())))
    return {name: [ranks[0][i], ranks[1][i]] for i, name in enumerate(SCENARIOS)}


def test_a_step_is_left_by_all_ranks_at_once(found: dict[str, list[dict[str, Any]]]) -> None:
    """Rank 1 is signalled in the second of three micro-batches; both leave after it, at step 1."""
    for rank in found["in a step"]:
        assert rank == {
            "step": 1,
            "interrupted": True,
            "saves": [[1, None]],
            "seen": {"forward": 5},
            "source": "sigterm",
        }


def test_ranks_with_other_numbers_of_batches_finish_the_step(found: dict[str, list[dict[str, Any]]]) -> None:
    """A look that only some ranks make would wait for ever."""
    for rank in found["in a step, unequal"]:
        assert (rank["step"], rank["interrupted"], rank["seen"]["forward"]) == (2, True, 6)
        # The evaluation that is due at step 2 is left to the resumed run.
        ((step, open_edge),) = rank["saves"]
        assert (step, open_edge["stage"]) == (2, "step")


def test_an_evaluation_is_left_by_all_ranks_at_once(found: dict[str, list[dict[str, Any]]]) -> None:
    """Both had two of three batches."""
    for rank in found["in an evaluation"]:
        assert (rank["step"], rank["interrupted"], rank["seen"]) == (2, True, {"forward": 6, "evaluation": 2})
        assert rank["saves"][0][1]["stage"] == "step"


def test_an_evaluation_of_ones_own_is_finished(found: dict[str, list[dict[str, Any]]]) -> None:
    """It may use collectives, or leave batches out on some ranks: nothing comes between; the next edge is early enough."""
    for rank in found["in an evaluation of ones own"]:
        assert (rank["step"], rank["interrupted"], rank["seen"]) == (2, True, {"forward": 6, "evaluation": 3})
        assert rank["saves"] == [[2, None]]


def test_without_a_signal_nothing_changes(found: dict[str, list[dict[str, Any]]]) -> None:
    """All steps and evaluations, no save of ours."""
    for rank in found["nowhere"]:
        assert rank == {
            "step": 4,
            "interrupted": False,
            "saves": [],
            "seen": {"forward": 12, "evaluation": 6},
            "source": None,
        }
