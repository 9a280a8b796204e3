"""Windows over finite values."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.callbacks.windows import FiniteWindow


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
