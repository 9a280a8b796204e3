"""Numbers as people read them."""

from __future__ import annotations

import pytest

from ckptmgr.core.units import duration_text, size_text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (1_234_567, "1.23 MB"),
        (3.45e9, "3.45 GB"),
        (2e15, "2 PB"),
        (5e18, "5e+03 PB"),
        (210.4, "210 B"),
    ],
)
def test_sizes(number: float, text: str) -> None:
    """Three digits, powers of 1000, never `1000` of a unit."""
    assert size_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (8, "8 s"),
        (59.6, "1 min"),
        (60, "1 min"),
        (100, "1 min 40 s"),
        (3600, "1 h"),
        (3605, "1 h"),
        (7500, "2 h 5 min"),
        (86_400 * 3 + 3600 * 4 + 59, "3 d 4 h"),
        (86_400 + 60, "1 d"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """By the two largest units, if the second is the next one."""
    assert duration_text(seconds) == text
