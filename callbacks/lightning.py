"""Lightning's Trainer as a host: a callback that saves, and brings back what Lightning leaves out.

    manager = CheckpointManager("s3://bucket/exp/run", save=EveryNSteps(500) | Best("val_loss"))
    trainer = Trainer(…, callbacks=[LightningCallback(manager)])
    trainer.fit(model, ckpt_path=manager.resume_path())

Works with `lightning` and with `pytorch_lightning`; when both are installed, import yours before this module.
"""

from __future__ import annotations

import logging
import shutil
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from ckptmgr.callbacks import facts, lightning_loops
from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.lightning_data import TrainingData
from ckptmgr.callbacks.lightning_io import LightningCheckpointIO, TakesFiles, base_class
from ckptmgr.callbacks.lightning_state import Continuation
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.callbacks.seams import SavingManager, StopSource, TakingManager
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.policies import SavePolicy
from ckptmgr.training.agreeing import with_all_ranks
from ckptmgr.training.conditions import compare_all
from ckptmgr.training.starting import refuse_to_part

__all__ = ["LightningCallback", "LightningCheckpointIO"]

_log = logging.getLogger(__name__)
_Checkpoint: Any = base_class("callbacks", "Checkpoint")


@dataclass(slots=True)
class _Control:
    """As Hugging Face's: without `should_interrupt`, so that notices of preemption are looked for at the edges that this host has."""

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class LightningCallback(_Checkpoint):  # type: ignore[misc]
    """Save what Lightning's Trainer has when a policy says so, and make a resumed run equal to an uninterrupted one.

    A checkpoint is Lightning's own file, written by `trainer.save_checkpoint` into the local tier, so that `ckptmgr resume RUN` prints a `.ckpt` for
    `trainer.fit(ckpt_path=…)`. In it, in this callback's state, is what Lightning does not save: the random states of all ranks, where in the data
    training is, the metrics, and what is still to be done at the edge of the save. Lightning's own `ModelCheckpoint` is not added when this
    callback is there; if you add one, its files carry the same state and can be resumed from as well.

    A step that is followed by an evaluation, or ends an epoch, is saved after it, once, with all reasons. Nothing is saved between micro-batches: an
    evaluation there counts as one of the step under way, whose save gets its metrics; the weights that it saw were those before that step. Others may
    save there (`ModelCheckpoint`, `trainer.save_checkpoint`), and Lightning ends there when an evaluation stops training; a warning says so then, and
    again when such a checkpoint is resumed from: the gradients of the step under way are not in it.

    *Preemption* (SIGTERM above all; see `Preemption`): training ends after the step or evaluation under way, saved and uploaded, by SystemExit. An
    evaluation that is due is made first only if it fits into the time that is left; a resumed run begins with it. Lightning's own handler
    of SIGTERM is set aside: it sends collectives from within the handler.

    No failure of a save or an upload ends the training (I9); see `SaveModelCallback`, which does that part.

    Args:
        manager: usually a `CheckpointManager`. It is closed when training ends.
        save: the policy; the manager's own if None.
        save_at_end: also save when training ends at a step the policy did not choose, with the reason `train_end`.
        close_timeout_s: how long the end of training waits for uploads; None: as the manager is configured.
        preemption: what gives notice; None: the manager's, or `Preemption()` if it has none; False: nothing.
        continue_stopped: go on with a training that a callback had ended early (`EarlyStopping`); without it, or CKPTMGR_CONTINUE_STOPPED=1, such a
            one runs no further step.

    Attributes:
        proof: what the first batch after a resume showed: "equal", "different", "none: …"; "" before it.
    """

    def __init__(
        self,
        manager: SavingManager,
        save: SavePolicy | None = None,
        *,
        save_at_end: bool = True,
        close_timeout_s: float | None = None,
        preemption: StopSource | bool | None = None,
        continue_stopped: bool = False,
    ) -> None:
        super().__init__()
        self.manager = manager
        self._engine = SaveModelCallback(
            cast(SavingManager, TakesFiles(manager)),
            save,
            save_at_end=save_at_end,
            close_timeout_s=close_timeout_s,
            preemption=preemption,
        )
        self._data = TrainingData()
        self._continuation = Continuation(self._data, continue_stopped=continue_stopped)
        self._trainer: Any = None
        self._control = _Control()
        self._step = -1
        self._evaluation_owed = False
        self._is_asked = False
        self._is_over_budget = False
        self._saving_s = 0.0
        # Micro-batches of the step under way, and the metrics of evaluations between them.
        self._begun = 0
        self._evaluated: list[dict[str, float]] = []

    @property
    def failures(self) -> int:
        """What failed in the training thread."""
        return self._engine.failures

    @property
    def proof(self) -> str:
        return self._data.proof

    @property
    def ended_for_now(self) -> bool:
        """Whether this has ended the training: it does by its `FailureBudget` only, which a restart gets over."""
        return self._is_over_budget

    @property
    def saving_s(self) -> float:
        """Seconds that saves have stopped training for."""
        return self._saving_s

    @classmethod
    def like(cls, saving: SaveModelCallback) -> LightningCallback:
        """One that saves as `saving` would in another host, as far as its arguments mean something here."""
        return cls(
            saving.manager,
            saving.policy,
            save_at_end=saving.save_at_end,
            close_timeout_s=saving.close_timeout_s,
            preemption=saving.preemption or False,
            continue_stopped=saving.continue_stopped,
        )

    def ask_to_save(self) -> None:
        """Save at the edge of the step under way, or of the last one between two steps, whatever the policy says; in the training thread."""
        self._is_asked = True

    # --- Lightning's hooks ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer
        if stage == "fit" and not self._data.attach(trainer):
            _log.error("this Lightning is not one that ckptmgr knows: where in the data training is will not be saved")

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides what Lightning saves; tensors and plain values."""
        trainer = self._trainer
        if trainer is None:
            return {}
        state = self._continuation.state_dict(
            trainer,
            partial=self._begun if trainer.global_step == self._step else 0,
            evaluation_owed=self._evaluation_owed,
            saver=self,
        )
        return {**state, **self._engine.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._engine.load_state_dict(state_dict)
        self._continuation.load_state_dict(state_dict)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        if self._evaluation_owed:
            lightning_loops.owe_evaluation(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Claim an attempt of the run, set what Lightning did not, and watch for a preemption.

        Raises:
            ConflictError: the run has checkpoints and this training does not resume from one of them; or ranks resume from different ones, which they
                may have chosen before Lightning had set torch.distributed up.
            DriftError: something that the manager refuses is not as it was: of the ranks and the data this is known only now. No step was run.
        """
        path = None if trainer.ckpt_path is None else Path(trainer.ckpt_path)
        refuse_to_part(path)
        self._refuse_to_forget(trainer)
        describe = getattr(self.manager, "describe", None)
        if callable(describe):
            self._engine._guard("description of the training", lambda: describe(self._data.conditions(trainer)))
        if self._engine.preemption is not None:
            _set_aside_handler(trainer)
        state = self._state(trainer)
        self._engine.on_train_begin(None, state, self._for_engine(_Control()), resume_from=path, model=pl_module)
        with_all_ranks(lambda: self._compare(trainer))
        self._step, self._begun, self._evaluated = trainer.global_step, 0, []
        self._is_over_budget = False
        self._continuation.go_on(trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._control = _Control()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._begun += 1
        self._data.batch_begins()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Ask the policy if that was the last micro-batch of a step."""
        state = self._state(trainer)
        if trainer.global_step == self._step:
            self._engine.on_substep_end(None, state, self._for_engine(self._control))
            return
        self._step, self._begun = trainer.global_step, 0
        due = lightning_loops.evaluation_follows(trainer)
        self._control = control = _Control(should_evaluate=due)
        self._engine.on_step_end(None, state, self._for_engine(control), checkpoint=dict)
        self._tell_evaluations(state)
        left_out = due and not control.should_evaluate
        if not left_out and (due or lightning_loops.is_last_batch(trainer)):
            self._heed(trainer)
            return
        self._evaluation_owed = left_out
        try:
            self._end_of_edge(trainer, state)
        finally:
            self._evaluation_owed = False

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._engine.on_prediction_step(None, self._state(trainer), self._for_engine(self._control))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            # It draws; what comes after it goes on from there.
            self._data.moment = None

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Ask the policy, with all metrics that were logged."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        state = self._state(trainer)
        self._evaluated.append(facts.numbers(trainer.callback_metrics))
        if self._begun:
            # The next edge decides on it, where the step under way is whole.
            self._engine.on_prediction_step(None, state, self._for_engine(self._control))
            return
        self._tell_evaluations(state)
        if lightning_loops.is_last_batch(trainer):
            self._heed(trainer)
        else:
            self._end_of_edge(trainer, state)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Ask the policy if the epoch is complete, and save what the last step is to be saved for."""
        state = self._state(trainer, over=True)
        # Training ends by an evaluation between micro-batches.
        self._tell_evaluations(state)
        if lightning_loops.is_last_batch(trainer):
            self._data.epoch_is_over()
        self._end_of_edge(trainer, state, over=lightning_loops.last_epoch(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Close the manager.

        Raises:
            SystemExit: as `SaveModelCallback.on_train_end`.
        """
        self._engine.on_train_end(None, self._state(trainer), self._for_engine(self._control))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The manager closes at the end of the program: an exception must not wait for uploads."""
        self._engine._guard("end of the watch for a preemption", self._engine._stopping.end)

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _compare(self, trainer: Any) -> None:
        """Log, or refuse, what is not as the checkpoint was made under."""
        manifest = getattr(self.manager, "restored_manifest", None) if trainer.global_step else None
        if manifest is None or not trainer.is_global_zero:
            return
        manager = cast(TakingManager, self.manager)
        for each in compare_all(manifest, manager.conditions, manager.refused_drift):
            _log.warning("changed: %s", each)

    def _tell_evaluations(self, state: TrainerState) -> None:
        evaluated, self._evaluated = self._evaluated, []
        for metrics in evaluated:
            self._engine.on_evaluate(None, state, self._for_engine(self._control), metrics=metrics)

    def _end_of_edge(self, trainer: Any, state: TrainerState, *, over: bool = False) -> None:
        """Save if anything asks for it, and leave if there is a notice."""
        control = self._control
        ends = over or lightning_loops.training_ends(trainer)
        if ends or control.should_training_stop or lightning_loops.is_last_batch(trainer):
            asked, control.should_training_stop = control.should_training_stop, control.should_training_stop or ends
            self._engine.on_epoch_end(None, state, self._for_engine(control))
            control.should_training_stop = asked or self._engine._stopping.is_decided
        if control.should_save or self._is_asked:
            control.should_save = self._is_asked = False
            began = time.perf_counter()
            self._save(trainer, state)
            self._saving_s += time.perf_counter() - began
        self._heed(trainer)
        if self._engine._stopping.is_decided:
            self.on_train_end(trainer, trainer.lightning_module)

    def _heed(self, trainer: Any) -> None:
        if self._control.should_training_stop and not self._engine._stopping.is_decided:
            self._is_over_budget = trainer.should_stop = True

    def _save(self, trainer: Any, state: TrainerState) -> None:
        step = trainer.global_step
        folder = Path(self._engine.manager.local_dir, "lightning", f"{step}")  # type: ignore[attr-defined]

        def write() -> None:
            # As `trainer.save_checkpoint`, in which the others would wait for ever for a rank that cannot write.
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)

            def store() -> None:
                if trainer.is_global_zero:
                    shutil.rmtree(folder, ignore_errors=True)
                    folder.mkdir(parents=True)
                trainer.strategy.save_checkpoint(checkpoint, folder / f"step-{step}.ckpt")

            with_all_ranks(store)

        failures = self._engine.failures
        self._engine._guard(f"save of step {step}", write)
        if self._engine.failures == failures:
            self._engine.on_save(None, state, self._for_engine(self._control), checkpoint=lambda: {"directory": folder})
        if trainer.is_global_zero:
            shutil.rmtree(folder, ignore_errors=True)

    def _state(self, trainer: Any, *, over: bool = False) -> TrainerState:
        state = TrainerState()
        lightning_loops.update_state(state, trainer, over=over)
        return state

    def _for_engine(self, control: _Control) -> TrainerControl:
        return cast(TrainerControl, control)

    def _refuse_to_forget(self, trainer: Any) -> None:
        if trainer.ckpt_path is None and getattr(self.manager, "is_restored", False):
            raise ConflictError(
                "a checkpoint was asked for, but training begins without it",
                hint="hand its path over: trainer.fit(model, ckpt_path=manager.resume_path())",
            )


def _set_aside_handler(trainer: Any) -> None:
    """Put what handled SIGTERM before Lightning did in place of Lightning's handler, so that ours hands on to that."""
    before = getattr(getattr(trainer, "_signal_connector", None), "_original_handlers", {}).get(signal.SIGTERM)
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
