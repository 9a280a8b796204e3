"""Drain: replicate what is pending in a local tier to the store, newest first. The loop that the uploader thread, `resume -- COMMAND`
and (later) a process of its own all host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.protocol import Committed
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.replicate import replicate
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """What one drain did; `pending` is what is still only on this disk, and `errors` why."""

    committed: tuple[Stem, ...] = ()
    pending: tuple[Stem, ...] = ()
    errors: dict[Stem, CkptmgrError] = field(default_factory=dict)


def upload_one(
    tier: LocalTier,
    run: RunDirectory,
    manifest: Manifest,
    entry: UploadEntry,
    *,
    moved: Callable[[int], None] | None = None,
) -> bool:
    """Replicate one pending save, unless another process of this machine is doing that.

    Returns:
        Whether it is settled: committed, or pruned in the store meanwhile. False: another process has it in hand.

    Raises:
        CkptmgrError: it failed; the journal says why, and the save stays pending.
    """
    with locks.exclusive(run.uuid, entry.stem, "upload") as free:
        if not free:
            return False
        # Read again under the lock: the process that held it a moment ago may have finished.
        entry = tier.journal.read(entry.stem) or entry
        if not entry.is_pending:
            return True
        logger.info("step %d uploading: %s, %d bytes", manifest.step, manifest.id, manifest.size_bytes)
        outcome = replicate(manifest, tier.data_dir(manifest.stem), run, tier.journal, entry, moved=moved)
    if isinstance(outcome, Committed):
        logger.info("step %d committed as %s", manifest.step, outcome.stem)
    else:
        logger.warning(
            "step %d (%s) was pruned in %s before its upload ended; dropped", manifest.step, outcome.stem, run.url
        )
    return True


def drain(tier: LocalTier, run: RunDirectory) -> Drained:
    """Upload everything pending in `tier` for `run`, newest first; a failure of one does not stop the others."""
    committed: list[Stem] = []
    pending: list[Stem] = []
    errors: dict[Stem, CkptmgrError] = {}
    for manifest, entry in tier.pending(run.url):
        try:
            settled = upload_one(tier, run, manifest, entry)
        except CkptmgrError as exc:
            logger.error("step %d (%s) is not uploaded: %s", manifest.step, manifest.id, exc)
            errors[manifest.stem] = exc
            settled = False
        (committed if settled else pending).append(manifest.stem)
    return Drained(committed=tuple(committed), pending=tuple(pending), errors=errors)
