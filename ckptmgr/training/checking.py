"""What callers hand in, checked where they do it: a mistake must not come up in the background, steps later."""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import SavePolicy
from ckptmgr.core.retention import RetentionRule
from ckptmgr.training.preemption import Preemption
from ckptmgr.transfer.alarm import FailureBudget
from ckptmgr.transfer.queue import QueueRules

PIECES_HINT = 'give the pieces by name, such as {"model": model, "optimizer": optimizer}'


def step_of(value: Any) -> int:
    """A step: a whole number, 0 or more, also from NumPy or a 0-d tensor.

    Raises:
        ConfigError: it is none.
    """
    try:
        step = operator.index(value)
    except TypeError:
        step = -1
    if step < 0 or isinstance(value, bool):
        raise ConfigError(f"step is {value!r}", hint="give the number of optimizer steps, a whole number of 0 or more")
    return step


def metrics_of(values: Mapping[str, Any] | None) -> dict[str, float]:
    """Metrics as floats, also from NumPy numbers and 0-d tensors; NaN and infinities stay.

    Raises:
        ConfigError: a name is no text, or a value no number.
    """
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"metrics is {values!r}", hint="give a mapping, such as {'eval_loss': 1.25}")
    numbers = {}
    for name, value in (values or {}).items():
        try:
            if isinstance(value, str | bytes) or not isinstance(name, str):
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise ConfigError(f"metric {name!r} is {value!r}", hint="give a number, or leave it out") from None
    return numbers


def epoch_of(value: Any) -> float | None:
    """An epoch, fractional; None if unknown.

    Raises:
        ConfigError: it is no finite number.
    """
    if value is None:
        return None
    epoch = metrics_of({"epoch": value})["epoch"]
    if not math.isfinite(epoch):
        raise ConfigError(f"epoch is {value!r}", hint="give a finite number, or None")
    return epoch


def reasons_of(values: Sequence[str] | str) -> tuple[str, ...]:
    """Reasons of a save; `requested` if there are none. A single text is one reason."""
    return (values,) if isinstance(values, str) else tuple(map(str, values)) or ("requested",)


def require(name: str, value: Any, kind: type | tuple[type, ...], hint: str) -> None:
    """Raise ConfigError unless `value` is of `kind`."""
    if not isinstance(value, kind):
        raise ConfigError(f"{name} is {value!r}", hint=hint, argument=name)


def require_seconds(name: str, value: Any) -> None:
    """Raise ConfigError unless `value` is a number of seconds, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigError(f"{name} is {value!r}", hint="give a number of seconds, 0 or more", argument=name)


def require_one_of(name: str, value: Any, *known: str) -> None:
    """Raise ConfigError unless `value` is one of `known`."""
    if value not in known:
        raise ConfigError(f"{name}={value!r} is not known", hint="use " + " or ".join(map(repr, known)), argument=name)


def require_arguments(**values: Any) -> None:
    """Raise ConfigError unless each of the arguments of `CheckpointManager` is of the kind that its name asks for."""
    for name, value in values.items():
        require(name, value, *_ARGUMENTS[name])


_ARGUMENTS: dict[str, tuple[tuple[type, ...], str]] = {
    "url": ((str, os.PathLike), "give the URL of the run, such as s3://bucket/exp/run-7, or a directory"),
    "local_dir": ((str, os.PathLike), "give a directory on a local disk"),
    "save": ((SavePolicy, type(None)), "give a policy, such as EveryNSteps(500)"),
    "keep": ((RetentionRule, type(None)), "give a rule, such as KeepLast(3), or None for everything"),
    "keep_local": ((RetentionRule,), "give a rule, such as KeepLast(1)"),
    "queue": ((QueueRules,), "give QueueRules(…)"),
    "failures": ((FailureBudget,), "give FailureBudget(…)"),
    "preemption": ((Preemption, type(None)), "give Preemption(…)"),
    "strict": ((bool,), "use True or False"),
    "retry": ((RetryPolicy,), "give RetryPolicy(…)"),
}
