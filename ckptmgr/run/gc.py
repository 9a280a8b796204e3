"""Gc: remove what was never committed and what removals have left behind. `ckptmgr.run.litter` finds it, this module makes sure and deletes.

Data without a manifest is claimed before it is deleted: a create-only record in the manifest's place, which its writer, were it still alive, would meet
at its commit, and go on under a new name. So being wrong about an age costs a repeated upload, never a checkpoint.

Where the store does not decide create-only writes, such a claim may cross a commit that is on its way. There a first pass only marks what it
would remove, and a later one removes what has not changed for a day. The marks lie in the run, `.gc/<stem>.json`, and not on this machine: gc runs in
containers and by turns on several hosts, and the time of a mark must be the store's.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptmgr.backends.base import Backend
from ckptmgr.core import protocol
from ckptmgr.core.errors import ConfigError, ManifestError, ObjectExistsError
from ckptmgr.core.layout import ATTEMPTS, GC_MARKS, PROBE_PREFIX, Stem, data_key, manifest_key, mark_key, parse_stem
from ckptmgr.core.manifest import FORMAT, VERSION, canonical_json, decode_record
from ckptmgr.core.protocol import GC_GRACE_S
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.identity import new_nonce, utc_stamp, wall_s
from ckptmgr.run.journal import Journal
from ckptmgr.run.litter import Findings, Litter, leftovers, look
from ckptmgr.run.prune import refuse_tier

logger = logging.getLogger(__name__)

#: From the mark to the removal, where the store does not decide create-only writes.
MARKED_S = 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPlan:
    """What one gc removes.

    Attributes:
        collect: what goes now, in this order.
        marked: old enough, but on this store it goes only when it has lain unchanged for a day after a first pass marked it.
        young: what may still be under way.
        busy: old enough by its times, yet in use on this machine just now; with that reason.
        unseen: why uploads in parts could not be looked for; "" if they could.
    """

    collect: tuple[Litter, ...]
    marked: tuple[Litter, ...] = ()
    young: tuple[Litter, ...] = ()
    busy: tuple[tuple[Litter, str], ...] = ()
    unseen: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What one gc did.

    Attributes:
        removed: in order.
        spared: what the plan calls busy, and what was in use on this machine, or committed after all, when its turn came; with the reason.
    """

    plan: GcPlan
    removed: tuple[Litter, ...]
    spared: tuple[tuple[Litter, str], ...]


def plan_gc(
    run: RunDirectory,
    *,
    grace_s: float = GC_GRACE_S,
    journals: Sequence[Journal] = (),
    now_s: float | None = None,
) -> GcPlan:
    """What would be removed, by this machine's clock unless the store's is given; changes nothing.

    Args:
        grace_s: data, uploads and leftovers without a sign of life for so long count as abandoned.
        journals: of this machine's uploads: what they are going to take up again stays.
        now_s: the store's time.

    Raises:
        ConfigError: it is a local tier, or the grace is too short for this store.
        BackendError: could not look (I7).
    """
    refuse_tier(run)
    _refuse_haste(run, grace_s)
    now = wall_s() if now_s is None else now_s
    found = look(run, now_s=now, grace_s=grace_s, known=_taken_up(run, journals, grace_s))
    uploads = locks.held_here(run.uuid, "upload")
    reasons = [_held_here(run, litter, uploads) for litter in found.old]
    busy = tuple((litter, why) for litter, why in zip(found.old, reasons, strict=True) if why)
    found = replace(found, old=tuple(litter for litter, why in zip(found.old, reasons, strict=True) if not why))
    plan = _plan(found, found.old) if run.record.create_only else _passed(run, found, now)
    return replace(plan, busy=busy)


def gc(
    run: RunDirectory,
    *,
    grace_s: float = GC_GRACE_S,
    journals: Sequence[Journal] = (),
    now_s: float | None = None,
    approve: Callable[[GcPlan], None] = lambda plan: None,
    tick: Callable[[Litter], None] = lambda litter: None,
) -> Collected:
    """Remove what `plan_gc` names, judged by the store's own clock and by what the store does with a create-only write today.

    A kill at any moment leaves nothing that looks like a checkpoint; the next gc goes on from there. What is uploaded or read on this machine stays.

    Args:
        now_s: the store's time, if it is known better than by asking.
        approve: called with the plan before anything is removed; what it raises ends the gc.
        tick: called before each removal.

    Raises:
        ConfigError: it is a local tier, or the grace is too short for this store; nothing was removed.
        BackendError: the store could not be asked, or refuses; removals done so far are done.
    """
    run, told_s = asked(run)
    plan = plan_gc(run, grace_s=grace_s, journals=journals, now_s=told_s if now_s is None else now_s)
    approve(plan)
    if not run.record.create_only:
        _mark(run, plan)
    removed: list[Litter] = []
    spared = list(plan.busy)
    for litter in plan.collect:
        with _alone(run, litter) as busy:
            if not busy:
                tick(litter)
                busy = _remove(run, litter)
        if busy:
            spared.append((litter, busy))
        else:
            removed.append(litter)
    return Collected(plan=plan, removed=tuple(removed), spared=tuple(spared))


def asked(run: RunDirectory) -> tuple[RunDirectory, float | None]:
    """`run` as its store behaves today, and the store's time, None if it tells none: with both, `plan_gc` names what `gc` would remove.

    Writes a probe into the run, and removes it.

    Raises:
        ConfigError: it is a local tier.
        BackendError: the store could not be asked, or refuses.
    """
    refuse_tier(run)
    told_s, create_only = _probe(run)
    if run.record.create_only and not create_only:
        logger.warning(
            "%s no longer decides create-only writes, as it did when the run was made: removals take two passes",
            run.url,
        )
        run = replace(run, record=replace(run.record, create_only=False))
    return run, told_s


def collect_leftovers(fs: Backend, root: str, *, grace_s: float = GC_GRACE_S, remove: bool) -> list[Litter]:
    """What a killed doctor has left in a store, beside its runs; and with `remove`, remove it.

    Its age is by this machine's clock: nothing depends on it.
    """
    found = [one for one in leftovers(fs, root, wall_s()) if one.age_s is not None and one.age_s >= grace_s]
    for litter in found if remove else ():
        fs.rm(litter.path, recursive=True)
    return found


def _plan(found: Findings, collect: tuple[Litter, ...], marked: tuple[Litter, ...] = ()) -> GcPlan:
    return GcPlan(collect=collect, marked=marked, young=found.young, unseen=found.unseen)


def _refuse_haste(run: RunDirectory, grace_s: float) -> None:
    """Without create-only writes, all that keeps gc and a slow writer apart is that both keep to the same times."""
    if not run.record.create_only and grace_s < GC_GRACE_S:
        raise ConfigError(
            f"{run.url} lies on a store that does not decide create-only writes, so gc waits for at least 7 d there",
            hint="give --grace 7d or more",
        )


def _taken_up(run: RunDirectory, journals: Sequence[Journal], grace_s: float) -> list[tuple[str, str]]:
    """(path, id) of the uploads in parts that a journal is going to go on with. One that began longer ago goes on under a new name."""
    now = wall_s()
    return [
        (run.path(data_key(entry.remote, path)), upload_id)
        for journal in journals
        for entry in journal.entries()
        if entry.is_pending and entry.began_at_s is not None and now - entry.began_at_s < grace_s
        for path, upload_id in entry.multiparts.items()
    ]


def _probe(run: RunDirectory) -> tuple[float | None, bool]:
    """The store's time, None if it tells none, and whether it refuses a second create-only write.

    Asked each time: the clock of this machine may be wrong, and a bucket whose versioning was switched on since may ignore the condition.
    """
    path = run.path(f"{ATTEMPTS}/{PROBE_PREFIX}{new_nonce()}")
    # Refused: a retry met our own first try. The second write decides.
    with contextlib.suppress(ObjectExistsError):
        run.fs.pipe_file(path, b"first", mode="create")
    try:
        told = run.fs.info(path).get("mtime")
        try:
            run.fs.pipe_file(path, b"second", mode="create")
        except ObjectExistsError:
            return told, run.fs.capabilities.create_only
        return told, False
    finally:
        run.fs.rm_file(path)


# --- one removal --------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _alone(run: RunDirectory, litter: Litter) -> Iterator[str]:
    """Hold the save that `litter` belongs to against everybody on this machine; yields why that cannot be, or ""."""
    stem = litter.stem
    if stem is None:
        yield ""
        return
    if why := _held_here(run, litter, locks.held_here(run.uuid, "upload")):
        yield why
        return
    with locks.exclusive(run.uuid, stem, "upload") as unsent, locks.exclusive(run.uuid, stem, "read") as unread:
        yield "" if unsent and unread else "it is in use on this machine"


def _held_here(run: RunDirectory, litter: Litter, uploads: Sequence[str]) -> str:
    """Why `litter` stays for now, or "". A look only: whoever removes it must hold it.

    Args:
        uploads: the saves that this machine is uploading.
    """
    stem = litter.stem
    if stem is None:
        return ""
    if any(_is_same_save(stem, name) for name in uploads):
        return "it is being uploaded by this machine"
    return "it is in use on this machine" if locks.is_held(run.uuid, stem, "read") else ""


def _is_same_save(stem: Stem, name: str) -> bool:
    """An upload goes on under a new nonce when its name was taken, and holds the lock of the first one."""
    other = parse_stem(name)
    return other is not None and (other.attempt, other.position) == (stem.attempt, stem.position)


def _remove(run: RunDirectory, litter: Litter) -> str:
    """Remove one thing; returns why it stays, or ""."""
    if litter.kind in ("uncommitted", "closed"):
        assert litter.stem is not None
        if not _collect(run, litter.stem):
            return "it was committed meanwhile"
        run.fs.rm_files([run.path(key) for key in litter.parts])
        for key in litter.parts:
            run.fs.rmdir(run.path(key).rpartition("/")[0])
        run.remove_empty_folders(litter.stem)
        if not run.record.create_only:
            run.fs.rm_file(run.path(mark_key(litter.stem)))
    elif litter.kind == "upload":
        run.fs.abort_upload(litter.path, litter.upload_id)
    elif litter.kind == "folder":
        assert litter.stem is not None
        run.remove_empty_folders(litter.stem)
    elif litter.kind == "record":
        assert litter.stem is not None
        run.fs.rm_file(run.path(manifest_key(litter.stem)))
    else:
        run.fs.rm(litter.path, recursive=litter.kind == "probe")
    return ""


def _collect(run: RunDirectory, stem: Stem) -> bool:
    """Claim the name and delete the data, whoever closed it; False if it is committed after all."""
    return drive(protocol.collect(stem, closed_at=utc_stamp()), StoreDriver(run))


# --- two passes -----------------------------------------------------------------------------------------------------------------


def _passed(run: RunDirectory, found: Findings, now_s: float) -> GcPlan:
    """The plan where the store does not decide create-only writes: of uncommitted data, only what has not changed since it was marked."""
    marks = run.records(GC_MARKS)
    ready, waiting = [], []
    for litter in found.old:
        if litter.kind != "uncommitted" or _marked_s(run, litter, marks, now_s) >= MARKED_S:
            ready.append(litter)
        else:
            waiting.append(litter)
    return _plan(found, tuple(ready), tuple(waiting))


def _marked_s(run: RunDirectory, litter: Litter, marks: dict[str, dict[str, Any]], now_s: float) -> float:
    """How long ago `litter` was marked as it is now, by the store's clock; below zero if it was not."""
    assert litter.stem is not None
    record = marks.get(mark_key(litter.stem))
    if record is None or record.get("mtime") is None or _mark_of(run, litter.stem) != litter.fingerprint:
        return -1.0
    return float(now_s - record["mtime"])


def _mark_of(run: RunDirectory, stem: Stem) -> str | None:
    key = mark_key(stem)
    data = run.read(key)
    try:
        return None if data is None else str(decode_record(data, where=key).get("fingerprint"))
    except ManifestError:
        return None


def _mark(run: RunDirectory, plan: GcPlan) -> None:
    """Mark what has to wait, and take marks away from what needs none (any more)."""
    marks = run.records(GC_MARKS)
    wanted = {mark_key(litter.stem): litter for litter in plan.marked if litter.stem is not None}
    ready = {mark_key(litter.stem) for litter in plan.collect if litter.stem is not None}
    run.fs.rm_files([run.path(key) for key in marks if key not in wanted and key not in ready])
    for key, litter in wanted.items():
        assert litter.stem is not None
        if key in marks and _mark_of(run, litter.stem) == litter.fingerprint:
            continue  # written again it would be younger
        document = {"format": FORMAT, "version": VERSION, "id": str(litter.stem), "fingerprint": litter.fingerprint}
        run.fs.pipe_file(run.path(key), canonical_json(document))
