"""`verify`: compare what is stored, or restored, with what the manifests say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckptmgr.cli.command import Command
from ckptmgr.cli.looking import SELECTOR_HELP, Json
from ckptmgr.cli.output import count, emit, emit_json, fail, progress, warn
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from ckptmgr.core.history import History
    from ckptmgr.core.layout import Stem
    from ckptmgr.core.selectors import Selector
    from ckptmgr.run.verify import Damage

# Of the files that lie beside a checkpoint.
_NAMED = 5
# What to do about damage, by the kind of run.
_ADVICE = {
    "checkpoints": "`ckptmgr resume` passes over such a one; pushed again, its files are sent anew",
    "artifact": "pushed again, the files of a version are sent anew",
}

_EPILOG = """\b
Examples:
  ckptmgr verify s3://bucket/exp/run               every byte of every checkpoint
  ckptmgr verify s3://bucket/exp/run --quick       what the store itself knows
  ckptmgr verify s3://bucket/exp/run latest
  ckptmgr verify ./run/checkpoint-500              a directory made by resume

Exit codes: 0 no damage; 3 nothing there; 4 the store could not be asked;
5 damage, each piece named; with --quick also a file without the checksum
that the store keeps of the checkpoint's others."""


def register(app: typer.Typer) -> None:
    app.command("verify", cls=Command, epilog=_EPILOG, short_help="Check stored bytes against manifests.")(verify)


def verify(
    url: Annotated[
        str,
        typer.Argument(
            metavar="RUN|DIR", help="A run, or a directory made by `ckptmgr resume` or `pull`, or its one file."
        ),
    ],
    selector: Annotated[
        str | None, typer.Argument(metavar="SELECTOR", help=f"Only this one: {SELECTOR_HELP} Default: all of RUN.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ask the store for presence, size and checksum; download nothing.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option("--sample", metavar="P%", help="Read this share of the files in full, ask about the rest."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that stored bytes are what the manifests describe; by default, by reading all of them."""
    from ckptmgr.backends.registry import normalize_url
    from ckptmgr.core.errors import BackendError, CheckpointNotFoundError, ConfigError
    from ckptmgr.core.layout import MANIFESTS, RUN_FILE
    from ckptmgr.core.selectors import parse_selector
    from ckptmgr.run.candidates import nothing_committed, seen
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.sidecar import read_sidecar
    from ckptmgr.run.verify import Depth, verify_directory, verify_run

    if quick and sample is not None:
        raise ConfigError("--quick and --sample exclude each other", hint="give one of them")
    depth = Depth(quick=quick, sample=None if sample is None else _share(sample))
    place = normalize_url(url)
    local = Path(place.removeprefix("file://"))
    # Of a run that has lost its run.json, and of a store, more is to be said.
    is_run = any((local / name).exists() for name in (RUN_FILE, MANIFESTS)) or any(local.glob(f"*/{RUN_FILE}"))
    if place.startswith("file://") and local.exists() and not is_run:
        if selector is not None or quick or sample is not None:
            raise ConfigError(
                f"{local} is not a run but a restored checkpoint, of which verify reads everything",
                hint="leave the selector, --quick and --sample out",
            )
        manifest, damage = verify_directory(local)
        part = ", a part of it" if read_sidecar(local, parts=True).is_part else ""
        where = f"{local} ({manifest.id}{part})"
        _emit_damage(1, damage, as_json=as_json, where=where, advice="fetch it again, with --replace")
        return
    chosen = None if selector is None else parse_selector(selector)
    try:
        run = RunDirectory.open(url)
    except CheckpointNotFoundError as exc:
        run_url, at, version = url.rpartition("@")
        if at and version.removeprefix("v").isdecimal():
            exc.hint = f"write `ckptmgr verify {run_url} {version.removeprefix('v')}` for that version of an artifact"
        raise
    history = seen(run, chosen, cached=quick)  # what was read before says nothing of the bytes that are there now
    stems = sorted({*history.manifests, *history.broken}) if chosen is None else [_meant(history, chosen)]
    if not stems:
        raise nothing_committed(run, history)
    total = sum(history.manifests[stem].size_bytes for stem in stems if stem in history.manifests)
    sized: list[tuple[Stem, str]] = []
    try:
        with progress("verifying", 0 if quick else total) as moved:
            damage = verify_run(
                run,
                history,
                stems,
                depth,
                moved=moved,
                beside=_note,
                sized=lambda *file: sized.append(file),
                suspects=True,
            )
    except BackendError as error:
        for item in getattr(error, "damage", ()):
            warn(f"{item.stem} is damaged: {item.file} {item.why}")
        raise
    files = sum(len(history.manifests[stem].files) for stem in stems if stem in history.manifests)
    _emit_damage(
        len(stems),
        damage,
        as_json=as_json,
        where=run.url,
        advice=_ADVICE.get(run.record.kind, _ADVICE["checkpoints"]),
        depth=_compared(len(sized), files),
        by_size_only=None if depth.is_full else len(sized),
    )


def _compared(sized: int, files: int) -> str:
    """What the reader must know of a check that found `sized` of so many files only to be there, in their size."""
    if not sized:
        return ""
    return f" ({sized} of {count(files, 'file')} by size only: the store keeps no checksum of {'it' if sized == 1 else 'them'})"


def _note(stem: Stem, files: list[str]) -> None:
    """Say what lies beside a checkpoint's files; a tool that copies the folder would take it along."""
    shown = ", ".join(files[:_NAMED]) + (", …" if len(files) > _NAMED else "")
    warn(
        f"{stem} has {count(len(files), 'file')} beside it that its manifest does not name, and no reader uses: {shown}"
    )


def _meant(history: History, selector: Selector) -> Stem:
    """The one checkpoint to verify; one whose manifest cannot be read is damage to report, not an error of its own."""
    meant = history.meant(selector)
    return meant if meant is not None and meant in history.broken else history.choose(selector).stem


def _share(text: str) -> float:
    from ckptmgr.core.errors import ConfigError

    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise ConfigError(f"--sample {text!r} is not a percentage", hint="give for instance --sample 10%")
    return percent / 100


def _emit_damage(
    checked: int,
    damage: list[Damage],
    *,
    as_json: bool,
    where: str,
    advice: str,
    depth: str = "",
    by_size_only: int | None = None,
) -> None:
    if as_json:
        found = [{"id": str(item.stem), "step": item.stem.step, "file": item.file, "why": item.why} for item in damage]
        only = {} if by_size_only is None else {"by_size_only": by_size_only}
        emit_json({"checked": checked, "damaged": found, **only})
    elif not damage:
        emit(f"{where}: {count(checked, 'checkpoint')} checked, no damage{depth}")
    else:
        table = Table(
            Column(title="step", right=True),
            Column(title="file"),
            Column(title="what is wrong"),
            Column(title="id"),
        )
        for item in damage:
            table.add(str(item.stem.step), item.file, item.why, str(item.stem))
        show_table(table)
    if damage and all(item.is_suspected for item in damage):
        fail(
            f"{where}: {count(len(damage), 'file')} may be damaged: something wrote {'it' if len(damage) == 1 else 'them'} without the checksum - "
            "`ckptmgr verify` without --quick reads every byte and tells"
        )
        raise typer.Exit(5)
    if damage:
        hurt = {item.stem for item in damage}
        fail(f"{where}: {len(hurt)} of {count(checked, 'checkpoint')} damaged - {advice}")
        raise typer.Exit(5)
