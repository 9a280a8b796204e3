"""`push`, `resume`, `drain`: move checkpoints."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import emit, emit_json, progress, say, size, warn

if TYPE_CHECKING:
    from ckptmgr.core.manifest import Manifest
    from ckptmgr.core.selectors import Selector
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.resume import Resumed
    from ckptmgr.run.tier import LocalTier


@dataclass(frozen=True, slots=True)
class Command:
    """What stood after `--` on the command line; None without one."""

    words: list[str] | None


def register(app: typer.Typer) -> None:
    app.command("resume")(resume)
    app.command("push")(push)
    app.command("drain")(drain)


# --- resume ---------------------------------------------------------------------------------------------------------------


def resume(
    context: typer.Context,
    run_url: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    selector: Annotated[
        str, typer.Argument(metavar="SELECTOR", help="latest, a step, best:METRIC, tag:NAME, id:ID.")
    ] = "latest",
    to: Annotated[
        Path | None,
        typer.Option("--to", metavar="DIR", help="The checkpoint directory; default ./<run>/checkpoint-<step>."),
    ] = None,
    local_dir: Annotated[
        Path | None, typer.Option("--local-dir", envvar="CKPTMGR_LOCAL_DIR", help="A local tier to look in first.")
    ] = None,
    or_start: Annotated[
        bool, typer.Option("--or-start", help="On a run without any data, start COMMAND from scratch.")
    ] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Fail instead of falling back to an older one.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace whatever else DIR holds.")] = False,
    as_json: Json = False,
) -> None:
    """Put a verified checkpoint on local disk and print where; or run COMMAND with it.

    ckptmgr resume RUN [SELECTOR] [OPTIONS] [-- COMMAND …]

    In COMMAND, {} is replaced by the path, which CKPTMGR_RESUME_FROM holds too. Its exit code passes through; afterwards the local tier is drained.
    """
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.core.selectors import parse_selector

    words = context.find_object(Command)
    command = words.words if words is not None else None
    if command is not None and not command:
        raise ConfigError("there is no command after --", hint="write it there, or leave -- out")
    chosen = parse_selector(selector)
    tier = _tier(local_dir)
    run = _run_or_nothing(run_url) if or_start else _run(run_url)
    resumed = None if run is None else _resume(run, chosen, to, tier, strict=strict, replace=replace, or_start=or_start)
    if as_json:
        emit_json(_resumed_json(resumed))
    if command is None:
        if not as_json and resumed is not None:
            emit(str(resumed.path))
        return
    raise typer.Exit(_launch(command, resumed, run_url, local_dir))


def _run(url: str) -> RunDirectory:
    from ckptmgr.run.directory import RunDirectory

    return RunDirectory.open(url)


def _run_or_nothing(url: str) -> RunDirectory | None:
    """The run; None if the store says that nothing at all is there."""
    from ckptmgr.core.errors import CheckpointNotFoundError, NotCommittedError
    from ckptmgr.run.directory import RunDirectory, holds_anything

    try:
        return RunDirectory.open(url)
    except CheckpointNotFoundError as exc:
        if holds_anything(url):
            raise NotCommittedError(
                f"{url} holds data, but no run of ckptmgr",
                hint="use another run name, or bring the data in with `ckptmgr push`",
            ) from exc
        return None


def _resume(
    run: RunDirectory,
    selector: Selector,
    to: Path | None,
    tier: LocalTier | None,
    *,
    strict: bool,
    replace: bool,
    or_start: bool,
) -> Resumed | None:
    """Resume, showing progress; None on a run without any data if `or_start`."""
    from ckptmgr.core.errors import CheckpointNotFoundError
    from ckptmgr.run.resume import resume as execute

    try:
        with _Bar() as bar:
            resumed = execute(run, selector, to=to, tier=tier, strict=strict, replace=replace, progress=bar)
    except CheckpointNotFoundError as exc:
        if or_start and not selector.is_explicit and getattr(exc, "empty", False):
            return None
        raise
    for skipped in resumed.skipped:
        warn(f"step {skipped.stem.step} ({skipped.stem}) was passed over: {skipped.why}")
    origin = {"local": "from the local tier", "remote": f"from {run.url}", None: "already there"}[resumed.source]
    say(f"step {resumed.manifest.step} ({resumed.manifest.id}), {size(resumed.manifest.size_bytes)} verified, {origin}")
    return resumed


class _Bar:
    """A progress bar that begins anew with each checkpoint that is tried."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._moved: Callable[[int], None] = lambda count: None

    def __enter__(self) -> _Bar:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def started(self, manifest: Manifest, source: str) -> None:
        self._stack.close()
        self._moved = self._stack.enter_context(progress(f"step {manifest.step}", manifest.size_bytes))

    def moved(self, count: int) -> None:
        self._moved(count)


def _resumed_json(resumed: Resumed | None) -> dict[str, Any]:
    if resumed is None:
        return {"path": None, "id": None, "step": None, "source": None, "skipped": []}
    return {
        "path": str(resumed.path),
        "id": resumed.manifest.id,
        "step": resumed.manifest.step,
        "source": resumed.source,
        "skipped": [{"id": str(item.stem), "step": item.stem.step, "why": item.why} for item in resumed.skipped],
    }


def _tier(directory: Path | None) -> LocalTier | None:
    """The local tier at `directory`; None if there is none (yet)."""
    from ckptmgr.core.errors import CheckpointNotFoundError
    from ckptmgr.run.tier import LocalTier

    if directory is None:
        return None
    try:
        return LocalTier.open(directory)
    except CheckpointNotFoundError:
        return None


def _launch(command: list[str], resumed: Resumed | None, run_url: str, local_dir: Path | None) -> int:
    """Run COMMAND, drain the local tier, and return the exit code of both."""
    from ckptmgr.run.launch import LOCAL_DIR_ENV, RESUME_ENV, fill_in, launch

    path = None if resumed is None else str(resumed.path)
    environment = {RESUME_ENV: path or ""}
    if local_dir is not None:
        environment[LOCAL_DIR_ENV] = os.path.abspath(local_dir)
    words = fill_in(command, path)
    say(f"running {shlex.join(words)}" + ("" if path else " from scratch"))
    code = launch(words, environment)
    pending = _drain(_tier(local_dir), run_url)
    return 6 if code == 0 and pending else code


# --- drain ----------------------------------------------------------------------------------------------------------------


def drain(
    local_dir: Annotated[Path, typer.Argument(metavar="LOCAL_DIR", envvar="CKPTMGR_LOCAL_DIR", help="A local tier.")],
    as_json: Json = False,
) -> None:
    """Upload what is pending in a local tier. Exit 6 if something is left."""
    from ckptmgr.run.tier import LocalTier

    tier = LocalTier.open(local_dir)
    targets = sorted({entry.target for _, entry in tier.pending() if entry.target})
    left = [stem for target in targets for stem in _drain(tier, target)]
    if as_json:
        emit_json({"local_dir": str(tier.root), "pending": left})
    elif not left:
        emit(f"{tier.root}: nothing pending")
    if left:
        raise typer.Exit(6)


def _drain(tier: LocalTier | None, target: str) -> list[str]:
    """Upload what is pending for `target`; the ids left. A store that cannot be opened leaves all of them."""
    from ckptmgr.core.errors import CkptmgrError
    from ckptmgr.run.directory import RunDirectory, same_run
    from ckptmgr.transfer.drain import drain as execute

    if tier is None:
        return []
    try:
        run = RunDirectory.open(target)
        same_run(tier.run, run)
        done = execute(tier, run)
    except CkptmgrError as exc:
        warn(str(exc))
        return [manifest.id for manifest, _ in tier.pending()]
    for stem in done.committed:
        say(f"committed step {stem.step} ({stem})")
    for stem in done.pending:
        warn(
            f"step {stem.step} ({stem}) is still only in {tier.root}: {done.errors.get(stem, 'another process has it in hand')}"
        )
    return [str(stem) for stem in done.pending]


# --- push -----------------------------------------------------------------------------------------------------------------


def push(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="The directory of a checkpoint, written and closed.")
    ],
    run_url: Annotated[str, typer.Argument(metavar="RUN", help="The run; created if there is none.")],
    step: Annotated[
        int | None,
        typer.Option("--step", metavar="N", help="Default: the number that DIR ends in, or trainer_state.json."),
    ] = None,
    metric: Annotated[
        list[str] | None, typer.Option("--metric", metavar="K=V", help="A metric, several times if need be.")
    ] = None,
    tag: Annotated[str | None, typer.Option("--tag", metavar="T", help="Also point this tag at it.")] = None,
    new_attempt: Annotated[bool, typer.Option("--new-attempt", help="Begin a further attempt of the run.")] = False,
    as_json: Json = False,
) -> None:
    """Commit a directory as a checkpoint, and print its id once it is in the store."""
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.push import check_pushable
    from ckptmgr.run.push import push as execute

    metrics = dict(_metric(text) for text in metric or ())
    at = check_pushable(directory, step=step, tag=tag)
    run = RunDirectory.open_or_create(run_url)
    with _Bar() as bar:
        pushed = execute(
            directory,
            run,
            step=at,
            metrics=metrics,
            tag=tag,
            new_attempt=new_attempt,
            described=lambda manifest: bar.started(manifest, "local"),
            moved=bar.moved,
        )
    manifest = pushed.manifest
    if as_json:
        emit_json(
            {
                "id": str(pushed.stem),
                "step": manifest.step,
                "existed": pushed.existed,
                "files": len(manifest.files),
                "size_bytes": manifest.size_bytes,
            }
        )
        return
    emit(str(pushed.stem))
    what = "was there already" if pushed.existed else "committed"
    say(f"step {manifest.step}, {len(manifest.files)} files, {size(manifest.size_bytes)}: {what} in {run.url}")


def _metric(text: str) -> tuple[str, float]:
    from ckptmgr.core.errors import ConfigError

    name, equals, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and equals:
            return name, float(value)
    raise ConfigError(f"--metric {text!r} is not NAME=NUMBER", hint="give for instance --metric eval_loss=1.25")
