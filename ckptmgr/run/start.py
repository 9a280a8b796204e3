"""How a process life of a run begins: look, refuse what would go wrong (I12), claim an attempt."""

from __future__ import annotations

from ckptmgr.core import claims
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.history import History
from ckptmgr.core.layout import ATTEMPTS, Stem, attempt_number
from ckptmgr.core.manifest import How
from ckptmgr.core.records import AttemptRecord
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.identity import host_name, new_nonce, new_uuid, utc_stamp


def claim_attempt(run: RunDirectory, *, how: How, parent: Stem | None) -> AttemptRecord:
    """Claim the next attempt number, against any other process doing the same.

    Args:
        how: `auto`, `explicit`, or `fresh` for a lineage of its own.
        parent: the checkpoint that was restored.

    Raises:
        BackendError: the store did not answer; a number may be used up, nothing else.
    """
    claim_id = new_uuid()

    def make(number: int, previous: int | None) -> AttemptRecord:
        return AttemptRecord(
            number=number,
            how=how,
            parent=parent,
            previous=previous,
            claim_id=claim_id,
            host=host_name(),
            created_at=utc_stamp(),
        )

    steps = claims.claim(make, create_only=run.record.create_only, new_nonce=new_nonce)
    claimed = drive(steps, StoreDriver(run))
    run.begun()
    return claimed


def refuse_unrestored(run: RunDirectory, history: History) -> None:
    """Refuse a start from scratch over a run that has commits (I12).

    Raises:
        ConflictError: it has some; nothing was changed.
    """
    if history.has_commits:
        newest = history.newest() or max([*history.manifests, *history.broken])
        raise ConflictError(
            f"{run.url} already has checkpoints, the newest at step {newest.step}, and this start restored none of them",
            hint="resume it (`ckptmgr resume`, or manager.restore), use another run name, or pass on_existing='new-lineage'",
            newest=str(newest),
        )


def is_superseded(run: RunDirectory, attempt: int) -> bool:
    """Whether a higher attempt was claimed: this one may still commit under its own number, but never prunes (I12)."""
    # Their names say it all: a claim that cannot be read is one nevertheless.
    numbers = (attempt_number(key) for key in run.keys(ATTEMPTS))
    return max((number for number in numbers if number is not None), default=0) > attempt


def joined_attempt(run: RunDirectory, history: History, *, new: bool) -> int:
    """The attempt that something from outside (`push`, `adopt`) joins: the highest, or a new one that goes on from the newest.

    Args:
        new: claim a further attempt even if there is one.
    """
    highest = history.highest_attempt
    if highest is not None and not new:
        return highest
    return claim_attempt(run, how="auto", parent=history.newest()).number
