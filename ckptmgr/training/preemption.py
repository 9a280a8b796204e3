"""Preemption: somebody is about to take the machine away, and training has seconds to minutes to save and leave.

    CheckpointManager(url, preemption=Preemption(grace_s=110, notices=["ec2"], exit_code=75))

Signals, metadata services and a stop file become one thing, a `Notice`. Training looks for it at its edges (between steps, micro-batches and
evaluation batches), saves, uploads the newest first, and leaves before the deadline. Periodic saves are the promise; this one is a bonus:
a process that is stuck in one long call sees the notice when that call returns; in a collective that waits for a rank that is gone, at the
group's timeout.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

from ckptmgr.core.errors import ConfigError
from ckptmgr.training import ranks
from ckptmgr.training.notices import NOTICES, Poller

_log = logging.getLogger(__name__)

STOP_FILE = "stop_file"
# What ranks tell each other instead of text: signals by their number, the others by these.
_CODES = {STOP_FILE: 1000, "ec2": 1001, "aliyun": 1002}
_LOOK_S = 1.0


class Preempted(BaseException):
    """Raised by the signal handler inside `Preemption.waiting()`, where nothing is lost by leaving at once. Not an error: no `Exception`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The machine will be gone.

    Attributes:
        source: who said so: `sigterm`, `sigusr1` (or another signal's name), `ec2`, `aliyun` or `stop_file`.
        deadline: when this process must be gone, in `time.monotonic()` of this process.
    """

    source: str
    deadline: float


class Preemption:
    """Watches for notices of preemption, from `install` to `uninstall`. For the training thread, unless a member says otherwise.

    The signal handler does nothing but note the signal and its deadline, and call the handler that was there before; what that one raises is
    held back the first time, because training is about to end in order. It runs in this process only: forked children (DataLoader workers
    among them) keep the handlers that were there before `install`. Once a signal came, what torch raises at any place about DataLoader
    workers that died of the same signal is kept for `waiting()`; this lasts, because such a death may be reported late.

    A second signal gives up the save: `save_wanted` is False from then on. The same signal again within `repeat_s` counts as one: launchers
    pass on what the scheduler has sent to each process already.

    Args:
        signals: which signals to watch; training must be in the main thread for that.
        grace_s: how long after a signal, or the appearance of the stop file, this process has. Kubernetes and torchrun wait 30 s and then kill.
        margin_s: how long before the deadline everything should be over.
        stop_file: training stops once this file appears or is touched. One that is there before `install` is ignored until it is touched.
        notices: metadata services to ask, of `ec2` and `aliyun`, from a daemon thread; see `ckptmgr.training.notices`.
        poll_s: how often they are asked.
        exit_code: what the process ends with: 143 as if SIGTERM had ended it; 75 where a job wrapper requeues on it.
        repeat_s: see above.

    Raises:
        ConfigError: a value that makes no sense.
    """

    def __init__(
        self,
        *,
        signals: Sequence[int] = (signal.SIGTERM, signal.SIGUSR1),
        grace_s: float = 25.0,
        margin_s: float = 3.0,
        stop_file: str | os.PathLike[str] | None = None,
        notices: Sequence[str] = (),
        poll_s: float = 5.0,
        exit_code: int = 143,
        repeat_s: float = 1.0,
    ) -> None:
        if not (_is_number(margin_s) and _is_number(grace_s) and 0.0 <= margin_s < grace_s < math.inf):
            raise ConfigError(
                f"Preemption: margin_s is {margin_s!r} and grace_s is {grace_s!r}",
                hint="grace_s is what the platform leaves between the signal and the kill, margin_s a part of it, 0 or more",
            )
        if not (_is_number(poll_s) and 0.0 < poll_s < math.inf):
            raise ConfigError(f"Preemption: poll_s is {poll_s!r}", hint="use a number of seconds above 0")
        if not isinstance(exit_code, int) or not 0 < exit_code < 256:
            raise ConfigError(
                f"Preemption: exit_code is {exit_code!r}",
                hint="use a code from 1 to 255, such as 143 or 75; 0 would say that the training is complete",
            )
        self.signals = tuple(_signal(each) for each in signals)
        self.grace_s = grace_s
        self.margin_s = margin_s
        self.stop_file = None if stop_file is None else os.fspath(stop_file)
        self.notices = _names(notices)
        self.poll_s = poll_s
        self.exit_code = exit_code
        self.repeat_s = repeat_s
        self._sources: dict[int, str] = {number: number.name.lower() for number in self.signals}
        self._installed = False
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}
        self._poller: Poller | None = None
        # Each is written at one place only: the handler, the poller's thread, the look at the file, the agreement.
        self._by_signal: Notice | None = None
        self._by_service: Notice | None = None
        self._by_file: Notice | None = None
        self._by_ranks: Notice | None = None
        self._counted: tuple[int, float] | None = None
        self._second = False
        self._second_elsewhere = False
        self._held_back: BaseException | None = None
        self._of_children: Any = None
        self._in_wait = False
        self._leave_wait = False
        self._file_before: tuple[int, int] | None = None
        self._next_look_s = 0.0
        self._said: set[str] = set()

    # --- watching ---------------------------------------------------------------------------------------------------------

    def install(self) -> None:
        """Begin to watch. In another thread than the main one, signals are not watched, which is logged; the other sources are.

        Does nothing if installed already.
        """
        if self._installed:
            return
        self._installed = True
        self._pid = os.getpid()
        _INSTALLED.add(self)
        if threading.current_thread() is threading.main_thread():
            for number in self.signals:
                self._previous[number] = signal.signal(number, self._on_signal)
        elif self.signals:
            _log.warning(
                "signals are not watched: training runs in the thread %s, and Python handles them in the main thread only",
                threading.current_thread().name,
            )
        self._file_before = self._stop_file_mark()
        if self._file_before is not None:
            _log.warning("the stop file %s was there before: it stops this training once it is touched", self.stop_file)
        if self.notices:
            self._poller = Poller(self.notices, poll_s=self.poll_s, found=self._on_service)
            self._poller.start()

    def uninstall(self) -> None:
        """Stop watching, and put back the handlers that were there before, but for signals that somebody else has taken over since.

        A notice that was seen stays. Does nothing if not installed.
        """
        if not self._installed:
            return
        self._installed = False
        _INSTALLED.discard(self)
        if self._poller is not None:
            self._poller.stop()
            self._poller = None
        if self._previous and threading.current_thread() is not threading.main_thread():
            _log.warning("signals stay watched: only the main thread can put their handlers back")
            return
        self._put_back()

    # --- looking ----------------------------------------------------------------------------------------------------------

    @property
    def notice(self) -> Notice | None:
        """What this process knows: the notice with the earliest deadline, None without one. Cheap; from any thread. The first time, it is logged."""
        if self.stop_file is not None and self._by_file is None:
            self._look_at_stop_file()
        given = [
            each for each in (self._by_signal, self._by_service, self._by_file, self._by_ranks) if each is not None
        ]
        if not given:
            return None
        earliest = min(given, key=lambda each: each.deadline)
        self._say_once(
            "notice", "preemption (%s): %.0f s are left", earliest.source, earliest.deadline - time.monotonic()
        )
        if self._held_back is not None:
            held_back, self._held_back = self._held_back, None
            _log.warning(
                "the handler that was there before raised %r: held back, training ends at its next edge", held_back
            )
        if not self.save_wanted:
            self._say_once("second", "a second signal: nothing more is saved, what is saved already is uploaded")
        return earliest

    def agreed(self) -> Notice | None:
        """The notice that all ranks act on, at the same edge; on a single rank what `notice` says.

        A collective while torch.distributed has several ranks, until there is a notice: call it at the same edges on every rank. The earliest
        deadline wins, `source` is the same text everywhere. With a process group that has no CPU backend (`nccl` alone) each call waits for the
        device; `init_process_group("cpu:gloo,cuda:nccl")` makes it free.
        """
        own = self.notice
        if self._by_ranks is not None or not ranks.can_agree():
            return self._by_ranks or own
        if not ranks.any_rank(own is not None):
            return None
        # Seconds that are left, since the clocks of two machines have nothing in common.
        left_s = math.inf if own is None else own.deadline - time.monotonic()
        rows = ranks.gather_rows([left_s, 0 if own is None else self._code(own.source), self._second])
        earliest_s, code, _ = min(rows)
        self._second_elsewhere = any(row[2] for row in rows)
        self._by_ranks = Notice(source=_source(int(code)), deadline=time.monotonic() + earliest_s)
        _ = self.notice  # for the log
        return self._by_ranks

    @property
    def save_wanted(self) -> bool:
        """Whether there is to be an emergency save: not after a second signal, here or (as of the agreement) on another rank. From any thread."""
        return not (self._second or self._second_elsewhere)

    def remaining_s(self) -> float:
        """Seconds until `margin_s` before the deadline, 0 when that is past; infinite without a notice. From any thread."""
        notice = self.notice
        return math.inf if notice is None else max(0.0, notice.deadline - self.margin_s - time.monotonic())

    def waiting(self) -> Waiting:
        """A context in which training waits and may leave at any moment without a loss: for the next batch of a loader.

        In it a watched signal raises `Preempted`, if this process decides alone (one rank, main thread); a `with` statement that is entered after
        a signal raises it at once. What torch has to say about dead DataLoader workers is raised here and nowhere else once a signal came.
        """
        return Waiting(self)

    def expect_dead_workers(self) -> None:
        """From now on, what torch has to say about dead DataLoader workers is raised in `waiting()` only. Done at a signal, and for good.

        A signal to the whole process group ends them too, and torch raises from its handler of SIGCHLD, be it in the middle of an optimizer step.
        The handler of the signal comes before that one: the signal reached this process before any worker could be gone.
        """
        if self._of_children is None and threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGCHLD)
            if callable(handler):
                self._of_children = handler
                signal.signal(signal.SIGCHLD, self._on_child)

    # --- sources ----------------------------------------------------------------------------------------------------------

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        """The handler. Runs between two bytecodes of the main thread, whatever that holds: no lock, no log, no collective, no save."""
        if os.getpid() != self._pid:
            # A fork that Python did not make: as if nobody had ever watched.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        first = self._by_signal is None
        if first:
            self._by_signal = Notice(source=self._sources[number], deadline=now + self.grace_s)
            self._counted = (number, now)
            self.expect_dead_workers()
        elif self._counted is None or number != self._counted[0] or now - self._counted[1] >= self.repeat_s:
            self._second = True
        previous = self._previous.get(number)
        if callable(previous) and previous is not signal.default_int_handler:
            try:
                previous(number, frame)
            except BaseException as error:  # SystemExit above all
                if self._second:
                    raise
                self._held_back = error
        if self._leave_wait:
            # Both, and here: raised while `Waiting.__enter__` runs, no `__exit__` follows.
            self._leave_wait = self._in_wait = False
            raise Preempted(self._by_signal)

    def _on_child(self, number: int, frame: FrameType | None) -> None:
        try:
            self._of_children(number, frame)
        except RuntimeError:
            if self._in_wait or os.getpid() != self._pid:
                raise

    def _on_service(self, source: str, left_s: float | None) -> None:
        """In the poller's thread."""
        notice = Notice(source=source, deadline=time.monotonic() + (self.grace_s if left_s is None else left_s))
        if self._by_service is None or notice.deadline < self._by_service.deadline:
            self._by_service = notice

    def _look_at_stop_file(self) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + _LOOK_S
        mark = self._stop_file_mark()
        if mark is None:
            self._file_before = None
        elif mark != self._file_before:
            self._by_file = Notice(source=STOP_FILE, deadline=now + self.grace_s)

    def _stop_file_mark(self) -> tuple[int, int] | None:
        """What changes when the file is made or touched; None while there is none, or it cannot be seen."""
        if self.stop_file is None:
            return None
        try:
            found = os.stat(self.stop_file)
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _put_back(self) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                # None: it was not set from Python, and Python cannot set it.
                signal.signal(number, signal.SIG_DFL if previous is None else previous)
        self._previous = {}

    def _forked(self) -> None:
        """In a child that Python forked: as if nothing had been installed."""
        self._installed = False
        self._poller = None
        with suppress(ValueError, OSError):
            self._put_back()

    def _code(self, source: str) -> int:
        return _CODES.get(source) or next(number for number, name in self._sources.items() if name == source)

    def _say_once(self, what: str, message: str, *facts: object) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning(message, *facts)


class Waiting:
    """See `Preemption.waiting`."""

    __slots__ = ("_preemption",)

    def __init__(self, preemption: Preemption) -> None:
        self._preemption = preemption

    def __enter__(self) -> None:
        preemption = self._preemption
        if threading.current_thread() is not threading.main_thread():
            return
        preemption._in_wait = True
        if not ranks.can_agree():
            # Set before the look: a signal in between raises by itself.
            preemption._leave_wait = True
            if preemption._by_signal is not None:
                preemption._leave_wait = preemption._in_wait = False
                raise Preempted(preemption._by_signal)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._preemption._leave_wait = self._preemption._in_wait = False


_INSTALLED: weakref.WeakSet[Preemption] = weakref.WeakSet()


def _in_forked_child() -> None:
    for preemption in list(_INSTALLED):
        preemption._forked()
    _INSTALLED.clear()


os.register_at_fork(after_in_child=_in_forked_child)


def _signal(value: int) -> signal.Signals:
    try:
        number = signal.Signals(value)
    except ValueError as error:
        raise ConfigError(f"Preemption: {value!r} is no signal", hint="use members of signal.Signals") from error
    if number in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        raise ConfigError(f"Preemption: {number.name} cannot be watched", hint="SIGTERM, SIGUSR1 and SIGUSR2 can")
    return number


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _names(notices: Sequence[str]) -> tuple[str, ...]:
    names = (notices,) if isinstance(notices, str) else tuple(notices)
    unknown = [name for name in names if name not in NOTICES]
    if unknown:
        raise ConfigError(f"Preemption: notices has {unknown[0]!r}", hint=f"known: {', '.join(NOTICES)}")
    return names


def _source(code: int) -> str:
    named = {number: name for name, number in _CODES.items()}
    return named.get(code) or signal.Signals(code).name.lower()
