"""A callback that watches whether preference training tells chosen answers from rejected ones."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.alone import AloneCallback
from ckptmgr.callbacks.averages import SampledMeans
from ckptmgr.callbacks.base import Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.dpo_rewards import has_reference, implicit_rewards, is_preference_batch, reward_accuracies
from ckptmgr.callbacks.readings import logged_loss, numbers_of
from ckptmgr.callbacks.windows import FiniteWindow

_log = logging.getLogger(__name__)

_ACCURACY = "rewards/accuracies"
_EVAL_ACCURACY = f"eval_{_ACCURACY}"
# Well below chance is no lack of learning.
_LEARNS_BACKWARDS = 0.35


class DPOAccuracyCallback(AloneCallback):
    """Warn, and stop if asked to, when the accuracy of implicit rewards stays near chance.

    The accuracy is the share of pairs whose chosen answer has the higher reward (see `ckptmgr.callbacks.dpo_rewards`). A *reading* of it is, in this
    order of preference:

    - every `log_interval` steps, the mean over all pairs of these steps, micro-batches and ranks, where the host brings `outputs` with the rewards of
      each pair, as the embedded Trainer does for a loss function that returns `rewards/chosen` and `rewards/rejected`;
    - there, at every `log_interval`-th step, the pairs of its last micro-batch, computed from `batch` with the `reference` model: two forward passes;
    - `rewards/accuracies` of the logs, as TRL and ms-swift write them: the mean since the last log, over all ranks.

    When the mean of the last `window` readings is below `threshold`, it is warned, once until the mean has been above again; with `stop`, the
    training ends there, for good. In the same way the accuracy of evaluations is computed where the host does not, and put into their `metrics` as
    `eval_rewards/accuracies`: other callbacks can save by it, or stop early. With `monitor="eval_rewards/accuracies"` these are the readings.

    *Ties* of rewards count as wrong, and so do rewards that are not numbers: as TRL counts. *Readings* that are not finite are left out of the window
    and said once. *A missing metric* is said once, with the names that are there, and ends nothing. *Several ranks*: what TRL logs is equal on all;
    what is computed here is averaged over all, in one call per `log_interval` steps, so all ranks stop together. *Resume*: the window is part of the
    saved state.

    Args:
        threshold: the accuracy that training has to reach.
        window: how many readings the mean is over; there is no decision before so many.
        warmup: steps without a decision.
        stop: end the training.
        monitor: the metric to read.
        log_interval: steps from one reading to the next, where it is computed here.
        reference: the model before training, on the same device; computes rewards where nobody says them.
        beta: of the rewards.

    Attributes:
        accuracy: the mean of the window; None before the first reading.
        readings: how many were taken in this process.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    # Before SAVE: a policy may go by the accuracy that this puts into the metrics.
    priority = Priority.SAVE - 5

    def __init__(
        self,
        threshold: float = 0.52,
        *,
        window: int = 20,
        warmup: int = 100,
        stop: bool = False,
        monitor: str = _ACCURACY,
        log_interval: int = 10,
        reference: Any = None,
        beta: float = 0.1,
    ) -> None:
        owner = type(self).__name__
        checks.number(owner, "threshold", threshold, above=0.0, most=1.0)
        checks.whole(owner, "window", window)
        checks.whole(owner, "warmup", warmup, least=0)
        checks.whole(owner, "log_interval", log_interval)
        checks.number(owner, "beta", beta, above=0.0)
        checks.choice(owner, "stop", stop, (True, False))
        checks.text(owner, "monitor", monitor, _ACCURACY)
        self.threshold = threshold
        self.window = window
        self.warmup = warmup
        self.stop = stop
        self.monitor = monitor
        self.log_interval = log_interval
        self.reference = reference
        self.beta = beta
        self.readings = 0
        self._values = FiniteWindow(window)
        self._is_low = False
        self._margin: float | None = None
        self._pairs = SampledMeans("accuracy", every=log_interval)
        self._evaluated = SampledMeans("accuracy")
        self._brings_batches = False
        self._computes = False
        self._said: set[str] = set()

    @property
    def may_run_async(self) -> bool:  # type: ignore[override]
        """Not if it may end the training."""
        return not self.stop

    @property
    def accuracy(self) -> float | None:
        """The mean of the window; None before the first reading."""
        return self._values.mean

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Go on with the window of a resumed training, where no manager of callbacks has brought it."""
        self._take_up(state)

    def on_substep_end(
        self, args: Any, state: TrainerState, control: TrainerControl, outputs: Any = None, **kwargs: Any
    ) -> None:
        """Count the pairs of a micro-batch."""
        self._pairs.add(accuracy=self._right(args, None, None, outputs, compute=False))

    def on_step_end(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        batch: Any = None,
        outputs: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count the pairs of the last micro-batch; every `log_interval` steps, take a reading. Then a collective, if there are other ranks."""
        if batch is None and outputs is None:
            return  # the host says it in its logs, or not at all
        due = state.global_step % self.log_interval == 0
        self._pairs.add(accuracy=self._right(args, model, batch, outputs, compute=due))
        found = self._pairs.sample(state.global_step)
        if found is not None and not math.isnan(found["accuracy"]) and self.monitor == _ACCURACY:
            self._read(found["accuracy"], state, control)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Read the metric of training, if it is not computed here."""
        if self._is_of_evaluations or self._computes or not logs:
            return
        found = numbers_of(logs).get(self.monitor)
        if found is not None:
            self._note_margin(logs)
            self._read(found, state, control)
            self._keep(state)
        elif logged_loss(logs) is not None:
            self._say_missing(state, logs)

    def on_evaluate_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget the pairs of an evaluation that was cut off."""
        self._evaluated = SampledMeans("accuracy")

    def on_prediction_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        batch: Any = None,
        outputs: Any = None,
        **kwargs: Any,
    ) -> None:
        """Count the pairs of a batch of an evaluation."""
        if batch is not None or outputs is not None:
            self._brings_batches = True
            self._evaluated.add(accuracy=self._right(args, model, batch, outputs, compute=True))

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the accuracy of the evaluation into its metrics, if it is not there; and read it, if that is wanted. A collective, as in `on_step_end`."""
        metrics = {} if metrics is None else metrics
        if self._brings_batches and _EVAL_ACCURACY not in metrics:
            accuracy = self._evaluated.take()["accuracy"]
            if not math.isnan(accuracy):
                metrics[_EVAL_ACCURACY] = accuracy
        self._evaluated = SampledMeans("accuracy")
        if self._is_of_evaluations:
            found = numbers_of(metrics).get(self.monitor)
            if found is None:
                self._say_missing(state, metrics)
            else:
                self._note_margin(metrics)
                self._read(found, state, control)
                self._keep(state)

    def state_dict(self) -> dict[str, Any]:
        """The window, whether it was low, and the pairs since the last reading."""
        return {"readings": self._values.values, "is_low": self._is_low, "pairs": self._pairs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the window of the run that was saved."""
        self._values = FiniteWindow(self.window, state["readings"])
        self._is_low = state["is_low"]
        self._pairs.load_state_dict(state["pairs"])

    # --- deciding ---------------------------------------------------------------------------------------------------------

    @property
    def _is_of_evaluations(self) -> bool:
        return self.monitor.startswith("eval_")

    def _right(self, args: Any, model: Any, batch: Any, outputs: Any, *, compute: bool) -> Any:
        """Which pairs are in the right order; None if nothing says so."""
        found = reward_accuracies(outputs)
        can_compute = (
            model is not None and is_preference_batch(batch) and (self.reference is not None or has_reference(batch))
        )
        self._computes = self._computes or found is not None or can_compute
        if found is not None or not compute or not can_compute:
            return found
        with _autocast(args, batch):
            chosen, rejected = implicit_rewards(model, batch, reference=self.reference, beta=self.beta)
        return chosen > rejected

    def _read(self, accuracy: float, state: TrainerState, control: TrainerControl) -> None:
        self.readings += 1
        if not self._values.add(accuracy):
            self._say("nonfinite", state, "%s is %s at step %d: left out", self.monitor, accuracy, state.global_step)
            return
        mean = self._values.mean
        if mean is None or len(self._values) < self.window or state.global_step <= self.warmup:
            return
        if mean >= self.threshold:
            if self._is_low and state.is_world_process_zero:
                _log.info("%s is %.3f over the last %d readings, no longer low", self.monitor, mean, self.window)
            self._is_low = False
            return
        if self.stop:
            control.should_training_stop = True
        if not self._is_low and state.is_world_process_zero:
            _log.warning(
                "%s is %.3f over the last %d readings, below %.3g, at step %d%s - %s",
                self.monitor,
                mean,
                self.window,
                self.threshold,
                state.global_step,
                ": training ends" if self.stop else "",
                self._advice(mean),
            )
        self._is_low = True

    def _note_margin(self, numbers: Mapping[str, Any]) -> None:
        self._margin = numbers_of(numbers).get(self.monitor.replace("accuracies", "margins"))

    def _advice(self, mean: float) -> str:
        if self._margin == 0:
            return "the rewards of both answers are the same, as before any training: look at the learning rate, and at what is trained"
        if mean < _LEARNS_BACKWARDS:
            return "are chosen and rejected answers swapped?"
        return "look at the pairs, the learning rate and beta"

    def _say_missing(self, state: TrainerState, names: Mapping[str, Any]) -> None:
        self._say(
            "missing",
            state,
            "%s is neither in the logs nor can it be computed here; there are: %s",
            self.monitor,
            ", ".join(sorted(numbers_of(names))) or "none",
        )

    def _say(self, what: str, state: TrainerState, message: str, *facts: object) -> None:
        """Warn of `what`, once, on the main process."""
        if what not in self._said and state.is_world_process_zero:
            _log.warning(message, *facts)
        self._said.add(what)


def _autocast(args: Any, batch: Mapping[str, Any]) -> Any:
    """Mixed precision as the host's steps have it: the embedded Trainer's `amp`, or Hugging Face's `bf16` and `fp16`."""
    from ckptmgr.training.forward import autocast

    flags = [kind for kind in ("bf16", "fp16") if getattr(args, kind, False)]
    return autocast(batch["input_ids"].device, getattr(args, "amp", None) or next(iter(flags), None))
