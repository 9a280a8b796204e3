"""A built-in callback in Hugging Face's Trainer: its state in the checkpoints, without a `CallbackManager` too, and a training that it has ended."""

from __future__ import annotations

import copy
import logging
from typing import Any

from ckptmgr.callbacks import huggingface
from ckptmgr.callbacks.base import Callback, name_of
from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training.arguments import continues_stopped

_log = logging.getLogger(__name__)

_CLAIMS = "_ckptmgr_claims"


class AloneCallback(Callback):
    """Keeps its state in `trainer_state.json` itself, where no manager does; in any other host it does nothing for it.

    A subclass calls `_take_up` in `on_train_begin`, and `_keep` at the end of every hook that has changed its state, all of which run before the save of
    that step. The second of a name is `name#2`, in the order in which they were added.

    Attributes:
        is_managed: a `CallbackManager` keeps the state.
        stopped_step: the step at which this ended the training; None if it did not. A subclass has it in its state, under this name.
    """

    stopped_step: int | None = None

    # What the manager's debug mode lets it change.
    changes_state = frozenset({"stateful_callbacks"})
    is_managed = False
    _key = ""
    _first_state: dict[str, Any] | None = None

    def _take_up(self, state: Any) -> None:
        """Take up the state of a resumed training; one from scratch begins as the first did.

        Raises:
            IncompatibleStateError: it does not fit.
        """
        kept = getattr(state, "stateful_callbacks", None)
        if self.is_managed or not isinstance(kept, dict):
            return
        # Once per training: its state object is a new one.
        claims = vars(state).setdefault(_CLAIMS, [])
        claims.append(name_of(self))
        number = claims.count(name_of(self))
        self._key = f"{huggingface.STATES_KEY}/{name_of(self)}" + (f"#{number}" if number > 1 else "")
        if self._first_state is None:
            self._first_state = copy.deepcopy(self.state_dict())
        elif state.global_step == 0:
            self.load_state_dict(copy.deepcopy(self._first_state))
        if self._key in kept:
            try:
                self.load_state_dict(kept[self._key]["attributes"])
            except Exception as error:
                raise IncompatibleStateError(
                    f"callback {name_of(self)} refused its saved state: {error!r}",
                    hint="resume with the version of the callback that saved it, or without it",
                    piece=name_of(self),
                ) from error

    def _keep(self, state: Any) -> None:
        """Have the next save of the Trainer write the state as it is now."""
        if self._key and not self.is_managed:
            huggingface.keep_entry(state, self.state_dict(), self._key)

    def _stay_stopped(self, state: Any, control: Any) -> None:
        """In `on_train_begin`: have a training that this has ended at the present step stay ended, where nobody else sees to it.

        The embedded Trainer does, and a `SaveModelCallback`, which keeps Hugging Face's Trainer from running any step; from here, in the middle of an epoch,
        it still runs one.
        """
        hosted = isinstance(getattr(state, "stateful_callbacks", None), dict) and not huggingface.entry_in(state)
        if not hosted or self.stopped_step is None or self.stopped_step != state.global_step or continues_stopped():
            return
        control.should_training_stop = True
        if state.is_world_process_zero:
            _log.warning(
                "already stopped (%s) at step %d: the trainer ends after one more at most - to go on, set CKPTMGR_CONTINUE_STOPPED=1",
                name_of(self),
                state.global_step,
            )
