"""Numbers and decisions that several ranks share: who is the main process, means over all ranks, agreement. Imports no torch.

A collective has to be called by every rank at the same point, and never where only the main process comes. Which functions call one is said at each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ckptmgr.core.errors import ConfigError
from ckptmgr.training import ranks
from ckptmgr.training.ranks import any_rank, is_main_process

__all__ = ["SampledMeans", "any_rank", "is_main_process", "main_process_decides", "mean_over_ranks"]


def main_process_decides(flag: bool) -> bool:
    """What the main process says, on all ranks: where clocks or files differ. A collective if there are other ranks."""
    return any_rank(flag and is_main_process())


def mean_over_ranks(values: Mapping[str, Any]) -> dict[str, float]:
    """The mean of each value over all ranks, in one call. A collective if there are other ranks; waits for the device of a value.

    Non-finite values are left out; NaN where no rank has a finite one. What is given stays as it is.

    Args:
        values: numbers or tensors, of which each element counts; the same names on every rank. A rank that has none gives None.
    """
    means = SampledMeans(*values)
    means.add(**values)
    return means.take()


class SampledMeans:
    """Means over steps and ranks that cost training next to nothing: sums stay on their device, and all ranks meet once in a while, in one call.

        means = SampledMeans("loss", "accuracy", every=50)
        means.add(loss=loss, accuracy=chosen > rejected)       # at every step: waits for nothing
        found = means.sample(state.global_step)                # None but at every 50th step, on all ranks alike

    Non-finite values are left out, and counted in `nonfinite`. Tensors that are given stay as they are, and are not kept.

    Args:
        names: of the values; the same on every rank, in the same order.
        every: steps from one sample to the next.

    Attributes:
        nonfinite: how many values of the last sample were left out, on all ranks.

    Raises:
        ConfigError: no name, one twice, or no number of steps.
    """

    def __init__(self, *names: str, every: int = 50) -> None:
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"SampledMeans: names are {list(names)}", hint="name each value once")
        if not isinstance(every, int) or every < 1:
            raise ConfigError(f"SampledMeans: every is {every!r}", hint="use a whole number of steps, 1 or more")
        self.every = every
        self.nonfinite = 0
        self._totals = {name: _Total() for name in names}

    def add(self, **values: Any) -> None:
        """Count a number, or each element of a tensor; None counts nothing.

        Raises:
            ConfigError: a name that was not given at the beginning.
        """
        for name, value in values.items():
            if name not in self._totals:
                raise ConfigError(f"SampledMeans: there is no {name!r}", hint=f"names: {', '.join(self._totals)}")
            self._totals[name].add(value)

    def sample(self, step: int) -> dict[str, float] | None:
        """At every `every`-th step as `take`; else None, at once. `step` has to be the same on all ranks."""
        return None if step % self.every else self.take()

    def take(self) -> dict[str, float]:
        """The means of what was added on all ranks since the last time; NaN where nothing finite was. A collective if there are other ranks."""
        mine = self._read()
        self._totals = {name: _Total() for name in self._totals}
        told = iter(ranks.sums([number for total in mine for number in total]))
        found = {}
        self.nonfinite = 0
        for name in self._totals:
            total, count, nonfinite = next(told), next(told), next(told)
            self.nonfinite += int(nonfinite)
            found[name] = total / count if count else math.nan
        return found

    def state_dict(self) -> dict[str, Any]:
        """What is not sampled yet. Of the main process, as all state: a resumed run takes it for that of every rank, once."""
        return {"totals": dict(zip(self._totals, self._read(), strict=True))}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with a saved sum."""
        self._totals = {name: _Total(*state["totals"].get(name, ())) for name in self._totals}

    def _read(self) -> list[list[float]]:
        """Sum, count and number of non-finite values of each; one transfer for all that is on a device."""
        totals = list(self._totals.values())
        waiting = [total for total in totals if total.on_device is not None]
        rows: Sequence[Sequence[float]] = ()
        if waiting:
            import torch

            if len({total.on_device.device for total in waiting}) == 1:
                rows = torch.stack([total.on_device for total in waiting]).tolist()
            else:
                rows = [total.on_device.tolist() for total in waiting]
        for total, row in zip(waiting, rows, strict=True):
            total.settle(row)
        return [total.numbers for total in totals]


class _Total:
    """A sum of finite values and their number, and the number of others: of plain numbers here, of tensors where those are."""

    __slots__ = ("numbers", "on_device")

    def __init__(self, total: float = 0.0, count: float = 0.0, nonfinite: float = 0.0) -> None:
        self.numbers = [total, count, nonfinite]
        self.on_device: Any = None

    def add(self, value: Any) -> None:
        if value is None:
            return
        if hasattr(value, "detach"):
            self._add_tensor(value.detach())
        elif math.isfinite(number := float(value)):
            self.numbers[0] += number
            self.numbers[1] += 1
        else:
            self.numbers[2] += 1

    def _add_tensor(self, tensor: Any) -> None:
        import torch

        # Apple's devices have no float64.
        values = tensor.reshape(-1).to(torch.float32 if tensor.device.type == "mps" else torch.float64)
        finite = torch.isfinite(values)
        counts = torch.stack([finite.sum(), (~finite).sum()]).to(values.dtype)
        row = torch.cat([torch.where(finite, values, 0.0).sum().reshape(1), counts])
        self.on_device = row if self.on_device is None else self.on_device + row.to(self.on_device.device)

    def settle(self, row: Sequence[float]) -> None:
        """Take in what was on the device."""
        self.numbers = [mine + more for mine, more in zip(self.numbers, row, strict=True)]
        self.on_device = None
