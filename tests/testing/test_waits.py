"""Time that a busy machine does not move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckptmgr.testing import waits
from ckptmgr.testing.waits import Stopwatch

Times = list[float]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Times:
    """What the clock says, and for how long the machine has kept something waiting."""
    times = [100.0, 7.0]
    monkeypatch.setattr("ckptmgr.testing.waits.time.monotonic", lambda: times[0])
    monkeypatch.setattr(waits, "_stalled_s", lambda: times[1])
    return times


def test_what_the_machine_had_no_time_for_does_not_count(clock: Times) -> None:
    watch = Stopwatch()
    clock[:] = [110.0, 7.0]
    assert watch.seconds == 10.0
    clock[:] = [110.0, 11.0]
    assert watch.seconds == 6.0


def test_a_fifth_counts_on_any_machine(clock: Times) -> None:
    watch = Stopwatch()
    clock[:] = [110.0, 107.0]
    assert watch.seconds == 2.0


def test_the_end_of_a_process() -> None:
    ended = subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"])
    assert Stopwatch().end_of(ended, 60) == 9
    with subprocess.Popen(["sleep", "60"]) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            Stopwatch().end_of(waiting, 0.1)
        assert waiting.poll() is None
        waiting.kill()


def test_what_the_kernel_tells_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All three resources; one that it does not tell of counts nothing."""
    for name, total in (("cpu", 1_500_000), ("io", 250_000)):
        text = (
            f"some avg10=1.00 avg60=0.50 avg300=0.10 total={total}\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=99\n"
        )
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(waits, "_PRESSURE", tmp_path)
    assert waits._stalled_s() == 1.75
