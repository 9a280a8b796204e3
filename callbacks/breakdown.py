"""What a profile says: seconds by phase, rates, memory, the bottleneck, as a line for a log and as values for a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckptmgr.callbacks.spans import PHASES
from ckptmgr.core.units import duration_text, size_text

#: What to do about each phase that takes most.
ADVICE = {
    "data": "more workers in the DataLoader, or less work per sample",
    "forward": "mixed precision, torch.compile, or larger batches",
    "backward": "mixed precision, torch.compile, or larger batches; recomputed activations are part of it",
    "compute": "mixed precision, torch.compile, or larger batches",
    "optimizer": "fused=True or foreach=True, or fewer and larger steps",
    "callbacks": "run the slow one less often, or with run_async",
    "evaluation": "evaluate less often, or on fewer samples",
    "save": "save less often",
}


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
