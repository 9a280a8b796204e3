"""What happens when a callback fails: it is said, counted, and, when it does nothing but fail, left out."""

from __future__ import annotations

import logging
from typing import Any

from ckptmgr.core.errors import CkptmgrError

_log = logging.getLogger(__name__)

# These let go of what a callback holds: a disabled one gets them all the same.
_ENDS = frozenset({"on_train_end", "on_exception"})


class Failures:
    """The failures of one callback. Used by one thread at a time.

    Args:
        name: what the callback is called in the log.
        most_in_a_row: calls of one event that may fail one after the other; the callback is disabled with the last of them. None: any number.

    Attributes:
        count: calls that failed.
        is_disabled: whether it is left out of all events but the ends.
    """

    __slots__ = ("_in_a_row", "_most", "count", "is_disabled", "name")

    def __init__(self, name: str, most_in_a_row: int | None) -> None:
        self.name = name
        self.count = 0
        self.is_disabled = False
        self._most = most_in_a_row
        self._in_a_row: dict[str, int] = {}

    def allows(self, event: str) -> bool:
        """Whether the hook of `event` is to be called."""
        return not self.is_disabled or event in _ENDS

    def succeeded(self, event: str) -> None:
        """A call came back: those that failed before it are no row any more."""
        if self._in_a_row:
            self._in_a_row.pop(event, None)

    def failed(self, event: str, state: Any, error: Exception) -> None:
        """A call raised `error`: log it, with the step, and disable the callback if that is too many in a row."""
        self.count += 1
        in_a_row = self._in_a_row[event] = self._in_a_row.get(event, 0) + 1
        step = getattr(state, "global_step", None)
        # All are counted; one that fails at every step must not fill the log: the first three, then 4, 8, 16, …
        if self.count <= 3 or self.count & (self.count - 1) == 0:
            # Our own errors say what to do, in one line; of any other one the place matters.
            ours = isinstance(error, CkptmgrError)
            _log.error(
                "callback %s failed in %s%s (failure %d), training goes on: %s",
                self.name,
                event,
                "" if step is None else f" at step {step}",
                self.count,
                str(error) if ours else repr(error),
                exc_info=None if ours else error,
            )
        if self._most is not None and in_a_row >= self._most and not self.is_disabled:
            self.is_disabled = True
            _log.error(
                "callback %s is disabled from %s on: %s failed %d times in a row, the last time with %r",
                self.name,
                "now" if step is None else f"step {step}",
                event,
                in_a_row,
                error,
            )
