"""The slots of one process: requests under way, and what a store that asks for less gets."""

from __future__ import annotations

import os
import threading

import pytest

from ckptmgr.backends.pace import Pace
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import ConfigError, ThrottledError, TransientBackendError
from ckptmgr.testing.crowd import DEADLINE_S, Crowd, PaceClock


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
    clock = PaceClock()
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
    clock = PaceClock()
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
    clock = PaceClock()
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
    clock = PaceClock()
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
    clock = PaceClock()
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
    clock = PaceClock()
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
