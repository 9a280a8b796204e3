"""The upload of one save: from the local tier to the store, under its lock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from ckptmgr.core.errors import CkptmgrError, UploadError
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.protocol import Committed
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.replicate import abort_multiparts, replicate
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)

#: How many saves may be refused before the others are not tried: wrong credentials or a missing bucket concern every upload, an unreadable
#: file only its own.
REFUSALS = 2

Outcome = Literal["committed", "dropped", "done", "busy"]


def upload_one(
    tier: LocalTier,
    run: RunDirectory,
    manifest: Manifest,
    entry: UploadEntry,
    *,
    moved: Callable[[int], None] | None = None,
    unwanted: Callable[[Manifest], str] = lambda manifest: "",
) -> Outcome:
    """Replicate one pending save, unless another process of this machine is doing that.

    Args:
        unwanted: why a save, under its name in the store, need not be sent; empty if it must be. Not asked once a part of it was sent.

    Returns:
        `committed` by this call; `dropped`: pruned in the store meanwhile, or unwanted; `done`: another process settled it just now; `busy`: another
        process has it in hand, and may yet fail.

    Raises:
        CkptmgrError: it failed; the journal says why, and the save stays pending.
    """
    with locks.exclusive(run.uuid, entry.stem, "upload") as free:
        if not free:
            return "busy"
        # Read again under the lock: the process that held it a moment ago may have finished, and have removed the local copy since.
        known = tier.journal.read(entry.stem)
        if not (tier.holds(entry.stem) if known is None else known.is_pending):
            return "done"
        entry = known or entry
        why = "" if entry.multiparts else unwanted(manifest.renamed(entry.remote))
        if why:
            tier.journal.write(replace(entry, state="dropped", target=run.url, error=f"not sent: {why}"))
            logger.info("step %d is not sent: %s", manifest.step, why)
            return "dropped"
        logger.info("step %d uploading: %s, %d bytes", manifest.step, manifest.id, manifest.size_bytes)
        try:
            last = tier.last_uploaded(run.url)
            earlier = () if last is None else (last,)
            source = tier.data_dir(manifest.stem)
            outcome = replicate(manifest, source, run, tier.journal, entry, earlier=earlier, moved=moved)
        except CkptmgrError:
            raise
        except Exception as exc:  # a bug, ours or a backend's, must stop neither the other uploads nor the thread
            logger.exception("unexpected failure while uploading %s", manifest.id)
            error = UploadError(f"the upload of {manifest.id} failed unexpectedly: {exc!r}", hint="please report it")
            tier.journal.write(replace(tier.journal.read(entry.stem) or entry, state="failed", error=str(error)))
            raise error from exc
    if isinstance(outcome, Committed):
        logger.info("step %d committed as %s", manifest.step, outcome.stem)
        return "committed"
    logger.warning(
        "step %d (%s) was pruned in %s before its upload ended; dropped", manifest.step, outcome.stem, run.url
    )
    return "dropped"


def in_turn(
    pending: Iterable[tuple[Manifest, UploadEntry]],
) -> list[tuple[Manifest, UploadEntry]]:
    """Newest first, as given, but those that failed before after the others: they must not keep any other from going up."""
    return sorted(pending, key=lambda waiting: waiting[1].state == "failed")


def abort_given_up(tier: LocalTier, run: RunDirectory) -> None:
    """Throw away the parts in the store of saves that were given up after their upload had begun: whoever gave them up asks no store."""
    for entry in tier.evicted():
        if not entry.multiparts or entry.target not in ("", run.url):
            continue
        with locks.exclusive(run.uuid, entry.stem, "upload") as free:
            known = tier.journal.read(entry.stem) if free else None
            if known is not None and known.state == "evicted":
                abort_multiparts(known, run)
                tier.journal.write(replace(known, multiparts={}))
