"""The built-in callbacks with two ranks that see different losses and metrics: they decide alike, at the same step, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANKS = """
import logging, math
from ckptmgr.callbacks.base import Callback, Priority
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.gradient_clip import GradientClipCallback
from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
from ckptmgr.callbacks.memory import MemoryCallback
from ckptmgr.trainer import Trainer, TrainingArguments

join()
lines = []

class Lines(logging.Handler):
    def emit(self, record):
        if record.levelno >= logging.WARNING:
            lines.append(record.getMessage())

logging.getLogger("ckptmgr").addHandler(Lines())

class Watch(Callback):
    priority = Priority.LOG
    def __init__(self):
        self.rates, self.norms, self.saves = [], [], []
    def on_pre_optimizer_step(self, model, optimizer, **kwargs):
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.norms.append(round(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters())), 4))
    def on_save(self, state, **kwargs):
        self.saves.append(state.global_step)

def run(callbacks, losses, metrics):
    # The loss of a step is its gradient, too; ranks have their own, and metrics of their own.
    lines.clear()
    model, watch = torch.nn.Linear(1, 1, bias=False), Watch()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    trainer = Trainer(
        wrapped,
        TrainingArguments(max_steps=8, eval_steps=1, logging_steps=1),
        train_dataloader=[torch.ones(1, 1)] * 8,
        eval_dataloader=[torch.ones(1, 1)],
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss_fn=lambda model, batch: model(batch).sum() * 0 + (model(batch) - model(batch).detach()).sum() + losses(trainer.state.global_step + 1),
        eval_fn=lambda model, loader: metrics(trainer.state.global_step),
        callbacks=[*callbacks, watch],
    )
    result = trainer.train()
    assert trainer.callbacks.failures == {}
    return {"step": result.global_step, "stopped": result.stopped, "rates": watch.rates, "norms": watch.norms, "saves": watch.saves, "lines": list(lines)}

# Rank 0 gets better, rank 1 worse; the mean is always 3.
apart = {"metrics": lambda step: {"loss": step - 4.0 if rank else 10.0 - step}, "losses": lambda step: 1.0}
early = EarlyStoppingCallback(patience=2)
plateau = LRSchedulerCallback("plateau", factor=0.5, patience=1)
# Only rank 1 has a NaN, in its third step; and only it has the metric at all.
nan = {"metrics": lambda step: {"score": 1.0} if rank else {}, "losses": lambda step: math.nan if rank and step == 3 else 1.0}
monitor = LossMonitorCallback(2, on_nonfinite=["save", "stop"])
found = {
    "early": run([early, MemoryCallback(1, warmup_steps=0)], **apart),
    "plateau": run([plateau], **apart),
    "monitor": run([monitor, EarlyStoppingCallback("score", 8, mode="max")], **nan),
    "clip": run([GradientClipCallback(0.25)], **apart),
}
found["early"]["best"] = [early.best, early.best_step]
"""


@pytest.fixture(scope="module")
def found(in_two_ranks: Callable[..., list[Any]]) -> list[dict[str, Any]]:
    """What each rank did in each training."""
    return in_two_ranks(RANKS)


def test_all_go_by_the_mean_of_their_metrics(found: list[dict[str, Any]]) -> None:
    """Rank 0 alone would never have ended."""
    for rank in found:
        assert (rank["early"]["step"], rank["early"]["stopped"]) == (3, "EarlyStoppingCallback")
        assert rank["early"]["best"] == [3.0, 1]
        assert rank["plateau"]["rates"] == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125]


def test_one_ranks_nan_ends_all_at_the_end_of_the_interval(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert (rank["monitor"]["step"], rank["monitor"]["stopped"], rank["monitor"]["saves"]) == (
            4,
            "LossMonitorCallback",
            [4],
        )


def test_rank_0_says_it(found: list[dict[str, Any]]) -> None:
    assert found[0]["monitor"]["lines"] == ["step 4: rank 1 has found something unusual; training ends"]
    assert ["training ends at step 3" in line for line in found[0]["early"]["lines"]] == [True]
    for name in ("early", "plateau", "monitor", "clip"):
        assert found[1][name]["lines"] == []


def test_the_reduced_gradient_is_clipped(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert rank["clip"]["norms"] == [0.25] * 8


SAVING = """
import threading
from pathlib import Path
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import Best
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager

join()
folder = Path(sys.argv[1])
left, at_close = folder / "left", []

class Slow(CheckpointManager):
    def close(self, *given, **how):
        # Rank 1 would be gone by then, were it not held.
        threading.Event().wait(0.5)
        at_close.append(left.exists())
        return super().close(*given, **how)

manager = Slow(folder / "store/run", local_dir=folder / "disk", transfer="thread")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
trainer = Trainer(
    model,
    TrainingArguments(max_steps=4, eval_steps=1),
    train_dataloader=[torch.ones(1, 1)] * 4,
    eval_dataloader=[torch.ones(1, 1)],
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loss_fn=lambda model, batch: model(batch).sum(),
    # Better with each step on rank 0, worse on rank 1.
    eval_fn=lambda model, loader: {"score": float(trainer.state.global_step * (1 if rank else -1))},
    callbacks=[SaveModelCallback(manager, Best("eval_score", mode="min"), save_at_end=False)],
)
trainer.train()
left.touch()
dist.barrier()
found = {"at_close": at_close, "saved": [manifest.step for manifest in manager.list()]}
"""


def test_the_main_process_decides_on_saves_and_is_waited_for(
    in_two_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """By its own metrics; and no rank leaves while it closes the manager: launchers end those that are left."""
    first, second = in_two_ranks(SAVING, tmp_path)
    assert first == {"at_close": [False], "saved": [1, 2, 3, 4]}
    assert second == {"at_close": [], "saved": [1, 2, 3, 4]}
