"""Time that only waiting moves, for retriers of several threads."""

from __future__ import annotations

import threading

from ckptmgr.backends.pace import Pace
from ckptmgr.backends.retry import Retrier, RetryPolicy


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
