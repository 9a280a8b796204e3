"""The callback that watches the loss and the gradients, and says what is wrong with them."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ckptmgr.callbacks import checks, gradients
from ckptmgr.callbacks.alone import AloneCallback
from ckptmgr.callbacks.anomalies import Anomaly, Detector, Kind, Limits
from ckptmgr.callbacks.base import Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.readings import LossSource, Pending, numbers_of
from ckptmgr.core.errors import ConfigError
from ckptmgr.training import ranks

_log = logging.getLogger(__name__)

_OWNER = "LossMonitorCallback"
_ACTIONS = ("warn", "save", "stop")
_KEPT_ANOMALIES = 1000

Action = Literal["warn", "save", "stop"]


class LossMonitorCallback(AloneCallback):
    """Say every `log_interval` steps how the loss is, and act on what is unusual.

    The loss is that of each step, or where the host does not hand it over (Hugging Face's Trainer), its mean since the last log, when that is logged.
    All of the following counts such values. Rules:

    - *The mean* is over the last `window` finite values; one NaN or infinity does not poison it, and takes no place in it.
    - *NaN and infinities* are anomalies (`nonfinite`), each with its step. Hugging Face's Trainer logs others in their place unless
      `logging_nan_inf_filter=False`: there a gradient's norm that is not finite stands for the loss, and the loss beside it is not counted; not where
      a scaler of fp16 makes such norms.
    - *A spike* is a value that exceeds the mean before it by more than `spike_factor` deviations, from the 10th value on. A deviation is at least
      1 % of the mean. Spikes get into the mean, so that a loss that stays higher is no spike for long. Ties with the limit are none.
    - *A plateau* is `plateau_steps` steps in which the mean of a full window has not become smaller than its best by more than `plateau_delta` of that. It is
      said once, until the mean gets better.
    - *Gradient norm*: what the host says it was before it clipped (Hugging Face's Trainer with its logs, ours at each step if it clips), else
      measured every `log_interval` steps, complete and unscaled.
      An explosion is one that exceeds `explosion_factor` times the median of the last `window`, from the 10th on, or is not finite; a vanishing one is
      below `vanishing_norm`.
    - *A missing loss* is said at the end of training, if there was none at all.
    - *Gradient accumulation*: the loss of a step is the mean over its micro-batches, as the host hands it over.
    - *Several ranks*: where each has its own loss, it looks at its own, and what one wants to stop or save for, all do: then each must call this at each
      step, for they agree every `log_interval` steps. What is logged is the same on all. Lines are rank 0's.
    - *A resume* goes on with the window, the best mean, and what was not looked at yet.

    Training does not wait for the loss: it stays on its device, and is read every `log_interval` steps with all others since. So an action comes up to
    `log_interval` steps late, at a step that is a multiple of it.
    Args:
        log_interval: steps between two looks, and two lines.
        window: values that the mean is over.
        on_nonfinite, on_spike, on_plateau, on_explosion, on_vanishing: what to do: "warn", "save", "stop", or a list of these; [] is nothing.
            A training that is stopped says why.
        spike_factor: see above.
        plateau_steps: see above; None: do not look for plateaus.
        plateau_delta: see above; 0.01 is 1 %.
        explosion_factor: see above.
        vanishing_norm: see above.
        gradients: look at the gradient's norm.

    Attributes:
        mean: the mean of the window at the last look; None before the first value.
        last: the newest value, maybe not finite; None before the first.
        stopped_step: the step at which this ended the training; None if it did not.
        anomalies: the last 1000, oldest first. Not part of the saved state.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    # Before callbacks that save: they see in the same event what this one asks for.
    priority = Priority.SAVE - 5

    def __init__(
        self,
        log_interval: int = 50,
        *,
        window: int = 100,
        on_nonfinite: Action | Sequence[Action] = "warn",
        on_spike: Action | Sequence[Action] = "warn",
        on_plateau: Action | Sequence[Action] = "warn",
        on_explosion: Action | Sequence[Action] = "warn",
        on_vanishing: Action | Sequence[Action] = "warn",
        spike_factor: float = 6.0,
        plateau_steps: int | None = None,
        plateau_delta: float = 0.01,
        explosion_factor: float = 10.0,
        vanishing_norm: float = 1e-7,
        gradients: bool = True,
    ) -> None:
        checks.whole(_OWNER, "log_interval", log_interval)
        checks.whole(_OWNER, "window", window)
        checks.number(_OWNER, "spike_factor", spike_factor, above=0)
        checks.whole(_OWNER, "plateau_steps", plateau_steps, optional=True)
        checks.number(_OWNER, "plateau_delta", plateau_delta, least=0)
        checks.number(_OWNER, "explosion_factor", explosion_factor, above=1)
        checks.number(_OWNER, "vanishing_norm", vanishing_norm, least=0)
        checks.choice(_OWNER, "gradients", gradients, (True, False))
        self.log_interval = log_interval
        self.actions: dict[Kind, tuple[str, ...]] = {
            "nonfinite": _actions("on_nonfinite", on_nonfinite),
            "spike": _actions("on_spike", on_spike),
            "plateau": _actions("on_plateau", on_plateau),
            "explosion": _actions("on_explosion", on_explosion),
            "vanishing": _actions("on_vanishing", on_vanishing),
        }
        self.gradients = gradients
        self.last: float | None = None
        self.anomalies: deque[Anomaly] = deque(maxlen=_KEPT_ANOMALIES)
        self._detector = Detector(
            Limits(
                window=window,
                spike_factor=spike_factor,
                plateau_steps=plateau_steps,
                plateau_delta=plateau_delta,
                explosion_factor=explosion_factor,
                vanishing_norm=vanishing_norm,
            )
        )
        self._losses = LossSource()
        self._waiting, self._waiting_norms = Pending(), Pending()
        self._norm_is_logged = self._norm_stands_for_loss = False
        self._lines: Counter[str] = Counter()
        self._found: list[Anomaly] = []
        self._said_step = 0

    @property
    def may_run_async(self) -> bool:  # type: ignore[override]
        """Not with an action that the training has to take."""
        return not {action for actions in self.actions.values() for action in actions} & {"save", "stop"}

    @property
    def mean(self) -> float | None:
        """See above."""
        return self._detector.losses.mean

    @property
    def grad_norm(self) -> float | None:
        """The newest finite norm that was looked at; None before the first."""
        return self._detector.norms.last

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Go on from the checkpoint."""
        self._take_up(state)
        self._stay_stopped(state, control)
        filtered = getattr(args, "logging_nan_inf_filter", False)
        # Accelerate's optimizer has the scaler, if there is one. What the arguments say does not tell: fp16 has none on a CPU.
        scales = getattr(optimizer, "scaler", None) is not None
        self._norm_stands_for_loss = filtered and self.gradients and not scales
        acts = {*self.actions["nonfinite"]} & {"save", "stop"}
        if filtered and acts and not self._norm_stands_for_loss and state.is_world_process_zero:
            _log.warning(
                "the trainer leaves NaN and infinite losses out of what it logs, and %s will see none: set logging_nan_inf_filter=False",
                _OWNER,
            )

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        grad_norm: Any = None,
        **kwargs: Any,
    ) -> None:
        """Measure the gradients of the step that ends an interval, unless the host does. A collective where they are sharded."""
        step = state.global_step + 1
        if grad_norm is not None and self.gradients:
            self._waiting_norms.add(step, gradients.readable(grad_norm))
            return
        # Hugging Face's Trainer logs the norm before it clips.
        measured = self.gradients and not self._norm_is_logged and not getattr(args, "output_dir", None)
        if not measured or step % self.log_interval:
            return
        parameters = gradients.with_gradients(model, optimizer)
        if parameters:
            self._waiting_norms.add(step, gradients.readable(gradients.total_norm(parameters)))

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, outputs: Any = None, **kwargs: Any
    ) -> None:
        """Keep the step's loss; at the end of an interval look at all. A collective then where there are several ranks and actions for all."""
        loss = self._losses.at_step(outputs)
        if loss is None:
            return
        self._waiting.add(state.global_step, loss)
        if state.global_step % self.log_interval == 0:
            self._look()
            self._act(state, control, agreeing=True)
            self._say_how_it_is(state)

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the loss and the norm in the logs of a host that tells them so."""
        loss = self._losses.at_log(logs)
        norm = numbers_of(logs).get("grad_norm") if self.gradients else None
        if norm is not None:
            self._norm_is_logged = True
            self._waiting_norms.add(state.global_step, norm)
        if loss is None:
            return
        if norm is None or math.isfinite(norm) or not self._norm_stands_for_loss:
            self._waiting.add(state.global_step, loss)
        self._look()
        self._act(state, control, agreeing=False)
        if state.global_step - self._said_step >= self.log_interval:
            self._say_how_it_is(state)
        self._keep(state)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look at what is left, and say if there was nothing at all."""
        self._look()
        self._act(state, None, agreeing=False)
        if self.last is None and state.global_step and state.is_world_process_zero:
            _log.warning("%s saw no loss: the host neither hands over outputs with one nor logs it", _OWNER)

    # --- state ------------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Windows, the best mean, and what was not looked at yet. Waits for the device that has some of it."""
        waiting = {"losses": self._waiting.peek(), "norms": self._waiting_norms.peek()}
        return {
            "detector": self._detector.state_dict(),
            "said_step": self._said_step,
            "stopped_step": self.stopped_step,
            # Strict JSON has no NaN.
            "waiting": {name: [[step, repr(value)] for step, value in values] for name, values in waiting.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with them."""
        self._waiting, self._waiting_norms, self._found, self.last = Pending(), Pending(), [], None
        self._detector.load_state_dict(state["detector"])
        self._said_step, self.stopped_step = state["said_step"], state["stopped_step"]
        for pending, name in ((self._waiting, "losses"), (self._waiting_norms, "norms")):
            for step, value in state["waiting"][name]:
                pending.add(step, float(value))

    # --- looking ----------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read what waits, and judge it."""
        for step, loss in self._waiting.read():
            self.last = loss
            self._note(self._detector.look_at_loss(step, loss))
        for step, norm in self._waiting_norms.read():
            if self._norm_stands_for_loss and not math.isfinite(norm):
                self._note([Anomaly(kind="nonfinite", step=step, value=norm, of="gradient's norm")])
            else:
                self._note(self._detector.look_at_norm(step, norm))

    def _note(self, anomalies: Iterable[Anomaly]) -> None:
        for anomaly in anomalies:
            self.anomalies.append(anomaly)
            self._found.append(anomaly)

    # --- acting -----------------------------------------------------------------------------------------------------------

    def _act(self, state: TrainerState, control: TrainerControl | None, *, agreeing: bool) -> None:
        """Do what the anomalies that were found ask for. `agreeing`: all ranks are here, and may have found others; then a collective."""
        found, self._found = self._found, []
        wanted = {action for anomaly in found for action in self.actions[anomaly.kind]}
        for kind in dict.fromkeys(anomaly.kind for anomaly in found):
            self._say([anomaly for anomaly in found if anomaly.kind == kind], state, control)
        if control is None:
            return
        possible = {action for actions in self.actions.values() for action in actions} & {"save", "stop"}
        if agreeing and possible:
            rows = ranks.gather_rows([action in wanted for action in ("save", "stop")])
            wanted = {action for place, action in enumerate(("save", "stop")) if any(row[place] for row in rows)}
            if wanted and not any(rows[ranks.rank()]) and state.is_world_process_zero:
                others = ", ".join(str(number) for number, row in enumerate(rows) if any(row))
                _log.warning(
                    "step %d: rank %s has found something unusual%s",
                    state.global_step,
                    others,
                    "; training ends" * ("stop" in wanted),
                )
        if "stop" in wanted:
            self.stopped_step = state.global_step
            control.should_training_stop = True
        if "save" in wanted:
            control.should_save = True

    def _say(self, found: list[Anomaly], state: TrainerState, control: TrainerControl | None) -> None:
        """One line for all of a kind; of one that comes at every look, ever fewer lines."""
        kind = found[0].kind
        actions = self.actions[kind]
        if not actions or not state.is_world_process_zero:
            return
        self._lines[kind] += 1
        count = self._lines[kind]
        stops = "stop" in actions and control is not None
        if count > 3 and count & (count - 1) and not stops:
            return
        more = f", and {len(found) - 1} more until step {found[-1].step}" if len(found) > 1 else ""
        _log.warning("step %d: %s%s%s", found[0].step, found[0], more, "; training ends" if stops else "")

    def _say_how_it_is(self, state: TrainerState) -> None:
        self._said_step = state.global_step
        mean = self.mean
        if state.is_world_process_zero and self.last is not None:
            norm = "" if self.grad_norm is None else f", gradient norm {self.grad_norm:.4g}"
            shown = "" if mean is None else f", mean {mean:.4g} of the last {len(self._detector.losses)}"
            _log.info("step %d: loss %.4g%s%s", state.global_step, self.last, shown, norm)


def _actions(name: str, given: Any) -> tuple[str, ...]:
    actions = (given,) if isinstance(given, str) else given
    if not isinstance(actions, (list, tuple)) or not all(action in _ACTIONS for action in actions):
        raise ConfigError(
            f"{_OWNER}: {name} is {given!r}",
            hint=f"{name} must be one of {', '.join(map(repr, _ACTIONS))}, or a list of them; [] is nothing",
        )
    return tuple(actions)
