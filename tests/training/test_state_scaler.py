"""K108: the loss scaler goes on with its scale and with its count of good steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.training.state import capture, restore, write

GROWTH_INTERVAL = 60


class Scaled:
    """A scaler and what it scales for."""

    def __init__(self) -> None:
        self.parameter = torch.nn.Parameter(torch.ones(2))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=GROWTH_INTERVAL)

    def step(self, *, overflow: bool = False) -> None:
        self.optimizer.zero_grad()
        self.scaler.scale(self.parameter.sum()).backward()  # type: ignore[no-untyped-call]
        if overflow:
            assert self.parameter.grad is not None
            self.parameter.grad.fill_(float("inf"))
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def scales(self, count: int) -> list[float]:
        """The scale after each of the next steps."""
        found = []
        for _ in range(count):
            self.step()
            found.append(self.scaler.get_scale())
        return found


def after_good_steps() -> Scaled:
    scaled = Scaled()
    scaled.scales(57)
    assert scaled.scaler.state_dict()["_growth_tracker"] == 57
    return scaled


def after_an_overflow() -> Scaled:
    scaled = after_good_steps()
    scaled.step(overflow=True)
    assert (scaled.scaler.get_scale(), scaled.scaler.state_dict()["_growth_tracker"]) == (2.0**16, 0)
    return scaled


def used() -> Scaled:
    scaled = Scaled()
    scaled.step(overflow=True)
    scaled.scales(9)
    return scaled


@pytest.mark.parametrize("saved", [after_good_steps, after_an_overflow])
@pytest.mark.parametrize("target", [Scaled, used], ids=["fresh", "used"])
def test_k108_the_scaler_goes_on_as_if_nothing_had_happened(saved: Any, target: Any, tmp_path: Path) -> None:
    """Equal in all fields, and the next growth comes at the same step; also where the scaler at hand was used before."""
    whole, resumed = saved(), target()
    write(capture({"scaler": whole.scaler}), tmp_path)
    report = restore(tmp_path, {"scaler": resumed.scaler})
    assert report.notes == ()
    assert resumed.scaler.state_dict() == whole.scaler.state_dict()
    expected = whole.scales(GROWTH_INTERVAL + 5)
    assert resumed.scales(GROWTH_INTERVAL + 5) == expected
    assert len(set(expected)) > 1
