"""The callback that ends a training which gets no better."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.alone import AloneCallback
from ckptmgr.callbacks.base import Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.monitored import Monitored
from ckptmgr.callbacks.readings import metric_of
from ckptmgr.core.policies import Mode

_log = logging.getLogger(__name__)

_OWNER = "EarlyStoppingCallback"


class EarlyStoppingCallback(AloneCallback):
    """End the training when a metric has not got better for `patience` evaluations in a row.

    Better means: by more than `min_delta` than the best value so far. Rules:

    - *Ties* are not better: the earlier step stays the best.
    - *NaN and infinities* are never the best; such an evaluation counts as one that is not better, and is said.
    - *A missing metric* is said once, with the names that are there, and such an evaluation counts for nothing.
    - *One step evaluated twice*, at its end and at that of the epoch, counts once, with its first value.
    - *Several ranks* go by the mean of their values, so that all end together: each rank's evaluation must call this. Logs and warnings are rank 0's.
    - *Gradient accumulation* has no influence: evaluations are counted, not steps.
    - *A resume* goes on counting where the checkpoint was. The training that this has ended stays ended (with Hugging Face's Trainer and no
      `SaveModelCallback`, after one more step at most); one that is gone on with all the same (`continue_stopped`) has its whole patience again.

    Args:
        monitor: the metric, as evaluations name it; `loss` finds `eval_loss` too.
        patience: evaluations in a row that are not better; the last of them ends the training.
        mode: "min" or "max", the better direction; None: as the name tells, "min" for a loss or a perplexity.
        min_delta: by how much a value must be better.
        threshold: end the training as soon as the metric is at least this good.
        baseline: what is to be beaten first: without a better value than this, and better by `min_delta`, patience runs from the first evaluation.
        warmup: evaluations at the beginning that are not looked at.
        source: "evaluation": the metrics of evaluations. "log": what is logged, such as TRL's `rewards/accuracies`; a log without the metric is none to
            look at, and is not missed.
        restore_best: put the weights of the best evaluation back when the training ends, unless it ends by an exception or a preemption. They are kept in
            host memory, one copy, made at each best evaluation. Checkpoints are of the last step all the same; a final model that is pushed at the end
            (`save_final`) has the best weights. Without a `CallbackManager` that depends on the order: add this callback first.

    Attributes:
        best: the best value so far; None before the first.
        best_step: the step of `best`.
        waited: evaluations since then.
        stopped_step: the step at which this ended the training; None if it did not.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    priority: int = Priority.STOP
    may_run_async = False

    def __init__(
        self,
        monitor: str = "eval_loss",
        patience: int = 3,
        *,
        mode: Mode | None = None,
        min_delta: float = 0.0,
        threshold: float | None = None,
        baseline: float | None = None,
        warmup: int = 0,
        source: Literal["evaluation", "log"] = "evaluation",
        restore_best: bool = False,
    ) -> None:
        checks.whole(_OWNER, "patience", patience)
        checks.whole(_OWNER, "warmup", warmup, least=0)
        checks.number(_OWNER, "min_delta", min_delta, least=0)
        checks.number(_OWNER, "threshold", threshold, optional=True)
        checks.number(_OWNER, "baseline", baseline, optional=True)
        checks.choice(_OWNER, "source", source, ("evaluation", "log"))
        checks.choice(_OWNER, "restore_best", restore_best, (False, True))
        self.metric = Monitored(_OWNER, monitor, mode)
        self.patience = patience
        self.min_delta = float(min_delta)
        self.threshold = threshold
        self.baseline = baseline
        self.warmup = warmup
        self.source = source
        self.restore_best = restore_best
        if restore_best:
            # Before a callback that pushes the model at the end.
            self.priority = Priority.SAVE - 5
        self.best: float | None = None
        self.best_step: int | None = None
        self.waited = 0
        self.stopped_step: int | None = None
        self._evaluations = 0
        self._last_step: int | None = None
        self._failed = False
        self._weights: dict[str, Any] | None = None
        self._weights_step: int | None = None
        self._dispatcher: Any = None

    def joined(self, dispatcher: Any) -> None:
        """Know who is beside this callback."""
        self._dispatcher = dispatcher

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Nothing has failed yet."""
        self._failed = False
        self._take_up(state)
        self._stay_stopped(state, control)
        if self.source == "evaluation":
            self.metric.say_if_no_host_evaluates(args, state)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """All evaluations of the step before are over."""
        self.metric.say_if_missing(state)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count the evaluation. A collective where there are several ranks."""
        if self.source == "evaluation" and state.global_step != self._last_step:
            self._judge(self.metric.read(metrics, state), state, control, model)
            self._keep(state)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count the log, if it has the metric. A collective then where there are several ranks."""
        wanted = self.source == "log" and state.global_step != self._last_step
        if wanted and metric_of(logs, self.metric.name) is not None:
            self._judge(self.metric.read(logs, state), state, control, model)
            self._keep(state)

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The weights stay as they are."""
        self._failed = True

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Put the best weights back, if that is wanted."""
        self.metric.say_if_missing(state)
        # Hugging Face's control does not tell; who is asked for a preemption beside this callback does.
        notice = getattr(getattr(self._dispatcher, "preemption", None), "notice", None)
        interrupted = notice is not None or getattr(control, "should_interrupt", False)
        if not self._evaluations:
            what = "evaluation" if self.source == "evaluation" else f"log with {self.metric.name!r}"
            self.metric.say_if_never_there(state, what)
        if self.restore_best and model is not None and not self._failed and not interrupted:
            self._put_back(state, model)
        self._weights = None

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What was counted."""
        return {
            "monitor": self.metric.name,
            "mode": self.metric.mode,
            "best": self.best,
            "best_step": self.best_step,
            "waited": self.waited,
            "evaluations": self._evaluations,
            "last_step": self._last_step,
            "stopped_step": self.stopped_step,
            "missing_reported": self.metric.missing_reported,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting; not if it was another metric that was counted."""
        if (state["monitor"], state["mode"]) != (self.metric.name, self.metric.mode):
            _log.warning(
                "%s went by %s (%s) in the checkpoint, now by %s (%s): it starts anew",
                _OWNER,
                state["monitor"],
                state["mode"],
                self.metric.name,
                self.metric.mode,
            )
            return
        self.best, self.best_step = state["best"], state["best_step"]
        self.waited, self.stopped_step = state["waited"], state["stopped_step"]
        self._evaluations, self._last_step = state["evaluations"], state["last_step"]
        self.metric.missing_reported = state["missing_reported"]

    # --- deciding ---------------------------------------------------------------------------------------------------------

    def _judge(self, value: float | None, state: TrainerState, control: TrainerControl, model: Any) -> None:
        if value is None:
            return
        if self.stopped_step is not None and state.global_step > self.stopped_step:
            # Gone on with on purpose: it would end again at the next evaluation.
            self.stopped_step, self.waited = None, 0
        self._last_step = state.global_step
        self._evaluations += 1
        if self._evaluations <= self.warmup:
            return
        if not math.isfinite(value):
            self._say(
                state, "%s: %s is %s at step %d, which is not better", _OWNER, self.metric.name, value, self._last_step
            )
        if math.isfinite(value) and self._is_better(value):
            self.best, self.best_step, self.waited = value, state.global_step, 0
            if self.restore_best and model is not None:
                self._copy_weights(model)
        else:
            self.waited += 1
        self._stop_if_due(value, state, control)

    def _is_better(self, value: float) -> bool:
        than = self.baseline if self.best is None else self.best
        return self.metric.is_better(value, than, by=self.min_delta)

    def _stop_if_due(self, value: float, state: TrainerState, control: TrainerControl) -> None:
        threshold, name = self.threshold, self.metric.name
        if threshold is not None and math.isfinite(value) and not self.metric.is_better(threshold, value):
            self._say(
                state,
                "training ends at step %d: %s is %g, at least as good as %g",
                self._last_step,
                name,
                value,
                threshold,
            )
        elif self.waited >= self.patience:
            best = "nothing" if self.best is None else f"{self.best:g} of step {self.best_step}"
            self._say(
                state,
                "training ends at step %d: %s is %g, and nothing was better than %s for %d evaluations",
                self._last_step,
                name,
                value,
                best if self.baseline is None or self.best is not None else f"the baseline {self.baseline:g}",
                self.waited,
            )
        else:
            return
        self.stopped_step = state.global_step
        control.should_training_stop = True

    @staticmethod
    def _say(state: TrainerState, message: str, *arguments: Any) -> None:
        if state.is_world_process_zero:
            _log.warning(message, *arguments)

    # --- weights ----------------------------------------------------------------------------------------------------------

    def _copy_weights(self, model: Any) -> None:
        """Copy the weights to host memory, in place of the copy before; of sharded ones the part of this rank."""
        kept = self._weights or {}
        for name, value in model.state_dict().items():
            if hasattr(value, "detach"):
                local = _local(value.detach())
                if name in kept and kept[name].shape == local.shape:
                    kept[name].copy_(local)
                else:
                    kept[name] = local.to("cpu", copy=True)
        self._weights, self._weights_step = kept, self.best_step

    def _put_back(self, state: TrainerState, model: Any) -> None:
        if self.best_step is None or self.best_step == state.global_step:
            return
        if self._weights is None or self._weights_step != self.best_step:
            self._say(
                state,
                "the best weights, of step %d, cannot be put back: they are from before this process; take them from the checkpoint of that step",
                self.best_step,
            )
            return
        _load(model, self._weights)
        if state.is_world_process_zero:
            _log.info("the model has the weights of step %d again, the best by %s", self.best_step, self.metric.name)


def _local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def _load(model: Any, weights: Mapping[str, Any]) -> None:
    whole = {}
    for name, live in model.state_dict().items():
        if name in weights and hasattr(live, "to_local"):
            # The parts of other ranks are their own.
            live.detach().to_local().copy_(weights[name])
        elif name in weights:
            whole[name] = weights[name]
    model.load_state_dict(whole, strict=False)
