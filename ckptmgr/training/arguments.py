"""The settings of the reference Trainer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from ckptmgr.core.conditions import drift_names
from ckptmgr.core.errors import ConfigError

CONTINUE_STOPPED_ENV = "CKPTMGR_CONTINUE_STOPPED"
Skip = Literal["auto", "indices", "replay"]
Interval = Literal["step", "epoch", "batch", "evaluation"]

_COUNTS = ("num_train_epochs", "max_steps", "gradient_accumulation_steps", "logging_steps", "eval_steps", "eval_epochs")


@dataclass(slots=True, kw_only=True)
class TrainingArguments:
    """How the embedded Trainer trains; callbacks get it as `args`. Names are Hugging Face's where it has them.

    Attributes:
        num_train_epochs: epochs to train; `max_steps` replaces it.
        max_steps: optimizer steps to train, resumed ones included; None: as many as the epochs have.
        gradient_accumulation_steps: micro-batches per optimizer step. The last step of an epoch takes what is left; losses are
            averaged over the micro-batches that the step really has.
        max_grad_norm: clip the gradients' total norm, after unscaling; None: do not.
        logging_steps: log the mean training loss every so many steps; None: never.
        eval_steps: evaluate every so many optimizer steps; None: never by steps.
        eval_epochs: evaluate at the end of every so many epochs; None: never by epochs.
        amp: autocast to this type; None: no autocast.
        grad_scaler: scale the loss; None: with `amp="fp16"` only.
        lr_scheduler_interval: when the scheduler steps. `step`: after every optimizer step; `batch`: there, too, but once for each of its
            micro-batches; an overflow that skips the optimizer's step skips both. `epoch`: at the end of every epoch, before it is evaluated.
            `evaluation`: after every evaluation, as ReduceLROnPlateau needs it.
        lr_scheduler_metric: what a scheduler that steps by a metric goes by; with several ranks by the mean of theirs.
        skip_data: how to come back to the middle of an epoch; see `DataPosition`.
        on_data_mismatch: what to do when the first batch after a resume is not that which the checkpoint expected: `log` an error, or `raise`.
        refuse_drift: what must be as it was when a checkpoint is resumed, besides what CKPTMGR_REFUSE_DRIFT names: `world_size`, `batch_size`,
            `accumulation`, `dataset_length`, `dataset_fingerprint`, `git_commit`, `versions.torch`, …
        continue_stopped: train on when the checkpoint is of a training that a callback ended; so does CKPTMGR_CONTINUE_STOPPED=1. Otherwise
            such a training runs no step.
        device: where the batches go, and the model is moved to; None: the model's device.

    Raises:
        ConfigError: a value that makes no sense.
    """

    num_train_epochs: int = 1
    max_steps: int | None = None
    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    logging_steps: int | None = 10
    eval_steps: int | None = None
    eval_epochs: int | None = None
    amp: Literal["bf16", "fp16"] | None = None
    grad_scaler: bool | None = None
    lr_scheduler_interval: Interval = "step"
    lr_scheduler_metric: str = "eval_loss"
    skip_data: Skip = "auto"
    on_data_mismatch: Literal["log", "raise"] = "log"
    refuse_drift: Sequence[str] = ()
    continue_stopped: bool = False
    device: str | None = None

    def __post_init__(self) -> None:
        for name in _COUNTS:
            value = getattr(self, name)
            required = name in ("num_train_epochs", "gradient_accumulation_steps")
            if (value is None and required) or (value is not None and (not isinstance(value, int) or value < 1)):
                raise ConfigError(
                    f"TrainingArguments: {name} is {value!r}",
                    hint=f"{name} must be a whole number, 1 or more" + ("" if required else ", or None"),
                )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ConfigError(
                f"TrainingArguments: max_grad_norm is {self.max_grad_norm!r}", hint="use a positive number or None"
            )
        if self.amp not in (None, "bf16", "fp16"):
            raise ConfigError(f"TrainingArguments: amp is {self.amp!r}", hint="use 'bf16', 'fp16' or None")
        if self.lr_scheduler_interval not in get_args(Interval):
            raise ConfigError(
                f"TrainingArguments: lr_scheduler_interval is {self.lr_scheduler_interval!r}",
                hint=f"use one of {', '.join(map(repr, get_args(Interval)))}",
            )
        if not isinstance(self.lr_scheduler_metric, str) or not self.lr_scheduler_metric:
            raise ConfigError(
                f"TrainingArguments: lr_scheduler_metric is {self.lr_scheduler_metric!r}",
                hint="give the name of a metric, such as 'eval_loss'",
            )
        drift_names(self.refuse_drift)


def continues_stopped(asked: bool = False) -> bool:
    """Whether a training that was stopped early is to be gone on with: `asked` by the program, or by CKPTMGR_CONTINUE_STOPPED."""
    return asked or os.environ.get(CONTINUE_STOPPED_ENV, "").strip().lower() in ("1", "true", "yes", "on")
