"""Retention, in the store and on this disk: after each commit, and before an upload that it would undo. Done by whoever hosts the replication loop."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.retention import RetentionRule
from ckptmgr.run import prune
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.start import is_superseded
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What stays: `store` after each commit (None: everything), `local` of what is uploaded."""

    store: RetentionRule | None
    local: RetentionRule


class Tidying:
    """Called after each commit of `attempt`, and asked before it sends anything. Not thread-safe.

    Attributes:
        superseded: a newer attempt has been claimed (I12), as far as the last commit saw: this one prunes nothing any more.
    """

    def __init__(self, run: RunDirectory, tier: LocalTier, *, attempt: int, retention: Retention) -> None:
        self.superseded = False
        self._run = run
        self._tier = tier
        self._attempt = attempt
        self._retention = retention

    def __call__(self, stem: Stem) -> None:
        """Retention after `stem` was committed.

        Raises:
            CkptmgrError: something could not be looked at or removed; the next commit tries again.
        """
        if not self.superseded and is_superseded(self._run, self._attempt):
            self.superseded = True
            logger.warning(
                "attempt %d is superseded by a newer one: it commits what it has and prunes nothing", self._attempt
            )
        if self._retention.store is not None and not self.superseded:
            done = prune.prune(self._run, self._retention.store, attempt=self._attempt)
            for verdict in done.deleted:
                logger.info("pruned step %d (%s)", verdict.manifest.step, verdict.manifest.id)
        prune.prune_local(self._tier, self._retention.local)

    def unwanted(self, manifest: Manifest) -> str:
        """Why `manifest`, under its name in the store, need not be sent: retention would remove it right after its commit; empty if it must be.

        Never raises, and tries no request twice: what cannot be looked at is sent.
        """
        rule = self._retention.store
        if rule is None or self.superseded:
            return ""
        try:
            # A store that is down is the upload's business, with all its patience.
            run = replace(self._run, fs=self._run.fs.unretried)
            is_unwanted = prune.would_delete(run, rule, manifest, attempt=self._attempt)
        except Exception as exc:  # noqa: BLE001 - a rule of the user's, or a bug, must hold no upload back
            logger.info("step %d is sent, for whether it would stay cannot be said: %s", manifest.step, exc)
            return ""
        return f"keep={rule} would remove it at once" if is_unwanted else ""
