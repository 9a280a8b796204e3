"""Where the time of a training goes: at every moment one phase is under way, and a mark ends it and begins the next. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

#: In the order in which a step has them; `compute` is forward and backward, where nothing tells them apart.
PHASES = ("data", "forward", "backward", "compute", "optimizer", "callbacks", "evaluation", "save")
# Of one step, without what happens between some steps: what a device's own times can tell.
_IN_STEP = ("data", "forward", "backward", "compute", "optimizer")


class Spans:
    """Seconds by phase, as the host's clock has them; at sampled steps also as the device's own clock has them.

    A device works behind the host's back: what the host waits for is not what takes the time. Between marks on the device, put into its queue with
    the work, its time is told right, and time that it waits for the host, for data above all, is in the span in which it waits. Nothing here waits for
    a device: marks are read when it has come past them.

    Args:
        clock: seconds from any origin.
        device_mark: puts a mark into the device's queue: an event with `query()`, and `elapsed_time(later)` in milliseconds; None without a device.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        device_mark: Callable[[], Any] | None = None,
    ) -> None:
        self._clock = clock
        self._device_mark = device_mark
        self._phase: str | None = None
        self._since = 0.0
        self._marks: list[tuple[str, float, Any]] = []
        self._waiting: list[tuple[str, float, Any, Any]] = []
        self._is_sampled = False
        self._host: dict[str, float] = {}
        self._device: dict[str, float] = {}
        # Of the last window that had a sampled step: they stand for a window without.
        self._halves: dict[str, float] = {}
        self._device_shares: dict[str, float] = {}

    def sample(self, wanted: bool) -> None:
        """Have the device's times taken from now on, or no more: then the running span is not one of them."""
        if self._is_sampled and not wanted and self._marks:
            self._waiting += [
                (phase, aside_s, mark, later)
                for (phase, _, mark), (_, aside_s, later) in zip(self._marks, self._marks[1:], strict=False)
            ]
        self._marks = []
        self._is_sampled = wanted and self._device_mark is not None
        self._mark(0.0)

    def enter(self, phase: str | None, *, aside: Mapping[str, float] | None = None) -> None:
        """End the running phase, and begin `phase`; None: nothing is under way.

        Args:
            aside: seconds of the running phase that belong to others, by phase: they are taken out of it.
        """
        now = self._clock()
        aside_s = 0.0
        if self._phase is not None:
            spent = now - self._since
            for other, seconds in (aside or {}).items():
                if (theirs := min(max(seconds, 0.0), spent - aside_s)) > 0:
                    self._add(self._host, other, theirs)
                    aside_s += theirs
            self._add(self._host, self._phase, spent - aside_s)
        self._phase, self._since = phase, now
        self._mark(aside_s)

    def take(self) -> dict[str, float]:
        """Seconds by phase, in the order of `PHASES`, from the last time up to the last mark; their sum is the host's time."""
        self._read_device()
        found = dict(self._host)
        self._halves = _halves(self._host) or self._halves
        _share_out(self._device, "compute", _halves(self._device))
        self._device_shares = self._device or self._device_shares
        _share_out(found, "compute", self._halves)
        if self._device_shares:
            found["step"] = sum(found.pop(name, 0.0) for name in _IN_STEP)
            _share_out(found, "step", self._device_shares)
        # Marks that the device has not come past yet count in the next window.
        self._host, self._device = {}, {}
        return {name: found[name] for name in PHASES if found.get(name, 0.0) > 0}

    def _mark(self, aside_s: float) -> None:
        if self._is_sampled and self._device_mark is not None and self._phase is not None:
            self._marks.append((self._phase, aside_s, self._device_mark()))

    def _read_device(self) -> None:
        left = []
        for entry in self._waiting:
            phase, aside_s, mark, later = entry
            if phase not in _IN_STEP:
                continue
            if later.query():
                self._add(self._device, phase, max(0.0, mark.elapsed_time(later) / 1000 - aside_s))
            else:
                left.append(entry)
        self._waiting = left

    @staticmethod
    def _add(seconds: dict[str, float], phase: str, spent: float) -> None:
        seconds[phase] = seconds.get(phase, 0.0) + spent


def _halves(seconds: Mapping[str, float]) -> dict[str, float]:
    return {name: seconds[name] for name in ("forward", "backward") if seconds.get(name)}


def _share_out(seconds: dict[str, float], name: str, shares: Mapping[str, float]) -> None:
    """Give what `name` has to those in `shares`, in their proportion; it stays where it is if they have none."""
    whole = sum(shares.values())
    if not whole or name not in seconds:
        return
    spent = seconds.pop(name)
    for phase, share in shares.items():
        seconds[phase] = seconds.get(phase, 0.0) + spent * share / whole
