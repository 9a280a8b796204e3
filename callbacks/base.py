"""The hooks of a training loop, what they are given, and the order in which callbacks run.

Hooks have the names that Hugging Face's Trainer uses, and are called *by keyword*, so that a hook takes what it needs:

    class Watch(Callback):
        def on_step_end(self, state, outputs, **kwargs):
            print(state.global_step, float(outputs["loss"]))

Every event brings `args`, `state` and `control`; the embedded Trainer also `model`, `optimizer`, `lr_scheduler`, `train_dataloader`,
`eval_dataloader`, `processing_class` and its older name `tokenizer`. What else an event brings is said at its hook. A host may bring
less: Hugging Face's Trainer hands over neither `batch` nor `outputs`; a hook that names them gets None there.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from ckptmgr.core.errors import ConfigError

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_train_end",
    "on_epoch_begin",
    "on_epoch_end",
    "on_step_begin",
    "on_step_end",
    "on_substep_end",
    "on_pre_optimizer_step",
    "on_optimizer_step",
    "on_evaluate_begin",
    "on_evaluate",
    "on_prediction_step",
    "on_predict",
    "on_save",
    "on_log",
    "on_exception",
)
"""Every event that this version knows. A newer host may have more; hooks are found by name, so those work too."""

ARGUMENTS = frozenset(
    {
        "args",
        "state",
        "control",
        "model",
        "optimizer",
        "lr_scheduler",
        "train_dataloader",
        "eval_dataloader",
        "processing_class",
        "tokenizer",
        "batch",
        "outputs",
        "grad_norm",
        "metrics",
        "logs",
        "exception",
        "checkpoint",
        "resume_from",
    }
)
"""The arguments that an event may bring. A hook that requires one of them gets None from a host that does not have it."""


class Priority(IntEnum):
    """When a callback runs within an event: smaller numbers first, equal ones in the order they were added. Any int works.

    Saving comes before stopping, so that the step that ends a training is saved; logging comes last, and sees what the others did.
    """

    FIRST = 0
    SAVE = 25
    NORMAL = 50
    STOP = 75
    LOG = 100


@dataclass(slots=True, kw_only=True)
class TrainerState:
    """Where a training is, in Hugging Face's names; the trainer changes it, callbacks read it.

    Attributes:
        global_step: optimizer steps finished in the whole run, resumed ones included.
        epoch: epochs gone by, a fraction within one.
        max_steps: the step at which training ends; 0 when it is not known beforehand.
        num_train_epochs: the epoch at which training ends.
        log_history: everything logged so far, oldest first; JSON values.
        best_metric: for callbacks that keep the best value here.
        best_global_step: the step of `best_metric`.
        stopped: the name of the callback that ended this training early; a resumed one then runs no step unless it is told to. None: it
            was not ended, or by what a restart gets over (`Callback.stop_is_final`).
        is_local_process_zero: whether this is the first process of its machine.
        is_world_process_zero: whether this is the main process: the only one that saves and logs.
    """

    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    num_train_epochs: int = 0
    log_history: list[dict[str, Any]] = field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    stopped: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True


@dataclass(slots=True, kw_only=True)
class TrainerControl:
    """What callbacks ask of the trainer, in Hugging Face's names.

    A flag stays set until the trainer has done what it says, or until the scope in its name is over.

    Attributes:
        should_training_stop: end the training after this step.
        should_epoch_stop: end the epoch after this step.
        should_save: save at this step's edge.
        should_evaluate: evaluate at this step's edge.
        should_log: log at this step's edge.
        should_interrupt: leave at the next edge: the unfinished rest is dropped, the last step's edge is saved, and a resumed run does the rest. The
            embedded Trainer sets it itself at a notice of preemption, and then an edge is between micro-batches and evaluation batches, too;
            it is reset if training was complete all the same. Hugging Face's control does not have it.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False
    should_interrupt: bool = False


class Callback:
    """Something that takes part in a training. Every hook is a no-op here; override those you need, with the arguments you need.

    All hooks run in the training thread. What a hook raises is logged and counted, and training goes on, unless the callback is `critical`.
    A hook may return a `TrainerControl`; its flags then replace those of `control`. `KeyboardInterrupt` and `SystemExit` always pass.

    Attributes:
        priority: see `Priority`.
        critical: True: what a hook raises ends the training. A set of event names: only those do.
        name: what this callback is called in logs and in saved state; the name of its class if empty.
        stop_is_final: whether a training that this callback ended (`should_training_stop`) is over, and stays over when it is resumed. False: it was
            ended for a reason that a restart gets over, such as a limit of time.
        may_run_async: whether it only watches, so that it may run beside the training (`run_async`).
        sets_learning_rates: whether it does; a resume then does not name the rates of the checkpoint as unlike those of the program.
    """

    priority: int = Priority.NORMAL
    critical: bool | frozenset[str] = False
    name: str = ""
    stop_is_final: bool = True
    may_run_async: bool = True
    sets_learning_rates: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Hosts that call hooks by position, as Hugging Face's Trainer does, reach hooks that name only what they need, too."""
        super().__init_subclass__(**kwargs)
        from ckptmgr.callbacks.hooks import by_position

        for name, hook in list(vars(cls).items()):
            if name.startswith("on_") and inspect.isfunction(hook):
                setattr(cls, name, by_position(hook))

    def on_init_end(self, *args: Any, **kwargs: Any) -> Any:
        """The trainer was built. Once per trainer."""

    def on_train_begin(self, *args: Any, **kwargs: Any) -> Any:
        """Training begins; a resumed one has its state already. The embedded Trainer brings `resume_from`, a path or None."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> Any:
        """Training ended. Once per training; the embedded Trainer calls it after an exception or an interruption as well."""

    def on_epoch_begin(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch begins, or goes on after a resume: then `state.epoch` is no whole number."""

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> Any:
        """An epoch ended; `state.epoch` is a whole number if it was not cut short."""

    def on_step_begin(self, *args: Any, **kwargs: Any) -> Any:
        """An optimizer step begins; `state.global_step` is the number of finished ones. Brings `batch`, its first micro-batch."""

    def on_substep_end(self, *args: Any, **kwargs: Any) -> Any:
        """A micro-batch of gradient accumulation was added, the last of the step excepted. Brings `batch` and `outputs`."""

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """Gradients are complete and unscaled, the optimizer has not stepped.

        The embedded Trainer brings `grad_norm`, their norm before it has clipped them, a tensor; None if it does not clip.
        """

    def on_optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """The optimizer has stepped, gradients are still there."""

    def on_step_end(self, *args: Any, **kwargs: Any) -> Any:
        """A step is finished and counted in `state`.

        Brings the last `batch`, `outputs` with the loss (`outputs.loss`, or `outputs["loss"]`): the step's mean, detached, and `checkpoint` as `on_save` does, for its sizes: the step's
        edge is not over yet.
        """

    def on_evaluate_begin(self, *args: Any, **kwargs: Any) -> Any:
        """An evaluation begins."""

    def on_evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """An evaluation ended. Brings `metrics`. Also called `on_evaluate_end`; override one of the two."""
        return self.on_evaluate_end(*args, **kwargs)

    def on_evaluate_end(self, *args: Any, **kwargs: Any) -> Any:
        """The other name of `on_evaluate`."""

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """A batch was evaluated or predicted. Brings `batch` and `outputs`."""

    def on_predict(self, *args: Any, **kwargs: Any) -> Any:
        """A prediction ended. Brings `metrics`."""

    def on_save(self, *args: Any, **kwargs: Any) -> Any:
        """Somebody asked for a save of this step.

        The embedded Trainer brings `checkpoint`, a callable that returns the pieces of the training state. Hugging Face's has written its
        files already and rotated old ones.
        """

    def on_log(self, *args: Any, **kwargs: Any) -> Any:
        """Something was logged. Brings `logs`, already in `state.log_history`."""

    def on_exception(self, *args: Any, **kwargs: Any) -> Any:
        """Training ends by `exception`, which is raised on; `on_train_end` follows."""

    def joined(self, dispatcher: Any) -> None:
        """A `CallbackManager`, `dispatcher`, has taken this callback in: it knows what is beside it, and what that takes. No event; once per manager."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs of this callback: JSON values and tensors. Saved with every checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` returned; called before `on_train_begin` of a resumed run."""

    def __getattr__(self, name: str) -> Any:
        # Only for names that nothing defines: an event that a newer host adds.
        if name.startswith("on_"):
            return self._ignore
        if name == "state_key":  # what Lightning asks its callbacks for first
            raise TypeError(
                f"{type(self).__name__} is no callback of Lightning's: give its Trainer LightningCallbacks([...]) of ckptmgr"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _ignore(self, *args: Any, **kwargs: Any) -> None:
        """The hook for an event that this callback does not know."""


def name_of(callback: object) -> str:
    """What a callback is called in logs and in saved state: its `name`, else the name of its class."""
    return str(getattr(callback, "name", "") or type(callback).__name__)


def number_of(priority: int | str) -> int:
    """A priority as a number.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(priority, str):
        if priority not in Priority.__members__:
            raise ConfigError(
                f"there is no priority {priority!r}",
                hint=f"use a number, or one of {', '.join(Priority.__members__)}",
                argument="priority",
            )
        return Priority[priority]
    return int(priority)
