"""Notices of preemption: real signals, handlers that were there before, forks, the stop file, and ranks that agree."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.core.errors import ConfigError
from ckptmgr.training import preemption as module
from ckptmgr.training.preemption import Preempted, Preemption

DEADLINE_S = 90.0


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    """No test leaves a handler behind."""
    watched = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)
    before = {number: signal.getsignal(number) for number in watched}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def watch() -> Iterator[Callable[..., Preemption]]:
    """Makes preemptions that are installed, until the test ends."""
    made: list[Preemption] = []

    def make(**options: Any) -> Preemption:
        preemption = Preemption(**{"repeat_s": 0.0, **options})
        made.append(preemption)
        preemption.install()
        return preemption

    yield make
    for preemption in reversed(made):
        preemption.uninstall()


def send(number: int) -> None:
    """To this process; its handler has run when this returns."""
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "source"), [(signal.SIGTERM, "sigterm"), (signal.SIGUSR1, "sigusr1")])
def test_a_signal_becomes_a_notice(number: int, source: str, watch: Callable[..., Preemption]) -> None:
    """With the grace as its deadline; before it there is none."""
    preemption = watch(grace_s=100.0, margin_s=10.0)
    assert preemption.notice is None
    assert preemption.remaining_s() == math.inf
    before = time.monotonic()
    send(number)
    notice = preemption.agreed()
    assert notice is not None
    assert notice == preemption.notice
    assert notice.source == source
    assert before + 100 <= notice.deadline <= time.monotonic() + 100
    assert 80 < preemption.remaining_s() <= 90
    assert preemption.save_wanted


def test_nothing_remains_after_the_deadline(watch: Callable[..., Preemption], monkeypatch: pytest.MonkeyPatch) -> None:
    """Never less than zero, which a wait can take."""
    preemption = watch()
    send(signal.SIGTERM)
    late = time.monotonic() + 1000
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: late))
    assert preemption.remaining_s() == 0.0


def test_the_handler_is_silent_and_the_first_look_logs(
    watch: Callable[..., Preemption], caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that logs may wait for ever for a lock that the interrupted code holds."""
    preemption = watch()
    send(signal.SIGTERM)
    assert caplog.records == []
    for _ in range(3):
        assert preemption.notice is not None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "preemption (sigterm): 25 s are left"


def test_a_second_signal_gives_up_the_save(watch: Callable[..., Preemption], caplog: pytest.LogCaptureFixture) -> None:
    """And changes neither the source nor the deadline."""
    preemption = watch()
    send(signal.SIGTERM)
    first = preemption.notice
    assert preemption.save_wanted
    send(signal.SIGTERM)
    assert not preemption.save_wanted
    assert preemption.notice == first
    assert preemption.notice == first
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "preemption (sigterm)",
        "a second signal",
    ]


def test_a_signal_delivered_twice_is_one(watch: Callable[..., Preemption], monkeypatch: pytest.MonkeyPatch) -> None:
    """SLURM signals every process, and torchrun passes it on to its workers, a moment later; another signal is another one."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    preemption = watch(repeat_s=1.0)
    send(signal.SIGTERM)
    now[0] += 0.9
    send(signal.SIGTERM)
    assert preemption.save_wanted
    now[0] += 0.2
    send(signal.SIGTERM)
    assert not preemption.save_wanted
    other = watch(repeat_s=1.0)
    send(signal.SIGTERM)
    send(signal.SIGUSR1)
    assert not other.save_wanted


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None], ids=["default", "ignore", "ours"])
def test_uninstall_puts_back_what_was_there(before: Any) -> None:
    """For every signal; a second uninstall, or one without install, does nothing. The notice stays."""
    signal.signal(signal.SIGTERM, before)
    other = signal.getsignal(signal.SIGUSR1)
    preemption = Preemption()
    preemption.uninstall()
    preemption.install()
    preemption.install()
    assert signal.getsignal(signal.SIGTERM) == preemption._on_signal
    send(signal.SIGTERM)
    preemption.uninstall()
    preemption.uninstall()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGUSR1) is other
    assert preemption.notice is not None


def test_uninstall_leaves_a_handler_that_came_later() -> None:
    """Whoever took the signal over keeps it."""

    def later(*_: object) -> None: ...

    preemption = Preemption()
    preemption.install()
    signal.signal(signal.SIGTERM, later)
    preemption.uninstall()
    assert signal.getsignal(signal.SIGTERM) is later


def test_the_previous_handler_is_called(watch: Callable[..., Preemption]) -> None:
    """With the signal's number; each time."""
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    preemption = watch()
    send(signal.SIGTERM)
    send(signal.SIGTERM)
    assert seen == [signal.SIGTERM, signal.SIGTERM]
    assert preemption.notice is not None


def test_a_previous_handler_that_exits_is_held_back_once(
    watch: Callable[..., Preemption], caplog: pytest.LogCaptureFixture
) -> None:
    """It would leave in the middle of a step, without the save; at a second signal it has its way."""

    def leave(*_: object) -> None:
        raise SystemExit(9)

    signal.signal(signal.SIGTERM, leave)
    preemption = watch()
    send(signal.SIGTERM)
    assert preemption.notice is not None
    assert "raised SystemExit(9): held back" in caplog.text
    with pytest.raises(SystemExit) as ended:
        send(signal.SIGTERM)
    assert ended.value.code == 9
    assert not preemption.save_wanted


def test_another_thread_watches_no_signals(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Which is said; the stop file counts all the same, and nothing is changed at the end."""
    before = signal.getsignal(signal.SIGTERM)
    preemption = Preemption(stop_file=tmp_path / "stop")
    found: list[Any] = []

    def train() -> None:
        preemption.install()
        (tmp_path / "stop").touch()
        found.append(preemption.notice)
        preemption.uninstall()

    thread = threading.Thread(target=train, name="training")
    thread.start()
    thread.join(DEADLINE_S)
    assert signal.getsignal(signal.SIGTERM) is before
    assert "signals are not watched: training runs in the thread training" in caplog.text
    assert found[0].source == "stop_file"


# --- forks --------------------------------------------------------------------------------------------------------------------

FORK = """
import ctypes, json, os, signal, sys
from ckptmgr.training.preemption import Preemption
handled = []
if sys.argv[2] == "handler":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
preemption = Preemption()
preemption.install()
pid = os.fork() if sys.argv[1] == "python" else ctypes.CDLL(None).fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0 if preemption.notice is None else 99)
status = os.waitpid(pid, 0)[1]
print(json.dumps([os.WTERMSIG(status), os.WIFEXITED(status) and os.WEXITSTATUS(status), preemption.notice is None]))
"""


@pytest.mark.parametrize(
    ("fork", "before", "expected"),
    [
        ("python", "default", [signal.SIGTERM, False, True]),
        ("python", "handler", [0, 7, True]),
        ("libc", "default", [signal.SIGTERM, False, True]),
    ],
)
def test_a_forked_child_is_as_if_nobody_watched(fork: str, before: str, expected: list[Any]) -> None:
    """A worker that is terminated ends, by the default action or by the handler that it would have had; the parent has no notice of it."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, fork, before], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == expected


# --- the stop file ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds, which the test changes."""
    now = [1000.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_a_stop_file_is_looked_for_once_a_second(
    watch: Callable[..., Preemption], clock: list[float], tmp_path: Path
) -> None:
    """Its appearance is a notice with the usual grace."""
    preemption = watch(signals=(), stop_file=tmp_path / "stop", grace_s=50.0)
    assert preemption.notice is None
    (tmp_path / "stop").touch()
    clock[0] += 0.9
    assert preemption.notice is None
    clock[0] += 0.2
    notice = preemption.notice
    assert notice is not None
    assert (notice.source, notice.deadline) == ("stop_file", clock[0] + 50)
    (tmp_path / "stop").unlink()
    clock[0] += 2
    assert preemption.notice == notice


def test_a_stop_file_of_an_earlier_run_stops_nothing(
    watch: Callable[..., Preemption], clock: list[float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A job that restarts itself would never get on; touched, or made again, it counts."""
    stop = tmp_path / "stop"
    stop.touch()
    touched, again = (watch(signals=(), stop_file=stop) for _ in range(2))
    assert "was there before" in caplog.text
    clock[0] += 2
    assert touched.notice is again.notice is None
    os.utime(stop, ns=(1, 1))
    clock[0] += 2
    assert touched.notice is not None
    stop.unlink()
    third = watch(signals=(), stop_file=stop)
    stop.touch()
    clock[0] += 2
    assert third.notice is not None


def test_a_stop_file_that_cannot_be_looked_for_is_no_notice(
    watch: Callable[..., Preemption], clock: list[float], tmp_path: Path
) -> None:
    """A directory that is not there (yet), or is no directory."""
    (tmp_path / "file").touch()
    for path in (tmp_path / "absent" / "stop", tmp_path / "file" / "stop"):
        preemption = watch(signals=(), stop_file=path)
        clock[0] += 2
        assert preemption.notice is None


def test_the_earliest_deadline_counts(watch: Callable[..., Preemption], clock: list[float], tmp_path: Path) -> None:
    """A notice of two minutes, and then a signal that leaves 25 s: it is no second signal."""
    preemption = watch()
    preemption._on_service("ec2", 100.0)
    assert preemption.notice is not None
    assert preemption.notice.source == "ec2"
    send(signal.SIGTERM)
    assert preemption.notice.source == "sigterm"
    assert preemption.remaining_s() == 22.0
    assert preemption.save_wanted


# --- waiting ------------------------------------------------------------------------------------------------------------------


def test_a_wait_is_left_at_the_signal(watch: Callable[..., Preemption]) -> None:
    """Which nothing that catches an Exception can prevent; outside it, a signal raises nothing."""
    preemption = watch()
    with preemption.waiting():
        pass
    with pytest.raises(Preempted), preemption.waiting(), suppress(Exception):
        send(signal.SIGTERM)
    send(signal.SIGTERM)


def test_a_wait_after_the_signal_does_not_begin(watch: Callable[..., Preemption]) -> None:
    """The signal may have come a moment before."""
    preemption = watch()
    send(signal.SIGTERM)
    with pytest.raises(Preempted), preemption.waiting():
        pytest.fail("it began")
    send(signal.SIGTERM)


def test_a_wait_in_another_thread_is_not_left(watch: Callable[..., Preemption]) -> None:
    """The handler runs in the main thread, and would raise there."""
    preemption = watch()
    inside, signalled = threading.Event(), threading.Event()
    left: list[bool] = []

    def wait() -> None:
        with preemption.waiting():
            inside.set()
            left.append(signalled.wait(DEADLINE_S))

    thread = threading.Thread(target=wait)
    thread.start()
    assert inside.wait(DEADLINE_S)
    send(signal.SIGTERM)
    signalled.set()
    thread.join(DEADLINE_S)
    assert left == [True]


def test_dead_workers_are_reported_in_a_wait_only(watch: Callable[..., Preemption]) -> None:
    """torch raises from its handler of SIGCHLD, be it in an optimizer step; after a signal that would tear the state that is to be saved."""
    calls: list[int] = []

    def of_torch(number: int, frame: object) -> None:
        calls.append(number)
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.")

    signal.signal(signal.SIGCHLD, of_torch)
    preemption = watch()
    with pytest.raises(RuntimeError):
        send(signal.SIGCHLD)  # no notice: torch's business
    send(signal.SIGTERM)
    send(signal.SIGCHLD)
    preemption._in_wait = True  # with several ranks, a wait may begin after the signal
    with pytest.raises(RuntimeError):
        send(signal.SIGCHLD)
    preemption._in_wait = False
    preemption.uninstall()
    send(signal.SIGCHLD)
    assert len(calls) == 4


# --- several ranks ------------------------------------------------------------------------------------------------------------

RANK = """
import signal, time
from ckptmgr.training.preemption import Preemption
from ckptmgr.training import ranks
preemption = Preemption(grace_s=60.0 + 20 * rank, repeat_s=0.0, signals=[signal.SIGUSR2, signal.SIGTERM])
preemption.install()
alone = preemption.agreed()
join()
assert ranks.same_on_all_ranks(5) and not ranks.same_on_all_ranks(rank)
assert [ranks.any_rank(rank == 1), ranks.any_rank(False)] == [True, False]
waited = None
for edge in range(100):
    for number, signals in json.loads(sys.argv[1]).items():
        if edge == 3:
            [os.kill(os.getpid(), each) for each in signals if int(number) == rank]
    with preemption.waiting():  # never left: the other rank would wait for ever
        pass
    notice = preemption.agreed()
    if notice is not None:
        break
again = preemption.agreed()
left = notice.deadline - time.monotonic()
found = {"edge": edge, "source": notice.source, "left": left, "save": preemption.save_wanted, "same": again == notice,
         "alone": alone, "remaining": preemption.remaining_s()}
"""


def test_ranks_stop_at_the_same_edge(in_two_ranks: Callable[..., list[Any]]) -> None:
    """One gets the signal; both have the same source, about the same time left, and go on agreeing without asking again."""
    found = in_two_ranks(RANK, json.dumps({1: [signal.SIGTERM]}))
    assert [each["edge"] for each in found] == [3, 3]
    assert [each["source"] for each in found] == ["sigterm", "sigterm"]
    assert all(70 < each["left"] <= 80 and 67 < each["remaining"] <= 77 for each in found)
    assert all(each["save"] and each["same"] and each["alone"] is None for each in found)


def test_the_earliest_deadline_of_all_ranks_wins(in_two_ranks: Callable[..., list[Any]]) -> None:
    """And whether to save is the same everywhere, too."""
    found = in_two_ranks(RANK, json.dumps({0: [signal.SIGUSR2], 1: [signal.SIGTERM, signal.SIGTERM]}))
    assert [each["source"] for each in found] == ["sigusr2", "sigusr2"]
    assert all(50 < each["left"] <= 60 for each in found)
    assert [each["save"] for each in found] == [False, False]


# --- mistakes -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"grace_s": 0.0},
        {"grace_s": math.inf},
        {"margin_s": 25.0},
        {"margin_s": -1.0},
        {"poll_s": 0.0},
        {"exit_code": 0},
        {"exit_code": 256},
        {"signals": [signal.SIGKILL]},
        {"signals": [0]},
        {"notices": ["gcp"]},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any]) -> None:
    """When it is made."""
    with pytest.raises(ConfigError, match="Preemption"):
        Preemption(**options)
