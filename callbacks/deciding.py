"""A callback that asks a save policy, and gathers its reasons until the host saves."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ckptmgr.callbacks import facts
from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.guarded import GuardedCallback
from ckptmgr.core.policies import Evaluated, Memory, Moment, SavePolicy, StepEnded
from ckptmgr.training import ranks

_log = logging.getLogger(__name__)


class DecidingCallback(GuardedCallback):
    """Reasons and metrics belong to one step: those of an earlier one are forgotten when the next one is spoken of.

    Args:
        policy: when to save; None: never, but for what others ask for.
    """

    def __init__(self, policy: SavePolicy | None) -> None:
        super().__init__()
        self.policy = policy
        self._memory: Memory = {}
        self._step = -1
        self._reasons: list[str] = []
        self._metrics: dict[str, float] = {}
        self._deferred = False
        self._epoch_over = False
        self._saved_step = -1

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
        self._deferred = self._epoch_over = False

    def _ask(self, moment: Moment, state: TrainerState, control: TrainerControl) -> None:
        if self.policy is not None:
            policy = self.policy
            self._guard(f"save policy at step {moment.step}", lambda: self._decide(policy, moment, state, control))

    def _decide(self, policy: SavePolicy, moment: Moment, state: TrainerState, control: TrainerControl) -> None:
        decision = policy.decide(moment, self._memory)
        self._memory, reasons = decision.memory, decision.reasons
        if isinstance(moment, Evaluated) or (isinstance(moment, StepEnded) and facts.goes_by_time(policy)):
            # Clocks of ranks differ, and so do metrics that nobody has averaged; the main process decides for all.
            due = ranks.any_rank(bool(reasons) and state.is_world_process_zero)
            reasons = (reasons or ("main_process",)) if due else ()
        if state.is_world_process_zero:
            for notice in decision.notices:
                _log.warning("%s", notice)
        if reasons:
            self._want(reasons, state, control)

    def _want(self, reasons: Sequence[str], state: TrainerState, control: TrainerControl) -> None:
        self._enter(state.global_step)
        new = [reason for reason in reasons if reason not in self._reasons]
        self._reasons += new
        if state.global_step != self._saved_step:
            control.should_save = True
        elif new:
            _log.info("step %d is saved already; %s asked for it as well", state.global_step, ", ".join(new))

    def _say_unmet(self, state: TrainerState) -> None:
        """When training ends: what the policy has waited for."""
        for notice in () if self.policy is None or not state.is_world_process_zero else self.policy.unmet(self._memory):
            _log.warning("%s", notice)

    def _modes(self) -> Mapping[str, str]:
        return {} if self.policy is None else self.policy.modes()
