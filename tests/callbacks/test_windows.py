"""Windows over finite values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.callbacks.windows import FiniteWindow, slope


def test_it_is_empty_until_the_first_finite_value() -> None:
    window = FiniteWindow(3)
    assert not any(window.add(value) for value in (math.nan, math.inf, -math.inf))
    assert (len(window), window.mean, window.deviation, window.median) == (0, None, None, None)
    assert window.add(2.0)
    assert (window.values, window.mean, window.deviation, window.median) == ([2.0], 2.0, 0.0, 2.0)


@given(st.lists(st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])), st.integers(1, 5))
def test_it_knows_the_last_finite_values_and_nothing_else(values: list[float], size: int) -> None:
    window = FiniteWindow(size)
    for value in values:
        assert window.add(value) == math.isfinite(value)
    kept = [value for value in values if math.isfinite(value)][-size:]
    assert window.values == kept == FiniteWindow(size, values).values
    if kept:
        assert window.mean == pytest.approx(sum(kept) / len(kept))
        assert window.deviation is not None
        assert window.deviation >= 0
        assert window.median in kept
        assert min(kept) <= (window.mean or 0.0) + 1e-9


@given(st.floats(-100, 100), st.floats(-100, 100), st.lists(st.integers(0, 1000), min_size=2, max_size=20, unique=True))
def test_the_slope_of_a_line_is_its_own(gradient: float, offset: float, places: list[int]) -> None:
    assert slope([(x, gradient * x + offset) for x in places]) == pytest.approx(gradient, abs=1e-6)
    assert slope([(1, 1), (1, 2)]) == 0
