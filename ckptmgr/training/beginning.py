"""How an attempt begins: what is looked at, refused, claimed, tidied and warned of before the first save."""

from __future__ import annotations

import logging
import threading

from ckptmgr.core.history import History
from ckptmgr.core.policies import SavePolicy
from ckptmgr.core.retention import RetentionRule, unkept_metrics
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.start import claim_attempt, refuse_unrestored
from ckptmgr.run.tier import LocalTier, next_seq
from ckptmgr.training.parent import Parent
from ckptmgr.training.session import Session, warn_of_shortage
from ckptmgr.training.settings import Settings

logger = logging.getLogger(__name__)


def begin_session(
    run: RunDirectory,
    tier: LocalTier,
    parent: Parent,
    *,
    settings: Settings,
    stop: threading.Event,
    expected_bytes: int | None = None,
) -> Session:
    """Look, refuse what would go wrong, claim an attempt, tidy the tier, and begin to drain it.

    Args:
        expected_bytes: about what one checkpoint will take, if that is known.

    Raises:
        ConflictError: the run has commits and nothing of it was restored, or the tier is in use or another run's; nothing was changed.
        BackendError: the store could not be asked (I7).
    """
    tier.hold()
    try:
        history = merged(*look(run, tier))
        if not parent.restored and history.has_commits:
            if not settings.new_lineage:
                refuse_unrestored(run, history)
            parent = Parent(how="fresh")
        _warn_of_going_back(run, history, parent)
        record = claim_attempt(run, how=parent.how, parent=parent.stem)
        tier.note_attempt(record)
        for name in tier.clean():
            logger.info("removed %s, which an earlier process left half written", name)
    except BaseException:
        tier.release()
        raise
    logger.info("attempt %d of %s begins (%s)", record.number, run.url, parent)
    warn_of_shortage(tier, max(expected_bytes or 0, _last_size(history)), settings.queue)
    seq = next_seq([*history.manifests, *history.broken, *history.closed], record.number)
    session = Session(run, tier, attempt=record.number, seq=seq, parent=parent, settings=settings, stop=stop)
    session.uploader.notify()
    return session


def lost_bests(save: SavePolicy | None, keep: RetentionRule | None) -> list[str]:
    """A best that is saved and not kept goes like any other checkpoint, and a training is over before somebody looks for it: what to say of each."""
    return [
        f"checkpoints are saved for their {metric}, and none is kept for it: the best goes like any other one - add KeepBest({metric!r}) to keep, "
        f"in ckptmgr.yaml `best: {metric}`"
        for metric in unkept_metrics(save, keep)
    ]


def _warn_of_going_back(run: RunDirectory, history: History, parent: Parent) -> None:
    """A path that was right when it was written down need not be so any more: it must not leave newer work behind in silence."""
    newest = history.newest()
    if parent.how == "auto" and parent.stem is not None and newest is not None and newest != parent.stem:
        logger.warning(
            "training goes on from %s, and the newest checkpoint of %s is %s: what was done after the former is done again",
            parent.stem,
            run.url,
            newest,
        )


def _last_size(history: History) -> int:
    newest = history.newest()
    manifest = None if newest is None else history.manifests.get(newest)
    return 0 if manifest is None else manifest.size_bytes
