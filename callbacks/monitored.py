"""The metric that a callback goes by: found by name, the same on all ranks, and missed aloud once."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Literal

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.readings import metric_of, numbers_of
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import Mode
from ckptmgr.core.selectors import mode_by_name
from ckptmgr.training import ranks

_log = logging.getLogger(__name__)


class Monitored:
    """A metric of evaluations, by its name or by `eval_` and its name.

    Args:
        owner: the callback, for messages.
        name: the metric's.
        mode: the better direction; None: as the name tells, `min` for a loss or a perplexity.

    Attributes:
        missing_reported: whether it was said that an evaluation does not have it.
        asked: how often it was looked for.

    Raises:
        ConfigError: no name, no such mode, or a name that does not tell.
    """

    def __init__(self, owner: str, name: str, mode: Mode | None) -> None:
        checks.text(owner, "monitor", name, "eval_loss")
        checks.choice(owner, "mode", mode, (None, "min", "max"))
        found = mode or mode_by_name(name)
        if found is None:
            raise ConfigError(
                f"{owner}: whether less or more of {name!r} is better cannot be told from its name",
                hint="give mode='min' or mode='max'",
            )
        self.name = name
        self.mode: Literal["min", "max"] = found
        self.missing_reported = False
        self.asked = 0
        self._missing: tuple[int, set[str]] | None = None
        self._owner = owner

    def read(self, metrics: Mapping[str, Any] | None, state: Any) -> float | None:
        """The value in the metrics of an evaluation, the mean of those of all ranks, maybe not finite; None if it is not there. Says so once.

        A collective where there are several ranks: each must come here with its evaluation. A host with several evaluation sets makes one of each, at
        one step, and the metric may be in a later one: that it is missing is said by `say_if_missing`, or here at another step.
        """
        self.asked += 1
        if self._missing is not None and self._missing[0] != state.global_step:
            self.say_if_missing(state)
        value = ranks.mean_of_ranks(metric_of(metrics, self.name))
        if value is not None:
            self._missing = None
        elif not self.missing_reported:
            _, present = self._missing or (0, set())
            self._missing = (state.global_step, {*present, *numbers_of(metrics)})
        return value

    def say_if_missing(self, state: Any) -> None:
        """When a step begins, or training has ended: that no evaluation before has had it. Once."""
        if self._missing is None:
            return
        (step, present), self._missing = self._missing, None
        self.missing_reported = True
        if state.is_world_process_zero:
            _log.warning(
                "%s has nothing to go by: the evaluation at step %s has no metric %r; present: %s. It counts from the first evaluation that has it.",
                self._owner,
                step,
                self.name,
                ", ".join(sorted(present)) or "none",
            )

    def say_if_no_host_evaluates(self, args: Any, state: Any) -> None:
        """When training begins: that Hugging Face's Trainer is told not to evaluate, so that nothing will come."""
        strategy = getattr(args, "eval_strategy", None)
        if getattr(strategy, "value", strategy) == "no" and state.is_world_process_zero:
            _log.warning(
                "%s goes by %s of evaluations, and the trainer makes none (eval_strategy='no')", self._owner, self.name
            )

    def say_if_never_there(self, state: Any, what: str) -> None:
        """When training ends after some steps: that there was no `what` to look at, and the callback did nothing."""
        if not self.asked and state.global_step and state.is_world_process_zero:
            _log.warning("%s has had nothing to go by: there was no %s", self._owner, what)

    def is_better(self, value: float, than: float | None, *, by: float = 0.0) -> bool:
        """Whether `value` is better `than` another one, by more than `by`. Anything finite is better than None."""
        if than is None:
            return True
        return value < than - by if self.mode == "min" else value > than + by
