"""`push`, `resume`: move checkpoints."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.command import Command, CommandWithTail, local_directory
from ckptmgr.cli.draining import drain_tier
from ckptmgr.cli.looking import SELECTOR_HELP, Json, Run
from ckptmgr.cli.output import compact, count, emit, emit_json, progress, say, size, warn

if TYPE_CHECKING:
    from ckptmgr.core.conditions import Drift
    from ckptmgr.core.manifest import Manifest
    from ckptmgr.core.selectors import Selector
    from ckptmgr.run.resume import Resumed
    from ckptmgr.run.tier import LocalTier
    from ckptmgr.run.verify import Damage

# Files that a repair names one by one.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class Invocation:
    """What the command line holds besides options and arguments: the words after `--` (None without one), and whether `-v` was given."""

    command: list[str] | None = None
    verbose: bool = False

    @classmethod
    def of(cls, context: typer.Context) -> Invocation:
        return context.find_object(cls) or cls()


FollowLinks = Annotated[
    bool,
    typer.Option(
        "--follow-links", help="Take what links lead to, also out of the folder that DIR lies in; weights always."
    ),
]
_RESUME_EPILOG = """\b
Examples:
  ckptmgr resume s3://bucket/exp/run
  ckptmgr resume s3://bucket/exp/run best:eval_loss --to ./best
  trainer --resume "$(ckptmgr resume s3://bucket/exp/run)"
  ckptmgr resume s3://bucket/exp/run --or-start --local-dir /scratch/run \\
      -- python train.py --resume_from_checkpoint {}

\b
Exit codes:
  0  done, or COMMAND ended well and nothing is left to upload
  2  wrong usage, unknown scheme, missing package, COMMAND not found
  3  nothing to resume; with --or-start: there is data, but no checkpoint
  4  the store is unavailable or refuses, or the disk is full
  5  the checkpoint that was named is damaged, or all are
  6  COMMAND ended well, but uploads are still pending, or saves were given
     up unsent
  7  DIR holds something else, the local tier contradicts the store, or a
     drift was found that --refuse-drift names
  other: COMMAND's own, 128 + n if signal n ended it"""
_PUSH_EPILOG = """\b
Examples:
  ckptmgr push ./out/checkpoint-500 s3://bucket/exp/run
  ckptmgr push ./out/final s3://bucket/exp/run --step 9000 --metric eval_loss=1.25 --tag best

Of a checkpoint that is there already, with the same bytes, files that the store has lost or damaged are sent again.

Exit codes: 0 committed, or already there; 2 wrong usage, RUN is a local tier or lies in DIR; 4 the store is unavailable or refuses: repeat the push, which sends only what is
missing; 5 a file changed meanwhile; 7 another process is pushing the same."""


def register(app: typer.Typer) -> None:
    app.command(
        "resume", cls=CommandWithTail, epilog=_RESUME_EPILOG, short_help="Fetch a checkpoint, verified; run COMMAND."
    )(resume)
    app.command("push", cls=Command, epilog=_PUSH_EPILOG, short_help="Commit a directory as a checkpoint.")(push)


# --- resume ---------------------------------------------------------------------------------------------------------------


def resume(
    context: typer.Context,
    run_url: Run,
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help=SELECTOR_HELP)] = "latest",
    to: Annotated[
        Path | None,
        typer.Option(
            "--to",
            metavar="DIR",
            help="The checkpoint directory. Default: ./<run>/checkpoint-<step>, or ./<run>-resumed/… if ./<run> is RUN.",
        ),
    ] = None,
    local_dir: Annotated[
        Path | None,
        typer.Option(
            "--local-dir",
            metavar="DIR",
            envvar="CKPTMGR_LOCAL_DIR",
            help="A local tier to look in first; drained later.",
        ),
    ] = None,
    or_start: Annotated[
        bool, typer.Option("--or-start", help="On a run without any data, start COMMAND from scratch.")
    ] = False,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail on a damaged newest one instead of taking the next older.")
    ] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Replace whatever else DIR holds.")] = False,
    refuse_drift: Annotated[
        list[str] | None,
        typer.Option(
            "--refuse-drift",
            metavar="NAME",
            help="Fail if this is not as it was when the checkpoint was made: versions, versions.torch, git_commit, …; in COMMAND, which is told by "
            "CKPTMGR_REFUSE_DRIFT, also world_size, batch_size, dataset_fingerprint, …. Several times if need be.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a verified checkpoint on local disk and print where; or run COMMAND with it.

    In COMMAND, {} is replaced by the path, which CKPTMGR_RESUME_FROM holds too. Signals and its exit code pass through; afterwards the local
    tier is drained. From scratch, {} is dropped together with an option before it, and the variable is empty.
    """
    from ckptmgr.core.errors import CheckpointNotFoundError, ConfigError
    from ckptmgr.core.selectors import parse_selector

    command = Invocation.of(context).command
    if command is not None and (not command or as_json):
        what = "--json and a COMMAND exclude each other" if command else "there is no command after --"
        raise ConfigError(what, hint="COMMAND finds the path in CKPTMGR_RESUME_FROM" if command else "write it there")
    chosen = parse_selector(selector)
    surroundings = Surroundings.of(command, refuse_drift or ())
    to = None if to is None else local_directory(to)
    local_dir = None if local_dir is None else local_directory(local_dir)
    try:
        resumed = _resume(run_url, chosen, to, _tier(local_dir), surroundings, strict=strict, replace=replace)
    except CheckpointNotFoundError as exc:
        if not or_start or not getattr(exc, "empty", False):
            raise
        if chosen.is_explicit:
            warn(f"{run_url} has no data yet, and so no {chosen}: from scratch, as --or-start says")
        resumed = None
    if command is not None:
        raise typer.Exit(_launch(command, resumed, run_url, local_dir, surroundings.refused))
    if as_json:
        emit_json(_resumed_json(resumed, surroundings))
    elif resumed is not None:
        emit(str(resumed.path))
    else:
        say(f"{run_url} has no data yet: nothing to resume")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What is known here of the conditions that COMMAND will train under: the versions installed, and the commit of `directory`.

    Attributes:
        refused: drifts that are an error.
    """

    directory: Path
    refused: frozenset[str]

    @classmethod
    def of(cls, command: Sequence[str] | None, refuse_drift: Sequence[str]) -> Surroundings:
        """Those of the script that `command` runs, else of the working directory.

        Raises:
            ConfigError: a name in `refuse_drift`, or in CKPTMGR_REFUSE_DRIFT, is not known.
        """
        from ckptmgr.core.conditions import drift_names
        from ckptmgr.run.conditions import refused_by_environment

        scripts = (Path(word) for word in command or () if word.endswith(".py"))
        script = next((script for script in scripts if script.is_file()), None)
        directory = Path.cwd() if script is None else script.resolve().parent
        return cls(directory, drift_names(refuse_drift) | refused_by_environment())

    def drift(self, manifest: Manifest) -> tuple[Drift, ...]:
        """How they differ from those that the checkpoint was made under."""
        from ckptmgr.core.conditions import Conditions, drift
        from ckptmgr.run.conditions import installed_like

        saved = Conditions.of_document(manifest.conditions)
        return drift(saved, installed_like(saved, self.directory))

    def check(self, manifest: Manifest) -> None:
        """Raise DriftError if they differ in what is to be refused."""
        from ckptmgr.core.conditions import refuse

        if self.refused:
            refuse(self.drift(manifest), self.refused, where=f"step {manifest.step} ({manifest.id})")


def _resume(
    run_url: str,
    selector: Selector,
    to: Path | None,
    tier: LocalTier | None,
    surroundings: Surroundings,
    *,
    strict: bool,
    replace: bool,
) -> Resumed:
    """Resume, showing progress."""
    from ckptmgr.run.candidates import open_to_resume
    from ckptmgr.run.resume import resume as execute

    run = open_to_resume(run_url, tier)
    with Bar() as bar:
        resumed = execute(
            run, selector, to=to, tier=tier, strict=strict, replace=replace, progress=bar, check=surroundings.check
        )
    origin = {"local": "from the local tier", "remote": f"from {run.url}", None: "already there"}[resumed.source]
    say(f"step {resumed.manifest.step} ({resumed.manifest.id}), {size(resumed.manifest.size_bytes)} verified, {origin}")
    for each in surroundings.drift(resumed.manifest):
        warn(f"changed: {each}")
    return resumed


class Bar:
    """A progress bar that begins anew with each checkpoint that is tried."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._moved: Callable[[int], None] = lambda moved: None

    def __enter__(self) -> Bar:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def started(self, manifest: Manifest, source: str) -> None:
        self._stack.close()
        what = f"{'v' if manifest.kind == 'artifact' else 'step '}{manifest.step}"
        self._moved = self._stack.enter_context(progress(what, manifest.size_bytes))

    def moved(self, moved: int) -> None:
        self._moved(moved)


def _resumed_json(resumed: Resumed | None, surroundings: Surroundings) -> dict[str, Any]:
    if resumed is None:
        return {"path": None, "id": None, "step": None, "source": None, "skipped": [], "drift": [], "conditions": {}}
    return {
        "path": str(resumed.path),
        "id": resumed.manifest.id,
        "step": resumed.manifest.step,
        "source": resumed.source,
        "skipped": [{"id": str(item.stem), "step": item.stem.step, "why": item.why} for item in resumed.skipped],
        "drift": [
            {"what": each.what, "saved": each.saved, "now": each.now} for each in surroundings.drift(resumed.manifest)
        ],
        "conditions": dict(resumed.manifest.conditions),
    }


def _tier(directory: Path | None) -> LocalTier | None:
    """The local tier at `directory`; None if there is none (yet), or none that can be read."""
    from ckptmgr.run.tier import LocalTier

    return None if directory is None else LocalTier.find_readable(directory)


def _launch(
    command: list[str], resumed: Resumed | None, run_url: str, local_dir: Path | None, refused: frozenset[str]
) -> int:
    """Run COMMAND, drain the local tier, and return the exit code of both."""
    import tempfile

    from ckptmgr.backends.registry import normalize_url
    from ckptmgr.core.errors import DriftError
    from ckptmgr.run.conditions import REFUSE_ENV
    from ckptmgr.run.launch import (
        ATTEMPT_ENV,
        LOCAL_DIR_ENV,
        REFUSAL_ENV,
        RESUME_ENV,
        RUN_ENV,
        fill_in,
        launch,
        told_refusal,
    )

    path = None if resumed is None else str(resumed.path)
    environment = {
        RESUME_ENV: path or "",
        ATTEMPT_ENV: "" if resumed is None else str(resumed.attempt),
        RUN_ENV: normalize_url(run_url),
    }
    if local_dir is not None:
        environment[LOCAL_DIR_ENV] = os.path.abspath(local_dir)
    if refused:
        environment[REFUSE_ENV] = ",".join(sorted(refused))
    words = fill_in(command, path)
    say(f"{'resuming' if path else 'starting from scratch'}: {shlex.join(words)}")
    with tempfile.TemporaryDirectory(prefix="ckptmgr-resume-", ignore_cleanup_errors=True) as folder:
        refusal = Path(folder, "refusal")
        code = launch(words, {**environment, REFUSAL_ENV: str(refusal)})
        # 1 is what Python, and torchrun, end with after an error that nobody caught; any other code is COMMAND's own choice.
        if code == 1 and (why := told_refusal(refusal)) is not None:
            say(f"COMMAND refused to go on: {why}")
            code = DriftError.exit_code
    left = drain_tier(_tier(local_dir), run_url)
    return code or left.exit_code


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
    follow_links: FollowLinks = False,
    as_json: Json = False,
) -> None:
    """Commit a directory as a checkpoint, and print its id once it is in the store."""
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.push import check_pushable
    from ckptmgr.run.push import push as execute

    metrics = dict(metric_of(text) for text in metric or ())
    directory = local_directory(directory)
    at = check_pushable(directory, step=step, tag=tag, follow_links=follow_links, url=run_url)
    run = RunDirectory.open_or_create(run_url)
    with Bar() as bar:
        pushed = execute(
            directory,
            run,
            step=at,
            metrics=metrics,
            tag=tag,
            new_attempt=new_attempt,
            follow_links=follow_links,
            described=lambda manifest: bar.started(manifest, "local"),
            moved=bar.moved,
        )
    manifest = pushed.manifest
    if pushed.existed and _differs(metrics, manifest):
        held = ", ".join(f"{name}={compact(value)}" for name, value in sorted(manifest.metrics.items())) or "none"
        warn(
            f"the metrics given were not recorded: {pushed.stem} is there already with metrics {held}, and a manifest is written once"
        )
    warn_of_repair(pushed.repaired, run.url)
    if as_json:
        emit_json(
            {
                "id": str(pushed.stem),
                "step": manifest.step,
                "existed": pushed.existed,
                "repaired": [one.file for one in pushed.repaired],
                "files": len(manifest.files),
                "size_bytes": manifest.size_bytes,
            }
        )
        return
    emit(str(pushed.stem))
    what = "was there already" if pushed.existed else "committed"
    what += f", {count(len(pushed.repaired), 'file')} of it sent again" if pushed.repaired else ""
    files = count(len(manifest.files), "file")
    say(f"step {manifest.step}, {files}, {size(manifest.size_bytes)}: {what} in {run.url}")


def warn_of_repair(damage: Sequence[Damage], where: str) -> None:
    """Say what the store had lost, or damaged, of something that was committed: it does not do that by itself."""
    for one in damage[:_NAMED]:
        warn(f"{one.file} {one.why} in {where}: it was sent again")
    if len(damage) > _NAMED:
        warn(f"{len(damage) - _NAMED} more files were missing or damaged, and were sent again")


def _differs(metrics: dict[str, float], manifest: Manifest) -> bool:
    """Whether `manifest` lacks one of `metrics`, or has it with another value. NaN equals NaN here."""
    return any(
        name not in manifest.metrics or repr(manifest.metrics[name]) != repr(value) for name, value in metrics.items()
    )


def metric_of(text: str) -> tuple[str, float]:
    from ckptmgr.core.errors import ConfigError

    name, equals, value = text.partition("=")
    with contextlib.suppress(ValueError):
        if name and equals:
            return name, float(value)
    raise ConfigError(f"--metric {text!r} is not NAME=NUMBER", hint="give for instance --metric eval_loss=1.25")
