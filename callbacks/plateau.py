"""When a metric of evaluations gets no better, and what the learning rate is multiplied by then; the rules of torch's ReduceLROnPlateau."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.monitored import Monitored
from ckptmgr.core.policies import Mode


class Plateau:
    """Args are those of `LRSchedulerCallback`.

    Attributes:
        metric: what it goes by.
        scale: the product of all reductions so far; 1 at first.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    def __init__(
        self, owner: str, monitor: str, mode: Mode | None, factor: float, patience: int, min_delta: float, cooldown: int
    ) -> None:
        checks.number(owner, "factor", factor, above=0, below=1)
        checks.whole(owner, "patience", patience, least=0)
        checks.number(owner, "min_delta", min_delta, least=0)
        checks.whole(owner, "cooldown", cooldown, least=0)
        self.metric = Monitored(owner, monitor, mode)
        self.scale = 1.0
        self._factor, self._patience, self._min_delta, self._cooldown = factor, patience, min_delta, cooldown
        self._best: float | None = None
        self._waited = 0
        self._cooling = 0
        self._last_step: int | None = None

    def is_over(self, metrics: Mapping[str, Any] | None, state: Any) -> bool:
        """Take in an evaluation; whether it reduces `scale`. A step's second evaluation is none. A collective where there are several ranks."""
        if state.global_step == self._last_step:
            return False
        value = self.metric.read(metrics, state)
        if value is None:
            return False
        self._last_step = state.global_step
        if self._is_better(value):
            self._best, self._waited = value, 0
        else:
            self._waited += 1
        if self._cooling:
            self._cooling -= 1
            self._waited = 0
        if self._waited <= self._patience:
            return False
        self.scale *= self._factor
        self._cooling, self._waited = self._cooldown, 0
        return True

    def _is_better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self.metric.is_better(value, self._best, by=self._min_delta * abs(self._best or 0.0))

    def state_dict(self) -> dict[str, Any]:
        """JSON values."""
        return {
            "monitor": self.metric.name,
            "scale": self.scale,
            "best": self._best,
            "waited": self._waited,
            "cooling": self._cooling,
            "last_step": self._last_step,
            "missing_reported": self.metric.missing_reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was saved; of another metric, with the scale alone."""
        self.scale = state["scale"]
        if state["monitor"] != self.metric.name:
            return
        self._best, self._waited, self._cooling = state["best"], state["waited"], state["cooling"]
        self._last_step, self.metric.missing_reported = state["last_step"], state["missing_reported"]
