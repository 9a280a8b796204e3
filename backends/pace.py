"""The limits that all transfers of one process share: how many requests are under way at a time, and how many bytes move per second.

    pace = pace_for(options)
    with pace.slot(stop):            # one try of one data request; not the waits between tries
        for block in answer:
            pace.moved(len(block), stop)

A store that says SlowDown is given fewer requests, as TCP does it: half of them at once, then one more for each round that succeeds. Which errors mean that
is decided in `retry.py`, which calls `slowed`.

Requests of the control plane (listings, manifests, the ends of an upload) take no slot: a commit must not queue behind its own data.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/optimizing-performance-guidelines.html
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol

from ckptmgr.core.errors import BackendTimeoutError, ConfigError, TransientBackendError

#: Requests under way in one process, unless said otherwise.
CONCURRENCY = 16
# A burst of refusals is one message: the requests that were under way together are refused together.
_HALVE_AFTER_S = 1.0
# What may be sent at once after a pause, in seconds of the cap.
_BURST_S = 0.1
# How soon a wait notices an event that ends it.
_SLICE_S = 0.1
_MAX_BLOCK_BYTES = 1 << 20
_MIN_BLOCK_BYTES = 16 << 10
#: A request that moved less than this many bytes per second ...
TRICKLE_BYTES_S = 1024
#: ... for so long is cut, if it is alone or others were at least so many times as fast.
TRICKLE_S = 120.0
_TRICKLE_FACTOR = 10


class Limits(Protocol):
    """What of the options of a store `pace_for` looks at."""

    @property
    def concurrency(self) -> int:
        """Data requests under way at a time."""

    @property
    def max_bytes_s(self) -> float | None:
        """Bytes per second, both directions together; None for no limit."""


class Pace:
    """Hands out slots and time to whoever moves bytes. Safe from any thread; a forked child begins anew.

    Args:
        concurrency: data requests under way at a time, at most.
        max_bytes_s: bytes per second of all threads and both directions together; None for no limit.
        clock: seconds, monotonic (tests).
        sleep: replaces the wait for the bandwidth (tests).

    Raises:
        ConfigError: a limit below 1.
    """

    def __init__(
        self,
        concurrency: int = CONCURRENCY,
        max_bytes_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1, not {concurrency}")
        if max_bytes_s is not None and not max_bytes_s >= 1:
            raise ConfigError(f"the bandwidth must be at least 1 byte per second, not {max_bytes_s}")
        self.concurrency = concurrency
        self.max_bytes_s = max_bytes_s
        self._clock = clock
        self._sleep = sleep
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._turn = threading.Condition()
        self._waiting: deque[object] = deque()
        self._limit = self.concurrency
        self._used = self._most_used = self._successes = self._refusals = 0
        self._slowed_at: float | None = None
        self._was_known = False
        self._moved = 0
        self._free_at = self._clock()

    def _here(self) -> threading.Condition:
        # A child forked in the middle of a transfer has neither the threads that hold the slots nor, perhaps, a lock that is open.
        if self._pid != os.getpid():
            self._begin()
        return self._turn

    @property
    def limit(self) -> int:
        """Data requests that may be under way at present; `concurrency` unless the store asked for fewer."""
        return self._limit

    @property
    def used(self) -> int:
        """Data requests under way."""
        return self._used

    @property
    def block_bytes(self) -> int:
        """How much to move at a time, so that a cap makes a steady stream of it and no connection looks dead in between."""
        if self.max_bytes_s is None:
            return _MAX_BLOCK_BYTES
        return int(min(_MAX_BLOCK_BYTES, max(_MIN_BLOCK_BYTES, self.max_bytes_s * _BURST_S)))

    @contextlib.contextmanager
    def slot(self, *ends: threading.Event) -> Iterator[None]:
        """Wait for a turn, in the order of asking, and have one request under way. One that ends without an error is a success.

        Do not ask for a second one while holding one: with a limit of 1 it would never come.

        Args:
            ends: when one of these is set, the wait ends.

        Raises:
            TransientBackendError: the wait was ended.
        """
        refusals = self._acquire(ends)
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            # What was under way when the store asked for less says nothing of whether it has got over it.
            self._release(succeeded and refusals == self._refusals)

    def _acquire(self, ends: tuple[threading.Event, ...]) -> int:
        turn = self._here()
        with turn:
            ticket = object()
            self._waiting.append(ticket)
            try:
                while self._waiting[0] is not ticket or self._used >= self._limit:
                    if _is_over(ends):
                        raise TransientBackendError("given up while waiting for other requests to end")
                    turn.wait(_SLICE_S if ends else None)
                self._used += 1
                self._most_used = max(self._most_used, self._used)
                return self._refusals
            finally:
                self._waiting.remove(ticket)
                # Whoever is first now may go as well.
                if self._waiting:
                    turn.notify_all()

    def _release(self, succeeded: bool) -> None:
        turn = self._here()
        with turn:
            # In a child that was forked inside the slot, there is none to give back.
            self._used = max(0, self._used - 1)
            if succeeded and self._limit < self.concurrency:
                self._successes += 1
                if self._successes >= self._limit:
                    self._limit, self._successes, self._most_used = self._limit + 1, 0, self._used
            if self._waiting:
                turn.notify_all()

    def slowed(self) -> None:
        """The store asked for fewer requests: half as many as were under way, or as were allowed, from now on; at least one, once a second at most."""
        with self._here():
            now = self._clock()
            self._successes = 0
            self._refusals += 1
            is_new = self._slowed_at is None or now - self._slowed_at >= _HALVE_AFTER_S
            # Where a limit of 16 left 4 under way, 8 would change nothing. The first refusal may come when only one was.
            is_known = self._most_used > 1
            if is_new:
                self._slowed_at = now
            if is_new or (is_known and not self._was_known):
                under_way = min(self._limit, self._most_used) if is_known else self._limit
                self._limit, self._most_used, self._was_known = max(1, under_way // 2), self._used, is_known

    def moved(self, count: int, *ends: threading.Event) -> None:
        """Account for `count` bytes that were, or are about to be, sent or received; sleeps so that the cap holds.

        Args:
            ends: when one of these is set, the sleep ends.
        """
        with self._here():
            self._moved += count
            if self.max_bytes_s is None:
                return
            now = self._clock()
            self._free_at = max(self._free_at, now - _BURST_S) + count / self.max_bytes_s
            wait_s = self._free_at - now
        while wait_s > 0 and not _is_over(ends):
            slice_s = min(wait_s, _SLICE_S) if ends else wait_s
            self._sleep(slice_s)
            wait_s -= slice_s

    def watch(self, *ends: threading.Event) -> Watch:
        """Counts the bytes of one request, and cuts it when it trickles. Make one per try, inside the slot.

        Args:
            ends: as for `moved`.
        """
        return Watch(self, ends)


class Watch:
    """The bytes of one try. Use from one thread."""

    def __init__(self, pace: Pace, ends: tuple[threading.Event, ...]) -> None:
        self._pace = pace
        self._ends = ends
        self._restart(pace._clock())

    def _restart(self, now: float) -> None:
        self._since, self._own, self._all = now, 0, self._pace._moved

    def moved(self, count: int) -> None:
        """As `Pace.moved`.

        Raises:
            BackendTimeoutError: for two minutes this request got less than 1 KiB/s, and others that are under way, if any are, at least ten
                times as much each: it hangs on a bad connection, and a new one is likely to be better.
        """
        self._pace.moved(count, *self._ends)
        self._own += count
        now = self._pace._clock()
        took_s = now - self._since
        if took_s < TRICKLE_S:
            return
        pace, rate = self._pace, self._own / took_s
        least = (
            TRICKLE_BYTES_S
            if pace.max_bytes_s is None
            else min(TRICKLE_BYTES_S, pace.max_bytes_s / 4 / max(1, pace.used))
        )
        if rate < least:
            others = (pace._moved - self._all - self._own) / took_s / max(1, pace.used - 1)
            # Where all are as slow, a new connection would be no faster. One alone has nothing to lose.
            if pace.used <= 1 or others > _TRICKLE_FACTOR * max(1.0, rate):
                raise BackendTimeoutError(f"the connection trickles: {rate:.0f} bytes per second for {took_s:.0f} s")
        self._restart(now)


def _is_over(ends: tuple[threading.Event, ...]) -> bool:
    return any(end.is_set() for end in ends)


_paces: dict[tuple[int, float | None], Pace] = {}
_making = threading.Lock()


def pace_for(options: Limits) -> Pace:
    """The one of this process for these limits: backends opened with equal ones share them."""
    key = options.concurrency, options.max_bytes_s
    with _making:
        if key not in _paces:
            _paces[key] = Pace(*key)
        return _paces[key]
