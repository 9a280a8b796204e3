"""How long callbacks take: counted per callback and event, told as a table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ckptmgr.core.units import duration_text


@dataclass(slots=True, kw_only=True)
class Timing:
    """How long one callback took in one event: number of calls, their sum and the longest, in seconds."""

    calls: int = 0
    total_s: float = 0.0
    max_s: float = 0.0

    def add(self, spent_s: float) -> None:
        """Count one more call."""
        self.calls += 1
        self.total_s += spent_s
        self.max_s = max(self.max_s, spent_s)


def summary(
    timings: Mapping[str, Mapping[str, Timing]], failures: Mapping[str, int], whole_s: float | None = None
) -> list[str]:
    """Lines of a table: one per callback, the most expensive first; with its share of `whole_s` seconds of training, if that is given.

    A callback's own name may be of any length; columns are as wide as they must be.
    """
    rows = [("callback", "calls", "total", "longest", "of training", "failures")]
    totals = {name: sum(timing.total_s for timing in events.values()) for name, events in timings.items()}
    for name in sorted(totals, key=lambda each: (-totals[each], each)):
        events = timings[name]
        if not events:
            continue
        slowest = max(events, key=lambda event: events[event].max_s)
        rows.append(
            (
                name,
                str(sum(timing.calls for timing in events.values())),
                _seconds(totals[name]),
                f"{_seconds(events[slowest].max_s)} in {slowest}",
                f"{100 * totals[name] / whole_s:.1f} %" if whole_s else "",
                str(failures.get(name, 0) or ""),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.1f} ms"
    return f"{value:.1f} s" if value < 60 else duration_text(value)
