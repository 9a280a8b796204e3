"""`demo`: the main job, told on this machine in under two minutes."""

from __future__ import annotations

from typing import Annotated

import typer

from ckptmgr.cli.command import Command
from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import emit_json, stdout_on_stderr

_EPILOG = "Needs PyTorch. Exit codes: 0 the resumed run equals the uninterrupted one; 1 it does not; 2 PyTorch is missing; 4 the store refuses."


def register(app: typer.Typer) -> None:
    app.command("demo", cls=Command, epilog=_EPILOG, short_help="Train, be killed, resume, and be proven equal.")(demo)


def demo(
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="Where checkpoints go; default: a directory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train, be killed with SIGKILL in the middle of an upload, resume, and compare with an uninterrupted run."""
    from ckptmgr.demo.scenario import play

    if not as_json:
        play(store)
        return
    with stdout_on_stderr():
        play(store)
    emit_json({"store": store, "equal": True})
