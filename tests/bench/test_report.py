"""What the benches share: rounds, limits, and the page of results."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def report(bench: Callable[[str], ModuleType]) -> ModuleType:
    """bench/_report.py as a module."""
    return bench("_report")


def options(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"asserting": False, "record": None, **given})


def test_rounds_are_interleaved_after_a_warm_up(report: ModuleType) -> None:
    """Each round runs every action once, each time another one first; the first run of each counts for nothing."""
    order: list[str] = []

    def action(name: str) -> Callable[[], float]:
        return lambda: order.append(name) or float(len(order))  # type: ignore[func-returns-value]

    assert report.interleaved({"a": action("a"), "b": action("b")}, 3) == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}
    assert order == ["a", "b", "a", "b", "b", "a", "a", "b"]


@pytest.mark.parametrize(
    ("limit", "value", "allowed"),
    [
        ({"at_most": 2.0}, 2.0, True),
        ({"at_most": 2.0}, 2.01, False),
        ({"at_least": 0.95}, 0.95, True),
        ({"at_least": 0.95}, 0.94, False),
        ({"at_most": 2.0}, float("nan"), False),
    ],
)
def test_a_limit_belongs_to_what_it_allows(
    report: ModuleType, limit: dict[str, float], value: float, allowed: bool
) -> None:
    """In both directions, and what could not be measured breaks it."""
    assert report.Limit(**limit).allows(value) is allowed


@pytest.mark.parametrize("asserting", [False, True])
def test_the_last_line_is_json_and_a_broken_limit_is_named(
    report: ModuleType, capsys: pytest.CaptureFixture[str], asserting: bool
) -> None:
    """Only `--assert` makes it fail; a ratio without a limit is there too."""
    limits = {"slow": report.Limit(at_most=1.0), "fine": report.Limit(at_least=0.5)}
    ratios = {"slow": 1.5, "fine": 0.5, "free": 9.0}
    assert report.finish(options(asserting=asserting), "## T\n", ratios, limits, hint="look there") == int(asserting)
    printed = capsys.readouterr()
    assert json.loads(printed.out.splitlines()[-1]) == ratios
    assert "slow is 1.5, at most 1 is allowed; look there" in printed.err
    assert "fine" not in printed.err


def test_a_record_replaces_its_own_section_only(report: ModuleType, tmp_path: Path) -> None:
    """A second measurement takes the place of the first; what others recorded stays."""
    page = tmp_path / "benchmarks.md"
    report.finish(options(record=page), "## Start-up\n\n160\n", {}, {}, hint="")
    page.write_text(page.read_text() + "\n## Throughput\n\nOf another bench.\n")
    report.finish(options(record=page), "## Start-up\n\n150\n", {}, {}, hint="")
    text = page.read_text()
    assert text.startswith("# Benchmarks\n")
    assert text.endswith("\n\n## Start-up\n\n150\n\n## Throughput\n\nOf another bench.\n")
    assert "160" not in text


@pytest.mark.parametrize(("load", "warned"), [(0.9, False), (3.0, True)])
def test_a_busy_machine_is_said(
    report: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    load: float,
    warned: bool,
) -> None:
    """On stderr: the last line on stdout stays the ratios."""
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    report.warn_if_busy()
    printed = capsys.readouterr()
    assert ("load 3.0 on 2 cores" in printed.err) == warned
    assert printed.out == ""


def test_the_machine_is_one_line(report: ModuleType) -> None:
    """With the versions that were asked for."""
    line = report.machine(("pytest",))
    assert f"pytest {pytest.__version__}" in line
    assert "\n" not in line
