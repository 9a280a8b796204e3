"""Time for tests: one that only waiting moves, for retriers of several threads; and one that a busy machine does not move."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from ckptmgr.backends.pace import Pace
from ckptmgr.backends.retry import Retrier, RetryPolicy

_PRESSURE = Path("/proc/pressure")


class Waits:
    """A clock, and what was waited for by it. Safe from any thread.

    Attributes:
        asked: the waits, in seconds, in order; long ones may come in slices.
    """

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._now = 0.0
        self._lock = threading.Lock()

    def sleep(self, seconds: float) -> None:
        """Let that time pass, at once."""
        with self._lock:
            self.asked.append(seconds)
            self._now += seconds

    def clock(self) -> float:
        """Seconds since the beginning."""
        with self._lock:
            return self._now

    def retrier(self, policy: RetryPolicy, pace: Pace | None = None) -> Retrier:
        """A retrier in this time."""
        return Retrier(policy, pace=pace, sleep=self.sleep, clock=self.clock)


class Stopwatch:
    """Seconds since it was made, without those in which this machine had too few processors, disks or memory for all that wanted to go on.

    For limits in seconds that hold on a machine with nothing else to do: on a busy one nothing is that quick. At least a fifth of all time counts,
    so that what waits for ever is found out anywhere. Where the kernel does not tell (Linux without pressure stall information), all of it counts.
    """

    def __init__(self) -> None:
        self._began_s, self._stalled_s = time.monotonic(), _stalled_s()

    @property
    def seconds(self) -> float:
        """How long it has been."""
        passed_s = time.monotonic() - self._began_s
        return max(passed_s - (_stalled_s() - self._stalled_s), passed_s / 5)

    def end_of(self, process: subprocess.Popen[Any], limit_s: float) -> int:
        """The exit status of a process that ends before this shows `limit_s`.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        while True:
            try:
                return process.wait(0.05)
            except subprocess.TimeoutExpired:
                if self.seconds >= limit_s:
                    raise


def _stalled_s() -> float:
    """For how long, since the machine was started, something could have gone on and had to wait for a resource."""
    total_us = 0
    for resource in ("cpu", "io", "memory"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # some avg10=0.00 avg60=0.00 avg300=0.00 total=18280392236
            total_us += int((_PRESSURE / resource).read_text().splitlines()[0].rpartition("=")[2])
    return total_us / 1e6
