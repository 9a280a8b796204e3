"""The callback that sets the learning rate, from the step that training is at."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, Literal

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.alone import AloneCallback
from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.plateau import Plateau
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import Mode

_log = logging.getLogger(__name__)

_OWNER = "LRSchedulerCallback"
Kind = Literal["cosine", "linear", "constant", "plateau"]


class LRSchedulerCallback(AloneCallback):
    """Set the learning rate of every parameter group before each step: its own base rate times a factor.

    The base rate is that which the group has when training begins first (`initial_lr`, if a scheduler has left one). The factor rises from 0 to 1 over
    the warm-up, as in Hugging Face's schedules, and then:

    - `cosine`: falls to 0 at the last step, or in `cycles` equal parts, each from 1 again.
    - `linear`: falls to 0 at the last step.
    - `constant`: stays 1.
    - `plateau`: is multiplied by `factor` when the metric of evaluations has not got better for more than `patience` of them, as torch's
      ReduceLROnPlateau does; after that, `cooldown` evaluations are not counted.

    After the warm-up no rate falls below `min_lr`; cosine and linear fall to it. Rules:

    - *It follows from `state.global_step` alone*, but for plateau: a resume needs the base rates only, a changed end of the training changes the rest of the schedule. A
      step that a scaler skipped counts. Gradient accumulation has no influence: these are optimizer steps.
    - *A scheduler of the host* that steps after this one is overruled before the next step. If it changes the rate, that is said once: give the host a constant
      one. Where the host logs what its scheduler says, it says what this callback has set.
    - *Plateau: NaN and infinities* are no improvement; *ties* are none; *a missing metric* is said once, with the names that are there, and counts for nothing.
    - *Several ranks* compute the same; with plateau they go by the mean of their values, so each rank's evaluation must call this.
    - *A resume* goes on; with plateau, with its factor and counts.

    Args:
        schedule: see above.
        warmup_steps: optimizer steps of the warm-up. Or
        warmup_ratio: its part of all steps.
        total_steps: the last step of the schedule; None: the last of the training. After it, the factor stays.
        min_lr: see above.
        cycles: of cosine.
        monitor, mode, factor, patience, min_delta, cooldown: of plateau. `min_delta` is relative: 1e-4 of the best value.

    Attributes:
        last_lr: what was set last, by parameter group.

    Raises:
        ConfigError: an argument that makes no sense. In `on_train_begin`, which ends the training before its first step: the last step is not known.
    """

    critical = frozenset({"on_train_begin"})
    sets_learning_rates = True

    def __init__(
        self,
        schedule: Kind = "cosine",
        *,
        warmup_steps: int | None = None,
        warmup_ratio: float | None = None,
        total_steps: int | None = None,
        min_lr: float = 0.0,
        cycles: int = 1,
        monitor: str = "eval_loss",
        mode: Mode | None = None,
        factor: float = 0.1,
        patience: int = 10,
        min_delta: float = 1e-4,
        cooldown: int = 0,
    ) -> None:
        checks.choice(_OWNER, "schedule", schedule, ("cosine", "linear", "constant", "plateau"))
        checks.whole(_OWNER, "warmup_steps", warmup_steps, least=0, optional=True)
        checks.number(_OWNER, "warmup_ratio", warmup_ratio, least=0, most=1, optional=True)
        checks.whole(_OWNER, "total_steps", total_steps, optional=True)
        checks.number(_OWNER, "min_lr", min_lr, least=0)
        checks.whole(_OWNER, "cycles", cycles)
        if warmup_steps is not None and warmup_ratio is not None:
            raise ConfigError(f"{_OWNER}: both warmup_steps and warmup_ratio are given", hint="give one of them")
        if warmup_steps is not None and total_steps is not None and warmup_steps > total_steps:
            raise ConfigError(
                f"{_OWNER}: the warm-up has {warmup_steps} steps, and all are {total_steps}",
                hint="make warmup_steps smaller",
            )
        if cycles > 1 and schedule != "cosine":
            raise ConfigError(
                f"{_OWNER}: schedule={schedule!r} has no cycles", hint="use 'cosine', or leave cycles out"
            )
        self.schedule = schedule
        self.warmup_steps = warmup_steps
        self.warmup_ratio = warmup_ratio
        self.total_steps = total_steps
        self.min_lr = float(min_lr)
        self.cycles = cycles
        self.last_lr: list[float] = []
        self._plateau: Plateau | None = None
        if schedule == "plateau":
            self._plateau = Plateau(_OWNER, monitor, mode, factor, patience, min_delta, cooldown)
        self._base: list[float] = []
        self._total: int | None = None
        self._conflict_said = False

    def joined(self, dispatcher: Any) -> None:
        """Refuse another one beside it.

        Raises:
            ConfigError: there is one.
        """
        if any(isinstance(each, LRSchedulerCallback) for each in dispatcher.callbacks if each is not self):
            raise ConfigError(f"two {_OWNER}s would set the learning rate in turn", hint="leave one of them out")

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Note the base rates, and how long the training is.

        Raises:
            ConfigError: how long is needed and not known, or there is no optimizer.
        """
        self._take_up(state)
        self._total = self.total_steps or state.max_steps or _estimated(args)
        needs_end = self.schedule in ("cosine", "linear") or bool(self.warmup_ratio)
        if needs_end and (self._total is None or self._total < 1):
            raise ConfigError(
                f"{_OWNER}: the last step of the training is not known, and {self.schedule} needs it",
                hint="give total_steps, or max_steps to the trainer",
            )
        if optimizer is None:
            raise ConfigError(
                f"{_OWNER}: the trainer has not handed over its optimizer", hint="pass optimizer= on_train_begin"
            )
        groups = optimizer.param_groups
        if len(self._base) != len(groups):
            if self._base and state.is_world_process_zero:
                _log.warning(
                    "the optimizer has %d parameter groups, in the checkpoint it had %d: their present rates are the base rates now",
                    len(groups),
                    len(self._base),
                )
            self._base = [float(group.get("initial_lr", group["lr"])) for group in groups]
        elif state.global_step == 0:
            self._base = [float(group.get("initial_lr", base)) for group, base in zip(groups, self._base, strict=True)]
        self.last_lr = []
        self._keep(state)
        if self._plateau is not None:
            self._plateau.metric.say_if_no_host_evaluates(args, state)

    def on_step_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        """Set the rates of the step that begins."""
        if self._plateau is not None:
            self._plateau.metric.say_if_missing(state)
        if optimizer is None or not self._base:
            return
        self._look_for_others(optimizer, state, lr_scheduler)
        self.last_lr = self.rates_at(state.global_step)
        for group, rate in zip(optimizer.param_groups, self.last_lr, strict=True):
            if hasattr(group["lr"], "fill_"):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        _tell(lr_scheduler, self.last_lr)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """With plateau, look at the metric. A collective then where there are several ranks."""
        if self._plateau is None:
            return
        reduced = self._plateau.is_over(metrics, state)
        self._keep(state)
        if reduced and state.is_world_process_zero:
            _log.info(
                "step %d: %s got no better, the learning rate becomes %s",
                state.global_step,
                self._plateau.metric.name,
                ", ".join(f"{rate:g}" for rate in dict.fromkeys(self.rates_at(state.global_step))),
            )

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say what plateau has waited for."""
        if self._plateau is not None:
            self._plateau.metric.say_if_missing(state)

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The base rates, and what plateau has counted."""
        plateau = {} if self._plateau is None else {"plateau": self._plateau.state_dict()}
        return {"base": self._base, "conflict_said": self._conflict_said, **plateau}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        # None yet: of a training from scratch, whose optimizer may have rates that were set here.
        self._base = list(state["base"]) or self._base
        self._conflict_said = state["conflict_said"]
        if self._plateau is not None and "plateau" in state:
            self._plateau.load_state_dict(state["plateau"])

    # --- the schedule -----------------------------------------------------------------------------------------------------

    def rates_at(self, step: int) -> list[float]:
        """The rate of each parameter group for the step that begins when `step` steps are finished; after `on_train_begin`."""
        warmup = self._warmup()
        if step < warmup:
            return [base * step / warmup for base in self._base]
        factor = self._factor(step, warmup)
        if self.schedule == "plateau":
            return [max(base * factor, min(base, self.min_lr)) for base in self._base]
        floors = [min(base, self.min_lr) for base in self._base]
        return [floor + (base - floor) * factor for base, floor in zip(self._base, floors, strict=True)]

    def _warmup(self) -> int:
        if self.warmup_ratio and self._total:
            return math.ceil(self.warmup_ratio * self._total)
        return self.warmup_steps or 0

    def _factor(self, step: int, warmup: int) -> float:
        if self._plateau is not None:
            return self._plateau.scale
        if self.schedule == "constant" or self._total is None:
            return 1.0
        progress = (step - warmup) / max(1, self._total - warmup)
        if progress >= 1.0:
            return 0.0
        if self.schedule == "linear":
            return 1.0 - progress
        return 0.5 * (1.0 + math.cos(math.pi * ((self.cycles * progress) % 1.0)))

    def _look_for_others(self, optimizer: Any, state: TrainerState, lr_scheduler: Any) -> None:
        """Whether somebody has changed the rates since they were set here; not if it was a scheduler that leaves them at their base."""
        if self._conflict_said or not self.last_lr:
            return
        if any(hasattr(group["lr"], "fill_") for group in optimizer.param_groups):
            return  # a tensor, which may be on a device: reading it would wait for that
        found = [float(group["lr"]) for group in optimizer.param_groups]
        expected = zip(found, self.last_lr, self._base, strict=True)
        if all(rate in (mine, base) for rate, mine, base in expected):
            return
        self._conflict_said = True
        if state.is_world_process_zero:
            _log.warning(
                "the learning rate was %g after step %d, not %g as %s had set it: %s changes it as well, and is overruled - give the trainer a "
                "constant schedule",
                found[0],
                state.global_step,
                self.last_lr[0],
                _OWNER,
                "something else" if lr_scheduler is None else type(_inner(lr_scheduler)).__name__,
            )


def _estimated(trainer: Any) -> int | None:
    """The last step of a training by epochs, as Lightning's Trainer counts it; None if it does not know, or in another host."""
    steps = getattr(trainer, "estimated_stepping_batches", None)
    return int(steps) if steps is not None and math.isfinite(steps) else None


def _inner(lr_scheduler: Any) -> Any:
    # Accelerate wraps the scheduler that Hugging Face's Trainer makes.
    return getattr(lr_scheduler, "scheduler", lr_scheduler)


def _tell(lr_scheduler: Any, rates: list[float]) -> None:
    """Have the host's scheduler say in the logs what is set: it answers from here, and computes nothing from it."""
    inner = _inner(lr_scheduler)
    if inner is not None and hasattr(inner, "_last_lr"):
        inner._last_lr = list(rates)
