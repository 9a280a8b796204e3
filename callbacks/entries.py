"""One callback in a `CallbackManager`: its hooks, how they fare, and its part of the saved state."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptmgr.callbacks.background import Background
from ckptmgr.callbacks.base import Priority, name_of, number_of
from ckptmgr.callbacks.hooks import CallHook, caller, find_hook
from ckptmgr.callbacks.isolation import Failures
from ckptmgr.callbacks.timings import Timing
from ckptmgr.core.errors import IncompatibleStateError

_log = logging.getLogger(__name__)

# Once per training, where nothing waits: begin looks at the store and end drains uploads, both take as long as they take.
_UNHURRIED = {"on_init_end", "on_train_begin", "on_train_end", "on_exception"}

# Where a callback that is in several managers, one after the other, has what it knew before the first.
_FIRST_STATE = "_ckptmgr_first_state"


@dataclass(slots=True)
class Hook:
    """One hook of one callback, and how long it takes."""

    call: CallHook
    timing: Timing = field(default_factory=Timing)
    warned_at: float = float("-inf")

    def say_slow(self, name: str, event: str, spent_s: float, now_s: float) -> None:
        """Warn that a call has taken `spent_s`; at most once a minute."""
        if event in _UNHURRIED or now_s - self.warned_at < 60.0:
            return
        self.warned_at = now_s
        _log.warning(
            "callback %s took %.2f s in %s, training waited (%d calls so far, %.2f s in all)",
            name,
            spent_s,
            event,
            self.timing.calls,
            self.timing.total_s,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One callback and what is known about it. Compared by identity: two equal callbacks are two.

    Attributes:
        callback: as it was added.
        target: what has the hooks: the callback, or what runs it beside the training.
        first_state: what its `state_dict` said before any training; None if it has none.
        is_used: it has seen a training, and what it knows is of that.
        is_present: not removed: a running event skips what a hook before it has removed.
        hooks: by event, as they are found; None where there is nothing to call.
    """

    callback: Any
    target: Any
    priority: int
    name: str
    failures: Failures
    first_state: Any = None
    is_used: bool = False
    is_present: bool = True
    hooks: dict[str, Hook | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls, callback: Any, *, name: str | None, priority: int | str | None, run_async: bool, most_failures: int | None
    ) -> Entry:
        """See `CallbackManager.add`.

        Raises:
            ConfigError: there is no such priority, or `callback` is critical, and cannot run beside the training.
        """
        first_state, is_used = _first_state_of(callback)
        failures = Failures(name or name_of(callback), most_failures)
        return cls(
            callback=callback,
            target=Background(callback, failures) if run_async else callback,
            priority=number_of(getattr(callback, "priority", Priority.NORMAL) if priority is None else priority),
            name=failures.name,
            failures=failures,
            first_state=first_state,
            is_used=is_used,
        )

    def find(self, event: str) -> Hook | None:
        """The hook for `event`, found for the first time."""
        hook = find_hook(self.target, event)
        found = self.hooks[event] = None if hook is None else Hook(caller(hook))
        return found

    def is_meant_by(self, wanted: Any) -> bool:
        """Whether the callback is `wanted`, or of this class."""
        return isinstance(self.callback, wanted) if isinstance(wanted, type) else self.callback is wanted

    def is_critical(self, event: str) -> bool:
        """Whether what the hook of `event` raises ends the training."""
        critical = getattr(self.callback, "critical", False)
        return event in critical if isinstance(critical, (set, frozenset)) else bool(critical)

    def state(self) -> Mapping[str, Any]:
        """The callback's state; empty if it has none, or fails to say, which is logged and counted."""
        if not hasattr(self.callback, "state_dict"):
            return {}
        try:
            state: Mapping[str, Any] = self.target.state_dict()
        except Exception as error:  # noqa: BLE001 - one broken callback must not cost the whole checkpoint
            self.failures.failed("state_dict", None, error)
            return {}
        self.failures.succeeded("state_dict")
        return state

    def load(self, key: str, state: Mapping[str, Any]) -> None:
        """Give the callback its state, which is saved as `key`.

        Raises:
            IncompatibleStateError: it refused.
        """
        try:
            self.target.load_state_dict(state)
        except Exception as error:
            raise IncompatibleStateError(
                f"callback {key} refused its saved state: {error!r}",
                hint="resume with the version of the callback that saved it, or without it",
                piece=key,
            ) from error

    def begin(self, *, from_scratch: bool) -> None:
        """A training begins. What is known of an earlier one is forgotten: times, and if it begins from scratch, the callback's state."""
        if self.is_used:
            self.hooks.clear()
            if from_scratch:
                self.reset()
        self.is_used = True

    def reset(self) -> None:
        """Give the callback the state that it had before any training. If it refuses, that is logged and counted."""
        if self.first_state is None:
            return
        try:
            self.target.load_state_dict(copy.deepcopy(self.first_state))
        except Exception as error:  # noqa: BLE001 - one broken callback must not end the training
            self.failures.failed("load_state_dict", None, error)


def _first_state_of(callback: Any) -> tuple[Any, bool]:
    """What a callback has before any training, None if it has no state, or none yet; and whether it was in a manager before."""
    own = getattr(callback, "__dict__", {})
    if _FIRST_STATE in own:
        return own[_FIRST_STATE], True
    if not (hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict")):
        return None, False
    try:
        own[_FIRST_STATE] = copy.deepcopy(callback.state_dict()) or None
    except Exception:  # noqa: BLE001 - it may have one when a training has begun; then a failure is said
        return None, False
    return own[_FIRST_STATE], False


def by_name(entries: Iterable[Entry]) -> dict[str, Entry]:
    """By name; the second of a name is `name#2`."""
    seen: Counter[str] = Counter()
    named = {}
    for entry in entries:
        seen[entry.name] += 1
        named[entry.name if seen[entry.name] == 1 else f"{entry.name}#{seen[entry.name]}"] = entry
    return named
