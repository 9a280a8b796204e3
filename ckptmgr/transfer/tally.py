"""Counts what the replication loop reports: the same numbers in the trainer, in the transfer process, and in what either leaves on disk."""

from __future__ import annotations

import threading
from dataclasses import replace

from ckptmgr.run.identity import utc_now
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.messages import Committed, Event, Failed, Moved
from ckptmgr.transfer.status import Durable, UploadStatus, lag_of, newest_durable


class Tally:
    """The sum of all events so far. Safe from any thread.

    Attributes:
        durable: the newest save that was seen to be committed.
    """

    def __init__(self) -> None:
        self.durable: Durable | None = None
        self._lock = threading.Lock()
        self._moved = Moved(stem=None)
        self._committed = self._failures = self._retries = self._dropped = 0
        self._last_error = ""

    def note(self, event: Event) -> None:
        """Take one event into account."""
        with self._lock:
            if isinstance(event, Moved):
                self._moved = event
            elif isinstance(event, Committed):
                self._committed += 1
                self._retries += event.retries
                committed = Durable(stem=event.stem, created_at=event.created_at)
                self.durable = max(self.durable or committed, committed, key=lambda durable: durable.stem)
            elif isinstance(event, Failed):
                self._failures += event.stem is not None
                self._last_error = str(event.error)

    def dropped(self, count: int) -> None:
        """So many saves gave way to newer ones without having been in the store."""
        with self._lock:
            self._dropped += count

    def progress(self, host: str) -> UploadStatus:
        """The numbers, without a look at the queue."""
        with self._lock:
            return UploadStatus(
                uploading=self._moved.stem,
                sent_bytes=self._moved.sent_bytes,
                total_bytes=self._moved.total_bytes,
                rate_bytes_s=self._moved.rate_bytes_s,
                eta_s=self._moved.eta_s,
                committed=self._committed,
                failures=self._failures,
                dropped=self._dropped,
                retries=self._retries,
                last_error=self._last_error,
                host=host,
            )

    def status(self, tier: LocalTier, target: str, host: str) -> UploadStatus:
        """The numbers, and the queue: reads `tier`."""
        pending = [manifest for manifest, _ in tier.pending(target)]
        uploaded = tier.uploaded()
        durable = newest_durable(
            (manifest for stem, manifest in tier.run.history().manifests.items() if stem in uploaded), self.durable
        )
        return replace(
            self.progress(host),
            pending=tuple(manifest.stem for manifest in pending),
            pending_bytes=sum(manifest.size_bytes for manifest in pending),
            lag=lag_of(pending, durable, utc_now()),
        )
