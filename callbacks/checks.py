"""What is wrong with an argument of a callback, in one line. They come from configuration files, so each is looked at before training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

from ckptmgr.core.errors import ConfigError

T = TypeVar("T")


def whole(owner: str, name: str, value: Any, *, least: int = 1, optional: bool = False) -> None:
    """`value` is a whole number, `least` or more.

    Raises:
        ConfigError: it is none; `optional`: None is right, too.
    """
    if optional and value is None:
        return
    # bool is an int: patience=True would be a patience of 1.
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(
            f"{owner}: {name} is {value!r}",
            hint=f"{name} must be a whole number, {least} or more" + (", or None" if optional else ""),
            argument=name,
        )


def number(
    owner: str,
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    optional: bool = False,
) -> None:
    """`value` is a finite number in the given range: not below `least`, above `above`, not above `most`, below `below`.

    Raises:
        ConfigError: it is none; `optional`: None is right, too.
    """
    if optional and value is None:
        return
    fits = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < least or value <= above or value > most or value >= below:
        bounds = [f"{least:g} or more"] if least > -math.inf else []
        bounds += [f"above {above:g}"] if above > -math.inf else []
        bounds += [f"at most {most:g}"] if most < math.inf else []
        bounds += [f"below {below:g}"] if below < math.inf else []
        wanted = ", ".join(["a number", *bounds])
        raise ConfigError(
            f"{owner}: {name} is {value!r}",
            hint=f"{name} must be {wanted}" + (", or None" if optional else ""),
            argument=name,
        )


def choice(owner: str, name: str, value: T, allowed: Sequence[T]) -> T:
    """`value`, which is one of `allowed`.

    Raises:
        ConfigError: it is none of them.
    """
    if value not in allowed:
        raise ConfigError(
            f"{owner}: {name} is {value!r}",
            hint=f"{name} must be one of {', '.join(map(repr, allowed))}",
            argument=name,
        )
    return value


def text(owner: str, name: str, value: Any, example: str) -> None:
    """`value` is a string with something in it, such as `example`.

    Raises:
        ConfigError: it is none.
    """
    if not isinstance(value, str) or not value:
        raise ConfigError(
            f"{owner}: {name} is {value!r}", hint=f"{name} must be a name, such as {example!r}", argument=name
        )
