"""What is wrong with an argument is said in one line, with what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ckptmgr.callbacks import checks
from ckptmgr.core.errors import ConfigError


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None, math.nan])
def test_whole(value: Any) -> None:
    checks.whole("X", "n", 1)
    checks.whole("X", "n", None, optional=True)
    with pytest.raises(ConfigError) as caught:
        checks.whole("X", "n", value)
    assert f"X: n is {value!r}" in str(caught.value)
    assert "a whole number, 1 or more" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1.0, True, "1", None, math.nan, math.inf, 2])
def test_number(value: Any) -> None:
    checks.number("X", "n", 0.5, above=0, most=1)
    checks.number("X", "n", 0, least=0)
    checks.number("X", "n", None, optional=True)
    with pytest.raises(ConfigError) as caught:
        checks.number("X", "n", value, above=0, most=1)
    assert "n must be a number, above 0, at most 1" in str(caught.value)
    with pytest.raises(ConfigError, match="a number, 0 or more, below 1"):
        checks.number("X", "n", 1, least=0, below=1)


def test_choice_and_text() -> None:
    assert checks.choice("X", "mode", "min", ("min", "max")) == "min"
    with pytest.raises(ConfigError, match="one of 'min', 'max'"):
        checks.choice("X", "mode", "least", ("min", "max"))
    checks.text("X", "monitor", "eval_loss", "eval_loss")
    for value in ("", None, 3):
        with pytest.raises(ConfigError, match="such as 'eval_loss'"):
            checks.text("X", "monitor", value, "eval_loss")
