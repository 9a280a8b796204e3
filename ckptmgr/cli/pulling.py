"""`pull`: copy a checkpoint, or a part of it, to a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckptmgr.cli.command import Command, local_directory
from ckptmgr.cli.looking import SELECTOR_HELP, Json, Run
from ckptmgr.cli.moving import Bar
from ckptmgr.cli.output import count, emit, emit_json, say, size

_EPILOG = """\b
Examples:
  ckptmgr pull s3://bucket/exp/run --to ./model
  ckptmgr pull s3://bucket/exp/run best:eval_loss --to ./model \\
      --only weights --only config --only tokenizer
  ckptmgr pull s3://bucket/exp/run 500 --to ./shards --only '*.safetensors'

Every file is verified before DIR appears. `ckptmgr verify DIR` checks it again, as far as it was pulled. Training goes on from a whole
checkpoint only: for that there is `ckptmgr resume`.

Exit codes: 0 done, or there already; 2 wrong usage, DIR cannot be used; 3 nothing matches the selector, or one of --only; 4 the store is
unavailable or refuses, or the disk is full; 5 a file is damaged; 7 DIR holds something else."""


def register(app: typer.Typer) -> None:
    app.command("pull", cls=Command, epilog=_EPILOG, short_help="Copy a checkpoint, or a part of it, to disk.")(pull)


def pull(
    run_url: Run,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="The directory to make.")],
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help=SELECTOR_HELP)] = "latest",
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="ROLE|GLOB",
            help="Only these files: weights, optimizer, scheduler, rng, trainer, config, tokenizer, other, or a pattern; several times if need be.",
        ),
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace whatever else DIR holds.")] = False,
    as_json: Json = False,
) -> None:
    """Copy the files of a checkpoint to DIR, each one verified, and print where."""
    from ckptmgr.core.selectors import parse_selector
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.pull import pull as execute

    to = local_directory(to)
    chosen = parse_selector(selector)
    run = RunDirectory.open(run_url)
    with Bar() as bar:
        pulled = execute(run, chosen, to, only=only or (), overwrite=replace, progress=bar)
    manifest, files = pulled.manifest, pulled.files
    size_bytes = sum(entry.size for entry in files)
    if as_json:
        emit_json(
            {
                "path": str(pulled.directory),
                "id": manifest.id,
                "step": manifest.step,
                "files": [entry.path for entry in files],
                "size_bytes": size_bytes,
                "fetched_bytes": pulled.fetched_bytes,
                "partial": pulled.is_part,
            }
        )
        return
    emit(str(pulled.directory))
    share = f"{len(files)} of {count(len(manifest.files), 'file')}" if pulled.is_part else count(len(files), "file")
    origin = f"{size(pulled.fetched_bytes)} of it from {run.url}" if pulled.fetched_bytes else "already there"
    say(f"step {manifest.step} ({manifest.id}): {share}, {size(size_bytes)} verified, {origin}")
