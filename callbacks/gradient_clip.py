"""The callback that limits gradients, once per optimizer step."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from ckptmgr.callbacks import checks, gradients
from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.readings import Pending
from ckptmgr.core.errors import ConfigError

_log = logging.getLogger(__name__)

_OWNER = "GradientClipCallback"
# Of Hugging Face's and our TrainingArguments, and of Lightning's Trainer: what they clip to, themselves.
_LIMITS_OF_HOSTS = ("max_grad_norm", "gradient_clip_val")


class GradientClipCallback(Callback):
    """Limit the gradients before the optimizer's step: by their total norm, or each element by value.

    Rules:

    - *Once per optimizer step*: over the complete gradient of all micro-batches, after it is unscaled; what a scaler has scaled and nobody has unscaled yet
      is unscaled here.
    - *Never twice*: a host that clips by itself (`max_grad_norm` of Hugging Face's and of our TrainingArguments, `gradient_clip_val` of Lightning's
      Trainer) is left to do it, and this callback does nothing, which it says once. With `replace_host`, it turns that off for the training, and clips.
    - *A norm that is not finite* is reported with its step, and nothing is clipped: scaled by it, the whole gradient would be NaN. What becomes of the step is
      the scaler's or the optimizer's matter.
    - *Several ranks* have the same gradient after it was reduced; where it is sharded, its norm is a collective at each step, on all ranks.
    - *No gradients at all*, as with DeepSpeed, which clips by its own configuration, is said once.
    - *A resume* needs nothing; the counts go on.

    No step waits for the device: norms are read every `log_interval` steps.

    Args:
        max_norm: the most that the 2-norm of all gradients may be. Give this or `max_value`.
        max_value: the most that any element may be, in magnitude.
        replace_host: see above.
        scaler: the GradScaler of a loop of your own, if there is one; Hugging Face's Trainer brings its own, ours has unscaled before.
        log_interval: steps between two lines.

    Attributes:
        steps: optimizer steps whose gradients were looked at, until the last look.
        clipped: those with a norm above `max_norm`; not counted with `max_value`.
        nonfinite: those whose norm was not finite.
        last_norm: the newest norm, before clipping; None before the first look.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    may_run_async = False

    def __init__(
        self,
        max_norm: float | None = None,
        *,
        max_value: float | None = None,
        replace_host: bool = False,
        scaler: Any = None,
        log_interval: int = 50,
    ) -> None:
        checks.number(_OWNER, "max_norm", max_norm, above=0, optional=True)
        checks.number(_OWNER, "max_value", max_value, above=0, optional=True)
        checks.choice(_OWNER, "replace_host", replace_host, (False, True))
        checks.whole(_OWNER, "log_interval", log_interval)
        if (max_norm is None) == (max_value is None):
            raise ConfigError(f"{_OWNER}: max_norm is {max_norm}, max_value is {max_value}", hint="give one of them")
        self.max_norm = max_norm
        self.max_value = max_value
        self.replace_host = replace_host
        self.log_interval = log_interval
        self.steps = self.clipped = self.nonfinite = 0
        self.last_norm: float | None = None
        self._scaler = scaler
        self._norms = Pending()
        self._host_limits: dict[str, Any] = {}
        self._leaves_it = False
        self._none_said = False

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look whether the host clips."""
        self._host_limits, self._leaves_it = {}, False
        limits = {name: limit for name in _LIMITS_OF_HOSTS if (limit := getattr(args, name, None))}
        if limits and self.replace_host:
            self._host_limits = limits
            for name in limits:
                # Hugging Face's "off" is 0, that of others None.
                setattr(args, name, 0.0 if getattr(args, "output_dir", None) else None)
        elif limits:
            self._leaves_it = True
            if state.is_world_process_zero:
                name, limit = next(iter(limits.items()))
                _log.warning(
                    "the trainer clips gradients itself, to %s=%g: %s does nothing - give it replace_host=True, or turn that off",
                    name,
                    limit,
                    _OWNER,
                )

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Clip. A collective where gradients are sharded."""
        if self._leaves_it:
            return
        self._unscale(optimizer)
        parameters = gradients.with_gradients(model, optimizer)
        if not parameters:
            self._say_none(state)
            return
        norm = gradients.total_norm(parameters)
        whole = gradients.readable(norm)
        self._norms.add(state.global_step + 1, whole)
        if self.max_norm is not None:
            gradients.clip_norm(parameters, self.max_norm, norm)
        elif self.max_value is not None:
            gradients.clip_value(parameters, self.max_value, whole)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """At the end of an interval say how the gradients were."""
        if state.global_step % self.log_interval == 0:
            self._look(state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at what is left; the host has its own limit again."""
        self._look(state)
        for name, limit in self._host_limits.items():
            setattr(args, name, limit)
        self._host_limits = {}

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counts, with what was not looked at yet. Waits for the device that has some of it."""
        norms = [norm for _, norm in self._norms.peek()]
        return {
            "steps": self.steps + len(norms),
            "clipped": self.clipped + sum(map(self._is_above, norms)),
            "nonfinite": self.nonfinite + sum(not math.isfinite(norm) for norm in norms),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self.steps, self.clipped, self.nonfinite = state["steps"], state["clipped"], state["nonfinite"]

    # --- clipping and counting --------------------------------------------------------------------------------------------

    def _unscale(self, optimizer: Any) -> None:
        scaler = self._scaler if self._scaler is not None else getattr(optimizer, "scaler", None)
        if scaler is None or not scaler.is_enabled():
            return
        # Accelerate wraps the optimizer that its scaler knows.
        known = getattr(optimizer, "optimizer", optimizer)
        try:
            scaler.unscale_(known)
        except RuntimeError as error:
            # Unscaled by the host, for its own look at the norm: the second time is refused, and nothing is changed.
            if "already been called" not in str(error):
                raise

    def _look(self, state: TrainerState) -> None:
        before = self.steps, self.clipped
        nonfinite = self._count()
        if not state.is_world_process_zero:
            return
        if nonfinite:
            places = ", ".join(f"{step} ({norm})" for step, norm in nonfinite[:5])
            more = f" and {len(nonfinite) - 5} more" if len(nonfinite) > 5 else ""
            _log.warning("the gradient's norm was not finite, and nothing was clipped, at step %s%s", places, more)
        steps, clipped = self.steps - before[0], self.clipped - before[1]
        if steps and self.last_norm is not None:
            how = f"{clipped} of the last {steps} were clipped"
            if self.max_norm is None:
                how = f"elements are limited to {self.max_value:g}"
            _log.info("step %d: gradient norm %.4g; %s", state.global_step, self.last_norm, how)

    def _count(self) -> list[tuple[int, float]]:
        """Read what waits; those that are not finite."""
        norms = self._norms.read()
        nonfinite = [(step, norm) for step, norm in norms if not math.isfinite(norm)]
        self.steps += len(norms)
        self.nonfinite += len(nonfinite)
        self.clipped += sum(self._is_above(norm) for _, norm in norms)
        if norms:
            self.last_norm = norms[-1][1]
        return nonfinite

    def _is_above(self, norm: float) -> bool:
        return self.max_norm is not None and math.isfinite(norm) and norm > self.max_norm

    def _say_none(self, state: TrainerState) -> None:
        if not self._none_said and state.is_world_process_zero:
            _log.warning(
                "%s finds no gradients: if an engine such as DeepSpeed keeps them, let it clip by its own configuration",
                _OWNER,
            )
        self._none_said = True
