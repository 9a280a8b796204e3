"""What the commands of the command line have in common: how words become values, and how help looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

_SIMPLE: dict[Any, Callable[[str], Any]] = {str: str, int: int, Path: Path}


class Command(TyperCommand):
    """One command.

    Words, whole numbers and paths are converted here. Newer versions of typer load pydantic for it, which takes longer than `ckptmgr ls`
    does; older ones convert by themselves, and what is set here goes unused.

    Args:
        tail: what the usage line ends with.
    """

    tail: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            theirs = getattr(parameter, "get_runtime_param", None)
            if theirs is not None:
                parameter.get_runtime_param = _Conversion(theirs).itself  # type: ignore[attr-defined]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The pieces of the usage line; typer puts braces around what is required, which readers take for part of the word."""
        return [*(piece.strip("{}") for piece in super().collect_usage_pieces(ctx)), *self.tail]


class CommandWithTail(Command):
    """A command that takes another one after `--`."""

    tail = ("[-- COMMAND …]",)


class _Conversion:
    """Stands in for typer's own conversion of one parameter, and passes on to it what is not simple or not right."""

    def __init__(self, theirs: Callable[[], Any]) -> None:
        self._theirs = theirs

    def itself(self) -> _Conversion:
        return self

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        kind = param.type_descriptor.annotation
        convert = _SIMPLE.get(kind)
        if convert is not None and isinstance(value, str):
            try:
                return convert(value)
            except ValueError:
                raise typer.BadParameter(f"{value!r} is not a whole number.", ctx=ctx, param=param) from None
        if kind == list[str] and isinstance(value, list | tuple):
            return list(value)
        if value is None and not param.multiple and param.nargs == 1:
            return None
        return self._theirs().coerce(value, param=param, ctx=ctx)
