"""`ls`, `show`, `verify`: look, change nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.output import emit, emit_json, json_metrics, number, progress, say, show_table, size, table, warn, when

if TYPE_CHECKING:
    from ckptmgr.run.overview import Row, RunOverview, RunRow
    from ckptmgr.run.verify import Damage

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)
    app.command("show")(show)
    app.command("verify")(verify)


def ls(
    url: Annotated[str, typer.Argument(metavar="URL", help="A run, or a store of runs.")],
    all_lineages: Annotated[bool, typer.Option("--all", help="Also what the present lineage left behind.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Ask the store whether each checkpoint is whole.")] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, oldest first, or the runs of a store."""
    from ckptmgr.core.errors import CheckpointNotFoundError
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.overview import run_overview, store_overview

    try:
        run = RunDirectory.open(url)
    except CheckpointNotFoundError:
        store, runs = store_overview(url)
        _emit_store(store, runs, as_json=as_json)
        return
    overview = run_overview(run, all_lineages=all_lineages, check=check)
    if as_json:
        emit_json({"run": run.url, "checkpoints": [_row_json(row) for row in overview.rows]})
    else:
        _emit_run(overview)


def _emit_run(overview: RunOverview) -> None:
    rows = overview.rows
    committed = [row for row in rows if row.manifest is not None]
    total = size(sum(row.manifest.size_bytes for row in committed if row.manifest is not None))
    newest = overview.history.newest()
    tail = f", newest: step {newest.step}" if newest is not None else ""
    emit(f"{overview.run.url}: {len(committed)} checkpoint{'' if len(committed) == 1 else 's'}, {total}{tail}")
    if not rows:
        return
    made = table(
        "step", "epoch", "saved (UTC)", "size", "metrics", "why", "tags", "state", "id", right=("step", "epoch", "size")
    )
    for row in rows:
        manifest = row.manifest
        state = row.state if row.lineage != "abandoned" else f"{row.state}, abandoned lineage"
        if row.stem is not None and row.stem == newest:
            state += ", newest"
        made.add_row(
            "" if row.stem is None else str(row.stem.step),
            "" if manifest is None or manifest.epoch is None else number(manifest.epoch),
            "" if manifest is None else when(manifest.created_at),
            "" if manifest is None else size(manifest.size_bytes),
            ""
            if manifest is None
            else ", ".join(f"{name}={number(value)}" for name, value in sorted(manifest.metrics.items())),
            "" if manifest is None else ", ".join(manifest.reasons),
            ", ".join(row.tags),
            state,
            row.id,
        )
    show_table(made)
    for row in rows:
        if row.why:
            warn(f"{row.id} is damaged: {row.why}")


def _row_json(row: Row) -> dict[str, Any]:
    manifest = row.manifest
    return {
        "id": row.id,
        "step": None if row.stem is None else row.stem.step,
        "epoch": None if manifest is None else manifest.epoch,
        "attempt": None if row.stem is None else row.stem.attempt,
        "state": row.state,
        "lineage": row.lineage,
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "files": None if manifest is None else len(manifest.files),
        "metrics": {} if manifest is None else json_metrics(manifest.metrics),
        "reasons": [] if manifest is None else list(manifest.reasons),
        "tags": list(row.tags),
        "created_at": None if manifest is None else manifest.created_at,
        **({"why": row.why} if row.why else {}),
    }


def _emit_store(store: str, runs: list[RunRow], *, as_json: bool) -> None:
    if as_json:
        emit_json({"store": store, "runs": [_run_json(run) for run in runs]})
        return
    emit(f"{store}: {len(runs)} run{'' if len(runs) == 1 else 's'}")
    made = table(
        "run", "kind", "checkpoints", "latest step", "size", "latest id", right=("checkpoints", "latest step", "size")
    )
    for run in runs:
        if run.error:
            made.add_row(run.name, "cannot be read", "", "", "", "")
            continue
        latest = run.latest
        made.add_row(
            run.name,
            run.kind,
            str(run.checkpoints),
            "" if latest is None else str(latest.step),
            size(run.size_bytes),
            "" if latest is None else str(latest),
        )
    show_table(made)
    for run in runs:
        if run.error:
            warn(f"{run.name}: {run.error}")


def _run_json(run: RunRow) -> dict[str, Any]:
    return {
        "run": run.name,
        "kind": run.kind,
        "checkpoints": run.checkpoints,
        "latest_step": None if run.latest is None else run.latest.step,
        "latest_id": None if run.latest is None else str(run.latest),
        "size_bytes": run.size_bytes,
        **({"error": run.error} if run.error else {}),
    }


def show(
    run_url: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    selector: Annotated[
        str, typer.Argument(metavar="SELECTOR", help="latest, a step, best:METRIC, tag:NAME, id:ID.")
    ] = "latest",
    as_json: Json = False,
) -> None:
    """Show one checkpoint's manifest."""
    from ckptmgr.core.manifest import encode_manifest
    from ckptmgr.core.selectors import parse_selector
    from ckptmgr.run.directory import RunDirectory

    chosen = parse_selector(selector)
    run = RunDirectory.open(run_url)
    manifest = run.history().choose(chosen)
    if as_json:
        emit_json(json.loads(encode_manifest(manifest)))
        return
    made_by = " ".join(f"{name}={value}" for name, value in sorted(manifest.producer.items()))
    for label, value in (
        ("checkpoint", manifest.id),
        ("run", f"{run.url} ({manifest.run_uuid})"),
        ("step", f"{manifest.step}" + ("" if manifest.epoch is None else f" (epoch {number(manifest.epoch)})")),
        ("attempt", f"{manifest.stem.attempt}" + (f", from {manifest.parent}" if manifest.parent else "")),
        ("saved", f"{when(manifest.created_at)} UTC" if manifest.created_at else "unknown"),
        ("why", ", ".join(manifest.reasons)),
        ("metrics", ", ".join(f"{name}={number(value)}" for name, value in sorted(manifest.metrics.items())) or "none"),
        ("size", f"{size(manifest.size_bytes)} in {len(manifest.files)} files, world size {manifest.world_size}"),
        ("made by", made_by or "unknown"),
    ):
        emit(f"{label + ':':<12}{value}")
    made = table("file", "role", "size", "blake3", right=("size",))
    for entry in manifest.files:
        made.add_row(entry.path, entry.role, size(entry.size), entry.blake3[:32] + "…")
    show_table(made)


def verify(
    url: Annotated[str, typer.Argument(metavar="RUN|DIR", help="A run, or a directory made by `ckptmgr resume`.")],
    selector: Annotated[
        str | None, typer.Argument(metavar="SELECTOR", help="Only this one; default: all of RUN.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Ask the store for presence, size and checksum; download nothing.")
    ] = False,
    sample: Annotated[
        str | None, typer.Option("--sample", metavar="P%", help="Read this share of the files in full.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check that stored bytes are what the manifests describe. Exit 5 if not."""
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.core.layout import RUN_FILE
    from ckptmgr.core.selectors import parse_selector
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.verify import Depth, verify_directory, verify_run

    if quick and sample is not None:
        raise ConfigError("--quick and --sample exclude each other", hint="give one of them")
    depth = Depth(quick=quick, sample=None if sample is None else _share(sample))
    local = Path(os.path.abspath(os.path.expanduser(url.removeprefix("file://"))))
    if "://" not in url.removeprefix("file://") and local.exists() and not (local / RUN_FILE).exists():
        if selector is not None:
            raise ConfigError(
                f"{url} is a directory, not a run, so the selector {selector!r} means nothing", hint="leave it out"
            )
        manifest, damage = verify_directory(local)
        _emit_damage(1, damage, as_json=as_json, where=f"{local} ({manifest.id})")
        return
    chosen = None if selector is None else parse_selector(selector)
    run = RunDirectory.open(url)
    history = run.history()
    stems = sorted({*history.manifests, *history.broken}) if chosen is None else [history.choose(chosen).stem]
    total = sum(history.manifests[stem].size_bytes for stem in stems if stem in history.manifests)
    with progress("verifying", 0 if quick else total) as moved:
        damage = verify_run(run, history, stems, depth, tick=lambda manifest: moved(manifest.size_bytes))
    _emit_damage(len(stems), damage, as_json=as_json, where=run.url)


def _share(text: str) -> float:
    from ckptmgr.core.errors import ConfigError

    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 < percent <= 100:
        raise ConfigError(f"--sample {text!r} is not a percentage", hint="give for instance --sample 10%")
    return percent / 100


def _emit_damage(checked: int, damage: list[Damage], *, as_json: bool, where: str) -> None:
    if as_json:
        found = [{"id": str(item.stem), "step": item.stem.step, "file": item.file, "why": item.why} for item in damage]
        emit_json({"checked": checked, "damaged": found})
    elif not damage:
        emit(f"{where}: {checked} checkpoint{'' if checked == 1 else 's'} checked, no damage")
    else:
        made = table("step", "file", "what is wrong", "id", right=("step",))
        for item in damage:
            made.add_row(str(item.stem.step), item.file, item.why, str(item.stem))
        show_table(made)
    if damage:
        hurt = {item.stem for item in damage}
        say(
            f"ckptmgr: error: {len(hurt)} of {checked} checkpoints of {where} damaged - `ckptmgr resume` passes over them"
        )
        raise typer.Exit(5)
