"""What the commands of the command line have in common: how words become values, and how help looks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

_SIMPLE: dict[Any, Callable[[str], Any]] = {str: str, int: int, Path: Path}


def local_directory(path: Path) -> Path:
    """`path` as given for a directory of this machine; a file URL counts as its path.

    Raises:
        ConfigError: it is a URL: as a path it would quietly make a folder called `s3:`.
    """
    scheme, colon, rest = str(path).partition(":/")  # pathlib has made one slash of two
    if not colon or not scheme.isalnum():
        return path
    if scheme == "file":
        return Path("/" + rest.lstrip("/"))
    from ckptmgr.core.errors import ConfigError

    raise ConfigError(f"{scheme}://{rest.lstrip('/')} is not a directory of this machine", hint="give a path")


class InterruptedCommand(Exception):
    """Ctrl-C while a command ran."""


class OutputClosed(Exception):
    """The reader of stdout has seen enough (`ckptmgr ls … | head`)."""


class _OwnConversion:
    """Converts words, whole numbers and paths here.

    Newer versions of typer load pydantic for it, which takes longer than `ckptmgr ls` does; older ones convert by themselves, and what is set
    here goes unused.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters, the help option included, which typer makes on demand."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            theirs = getattr(param, "get_runtime_param", None)
            if theirs is not None and not isinstance(getattr(theirs, "__self__", None), _Conversion):
                param.get_runtime_param = _Conversion(theirs).itself
        return params


class Group(_OwnConversion, TyperGroup):
    """The commands."""


class Command(_OwnConversion, TyperCommand):
    """One command.

    Attributes:
        tail: what the usage line ends with.
    """

    tail: tuple[str, ...] = ()

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Versions of typer make different exit codes of these two; here none gets to see them."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as exc:
            raise InterruptedCommand from exc
        except BrokenPipeError as exc:
            raise OutputClosed from exc

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
        if value is None:
            return () if param.multiple or param.nargs == -1 else None
        kind = param.type_descriptor.annotation
        convert = _SIMPLE.get(kind)
        if convert is not None and isinstance(value, str):
            try:
                return convert(value)
            except ValueError:
                raise typer.BadParameter(f"{value!r} is not a whole number.", ctx=ctx, param=param) from None
        if kind == list[str] and isinstance(value, list | tuple):
            return list(value)
        return self._theirs().coerce(value, param=param, ctx=ctx)
