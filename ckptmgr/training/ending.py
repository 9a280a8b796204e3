"""How the `with` block of a manager ends: within what time, what is left, and what the program ends with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from ckptmgr.training.preemption import Preemption
from ckptmgr.training.report import CloseReport
from ckptmgr.transfer.ending import LeftS, no_limit

logger = logging.getLogger(__name__)


def leave(close: Callable[[LeftS], CloseReport], preemption: Preemption | None) -> tuple[CloseReport, int]:
    """Close a manager at the end of its block, in the time that a notice of preemption leaves, and watch for notices no longer.

    Args:
        close: closes it; given how many seconds are left, asked while it waits.

    Returns:
        What `close` returned, and what a preempted program is to end with: one that was before its end, or in it with something left; else 0.

    Raises:
        BaseException: what `close` raises; nothing is watched any more.
    """
    if preemption is None:
        return close(no_limit), 0
    preempted = preemption.notice is not None
    try:
        report = close(preemption.remaining_s)
        noticed = preemption.notice is not None
    finally:
        preemption.uninstall()
    return report, preemption.exit_code if preempted or (noticed and report.pending) else 0


def say_what_is_left(url: str, local_dir: Path, pending: Iterable[object]) -> None:
    """Name the checkpoints that are in the local tier only, if there are any."""
    left = ", ".join(map(str, pending))
    if left:
        logger.warning("not in %s yet: %s - run `ckptmgr drain %s`", url, left, local_dir)
