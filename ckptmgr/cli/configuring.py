"""`config`: look for mistakes in `ckptmgr.yaml` before a training does, and its schema for editors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ckptmgr.cli.command import Command, Group
from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import emit, emit_json, stdout_on_stderr

_CHECK_EPILOG = """\b
Examples:
  ckptmgr config check
  ckptmgr config check experiments/llama.yaml --json

Callbacks are made, as a training would make them; no store is asked, and nothing is written. CKPTMGR_STORE, CKPTMGR_RUN and CKPTMGR_LOCAL_DIR
override the file; of ${NAME} in it, the environment of this command is put in, as that of a training would be. Modules of callbacks are also looked for
in the working directory.

Exit codes: 0 nothing is wrong with it; 2 mistakes, a line for each: FILE:LINE: KEY: what is wrong - what to do. With --json they are in `mistakes`, too."""

_SCHEMA_EPILOG = """\b
Example:
  ckptmgr config schema > ckptmgr.schema.json
  # yaml-language-server: $schema=ckptmgr.schema.json     (the first line of ckptmgr.yaml)

Exit codes: 0 done."""


def register(app: typer.Typer) -> None:
    family = typer.Typer(cls=Group, no_args_is_help=True, help="Look for mistakes in ckptmgr.yaml; print its schema.")
    family.command("check", cls=Command, epilog=_CHECK_EPILOG, short_help="Look for mistakes in ckptmgr.yaml.")(check)
    family.command("schema", cls=Command, epilog=_SCHEMA_EPILOG, short_help="Print the JSON schema of ckptmgr.yaml.")(
        schema
    )
    app.add_typer(family, name="config", short_help="Check ckptmgr.yaml, or print its schema.")


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration.")] = Path("ckptmgr.yaml"),
    as_json: Json = False,
) -> None:
    """Look for all mistakes in a configuration: unknown keys, impossible values, callbacks that cannot be made. Names the callbacks in their order."""
    from ckptmgr.callbacks.manager import CallbackManager
    from ckptmgr.core.errors import ConfigFileError
    from ckptmgr.training.config import read_config, run_url

    # Where `python train.py` finds modules beside it, an installed command does not. Last: nothing that is installed is shadowed.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)
    document: dict[str, Any] = {"file": str(file), "run": None, "callbacks": [], "warnings": [], "mistakes": []}
    try:
        with stdout_on_stderr():  # what callbacks of others print while they are made
            callbacks = CallbackManager.from_config(file)
    except ConfigFileError as error:
        if as_json:
            found = [{name: getattr(each, name) for name in ("line", "key", "what", "hint")} for each in error.mistakes]
            emit_json({**document, "mistakes": found})
        raise
    url, names = run_url(*read_config(file)), list(callbacks.timings)
    warnings = [] if callbacks.manager is None else list(callbacks.manager.warnings)
    if as_json:
        emit_json({**document, "run": url, "callbacks": names, "warnings": warnings})
        return
    emit(f"{file}: nothing is wrong with it")
    emit(f"  run        {url or 'none: nothing is saved'}")
    emit(f"  callbacks  {', '.join(names) or 'none'}")
    for warning in warnings:
        emit(f"  warning    {warning}")


def schema() -> None:
    """Print the JSON schema of the configuration."""
    from ckptmgr.training.config import schema as made

    emit_json(made())
