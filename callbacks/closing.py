"""The end of a manager in a training: how long it is waited for, what is left, and what the process ends with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ckptmgr.callbacks.seams import CloseReport, SavingManager
from ckptmgr.callbacks.stopping import Stopping

_log = logging.getLogger(__name__)


class Closing:
    """Closes the manager of a training that ends.

    Args:
        stopping: whether, and in what time, this machine goes.
        timeout_s: how long uploads are waited for; None: as the manager is configured.
    """

    def __init__(self, manager: SavingManager, stopping: Stopping, timeout_s: float | None) -> None:
        self._manager = manager
        self._stopping = stopping
        self._timeout_s = timeout_s
        self._report: CloseReport | None = None

    def close(self) -> Sequence[Exception]:
        """Wait for the uploads and stop; what is left is named. Returns what went wrong meanwhile, logged already."""
        self._report = report = self._manager.close(timeout_s=self._timeout_s, left_s=self._stopping.remaining_s)
        if report.pending:
            _log.warning(
                "training ended with %d checkpoint(s) not in the store yet: %s - they stay in the local tier; run `ckptmgr drain`",
                len(report.pending),
                ", ".join(report.pending),
            )
        return report.errors

    def exit_code(self) -> int:
        """What a training that is complete should end with, for what could not be uploaded in time."""
        report = self._report
        if report is None or not report.exit_code:
            return 0
        if report.pending and self._stopping.reason is not None:
            return self._stopping.exit_code
        return report.exit_code if self._manager.strict else 0
