"""One attempt that saves: what exists between `CheckpointManager.begin` and `close`."""

from __future__ import annotations

import logging
import platform
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckptmgr.core.errors import CheckpointNotFoundError
from ckptmgr.core.layout import Stem, parse_stem
from ckptmgr.core.manifest import FileEntry, How, Manifest
from ckptmgr.core.retention import RetentionRule
from ckptmgr.run import prune
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import host_name, new_nonce, utc_stamp
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.run.start import claim_attempt, is_superseded, refuse_unrestored
from ckptmgr.run.tier import LocalTier, next_seq
from ckptmgr.training import state as training_state
from ckptmgr.training.ranks import world_size
from ckptmgr.transfer.uploader import Uploader

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What this process restored, and so what its attempt descends from. `restored` is False for a start from scratch."""

    stem: Stem | None = None
    how: How = "auto"
    restored: bool = False

    def __str__(self) -> str:
        if self.how == "fresh":
            return "a new lineage"
        return "from scratch" if self.stem is None else f"from {self.stem}, {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays: `store` after each commit (None: everything), `local` of what is uploaded."""

    store: RetentionRule | None
    local: RetentionRule


def parent_of(directory: Path, run: RunDirectory, tier: LocalTier) -> Parent:
    """Which checkpoint of `run` the directory is that a trainer resumed from; one that is none of `run`'s does not count as restored."""
    stem = parse_stem(directory.name)
    if stem is not None and directory.parent == tier.data_dir(stem).parent:
        return Parent(stem=stem, restored=True)
    try:
        sidecar = read_sidecar(directory)
    except CheckpointNotFoundError:
        logger.warning("%s has no manifest beside it: it does not count as a checkpoint of %s", directory, run.url)
        return Parent()
    if sidecar.manifest.run_uuid != run.uuid:
        logger.warning("%s is checkpoint %s of another run", directory, sidecar.manifest.id)
        return Parent()
    return Parent(stem=sidecar.manifest.stem, how=sidecar.how, restored=True)


class Session:
    """A claimed attempt with its local tier and its uploader. Made by `begin_session`."""

    def __init__(
        self,
        run: RunDirectory,
        tier: LocalTier,
        *,
        attempt: int,
        seq: int,
        parent: Parent,
        retention: Retention,
        stop: threading.Event,
        exit_timeout_s: float,
    ) -> None:
        self.run = run
        self.tier = tier
        self.attempt = attempt
        self.superseded = False  # a newer attempt has been claimed (I12), as far as the last commit saw
        self.uploader = Uploader(tier, run, stop=stop, committed=self._after_commit, exit_timeout_s=exit_timeout_s)
        self._seq = seq
        self._parent = parent
        self._retention = retention

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        epoch: float | None,
        metrics: Mapping[str, float],
        reasons: Sequence[str],
        metric_modes: Mapping[str, str],
    ) -> str:
        """Commit `state` to the local tier and queue its upload; the id. A failure leaves nothing behind but the error."""
        snapshot = training_state.capture(state)
        stem = Stem(self.attempt, step, self._seq, new_nonce())
        self._seq += 1
        prepared = self.tier.prepare(stem)
        try:
            files = training_state.write(snapshot, prepared)
            manifest = Manifest(
                stem=stem,
                run_uuid=self.run.uuid,
                files=tuple(FileEntry.of(file.path, file.digests) for file in files),
                epoch=epoch,
                parent=None if self._parent.stem is None else str(self._parent.stem),
                created_at=utc_stamp(),
                reasons=tuple(reasons),
                metrics=dict(metrics),
                metric_modes=dict(metric_modes),
                world_size=world_size(),
                producer=_producer(),
            )
            self.tier.commit(manifest, prepared, target=self.run.url)
        except BaseException:
            self.tier.discard(prepared)
            raise
        # "queued", and no stronger word: it is durable in the store only when its manifest is there (K043).
        logger.info("step %d queued: %s (%s)", step, manifest.id, ", ".join(reasons))
        self.uploader.notify()
        return manifest.id

    def close(self, timeout_s: float | None) -> list[Stem]:
        """Upload what is pending, for `timeout_s` at most, and let go of the local tier; what is left, newest first."""
        pending = self.uploader.close(timeout_s)
        self.tier.release()
        return pending

    def _after_commit(self, stem: Stem) -> None:
        """Retention, in the uploader's thread, after `stem` was committed in the store."""
        if not self.superseded and is_superseded(self.run, self.attempt):
            self.superseded = True
            logger.warning(
                "attempt %d is superseded by a newer one: it commits what it has and prunes nothing", self.attempt
            )
        if self._retention.store is not None and not self.superseded:
            done = prune.prune(self.run, self._retention.store, attempt=self.attempt)
            for verdict in done.deleted:
                logger.info("pruned step %d (%s)", verdict.manifest.step, verdict.manifest.id)
        prune.prune_local(self.tier, self._retention.local)


def begin_session(
    run: RunDirectory,
    tier: LocalTier,
    parent: Parent,
    *,
    new_lineage: bool,
    retention: Retention,
    stop: threading.Event,
    exit_timeout_s: float,
) -> Session:
    """Look, refuse what would go wrong, claim an attempt, tidy the tier, and begin to drain it.

    Args:
        new_lineage: begin one of its own over existing commits instead of refusing (I12).
        exit_timeout_s: how long a program that ends without `close` waits for uploads.

    Raises:
        ConflictError: the run has commits and nothing of it was restored, or the tier is in use or another run's; nothing was changed.
        BackendError: the store could not be asked (I7).
    """
    tier.hold()
    try:
        history = merged(*look(run, tier))
        if not parent.restored and history.has_commits:
            if not new_lineage:
                refuse_unrestored(run, history)
            parent = Parent(how="fresh")
        record = claim_attempt(run, how=parent.how, parent=parent.stem)
        tier.note_attempt(record)
        for name in tier.clean():
            logger.info("removed %s, which an earlier process left half written", name)
    except BaseException:
        tier.release()
        raise
    logger.info("attempt %d of %s begins (%s)", record.number, run.url, parent)
    seq = next_seq([*history.manifests, *history.broken, *history.closed], record.number)
    session = Session(
        run,
        tier,
        attempt=record.number,
        seq=seq,
        parent=parent,
        retention=retention,
        stop=stop,
        exit_timeout_s=exit_timeout_s,
    )
    session.uploader.notify()
    return session


def _producer() -> dict[str, str]:
    from ckptmgr import __version__

    return {
        "framework": "ckptmgr",
        "ckptmgr": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "host": host_name(),
    }
