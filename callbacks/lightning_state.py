"""What a Lightning run that is resumed needs besides what Lightning saves: taken at each save, and set before the first step. Imports no Lightning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from ckptmgr.callbacks import lightning_loops
from ckptmgr.callbacks.lightning_data import TrainingData, evaluation_generators, set_evaluation_generators
from ckptmgr.training.arguments import continues_stopped
from ckptmgr.training.rank_rng import capture_ranks, gather_rng, restore_ranks
from ckptmgr.training.rng import RngMark, capture_rng

_log = logging.getLogger(__name__)
_VERSION = 1


class Continuation:
    """Makes a resumed run equal to an uninterrupted one, where Lightning does not.

    Args:
        data: where in its data the training is.
        continue_stopped: go on with a training that a callback had ended early.
    """

    def __init__(self, data: TrainingData, *, continue_stopped: bool) -> None:
        self._data = data
        self.continue_stopped = continue_stopped
        self._restored: Mapping[str, Any] | None = None
        self._said_partial = False

    def state_dict(self, trainer: Any, *, partial: int, evaluation_owed: bool, saver: Any) -> dict[str, Any]:
        """Tensors and plain values.

        Args:
            partial: how many micro-batches of a step that is not finished are behind.
            evaluation_owed: an evaluation is due that was left out; a resumed run begins with it.
            saver: the callback that asks; of others that save it may have to be said that they do so between micro-batches.
        """
        place = lightning_loops.place_of(trainer.lightning_module)
        # Before the random states: it may look at the next batch, and leaves no trace of that.
        data = self._data.state_dict()
        if partial and not self._said_partial:
            self._said_partial = True
            _say_partial(trainer, partial, saver)
        gather_rng()
        return {
            "version": _VERSION,
            "place": place,
            "data": data,
            "partial": partial,
            "rng": capture_ranks(),
            "evaluation_generators": evaluation_generators(trainer.val_dataloaders),
            "metrics": lightning_loops.metrics_of(trainer),
            "owed_steps": {} if evaluation_owed else lightning_loops.owed_steps(trainer, place),
            "stopped": lightning_loops.stopped_by(trainer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` returned; before Lightning makes the iterator of its data."""
        self._restored = state
        self._data.load_state_dict(state["data"], _own(state["rng"]))

    def go_on(self, trainer: Any) -> None:
        """Before the first step: set what Lightning did not, and say what cannot be."""
        restored, self._restored = self._restored, None
        partial = 0
        if trainer.ckpt_path is not None:
            partial = (restored or {}).get("partial", lightning_loops.partly_accumulated(trainer))
        if restored is not None:
            self._set(trainer, restored)
        if partial and not trainer.should_stop:
            _log.warning(
                "the checkpoint of step %d was made between micro-batches: what the %d before it had added to step %d is not in it, and this run does "
                "not equal an uninterrupted one",
                trainer.global_step,
                partial,
                trainer.global_step + 1,
            )

    def _set(self, trainer: Any, saved: Mapping[str, Any]) -> None:
        lightning_loops.set_metrics(trainer, saved["metrics"])
        lightning_loops.step_owed(trainer, saved["owed_steps"])
        set_evaluation_generators(trainer.val_dataloaders, saved["evaluation_generators"])
        if saved["place"] == "epoch":
            lightning_loops.go_on_with_next_epoch(trainer)
        # What follows is Lightning's own, and right: the loader is where it was.
        warnings.filterwarnings("ignore", message="You're resuming from a checkpoint that ended before the epoch ended")
        stopped = saved["stopped"]
        if stopped and not continues_stopped(self.continue_stopped):
            trainer.should_stop = True
            _log.warning(
                "already stopped (%s): step %d was the last, and no further one is run - to go on, set continue_stopped in LightningCallback, "
                "or CKPTMGR_CONTINUE_STOPPED=1",
                stopped,
                trainer.global_step,
            )
        if self._data.moment is not None:
            for note in restore_ranks(saved["rng"]):
                _log.warning("%s", note)


def _say_partial(trainer: Any, partial: int, saver: Any) -> None:
    others = [type(each).__name__ for each in trainer.checkpoint_callbacks if each is not saver]
    _log.warning(
        "step %d is saved between micro-batches (%s): what %d of them have added to step %d is not in this checkpoint, and a run that resumes from "
        "it does not equal an uninterrupted one; later ones like it are not named",
        trainer.global_step,
        ", ".join(others) or "the end of training, or trainer.save_checkpoint",
        partial,
        trainer.global_step + 1,
    )


def _own(states: Mapping[str, Any]) -> Mapping[str, Any]:
    """Of the random states of all ranks, those of this one."""
    now = RngMark()
    restore_ranks(states)
    own = capture_rng()
    now.go_back()
    return own
