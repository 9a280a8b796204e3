"""What every host of the replication loop leaves for others to see: the file that `ckptmgr status` reads, and records of uploads."""

from __future__ import annotations

import threading

from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.messages import Committed, Event, Failed, Moved
from ckptmgr.transfer.metrics import MetricsLog
from ckptmgr.transfer.status import TransferFile
from ckptmgr.transfer.tally import Tally


class HostFile:
    """Keeps `transfer.json` of a tier at what `tally` says. Safe from any thread; never fails.

    Args:
        target: URL of the run that is uploaded to.
        host: what moves the bytes: `process`, `thread` or `drain`.
    """

    def __init__(self, tier: LocalTier, target: str, host: str, tally: Tally) -> None:
        self._file = TransferFile(tier.root)
        self._target = target
        self._host = host
        self._tally = tally
        # Two threads must not write in the other order than they looked.
        self._writing = threading.Lock()

    def update(self, event: Event | None = None) -> None:
        """After `event` was counted. Progress is written once a second, what nobody would see again at once."""
        told_often = isinstance(event, Moved) and event.stem is not None
        with self._writing:
            progress = self._tally.progress(self._host)
            self._file.write(progress, target=self._target, durable=self._tally.durable, force=not told_often)

    def close(self) -> None:
        """The last word; from now on readers see a host that is gone."""
        self.update()
        self._file.close()


def record_upload(metrics: MetricsLog, event: Event) -> None:
    """Append a record of an upload that has ended, well or not; of other events, nothing."""
    if isinstance(event, Committed):
        metrics.record(
            "upload",
            id=str(event.stem),
            step=event.stem.step,
            size_bytes=event.size_bytes,
            sent_bytes=event.sent_bytes,
            seconds=event.seconds,
            retries=event.retries,
            lag_s=event.lag_s,
        )
    elif isinstance(event, Failed) and event.stem is not None:
        metrics.record("upload_failed", id=str(event.stem), step=event.stem.step, error=str(event.error))
