"""The failure budget: said when it is used up, again only after a while, and whole again after a commit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.transfer.alarm import Alarm, FailureBudget


def test_a_few_failures_are_no_alarm(clock: Any) -> None:
    alarm = Alarm(FailureBudget(failures=3), clock)
    alarm.saved()
    alarm.failed(2)
    clock.now += 3599
    assert alarm.check() is None
    assert alarm.exceeded is None


def test_so_many_failures_in_a_row_are(clock: Any) -> None:
    """With the facts: how many, for how long, why."""
    alarm = Alarm(FailureBudget(failures=3), clock)
    alarm.saved()
    clock.now += 100
    alarm.failed(2, error="403 AccessDenied")
    alarm.failed()
    said = alarm.check()
    assert said == (
        "3 uploads in a row have failed and for 1 min 40 s nothing that was saved has become durable: 403 AccessDenied"
    )


def test_a_commit_makes_the_budget_whole(clock: Any) -> None:
    alarm = Alarm(FailureBudget(failures=2, without_durable_s=50), clock)
    alarm.saved()
    alarm.failed()
    clock.now += 49
    alarm.committed()
    alarm.failed()
    clock.now += 1000
    assert alarm.check() is None
    alarm.failed()
    assert alarm.check() == "2 uploads in a row have failed"


def test_time_counts_from_the_first_save_that_waits(clock: Any) -> None:
    """Not from the start: before the first save nothing can be late."""
    alarm = Alarm(FailureBudget(without_durable_s=60), clock)
    clock.now += 10_000
    assert alarm.check() is None
    alarm.saved()
    clock.now += 40
    alarm.saved()
    assert alarm.check() is None
    clock.now += 20
    assert alarm.check() == "for 1 min nothing that was saved has become durable"


def stem(step: int) -> Stem:
    return Stem(1, step, step, "0123abcd")


def test_with_a_newer_one_waiting_time_counts_from_the_commit(clock: Any) -> None:
    """An older save became durable: that is something, and the newest has its own time."""
    alarm = Alarm(FailureBudget(without_durable_s=60), clock)
    alarm.saved(stem(1))
    alarm.saved(stem(2))
    clock.now += 59
    alarm.committed(stem(1))
    clock.now += 59
    assert alarm.check() is None
    clock.now += 1
    assert alarm.check() == "for 1 min nothing that was saved has become durable"


def test_after_the_newest_older_ones_do_not_count(clock: Any) -> None:
    """Newest first: a resume would use that one."""
    alarm = Alarm(FailureBudget(without_durable_s=60), clock)
    alarm.saved(stem(1))
    alarm.saved(stem(2))
    alarm.committed(stem(2))
    clock.now += 1e6
    assert alarm.check() is None


def test_a_commit_that_overtakes_the_news_of_its_save(clock: Any) -> None:
    """The transfer process was quicker than the writer thread: nothing waits, and no alarm an hour later."""
    alarm = Alarm(FailureBudget(without_durable_s=60), clock)
    alarm.committed(stem(2))
    alarm.saved(stem(2))
    alarm.saved(stem(1))
    clock.now += 1e6
    assert alarm.check() is None
    alarm.saved(stem(3))
    clock.now += 60
    assert alarm.check() is not None


def test_it_is_said_again_after_a_while_and_not_before(clock: Any) -> None:
    alarm = Alarm(FailureBudget(failures=1, without_durable_s=60), clock)
    alarm.failed()
    assert alarm.check() == "an upload has failed"
    clock.now += 59
    alarm.failed()
    assert alarm.check() is None
    assert alarm.exceeded == "2 uploads in a row have failed"
    clock.now += 1
    assert alarm.check() == "2 uploads in a row have failed"
    assert alarm.check() is None


def test_after_a_commit_it_is_said_at_once(clock: Any) -> None:
    """A new outage is news, however short ago the last one was."""
    alarm = Alarm(FailureBudget(failures=1), clock)
    alarm.failed()
    assert alarm.check() is not None
    alarm.committed()
    alarm.failed()
    assert alarm.check() is not None


def test_without_limits_nothing_is_ever_said(clock: Any) -> None:
    alarm = Alarm(FailureBudget(failures=None, without_durable_s=None), clock)
    alarm.saved()
    alarm.failed(1000)
    clock.now += 1e9
    assert alarm.check() is None


def test_failures_of_several_threads_are_all_counted() -> None:
    alarm = Alarm(FailureBudget(failures=4000, without_durable_s=None))

    def fail() -> None:
        for _ in range(1000):
            alarm.failed()

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert alarm.check() == "4000 uploads in a row have failed"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"failures": 0}, "failures=0"),
        ({"without_durable_s": -1}, "without_durable_s=-1"),
        ({"action": "x"}, "action='x'"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FailureBudget(**options)
