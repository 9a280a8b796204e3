"""Where Lightning's loops are at a save, and what a resumed run must do for them that Lightning does not. Imports no Lightning.

Facts of Lightning 2.6 that this goes by (`trainer.fit_loop`, its progress and restart stages are its own business, and tested here with that release):
- A checkpoint made at the end of a batch has the evaluation that is due then as done: a resumed run leaves it out.
- With `max_steps`, a checkpoint made at the end of an epoch is gone on with in that epoch, which runs a batch more or its hooks twice.
- A ReduceLROnPlateau is stepped after the hooks in which checkpoints are made, and not again when one is resumed from.
- Nothing of `callback_metrics` is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ckptmgr.callbacks.base import TrainerState

# Where a save is made: after a batch, after an evaluation within an epoch, after an epoch.
Place = Literal["batch", "evaluation", "epoch"]

_PLACES: dict[str, Place] = {
    "on_train_batch_end": "batch",
    "on_validation_end": "evaluation",
    "on_validation_epoch_end": "evaluation",
    "on_train_epoch_end": "epoch",
}


def place_of(module: Any) -> Place:
    """Where the hook that runs now is; a save outside of the known hooks counts as one after a batch."""
    return _PLACES.get(str(getattr(module, "_current_fx_name", "")), "batch")


def update_state(state: TrainerState, trainer: Any, *, over: bool = False) -> None:
    """Where training is. A batch never counts as the end of its epoch, the last one included: an epoch is whole in its own last hook, with `over`."""
    length = trainer.num_training_batches
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    part = done / length if isinstance(length, int) and length else 0.0
    state.global_step = trainer.global_step
    state.epoch = trainer.current_epoch + min(part, 1.0) if part < 1.0 else trainer.current_epoch + 1 - 1e-6
    if over and is_last_batch(trainer):
        state.epoch = float(trainer.current_epoch + 1)
    state.max_steps = max(trainer.max_steps, 0)
    state.is_local_process_zero = trainer.local_rank == 0
    state.is_world_process_zero = trainer.is_global_zero


def is_last_batch(trainer: Any) -> bool:
    """Whether the epoch has no further batch."""
    return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())


def evaluation_follows(trainer: Any) -> bool:
    """Whether Lightning evaluates after this batch."""
    fit = trainer.fit_loop
    return bool(fit.epoch_loop._should_check_val_fx(fit._data_fetcher))


def partly_accumulated(trainer: Any) -> int:
    """By the loops' counts, how many micro-batches of an unfinished step are behind; as they are before the first batch, those of the checkpoint."""
    done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return 0 if done == trainer.num_training_batches else done % trainer.accumulate_grad_batches


def training_ends(trainer: Any) -> bool:
    """Whether Lightning runs no step after this one, as far as it can be told by now."""
    reached = trainer.max_steps != -1 and trainer.global_step >= trainer.max_steps
    return bool(reached or (trainer.should_stop and trainer.fit_loop._can_stop_early))


def last_epoch(trainer: Any) -> bool:
    """Whether the epoch that ends is the last."""
    limit = trainer.max_epochs
    return limit not in (None, -1) and trainer.fit_loop.epoch_progress.current.processed >= limit


def stopped_by(trainer: Any) -> str | None:
    """The callback that has ended this training early, for good; None if none has, or what did is something that a restart gets over."""
    if not trainer.should_stop:
        return None
    # `stopped_epoch` alone does not tell: it is 0 for the first epoch, too.
    names = [
        type(each).__name__
        for each in trainer.callbacks
        if getattr(each, "stopped_epoch", 0)
        or getattr(each, "wait_count", 0) >= getattr(each, "patience", float("inf"))
    ]
    names += [each.callbacks.stopped_by for each in trainer.callbacks if getattr(each, "dispatches_to_ckptmgr", False)]
    found = next((name for name in names if name), None)
    if found is None and any(_ended_for_now(each) for each in trainer.callbacks):
        return None
    return found or "trainer.should_stop"


def _ended_for_now(callback: Any) -> bool:
    """Whether it ended the training for a reason that a restart gets over: as one of ours says, or by Lightning's limit of time (`max_time`)."""
    remaining = getattr(callback, "time_remaining", None)
    left = remaining() if callable(remaining) else None
    return bool(getattr(callback, "ended_for_now", False) or (left is not None and left <= 0))


def metrics_of(trainer: Any) -> dict[str, Any]:
    """What was logged last, by name, as tensors on the CPU."""
    return {
        name: value.detach().cpu().clone()
        for name, value in trainer.callback_metrics.items()
        if hasattr(value, "detach")
    }


def set_metrics(trainer: Any, metrics: Mapping[str, Any]) -> None:
    """As if they had been logged in this process: schedulers and callbacks that look at them find them."""
    trainer._logger_connector._callback_metrics.update(metrics)


def owed_steps(trainer: Any, place: Place) -> dict[str, Any]:
    """The metrics that schedulers would be stepped with between this save and the next batch, by the scheduler's number.

    After an evaluation within an epoch a resumed run does it itself.
    """
    interval = {"batch": "step", "epoch": "epoch"}.get(place)
    if interval is None or not trainer.lightning_module.automatic_optimization:
        return {}
    owed = {}
    count = trainer.current_epoch + 1 if interval == "epoch" else trainer.fit_loop.epoch_loop.batch_idx + 1
    for number, config in enumerate(trainer.lr_scheduler_configs):
        value = trainer.callback_metrics.get(config.monitor) if config.reduce_on_plateau else None
        if value is not None and config.interval == interval and count % config.frequency == 0:
            owed[str(number)] = value.detach().cpu().clone()
    return owed


def step_owed(trainer: Any, owed: Mapping[str, Any]) -> None:
    """Step the schedulers as `owed_steps` says."""
    for number, value in owed.items():
        trainer.lightning_module.lr_scheduler_step(trainer.lr_scheduler_configs[int(number)].scheduler, value)


def owe_evaluation(checkpoint: dict[str, Any]) -> None:
    """Have a run that resumes from `checkpoint`, made at the end of a batch, begin with the evaluation that is due there.

    To Lightning it looks as if the checkpoint had been made in the first batch of that evaluation.
    """
    loops = checkpoint["loops"]["fit_loop"]
    batches, evaluated = loops["epoch_loop.batch_progress"], loops["epoch_loop.val_loop.batch_progress"]
    for scope in ("total", "current"):
        batches[scope]["completed"] = batches[scope]["processed"]
        evaluated[scope] |= {"ready": 1, "started": 1, "processed": 0, "completed": 0}
    evaluated["is_last_batch"] = False


def go_on_with_next_epoch(trainer: Any) -> None:
    """Have a run that was saved at the end of an epoch begin the next one, also with `max_steps`; call it in `on_train_start`."""
    fit = trainer.fit_loop
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop):
        loop._restarting = False
        loop.reset_restart_stage()
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.ready = progress.started = progress.completed = progress.processed
