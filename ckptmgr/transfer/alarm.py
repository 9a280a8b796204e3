"""The failure budget: when it has to be said that nothing becomes durable any more, or training has to stop for it.

A single failed upload is logged where it happens and tried again. What no single line says is that this has gone on for so long that the run is on its
own disk alone: that is said here, with the facts, and again only after a while.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.core.units import duration_text

_REPEAT_S = 3600.0

Action = Literal["warn", "stop"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureBudget:
    """How much may fail before it is more than a line in the log.

    Attributes:
        failures: uploads that may fail one after the other; None for any number.
        without_durable_s: seconds that a save may wait without any becoming durable; None for ever.
        action: what then: `warn` and train on, or `stop` training in an orderly way.
    """

    failures: int | None = 10
    without_durable_s: float | None = 3600.0
    action: Action = "warn"

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ConfigError(f"action={self.action!r} is not known", hint="use 'warn' or 'stop'", argument="action")
        for name in ("failures", "without_durable_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not value > 0):
                raise ConfigError(
                    f"{name}={value!r} would be used up at once",
                    hint="give a positive number, or None",
                    argument=name,
                )


class Alarm:
    """Watches over a budget. Safe from any thread; knows what it is told, asks nobody, and never blocks.

    Args:
        clock: seconds that never go back.
    """

    def __init__(self, budget: FailureBudget, clock: Callable[[], float] = time.monotonic) -> None:
        self._budget = budget
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0  # since the last commit
        self._last_error = ""
        self._waiting_since: float | None = None  # the first save since the last commit
        self._newest: Stem | None = None
        self._durable: Stem | None = None
        self._said_at: float | None = None

    def saved(self, stem: Stem | None = None) -> None:
        """A save is on this disk, and not in the store; nothing, if `stem` was committed before this could be said."""
        with self._lock:
            if stem is not None and self._durable is not None and stem <= self._durable:
                return
            self._newest = stem
            if self._waiting_since is None:
                self._waiting_since = self._clock()

    def failed(self, n: int = 1, *, error: str = "") -> None:
        """`n` more uploads have failed, the last one by `error`."""
        with self._lock:
            self._failures += n
            self._last_error = error or self._last_error

    def committed(self, stem: Stem | None = None) -> None:
        """A save is durable: the budget is whole again. If it is not the newest one, for that the time counts from now."""
        with self._lock:
            self._failures = 0
            self._last_error = ""
            self._said_at = None
            behind = stem is not None and self._newest is not None and stem < self._newest
            self._waiting_since = self._clock() if behind else None
            if stem is not None and (self._durable is None or stem > self._durable):
                self._durable = stem

    @property
    def exceeded(self) -> str | None:
        """The facts, for as long as the budget is used up; else None."""
        with self._lock:
            return self._facts(self._clock())

    def check(self) -> str | None:
        """The facts, when they have to be said: as soon as the budget is used up, and again each time that `without_durable_s` (or an hour) has
        passed. Call it as often as you like."""
        with self._lock:
            now = self._clock()
            facts = self._facts(now)
            if facts is None:
                return None
            repeat_s = self._budget.without_durable_s or _REPEAT_S
            if self._said_at is not None and now - self._said_at < repeat_s:
                return None
            self._said_at = now
            return facts

    def _facts(self, now: float) -> str | None:
        budget, waited = self._budget, None if self._waiting_since is None else now - self._waiting_since
        often = budget.failures is not None and self._failures >= budget.failures
        long = budget.without_durable_s is not None and waited is not None and waited >= budget.without_durable_s
        if not often and not long:
            return None
        parts = []
        if self._failures:
            parts.append(
                f"{self._failures} uploads in a row have failed" if self._failures > 1 else "an upload has failed"
            )
        if waited is not None:
            parts.append(f"for {duration_text(waited)} nothing that was saved has become durable")
        told = f": {self._last_error}" if self._last_error else ""
        return f"{' and '.join(parts)}{told}"
