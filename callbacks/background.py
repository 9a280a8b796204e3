"""Callbacks that run beside the training, in a thread of their own, and never hold it up."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from ckptmgr.callbacks.base import name_of
from ckptmgr.callbacks.hooks import CallHook, caller, find_hook
from ckptmgr.callbacks.isolation import Failures
from ckptmgr.core.errors import ConfigError

_log = logging.getLogger(__name__)

# What does not change beneath a hook that runs later. A model, an optimizer, a batch and outputs go on being used by the training.
_HANDED = frozenset({"args", "state", "control", "metrics", "logs", "exception", "processing_class", "tokenizer"})
_FLAGS_SAID = "callback %s runs beside the training (run_async): that it set %s has no effect"


class Background:
    """Calls the hooks of one callback in a thread, in the order of events.

    It watches: `args`, a copy of `state` and of `control`, `metrics`, `logs`, `exception` and the tokenizer are handed over, and flags that it sets in
    `control` have no effect, which is said once. An event that comes while `capacity` of them wait is left out, counted and said; training
    never waits, but for `end_timeout_s` at most in `on_train_end`, for what is left. Failures are isolated as in the manager.

    Args:
        callback: what to call. Its `state_dict` is asked for in the thread, after each hook.
        failures: where its failures are counted.
        capacity: events that may wait.
        end_timeout_s: seconds that `on_train_end` waits for them.

    Attributes:
        left_out: events that were not handed over because too many waited.
    """

    def __init__(self, callback: Any, failures: Failures, *, capacity: int = 256, end_timeout_s: float = 10.0) -> None:
        if getattr(callback, "critical", False) or not getattr(callback, "may_run_async", True):
            why = "is critical" if getattr(callback, "critical", False) else "acts on the training, or measures it"
            raise ConfigError(
                f"the callback {name_of(callback)} {why}, and cannot run beside the training",
                hint="add it without run_async",
                argument="run_async",
            )
        self.callback = callback
        self.left_out = 0
        self._failures = failures
        self._capacity = capacity
        self._end_timeout_s = end_timeout_s
        self._waiting: deque[tuple[str, CallHook, dict[str, Any]]] = deque()
        self._changed = threading.Condition()
        self._is_busy = False
        self._thread: threading.Thread | None = None
        self._flags_said = False
        self._state: dict[str, Any] = self._own_state()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("on_"):
            hook = find_hook(self.callback, name)
            if hook is not None:
                return self._submitter(name, caller(hook))
            if name == "on_train_end":
                # What waits is waited for, also if the callback itself does nothing then.
                return self._submitter(name, lambda arguments: None)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def state_dict(self) -> dict[str, Any]:
        """The callback's state after the last hook that has come back: saving does not wait for one that runs."""
        with self._changed:
            return copy.deepcopy(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand it to the callback; called before training begins."""
        with self._changed:
            self.callback.load_state_dict(state)
            self._state = dict(state)

    def _submitter(self, event: str, call: CallHook) -> Callable[..., None]:
        def submit(**arguments: Any) -> None:
            self._submit(event, call, arguments)

        return submit

    def _submit(self, event: str, call: CallHook, arguments: Mapping[str, Any]) -> None:
        given = {name: _copied(name, value) for name, value in arguments.items() if name in _HANDED}
        ends = event == "on_train_end"
        with self._changed:
            # The end always has room: it comes once, and lets go of what the callback holds.
            if len(self._waiting) >= self._capacity and not ends:
                self.left_out += 1
                count = self.left_out
                if count & (count - 1) == 0:
                    _log.warning(
                        "callback %s is too slow: %d events wait for it, %s was left out (%d so far)",
                        self._failures.name,
                        len(self._waiting),
                        event,
                        count,
                    )
                return
            self._waiting.append((event, call, given))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"ckptmgr-callback-{self._failures.name}", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
            if ends:
                self._wait()

    def _wait(self) -> None:
        """Wait for what was handed over; called with the lock."""
        deadline = time.monotonic() + self._end_timeout_s
        while (self._waiting or self._is_busy) and (left := deadline - time.monotonic()) > 0:
            self._changed.wait(left)
        if self._waiting or self._is_busy:
            _log.warning(
                "callback %s has not done with the training after %.0f s: %d events are left",
                self._failures.name,
                self._end_timeout_s,
                len(self._waiting) + self._is_busy,
            )

    def _run(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                while not self._waiting:
                    self._changed.wait()
                event, call, arguments = self._waiting.popleft()
                self._is_busy = True
            self._call(event, call, arguments)
            state = self._own_state()
            with self._changed:
                self._state = state

    def _call(self, event: str, call: CallHook, arguments: dict[str, Any]) -> None:
        if not self._failures.allows(event):
            return
        control = arguments.get("control")
        flags = _flags(control)
        try:
            returned = call(arguments)
        except Exception as error:  # noqa: BLE001 - a callback is other people's code
            self._failures.failed(event, arguments.get("state"), error)
        except SystemExit:
            _log.error("callback %s asks for the end of the process in %s: it has no say", self._failures.name, event)
        else:
            self._failures.succeeded(event)
            changed = [*(set(_flags(control).items()) - set(flags.items()))]
            changed += [*(set(_flags(returned).items()) - set(flags.items()))] if returned is not None else []
            if changed and not self._flags_said:
                self._flags_said = True
                _log.warning(_FLAGS_SAID, self._failures.name, ", ".join(sorted({name for name, _ in changed})))

    def _own_state(self) -> dict[str, Any]:
        try:
            return dict(self.callback.state_dict()) if hasattr(self.callback, "state_dict") else {}
        except Exception as error:  # noqa: BLE001 - one broken callback must not cost the whole checkpoint
            self._failures.failed("state_dict", None, error)
            return {}


def _copied(name: str, value: Any) -> Any:
    """What the thread is given of an argument: the trainer changes its own in the meantime."""
    if name in ("state", "control"):
        mine = copy.copy(value)
        history = getattr(mine, "log_history", None)
        if isinstance(history, list):
            mine.log_history = list(history)
        return mine
    return dict(value) if isinstance(value, Mapping) else value


def _flags(control: Any) -> dict[str, bool]:
    names = [name for name in dir(control) if name.startswith("should_")]
    return {name: bool(getattr(control, name)) for name in names}
