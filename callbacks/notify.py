"""A callback that tells people how a training ended, and that its saves do not reach the store."""

from __future__ import annotations

import atexit
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.callbacks import checks
from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.log_sinks import labels
from ckptmgr.callbacks.readings import numbers_of
from ckptmgr.callbacks.webhook import Format, Webhook
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.units import duration_text

_log = logging.getLogger(__name__)

URL_ENV = "CKPTMGR_NOTIFY_URL"
EVENTS = ("begin", "end", "failure", "lag")

# After a notice of preemption there is little time, and others need it more.
_HURRIED_S = 3.0
_LONGEST_ERROR = 500
# What is said of the last logs, the first of these that are there.
_TOLD_METRICS = 4


class NotifyCallback(Callback):
    """Post to a webhook when a training ends, when it fails, and when nothing that it saves becomes durable.

    Training never waits for it, but at the end, for `close_timeout_s` at most: messages go out from a thread, are tried again while the service
    cannot take them, and are dropped, the oldest first, when too many wait (see `ckptmgr.callbacks.webhook`).

    Messages have `text`, one line, and as `format="json"` also `event`, `at` (UTC), `host`, `rank`, `kind`, `step`, `name`, and what is known:

    - `end`: the training is complete, was ended early by a callback, or interrupted; with its last numbers, and what is not in the store yet;
    - `failure`: by which exception. A host without `on_exception`, such as Hugging Face's Trainer: when the process ends without `on_train_end`, as far
      as Python itself ends it (not by SIGKILL, nor by SIGTERM without a handler);
    - `lag`: for `lag_s` seconds something has been waiting for the store and nothing has become durable; once, and again when that is over. Needs the
      manager of checkpoints: `manager`, or that of the `SaveModelCallback` beside it in a `CallbackManager`;
    - `begin`: a training begins, or goes on.

    *Several ranks*: the main process sends; no collective. *Not finite* numbers are sent as text. *Accumulation* means nothing here. *Resume*:
    nothing is saved; each process tells of itself.

    Args:
        url: of the webhook, a secret; by default CKPTMGR_NOTIFY_URL says it. It is never logged.
        events: which of `begin`, `end`, `failure`, `lag`.
        format: `json`, or what a service wants: `slack`, `discord`, `dingtalk`, `wecom`, `feishu`.
        name: what to call the training; by default the name of its run.
        lag_s: see `lag`.
        check_interval_s: seconds between two looks at what waits; in the thread.
        headers: more headers for the requests.
        attempts: how often a message is tried.
        timeout_s: of a try.
        close_timeout_s: how long the end of training waits for messages.
        manager: the manager of checkpoints.
        clock: seconds from any origin.
        post: replaces the request (tests); see `Webhook`.

    Raises:
        ConfigError: an argument that makes no sense, or no URL.
    """

    # After all others: what they did at the end can be told.
    priority = Priority.LOG

    def __init__(
        self,
        url: str | None = None,
        *,
        events: str | Sequence[str] = ("end", "failure", "lag"),
        format: Format = "json",
        name: str = "",
        lag_s: float = 3600.0,
        check_interval_s: float = 60.0,
        headers: Mapping[str, str] | None = None,
        attempts: int = 8,
        timeout_s: float = 10.0,
        close_timeout_s: float = 15.0,
        manager: Any = None,
        clock: Callable[[], float] = time.monotonic,
        post: Callable[[str, bytes, Mapping[str, str], float], bytes] | None = None,
    ) -> None:
        owner = type(self).__name__
        for each in (events,) if isinstance(events, str) else events:
            checks.choice(owner, "events", each, EVENTS)
        for what, seconds in (("lag_s", lag_s), ("check_interval_s", check_interval_s), ("timeout_s", timeout_s)):
            checks.number(owner, what, seconds, above=0.0)
        checks.number(owner, "close_timeout_s", close_timeout_s, least=0.0)
        checks.whole(owner, "attempts", attempts)
        url = url or os.environ.get(URL_ENV)
        if not url:
            raise ConfigError(f"{owner}: there is no url", hint=f"give one, or set {URL_ENV}")
        self.events = frozenset((events,) if isinstance(events, str) else events)
        self.run_name = name
        self.lag_s = lag_s
        self.check_interval_s = check_interval_s
        self.close_timeout_s = close_timeout_s
        policy = RetryPolicy(attempts=attempts, deadline_s=300.0, base_s=1.0, cap_s=60.0)
        self._webhook = Webhook(url, form=format, headers=headers, timeout_s=timeout_s, policy=policy, post=post)
        self._manager = manager
        self._dispatcher: Any = None
        self._clock = clock
        self._began_s: float | None = None
        self._checked_s = 0.0
        self._numbers: dict[str, float] = {}
        self._step = 0
        self._failed = False
        self._control: Any = None
        self._pid = 0
        # Of the thread alone: what was durable, since when nothing more is, and whether that was said.
        self._durable: Any = None
        self._waits_since: float | None = None
        self._has_said_lag = False

    @property
    def sent(self) -> int:
        """Messages that were taken."""
        return self._webhook.sent

    @property
    def lost(self) -> int:
        """Messages that were given up."""
        return self._webhook.lost

    def joined(self, dispatcher: Any) -> None:
        """A manager of callbacks has taken this one in: it may know the manager of checkpoints."""
        self._dispatcher = dispatcher

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the thread; maybe say so."""
        if not state.is_world_process_zero:
            return
        self._began_s = self._checked_s = self._clock()
        self._failed = False
        self._control = control
        self._pid = os.getpid()
        self._step = state.global_step
        self._webhook.begin()
        atexit.register(self._process_ends)
        goes_on = f"goes on from step {state.global_step}" if state.global_step else "begins"
        self._tell("begin", f"training {goes_on}", max_steps=state.max_steps)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Have a look taken at what waits for the store, once in a while."""
        if self._began_s is None:
            return
        self._step = state.global_step
        now = self._clock()
        if "lag" in self.events and now - self._checked_s >= self.check_interval_s:
            self._checked_s = now
            manager = self._checkpoints()
            if manager is not None:
                step = state.global_step
                self._webhook.ask(lambda: self._look(manager, step, now))

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the newest numbers."""
        self._numbers.update(numbers_of(logs))

    def on_exception(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        exception: BaseException | None = None,
        **kwargs: Any,
    ) -> None:
        """Say what ends the training."""
        if self._began_s is not None:
            self._step = state.global_step
            self._tell_failure(exception)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say how it ended, unless that was said, and wait for the messages."""
        if self._began_s is None:
            return
        self._step = state.global_step
        interrupted = bool(getattr(control, "should_interrupt", False))
        if not self._failed:
            stopped = getattr(state, "stopped", None)
            how = "was interrupted" if interrupted else f"was ended by {stopped}" if stopped else "ended"
            pending = self._pending()
            waits = f"; {pending} save(s) not in the store yet" if pending else ""
            self._tell("end", f"training {how}", waits, stopped=stopped, interrupted=interrupted, pending=pending)
        self._finish(min(self.close_timeout_s, _HURRIED_S) if interrupted else self.close_timeout_s)

    # --- telling ----------------------------------------------------------------------------------------------------------

    def _process_ends(self) -> None:
        """The process ends, and nobody has said that the training did."""
        if self._began_s is None or os.getpid() != self._pid:
            return  # the end of a forked child is none of the training
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None and getattr(self._control, "should_training_stop", False):
            # Another callback ended the process in on_train_end, as after a preemption, in a host that then calls no more.
            self._tell("end", "training was ended, and its process with it,", interrupted=True)
        else:
            self._tell_failure(error)
        self._finish(self.close_timeout_s)

    def _finish(self, timeout_s: float) -> None:
        self._began_s = None
        atexit.unregister(self._process_ends)
        self._webhook.close(timeout_s)

    def _tell_failure(self, error: BaseException | None) -> None:
        self._failed = True
        told = "its process ended before it did" if error is None else f"{type(error).__name__}: {error}"
        told = " ".join(told.split())[:_LONGEST_ERROR]
        how = "was interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self._tell("failure", f"training {how}", f": {told}", error=told)

    def _tell(self, event: str, what: str, more: str = "", **facts: Any) -> None:
        if event in self.events:
            message = self._message(event, what, more, self._step, self._clock(), **facts)
            self._webhook.send(message)

    def _message(self, event: str, what: str, more: str, step: int, now: float, **facts: Any) -> dict[str, Any]:
        name = self._name()
        began_s = self._began_s
        seconds = 0.0 if began_s is None else now - began_s
        # A copy: this may be the thread, and the training goes on.
        latest = dict(self._numbers)
        numbers = {key: value if math.isfinite(value) else str(value) for key, value in latest.items()}
        shown = [(key, numbers[key]) for key in sorted(numbers, key=_rank_of)][:_TOLD_METRICS]
        told = ", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown)
        text = f"[{name}] {what} at step {step}, after {duration_text(seconds)}{more}"
        known = {key: value for key, value in facts.items() if value is not None}
        return {
            "text": f"{text} ({told})" if told and event != "begin" else text,
            "event": event,
            **labels("notice", step),
            "name": name,
            "seconds": round(seconds, 1),
            "metrics": numbers,
            **known,
        }

    def _name(self) -> str:
        url = str(getattr(self._checkpoints(), "url", "") or "").rstrip("/")
        return self.run_name or url.rpartition("/")[2] or "training"

    def _checkpoints(self) -> Any:
        return self._manager if self._manager is not None else getattr(self._dispatcher, "manager", None)

    def _pending(self) -> int | None:
        """How many saves are not in the store; None if nobody knows."""
        try:
            return len(self._checkpoints().status().uploads.pending)
        except Exception:  # noqa: BLE001 - no manager, or one that is not ours; the message counts
            return None

    def _look(self, manager: Any, step: int, now: float) -> dict[str, Any] | None:
        """In the thread: what to say about what waits; None for nothing."""
        uploads = manager.status().uploads
        lag = uploads.lag
        durable = None if lag is None else lag.durable
        if lag is None or self._waits_since is None or durable != self._durable:
            said, self._has_said_lag = self._has_said_lag, False
            self._durable, self._waits_since = durable, None if lag is None else now
            if said:
                return self._message("lag", "saves become durable again", "", step, now, lag=False)
            return None
        waited_s = now - self._waits_since
        if waited_s < self.lag_s or self._has_said_lag:
            return None
        self._has_said_lag = True
        last = "nothing is" if durable is None else f"the newest that is: step {durable.step}"
        because = f"; {uploads.last_error}" if uploads.last_error else ""
        more = f": for {duration_text(waited_s)} nothing that was saved has become durable, {last}{because}"
        return self._message(
            "lag",
            "saves do not reach the store",
            more,
            step,
            now,
            lag=True,
            waited_s=round(waited_s),
            saved_step=lag.step,
        )


def _rank_of(name: str) -> tuple[int, str]:
    """The loss first, then evaluations."""
    return (0 if name == "loss" else 1 if name == "eval_loss" else 2 if name.startswith("eval_") else 3, name)
