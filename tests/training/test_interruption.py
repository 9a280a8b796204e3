"""What the Trainer makes of a loader that fails while there is a notice; where it looks, the tests of the Trainer show."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from ckptmgr.callbacks.base import TrainerControl
from ckptmgr.training.interruption import Interrupted, Interruption
from ckptmgr.training.preemption import Preemption

DEAD = RuntimeError("DataLoader worker (pid 7) is killed by signal: Terminated.\n and more")


@pytest.fixture
def preemption() -> Iterator[Preemption]:
    """Installed."""
    preemption = Preemption()
    preemption.install()
    yield preemption
    preemption.uninstall()


@pytest.mark.parametrize("error", [DEAD, ConnectionResetError(), EOFError()], ids=lambda error: type(error).__name__)
def test_a_loader_that_fails_after_a_notice_is_an_edge(
    error: Exception, preemption: Preemption, caplog: pytest.LogCaptureFixture
) -> None:
    """Its workers got the signal too: with several ranks, where a wait is not left at the signal, this is how it ends."""
    control = TrainerControl()
    interruption = Interruption(preemption, control)
    with pytest.raises(type(error)), interruption.loading():
        raise error
    assert not control.should_interrupt
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(Interrupted), interruption.loading():
        raise error
    assert control.should_interrupt
    assert "the data loader failed during the preemption" in caplog.text
    assert "and more" not in caplog.text


def test_a_mistake_in_the_data_is_one_all_the_same(preemption: Preemption) -> None:
    """What no dying worker raises."""
    interruption = Interruption(preemption, TrainerControl())
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(IndexError), interruption.loading():
        raise IndexError


def test_without_a_preemption_nothing_is_caught() -> None:
    """A loader's errors are the program's."""
    interruption = Interruption(None, TrainerControl())
    with pytest.raises(RuntimeError), interruption.loading(), interruption.waiting():
        raise DEAD


def test_a_watched_loader_gives_all_that_there_is(preemption: Preemption) -> None:
    """Also beyond a length that was too small, and without any length."""

    class Short(list[Any]):
        def __len__(self) -> int:
            return 1

    interruption = Interruption(preemption, TrainerControl())
    assert list(interruption.watched(Short("abc"), by_others=True)) == ["a", "b", "c"]
    assert list(interruption.watched(iter("abc"), by_others=False)) == ["a", "b", "c"]
    assert list(interruption.watched([], by_others=False)) == []
    unwatched = Short("abc")
    assert Interruption(None, TrainerControl()).watched(unwatched, by_others=False) is unwatched
