"""The start-up bench: what it compares, what it prints, and that it fails when a ratio is too large."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import ModuleType

import pytest

TIMES_S = {"pass": 0.02, "typer": 0.1, "help": 0.15, "typer_fsspec": 0.2, "ls": 0.3}


@pytest.fixture
def startup(bench: Callable[[str], ModuleType]) -> ModuleType:
    """bench/startup.py as a module."""
    return bench("startup")


@pytest.mark.slow
def test_one_real_round_ends_with_the_two_ratios(startup: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """Every command of the bench runs, and the last line is one JSON object that a script can read."""
    assert startup.main(["--rounds", "1"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sorted(found) == ["help_vs_typer", "ls_vs_typer_fsspec"]
    assert all(value > 0 for value in found.values())


def test_ratios_compare_each_command_with_its_imports(startup: ModuleType) -> None:
    """`--help` against typer, `ls` against typer and fsspec."""
    assert startup.ratios(TIMES_S) == {"help_vs_typer": 1.5, "ls_vs_typer_fsspec": 1.5}


@pytest.mark.parametrize(("ls_s", "code"), [(0.4, 0), (0.41, 1)])
def test_assert_fails_above_the_limit(
    startup: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ls_s: float, code: int
) -> None:
    """Twice the yardstick is allowed, more is not, and the ratio is named."""
    monkeypatch.setattr(startup, "measure", lambda rounds: {**TIMES_S, "ls": ls_s})
    assert startup.main(["--assert"]) == code
    assert ("ls_vs_typer_fsspec" in capsys.readouterr().err) == bool(code)


def test_medians_are_of_interleaved_rounds_after_a_warm_up(startup: ModuleType) -> None:
    """Each round runs every command once, each time another one first; the first run of each counts for nothing."""
    order: list[str] = []
    seconds = {"a": iter([99.0, 1.0, 2.0, 9.0]), "b": iter([99.0, 5.0, 4.0, 6.0])}

    def time_it(command: Sequence[str]) -> float:
        order.append(command[0])
        return next(seconds[command[0]])

    assert startup.medians({"a": ["a"], "b": ["b"]}, 3, time_it) == {"a": 2.0, "b": 5.0}
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]
