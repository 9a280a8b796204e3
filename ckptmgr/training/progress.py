"""How far a training is, apart from its data: counters, logs, the loss since the last log, what a step's edge still has to do, and what evaluations
carry on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from ckptmgr.core.conditions import Conditions
from ckptmgr.training.evaluation_data import EvaluationData

# Facts of this process or of its arguments: a resumed run has its own.
_NOT_RESUMED = {"max_steps", "num_train_epochs", "is_local_process_zero", "is_world_process_zero"}


class RunningLoss:
    """The mean loss since the last log, summed on the device: no synchronisation per step."""

    def __init__(self, device: torch.device) -> None:
        self._sum = torch.zeros((), device=device)
        self._count = 0

    def add(self, loss: torch.Tensor) -> None:
        """Add the loss of one step, a detached scalar."""
        self._sum += loss
        self._count += 1

    def take(self) -> float:
        """The mean, and start anew; NaN if nothing was added."""
        mean = float(self._sum) / self._count if self._count else math.nan
        self._sum.zero_()
        self._count = 0
        return mean

    def state_dict(self) -> dict[str, Any]:
        """What is not logged yet."""
        # A float32 as a Python float and back is the same float32.
        return {"sum": float(self._sum), "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved sum."""
        self._sum.fill_(state["sum"])
        self._count = state["count"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEdge:
    """A step's edge whose evaluation a preemption cut off: a resumed run evaluates first, and goes on from there.

    Attributes:
        stage: which evaluation, that of the `step` or that of the `epoch`.
        save: whether a save was asked for before it.
        epoch_stop: whether the end of the epoch was asked for before it.
        training_stop: whether the end of the training was asked for before it.
        exhausted: whether the epoch has no further batch.
    """

    stage: Literal["step", "epoch"]
    save: bool
    epoch_stop: bool
    training_stop: bool
    exhausted: bool


class Progress:
    """The piece `trainer`: the dataclass of state that callbacks see, the loss that is not logged yet, an edge that is not over, and the state of
    the evaluation's loader.

    Attributes:
        open_edge: what is left of the edge of the present step; None when it is over.
        conditions: what the training runs under, as far as the trainer knows.
    """

    def __init__(
        self, state: Any, losses: RunningLoss, evaluation_data: EvaluationData, conditions: Callable[[], Conditions]
    ) -> None:
        self.open_edge: OpenEdge | None = None
        self._state = state
        self._losses = losses
        self._evaluation_data = evaluation_data
        # A manager asks each piece that has it, for the manifest.
        self.conditions = conditions

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        facts = {name: value for name, value in asdict(self._state).items() if name not in _NOT_RESUMED}
        open_edge = None if self.open_edge is None else asdict(self.open_edge)
        return {
            "state": facts,
            "losses": self._losses.state_dict(),
            "open_edge": open_edge,
            "evaluation_data": self._evaluation_data.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Set what was saved, except what belongs to this process and its arguments."""
        for name, value in saved["state"].items():
            # A field that a newer version added is none of ours.
            if hasattr(self._state, name) and name not in _NOT_RESUMED:
                setattr(self._state, name, value)
        self._losses.load_state_dict(saved["losses"])
        # Absent in checkpoints of 0.1.
        open_edge = saved.get("open_edge")
        self.open_edge = None if open_edge is None else OpenEdge(**open_edge)
        if "evaluation_data" in saved:
            self._evaluation_data.load_state_dict(saved["evaluation_data"])
