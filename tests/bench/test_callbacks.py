"""The bench of callbacks: what it compares, what it prints, and that it fails when an event costs too much."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.fixture
def callbacks(bench: Callable[[str], ModuleType]) -> ModuleType:
    """bench/callbacks.py as a module."""
    return bench("callbacks")


def test_one_real_round_ends_with_the_overhead(callbacks: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """The last line is one JSON object that a script can read."""
    assert callbacks.main(["--rounds", "1"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["dispatch_us"] > 0


def test_each_way_calls_every_hook_at_every_event(callbacks: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the ways would not be compared with each other."""
    calls = [0]

    def count(self: object, args: object, state: object, control: object, **kwargs: object) -> None:
        calls[0] += 1
        assert {"model", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader"} <= kwargs.keys()

    monkeypatch.setattr(callbacks.Nothing, "on_step_end", count)
    for run in callbacks.ways(events=3).values():
        calls[0] = 0
        run()
        assert calls == [3 * callbacks.CALLBACKS]


@pytest.mark.parametrize(("manager_us", "code"), [(21.9, 0), (22.1, 1)])
def test_assert_fails_above_the_limit(
    callbacks: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    manager_us: float,
    code: int,
) -> None:
    """20 µs beyond the hooks is the limit."""
    found = {"hooks": [2.0] * 3, "manager": [manager_us] * 3, "handler": [7.0] * 3}
    monkeypatch.setattr(callbacks, "interleaved", lambda actions, rounds: found)
    assert callbacks.main(["--assert"]) == code
    told = capsys.readouterr()
    assert json.loads(told.out.splitlines()[-1])["event_vs_handler"] == round(manager_us / 7, 2)
    assert ("dispatch_us" in told.err) == bool(code)
