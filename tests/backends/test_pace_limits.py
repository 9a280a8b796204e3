"""The limits of one process: bytes per second, connections that trickle, and who shares them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from ckptmgr.backends.objectstore import ObjectStoreBackend
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.pace import TRICKLE_S, Pace, pace_for
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.retry import RetryingBackend
from ckptmgr.core.errors import BackendTimeoutError
from ckptmgr.testing.crowd import DEADLINE_S, Crowd, PaceClock

# --- bandwidth ------------------------------------------------------------------------------------------------------------


def test_the_cap_holds_over_any_time() -> None:
    """Whatever the blocks: in all of it, and in every part of it, no more than the cap and a tenth of a second of it."""
    clock = PaceClock()
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
    clock = PaceClock()
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


def trickle(clock: PaceClock, own_bytes_s: float, others_bytes_s: float, max_bytes_s: float | None = None) -> float:
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
    assert trickle(PaceClock(), 100, 1e6) == pytest.approx(TRICKLE_S)
    assert trickle(PaceClock(), 0, 1e6) == pytest.approx(TRICKLE_S)


@pytest.mark.parametrize(
    ("own", "others"), [(100, 100), (100, 900), (2000, 1e9), (0, 0)], ids=["all", "nearly", "slow", "none"]
)
def test_a_slow_link_is_not_taken_for_a_bad_connection(own: float, others: float) -> None:
    """Row 23: where all are slow, a new connection would not be faster; and 2 kB/s is slow, not dead."""
    assert trickle(PaceClock(), own, others) >= 600


@pytest.mark.parametrize(("max_bytes_s", "is_cut"), [(None, True), (500.0, False)])
def test_one_alone_that_trickles(max_bytes_s: float | None, is_cut: bool) -> None:
    """There is nobody to compare it with, and little to lose; unless it is slow because it was told to be."""
    clock = PaceClock()
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
    clock = PaceClock()
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
