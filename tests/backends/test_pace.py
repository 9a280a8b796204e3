"""The limits of one process: requests under way, bytes per second, and what a store that asks for less gets."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ckptmgr.backends.objectstore import ObjectStoreBackend
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.pace import CONCURRENCY, TRICKLE_S, Pace, pace_for
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.errors import BackendTimeoutError, ConfigError, ThrottledError, TransientBackendError

DEADLINE_S = 30.0


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def pace(self, concurrency: int = CONCURRENCY, max_bytes_s: float | None = None) -> Pace:
        return Pace(concurrency, max_bytes_s, lambda: self.now, self.sleep)


class Crowd:
    """Threads that each hold one slot until they are let go; `inside` are the numbers of those that have one, in order."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self.inside: list[int] = []
        self.changed = threading.Condition()
        self.leave: list[threading.Event] = []
        self.threads: list[threading.Thread] = []

    def add(self) -> None:
        """One more, behind those that wait already."""
        number, leave = len(self.threads), threading.Event()
        self.leave.append(leave)

        def hold() -> None:
            with self.pace.slot():
                with self.changed:
                    self.inside.append(number)
                    self.changed.notify_all()
                assert leave.wait(DEADLINE_S)

        self.threads.append(threading.Thread(target=hold, daemon=True))
        self.threads[-1].start()

    def wait_for(self, count: int) -> None:
        """Wait until so many have come in, in all."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.inside) >= count, DEADLINE_S), self.inside

    def wait_for_waiting(self, count: int) -> None:
        """Wait until so many stand in line."""
        pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
        while len(self.pace._waiting) != count:
            assert time.monotonic() < deadline
            pause.wait(0.001)

    def end(self) -> None:
        """Let everybody go."""
        for leave in self.leave:
            leave.set()
        for thread in self.threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def succeed(pace: Pace, times: int) -> None:
    """So many requests, one after the other."""
    for _ in range(times):
        with pace.slot():
            pass


# --- slots ----------------------------------------------------------------------------------------------------------------


def test_no_more_than_the_limit_and_in_the_order_of_asking() -> None:
    """Of five, two get in; each one that leaves lets in the one that has waited longest."""
    crowd = Crowd(Pace(2))
    for number in range(5):
        crowd.add()
        crowd.wait_for(min(number + 1, 2))
        crowd.wait_for_waiting(max(0, number - 1))
    assert crowd.pace.used == 2
    for leaving in range(3):
        crowd.leave[crowd.inside[leaving]].set()
        crowd.wait_for(leaving + 3)
        assert crowd.pace.used == 2
    assert crowd.inside[2:] == [2, 3, 4]
    crowd.end()
    assert crowd.pace.used == 0


def test_slots_that_come_free_together_are_all_taken() -> None:
    """Whoever wakes before its turn is woken again: eight that leave at once let in eight."""
    for _ in range(10):
        crowd = Crowd(Pace(8))
        for number in range(16):
            crowd.add()
            crowd.wait_for(min(number + 1, 8))
            crowd.wait_for_waiting(max(0, number - 7))
        with crowd.pace._turn:
            for leave in crowd.leave[:8]:
                leave.set()
        crowd.wait_for(16)
        crowd.end()


def test_a_slot_comes_back_after_an_error() -> None:
    """Also when a request is interrupted."""
    pace = Pace(1)
    for error in (TransientBackendError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), pace.slot():
            raise error
    assert pace.used == 0
    succeed(pace, 1)


def test_a_wait_ends_with_its_event() -> None:
    """Whoever is told to stop does not wait for others, and does not keep those behind it from their turn."""
    pace, stop = Pace(1), threading.Event()
    crowd = Crowd(pace)
    crowd.add()
    crowd.wait_for(1)
    raised: list[TransientBackendError] = []

    def wait() -> None:
        try:
            with pace.slot(threading.Event(), stop):
                crowd.inside.append(-1)
        except TransientBackendError as error:
            raised.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    crowd.wait_for_waiting(1)
    crowd.add()
    crowd.wait_for_waiting(2)
    stop.set()
    waiter.join(DEADLINE_S)
    assert len(raised) == 1
    assert crowd.inside == [0]
    crowd.leave[0].set()
    crowd.wait_for(2)
    crowd.end()


def test_a_free_slot_is_given_also_when_told_to_stop() -> None:
    """Stopping ends waits; what need not wait is done."""
    stop = threading.Event()
    stop.set()
    with Pace(1).slot(stop):
        pass


def test_limits_that_make_no_sense_are_refused() -> None:
    """Nothing could ever move."""
    for concurrency, max_bytes_s in ((0, None), (-1, None), (1, 0.0), (1, float("nan"))):
        with pytest.raises(ConfigError):
            Pace(concurrency, max_bytes_s)


def test_a_forked_child_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The threads that held slots, and the lock one of them held, are not in the child: it neither waits for them nor has their slots."""
    pace = Pace(1)
    with pace.slot():
        monkeypatch.setattr(os, "getpid", lambda: -1)
        with pace._turn:
            done = threading.Thread(target=succeed, args=(pace, 1), daemon=True)
            done.start()
            done.join(DEADLINE_S)
            assert not done.is_alive()
    assert pace.used == 0


# --- stores that ask for less ---------------------------------------------------------------------------------------------


def test_a_store_that_asks_for_less_gets_half_once_a_second() -> None:
    """16, 8, 4, 2, 1, 1; a burst of refusals is one."""
    clock = Clock()
    pace = clock.pace(16)
    for expected in (8, 4, 2, 1, 1):
        for _ in range(20):
            pace.slowed()
        assert pace.limit == expected
        clock.now += 1.0


def test_half_of_what_was_under_way() -> None:
    """16 allowed and 6 in use: 3 from now on; 8 would change nothing."""
    pace = Pace(16)
    crowd = Crowd(pace)
    for number in range(6):
        crowd.add()
        crowd.wait_for(number + 1)
    pace.slowed()
    assert pace.limit == 3
    crowd.add()
    crowd.wait_for_waiting(1)
    for leaving in range(3):
        crowd.leave[leaving].set()
        crowd.threads[leaving].join(DEADLINE_S)
    assert (pace.used, len(crowd.inside)) == (3, 6)
    crowd.leave[3].set()
    crowd.wait_for(7)
    crowd.end()


def test_the_first_to_be_refused_may_be_alone() -> None:
    """8 are guessed when one of 16 was under way; the next refusal, in the same burst, finds four: 2."""
    clock = Clock()
    pace = clock.pace(16)
    with pace.slot():
        pace.slowed()
    assert pace.limit == 8
    crowd = Crowd(pace)
    for number in range(4):
        crowd.add()
        crowd.wait_for(number + 1)
    pace.slowed()
    pace.slowed()
    assert pace.limit == 2
    crowd.end()


def test_it_is_trusted_again_step_by_step() -> None:
    """One more for each round of successes, up to what was configured; failures are no successes."""
    clock = Clock()
    pace = clock.pace(5)
    pace.slowed()
    clock.now += 1.0
    pace.slowed()
    assert pace.limit == 1
    for before in (1, 2, 3, 4):
        with pytest.raises(TransientBackendError), pace.slot():
            raise TransientBackendError("no")
        succeed(pace, before - 1)
        assert pace.limit == before
        succeed(pace, 1)
        assert pace.limit == before + 1
    succeed(pace, 100)
    assert pace.limit == 5


def test_a_refusal_in_between_begins_the_round_anew() -> None:
    """Successes from before it do not count."""
    clock = Clock()
    pace = clock.pace(8)
    pace.slowed()
    succeed(pace, 3)
    pace.slowed()
    assert pace.limit == 4
    succeed(pace, 3)
    assert pace.limit == 4
    succeed(pace, 1)
    assert pace.limit == 5


def test_the_retrier_tells_of_it_once() -> None:
    """Row 13: each refusal of each try counts, once, however many retriers it passes; other failures do not."""
    clock = Clock()
    pace = clock.pace(16)
    told: list[float] = []
    slowed = pace.slowed

    def note() -> None:
        told.append(clock.now)
        slowed()

    pace.slowed = note  # type: ignore[method-assign]
    retrier = Retrier(RetryPolicy(attempts=3, base_s=4.0), pace=pace, sleep=clock.sleep, clock=lambda: clock.now)

    def refused() -> None:
        clock.now += 1.0
        raise ThrottledError("slow down")

    with pytest.raises(ThrottledError):
        retrier("whole", lambda: retrier("part", refused))
    assert len(told) == 3
    assert pace.limit == 2

    def failed() -> None:
        raise TransientBackendError("reset")

    with pytest.raises(TransientBackendError):
        retrier("x", failed)
    assert len(told) == 3
    assert Retrier(RetryPolicy(attempts=1), pace=pace)("x", lambda: "ok") == "ok"


def test_a_try_takes_a_slot_and_a_wait_between_tries_none() -> None:
    """With one slot: it is free while the retrier waits, so that another request may go."""
    pace, used = Pace(1), list[tuple[str, int]]()

    def sleep(seconds: float) -> None:
        used.append(("wait", pace.used))
        succeed(pace, 1)

    def call() -> None:
        used.append(("try", pace.used))
        if len(used) == 1:
            raise TransientBackendError("no")

    Retrier(RetryPolicy(), pace=pace, sleep=sleep)("x", call, slot=True)
    assert used == [("try", 1), ("wait", 0), ("try", 1)]


def test_waiting_for_a_slot_is_no_failing() -> None:
    """An hour in line does not use up the time for tries; an hour of failing does."""
    clock = Clock()
    pace = Pace(1)
    acquire = pace._acquire

    def in_line(ends: tuple[threading.Event, ...]) -> int:
        clock.now += 3600.0
        return acquire(ends)

    pace._acquire = in_line  # type: ignore[method-assign]
    tries = 0

    def call() -> str:
        nonlocal tries
        tries += 1
        clock.now += 25.0
        if tries <= 2:
            raise TransientBackendError("no")
        return "done"

    retrier = Retrier(RetryPolicy(deadline_s=60.0), pace=pace, sleep=clock.sleep, clock=lambda: clock.now)
    assert retrier("x", call, slot=True) == "done"

    def slow() -> None:
        clock.now += 3600.0
        raise TransientBackendError("no")

    with pytest.raises(TransientBackendError, match=r"gave up after 1 try in 3600\.0 s"):
        retrier("x", slow, slot=True)


@pytest.mark.parametrize("which", ["stop", "ended"])
def test_a_retrier_that_is_stopped_does_not_stand_in_line(which: str) -> None:
    """Closing need not wait for others' requests."""
    events = {"stop": threading.Event(), "ended": threading.Event()}
    pace = Pace(1)
    retrier = Retrier(RetryPolicy(attempts=99), pace=pace, stop=events["stop"])
    crowd = Crowd(pace)
    crowd.add()
    crowd.wait_for(1)
    raised: list[TransientBackendError] = []

    def run() -> None:
        try:
            retrier("x", lambda: None, ended=events["ended"], slot=True)
        except TransientBackendError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    crowd.wait_for_waiting(1)
    events[which].set()
    thread.join(DEADLINE_S)
    assert "waiting" in str(raised[0])
    crowd.end()


# --- bandwidth ------------------------------------------------------------------------------------------------------------


def test_the_cap_holds_over_any_time() -> None:
    """Whatever the blocks: in all of it, and in every part of it, no more than the cap and a tenth of a second of it."""
    clock = Clock()
    pace = clock.pace(max_bytes_s=1e6)
    seed = random.randrange(1 << 32)
    numbers = random.Random(seed)
    sent = [(clock.now, 0)]
    for _ in range(500):
        count = numbers.choice([1, 1000, 65536, 1 << 20])
        pace.moved(count)
        sent.append((clock.now, sent[-1][1] + count))
        if numbers.random() < 0.1:
            clock.now += numbers.random() * 5
    for _ in range(200):
        (since, before), (until, after) = sorted(numbers.sample(sent, 2))
        # A block is accounted for as a whole when it has gone.
        assert after - before <= 1e6 * (until - since + 0.1) + (1 << 20), f"seed {seed}"


def test_the_cap_is_used() -> None:
    """Blocks without a pause in between go at the cap, not below it."""
    clock = Clock()
    pace = clock.pace(max_bytes_s=1e6)
    before = clock.now
    for _ in range(100):
        pace.moved(100_000)
    assert clock.now - before == pytest.approx(10.0, abs=0.2)


def test_all_threads_share_the_cap() -> None:
    """Four threads with 100 kB each at 1 MB/s need 0.4 s, on a real clock."""
    pace = Pace(max_bytes_s=1e6)
    started = time.monotonic()

    def send() -> None:
        for _ in range(10):
            pace.moved(10_000)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert time.monotonic() - started >= 0.25


def test_a_sleep_for_the_cap_ends_with_its_event() -> None:
    """At one byte per second a megabyte would take days."""
    pace, stop = Pace(max_bytes_s=1.0), threading.Event()
    thread = threading.Thread(target=pace.moved, args=(1 << 20, stop))
    thread.start()
    stop.set()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_no_cap_no_sleep() -> None:
    """Without one nothing waits, and blocks are as large as is cheap."""

    def never(seconds: float) -> None:
        raise AssertionError

    pace = Pace(sleep=never)
    pace.moved(1 << 40)
    assert pace.block_bytes == 1 << 20


@pytest.mark.parametrize(("max_bytes_s", "most"), [(1e3, 16 << 10), (1e6, 100_000), (1e9, 1 << 20)])
def test_blocks_fit_the_cap(max_bytes_s: float, most: int) -> None:
    """A tenth of a second of it, so that no connection is silent for long; not so small that calls are all there is."""
    assert Pace(max_bytes_s=max_bytes_s).block_bytes == most


# --- trickling ------------------------------------------------------------------------------------------------------------


def trickle(clock: Clock, own_bytes_s: float, others_bytes_s: float, max_bytes_s: float | None = None) -> float:
    """How long a request at that rate lasts beside three others; 600 s if it is not cut."""
    pace = clock.pace(max_bytes_s=max_bytes_s)
    crowd = Crowd(pace)
    for number in range(4):
        crowd.add()
        crowd.wait_for(number + 1)
    watch, others = pace.watch(), [pace.watch() for _ in range(3)]
    started = clock.now
    try:
        while clock.now - started < 600:
            clock.now += 10
            for other in others:
                other.moved(int(others_bytes_s * 10))
            watch.moved(int(own_bytes_s * 10))
    except BackendTimeoutError:
        pass
    finally:
        crowd.end()
    return clock.now - started


def test_a_request_that_trickles_beside_others_is_cut() -> None:
    """Row 22: 100 B/s for two minutes, while others have 1 MB/s: silence it is not, and yet it would take for ever."""
    assert trickle(Clock(), 100, 1e6) == pytest.approx(TRICKLE_S)
    assert trickle(Clock(), 0, 1e6) == pytest.approx(TRICKLE_S)


@pytest.mark.parametrize(
    ("own", "others"), [(100, 100), (100, 900), (2000, 1e9), (0, 0)], ids=["all", "nearly", "slow", "none"]
)
def test_a_slow_link_is_not_taken_for_a_bad_connection(own: float, others: float) -> None:
    """Row 23: where all are slow, a new connection would not be faster; and 2 kB/s is slow, not dead."""
    assert trickle(Clock(), own, others) >= 600


@pytest.mark.parametrize(("max_bytes_s", "is_cut"), [(None, True), (500.0, False)])
def test_one_alone_that_trickles(max_bytes_s: float | None, is_cut: bool) -> None:
    """There is nobody to compare it with, and little to lose; unless it is slow because it was told to be."""
    clock = Clock()
    pace = clock.pace(max_bytes_s=max_bytes_s)

    def go_on() -> None:
        with pace.slot():
            watch = pace.watch()
            while clock.now < 2000:
                watch.moved(2000)
                clock.now += max(0.0, 10.0 - 2000 / max_bytes_s) if max_bytes_s else 10.0

    if not is_cut:
        go_on()
        return
    with pytest.raises(BackendTimeoutError, match=r"2\d\d bytes per second for 120 s"):
        go_on()


def test_it_may_slow_down_later() -> None:
    """A request that was fast at first is judged by the last minutes, not by its mean."""
    clock = Clock()
    pace = clock.pace()
    watch, other = pace.watch(), pace.watch()
    watch.moved(1 << 30)

    def go_on() -> None:
        with pace.slot(), pace.slot():
            while clock.now < 1600:
                clock.now += 10
                other.moved(1 << 20)
                watch.moved(10)

    with pytest.raises(BackendTimeoutError, match="trickles"):
        go_on()
    assert clock.now - 1000 <= 2 * TRICKLE_S + 10


# --- one per process ------------------------------------------------------------------------------------------------------


def test_equal_limits_share_one_pace() -> None:
    """Two stores opened with equal options together keep to them."""

    def options(concurrency: int, max_bytes_s: float | None) -> SimpleNamespace:
        return SimpleNamespace(concurrency=concurrency, max_bytes_s=max_bytes_s)

    one = pace_for(options(7, 123456.0))
    assert (one.concurrency, one.max_bytes_s) == (7, 123456.0)
    assert pace_for(options(7, 123456.0)) is one
    others: list[Callable[[], Pace]] = [
        lambda: pace_for(options(8, 123456.0)),
        lambda: pace_for(options(7, None)),
    ]
    assert all(make() is not one for make in others)


def test_stores_opened_alike_share_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stores of one process, of whatever kind, opened by the same variables, keep to one concurrency and one bandwidth."""
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "3")
    monkeypatch.setenv("CKPTMGR_BANDWIDTH", "10M")

    def pace_of(url: str, **options: object) -> Pace:
        backend, _ = open_store(url, **options)  # type: ignore[arg-type]
        assert isinstance(backend, RetryingBackend)
        assert isinstance(backend.inner, ObjectStoreBackend)
        assert backend.inner._retrier is backend.retrier
        return backend.retrier.pace

    one = pace_of("s3://bucket/a")
    assert (one.concurrency, one.max_bytes_s) == (3, 10 << 20)
    assert pace_of("s3://other/b") is one
    assert pace_of("oss://bucket/c") is one
    assert pace_of("s3://bucket/a", options=StoreOptions(concurrency=4)) is not one
