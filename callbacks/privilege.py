"""Debug mode: which callback changes the state of the training, which is the trainer's to change."""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
from typing import Any

_log = logging.getLogger(__name__)

DEBUG_ENV = "CKPTMGR_DEBUG_CALLBACKS"


def is_asked_for() -> bool:
    """Whether CKPTMGR_DEBUG_CALLBACKS asks for debug mode."""
    return os.environ.get(DEBUG_ENV, "").strip().lower() not in ("", "0", "false", "no")


class Watch:
    """Compares the state before and after a hook; slow, and for debugging only.

    Says each attribute of each callback once. A callback may declare what it has leave to change: `changes_state = frozenset({"best_metric"})`.
    """

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()

    def before(self, state: Any) -> dict[str, Any]:
        """A copy of the attributes of `state`."""
        return {name: _copied(value) for name, value in _attributes(state).items()}

    def after(self, name: str, callback: Any, event: str, state: Any, before: dict[str, Any]) -> None:
        """Report what the hook of `callback`, called `name`, has changed."""
        allowed: frozenset[str] = getattr(callback, "changes_state", frozenset())
        now = _attributes(state)
        for attribute in sorted({*before, *now} - set(allowed)):
            if _same(before.get(attribute), now.get(attribute)) or (name, attribute) in self._said:
                continue
            self._said.add((name, attribute))
            _log.warning(
                "callback %s changed state.%s in %s at step %s, from %s to %s: the state is the trainer's; decide through control",
                name,
                attribute,
                event,
                now.get("global_step", "?"),
                _short(before.get(attribute)),
                _short(now.get(attribute)),
            )


def _attributes(state: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(state):
        return {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    return dict(vars(state)) if hasattr(state, "__dict__") else {}


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - an attribute of a host that cannot be copied is compared by identity
        return value


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    try:
        return bool(one == other) or repr(one) == repr(other)  # NaN is not equal to itself
    except Exception:  # noqa: BLE001 - tensors compare to tensors
        return repr(one) == repr(other)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
