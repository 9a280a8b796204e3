"""Copy a committed checkpoint from a local directory to a run directory: uploading, `drain` and `push` are this one operation."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptmgr.core import protocol
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.operations import Record
from ckptmgr.core.protocol import Committed, Dropped
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.identity import new_nonce, utc_stamp, wall_s
from ckptmgr.run.journal import Journal, UploadEntry

logger = logging.getLogger(__name__)


def replicate(
    manifest: Manifest,
    source: Path,
    target: RunDirectory,
    journal: Journal,
    entry: UploadEntry,
    *,
    moved: Callable[[int], None] | None = None,
    now_s: Callable[[], float] = wall_s,
) -> Committed | Dropped:
    """Make `manifest`'s checkpoint durable in `target`; returns when it is committed there and that is recorded in the journal.

    A repeat after a failure, a kill or a lost answer sends no object that was confirmed, and none that the store vouches for. The caller holds the
    upload lock of this save.

    Args:
        manifest: what to commit, under its local stem.
        source: directory of its files.
        entry: how far earlier tries came.
        moved: called with the number of bytes of each block sent.

    Raises:
        CkptmgrError: it is not committed, as far as is known; the journal keeps what was confirmed, and the state `failed` with the reason.
    """
    resumed = entry.tries > 0
    stale = entry.began_at_s is not None and protocol.is_stale(entry.began_at_s, now_s())
    if stale:
        logger.info("%s: its upload began long ago; unless it was committed it goes on under a new name", entry.stem)
    entry = replace(
        entry, state="uploading", tries=entry.tries + 1, began_at_s=entry.began_at_s or now_s(), target=target.url
    )
    journal.write(entry)

    def record(event: Record) -> None:
        nonlocal entry
        entry = entry.after(event)
        if event.event == "renamed":
            entry = replace(entry, began_at_s=now_s())
        journal.write(entry)

    perform = StoreDriver(target, source=source, record=record, moved=moved)
    steps = protocol.replicate(
        manifest.renamed(entry.remote),
        new_nonce=new_nonce,
        confirmed=entry.confirmed,
        resumed=resumed,
        stale_at=utc_stamp() if stale else None,
    )
    try:
        target.refuse_replaced()
        return drive(steps, perform)
    except CkptmgrError as exc:
        journal.write(replace(entry, state="failed", error=str(exc)))
        raise
