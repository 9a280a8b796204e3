"""`demo`: the main job, told on this machine in under two minutes."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


def demo(
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="Where checkpoints go; default: a directory.")
    ] = None,
) -> None:
    """Train, be killed with SIGKILL in the middle of an upload, resume, and compare with an uninterrupted run."""
    from ckptmgr.demo.scenario import play

    play(store)
