"""`prune`: show what retention would remove, or remove it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckptmgr.cli.looking import Json
from ckptmgr.cli.output import emit, emit_json, say, show_table, size, table, warn

if TYPE_CHECKING:
    from ckptmgr.core.retention import RetentionPlan, RetentionRule, Verdict

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def register(app: typer.Typer) -> None:
    app.command("prune")(prune)


def prune(
    run_url: Annotated[str, typer.Argument(metavar="RUN", help="The run.")],
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N of the lineage.")
    ] = None,
    keep_best: Annotated[
        list[str] | None, typer.Option("--keep-best", metavar="METRIC[:MODE[:K]]", help="Keep the best K.")
    ] = None,
    keep_worst: Annotated[
        list[str] | None, typer.Option("--keep-worst", metavar="METRIC[:MODE[:K]]", help="Keep the worst K.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", help="Keep multiples of N steps.")
    ] = None,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", metavar="7d", help="Keep those younger than this.")
    ] = None,
    all_lineages: Annotated[
        bool, typer.Option("--all-lineages", help="Also remove from lineages left behind.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only the plan is shown.")] = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints that no rule keeps. The newest, tagged and resumed-from ones always stay."""
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.prune import plan_prune
    from ckptmgr.run.prune import prune as execute

    rule = _rule(keep_last, keep_best or (), keep_worst or (), keep_every, keep_within)
    run = RunDirectory.open(run_url)
    if not yes:
        plan = plan_prune(run.history(), rule, all_lineages=all_lineages)
        _emit(plan, plan.delete, applied=False, as_json=as_json, where=run.url)
        return
    done = execute(
        run,
        rule,
        all_lineages=all_lineages,
        tick=lambda verdict: say(f"removing step {verdict.manifest.step} ({verdict.manifest.id})"),
    )
    for verdict in done.spared:
        warn(f"{verdict.manifest.id} stays: it was tagged or is being read")
    for stem in done.finished:
        say(f"finished the interrupted removal of {stem}")
    _emit(done.plan, done.deleted, applied=True, as_json=as_json, where=run.url)


def _emit(plan: RetentionPlan, delete: Iterable[Verdict], *, applied: bool, as_json: bool, where: str) -> None:
    gone = list(delete)
    freed = sum(verdict.manifest.size_bytes for verdict in gone)
    if as_json:
        emit_json({"keep": _json(plan.keep), "delete": _json(gone), "freed_bytes": freed, "applied": applied})
        return
    made = table("", "step", "size", "why", "id", right=("step", "size"))
    doomed = {verdict.manifest.stem for verdict in gone}
    for verdict in sorted([*plan.keep, *gone], key=lambda verdict: verdict.manifest.stem):
        manifest = verdict.manifest
        mark = ("removed" if applied else "remove") if manifest.stem in doomed else "keep"
        made.add_row(mark, str(manifest.step), size(manifest.size_bytes), ", ".join(verdict.reasons), manifest.id)
    show_table(made)
    if applied:
        emit(f"{where}: removed {len(gone)}, kept {len(plan.keep)}, freed {size(freed)}")
    else:
        emit(
            f"{where}: would remove {len(gone)} of {len(gone) + len(plan.keep)} and free {size(freed)}; add --yes to do it"
        )


def _json(verdicts: Iterable[Verdict]) -> list[dict[str, Any]]:
    return [{"id": v.manifest.id, "step": v.manifest.step, "reasons": list(v.reasons)} for v in verdicts]


def _rule(
    last: int | None, best: Iterable[str], worst: Iterable[str], every: int | None, within: str | None
) -> RetentionRule:
    """The union of the rules on the command line.

    Raises:
        ConfigError: none was given, or one makes no sense.
    """
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.core.retention import AnyRule, KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, KeepWorst

    rules: list[RetentionRule] = []
    if last is not None:
        rules.append(KeepLast(last))
    rules += [KeepBest(*_metric(text)) for text in best]
    rules += [KeepWorst(*_metric(text)) for text in worst]
    if every is not None:
        rules.append(KeepEveryNSteps(every))
    if within is not None:
        rules.append(KeepWithin(_seconds(within)))
    if not rules:
        raise ConfigError("prune needs a rule that says what to keep", hint="give for instance --keep-last 3")
    return rules[0] if len(rules) == 1 else AnyRule(rules=tuple(rules))


def _metric(text: str) -> tuple[str, Any, int]:
    """METRIC[:MODE[:K]] as (name, mode or None, k); the name itself may hold colons."""
    from ckptmgr.core.selectors import split_metric

    head, colon, tail = text.rpartition(":")
    if colon and tail.isdecimal():
        name, mode = split_metric(head)
        if mode is not None:
            return name, mode, int(tail)
    return (*split_metric(text), 1)


def _seconds(text: str) -> float:
    from ckptmgr.core.errors import ConfigError

    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise ConfigError(f"--keep-within {text!r} is not a time", hint="give for instance 12h, 7d or 2w")
    return float(match.group(1)) * _UNITS[match.group(2)]
