"""Finding the hook of a callback for an event, and calling it with the arguments it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from ckptmgr.callbacks.base import ARGUMENTS, Callback

CallHook = Callable[[Mapping[str, Any]], Any]


def find_hook(callback: Any, event: str) -> Callable[..., Any] | None:
    """The bound hook for `event`, None if it would do nothing."""
    names = ("on_evaluate", "on_evaluate_end") if event in ("on_evaluate", "on_evaluate_end") else (event,)
    for name in names:
        hook = getattr(callback, name, None)
        # The no-ops of the base class are most of all hooks: not calling them keeps an event cheap.
        if callable(hook) and not (isinstance(callback, Callback) and _is_no_op(hook, name)):
            return hook  # type: ignore[no-any-return]
    return None


def caller(hook: Callable[..., Any]) -> CallHook:
    """A function that hands `hook` what it takes of an event's arguments; made once per hook, called at every event.

    What a hook requires of `ARGUMENTS` and the host does not have is None. Anything else that is missing is a misspelt name, and the call raises
    Python's TypeError.
    """
    function = getattr(hook, "__func__", None)
    signature = _signature_of(hook, False) if function is None else _signature_of(function, True)
    positional_only, required, names, takes_all = signature
    may_lack = required & ARGUMENTS

    def call(arguments: Mapping[str, Any]) -> Any:
        if takes_all:
            if not positional_only and may_lack <= arguments.keys():
                return hook(**arguments)
            given = dict(arguments)
        else:
            given = {name: value for name, value in arguments.items() if name in names}
        for name in may_lack - given.keys():
            given[name] = None
        return hook(*[given.pop(name) for name in positional_only if name in given], **given)

    return call


def _is_no_op(hook: Any, name: str) -> bool:
    function = getattr(hook, "__func__", hook)
    return function is getattr(Callback, name, None) or function is Callback._ignore


@lru_cache(maxsize=1024)
def _signature_of(function: Any, bound: bool) -> tuple[tuple[str, ...], frozenset[str], frozenset[str], bool]:
    """What a hook takes: names by position only, names that it must get, all names, and whether it takes any other."""
    parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return (
        tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY),
        frozenset(p.name for p in named if p.default is p.empty),
        frozenset(p.name for p in named),
        any(p.kind is p.VAR_KEYWORD for p in parameters),
    )
