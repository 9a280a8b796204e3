"""Calls callbacks: in order, each shielded from the others, each timed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from ckptmgr.callbacks import checks, huggingface_states, privilege
from ckptmgr.callbacks.alone import AloneCallback
from ckptmgr.callbacks.base import EVENTS, Callback, name_of
from ckptmgr.callbacks.entries import Entry, Hook, by_name
from ckptmgr.callbacks.hooks import check_hooks, find_hook, name_misspelt
from ckptmgr.callbacks.timings import Timing, summary
from ckptmgr.core.errors import ConfigError

_log = logging.getLogger(__name__)

_FLAGS = (
    *("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log"),
    "should_interrupt",
)
# After the last of them that comes before a save, its decisions are all made.
_BEFORE_SAVES = {"on_step_end", "on_log", "on_evaluate", "on_evaluate_end", "on_epoch_end"}


class CallbackManager(Callback):
    """Dispatches events to callbacks, and is itself one callback: hand it to a host as a whole.

    Callbacks are `Callback`s or any objects with `on_…` methods, such as Hugging Face's. Hooks are called by keyword; a hook without
    `**kwargs` gets the arguments it names. One that raises is logged with the event and the step and counted, and the others and the training
    go on, unless it is `critical`. Hooks run in the calling thread, but for callbacks that were added with `run_async`; not thread-safe.

    In Hugging Face's Trainer, which keeps the states of its own callbacks only, the states of these are in `trainer_state.json`, and come back
    when training resumes.

    Args:
        callbacks: added in this order.
        slow_s: a call longer than this is warned about, at most once a minute per callback and event.
        most_failures: a callback that fails so often in a row in one event is disabled, and this is said; `on_train_end` and `on_exception` still
            reach it. None: none is.
        debug: report callbacks that change `state`, which is the trainer's; slow. None: as CKPTMGR_DEBUG_CALLBACKS says.
        clock: seconds from any origin, never backwards.

    Attributes:
        stopped_by: the callback that has set `should_training_stop`, if that is final (`Callback.stop_is_final`); None when nobody has, or when it was
            taken back. `state.stopped` is set to the same, where the host's state has it.
        host_saving_s: seconds that the host's own saves, outside of all hooks, have taken, as far as it says.
    """

    # What a critical callback of ours raised must get through a host's own manager too.
    critical = True

    def __init__(
        self,
        callbacks: Iterable[Any] = (),
        *,
        slow_s: float = 0.1,
        most_failures: int | None = 20,
        debug: bool | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        checks.number("CallbackManager", "slow_s", slow_s, above=0)
        checks.whole("CallbackManager", "most_failures", most_failures, optional=True)
        self.slow_s = slow_s
        self.stopped_by: str | None = None
        self.host_saving_s = 0.0
        self._most_failures = most_failures
        self._watch = privilege.Watch() if (privilege.is_asked_for() if debug is None else debug) else None
        self._clock = clock
        self._began: float | None = None
        self._is_nested = False
        self._spent_s = 0.0
        self._entries: tuple[Entry, ...] = ()
        for callback in callbacks:
            self.add(callback)

    @classmethod
    def from_config(cls, source: Any, *, manager: Any = None, **options: Any) -> CallbackManager:
        """The callbacks that a configuration names: `ckptmgr.yaml`, its JSON, or the same as a mapping. See `ckptmgr.callbacks.configuration`.

        Args:
            source: a path, or a mapping.
            manager: the manager of checkpoints for a `SaveModelCallback`; by default the one that the configuration describes.
            options: of this class.

        Raises:
            ConfigError: mistakes in it, all of them (`mistakes`), with their places and what is allowed.
        """
        from ckptmgr.callbacks.configuration import add_configured

        made = cls(**options)
        add_configured(made.add, source, manager=manager)
        return made

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
    def sets_learning_rates(self) -> bool:  # type: ignore[override]
        """Whether one of the callbacks does: then they are part of the course of a training, and no setting of the optimizer."""
        return any(getattr(callback, "sets_learning_rates", False) for callback in self.callbacks)

    @property
    def failures(self) -> dict[str, int]:
        """How many calls of each callback raised, those of nested managers included; only those that have any."""
        return {key: entry.failures.count for key, entry in self._leaves().items() if entry.failures.count}

    @property
    def disabled(self) -> tuple[str, ...]:
        """The callbacks that are left out because they did nothing but fail (`most_failures`)."""
        return tuple(key for key, entry in self._leaves().items() if entry.failures.is_disabled)

    @property
    def timings(self) -> dict[str, dict[str, Timing]]:
        """Times by callback and event, those of nested managers included; hooks that are no-ops are not called and not listed. Of `run_async`, what
        handing over took."""
        return {
            key: {event: hook.timing for event, hook in entry.hooks.items() if hook is not None and hook.timing.calls}
            for key, entry in self._leaves().items()
        }

    @property
    def spent_s(self) -> float:
        """Seconds that all hooks took so far, one that runs now not counted; of `run_async`, what handing over took."""
        return self._spent_s

    def add(
        self,
        callback: Any,
        *,
        name: str | None = None,
        priority: int | str | None = None,
        critical: bool | Collection[str] | None = None,
        run_async: bool = False,
    ) -> None:
        """Add a callback, or an instance of a callback class. From inside a hook: it takes part from the next event on.

        Args:
            name: what it is called in logs and in saved state; by default its own `name`, or its class.
            priority: in place of its own: a number, smaller ones run first, or the name of a `Priority`.
            critical: set as its own `critical`: whether what it raises ends the training, or in which events.
            run_async: run it in a thread of its own, so that training never waits for it: see `ckptmgr.callbacks.background`. For callbacks that
                watch: what it sets in `control` has no effect.

        Raises:
            ConfigError: `callback` has no `on_…` method, or an `async` one, or is in already; is critical for what is no event, or with `run_async`; or there is no
                such priority.
        """
        if isinstance(callback, type):
            callback = callback()
        if critical is not None:
            callback.critical = critical if isinstance(critical, bool) else frozenset(critical)
        check_hooks(callback)
        if any(entry.callback is callback for entry in self._entries):
            raise ConfigError(
                f"the callback {name_of(callback)} was added already", hint="make a second instance of it"
            )
        entry = Entry.of(callback, name=name, priority=priority, run_async=run_async, most_failures=self._most_failures)
        name_misspelt(callback)
        if isinstance(callback, CallbackManager):
            # It gets the event of a beginning itself, and its callbacks may be others by then.
            callback._is_nested, entry.first_state = True, None
        elif isinstance(callback, AloneCallback):
            callback.is_managed = True
        if isinstance(callback, Callback):
            callback.joined(self)
        # sorted is stable: equal priorities stay in the order they were added. A new tuple: a running dispatch keeps the old one.
        self._entries = tuple(sorted((*self._entries, entry), key=lambda each: each.priority))

    def remove(self, callback: Any) -> None:
        """Remove a callback, or all instances of a callback class, also from managers in this one. From inside a hook: it is not called any more, in this
        event either.

        Raises:
            ConfigError: nothing like it is in.
        """
        if not self._removes(callback):
            name = callback.__name__ if isinstance(callback, type) else name_of(callback)
            raise ConfigError(f"no callback {name} to remove", hint="present: " + (", ".join(self._leaves()) or "none"))

    def _removes(self, callback: Any) -> bool:
        gone = [entry for entry in self._entries if entry.is_meant_by(callback)]
        for entry in gone:
            entry.is_present = False
        self._entries = tuple(entry for entry in self._entries if entry.is_present)
        nested = [each for each in self.callbacks if isinstance(each, CallbackManager)]
        return any([bool(gone), *[each._removes(callback) for each in nested]])

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
        control, state = arguments.get("control"), arguments.get("state")
        if event == "on_train_begin":
            self._begin_anew(state)
            self._began = self._clock()
            self._take_up(state)
        ending: SystemExit | None = None
        for entry in self._entries:
            try:
                hook = entry.hooks[event]
            except KeyError:
                hook = entry.find(event)
            if hook is None or not entry.is_present:
                continue
            try:
                self._call_one(entry, event, hook, arguments, control, state)
            except SystemExit as error:
                # The exit code of a preempted training: it must not cost the others their end.
                if event != "on_train_end":
                    raise
                ending = ending or error
        if event in _BEFORE_SAVES:
            self._keep(state, control)
        elif event == "on_train_end":
            self._say_times(state)
        if ending is not None:
            raise ending
        return control

    def state_dict(self, *, having: Collection[str] = ()) -> dict[str, Any]:
        """The state of every callback that has any, by name; a second one of a name is `name#2`.

        A callback whose `state_dict` raises is logged, counted and left out.

        Args:
            having: only callbacks with a hook for one of these events; empty: all.
        """
        states = {}
        for key, entry in self._named().items():
            if having and not any(find_hook(entry.callback, event) for event in having):
                continue
            if state := entry.state():
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
            entry.is_used = False
            if key in state:
                entry.load(key, state[key])
            elif entry.state():
                _log.warning("the checkpoint has no state of callback %s: it starts anew", key)
                entry.reset()

    def __getattr__(self, name: str) -> Any:
        # An event that a newer host adds reaches callbacks that know it.
        if name.startswith("on_"):
            return _forward(name).__get__(self)
        return super().__getattr__(name)

    def _named(self) -> dict[str, Entry]:
        return by_name(self._entries)

    def _leaves(self) -> dict[str, Entry]:
        """As `_named`, with what a nested manager has in its place."""
        return by_name(self._flat())

    def _flat(self) -> Iterator[Entry]:
        for entry in self._entries:
            if isinstance(entry.callback, CallbackManager):
                yield from entry.callback._flat()
            else:
                yield entry

    def _call_one(
        self, entry: Entry, event: str, hook: Hook, arguments: Mapping[str, Any], control: Any, state: Any
    ) -> None:
        failures = entry.failures
        if failures.is_disabled and not failures.allows(event):
            return
        stopped = getattr(control, "should_training_stop", False)
        before = None if self._watch is None or state is None else self._watch.before(state)
        started = self._clock()
        try:
            result = hook.call(arguments)
            if result is not None and result is not control and control is not None:
                _take_flags(result, control)
            if entry.target is entry.callback:  # else it was only handed over
                failures.succeeded(event)
        except Exception as error:
            if entry.is_critical(event):
                # Not logged as well: whoever ends the training by it shows it.
                failures.count += 1
                raise
            failures.failed(event, state, error)
        finally:
            now = self._clock()
            spent = now - started
            hook.timing.add(spent)
            self._spent_s += spent
            if spent > self.slow_s and not isinstance(entry.callback, CallbackManager):  # which has said it itself
                hook.say_slow(entry.name, event, spent, now)
            if before is not None and self._watch is not None:
                self._watch.after(entry.name, entry.callback, event, state, before)
            if getattr(control, "should_training_stop", False) != stopped:
                self._note_stop(None if stopped else _stopped_by(entry), state)

    def _note_stop(self, by: str | None, state: Any) -> None:
        self.stopped_by = by
        if hasattr(state, "stopped"):
            state.stopped = by

    def _say_times(self, state: Any) -> None:
        """What the callbacks took, once per training, on the main process."""
        if self._is_nested or not getattr(state, "is_world_process_zero", True) or not _log.isEnabledFor(logging.INFO):
            return
        whole_s = None if self._began is None else self._clock() - self._began
        lines = summary(self.timings, self.failures, whole_s)
        if len(lines) > 1:
            _log.info("time of callbacks:\n%s", "\n".join(lines))

    def _begin_anew(self, state: Any) -> None:
        """Another training with the same callbacks: from scratch, they decide as in the first one. One that goes on from where it is keeps what they know."""
        from_scratch = getattr(state, "global_step", None) == 0
        for entry in self._entries:
            entry.begin(from_scratch=from_scratch)
        self.stopped_by = None

    # --- a host that keeps states of its own callbacks only ----------------------------------------------------------------

    def _keep(self, state: Any, control: Any) -> None:
        """Put the states where Hugging Face's next save writes them, if one may follow this event."""
        if not self._is_nested and huggingface_states.may_save(state, control):
            huggingface_states.keep(state, self.state_dict())

    def _take_up(self, state: Any) -> None:
        """Take up the states of a resumed training in Hugging Face's Trainer."""
        if not self._is_nested and (states := huggingface_states.kept(state)):
            self.load_state_dict(states)


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


def _stopped_by(entry: Entry) -> str | None:
    if isinstance(entry.callback, CallbackManager):
        return entry.callback.stopped_by
    return entry.name if getattr(entry.callback, "stop_is_final", True) else None


def _fill_alias(arguments: dict[str, Any], name: str, alias: str) -> None:
    if arguments.get(alias) is None and name in arguments:
        arguments[alias] = arguments[name]
    elif arguments.get(name) is None and alias in arguments:
        arguments[name] = arguments[alias]


def _take_flags(result: Any, control: Any) -> None:
    """Hugging Face's hooks may return a control of their own, which stands from then on."""
    for flag in _FLAGS:
        if hasattr(result, flag):
            setattr(control, flag, getattr(result, flag))
