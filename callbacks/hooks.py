"""Finding the hook of a callback for an event, and calling it with the arguments it takes."""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, wraps
from types import MethodType
from typing import Any

from ckptmgr.callbacks.base import ARGUMENTS, EVENTS, Callback, name_of
from ckptmgr.core.document import nearest
from ckptmgr.core.errors import ConfigError

_log = logging.getLogger(__name__)

_KNOWN = frozenset({*EVENTS, "on_evaluate_end"})

# What hosts hand over by position, if anything.
_POSITIONAL = ("args", "state", "control")
# Where `by_position` keeps the hook itself.
_OWN = "_ckptmgr_hook"

CallHook = Callable[[Mapping[str, Any]], Any]


def check_hooks(callback: Any) -> None:
    """Refuse what could never be called.

    Raises:
        ConfigError: `callback` has no hook at all, or one that is a coroutine, or is critical for what is no event.
    """
    names = _hooks_of(callback)
    if not names:
        raise ConfigError(f"{callback!r} has no on_… method", hint="derive from Callback, or name the hooks as it does")
    for name in names:
        if inspect.iscoroutinefunction(inspect.unwrap(getattr(callback, name))):
            raise ConfigError(
                f"{name_of(callback)}.{name} is `async def`, and nobody would await it",
                hint="make it a plain `def`; run_async runs a callback beside the training",
            )
    critical = getattr(callback, "critical", False)
    if isinstance(critical, (set, frozenset)):
        for name in sorted(critical - _KNOWN - set(names)):
            raise ConfigError(
                f"{name_of(callback)} is critical for {name!r}, which is no event",
                hint=nearest(str(name), _KNOWN),
                argument="critical",
            )


def name_misspelt(callback: Any) -> None:
    """Warn of hooks that look like a misspelt event."""
    for name in _hooks_of(callback):
        close = [] if name in _KNOWN else difflib.get_close_matches(name, _KNOWN, n=1, cutoff=0.85)
        if close and callable(getattr(callback, name)):
            _log.warning(
                "callback %s has a hook %s, which no host calls: did you mean %s?", name_of(callback), name, close[0]
            )


def _hooks_of(callback: Any) -> list[str]:
    return [name for name in dir(callback) if name.startswith("on_")]


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
    if (own := getattr(function, _OWN, None)) is not None:
        # Called by keyword, it needs no help.
        hook = MethodType(own, hook.__self__)  # type: ignore[attr-defined]
        function = own
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


def by_position(hook: Any) -> Any:
    """A method that is `hook` for whoever calls it by keyword, and takes `args`, `state` and `control` by position, whatever `hook` names of them.

    One that takes them so by itself stays as it is.
    """
    if hasattr(hook, _OWN):
        return hook
    parameters = list(inspect.signature(hook).parameters.values())[1:]
    kinds = [parameter.kind for parameter in parameters]
    first = [p.name for p in parameters[:3] if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more = inspect.Parameter.VAR_KEYWORD in kinds
    if inspect.Parameter.VAR_POSITIONAL in kinds or (first == list(_POSITIONAL) and takes_more):
        return hook

    @wraps(hook)
    def method(self: Any, *positional: Any, **arguments: Any) -> Any:
        arguments.update(zip(_POSITIONAL, positional, strict=False))
        return caller(MethodType(hook, self))(arguments)

    setattr(method, _OWN, hook)
    return method


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
