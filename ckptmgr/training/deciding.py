"""When a plain loop saves: what its policy says and remembers, and what a machine that is about to go asks for."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ckptmgr.core.policies import Memory, Moment, SavePolicy, StepEnded
from ckptmgr.training.preemption import Preemption

logger = logging.getLogger(__name__)
MEMORY = "save_policy"


class Decisions:
    """The decisions of one loop.

    Attributes:
        memory: what the policy remembers; it is saved with the state, as a piece of the name `MEMORY`.
    """

    def __init__(self) -> None:
        self.memory: Memory = {}
        # Not since the machine started: a resume may be on another one.
        self._made_s = time.monotonic()

    def ask(self, policy: SavePolicy | None, moment: Moment) -> tuple[str, ...]:
        """Why to save at `moment`, by `policy`; empty if not."""
        if policy is None:
            return ()
        if isinstance(moment, StepEnded) and moment.time_s is None:
            moment = replace(moment, time_s=time.monotonic() - self._made_s)
        decision = policy.decide(moment, self.memory)
        self.memory = decision.memory
        for notice in decision.notices:
            logger.warning("%s", notice)
        return decision.reasons

    def with_memory(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """`state`, and what the policy remembers, if it does."""
        return {**state, MEMORY: dict(self.memory)} if self.memory else state


def urgent_reasons(preemption: Preemption | None) -> tuple[str, ...]:
    """Why to save in this very moment: the source of a notice of preemption. A collective, as `Preemption.agreed` is."""
    notice = None if preemption is None else preemption.agreed()
    return () if notice is None or preemption is None or not preemption.save_wanted else (notice.source,)
