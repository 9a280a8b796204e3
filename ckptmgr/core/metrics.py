"""How a metric is found by the name that people give it: one rule for policies, retention, selectors and callbacks.

Evaluations of most trainers put `eval_` before the names of their metrics: `acc` means `acc`, and `eval_acc` where there is no `acc`. What is recorded
keeps the names that it was given.
"""

from __future__ import annotations

from collections.abc import Container

PREFIX = "eval_"


def metric_name(asked: str, present: Container[str]) -> str | None:
    """Which of `present` is meant by `asked`; None if none is."""
    return next((name for name in (asked, PREFIX + asked) if name in present), None)


def may_be_same(one: str, other: str) -> bool:
    """Whether two people who give these names may mean one metric."""
    return one.removeprefix(PREFIX) == other.removeprefix(PREFIX)
