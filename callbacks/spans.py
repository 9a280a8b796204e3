"""Where the time of a training goes: at every moment one phase is under way, and a mark ends it and begins the next. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckptmgr.core.units import duration_text, size_text

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

    def enter(self, phase: str | None, *, aside_s: float = 0.0, aside: str = "callbacks") -> None:
        """End the running phase, and begin `phase`; None: nothing is under way.

        Args:
            aside_s: seconds of the running phase that belong to another, `aside`: they are taken out of it.
        """
        now = self._clock()
        if self._phase is None:
            aside_s = 0.0
        else:
            spent = now - self._since
            aside_s = min(max(aside_s, 0.0), spent)
            self._add(self._host, self._phase, spent - aside_s)
            if aside_s:
                self._add(self._host, aside, aside_s)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where the time of some steps went.

    Attributes:
        first_step: the first of them.
        last_step: the last one.
        steps: how many were measured.
        seconds: by phase (`PHASES`), of this rank; phases that took no time are left out.
        samples: how many the steps of this rank had; None if nobody said.
        tokens: as `samples`; padding counts.
        world_size: how many ranks trained beside each other.
        host_bytes: memory of this process at the end; None where the system does not say.
        device_bytes: the most that was allocated on its device; None without one.
    """

    first_step: int
    last_step: int
    steps: int
    seconds: Mapping[str, float]
    samples: int | None = None
    tokens: int | None = None
    world_size: int = 1
    host_bytes: int | None = None
    device_bytes: int | None = None

    @property
    def wall_s(self) -> float:
        """Seconds that the steps took, with all that was between them."""
        return sum(self.seconds.values())

    @property
    def shares(self) -> dict[str, float]:
        """The part of each phase, from 0 to 1, the largest first."""
        ordered = sorted(self.seconds, key=lambda name: -self.seconds[name])
        return {name: self.seconds[name] / self.wall_s for name in ordered} if self.wall_s else {}

    @property
    def bottleneck(self) -> str:
        """The phase that took most; of equal ones the first in a step; "" if nothing was measured."""
        return next(iter(self.shares), "")

    @property
    def samples_per_s(self) -> float | None:
        """Of all ranks, which are taken to have as many as this one."""
        return self._rate(self.samples)

    @property
    def tokens_per_s(self) -> float | None:
        """As `samples_per_s`."""
        return self._rate(self.tokens)

    def with_more(self, later: Breakdown) -> Breakdown:
        """This one and one of later steps together."""

        def added(mine: int | None, more: int | None) -> int | None:
            return None if mine is None and more is None else (mine or 0) + (more or 0)

        return Breakdown(
            first_step=self.first_step,
            last_step=later.last_step,
            steps=self.steps + later.steps,
            seconds={
                name: self.seconds.get(name, 0.0) + later.seconds.get(name, 0.0)
                for name in PHASES
                if name in self.seconds or name in later.seconds
            },
            samples=added(self.samples, later.samples),
            tokens=added(self.tokens, later.tokens),
            world_size=later.world_size,
            host_bytes=later.host_bytes,
            device_bytes=later.device_bytes,
        )

    def _rate(self, count: int | None) -> float | None:
        return count * self.world_size / self.wall_s if count and self.wall_s else None

    def as_json(self) -> dict[str, Any]:
        """What is known, for a file."""
        known = {
            "step": self.last_step,
            "first_step": self.first_step,
            "steps": self.steps,
            "wall_s": self.wall_s,
            "bottleneck": self.bottleneck,
            "samples_per_s": self.samples_per_s,
            "tokens_per_s": self.tokens_per_s,
            "host_bytes": self.host_bytes,
            "device_bytes": self.device_bytes,
        }
        times = {f"{name}_s": seconds for name, seconds in self.seconds.items()}
        return {**{name: value for name, value in known.items() if value is not None}, **times}

    def __str__(self) -> str:
        """One line, for a log."""
        parts = [f"{name} {100 * share:.0f} %" for name, share in self.shares.items() if share >= 0.005]
        step_s = self.wall_s / self.steps if self.steps else 0.0
        told = [f"{_seconds_text(step_s)} a step: {', '.join(parts) or 'nothing measured'}"]
        rates = (("samples", self.samples_per_s), ("tokens", self.tokens_per_s))
        told += [f"{rate:,.0f} {what}/s" if rate >= 10 else f"{rate:.2f} {what}/s" for what, rate in rates if rate]
        if self.host_bytes is not None:
            told.append(f"{size_text(self.host_bytes)} of memory")
        if self.device_bytes is not None:
            told.append(f"at most {size_text(self.device_bytes)} on the device")
        return f"steps {self.first_step} to {self.last_step}: {'; '.join(told)}"


def _seconds_text(seconds: float) -> str:
    return (
        f"{seconds * 1000:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 100 else duration_text(seconds)
    )
