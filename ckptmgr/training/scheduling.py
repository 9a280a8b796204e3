"""When the learning rate's scheduler steps: after optimizer steps, epochs, micro-batches or evaluations."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.metrics import metric_name
from ckptmgr.training import ranks
from ckptmgr.training.arguments import TrainingArguments

_log = logging.getLogger(__name__)


class Schedule:
    """Steps a scheduler as `TrainingArguments.lr_scheduler_interval` says; without a scheduler it does nothing.

    All of it happens at a step's end or edge, never between micro-batches: a step that is cut off leaves the scheduler as it was.

    Args:
        scheduler: anything with `step()`; one whose `step` requires an argument, such as ReduceLROnPlateau, gets the metric.
        args: the interval and the metric's name.
        evaluates: whether there is anything to evaluate on.

    Raises:
        ConfigError: the scheduler and the interval do not fit.
    """

    def __init__(self, scheduler: Any, args: TrainingArguments, *, evaluates: bool) -> None:
        self._scheduler = scheduler
        self._interval = args.lr_scheduler_interval
        self._metric = args.lr_scheduler_metric
        self._stepped_epoch = False
        self._wants_metric = scheduler is not None and _requires_argument(scheduler.step)
        if scheduler is None:
            return
        name = type(scheduler).__name__
        if self._wants_metric and self._interval != "evaluation":
            raise ConfigError(
                f"{name} steps by a metric, but lr_scheduler_interval is {self._interval!r}",
                hint="use lr_scheduler_interval='evaluation', and lr_scheduler_metric for the metric's name",
            )
        if self._interval == "evaluation":
            if not evaluates:
                raise ConfigError(
                    f"{name} is to step after evaluations, but there is no eval_dataloader",
                    hint="give one, or use another lr_scheduler_interval",
                )
            if not (args.eval_steps or args.eval_epochs):
                _log.warning(
                    "%s steps after evaluations, but neither eval_steps nor eval_epochs is set: it steps only when a callback asks for one",
                    name,
                )

    def begin_epoch(self, *, exhausted: bool = False) -> None:
        """An epoch begins, or goes on. `exhausted`: its last step was done before, and with it the scheduler's."""
        self._stepped_epoch = exhausted

    def optimizer_stepped(self, *, micro_batches: int, skipped: bool, exhausted: bool) -> None:
        """The optimizer's step over `micro_batches` is done; `skipped`: by an overflow; `exhausted`: it was known to be the epoch's last."""
        if self._scheduler is None:
            return
        if self._interval == "epoch":
            if exhausted:
                self._step_epoch()
        elif not skipped:
            for _ in range({"step": 1, "batch": micro_batches}.get(self._interval, 0)):
                self._scheduler.step()

    def epoch_ended(self) -> None:
        """The epoch is over, maybe cut short, or without anyone having known that its last step was that."""
        if self._scheduler is not None and self._interval == "epoch":
            self._step_epoch()

    def evaluated(self, metrics: Mapping[str, float]) -> None:
        """An evaluation gave `metrics`. With a metric and several ranks a collective: all go by the mean, or their rates would part.

        Raises:
            ConfigError: the metric is not among them.
        """
        if self._scheduler is None or self._interval != "evaluation":
            return
        if not self._wants_metric:
            self._scheduler.step()
            return
        value = ranks.mean_of_ranks(metrics.get(metric_name(self._metric, metrics) or ""))
        if value is None:
            raise ConfigError(
                f"{type(self._scheduler).__name__} goes by {self._metric!r}, which the evaluation did not give",
                hint="set lr_scheduler_metric to one of: " + ", ".join(sorted(metrics)),
            )
        self._scheduler.step(value)

    def _step_epoch(self) -> None:
        if not self._stepped_epoch:
            self._stepped_epoch = True
            self._scheduler.step()


def _requires_argument(function: Any) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
