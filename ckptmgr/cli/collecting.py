"""`gc`: show what was abandoned in a run, or in all runs of a store, and remove it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.command import Command
from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import count, emit, emit_json, fail, say, size, warn
from ckptmgr.cli.pruning import if_it_may_be_asked, warn_of_versions
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.gc import GcPlan
    from ckptmgr.run.journal import Journal
    from ckptmgr.run.litter import Litter

_EPILOG = """\b
Examples:
  ckptmgr gc s3://bucket/exp/run
  ckptmgr gc s3://bucket/exp/run --yes
  ckptmgr gc s3://bucket/exp --grace 14d --yes      every run below it

\b
What goes, by the store's own times:
  uncommitted  data of a save that was never committed, older than --grace
  closed       what an interrupted removal has left
  upload       parts of an upload that never ended, older than --grace
  temporary    files of killed writes on a disk, older than --grace
  folder       empty folders of saves on a disk, older than --grace
  record       of a removal, 30 days after it
  probe        what a killed doctor or start has left, older than --grace

Committed checkpoints, damaged ones, foreign files and what this machine uploads or reads just now always stay. A slow writer whose data went
commits under a new id. On a store that does not decide create-only writes a first run only marks, and one a day later removes.

Exit codes: 0 done, or planned; 2 wrong usage, a local tier; 3 neither a run nor a store of runs; 4 the store, or one of its runs, is
unavailable or refuses."""


def register(app: typer.Typer) -> None:
    app.command("gc", cls=Command, epilog=_EPILOG, short_help="Remove abandoned data and unfinished uploads.")(gc)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What was found in one place: `name` of the run within its store, or None for the one that was given; what went or would go."""

    name: str | None
    where: str
    gone: Sequence[Litter]
    marked: Sequence[Litter] = ()
    young: Sequence[Litter] = ()


def gc(
    url: Annotated[str, typer.Argument(metavar="RUN|STORE", help="A run, or a store of runs.")],
    grace: Annotated[
        str,
        typer.Option("--grace", metavar="7d", help="Without a sign of life for so long (s, m, h, d), it is abandoned."),
    ] = "7d",
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only the plan is shown.")] = False,
    as_json: Json = False,
) -> None:
    """Show what was abandoned: data without a manifest, unfinished uploads, leftovers; with --yes, remove it."""
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.core.units import parse_duration
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.store import runs_of

    grace_s = parse_duration(grace)
    if grace_s is None:
        raise ConfigError(f"--grace {grace!r} is not a length of time", hint="give for instance 12h, 7d or 14d")
    run = RunDirectory.find(url)
    if run is not None:
        _emit([_of_run(run, grace_s, None, yes=yes)], yes=yes, as_json=as_json)
        return
    store, runs = runs_of(url)
    outcomes, refused = _of_store(store, runs, grace_s, yes=yes)
    _emit(outcomes, yes=yes, as_json=as_json)
    if refused:
        fail(f"{refused} of the {count(len(runs), 'run')} of {store} could not be looked at - see above")
        raise typer.Exit(4)


def _of_store(store: str, runs: Sequence[Any], grace_s: float, *, yes: bool) -> tuple[list[_Outcome], int]:
    """Each run of a store, and what lies beside them; also how many runs the store refused."""
    from ckptmgr.core.errors import BackendError, CkptmgrError, ConfigError, TransientBackendError
    from ckptmgr.run.directory import RunDirectory

    outcomes: list[_Outcome] = []
    refused = 0
    for run in runs:
        name = run.name if isinstance(run, RunDirectory) else run[0]
        try:
            if not isinstance(run, RunDirectory):
                raise run[1]
            outcomes.append(_of_run(run, grace_s, name, yes=yes))
        except TransientBackendError:
            raise  # the store is down for all of them
        except ConfigError as error:
            warn(f"{name} is passed over: {error.message}")
        except CkptmgrError as error:
            refused += isinstance(error, BackendError)
            warn(f"{name} could not be cleaned up: {error}")
    return [*outcomes, *_beside(store, runs, grace_s, yes=yes)], refused


def _beside(store: str, runs: Sequence[Any], grace_s: float, *, yes: bool) -> list[_Outcome]:
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.gc import collect_leftovers

    run = next((run for run in runs if isinstance(run, RunDirectory)), None)
    above = "" if run is None else run.root.rpartition("/")[0]
    if run is None or not above:
        return []
    found = collect_leftovers(run.fs, above, grace_s=grace_s, remove=yes)
    return [_Outcome(name=None, where=store, gone=found)] if found else []


def _of_run(run: RunDirectory, grace_s: float, name: str | None, *, yes: bool) -> _Outcome:
    from ckptmgr.run.gc import asked, plan_gc
    from ckptmgr.run.gc import gc as execute

    journals = _journals(run)
    if not yes:
        as_today, told_s = if_it_may_be_asked(lambda: asked(run)) or (run, None)
        plan = plan_gc(as_today, grace_s=grace_s, journals=journals, now_s=told_s)
        _approve(run, plan)
        for litter, why in plan.busy:
            warn(f"{litter.id} stays: {why}")
        return _Outcome(name=name, where=run.url, gone=plan.collect, marked=plan.marked, young=plan.young)
    done = execute(
        run,
        grace_s=grace_s,
        journals=journals,
        approve=lambda plan: _approve(run, plan),
        tick=lambda litter: say(f"removing {litter.id} ({litter.kind})"),
    )
    for litter, why in done.spared:
        warn(f"{litter.id} stays: {why}")
    return _Outcome(name=name, where=run.url, gone=done.removed, marked=done.plan.marked, young=done.plan.young)


def _approve(run: RunDirectory, plan: GcPlan) -> None:
    """Say what a reader of the plan should know."""
    if plan.unseen:
        warn(f"{run.url}: unfinished uploads were not looked for: {plan.unseen}")
    if plan.collect:
        warn_of_versions(run)


def _journals(run: RunDirectory) -> list[Journal]:
    """Of uploads of this machine to `run`: of pushes, and of the local tier that the environment names."""
    from ckptmgr.run.journal import Journal
    from ckptmgr.run.launch import LOCAL_DIR_ENV
    from ckptmgr.run.push import journal_root
    from ckptmgr.run.tier import LocalTier

    journals = [Journal(journal_root(run.url))]
    directory = os.environ.get(LOCAL_DIR_ENV)
    tier = LocalTier.find(directory) if directory else None
    if tier is not None and tier.run.uuid == run.uuid:
        journals.append(tier.journal)
    return journals


def _emit(outcomes: Sequence[_Outcome], *, yes: bool, as_json: bool) -> None:
    freed = sum(litter.size_bytes or 0 for outcome in outcomes for litter in outcome.gone)
    if as_json:
        emit_json(
            {
                "collect": [_json(litter, outcome) for outcome in outcomes for litter in outcome.gone],
                "marked": [_json(litter, outcome) for outcome in outcomes for litter in outcome.marked],
                "freed_bytes": freed,
            }
        )
        return
    for outcome in outcomes:
        _show(outcome, "removed" if yes else "remove")
        _sum_up(outcome, yes=yes)


def _json(litter: Litter, outcome: _Outcome) -> dict[str, Any]:
    run = {} if outcome.name is None else {"run": outcome.name}
    age = None if litter.age_s is None else round(litter.age_s)
    return {**run, "id": litter.id, "kind": litter.kind, "age_s": age, "bytes": litter.size_bytes}


def _show(outcome: _Outcome, word: str) -> None:
    from ckptmgr.core.units import duration_text

    rows = [(word, litter) for litter in outcome.gone] + [("marked", litter) for litter in outcome.marked]
    if not rows:
        return
    table = Table(
        Column(title="plan"),
        Column(title="kind"),
        Column(title="age", right=True),
        Column(title="size", right=True),
        Column(title="what"),
    )
    for plan, litter in rows:
        age = "?" if litter.age_s is None else duration_text(max(litter.age_s, 0))
        table.add(plan, litter.kind, age, "?" if litter.size_bytes is None else size(litter.size_bytes), litter.id)
    show_table(table)


def _sum_up(outcome: _Outcome, *, yes: bool) -> None:
    freed = size(sum(litter.size_bytes or 0 for litter in outcome.gone))
    if yes:
        text = f"removed {count(len(outcome.gone), 'thing')}, freed {freed}"
    elif outcome.gone:
        text = f"would remove {count(len(outcome.gone), 'thing')} and free {freed}; add --yes to do it"
    else:
        text = "nothing to remove"
    if outcome.marked:
        text += f"; {len(outcome.marked)} to be removed by a run that comes a day after the first with --yes"
    if outcome.young:
        text += f"; {count(len(outcome.young), 'younger thing')} may be under way and stays"
    emit(f"{outcome.where}: {text}")
