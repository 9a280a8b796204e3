"""What hosts say of a training, made plain: metrics as numbers, whether an epoch is complete, how large a checkpoint will be. Imports no torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ckptmgr.core.policies import AnyOf, EveryMinutes, SavePolicy

_log = logging.getLogger(__name__)


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, as floats: also from NumPy scalars and 0-d tensors; non-finite ones stay.

    Without `epoch`, which Hugging Face's Trainer adds to them: a checkpoint has one already.
    """
    found = {}
    for name, value in metrics.items():
        if name == "epoch":
            continue
        try:
            found[name] = float(value)
        except (TypeError, ValueError):
            _log.debug("metric %s is no number: %r", name, value)
    return found


def finished_epochs(state: Any) -> int | None:
    """How many epochs are complete, if the last one just was; None in the middle of one.

    `state.epoch` is a float that hosts compute as a quotient; an epoch cut short by max_steps or a stop is no finished one.
    """
    epoch = state.epoch or 0.0
    completed = round(epoch)
    return completed if completed and math.isclose(epoch, completed, rel_tol=1e-9) else None


def epoch_ends(state: Any, control: Any) -> bool:
    """Whether `on_epoch_end` follows before another step."""
    return bool(control.should_training_stop or control.should_epoch_stop or finished_epochs(state) is not None)


def checkpoint_bytes(model: Any) -> int | None:
    """About the size of a checkpoint: the model, and two values per trained parameter for an optimizer like Adam; None without a model."""
    try:
        parameters = list(model.parameters())
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        return int(sum(p.numel() * p.element_size() for p in parameters + 2 * trained))
    except (AttributeError, TypeError):
        return None


def goes_by_time(policy: SavePolicy) -> bool:
    """Whether ranks with different clocks would decide differently."""
    parts = policy.policies if isinstance(policy, AnyOf) else (policy,)
    return any(isinstance(part, EveryMinutes) for part in parts)
