"""The one place that decides whether to try again.

Only a `TransientBackendError` is tried again; a permanent one passes at once, so that wrong credentials do not spin. Waits are
exponential with full jitter, so that a thousand ranks turned away together do not come back together, and at least what the store asked for.
Where it asked for fewer requests, the process's `Pace` hears of it.
Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ckptmgr.backends.base import Backend
from ckptmgr.backends.pace import Pace
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.errors import ThrottledError, TransientBackendError
from ckptmgr.core.layout import check_unicode

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")
log = logging.getLogger("ckptmgr.backends")

# Not the global generator (nor tenacity's waits, which use it): a retry beside a training would move the training's random numbers, and
# ranks that seeded alike would come back together.
_JITTER = random.Random()
# When somebody who watches should hear that it is not just slow.
_SAY_S = 5.0
_SLICE_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """When to stop trying, and how long to wait in between.

    The k-th wait is uniform in [0, min(cap_s, base_s * 2**k)], and at least the store's Retry-After. No try starts later than
    `deadline_s` after the first; a try that is under way is not interrupted. Waits for a slot of the `Pace` do not count.

    Attributes:
        attempts: tries in all, the first included; 1 means none again.
        deadline_s: seconds since the beginning of the first try.
        base_s: the upper end of the first wait, in seconds.
        cap_s: the upper end of every wait, in seconds.
    """

    attempts: int = 6
    deadline_s: float = 60.0
    base_s: float = 0.2
    cap_s: float = 10.0


#: For a person or a script that waits for the answer. A store that refuses connections or answers 5xx is given up after at most 6.2 s; one that
#: accepts them and stays silent after about a minute, two of the clients' own limits (10 s to connect, 30 s without a byte); nothing takes longer than
#: `deadline_s` plus that. The first request that is given up ends a command.
INTERACTIVE = RetryPolicy()
#: For uploads nobody watches: 30 % failing requests leave less than 1 in 100,000 that give up.
PATIENT = RetryPolicy(attempts=10, deadline_s=600.0, base_s=0.5, cap_s=30.0)


class Retrier:
    """Calls a function until it succeeds, fails for good, or its policy is used up. Safe from any thread.

    Args:
        policy: how often, how long.
        pace: hears of a store that asks for fewer requests; one of its own, without a cap, if not given.
        stop: when set, a wait ends at once and the last error is raised: `close()` need not wait for a dead store.
        sleep: replaces the wait (tests).
        clock: seconds, monotonic (tests).
        on_retry: called before each further try, by the thread that makes it; must be quick, and not raise.

    Attributes:
        pace: see above; for whoever moves bytes between tries of this retrier.
        stop: see above.
        retries: further tries so far, of all calls together.
    """

    def __init__(
        self,
        policy: RetryPolicy = INTERACTIVE,
        *,
        pace: Pace | None = None,
        stop: threading.Event | None = None,
        sleep: Callable[[float], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_retry: Callable[[], object] | None = None,
    ) -> None:
        self.policy = policy
        self.pace = pace or Pace()
        self.stop = stop or threading.Event()
        self.retries = 0
        self._sleep = sleep or self.stop.wait
        self._clock = clock
        self._on_retry = on_retry
        self._counting = threading.Lock()

    def __call__(
        self, what: str, call: Callable[[], T], *, ended: threading.Event | None = None, slot: bool = False
    ) -> T:
        """The result of `call`; `what` names it in the log.

        Args:
            ended: as `stop`, for this call alone.
            slot: `call` is a data request: each try takes a slot of the pace, which is free again between the tries.

        Raises:
            TransientBackendError: the last one, with `attempts` and `elapsed_s`; it is not retried by an outer retrier.
        """
        tries = _Tries(self, call, ended, slot)
        try:
            return tries.make()
        except TransientBackendError as error:
            if hasattr(error, "attempts"):
                # An inner retrier (a part of a multipart upload) has used up the policy already.
                raise
            return self._again(what, tries, error, ended)

    @contextmanager
    def slot(self, ended: threading.Event | None = None) -> Iterator[None]:
        """A slot of the pace, for a data request that is not a `call` of this retrier; the wait for it ends with `stop` or `ended`."""
        with self.pace.slot(*self._ends(ended)):
            yield

    def _ends(self, ended: threading.Event | None) -> tuple[threading.Event, ...]:
        return (self.stop,) if ended is None else (self.stop, ended)

    def _again(self, what: str, tries: _Tries[T], first: TransientBackendError, ended: threading.Event | None) -> T:
        import tenacity  # 40 ms: only needed when something failed

        pending = [first]

        def attempt() -> T:
            # The failed first try takes part in the counting without being made twice.
            if pending:
                raise pending.pop()
            self._count()
            return tries.make()

        def used_up(state: RetryCallState) -> bool:
            spent = tries.spent_s
            asked = _asked_for(state)
            return (
                self.stop.is_set()
                or (ended is not None and ended.is_set())
                or state.attempt_number >= self.policy.attempts
                or spent >= self.policy.deadline_s
                or spent + asked > self.policy.deadline_s
            )

        def wait(state: RetryCallState) -> float:
            left = max(0.0, self.policy.deadline_s - tries.spent_s)
            upper = min(self.policy.cap_s, self.policy.base_s * 2.0 ** min(state.attempt_number - 1, 64))
            return min(max(_JITTER.uniform(0.0, upper), _asked_for(state)), left)

        said: list[str] = []

        def log_retry(state: RetryCallState) -> None:
            wait_s = state.next_action.sleep if state.next_action else 0.0
            log.info("%s: try %d failed (%s); again in %.1f s", what, state.attempt_number, _error_of(state), wait_s)
            spent = tries.spent_s
            if spent >= _SAY_S and not said:
                said.append(what)
                most_s = self.policy.deadline_s
                log.warning("failing for %.0f s: %s; trying for %.0f s at most", spent, _error_of(state), most_s)

        def sleep(seconds: float) -> None:
            until = self._clock() + seconds
            # In slices where a second event may end it.
            while ended is not None and seconds > _SLICE_S and not (ended.is_set() or self.stop.is_set()):
                self._sleep(_SLICE_S)
                seconds = min(seconds - _SLICE_S, until - self._clock())
            if ended is None or not ended.is_set():
                self._sleep(max(0.0, seconds))

        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=used_up,
            wait=wait,
            before_sleep=log_retry,
            sleep=sleep,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except TransientBackendError as error:
            if not hasattr(error, "attempts"):
                count = int(retrying.statistics["attempt_number"])
                elapsed_s = tries.spent_s
                error.__dict__.update(attempts=count, elapsed_s=elapsed_s)
                asked_s = error.retry_after_s or 0.0
                why = ""
                if count < self.policy.attempts and elapsed_s + asked_s > self.policy.deadline_s > elapsed_s:
                    why = f": the store asks for {asked_s:.0f} s without requests, more than it is waited for"
                    error.hint = error.hint or "repeat it then"
                error.message += (
                    f" (gave up after {count} {'try' if count == 1 else 'tries'} in {elapsed_s:.1f} s{why})"
                )
            raise

    def _count(self) -> None:
        with self._counting:
            self.retries += 1
        if self._on_retry is not None:
            self._on_retry()


class _Tries(Generic[T]):
    """The tries of one call, and the time that they and the waits between them took."""

    def __init__(self, retrier: Retrier, call: Callable[[], T], ended: threading.Event | None, slot: bool) -> None:
        self._retrier = retrier
        self._call = call
        self._ended = ended
        self._slot = slot
        self._started = retrier._clock()

    @property
    def spent_s(self) -> float:
        """Seconds since the first try began, without the waits for a slot."""
        return self._retrier._clock() - self._started

    def make(self) -> T:
        """One try."""
        try:
            return self._in_slot() if self._slot else self._call()
        except ThrottledError as error:
            # Once: an inner retrier has told it already.
            if not hasattr(error, "attempts"):
                self._retrier.pace.slowed()
            raise

    def _in_slot(self) -> T:
        asked = self._retrier._clock()
        with self._retrier.slot(self._ended):
            self._started += self._retrier._clock() - asked
            return self._call()


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, TransientBackendError) and not hasattr(error, "attempts")


def _error_of(state: RetryCallState) -> BaseException | None:
    return state.outcome.exception() if state.outcome is not None else None


def _asked_for(state: RetryCallState) -> float:
    """Seconds the store asked to be left alone; 0 when it did not say."""
    return getattr(_error_of(state), "retry_after_s", None) or 0.0


class RetryingBackend(WrappedBackend):
    """Tries transient failures of `inner` again; everything else is `inner`.

    A create-only write whose answer was lost has perhaps been made. Tried again, it is then refused by our own first try and
    `ObjectExistsError` is raised: the caller settles whose object it is by reading it back (I3). This is not hidden here,
    because only the caller knows what distinguishes its own bytes.
    """

    def __init__(self, inner: Backend, retrier: Retrier | None = None) -> None:
        super().__init__(inner)
        self.retrier = retrier or Retrier()

    @property
    def unretried(self) -> Backend:
        return self.inner

    @property
    def retries(self) -> int:
        return self.retrier.retries

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        def checked() -> T:
            # Within the tries: what it can do may be known only after a source of credentials was asked, which fails like a store.
            if not self.capabilities.is_local:
                check_unicode(path)
            return call()

        return self.retrier(f"{self.kind} {verb} {path}", checked)
