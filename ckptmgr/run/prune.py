"""Prune: delete what retention selected. `ckptmgr.core.retention` selects, this module looks, checks and deletes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone

from ckptmgr.core import protocol
from ckptmgr.core.errors import ConfigError, ConflictError, IntegrityError, ManifestError
from ckptmgr.core.history import History
from ckptmgr.core.layout import ATTEMPTS, PROBE_PREFIX, Stem, data_prefix, manifest_key
from ckptmgr.core.manifest import ClosingRecord, Manifest
from ckptmgr.core.retention import Protection, RetentionPlan, RetentionRule, Verdict, is_by_age, plan, ranked
from ckptmgr.run import locks, notes
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.identity import new_nonce, utc_now, utc_stamp
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import damage_of, noted_damage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """What one prune did.

    Attributes:
        plan: what was decided.
        deleted: checkpoints removed, oldest first.
        spared: planned to go, but tagged or in use by the time their turn came; with that reason.
        finished: interrupted removals of an earlier prune that were completed.
    """

    plan: RetentionPlan
    deleted: tuple[Verdict, ...]
    spared: tuple[Verdict, ...]
    finished: tuple[Stem, ...]


def plan_prune(
    history: History,
    rule: RetentionRule,
    *,
    all_lineages: bool = False,
    now: datetime | None = None,
    damaged: Collection[Stem] = (),
) -> RetentionPlan:
    """Decide what stays and what goes, and why; changes nothing, and asks nobody.

    Args:
        damaged: those that stand for nothing (see `find_damaged`).

    Raises:
        ManifestError: the claim of an attempt, or a tag, cannot be read: what must stay is not certain then (I8).
    """
    _refuse_uncertain(history)
    return plan(
        rule,
        history.readable_chain(),
        history.others(),
        protection=Protection(resumed_from=_resumed_from(history), tagged=history.tags),
        now=now or utc_now(),
        all_lineages=all_lineages,
        damaged=damaged,
    )


def find_damaged(
    run: RunDirectory, history: History, rule: RetentionRule, *, unsent: Collection[Stem] = ()
) -> frozenset[Stem]:
    """Those of the lineage that `rule` must not count on: in their favour it would give whole ones away.

    These are what this machine has seen damaged, without a further look, for a note that is wrong only keeps one more; and of the best (or worst) that
    `rule` keeps, those that are damaged by the store's own word, down to as many whole ones as it asks for.

    Args:
        unsent: those that the store cannot have yet; they are whole.

    Raises:
        BackendError: the store could not be asked.
    """
    chain = history.readable_chain()
    damaged = set(notes.noted(run.url, [manifest.stem for manifest in chain]))
    whole = set(unsent)
    while True:
        counted = ranked(rule, [manifest for manifest in chain if manifest.stem not in damaged], utc_now())
        unknown = dict.fromkeys(stem for stem in counted if stem not in whole)
        if not unknown:
            return frozenset(damaged)
        for stem in unknown:
            (damaged if damage_of(run, history.manifests[stem]) else whole).add(stem)


def refuse_tier(run: RunDirectory) -> None:
    """Raise ConfigError if `run` is a local tier: what its journal does not call uploaded may be the only copy there is (I6)."""
    if run.fs.capabilities.is_local and LocalTier.is_at(run.root):
        raise ConfigError(
            f"{run.root} is a local tier, the queue of uploads, and is not cleaned up like a store",
            hint="give the run in the store; training frees its tier itself (keep_local), of what was uploaded",
        )


def _resumed_from(history: History) -> frozenset[Stem]:
    """The checkpoint that the highest attempt began from: until it commits one of its own, that is all it has to go back to."""
    highest = history.attempts.get(history.highest_attempt or 0)
    return frozenset() if highest is None or highest.parent is None else frozenset({highest.parent})


def prune(
    run: RunDirectory,
    rule: RetentionRule,
    *,
    all_lineages: bool = False,
    attempt: int | None = None,
    approve: Callable[[RetentionPlan], None] = lambda plan: None,
    tick: Callable[[Verdict], None] = lambda verdict: None,
) -> Pruned:
    """Delete what `rule` does not keep.

    First the newest that stays is checked (presence, sizes, the store's checksums): if it is damaged, nothing is deleted (I8). So are the best that
    stay: for one that is damaged, the next best stays too. Ages are by this machine's clock, or by the store's if that is behind it. Each removal
    closes the manifest before it touches data, so that a kill leaves nothing that looks complete; the next prune finishes it.

    Args:
        attempt: the number of the attempt on whose behalf this runs; a superseded one never prunes (I12).
        approve: called with the plan before anything is deleted; what it raises ends the prune.

    Raises:
        ConfigError: it is a local tier; nothing was deleted.
        IntegrityError: the newest one is damaged; nothing was deleted.
        ManifestError: the claim of an attempt or a tag cannot be read, and so not said what must stay; nothing was deleted.
        ConflictError: a higher attempt was claimed; nothing was deleted.
        BackendError: the store could not be asked; removals done so far are done.
    """
    refuse_tier(run)
    history = run.history()
    if attempt is not None and (history.highest_attempt or 0) > attempt:
        raise ConflictError(
            f"attempt {attempt} of {run.url} is superseded by attempt {history.highest_attempt} and does not prune",
            hint="the newer process does",
        )
    decided = _decide(run, history, rule, all_lineages=all_lineages, approve=approve)
    finished = _finish_interrupted(run, history)
    deleted: list[Verdict] = []
    spared: list[Verdict] = []
    for verdict in decided.delete:
        stem = verdict.manifest.stem
        with locks.exclusive(run.uuid, stem, "read") as free:
            # Tags are read again each time: one that was set a moment ago must hold.
            why = (
                [f"tag:{tag}" for tag, tagged in run.tags().items() if tagged == stem]
                if free
                else ["in use by a reader"]
            )
            if why:
                spared.append(replace(verdict, reasons=tuple(why)))
                continue
            tick(verdict)
            drive(protocol.prune(stem, closed_at=utc_stamp()), StoreDriver(run))
            run.remove_empty_folders(stem)
            deleted.append(verdict)
    return Pruned(plan=decided, deleted=tuple(deleted), spared=tuple(spared), finished=finished)


def would_delete(run: RunDirectory, rule: RetentionRule, manifest: Manifest, *, attempt: int) -> bool:
    """Whether `prune` would delete `manifest`, were it committed now, and leave all others as they are left without it; deletes nothing.

    False as well where that prune would not run, and where anything of `manifest` is in the store: what was begun there is to be ended.

    Args:
        manifest: not committed yet, under the name that it would get.
        attempt: as for `prune`.

    Raises:
        CkptmgrError: as `prune`, for it cannot be said then.
    """
    refuse_tier(run)
    history, stem = run.history(), manifest.stem
    if stem in history.manifests or stem in history.broken or stem in history.closed:
        return False
    coming = replace(history, manifests={**history.manifests, stem: manifest})
    if (coming.highest_attempt or 0) > attempt or coming.newest() == stem:
        return False
    gone = _stems(_decide(run, coming, rule, unsent=(stem,)).delete)
    # Some rules would choose otherwise among the others if it were there.
    if stem not in gone or gone != _stems(_decide(run, history, rule).delete) | {stem}:
        return False
    with locks.exclusive(run.uuid, stem, "read") as free:
        return free and not run.keys(data_prefix(stem))


def _decide(
    run: RunDirectory,
    history: History,
    rule: RetentionRule,
    *,
    all_lineages: bool = False,
    approve: Callable[[RetentionPlan], None] = lambda plan: None,
    unsent: Collection[Stem] = (),
) -> RetentionPlan:
    """What `prune` goes by: the plan, and if anything goes, again with what is damaged and the certain time. See `prune` and `find_damaged`."""
    decided = plan_prune(history, rule, all_lineages=all_lineages)
    approve(decided)
    if not decided.delete:
        return decided
    _refuse_if_newest_is_damaged(run, history)
    damaged = find_damaged(run, history, rule, unsent=unsent)
    return plan_prune(history, rule, all_lineages=all_lineages, damaged=damaged, now=certain_now(run, rule))


def _stems(verdicts: Iterable[Verdict]) -> set[Stem]:
    return {verdict.manifest.stem for verdict in verdicts}


def certain_now(run: RunDirectory, rule: RetentionRule) -> datetime:
    """The store's time or this machine's, whichever is earlier: a clock that is ahead must not make checkpoints old.

    The store is asked, by a probe that is written and removed, only where `rule` goes by age.

    Raises:
        BackendError: it could not be asked, or refuses.
    """
    now = utc_now()
    if run.fs.capabilities.is_local or not is_by_age(rule):
        return now
    path = run.path(f"{ATTEMPTS}/{PROBE_PREFIX}{new_nonce()}")
    run.fs.pipe_file(path, b"time")
    try:
        told_s = run.fs.info(path).get("mtime")
    finally:
        run.fs.rm_file(path)
    return now if told_s is None else min(now, datetime.fromtimestamp(told_s, timezone.utc))


def _refuse_uncertain(history: History) -> None:
    for key, error in history.unreadable.items():
        raise ManifestError(
            f"{error.message}, so that it is not certain what must stay",
            hint="nothing was deleted; bring the file back from a copy, or remove it if it stands for nothing",
            key=key,
        ) from error


def _refuse_if_newest_is_damaged(run: RunDirectory, history: History) -> None:
    newest = history.newest()
    if newest is None:
        return
    why = str(history.broken[newest]) if newest in history.broken else _damage_now(run, history.manifests[newest])
    if not why:
        return
    raise IntegrityError(
        f"the newest checkpoint of {run.url}, {newest}, is damaged ({why}), so older ones are not deleted",
        hint="see `ckptmgr verify`; nothing was changed",
        stem=newest,
    )


def _damage_now(run: RunDirectory, manifest: Manifest) -> str:
    """What is wrong with a checkpoint by the store's own word; empty if nothing is."""
    try:
        run.manifest(manifest.stem)  # this machine may have it from an earlier look
    except ManifestError as exc:
        return str(exc)
    damage = damage_of(run, manifest) or noted_damage(run, manifest)
    return f"{damage[0].file} {damage[0].why}" if damage else ""


def _finish_interrupted(run: RunDirectory, history: History) -> tuple[Stem, ...]:
    """Complete removals that were killed after their manifest was closed, and tidy closing records that have served their time."""
    finished = []
    edge = utc_now() - timedelta(seconds=protocol.CLOSING_KEPT_S)
    loose = run.loose_data([*history.manifests, *history.broken])
    # A folder without a file is the last that a removal on a disk takes away; elsewhere it is the store's own affair.
    is_local = run.fs.capabilities.is_local
    with_data = {data.stem for data in loose if data.stem is not None and (is_local or data.state != "bare")}
    for stem, record in sorted(history.closed.items()):
        if stem in with_data:
            drive(protocol.prune(stem, closed_at=utc_stamp()), StoreDriver(run))
            run.remove_empty_folders(stem)
            finished.append(stem)
        elif _closed_before(record, edge):
            run.fs.rm_file(run.path(manifest_key(stem)))
    return tuple(finished)


def _closed_before(record: ClosingRecord, edge: datetime) -> bool:
    try:
        closed = datetime.fromisoformat((record.closed_at or "").replace("Z", "+00:00"))
    except ValueError:
        return False
    return closed.tzinfo is not None and closed < edge


def prune_local(tier: LocalTier, rule: RetentionRule) -> tuple[Stem, ...]:
    """Free the local tier of uploaded checkpoints that `rule` does not keep; returns those removed.

    What is not confirmed in the store stays, whatever the rule says (I6), and so does one that somebody reads.
    """
    history = tier.run.history()
    uploaded = tier.uploaded()
    kept = {stem for stem, _ in rule.select(history.readable_chain(), utc_now())}
    removed = []
    for stem in sorted(uploaded & history.manifests.keys()):
        if stem in kept or stem == history.newest():
            continue
        with locks.exclusive(tier.run.uuid, stem, "read") as free:
            if free:
                tier.remove(stem)
                removed.append(stem)
    return tuple(removed)
