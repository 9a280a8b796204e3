"""Threads that hold and wait for slots, and a clock that only sleeping moves: for tests of `ckptmgr.backends.pace`."""

from __future__ import annotations

import threading
import time

from ckptmgr.backends.pace import CONCURRENCY, Pace

DEADLINE_S = 60.0


class PaceClock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        """Let that time pass."""
        self.now += seconds

    def pace(self, concurrency: int = CONCURRENCY, max_bytes_s: float | None = None) -> Pace:
        """A pace in this time."""
        return Pace(concurrency, max_bytes_s, lambda: self.now, self.sleep)


class Crowd:
    """Threads that each hold one slot until they are let go; `inside` are the numbers of those that have one, in order."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.inside: list[int] = []
        self.changed = threading.Condition()
        self.leave: list[threading.Event] = []
        self.threads: list[threading.Thread] = []

    def add(self) -> None:
        """One more, behind those that wait already."""
        number, leave = len(self.threads), threading.Event()
        self.leave.append(leave)

        def hold() -> None:
            with self.pace.slot():
                with self.changed:
                    self.inside.append(number)
                    self.changed.notify_all()
                assert leave.wait(DEADLINE_S)

        self.threads.append(threading.Thread(target=hold, daemon=True))
        self.threads[-1].start()

    def wait_for(self, count: int) -> None:
        """Wait until so many have come in, in all."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.inside) >= count, DEADLINE_S), self.inside

    def wait_for_waiting(self, count: int) -> None:
        """Wait until so many stand in line."""
        pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
        while len(self.pace._waiting) != count:
            assert time.monotonic() < deadline
            pause.wait(0.001)

    def end(self) -> None:
        """Let everybody go."""
        for leave in self.leave:
            leave.set()
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
