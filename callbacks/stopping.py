"""A training that has to end: what a callback makes of a notice of preemption and of a failure budget that is spent. Imports no torch."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NoReturn

from ckptmgr.callbacks.seams import Notice, SavingManager, StopSource
from ckptmgr.training import ranks

_log = logging.getLogger(__name__)

# How often ranks ask each other whether uploads have failed for too long; a single rank looks at every step.
_LOOK_STEPS = 10


def source_of(preemption: StopSource | bool | None, manager: SavingManager) -> StopSource | None:
    """What gives notice: as asked for, else the manager's, else one of our own with the usual signals; None if that is False."""
    if preemption is False:
        return None
    given = manager.preemption if preemption is None or preemption is True else preemption
    if given is not None:
        return given
    from ckptmgr.training.preemption import Preemption

    return Preemption()


class Stopping:
    """Ends a training, on all its ranks alike.

    What ranks do at an edge must be the same on all of them: a rank that saves or evaluates alone waits for ever for the others. So `at_edge` is a
    collective where there are several ranks, and between edges nothing is decided, but for leaving when time is up. A host whose control has
    `should_interrupt`, as the embedded Trainer's, looks for notices itself, at more edges than callbacks see.

    Args:
        source: what gives notice; None: nobody will.
        manager: is told to hurry, and asked whether its failure budget is spent.
        clock: seconds from any origin, never backwards.
    """

    def __init__(self, source: StopSource | None, manager: SavingManager, clock: Callable[[], float]) -> None:
        self._source = source
        self._manager = manager
        self._clock = clock
        self._watching = False
        self._hurried = False
        self._notice: Notice | None = None
        self._save_wanted = False
        self._budget_spent = False
        self._evaluation_began_s: float | None = None
        self._evaluation_s: float | None = None

    @property
    def source(self) -> StopSource | None:
        """What gives notice."""
        return self._source

    def begin(self) -> None:
        """Watch from here to `end`."""
        if not self._watching:
            self._watching = True
            if self._source is not None:
                self._source.install()

    def end(self) -> None:
        """Watch no longer. What was decided stays."""
        if self._watching:
            self._watching = False
            if self._source is not None:
                self._source.uninstall()

    @property
    def is_decided(self) -> bool:
        """Whether all ranks have agreed to end."""
        return self._notice is not None

    @property
    def is_interruption(self) -> bool:
        """Whether training ends for a reason that the next start gets over: a notice, or uploads that fail."""
        return self.is_decided or self._budget_spent

    @property
    def forbids_saving(self) -> bool:
        """Whether there is no time for another save: after a second signal."""
        return self._notice is not None and not self._save_wanted

    @property
    def exit_code(self) -> int:
        """What the process ends with after a notice."""
        return 0 if self._source is None else self._source.exit_code

    @property
    def reason(self) -> str | None:
        """Why a save at this moment would be an emergency, as far as this process knows; None if it would not."""
        notice = self._notice or self._heard()
        return None if notice is None else notice.source

    def remaining_s(self) -> float:
        """Seconds until everything should be over; infinite without a notice."""
        return math.inf if self._source is None else self._source.remaining_s()

    def evaluation_begins(self) -> None:
        """From now to `evaluation_ended` is how long an evaluation takes."""
        self._evaluation_began_s = self._clock()

    def evaluation_ended(self) -> None:
        if self._evaluation_began_s is not None:
            self._evaluation_s, self._evaluation_began_s = self._clock() - self._evaluation_began_s, None

    # --- at an edge, on all ranks -----------------------------------------------------------------------------------------

    def at_edge(self, state: Any, control: Any) -> str | None:
        """Between two steps, or after an evaluation: end training if there is a notice.

        Returns:
            The reason of the save that is wanted before that; None if none is.

        Raises:
            SystemExit: there is no time left to end in order.
        """
        if not self._watching or hasattr(control, "should_interrupt"):
            return None
        notice = self._decide(state)
        if notice is None:
            return None
        if ranks.any_rank(self.remaining_s() <= 0):
            self._leave(state)
        control.should_training_stop = True
        if control.should_evaluate and not self._evaluation_fits():
            control.should_evaluate = False
            _log.warning("the evaluation at step %d is left out: there may be no time for it", state.global_step)
        return notice.source if self._save_wanted else None

    def after_step(self, state: Any, control: Any) -> None:
        """End training if uploads have failed for as long as the manager's failure budget allows."""
        if not self._watching or (ranks.can_agree() and state.global_step % _LOOK_STEPS):
            return
        why = self._manager.should_stop if state.is_world_process_zero and self.reason is None else None
        if ranks.any_rank(why is not None) and not control.should_training_stop:
            control.should_training_stop = self._budget_spent = True
            _log.error("training ends at step %d: %s", state.global_step, why or "the main process asks for it")

    def has_ended(self, state: Any, control: Any) -> bool:
        """Whether a notice has ended this training before it was complete."""
        complete = bool(state.max_steps) and state.global_step >= state.max_steps
        return bool(getattr(control, "should_interrupt", self.is_decided and not complete))

    def _decide(self, state: Any) -> Notice | None:
        """What all ranks act on from this edge on; None if training goes on.

        A second signal counts if it came before this; at a later edge it would part the ranks.
        """
        if self._source is None or self._notice is not None:
            return self._notice
        self._notice = self._source.agreed()
        if self._notice is not None:
            self._save_wanted = not ranks.any_rank(not self._source.save_wanted)
            _log.warning("%s: training ends at step %d", self._notice.source, state.global_step)
            self._hurry(state)
        return self._notice

    def _evaluation_fits(self) -> bool:
        """Whether an evaluation like the last one leaves half of the time; one of unknown length does not."""
        return not ranks.any_rank(self._evaluation_s is None or 2 * self._evaluation_s > self.remaining_s())

    # --- between edges ----------------------------------------------------------------------------------------------------

    def between_edges(self, state: Any) -> None:
        """Between micro-batches or evaluation batches, where the host cannot save: wait for the edge, or leave if time is up.

        Raises:
            SystemExit: it is.
        """
        if self._heard() is not None:
            self._hurry(state)
            if self.remaining_s() <= 0:
                self._leave(state)

    def _heard(self) -> Notice | None:
        return self._source.notice if self._source is not None and self._watching else None

    def _hurry(self, state: Any) -> None:
        if state.is_world_process_zero and not self._hurried:
            self._hurried = True
            self._manager.hurry(self.remaining_s())

    def _leave(self, state: Any) -> NoReturn:
        _log.error(
            "time is up: the process ends at once; what was done since the last save, up to step %d, is lost",
            state.global_step,
        )
        try:
            if state.is_world_process_zero:
                self._manager.close(timeout_s=0.0)
            self.end()
        except Exception:  # noqa: BLE001 - whatever a manager does, the machine goes
            _log.exception("close of the checkpoint manager failed")
        raise SystemExit(self.exit_code)
