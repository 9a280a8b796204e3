"""The last values of a training, and their mean and spread: not-a-number and infinities never get in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from operator import mul


class FiniteWindow:
    """The last `size` finite values.

    One infinite value poisons a running mean for good; here it is refused, and takes no place of a finite one: the mean is over the last `size`
    *finite* values, and exists from the first of them on.

    Args:
        size: how many values are kept at most.
        values: what it begins with, oldest first.
    """

    def __init__(self, size: int, values: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque((value for value in values if math.isfinite(value)), maxlen=size)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def values(self) -> list[float]:
        """What is in it, oldest first."""
        return list(self._values)

    @property
    def last(self) -> float | None:
        """The newest value; None of nothing."""
        return self._values[-1] if self._values else None

    @property
    def is_full(self) -> bool:
        """Whether the next value takes the place of the oldest."""
        return len(self._values) == self._values.maxlen

    def add(self, value: float) -> bool:
        """Take in `value`; False if it is not finite, and was not."""
        if not math.isfinite(value):
            return False
        self._values.append(value)
        return True

    @property
    def mean(self) -> float | None:
        """The mean; None of nothing. Summed anew each time, so that nothing adds up over a long training."""
        return math.fsum(self._values) / len(self._values) if self._values else None

    @property
    def deviation(self) -> float | None:
        """The standard deviation of the values themselves; None of nothing."""
        mean = self.mean
        if mean is None:
            return None
        distances = [value - mean for value in self._values]
        return math.sqrt(math.fsum(map(mul, distances, distances)) / len(distances))

    @property
    def median(self) -> float | None:
        """The value in the middle, the smaller one of two; None of nothing."""
        return sorted(self._values)[(len(self._values) - 1) // 2] if self._values else None


def slope(points: Iterable[tuple[float, float]]) -> float:
    """How much y grows per x, by least squares; 0 if all have one x."""
    pairs = list(points)
    middle_x = math.fsum(x for x, _ in pairs) / len(pairs)
    middle_y = math.fsum(y for _, y in pairs) / len(pairs)
    spread = math.fsum((x - middle_x) ** 2 for x, _ in pairs)
    return math.fsum((x - middle_x) * (y - middle_y) for x, y in pairs) / spread if spread else 0.0
