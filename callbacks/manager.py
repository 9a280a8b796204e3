"""Calls callbacks: in order, each shielded from the others, each timed."""

from __future__ import annotations

import inspect
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ckptmgr.callbacks.base import ARGUMENTS, EVENTS, Callback, Priority, name_of
from ckptmgr.core.errors import CkptmgrError, ConfigError, IncompatibleStateError

_log = logging.getLogger(__name__)

_FLAGS = (
    *("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"),
    "should_interrupt",
)
# Once per training, where nothing waits: begin looks at the store and end drains uploads, both take as long as they take.
_UNHURRIED = {"on_init_end", "on_train_begin", "on_train_end", "on_exception"}


@dataclass(slots=True, kw_only=True)
class Timing:
    """How long one callback took in one event: number of calls, their sum and the longest, in seconds."""

    calls: int = 0
    total_s: float = 0.0
    max_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Entry:
    """One callback and what is known about it. Compared by identity: two equal callbacks are two."""

    callback: Any
    priority: int
    name: str
    timings: dict[str, Timing] = field(default_factory=dict)
    warned_at: dict[str, float] = field(default_factory=dict)
    failures: int = 0


class CallbackManager(Callback):
    """Dispatches events to callbacks, and is itself one callback: hand it to a host as a whole.

    Callbacks are `Callback`s or any objects with `on_…` methods, such as Hugging Face's. Hooks are called by keyword; a hook without
    `**kwargs` gets the arguments it names. One that raises is logged with the event and the step and counted, and the others and the training
    go on, unless it is `critical`. Everything runs in the calling thread; not thread-safe.

    Args:
        callbacks: added in this order.
        slow_s: a call longer than this is warned about, at most once a minute per callback and event.
        clock: seconds from any origin, never backwards.

    Attributes:
        stopped_by: the callback that has set `should_training_stop`, if that is final (`Callback.stop_is_final`); None when nobody has, or when it was
            taken back. `state.stopped` is set to the same, where the host's state has it.
    """

    # What a critical callback of ours raised must get through a host's own manager too.
    critical = True

    def __init__(
        self, callbacks: Iterable[Any] = (), *, slow_s: float = 0.1, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.slow_s = slow_s
        self.stopped_by: str | None = None
        self._clock = clock
        self._entries: tuple[_Entry, ...] = ()
        for callback in callbacks:
            self.add(callback)

    @property
    def callbacks(self) -> tuple[Any, ...]:
        """The callbacks, in the order in which they run."""
        return tuple(entry.callback for entry in self._entries)

    @property
    def preemption(self) -> Any:
        """The `Preemption` of the first callback that has one, for a host that looks at more edges than callbacks see; None without."""
        found = (getattr(callback, "preemption", None) for callback in self.callbacks)
        return next((each for each in found if each is not None), None)

    @property
    def manager(self) -> Any:
        """The manager of checkpoints of the first callback that has one; None without."""
        found = (getattr(callback, "manager", None) for callback in self.callbacks)
        return next((each for each in found if each is not None), None)

    @property
    def failures(self) -> dict[str, int]:
        """How many calls of each callback raised; only those that have any."""
        return {key: entry.failures for key, entry in self._named().items() if entry.failures}

    @property
    def timings(self) -> dict[str, dict[str, Timing]]:
        """Times by callback and event; hooks that are no-ops are not called and not listed."""
        return {key: dict(entry.timings) for key, entry in self._named().items()}

    def add(self, callback: Any) -> None:
        """Add a callback, or an instance of a callback class. From inside a hook: it takes part from the next event on.

        Raises:
            ConfigError: `callback` has no `on_…` method, or is in already.
        """
        if isinstance(callback, type):
            callback = callback()
        if not any(name.startswith("on_") for name in dir(callback)):
            raise ConfigError(
                f"{callback!r} has no on_… method", hint="derive from Callback, or name the hooks as it does"
            )
        if any(entry.callback is callback for entry in self._entries):
            raise ConfigError(
                f"the callback {name_of(callback)} was added already", hint="make a second instance of it"
            )
        entry = _Entry(
            callback=callback, priority=int(getattr(callback, "priority", Priority.NORMAL)), name=name_of(callback)
        )
        # sorted is stable: equal priorities stay in the order they were added. A new tuple: a running dispatch keeps the old one.
        self._entries = tuple(sorted((*self._entries, entry), key=lambda each: each.priority))

    def remove(self, callback: Any) -> None:
        """Remove a callback, or all instances of a callback class. From inside a hook: it is not called any more, in this event either.

        Raises:
            ConfigError: nothing like it is in.
        """
        kept = tuple(entry for entry in self._entries if not _is(entry.callback, callback))
        if len(kept) == len(self._entries):
            raise ConfigError(
                f"no callback {callback!r} to remove", hint="present: " + (", ".join(self._named()) or "none")
            )
        self._entries = kept

    def call(self, event: str, **arguments: Any) -> Any:
        """Call the hook `event` of every callback that has it, in order.

        `processing_class` and `tokenizer` stand for each other when one is missing. An event nobody knows is a no-op.

        Returns:
            `arguments["control"]`, changed by the hooks.

        Raises:
            Exception: what a critical callback raised; those after it were not called.
            SystemExit: a hook asks for the end of the process; in `on_train_end`, all others were called before it is raised.
        """
        _fill_alias(arguments, "processing_class", "tokenizer")
        ending: SystemExit | None = None
        for entry in self._entries:
            # Identity, not equality: a hook before this one may have removed it.
            if any(entry is present for present in self._entries):
                try:
                    self._call_one(entry, event, arguments)
                except SystemExit as error:
                    # The exit code of a preempted training: it must not cost the others their end.
                    if event != "on_train_end":
                        raise
                    ending = ending or error
        if ending is not None:
            raise ending
        return arguments.get("control")

    def state_dict(self, *, having: Collection[str] = ()) -> dict[str, Any]:
        """The state of every callback that has any, by name; a second one of a name is `name#2`.

        A callback whose `state_dict` raises is logged, counted and left out.

        Args:
            having: only callbacks with a hook for one of these events; empty: all.
        """
        states = {}
        for key, entry in self._named().items():
            if having and not any(_hook_of(entry.callback, event) for event in having):
                continue
            try:
                state = entry.callback.state_dict() if hasattr(entry.callback, "state_dict") else {}
            except Exception as error:  # noqa: BLE001 - one broken callback must not cost the whole checkpoint
                self._record_failure(entry, "state_dict", None, error)
            else:
                if state:
                    states[key] = state
        return states

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give every callback its part of `state`. A part without a callback, or the reverse, is logged: that one starts anew.

        Raises:
            IncompatibleStateError: a callback refused its state; those before it have theirs.
        """
        entries = self._named()
        for key in state.keys() - entries.keys():
            _log.warning("the checkpoint has the state of a callback %s that is not in this training: ignored", key)
        for key, entry in entries.items():
            if key in state:
                _load(key, entry.callback, state[key])
            elif hasattr(entry.callback, "state_dict") and entry.callback.state_dict():
                _log.warning("the checkpoint has no state of callback %s: it starts anew", key)

    def __getattr__(self, name: str) -> Any:
        # An event that a newer host adds reaches callbacks that know it.
        if name.startswith("on_"):
            return _forward(name).__get__(self)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _named(self) -> dict[str, _Entry]:
        seen: Counter[str] = Counter()
        named = {}
        for entry in self._entries:
            seen[entry.name] += 1
            named[entry.name if seen[entry.name] == 1 else f"{entry.name}#{seen[entry.name]}"] = entry
        return named

    def _call_one(self, entry: _Entry, event: str, arguments: dict[str, Any]) -> None:
        hook = _hook_of(entry.callback, event)
        if hook is None:
            return
        started, control = self._clock(), arguments.get("control")
        stopped = getattr(control, "should_training_stop", False)
        try:
            _take_flags(_invoke(hook, arguments), control)
        except Exception as error:
            if _is_critical(entry.callback, event):
                # Not logged as well: whoever ends the training by it shows it.
                entry.failures += 1
                raise
            self._record_failure(entry, event, arguments.get("state"), error)
        finally:
            self._record_time(entry, event, started)
            if getattr(control, "should_training_stop", False) != stopped:
                self._note_stop(None if stopped else _stopped_by(entry), arguments.get("state"))

    def _note_stop(self, by: str | None, state: Any) -> None:
        self.stopped_by = by
        if hasattr(state, "stopped"):
            state.stopped = by

    def _record_failure(self, entry: _Entry, event: str, state: Any, error: Exception) -> None:
        entry.failures += 1
        count = entry.failures
        # All are counted; one that fails at every step must not fill the log: the first three, then 4, 8, 16, …
        if count <= 3 or count & (count - 1) == 0:
            step = getattr(state, "global_step", "?")
            # Our own errors say what to do, in one line; of any other one the place matters.
            ours = isinstance(error, CkptmgrError)
            _log.error(
                "callback %s failed in %s at step %s (failure %d), training goes on: %s",
                entry.name,
                event,
                step,
                count,
                str(error) if ours else repr(error),
                exc_info=None if ours else error,
            )

    def _record_time(self, entry: _Entry, event: str, started: float) -> None:
        now = self._clock()
        spent = now - started
        timing = entry.timings.setdefault(event, Timing())
        timing.calls += 1
        timing.total_s += spent
        timing.max_s = max(timing.max_s, spent)
        if spent > self.slow_s and event not in _UNHURRIED and now - entry.warned_at.get(event, float("-inf")) >= 60.0:
            entry.warned_at[event] = now
            _log.warning(
                "callback %s took %.2f s in %s, training waited (%d calls so far, %.2f s in all)",
                entry.name,
                spent,
                event,
                timing.calls,
                timing.total_s,
            )


def _forward(event: str) -> Any:
    """A hook that dispatches `event`; hosts call it by position or by keyword."""

    def hook(self: CallbackManager, args: Any = None, state: Any = None, control: Any = None, **kwargs: Any) -> Any:
        return self.call(event, args=args, state=state, control=control, **kwargs)

    hook.__name__ = event
    hook.__doc__ = f"Dispatch `{event}` to the callbacks."
    return hook


for _event in EVENTS:
    setattr(CallbackManager, _event, _forward(_event))
CallbackManager.on_evaluate_end = _forward("on_evaluate")  # type: ignore[method-assign]


def _is(present: Any, wanted: Any) -> bool:
    return isinstance(present, wanted) if isinstance(wanted, type) else present is wanted


def _stopped_by(entry: _Entry) -> str | None:
    if isinstance(entry.callback, CallbackManager):
        return entry.callback.stopped_by
    return entry.name if getattr(entry.callback, "stop_is_final", True) else None


def _is_critical(callback: Any, event: str) -> bool:
    critical = getattr(callback, "critical", False)
    return event in critical if isinstance(critical, (set, frozenset)) else bool(critical)


def _fill_alias(arguments: dict[str, Any], name: str, alias: str) -> None:
    if arguments.get(alias) is None and name in arguments:
        arguments[alias] = arguments[name]
    elif arguments.get(name) is None and alias in arguments:
        arguments[name] = arguments[alias]


def _take_flags(result: Any, control: Any) -> None:
    """Hugging Face's hooks may return a control of their own, which stands from then on."""
    if result is None or result is control or control is None:
        return
    for flag in _FLAGS:
        if hasattr(result, flag):
            setattr(control, flag, getattr(result, flag))


def _hook_of(callback: Any, event: str) -> Callable[..., Any] | None:
    """The bound hook for `event`, None if it would do nothing."""
    names = ("on_evaluate", "on_evaluate_end") if event in ("on_evaluate", "on_evaluate_end") else (event,)
    for name in names:
        hook = getattr(callback, name, None)
        # The no-ops of the base class are most of all hooks: not calling them keeps an event cheap.
        if callable(hook) and not (isinstance(callback, Callback) and _is_no_op(hook, name)):
            return hook  # type: ignore[no-any-return]
    return None


def _is_no_op(hook: Any, name: str) -> bool:
    function = getattr(hook, "__func__", hook)
    return function is getattr(Callback, name, None) or function is Callback._ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class _Signature:
    """What a hook takes: names by position only, names that it must get, all names, and whether it takes any other."""

    positional_only: tuple[str, ...]
    required: frozenset[str]
    names: frozenset[str]
    takes_all: bool


@lru_cache(maxsize=1024)
def _signature_of(function: Any, bound: bool) -> _Signature:
    parameters = list(inspect.signature(function).parameters.values())[1 if bound else 0 :]
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return _Signature(
        positional_only=tuple(p.name for p in named if p.kind is p.POSITIONAL_ONLY),
        required=frozenset(p.name for p in named if p.default is p.empty),
        names=frozenset(p.name for p in named),
        takes_all=any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def _invoke(hook: Any, arguments: Mapping[str, Any]) -> Any:
    function = getattr(hook, "__func__", None)
    signature = _signature_of(hook, False) if function is None else _signature_of(function, True)
    given = dict(arguments) if signature.takes_all else {k: v for k, v in arguments.items() if k in signature.names}
    # This host does not have it. Anything else that is missing is a misspelt name, and Python says so.
    given.update(dict.fromkeys((signature.required & ARGUMENTS) - given.keys()))
    positional = [given.pop(name) for name in signature.positional_only if name in given]
    return hook(*positional, **given)


def _load(key: str, callback: Any, state: Any) -> None:
    try:
        callback.load_state_dict(state)
    except Exception as error:
        raise IncompatibleStateError(
            f"callback {key} refused its saved state: {error!r}",
            hint="resume with the version of the callback that saved it, or without it",
            piece=key,
        ) from error
