"""`status`: what is saved here and not in the store yet, and how the uploads are doing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.command import Command, local_directory
from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import count, emit, emit_json, one_line, size, warn, when
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ckptmgr.core.history import History
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.tier import LocalTier
    from ckptmgr.transfer.overview import TierView
    from ckptmgr.transfer.status import Durable, HostView, Lag

_LOCAL_DIR_ENV = "CKPTMGR_LOCAL_DIR"
_SHOWN = 5
_EPILOG = """\b
Examples:
  ckptmgr status                          the tier of CKPTMGR_LOCAL_DIR,
                                          else those below ./.ckptmgr
  ckptmgr status /scratch/run
  ckptmgr status s3://bucket/exp/run      what the store has; with
                                          CKPTMGR_LOCAL_DIR the tier too

Exit codes: 0 everything saved here is in the store; 3 no local tier, or no run, there; 4 the store could not be asked; 6 uploads are
pending, or saves were dropped unsent (`ckptmgr drain` uploads, and acknowledges)."""


def register(app: typer.Typer) -> None:
    app.command("status", cls=Command, epilog=_EPILOG, short_help="Show what is not in the store yet, and why.")(status)


def status(
    place: Annotated[
        str | None,
        typer.Argument(metavar="LOCAL_DIR|RUN", help="A local tier, or the URL of a run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show what is saved on this machine and not in the store yet: how far its upload is, what failed, and how far the store is behind."""
    from ckptmgr.transfer.overview import tier_view

    run, tiers = _find(place)
    history = None if run is None else run.history()
    durable = None if history is None else _newest(history)
    views = [tier_view(tier, durable) for tier in tiers]
    if as_json:
        emit_json(
            {
                "run": None if run is None or history is None else _run_json(run, history),
                "tiers": [
                    {**_tier_json(view), "restored": tier.restored()} for view, tier in zip(views, tiers, strict=True)
                ],
            }
        )
    else:
        if run is not None and history is not None:
            _emit_run(run, history)
        for view, tier in zip(views, tiers, strict=True):
            if view is not views[0]:
                emit("")
            _emit_tier(view, tier.restored())
    if not all(view.is_durable for view in views):
        raise typer.Exit(6)


# --- what is meant --------------------------------------------------------------------------------------------------------


def _find(place: str | None) -> tuple[RunDirectory | None, list[LocalTier]]:
    """The run and the tiers to show.

    Raises:
        CheckpointNotFoundError: there is neither.
    """
    from ckptmgr.core.errors import CheckpointNotFoundError
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.tier import LocalTier

    if place is None:
        return None, _tiers_here()
    scheme, colon, _ = place.partition("://")
    if not colon or scheme == "file":
        directory = local_directory(Path(place))
        if LocalTier.is_at(directory):
            return None, [LocalTier.open(directory)]
    try:
        run = RunDirectory.open(place)
    except CheckpointNotFoundError as exc:
        if colon or hasattr(exc, "runs"):
            raise
        raise CheckpointNotFoundError(f"there is neither a local tier nor a run at {place}", hint=exc.hint) from exc
    given = os.environ.get(_LOCAL_DIR_ENV)
    tier = LocalTier.find(local_directory(Path(given))) if given else None
    if tier is not None and tier.run.uuid != run.uuid:
        warn(f"{tier.root} ({_LOCAL_DIR_ENV}) is the local tier of another run")
        tier = None
    return run, [] if tier is None else [tier]


def _tiers_here() -> list[LocalTier]:
    """The tier of CKPTMGR_LOCAL_DIR, or those below the working directory."""
    from ckptmgr.core.errors import CheckpointNotFoundError
    from ckptmgr.run.tier import LocalTier

    given = os.environ.get(_LOCAL_DIR_ENV)
    if given:
        return [LocalTier.open(local_directory(Path(given)))]
    found = [LocalTier.open(path) for path in sorted(Path(".ckptmgr").glob("*")) if LocalTier.is_at(path)]
    if not found:
        raise CheckpointNotFoundError(
            f"there is no local tier below {Path('.ckptmgr').absolute()}",
            hint=f"name one, or a run, or set {_LOCAL_DIR_ENV}",
        )
    return found


# --- for people -----------------------------------------------------------------------------------------------------------


def _emit_run(run: RunDirectory, history: History) -> None:
    from ckptmgr.core.units import duration_text

    newest = _newest(history)
    age = None if newest is None else _age(newest.created_at)
    saved = "" if age is None else f", saved {duration_text(age)} ago"
    emit(f"run:        {run.url}")
    emit(f"in store:   {'no checkpoint yet' if newest is None else f'step {newest.stem.step}{saved} ({newest.stem})'}")
    table = Table(
        Column(title="attempt", right=True),
        Column(title="began (UTC)"),
        Column(title="how"),
        Column(title="from step", right=True),
        Column(title="host", least=8),
    )
    for number in sorted(history.attempts)[-_SHOWN:]:
        record = history.attempts[number]
        parent = "" if record.parent is None else str(record.parent.step)
        table.add(str(number), when(record.created_at), record.how, parent, record.host or "")
    if history.attempts:
        show_table(table)


def _emit_tier(view: TierView, restored: dict[str, Any] | None) -> None:
    for label, value in (*_lines(view), ("restored", _restored(restored))):
        if value:
            emit(f"{label + ':':<12}{one_line(value)}")
    if not view.entries:
        return
    table = Table(
        Column(title="step", right=True),
        Column(title="state"),
        Column(title="size", right=True),
        Column(title="tries", right=True),
        Column(title="id"),
    )
    # An outage of days drops hundreds; the newest of them say it all.
    unseen = {entry.stem for entry in view.of("dropped")[_SHOWN:]}
    for entry in view.entries:
        if entry.stem not in unseen:
            known = size(entry.size_bytes) if entry.size_bytes else ""
            table.add(str(entry.stem.step), entry.state, known, str(entry.tries or ""), str(entry.stem))
    show_table(table)
    for state in ("failed", "dropped", "pruned"):
        told = view.of(state)
        for entry in told[:_SHOWN]:
            emit(f"step {entry.stem.step} {state}: {one_line(entry.why)}")
        if len(told) > _SHOWN:
            emit(f"and {len(told) - _SHOWN} more {state}")


def _lines(view: TierView) -> Iterable[tuple[str, str]]:
    waiting, dropped = view.pending, view.of("dropped")
    yield "local tier", view.root
    yield "run", ", ".join(sorted({entry.target for entry in view.entries if entry.target}))
    if view.is_durable:
        yield "state", "everything is in the store" if view.entries else "nothing was saved yet"
    if waiting:
        yield "waiting", f"{count(len(waiting), 'save')}, {size(sum(entry.size_bytes for entry in waiting))}"
        yield "uploads", _uploads(view)
    if dropped:
        yield "dropped", f"{count(len(dropped), 'save')}, never uploaded - `ckptmgr drain` acknowledges"
    yield from _lag_lines(view.lag)
    yield "last error", _last_error(view)


def _restored(document: dict[str, Any] | None) -> str:
    """The last restore in one line; nothing if it is not as this version writes it."""
    match document:
        case {"step": int(step), "restored_at": str(at), "report": {"missing": list(missing), "drift": list(drift)}}:
            told = f"step {step}, at {when(at)} UTC"
            told += f", without {', '.join(map(str, missing))}" if missing else ""
            changed = [str(each["what"]) for each in drift if isinstance(each, dict) and "what" in each]
            return told + (f", changed: {', '.join(changed)}" if changed else "")
    return ""


def _uploads(view: TierView) -> str:
    """What the uploads do just now."""
    from ckptmgr.core.units import duration_text

    host = view.host
    if host is None or not host.alive:
        other = view.of("uploading")
        if other:
            return f"step {other[0].stem.step}, by another process"
        return "no process is there - run `ckptmgr drain`, or resume training"
    if host.uploading is None:
        return f"none at the moment (process {host.pid})"
    share = f"{_percent(host)} % of {size(host.total_bytes)}" if host.total_bytes else size(host.sent_bytes)
    left = "" if host.eta_s is None else f", {duration_text(host.eta_s)} left"
    return f"step {host.uploading.step}, {share}, {size(host.rate_bytes_s)}/s{left} (process {host.pid})"


def _lag_lines(lag: Lag | None) -> Iterable[tuple[str, str]]:
    from ckptmgr.core.units import duration_text

    if lag is None:
        return
    ago = "" if lag.age_s is None else f", saved {duration_text(lag.age_s)} ago"
    yield "newest", f"step {lag.step}{ago}, only on this disk"
    if lag.durable is None:
        yield "in store", "nothing, as far as this disk knows"
    else:
        ago = "" if lag.durable_age_s is None else f", saved {duration_text(lag.durable_age_s)} ago"
        behind = "" if not lag.steps_ahead else f", {count(lag.steps_ahead, 'step')} behind"
        yield "in store", f"step {lag.durable_step}{ago}{behind}"


def _last_error(view: TierView) -> str:
    """The last error of the uploading process, unless an entry below the table tells it, or it is over."""
    error = "" if view.host is None else view.host.last_error
    return "" if view.is_durable or error in {entry.why for entry in view.entries} else error


def _percent(host: HostView) -> int:
    return min(100, 100 * host.sent_bytes // host.total_bytes) if host.total_bytes else 0


# --- for programs ---------------------------------------------------------------------------------------------------------


def _run_json(run: RunDirectory, history: History) -> dict[str, Any]:
    newest = _newest(history)
    return {
        "url": run.url,
        "latest_id": None if newest is None else str(newest.stem),
        "latest_step": None if newest is None else newest.stem.step,
        "latest_age_s": None if newest is None else _age(newest.created_at),
        "attempts": [
            {
                "attempt": number,
                "how": record.how,
                "parent": None if record.parent is None else str(record.parent),
                "host": record.host,
                "created_at": record.created_at,
            }
            for number, record in sorted(history.attempts.items())
        ],
    }


def _tier_json(view: TierView) -> dict[str, Any]:
    host, lag = view.host, view.lag
    pending = view.pending
    return {
        "local_dir": view.root,
        "durable": view.is_durable,
        "pending": len(pending),
        "pending_bytes": sum(entry.size_bytes for entry in pending),
        "dropped": len(view.of("dropped")),
        "uploader": None
        if host is None
        else {
            "alive": host.alive,
            "pid": host.pid,
            "host": host.host,
            "run": host.target,
            "uploading": None if host.uploading is None or not host.alive else str(host.uploading),
            "sent_bytes": host.sent_bytes,
            "total_bytes": host.total_bytes,
            "percent": _percent(host),
            "rate_bytes_s": host.rate_bytes_s if host.alive else 0.0,
            "eta_s": host.eta_s if host.alive else None,
            "committed": host.committed,
            "failures": host.failures,
            "retries": host.retries,
            "last_error": host.last_error,
        },
        "lag": None
        if lag is None
        else {
            "id": str(lag.stem),
            "step": lag.step,
            "age_s": lag.age_s,
            "steps_ahead": lag.steps_ahead,
            "durable_id": None if lag.durable is None else str(lag.durable),
            "durable_step": lag.durable_step,
            "durable_age_s": lag.durable_age_s,
        },
        "entries": [
            {
                "id": str(entry.stem),
                "step": entry.stem.step,
                "state": entry.state,
                "size_bytes": entry.size_bytes,
                "tries": entry.tries,
                "run": entry.target,
                "why": entry.why,
            }
            for entry in view.entries
        ],
    }


def _newest(history: History) -> Durable | None:
    """The newest of the run's present lineage."""
    from ckptmgr.transfer.status import newest_durable

    return newest_durable(history.readable_chain()[:1])


def _age(stamp: str | None) -> float | None:
    from ckptmgr.run.identity import utc_now
    from ckptmgr.transfer.status import age_s

    return age_s(stamp, utc_now())
