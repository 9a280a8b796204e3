"""`ls`, `show`: look, change nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.command import Command
from ckptmgr.cli.manifest_output import emit_manifest, producer_text, size_text
from ckptmgr.cli.output import compact, count, emit, emit_json, fail, json_metrics, size, warn, when
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from ckptmgr.core.manifest import Manifest
    from ckptmgr.run.overview import Row, RunOverview, RunRow

# Of a table that is too wide, the reasons go first, then the epoch, then the metrics from the right; the first metric stays longer than the time.
_METRIC_COLUMNS, _LEAVE_METRIC = 6, 18
# eval_runtime, train_samples_per_second, total_flos, num_tokens, memory(GiB), train_speed(iter/s), elapsed_time, …
_OF_THE_MACHINE = re.compile(
    r"run_?time|per_sec|speed|throughput|flos|tokens|samples|(?:^|_)mem(?:ory)?(?:_|\b)|time$|^elapsed|^remaining|percentage|max_steps"
)
SELECTOR_HELP = "latest, a step, best:METRIC[:min|max], worst:METRIC[:min|max], tag:NAME or id:ID."
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="The URL of the run.")]

_LS_EPILOG = """Exit codes: 0 done, also when something is shown as damaged; 3 there is neither a run nor a store of runs; 4 the store, or one
of its runs, could not be looked at."""
_SHOW_EPILOG = "Exit codes: 0 done; 3 nothing matches; 4 the store could not be asked; 5 its manifest is damaged."


def register(app: typer.Typer) -> None:
    app.command("ls", cls=Command, epilog=_LS_EPILOG, short_help="List a run's checkpoints, or a store's runs.")(ls)
    app.command("show", cls=Command, epilog=_SHOW_EPILOG, short_help="Show one checkpoint.")(show)


# --- ls -------------------------------------------------------------------------------------------------------------------


def ls(
    url: Annotated[str, typer.Argument(metavar="URL", help="A run, or a store of runs.")],
    all_lineages: Annotated[
        bool, typer.Option("--all", help="Also abandoned lineages: what a rewind or a fresh start left behind.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Ask the store whether each checkpoint is whole; downloads nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a run, oldest first, or the runs of a store."""
    from ckptmgr.backends.registry import open_store
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.overview import run_overview, store_overview

    fs, root = open_store(url)
    run = RunDirectory.find(url, fs=fs, root=root)
    if run is None:
        store, runs = store_overview(url, fs=fs)
        _emit_store(store, runs, as_json=as_json)
        return
    overview = run_overview(run, all_lineages=all_lineages, check=check)
    if as_json:
        # What a manifest holds is finite, but for the metrics, which are encoded.
        emit_json({"run": run.url, "checkpoints": [_row_json(row) for row in overview.rows]}, is_finite=True)
    else:
        _emit_run(overview)
    for row in overview.rows:
        if row.why:
            warn(f"{row.id} is damaged: {row.why}")


def _emit_run(overview: RunOverview) -> None:
    committed = [row.manifest for row in overview.rows if row.manifest is not None]
    newest = overview.history.newest()
    is_damaged = any(row.stem == newest and row.state == "damaged" for row in overview.rows)
    tail = f", newest: step {newest.step}{' (damaged)' if is_damaged else ''}" if newest is not None else ""
    total = size(sum(manifest.size_bytes for manifest in committed))
    emit(f"{overview.run.url}: {count(len(committed), 'checkpoint')}, {total}{tail}")
    if not overview.rows:
        return
    names = _metric_names(committed)
    table = Table(
        Column(title="step", right=True),
        Column(title="epoch", right=True, leave=30),
        Column(title="saved (UTC)", leave=19),
        Column(title="size", right=True),
        *(Column(title=name, right=True, leave=_LEAVE_METRIC + at) for at, name in enumerate(names)),
        Column(title="why", least=10, leave=31),
        Column(title="tags", least=8, leave=2),
        Column(title="lineage"),
        Column(title="state"),
        Column(title="id"),
    )
    for row in overview.rows:
        manifest = row.manifest
        values = [None if manifest is None else manifest.metrics.get(name) for name in names]
        table.add(
            "" if row.stem is None else str(row.stem.step),
            "" if manifest is None or manifest.epoch is None else compact(manifest.epoch),
            "" if manifest is None else when(manifest.created_at),
            "" if manifest is None else size(manifest.size_bytes),
            *("" if value is None else compact(value) for value in values),
            "" if manifest is None else ", ".join(manifest.reasons),
            ", ".join(row.tags),
            "abandoned" if row.lineage == "abandoned" else "",
            row.state,
            row.id,
        )
    show_table(table)


def _metric_names(manifests: Sequence[Manifest]) -> list[str]:
    """The metrics that get a column of their own, no more than a reader can compare: those that something was saved for, or that a policy watches; then
    losses, then the rest; what tells of the machine and not of the model (Hugging Face's Trainer adds five such) only where there is room."""
    from ckptmgr.core.metrics import metric_name
    from ckptmgr.core.selectors import split_metric

    names, watched = set[str](), set[str]()
    for manifest in manifests:
        names.update(manifest.metrics)
        watched.update(manifest.metric_modes)
    for reason in {reason for manifest in manifests for reason in manifest.reasons}:
        kind, _, metric = reason.partition(":")
        if kind in ("best", "worst"):
            watched.add(split_metric(metric)[0])
    watched = {metric_name(name, names) or name for name in watched}
    order = sorted(
        names,
        key=lambda name: (
            name not in watched,
            _OF_THE_MACHINE.search(name.lower()) is not None,
            not name.endswith("loss"),
            name,
        ),
    )
    return order[:_METRIC_COLUMNS]


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
    }


def _emit_store(store: str, runs: list[RunRow], *, as_json: bool) -> None:
    if as_json:
        emit_json({"store": store, "runs": [_run_json(run) for run in runs]})
    else:
        emit(f"{store}: {count(len(runs), 'run')}")
        table = Table(
            Column(title="run"),
            Column(title="kind"),
            Column(title="checkpoints", right=True),
            Column(title="latest step", right=True),
            Column(title="size", right=True),
            Column(title="latest id", leave=1),
        )
        for run in runs:
            table.add(*_run_cells(run))
        show_table(table)
    for run in runs:
        if run.error is not None:
            warn(f"{run.name} could not be read: {run.error}")
    unseen = [run for run in runs if run.is_unseen]
    if unseen:
        fail(f"{len(unseen)} of the {count(len(runs), 'run')} of {store} could not be looked at - see above")
        raise typer.Exit(4)


def _run_cells(run: RunRow) -> tuple[str, ...]:
    if run.error is not None:
        return run.name, run.kind or "unreadable", "?", "?", "?", ""
    latest = run.latest
    return (
        run.name,
        "" if run.kind == "checkpoints" else run.kind or "",
        str(run.checkpoints),
        "" if latest is None else str(latest.step),
        size(run.size_bytes),
        "" if latest is None else str(latest),
    )


def _run_json(run: RunRow) -> dict[str, Any]:
    """Null stands for what could not be read, which is not the same as none (I7)."""
    unknown = run.error is not None
    return {
        "run": run.name,
        "kind": run.kind,
        "checkpoints": None if unknown else run.checkpoints,
        "latest_step": None if run.latest is None else run.latest.step,
        "latest_id": None if run.latest is None else str(run.latest),
        "size_bytes": None if unknown else run.size_bytes,
    }


# --- show -----------------------------------------------------------------------------------------------------------------


def show(
    run_url: Run,
    selector: Annotated[str, typer.Argument(metavar="SELECTOR", help=SELECTOR_HELP)] = "latest",
    as_json: Json = False,
) -> None:
    """Show one checkpoint: what it is, why it was saved, its files, and the artifacts made from it. With --json, its manifest."""
    from ckptmgr.core.manifest import encode_manifest
    from ckptmgr.core.selectors import parse_selector
    from ckptmgr.run.artifact_links import is_removed, links_of
    from ckptmgr.run.directory import RunDirectory

    chosen = parse_selector(selector)
    run = RunDirectory.open(run_url)
    history = run.history()
    manifest = history.choose(chosen)
    links = [(link, url, is_removed(link, url)) for link, url in links_of(run, manifest.stem)]
    if as_json:
        made_from = [
            {"name": link.name, "version": link.version, "id": str(link.stem), "url": url, "removed": removed}
            for link, url, removed in links
        ]
        emit_json({**json.loads(encode_manifest(manifest)), **({"artifacts": made_from} if made_from else {})})
        return
    tags = sorted(tag for tag, stem in history.tags.items() if stem == manifest.stem)
    facts = (
        ("checkpoint", manifest.id),
        ("run", f"{run.url} ({manifest.run_uuid})"),
        ("step", f"{manifest.step}" + ("" if manifest.epoch is None else f" (epoch {compact(manifest.epoch)})")),
        ("attempt", f"{manifest.stem.attempt}" + (f", from {manifest.parent}" if manifest.parent else "")),
        ("saved", f"{when(manifest.created_at)} UTC" if manifest.created_at else "unknown"),
        ("why", ", ".join(manifest.reasons) or "unknown"),
        ("tags", ", ".join(tags)),
        (
            "metrics",
            ", ".join(f"{name}={compact(value)}" for name, value in sorted(manifest.metrics.items())) or "none",
        ),
        ("size", size_text(manifest)),
        ("world size", str(manifest.world_size)),
        ("made by", producer_text(manifest) or "unknown"),
        *_condition_lines(manifest),
        (
            "artifacts",
            ", ".join(
                f"{url or link.name}@v{link.version}{' (removed)' if removed else ''}" for link, url, removed in links
            ),
        ),
    )
    emit_manifest(facts, manifest)


def _condition_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """What training ran under, apart from the world size and the classes of pieces, which --json has."""
    from ckptmgr.core.conditions import Conditions

    conditions = Conditions.of_document(manifest.conditions)
    batches = {
        "of": conditions.batch_size,
        "accumulated": conditions.accumulation,
    }
    data = {"samples": conditions.dataset_length, "fingerprint": conditions.dataset_fingerprint}
    return [
        ("batch", ", ".join(f"{name} {value}" for name, value in batches.items() if value is not None)),
        ("dataset", ", ".join(f"{name} {value}" for name, value in data.items() if value is not None)),
        ("code", conditions.git_commit or ""),
        ("versions", ", ".join(f"{name} {value}" for name, value in sorted(conditions.versions.items()))),
    ]
