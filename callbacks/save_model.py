"""The callback that saves: it asks the policy at every event, and has one save made per step, with all reasons."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.core.errors import CkptmgrError, ConfigError
from ckptmgr.core.policies import EpochEnded, Evaluated, Memory, Moment, SavePolicy, StepEnded

_log = logging.getLogger(__name__)


class CloseReport(Protocol):
    """What is left when a manager is closed."""

    @property
    def pending(self) -> Sequence[str]:
        """Ids of checkpoints that are in the local tier but not in the store."""

    @property
    def errors(self) -> Sequence[Exception]:
        """What went wrong and was not reported by `poll_errors` yet."""


class SavingManager(Protocol):
    """What this callback needs of `CheckpointManager`."""

    @property
    def save_policy(self) -> SavePolicy | None:
        """When to save."""

    def begin(self, *, resume_from: Path | None = None) -> None:
        """Claim an attempt, before step 1. Raises ConflictError if the run has commits that this training does not descend from (I12)."""

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
        metric_modes: Mapping[str, str] | None = None,
    ) -> str | None:
        """Commit to the local tier and queue the upload; the id, or None when the save was skipped."""

    def poll_errors(self) -> Sequence[Exception]:
        """What went wrong in the background since this was last called."""

    def close(self, timeout_s: float | None = None) -> CloseReport:
        """Finish pending uploads, for `timeout_s` at most."""


class SaveModelCallback(Callback):
    """Save checkpoints when a policy says so.

    Reasons gather over the events of one step (step end, evaluation, end of epoch); then the host makes one save with all of them. Only
    the main process saves. No failure of a save, an upload or a policy ends the training (I9): each is logged at once and counted in
    `failures`. One thing does: `on_train_begin` raises what `manager.begin()` raises, such as a run that has checkpoints which this
    training would abandon (I12), because nothing is lost yet at that moment.

    The policy's memory is part of the saved state, so that a resumed run makes the decisions of an uninterrupted one. A metric counts
    as seen once it was decided on, even if the save then failed.

    Its hooks take `args, state, control` by position as well: it can be handed to a host that calls callbacks directly.

    Args:
        manager: usually a `CheckpointManager`. It is closed when training ends.
        save: the policy; the manager's own if None.
        save_at_end: also save when training ends at a step the policy did not choose, with the reason `train_end`.
        close_timeout_s: how long the end of training waits for uploads; None: as the manager is configured.
    """

    priority = Priority.SAVE
    critical = frozenset({"on_train_begin"})

    def __init__(
        self,
        manager: SavingManager,
        save: SavePolicy | None = None,
        *,
        save_at_end: bool = True,
        close_timeout_s: float | None = None,
    ) -> None:
        self.manager = manager
        self.policy = manager.save_policy if save is None else save
        self.save_at_end = save_at_end
        self.close_timeout_s = close_timeout_s
        self.failures = 0
        self._memory: Memory = {}
        self._step = -1
        self._reasons: list[str] = []
        self._metrics: dict[str, float] = {}
        self._saved_step = -1

    def on_train_begin(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        resume_from: str | Path | None = None,
        **kwargs: Any,
    ) -> None:
        """Claim an attempt of the run.

        Raises:
            ConflictError: the run has checkpoints and this training does not resume from one of them.
        """
        if not state.is_world_process_zero:
            return
        if resume_from is None:
            self.manager.begin()
        else:
            self.manager.begin(resume_from=Path(resume_from))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask the policy."""
        self._report_background_errors()
        self._ask(StepEnded(step=state.global_step, epoch=state.epoch), state, control)

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Ask the policy, and keep the metrics for a save of this step."""
        self._enter(state.global_step)
        self._metrics.update(_numbers(metrics or {}))
        self._ask(Evaluated(step=state.global_step, metrics=metrics or {}), state, control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Ask the policy if the epoch is complete; ask for the last save if training ends here."""
        completed = round(state.epoch or 0)
        # A float that hosts compute as a quotient; an epoch cut short by max_steps or a stop is no finished one.
        if completed and math.isclose(state.epoch, completed, rel_tol=1e-9):
            self._ask(EpochEnded(step=state.global_step, epoch=completed), state, control)
        if control.should_training_stop and self.save_at_end and state.global_step != self._saved_step:
            self._want(["train_end"], state, control)

    def on_save(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        checkpoint: Callable[[], Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> None:
        """Save, with all reasons of this step; a second call at the same step does nothing.

        Blocks until the local commit; the upload goes on in the background.
        """
        step = state.global_step
        self._enter(step)
        if step == self._saved_step:
            return
        # Before the save: a failed one is not repeated by a second event of the same step.
        self._saved_step = step
        if state.is_world_process_zero:
            self._guard(f"save of step {step}", lambda: self._save(state, checkpoint))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the manager, and say what is not in the store yet."""
        if state.is_world_process_zero:
            self._guard("close of the checkpoint manager", self._close)

    def state_dict(self) -> dict[str, Any]:
        """The policy's memory."""
        return {"memory": dict(self._memory)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the decisions of the run that was saved."""
        self._memory = state["memory"]
        self._step = self._saved_step = -1

    def _enter(self, step: int) -> None:
        """Forget the reasons and metrics of an earlier step."""
        if step == self._step:
            return
        if self._reasons and self._saved_step != self._step:
            _log.warning(
                "step %d was not saved although %s asked for it: the host made no save",
                self._step,
                ", ".join(self._reasons),
            )
        self._step = step
        self._reasons = []
        self._metrics = {}

    def _ask(self, moment: Moment, state: TrainerState, control: TrainerControl) -> None:
        if self.policy is not None:
            policy = self.policy
            self._guard(f"save policy at step {moment.step}", lambda: self._decide(policy, moment, state, control))

    def _decide(self, policy: SavePolicy, moment: Moment, state: TrainerState, control: TrainerControl) -> None:
        decision = policy.decide(moment, self._memory)
        self._memory = decision.memory
        if state.is_world_process_zero:
            for notice in decision.notices:
                _log.warning("%s", notice)
        if decision.reasons:
            self._want(decision.reasons, state, control)

    def _want(self, reasons: Sequence[str], state: TrainerState, control: TrainerControl) -> None:
        self._enter(state.global_step)
        self._reasons += [reason for reason in reasons if reason not in self._reasons]
        if state.global_step == self._saved_step:
            _log.info("step %d is saved already; %s asked for it as well", state.global_step, ", ".join(reasons))
        else:
            control.should_save = True

    def _save(self, state: TrainerState, checkpoint: Callable[[], Mapping[str, Any]] | None) -> None:
        if checkpoint is None:
            raise ConfigError(
                "this host does not hand over its state (on_save without `checkpoint`)",
                hint="use the Trainer of ckptmgr or the adapter for your host",
            )
        reasons = tuple(self._reasons) or ("requested",)
        checkpoint_id = self.manager.save(
            state.global_step,
            checkpoint(),
            epoch=state.epoch,
            metrics=dict(self._metrics),
            reasons=reasons,
            metric_modes={} if self.policy is None else self.policy.modes(),
        )
        if checkpoint_id is None:
            self.failures += 1  # the manager has logged why
            _log.warning("step %d was not saved (%s)", state.global_step, ", ".join(reasons))

    def _close(self) -> None:
        report = self.manager.close(timeout_s=self.close_timeout_s)
        for error in report.errors:
            _log.error("%s", error)
        if report.pending:
            _log.warning(
                "training ended with %d checkpoint(s) not in the store yet: %s - they stay in the local tier; run `ckptmgr drain`",
                len(report.pending),
                ", ".join(report.pending),
            )

    def _guard(self, what: str, action: Callable[[], None]) -> None:
        """Do `action`; a failure is logged and counted, and stays here: hosts without isolation would end the training on it (I9)."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a manager, a policy and the state of a model are other people's code
            self.failures += 1
            # The message of our own errors is complete; of any other one the place matters.
            trace = None if isinstance(error, CkptmgrError) else error
            _log.error(
                "%s failed (failure %d), training goes on: %s",
                what,
                self.failures,
                str(error) if trace is None else repr(error),
                exc_info=trace,
            )

    def _report_background_errors(self) -> None:
        for error in self.manager.poll_errors():
            _log.error("%s", error)


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, as floats: also from NumPy scalars and 0-d tensors; non-finite ones stay."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            _log.debug("metric %s is no number: %r", name, value)
    return numbers
