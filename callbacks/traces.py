"""A trace of torch.profiler over a few steps, once in a training. torch is imported when it begins."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from ckptmgr.training import ranks

_log = logging.getLogger(__name__)


class Trace:
    """Records `steps` steps from `first_step` on, or from the first one after a resume beyond it, and writes them as a Chrome trace.

    A failure is logged, ends the trace, and nothing else.

    Args:
        directory: for `trace-step<first>-rank<rank>.json.gz`, made when it is written; Perfetto and `chrome://tracing` read it.

    Attributes:
        path: the file, once it is written.
    """

    def __init__(self, directory: Path, first_step: int, steps: int) -> None:
        self.path: Path | None = None
        self._directory = directory
        self._first_step = first_step
        self._left = steps
        self._began_at = 0
        self._profile: Any = None

    def step_begins(self, step: int) -> None:
        """Begin, if it is time."""
        if self._profile is not None or self._left <= 0 or step < self._first_step:
            return
        try:
            from torch.profiler import profile

            # By default of all activities that this build of torch knows.
            self._profile = profile()
            self._profile.__enter__()
            self._began_at = step
        except Exception as error:  # noqa: BLE001 - a tool of others, and training goes on without it
            self._give_up(error)

    def step_ended(self) -> None:
        """Count a step; write the trace after the last one."""
        if self._profile is not None:
            self._left -= 1
            if self._left <= 0:
                self.close()

    def close(self) -> None:
        """Write what was recorded."""
        profile, self._profile = self._profile, None
        if profile is None:
            return
        self._left = 0
        try:
            profile.__exit__(None, None, None)
            self._directory.mkdir(parents=True, exist_ok=True)
            path = self._directory / f"trace-step{self._began_at}-rank{ranks.rank()}.json.gz"
            profile.export_chrome_trace(str(path))
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
        else:
            self.path = path
            _log.info("wrote the trace %s", path)

    def _give_up(self, error: Exception) -> None:
        self._profile, self._left = None, 0
        _log.warning("no trace: %s", error)
