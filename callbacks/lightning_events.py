"""Callbacks of ckptmgr in Lightning's Trainer: its hooks as the events that they know.

    trainer = Trainer(…, callbacks=[LightningCallbacks([LossMonitorCallback(log_interval=50), EarlyStoppingCallback(monitor="val_loss")]),
                                    LightningCallback(manager)])

Saving is `LightningCallback`'s; it comes last by itself, for Lightning runs callbacks that save after all others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ckptmgr.callbacks import facts, lightning_loops
from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.lightning import LightningCallback
from ckptmgr.callbacks.lightning_io import base_class
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConfigError

__all__ = ["LightningCallbacks", "lightning_callbacks"]

_log = logging.getLogger(__name__)
_Callback: Any = base_class("callbacks", "Callback")
# Lightning takes these decisions itself, before any callback could.
_NOT_HERE = ("should_evaluate", "should_epoch_stop", "should_log")


def lightning_callbacks(source: Any, *, manager: Any = None, **options: Any) -> list[Any]:
    """What `ckptmgr.yaml` names, for `Trainer(callbacks=…)`: its callbacks, and a `LightningCallback` in place of its `SaveModelCallback`.

    Args:
        source: as for `CallbackManager.from_config`.
        manager: of checkpoints; by default the one that the configuration describes. It is the `manager` of the last one of the list.
        options: of `CallbackManager`.

    Raises:
        ConfigError: mistakes in it, all of them (`mistakes`), with their places and what is allowed.
    """
    from ckptmgr.callbacks.configuration import add_configured

    dispatcher, saving = CallbackManager(**options), []

    def add(callback: Any, **how: Any) -> None:
        if isinstance(callback, SaveModelCallback):
            saving.append(LightningCallback.like(callback))
        else:
            dispatcher.add(callback, **how)

    add_configured(add, source, manager=manager)
    return [LightningCallbacks(dispatcher), *saving]


class LightningCallbacks(_Callback):  # type: ignore[misc]
    """Dispatches Lightning's hooks to callbacks of ckptmgr, with all that a `CallbackManager` does.

    A step is an optimizer step: `on_substep_end` comes after every micro-batch but the last, `on_step_begin` before the first. The sanity check
    before training is no evaluation. `on_evaluate` brings all metrics that were logged, `on_log` those of the step that Lightning's loggers get.
    `on_train_end` comes once, after an exception as well. `should_training_stop` ends the training after the step under way, as Lightning's own
    `should_stop` does; `should_save` asks the `LightningCallback`; other flags have no effect, which is said once.

    The states of the callbacks are in every checkpoint that Lightning writes. Several of these may be in one Trainer, such as those of a file and
    your own; of a checkpoint each gets the state of the one at its place.

    Args:
        callbacks: callbacks, or a `CallbackManager`.
        options: of `CallbackManager`.

    Attributes:
        ended_for_now: whether one of them has ended the training for a reason that a restart gets over (`Callback.stop_is_final`).

    Raises:
        ConfigError: a `SaveModelCallback` is among them: Lightning's files are saved by a `LightningCallback`.
    """

    dispatches_to_ckptmgr = True

    def __init__(self, callbacks: Iterable[Any] | CallbackManager, **options: Any) -> None:
        super().__init__()
        if not isinstance(callbacks, CallbackManager):
            callbacks = CallbackManager(callbacks, **options)
        if any(isinstance(each, SaveModelCallback) for each in callbacks.callbacks):
            raise ConfigError(
                "SaveModelCallback saves nothing in Lightning's Trainer",
                hint="give the Trainer LightningCallback(manager) beside this, or lightning_callbacks('ckptmgr.yaml'), which does both",
            )
        self.callbacks = callbacks
        self.ended_for_now = False
        self._number = 1
        self._state = TrainerState()
        self._control = TrainerControl()
        self._step = 0
        self._begins_step = True
        self._is_batch_over = False
        self._is_training = False
        self._said: set[str] = set()
        self._of_evaluations: set[str] = set()
        self._before_evaluation: set[str] = set()

    # --- Lightning's hooks ------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._number = 1 + [each for each in trainer.callbacks if isinstance(each, LightningCallbacks)].index(self)
        if stage == "fit":
            self._call("on_init_end", trainer)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._step, self._begins_step, self._is_training = trainer.global_step, True, True
        self.ended_for_now = self._is_batch_over = False
        self._control = TrainerControl()
        self._call("on_train_begin", trainer, resume_from=trainer.ckpt_path)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._call("on_epoch_begin", trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._is_batch_over = False
        if self._begins_step:
            self._begins_step = False
            self._call("on_step_begin", trainer, batch=batch)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._call("on_pre_optimizer_step", trainer, optimizer=optimizer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._is_batch_over = True
        if trainer.global_step == self._step:
            self._call("on_substep_end", trainer, batch=batch, outputs=outputs)
            return
        self._step, self._begins_step = trainer.global_step, True
        self._call("on_optimizer_step", trainer)
        self._call("on_step_end", trainer, batch=batch, outputs=outputs)
        every = int(getattr(trainer, "log_every_n_steps", 0) or 0)
        # Until the first evaluation there are no others; what one has logged stays among them, and would be logged again with each step.
        logged = facts.numbers(trainer.logged_metrics)
        logged = {name: value for name, value in logged.items() if name not in self._of_evaluations}
        if every and self._step % every == 0 and logged:
            self._log(trainer, logged)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        if self._evaluates(trainer):
            self._before_evaluation = set(trainer.callback_metrics)
            self._call("on_evaluate_begin", trainer)

    def on_validation_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, *args: Any, **kwargs: Any
    ) -> None:
        if self._evaluates(trainer):
            self._call("on_prediction_step", trainer, batch=batch, outputs=outputs)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self._evaluates(trainer):
            self._of_evaluations |= set(trainer.callback_metrics) - self._before_evaluation
            self._call("on_evaluate", trainer, metrics=facts.numbers(trainer.callback_metrics))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._call("on_epoch_end", trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._is_training:
            self._call("on_exception", trainer, exception=exception)
            self._end(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._end(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._end(trainer)

    @property
    def state_key(self) -> str:
        """Under which name Lightning gives this its state back: known from `setup` on."""
        return str(self._generate_state_key()) if self._number == 1 else f"{self._generate_state_key()}#{self._number}"

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the states of the callbacks to the others'. Not by `state_dict`: Lightning refuses two of a class that have one before it says who they are."""
        checkpoint["callbacks"][self.state_key] = {
            "callbacks": self.callbacks.state_dict(),
            "log_history": list(self._state.log_history),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take them up; Lightning calls this before training begins."""
        self.callbacks.load_state_dict(state_dict["callbacks"])
        self._state.log_history = list(state_dict["log_history"])

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _evaluates(self, trainer: Any) -> bool:
        return bool(trainer.state.fn == "fit" and not trainer.sanity_checking)

    def _end(self, trainer: Any) -> None:
        if self._is_training:
            self._is_training = False
            self._call("on_train_end", trainer)

    def _log(self, trainer: Any, logs: Mapping[str, float]) -> None:
        entry = {**logs, "epoch": self._state.epoch}
        self._state.log_history.append({**entry, "step": self._step})
        self._call("on_log", trainer, logs=entry)

    def _call(self, event: str, trainer: Any, **arguments: Any) -> None:
        lightning_loops.update_state(self._state, trainer, over=self._is_batch_over)
        self.callbacks.host_saving_s = sum(getattr(each, "saving_s", 0.0) for each in trainer.callbacks)
        control = self._control
        control.should_training_stop = bool(trainer.should_stop)
        given = {
            "model": trainer.lightning_module,
            "optimizer": next(iter(trainer.optimizers), None),
            "lr_scheduler": next((config.scheduler for config in trainer.lr_scheduler_configs), None),
            "train_dataloader": trainer.train_dataloader,
            "eval_dataloader": trainer.val_dataloaders,
            **arguments,
        }
        self.callbacks.call(event, args=trainer, state=self._state, control=control, **given)
        self._heed(trainer)

    def _heed(self, trainer: Any) -> None:
        """Do what the callbacks ask for."""
        control = self._control
        if control.should_training_stop != bool(trainer.should_stop):
            trainer.should_stop = control.should_training_stop
            self.ended_for_now = control.should_training_stop and self.callbacks.stopped_by is None
        if control.should_save:
            control.should_save = False
            savers = [each for each in trainer.callbacks if hasattr(each, "ask_to_save")]
            for saver in savers:
                saver.ask_to_save()
            if not savers:
                self._say("should_save", "there is no LightningCallback that could")
        for flag in _NOT_HERE:
            if getattr(control, flag):
                setattr(control, flag, False)
                self._say(flag, "Lightning decides that by itself")

    def _say(self, flag: str, why: str) -> None:
        if flag not in self._said:
            self._said.add(flag)
            _log.warning("a callback set %s, which has no effect: %s", flag, why)
