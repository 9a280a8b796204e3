"""What `ls` shows: the checkpoints of a run, the runs of a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ckptmgr.backends.base import Backend
from ckptmgr.core.errors import (
    BackendError,
    CheckpointNotFoundError,
    CkptmgrError,
    ManifestError,
    TransientBackendError,
)
from ckptmgr.core.history import History
from ckptmgr.core.layout import STEM_ORDER, Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import notes
from ckptmgr.run.directory import RunDirectory, side_by_side
from ckptmgr.run.store import runs_of

State = Literal["committed", "damaged", "uncommitted", "foreign"]
Lineage = Literal["current", "abandoned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of `ls RUN`.

    Attributes:
        id: the stem; for foreign data its name.
        state: `uncommitted` data has no manifest (an upload under way, or abandoned); `foreign` is not ours.
        lineage: None for what is no checkpoint.
        manifest: None unless it can be read.
        why: for a damaged one, what is wrong.
        tags: the tags that point to it.
    """

    id: str
    state: State
    stem: Stem | None = None
    lineage: Lineage | None = None
    manifest: Manifest | None = None
    why: str = ""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRow:
    """One line of `ls STORE`.

    Attributes:
        name: of the run's directory.
        kind: None if not even run.json could be read.
        latest: the newest of the present lineage.
        error: why the run could not be read; the other fields say nothing then.
    """

    name: str
    kind: str | None = None
    checkpoints: int = 0
    latest: Stem | None = None
    size_bytes: int = 0
    error: CkptmgrError | None = None

    @property
    def is_unseen(self) -> bool:
        """Whether the store refused to show it, as opposed to showing something damaged."""
        return isinstance(self.error, BackendError)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOverview:
    """`ls RUN`: its checkpoints oldest first, then what is no checkpoint."""

    run: RunDirectory
    history: History
    rows: tuple[Row, ...] = field(default_factory=tuple)


def run_overview(run: RunDirectory, *, all_lineages: bool = False, check: bool = False) -> RunOverview:
    """Everything in a run, oldest first.

    Args:
        all_lineages: also what the present lineage left behind.
        check: ask the store whether each checkpoint is whole (no download).

    Raises:
        BackendError: could not look (I7).
    """
    looks: list[Callable[[], Any]] = [partial(run.history, cached=not check), run.names]
    history, names_there = run.map(lambda look: look(), looks)
    present = set(history.chain())
    seen = notes.noted(run.url, history.manifests)
    names: dict[Stem, list[str]] = {}
    for tag, stem in sorted(history.tags.items()):
        names.setdefault(stem, []).append(tag)
    there = sorted([*history.manifests, *history.broken], key=STEM_ORDER)
    shown = [stem for stem in there if all_lineages or stem in present]
    damage = _damage(run, history, [stem for stem in shown if stem in history.manifests]) if check else {}
    rows = [
        _row(history, stem, "current" if stem in present else "abandoned", names, seen.get(stem), damage.get(stem, ""))
        for stem in shown
    ]
    loose = run.loose_data([*there, *history.closed], names_there)
    rows.extend(
        Row(id=data.name, state=data.state, stem=data.stem)
        for data in sorted(loose, key=lambda data: (data.stem is None, data.name))
        if data.state != "bare"
    )
    return RunOverview(run=run, history=history, rows=tuple(rows))


def _damage(run: RunDirectory, history: History, stems: list[Stem]) -> dict[Stem, str]:
    """What the store itself reports as wrong with each of `stems`; those that are whole are left out."""
    from ckptmgr.run.verify import stored_damage  # what a plain `ls` does not need is not loaded

    found = stored_damage(run, history, stems)
    return {stem: "; ".join(f"{one.file} {one.why}" for one in damage) for stem, damage in found.items()}


def _row(
    history: History,
    stem: Stem,
    lineage: Lineage,
    tags: Mapping[Stem, list[str]],
    note: notes.Note | None,
    damage: str,
) -> Row:
    manifest = history.manifests.get(stem)
    why = damage if manifest is not None else str(history.broken[stem])
    if note is not None and not why:
        why = f"{note.file} {note.why} (seen by this machine at {note.seen_at})"
    return Row(
        id=str(stem),
        state="damaged" if why else "committed",
        stem=stem,
        lineage=lineage,
        manifest=manifest,
        why=why,
        tags=tuple(tags.get(stem, ())),
    )


def store_overview(url: str, *, kind: str | None = None, fs: Backend | None = None) -> tuple[str, list[RunRow]]:
    """The runs one level below `url`, by name, with the newest checkpoint of each one's lineage.

    Args:
        kind: only those of this kind, and what could not be read.
        fs: as for `runs_of`.

    Raises:
        CheckpointNotFoundError: there is none.
        BackendError: the store could not be asked. What it refuses of one run (403) is that run's `error`.
    """
    store, runs = runs_of(url, fs=fs)
    if kind is not None:
        runs = [run for run in runs if not isinstance(run, RunDirectory) or run.record.kind == kind]
    if not runs:
        raise CheckpointNotFoundError(f"no {kind} at {store}, only other runs", hint="see `ckptmgr ls`", url=store)
    if not any(isinstance(run, RunDirectory) for run in runs):
        return store, [_run_row(run) for run in runs]
    fs = next(run.fs for run in runs if isinstance(run, RunDirectory))
    # Each reads its manifests several at once in turn.
    return store, side_by_side(fs, _run_row, runs, workers=4)


def _run_row(run: RunDirectory | tuple[str, BackendError | ManifestError]) -> RunRow:
    if not isinstance(run, RunDirectory):
        return RunRow(name=run[0], error=run[1])
    try:
        history = run.history()
    except TransientBackendError:
        raise  # the store is down for all of them: asking for each would take as many times as long
    except (BackendError, ManifestError) as exc:
        return RunRow(name=run.name, kind=run.record.kind, error=exc)
    return RunRow(
        name=run.name,
        kind=run.record.kind,
        checkpoints=len(history.manifests) + len(history.broken),
        latest=history.newest(),
        size_bytes=sum(manifest.size_bytes for manifest in history.manifests.values()),
    )
