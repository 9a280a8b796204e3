"""What is unusual in the losses and gradient norms of a training. Values in, anomalies out; the rules are those of `LossMonitorCallback`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptmgr.callbacks.windows import FiniteWindow

Kind = Literal["nonfinite", "spike", "plateau", "explosion", "vanishing"]

# So many values make a mean or a median that others are compared with.
_ENOUGH = 10
# A deviation smaller than this part of the mean is none: of a loss that hardly moves, not everything is a spike.
_LEAST_DEVIATION = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Anomaly:
    """Something unusual.

    Attributes:
        kind: `nonfinite`, `spike` and `plateau` are of the loss; `explosion` and `vanishing` of the gradient's norm, and a norm that is not finite has
            exploded.
        step: the step that it belongs to; where the host tells losses by its logs, the one that was logged.
        value: the loss or norm.
        of: whose value it is, where that is not what `kind` says.
        usual: what it was compared with; None if there was nothing.
    """

    kind: Kind
    step: int
    value: float
    usual: float | None = None
    of: str = "loss"

    def __str__(self) -> str:
        """What it is, in words."""
        value, usual = f"{self.value:.4g}", "" if self.usual is None else f"{self.usual:.4g}"
        if self.kind == "nonfinite":
            return f"the {self.of} is {value}" + (f", its mean was {usual}" if usual else "")
        if self.kind == "spike":
            return f"the loss has a spike of {value}, its mean was {usual}"
        if self.kind == "plateau":
            return f"the mean loss is {value} and gets no better, its best was {usual}"
        how = "explodes" if self.kind == "explosion" else "vanishes"
        return f"the gradient {how}, its norm is {value}" + (f", usually {usual}" if usual else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on something is unusual; see `LossMonitorCallback`."""

    window: int
    spike_factor: float
    plateau_steps: int | None
    plateau_delta: float
    explosion_factor: float
    vanishing_norm: float


class Detector:
    """Takes in losses and norms in the order of steps.

    Attributes:
        losses: the last finite losses.
        norms: the last finite norms.
    """

    def __init__(self, limits: Limits) -> None:
        self.losses = FiniteWindow(limits.window)
        self.norms = FiniteWindow(limits.window)
        self._limits = limits
        self._best: tuple[float, int] | None = None
        self._plateau_said = False

    def look_at_loss(self, step: int, loss: float) -> Iterator[Anomaly]:
        """What is unusual about the loss of `step`; it is taken in."""
        mean = self.losses.mean
        if not math.isfinite(loss):
            yield Anomaly(kind="nonfinite", step=step, value=loss, usual=mean)
            return
        if mean is not None and len(self.losses) >= _ENOUGH and self._is_spike(loss - mean, mean):
            yield Anomaly(kind="spike", step=step, value=loss, usual=mean)
        self.losses.add(loss)
        if self._limits.plateau_steps is not None and self.losses.is_full:
            yield from self._look_for_plateau(step, self._limits.plateau_steps)

    def look_at_norm(self, step: int, norm: float) -> Iterator[Anomaly]:
        """What is unusual about the gradient's norm at `step`; it is taken in."""
        usual = self.norms.median if len(self.norms) >= _ENOUGH else None
        taken = self.norms.add(norm)
        if not taken or (usual is not None and norm > self._limits.explosion_factor * usual):
            yield Anomaly(kind="explosion", step=step, value=norm, usual=usual)
        elif norm < self._limits.vanishing_norm:
            yield Anomaly(kind="vanishing", step=step, value=norm, usual=usual)

    def _is_spike(self, above: float, mean: float) -> bool:
        factor = self._limits.spike_factor
        # In this order: the deviation needs the whole window.
        return above > factor * _LEAST_DEVIATION * abs(mean) and above > factor * (self.losses.deviation or 0.0)

    def _look_for_plateau(self, step: int, most_steps: int) -> Iterator[Anomaly]:
        mean, best = self.losses.mean or 0.0, self._best
        if best is None or mean < best[0] - self._limits.plateau_delta * abs(best[0]):
            self._best, self._plateau_said = (mean, step), False
        elif step - best[1] >= most_steps and not self._plateau_said:
            self._plateau_said = True
            yield Anomaly(kind="plateau", step=step, value=mean, usual=best[0])

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "losses": self.losses.values,
            "norms": self.norms.values,
            "best": None if self._best is None else list(self._best),
            "plateau_said": self._plateau_said,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was saved; of a larger window, with its newest values."""
        self.losses = FiniteWindow(self._limits.window, state["losses"])
        self.norms = FiniteWindow(self._limits.window, state["norms"])
        self._best = None if state["best"] is None else (state["best"][0], state["best"][1])
        self._plateau_said = state["plateau_said"]
