"""`prune`: show what retention would remove, or remove it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from ckptmgr.cli.command import Command
from ckptmgr.cli.looking import Json, Run
from ckptmgr.cli.output import emit, emit_json, say, size, warn
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from ckptmgr.core.retention import RetentionPlan, RetentionRule, Verdict
    from ckptmgr.run.directory import RunDirectory

_T = TypeVar("_T")

_EPILOG = """\b
Examples:
  ckptmgr prune s3://bucket/exp/run --keep-last 3 --keep-best eval_loss:min:2
  ckptmgr prune s3://bucket/exp/run --keep-every 1000 --keep-within 7d --yes

The rules add up: what any of them keeps stays. The newest, what the present attempt resumed from, tagged ones, one that is being read on this
machine, and other lineages (without --all-lineages) always stay, and so does all data without a manifest. One that is seen to be damaged counts
for no rule: where it was the best, the next best stays with it.

Exit codes: 0 done, or planned; 2 wrong usage, no rule; 3 no such run; 4 the store is unavailable or refuses; 5 the newest one is damaged, so
nothing was removed."""


def register(app: typer.Typer) -> None:
    app.command("prune", cls=Command, epilog=_EPILOG, short_help="Remove checkpoints that no rule keeps.")(prune)


def prune(
    run_url: Run,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N of the lineage.")
    ] = None,
    keep_best: Annotated[
        list[str] | None,
        typer.Option("--keep-best", metavar="METRIC[:MODE[:K]]", help="Keep the best K (1); MODE is min or max."),
    ] = None,
    keep_worst: Annotated[
        list[str] | None,
        typer.Option(
            "--keep-worst", metavar="METRIC[:MODE[:K]]", help="Keep the worst K; MODE still says what is better."
        ),
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", help="Keep steps that are multiples of N.")
    ] = None,
    keep_within: Annotated[
        str | None, typer.Option("--keep-within", metavar="7d", help="Keep those younger than this (s, m, h, d, w).")
    ] = None,
    all_lineages: Annotated[
        bool, typer.Option("--all-lineages", help="Also remove from lineages that were left behind.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only the plan is shown.")] = False,
    as_json: Json = False,
) -> None:
    """Show which checkpoints no rule keeps; with --yes, remove them."""
    from ckptmgr.run.directory import RunDirectory
    from ckptmgr.run.prune import certain_now, find_damaged, plan_prune, refuse_tier
    from ckptmgr.run.prune import prune as execute

    rule = _rule(keep_last, keep_best or (), keep_worst or (), keep_every, keep_within)
    run = RunDirectory.open(run_url)
    refuse_tier(run)
    if not yes:
        history = run.history()
        plan = plan_prune(history, rule, all_lineages=all_lineages)
        _approve(plan)
        for stem, problem in sorted(history.broken.items()):
            warn(f"{stem} is damaged and stays: {problem}")
        if plan.delete:
            damaged = find_damaged(run, history, rule)
            now = if_it_may_be_asked(lambda: certain_now(run, rule))
            plan = plan_prune(history, rule, all_lineages=all_lineages, damaged=damaged, now=now)
            warn_of_versions(run)
        _emit(plan.keep, plan.delete, applied=False, as_json=as_json, where=run.url)
        return
    done = execute(
        run,
        rule,
        all_lineages=all_lineages,
        approve=_approve,
        tick=lambda verdict: say(f"removing step {verdict.manifest.step} ({verdict.manifest.id})"),
    )
    for verdict in done.spared:
        warn(f"{verdict.manifest.id} stays: {', '.join(verdict.reasons)}")
    for stem in done.finished:
        say(f"finished the interrupted removal of {stem}")
    if done.deleted:
        warn_of_versions(run)
    _emit([*done.plan.keep, *done.spared], done.deleted, applied=True, as_json=as_json, where=run.url)


def if_it_may_be_asked(ask: Callable[[], _T]) -> _T | None:
    """What `ask` says, which writes a probe, so that a plan goes by the store's clock as the deed does; None, with a warning, to who may only read."""
    from ckptmgr.core.errors import PermanentBackendError

    try:
        return ask()
    except PermanentBackendError as error:
        warn(f"ages are by this machine's clock, for the store could not be asked: {error}")
        return None


def warn_of_versions(run: RunDirectory) -> None:
    """Say so if the bucket keeps what is deleted from it: then nothing is freed, or only later."""
    facts = run.fs.bucket_facts(run.root)
    if facts.versioning in ("enabled", "suspended"):
        until = f"for {facts.noncurrent_days} days" if facts.noncurrent_days else "until a rule for noncurrent versions"
        until += "" if facts.noncurrent_days else " removes it"
        warn(f"the bucket of {run.url} keeps older versions: what is removed still takes room {until}")


def _approve(plan: RetentionPlan) -> None:
    """Report metrics that no checkpoint has; a misspelled one must not be taken for a wish to keep nothing.

    Raises:
        ConfigError: and no other rule keeps anything either.
    """
    from ckptmgr.core.errors import ConfigError

    if not plan.unknown_metrics:
        return
    verdicts = [*plan.keep, *plan.delete]
    present = sorted({name for verdict in verdicts for name in verdict.manifest.metrics})
    names = ", ".join(map(repr, plan.unknown_metrics))
    text = f"no checkpoint has the metric {names}; there is {', '.join(present) or 'none at all'}"
    if verdicts and not plan.keeps_by_rule:
        raise ConfigError(f"{text}, and no other rule keeps anything", hint="correct the name, or add --keep-last N")
    warn(text)


def _emit(keep: Sequence[Verdict], delete: Sequence[Verdict], *, applied: bool, as_json: bool, where: str) -> None:
    freed = sum(verdict.manifest.size_bytes for verdict in delete)
    if as_json:
        emit_json({"keep": _json(keep), "delete": _json(delete), "freed_bytes": freed})
        return
    if keep or delete:
        _show(keep, delete, "removed" if applied else "remove")
    if applied:
        emit(f"{where}: removed {len(delete)}, kept {len(keep)}, freed {size(freed)}")
    elif delete:
        every = len(delete) + len(keep)
        emit(f"{where}: would remove {len(delete)} of {every} and free {size(freed)}; add --yes to do it")
    else:
        emit(f"{where}: nothing to remove")


def _show(keep: Sequence[Verdict], delete: Sequence[Verdict], word: str) -> None:
    table = Table(
        Column(title="plan"),
        Column(title="step", right=True),
        Column(title="size", right=True),
        Column(title="why", least=12),
        Column(title="id"),
    )
    doomed = {verdict.manifest.stem for verdict in delete}
    for verdict in sorted([*keep, *delete], key=lambda verdict: verdict.manifest.stem):
        manifest = verdict.manifest
        table.add(
            word if manifest.stem in doomed else "keep",
            str(manifest.step),
            size(manifest.size_bytes),
            ", ".join(verdict.reasons),
            manifest.id,
        )
    show_table(table)


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
    from ckptmgr.core.selectors import split_ranked

    rules: list[RetentionRule] = []
    if last is not None:
        rules.append(KeepLast(last))
    rules += [KeepBest(*split_ranked(text)) for text in best]
    rules += [KeepWorst(*split_ranked(text)) for text in worst]
    if every is not None:
        rules.append(KeepEveryNSteps(every))
    if within is not None:
        rules.append(KeepWithin(_seconds(within)))
    if not rules:
        raise ConfigError("prune needs a rule that says what to keep", hint="give for instance --keep-last 3")
    return rules[0] if len(rules) == 1 else AnyRule(rules=tuple(rules))


def _seconds(text: str) -> float:
    from ckptmgr.core.errors import ConfigError
    from ckptmgr.core.units import parse_duration

    seconds = parse_duration(text)
    if seconds is None:
        raise ConfigError(f"--keep-within {text!r} is not a time", hint="give for instance 12h, 7d or 2w")
    return seconds
