"""How versions of artifacts, and the artifacts of a store, are shown: tables for people, documents for programs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import typer

from ckptmgr.cli.output import compact, count, emit, emit_json, fail, json_metrics, size, warn, when
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from ckptmgr.core.artifacts import Source
    from ckptmgr.core.layout import Stem
    from ckptmgr.core.manifest import Manifest
    from ckptmgr.run.artifacts import Artifact
    from ckptmgr.run.overview import Row, RunOverview, RunRow


def emit_versions(overview: RunOverview) -> None:
    """The versions of one artifact, lowest first, as a table."""
    committed = [row.manifest for row in overview.rows if row.manifest is not None]
    latest = overview.history.newest()
    tail = f", latest: v{latest.step}" if latest is not None else ""
    total = size(sum(manifest.size_bytes for manifest in committed))
    emit(f"{overview.run.url}: {count(len(committed), 'version')}, {total}{tail}")
    if not overview.rows:
        return
    table = Table(
        Column(title="version", right=True),
        Column(title="pushed (UTC)", leave=19),
        Column(title="size", right=True),
        Column(title="files", right=True, leave=18),
        Column(title="tags", least=8, leave=1),
        Column(title="from", least=10, leave=2),
        Column(title="metrics", least=10, leave=17),
        Column(title="state"),
        Column(title="id", leave=3),
    )
    for row in overview.rows:
        manifest = row.manifest
        table.add(
            "" if row.stem is None else f"v{row.stem.step}",
            "" if manifest is None else when(manifest.created_at),
            "" if manifest is None else size(manifest.size_bytes),
            "" if manifest is None else str(len(manifest.files)),
            ", ".join(row.tags),
            "" if manifest is None else _source_text(manifest),
            "" if manifest is None else metrics_text(manifest),
            row.state,
            row.id,
        )
    show_table(table)


def emit_store(store: str, runs: list[RunRow], *, as_json: bool) -> None:
    """The artifacts of a store; ends with exit code 4 if the store refused to show some (I7)."""
    if as_json:
        emit_json({"store": store, "artifacts": [_storerow_json(run) for run in runs]})
    else:
        emit(f"{store}: {count(len(runs), 'artifact')}")
        table = Table(
            Column(title="artifact"),
            Column(title="versions", right=True),
            Column(title="latest", right=True),
            Column(title="size", right=True),
        )
        for run in runs:
            unknown = run.error is not None
            latest = "" if run.latest is None else f"v{run.latest.step}"
            table.add(
                run.name,
                "?" if unknown else str(run.checkpoints),
                "?" if unknown else latest,
                "?" if unknown else size(run.size_bytes),
            )
        show_table(table)
    for run in runs:
        if run.error is not None:
            warn(f"{run.name} could not be read: {run.error}")
    unseen = [run for run in runs if run.is_unseen]
    if unseen:
        fail(f"{len(unseen)} of the directories of {store} could not be looked at - see above")
        raise typer.Exit(4)


def _source_text(manifest: Manifest) -> str:
    from ckptmgr.core.artifacts import source_of

    source = source_of(manifest)
    return "" if source is None else f"{source.run} step {source.stem.step}"


def metrics_text(manifest: Manifest) -> str:
    """The metrics of one version for a reader, by name."""
    return ", ".join(f"{name}={compact(value)}" for name, value in sorted(manifest.metrics.items()))


def artifact_json(artifact: Artifact) -> dict[str, Any]:
    """One version by itself, as a document."""
    return {
        "artifact": artifact.url,
        "name": artifact.name,
        **_version_json(artifact.manifest.stem, artifact.manifest, artifact.tags, is_latest=artifact.is_latest),
    }


def row_json(overview: RunOverview, row: Row) -> dict[str, Any]:
    """One version among the others, as a document; also what is under way, damaged, or none of ours."""
    is_latest = row.stem is not None and row.stem == overview.history.newest()
    return {**_version_json(row.stem, row.manifest, row.tags, is_latest=is_latest), "id": row.id, "state": row.state}


def _version_json(
    stem: Stem | None, manifest: Manifest | None, tags: Iterable[str], *, is_latest: bool
) -> dict[str, Any]:
    from ckptmgr.core.artifacts import metadata_of, source_of

    return {
        "version": None if stem is None else stem.step,
        "id": None if stem is None else str(stem),
        "latest": is_latest,
        "size_bytes": None if manifest is None else manifest.size_bytes,
        "files": None if manifest is None else len(manifest.files),
        "tags": list(tags),
        "source": None if manifest is None else _source_json(source_of(manifest)),
        "metrics": {} if manifest is None else json_metrics(manifest.metrics),
        "metadata": {} if manifest is None else metadata_of(manifest),
        "created_at": None if manifest is None else manifest.created_at,
    }


def _source_json(source: Source | None) -> dict[str, Any] | None:
    from ckptmgr.core.artifacts import encode_source

    return None if source is None else encode_source(source)


def _storerow_json(run: RunRow) -> dict[str, Any]:
    unknown = run.error is not None
    return {
        "name": run.name,
        "versions": None if unknown else run.checkpoints,
        "latest_version": None if run.latest is None else run.latest.step,
        "latest_id": None if run.latest is None else str(run.latest),
        "size_bytes": None if unknown else run.size_bytes,
    }
