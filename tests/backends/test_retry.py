"""When ckptmgr tries again, how long it waits, and when it stops."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.retry import INTERACTIVE, PATIENT, Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    ObjectExistsError,
    ObjectNotFoundError,
    ThrottledError,
    TransientBackendError,
)
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied, throttled, timed_out, transient


class Clock:
    """A clock that only sleeping moves. `waits` are the sleeps asked for."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.waits: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now += seconds

    def retrier(self, stop: threading.Event | None = None, **policy: float) -> Retrier:
        return Retrier(RetryPolicy(**policy), stop=stop, sleep=self.sleep, clock=lambda: self.now)  # type: ignore[arg-type]


def failing(times: int, make: Callable[[], Exception] = lambda: TransientBackendError("no")) -> Callable[[], str]:
    """A function that raises `times` times and then returns "done"; `.calls` counts."""

    def call() -> str:
        call.calls += 1  # type: ignore[attr-defined]
        if call.calls <= times:  # type: ignore[attr-defined]
            raise make()
        return "done"

    call.calls = 0  # type: ignore[attr-defined]
    return call


def test_transient_failures_are_outlived() -> None:
    """Three failures, then the result; nothing waits when nothing fails."""
    clock = Clock()
    call = failing(3)
    assert clock.retrier(attempts=4)("x", call) == "done"
    assert len(clock.waits) == 3
    assert clock.retrier()("x", failing(0)) == "done"
    assert len(clock.waits) == 3


def test_attempts_are_bounded() -> None:
    """The last error is raised with the number of tries and the time spent, also in its message."""
    clock = Clock()
    call = failing(99)
    with pytest.raises(TransientBackendError, match=r"gave up after 4 tries in \d") as caught:
        clock.retrier(attempts=4)("x", call)
    assert call.calls == 4  # type: ignore[attr-defined]
    assert caught.value.attempts == 4  # type: ignore[attr-defined]
    assert caught.value.elapsed_s == pytest.approx(sum(clock.waits))  # type: ignore[attr-defined]


def test_one_attempt_means_none_again() -> None:
    """A policy of one try passes the first error on without waiting."""
    clock = Clock()
    with pytest.raises(TransientBackendError, match=r"gave up after 1 try in"):
        clock.retrier(attempts=1)("x", failing(1))
    assert clock.waits == []


def test_waits_are_jittered_within_a_doubling_bound() -> None:
    """Wait k is uniform in [0, min(cap, base * 2**k)]: spread out, and not all the same for all ranks."""
    firsts = []
    for _ in range(200):
        clock = Clock()
        clock.retrier(attempts=7, base_s=1.0, cap_s=8.0, deadline_s=1000.0)("x", failing(6))
        for k, wait in enumerate(clock.waits):
            assert 0 <= wait <= min(8.0, 2.0**k)
        firsts.append(clock.waits[0])
    assert min(firsts) < 0.2
    assert max(firsts) > 0.8


def test_the_deadline_ends_it() -> None:
    """No try begins after the deadline, however many attempts are left, and the waits do not go beyond it."""
    clock = Clock()
    call = failing(10**6)
    with pytest.raises(TransientBackendError):
        clock.retrier(attempts=10**6, deadline_s=60.0, base_s=1.0, cap_s=20.0)("x", call)
    assert 3 < call.calls < 1000  # type: ignore[attr-defined]
    assert sum(clock.waits) <= 60.0 + 1e-9


def test_slow_failures_count_towards_the_deadline() -> None:
    """Time spent inside of tries counts: two tries of 40 s each are enough for a deadline of 60 s."""
    clock = Clock()

    def call() -> None:
        clock.now += 40.0
        raise BackendTimeoutError("no answer")

    with pytest.raises(BackendTimeoutError) as caught:
        clock.retrier(attempts=10, deadline_s=60.0, base_s=0.1)("x", call)
    assert caught.value.attempts == 2  # type: ignore[attr-defined]


def test_retry_after_is_honoured() -> None:
    """A store that asks for 7 seconds is left alone for at least 7 seconds."""
    clock = Clock()
    call = failing(2, lambda: ThrottledError("slow down", retry_after_s=7.0))
    clock.retrier(base_s=0.1, deadline_s=60.0)("x", call)
    assert all(wait >= 7.0 for wait in clock.waits)
    assert len(clock.waits) == 2


def test_a_retry_after_beyond_the_deadline_is_not_waited_for() -> None:
    """Coming back earlier than asked for would not help, and later than the deadline is too late; that is said."""
    clock = Clock()
    with pytest.raises(ThrottledError, match=r"gave up after 1 try .* asks for 61 s without requests") as caught:
        clock.retrier(deadline_s=60.0)("x", failing(1, lambda: ThrottledError("slow down", retry_after_s=61.0)))
    assert caught.value.hint == "repeat it then"
    assert clock.waits == []


@pytest.mark.parametrize("kind", [AccessDeniedError, ObjectNotFoundError, ObjectExistsError, ValueError])
def test_permanent_errors_pass_at_once(kind: type[Exception]) -> None:
    """Wrong credentials, a missing key or a bug are not tried again, not even after a transient failure."""
    clock = Clock()
    with pytest.raises(kind):
        clock.retrier()("x", failing(1, lambda: kind("no")))
    assert clock.waits == []
    errors = iter([TransientBackendError("once"), kind("no")])
    call = failing(9, lambda: next(errors))
    with pytest.raises(kind):
        clock.retrier()("x", call)
    assert call.calls == 2  # type: ignore[attr-defined]


def test_stop_interrupts_a_wait() -> None:
    """Setting the event ends a wait in another thread at once, with the last error."""
    stop, failed = threading.Event(), threading.Event()
    raised: list[Exception] = []

    def call() -> None:
        failed.set()
        raise TransientBackendError("no")

    def run() -> None:
        try:
            Retrier(RetryPolicy(base_s=10_000, cap_s=10_000, deadline_s=100_000), stop=stop)("x", call)
        except TransientBackendError as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert failed.wait(60)
    stop.set()
    thread.join(60)
    assert not thread.is_alive()
    assert len(raised) == 1


def test_nothing_is_tried_again_once_stopped() -> None:
    """After close(), a failing call fails once."""
    stop = threading.Event()
    stop.set()
    clock = Clock()
    call = failing(1)
    with pytest.raises(TransientBackendError):
        clock.retrier(stop=stop)("x", call)
    assert call.calls == 1  # type: ignore[attr-defined]


def test_an_exhausted_inner_retry_is_not_multiplied() -> None:
    """A part that was tried six times is not tried six times six times by the call around it."""
    clock = Clock()
    call = failing(10**6)
    inner, outer = clock.retrier(attempts=6, deadline_s=10**6), clock.retrier(attempts=6, deadline_s=10**6)
    with pytest.raises(TransientBackendError):
        outer("file", lambda: inner("part", call))
    assert call.calls == 6  # type: ignore[attr-defined]


def test_each_retry_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The log says what was tried, why it failed and when it is tried again; a success says nothing."""
    clock = Clock()
    with caplog.at_level(logging.INFO, logger="ckptmgr"):
        clock.retrier()("s3 pipe_file b/k", failing(2, lambda: TransientBackendError("InternalError")))
        clock.retrier()("s3 pipe_file b/k", failing(0))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("s3 pipe_file b/k: try 1 failed (InternalError); again in ")
    assert lines[1].startswith("s3 pipe_file b/k: try 2 failed")


def test_retries_are_counted(tmp_path: Path) -> None:
    """Further tries of all calls and threads together, and each one is told; a first try is none."""
    clock, told = Clock(), list[int]()
    retrier = Retrier(
        RetryPolicy(attempts=5), sleep=clock.sleep, clock=lambda: clock.now, on_retry=lambda: told.append(1)
    )
    retrier("x", failing(0))
    assert retrier.retries == 0
    threads = [threading.Thread(target=lambda: retrier("x", failing(3))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert retrier.retries == len(told) == 24
    with pytest.raises(TransientBackendError):
        retrier("x", failing(99))
    assert retrier.retries == 28
    backend = RetryingBackend(LocalBackend(), retrier)
    assert FaultyBackend(backend).retries == 28
    assert LocalBackend().retries == 0


def test_one_call_can_be_ended_alone() -> None:
    """An event of its own ends the waits of a call, within a fraction of a second; others go on."""
    ended, slept = threading.Event(), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            ended.set()

    retrier = Retrier(RetryPolicy(attempts=9, deadline_s=1e6), sleep=sleep)
    call = failing(99, lambda: ThrottledError("later", retry_after_s=3600.0))
    with pytest.raises(ThrottledError):
        retrier("x", call, ended=ended)
    assert max(slept) <= 0.2
    assert len(slept) == 3
    assert call.calls <= 2  # type: ignore[attr-defined]
    assert retrier("x", failing(1)) == "done"


@pytest.mark.parametrize("policy", [INTERACTIVE, PATIENT, RetryPolicy(attempts=2, deadline_s=1.5)])
def test_a_policy_crosses_to_another_process(policy: RetryPolicy) -> None:
    """It goes to the transfer process with the rest of its task."""
    assert pickle.loads(pickle.dumps(policy)) == policy


def test_the_patient_policy_outlives_a_bad_network() -> None:
    """With 30 % of requests failing, fewer than one upload request in 100,000 gives up."""
    assert 0.3**PATIENT.attempts < 1e-5
    assert PATIENT.deadline_s <= 15 * 60
    # A person is told within a minute.
    assert INTERACTIVE.deadline_s <= 60


# -- as a backend -------------------------------------------------------------------------------------------------


def _store(path: Path) -> tuple[RetryingBackend, FaultyBackend, Clock]:
    clock = Clock()
    faulty = FaultyBackend(LocalBackend())
    return RetryingBackend(faulty, clock.retrier(attempts=4)), faulty, clock


VERBS: dict[str, Callable[[RetryingBackend, Path], object]] = {
    "pipe_file": lambda store, path: store.pipe_file(f"{path}/new", b"1"),
    "put_file": lambda store, path: store.put_file(f"{path}/f", f"{path}/new"),
    "get_file": lambda store, path: store.get_file(f"{path}/f", f"{path}/got"),
    "cat_file": lambda store, path: store.cat_file(f"{path}/f"),
    "info": lambda store, path: store.info(f"{path}/f"),
    "ls": lambda store, path: store.ls(str(path)),
    "find": lambda store, path: store.find(str(path)),
    "rm_file": lambda store, path: store.rm_file(f"{path}/f"),
    "cp_file": lambda store, path: store.cp_file(f"{path}/f", f"{path}/new"),
    "stored_crc": lambda store, path: store.stored_crc(f"{path}/f"),
    "rmdir": lambda store, path: store.rmdir(f"{path}/none"),
}


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("error", [transient, throttled, timed_out])
def test_every_verb_is_retried(tmp_path: Path, verb: str, error: Callable[..., Exception]) -> None:
    """Each verb of the interface outlives two failures, whichever of the transient kind."""
    (tmp_path / "f").write_bytes(b"1")
    store, faulty, clock = _store(tmp_path)
    fault = faulty.add(StoreFault(verb=verb, times=2, error=error))  # type: ignore[arg-type]
    VERBS[verb](store, tmp_path)
    assert fault.hits == 2
    assert len(clock.waits) == 2


@pytest.mark.parametrize("verb", VERBS)
def test_no_verb_spins_on_a_refusal(tmp_path: Path, verb: str) -> None:
    """Denied access is asked for once."""
    (tmp_path / "f").write_bytes(b"1")
    store, faulty, _ = _store(tmp_path)
    fault = faulty.add(StoreFault(verb=verb, times=None, error=denied))
    with pytest.raises(AccessDeniedError):
        VERBS[verb](store, tmp_path)
    assert fault.hits == 1


def test_a_create_whose_answer_was_lost_is_refused_by_itself(tmp_path: Path) -> None:
    """I3: the retried create finds our own object; the caller is told "exists" and reads it back."""
    store, faulty, _ = _store(tmp_path)
    faulty.add(StoreFault(verb="pipe_file", when="after", error=timed_out))
    with pytest.raises(ObjectExistsError):
        store.pipe_file(f"{tmp_path}/manifest", b"mine", mode="create")
    assert store.cat_file(f"{tmp_path}/manifest") == b"mine"


def test_rm_files_of_many_is_repeated_until_all_are_gone(tmp_path: Path) -> None:
    """A batch that failed half-way is asked again, and what is gone already does not matter."""
    for name in "abc":
        (tmp_path / name).write_bytes(b"1")
    store, faulty, _ = _store(tmp_path)
    faulty.add(StoreFault(verb="rm_file", path="*/b", error=transient))
    store.rm_files([f"{tmp_path}/{name}" for name in "abc"])
    assert list(tmp_path.iterdir()) == []


def test_the_wrapper_is_what_it_wraps(tmp_path: Path) -> None:
    """Capabilities, protocol and the form of paths are the inner backend's."""
    store = _store(tmp_path)[0]
    assert store.capabilities == LocalBackend.capabilities
    assert store.protocol == LocalBackend.protocol
    assert store._strip_protocol(f"file://{tmp_path}/x/") == f"{tmp_path}/x"
