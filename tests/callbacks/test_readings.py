"""What a loss is, in every shape in which hosts hand it over, and reading values without waiting for each."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ckptmgr.callbacks.readings import LossSource, Pending, logged_loss, loss_of, metric_of, numbers_of


@pytest.mark.parametrize(
    "outputs",
    [
        {"loss": 2.5},
        {"loss": torch.tensor(2.5)},
        {"loss": torch.tensor([2.5])},
        {"loss": torch.tensor(2.5, requires_grad=True)},
        SimpleNamespace(loss=torch.tensor(2.5)),
        (torch.tensor(2.5), torch.zeros(3)),
        torch.tensor(2.5),
        2.5,
        np.float32(2.5),
        np.array(2.5),
    ],
)
def test_the_loss_is_found_in_every_shape(outputs: Any) -> None:
    found = loss_of(outputs)
    assert float(found) == 2.5
    assert not getattr(found, "requires_grad", False)


@pytest.mark.parametrize(
    "outputs", [None, {}, {"logits": 1.0}, (), [], torch.zeros(2), {"loss": torch.zeros(2)}, "1.0", True, object()]
)
def test_what_is_no_scalar_is_no_loss(outputs: Any) -> None:
    assert loss_of(outputs) is None


def test_only_the_training_loss_counts_in_logs() -> None:
    assert logged_loss({"loss": 1.5, "eval_loss": 2.0}) == 1.5
    assert logged_loss({"loss": torch.tensor(1.5)}) == 1.5
    assert math.isnan(logged_loss({"loss": math.nan}) or 0.0)
    for logs in (None, {}, {"eval_loss": 2.0}, {"train_loss": 1.0}, {"loss": "none"}):
        assert logged_loss(logs) is None


def test_logs_are_ignored_once_a_step_has_told_its_loss() -> None:
    host = LossSource()
    assert host.at_step(None) is None
    assert host.at_log({"loss": 3.0}) == 3.0
    assert host.at_step({"loss": 1.0}) == 1.0
    assert host.at_log({"loss": 3.0}) is None


def test_a_metric_goes_by_its_name_or_by_that_of_evaluations() -> None:
    metrics = {"eval_loss": 1.0, "loss": 2.0, "eval_accuracy": np.float32(0.5), "note": "x", "epoch": 3.0}
    assert metric_of(metrics, "loss") == 2.0
    assert metric_of(metrics, "eval_loss") == 1.0
    assert metric_of(metrics, "accuracy") == 0.5
    assert metric_of(metrics, "note") is None
    assert metric_of(None, "loss") is None
    assert numbers_of(metrics) == {"eval_loss": 1.0, "loss": 2.0, "eval_accuracy": 0.5}
    assert numbers_of(None) == {}


def test_pending_values_are_read_in_order_and_once() -> None:
    pending = Pending()
    running = torch.tensor(1.0, requires_grad=True)
    for step, value in enumerate([running, 2, np.float64(3.0), torch.tensor([4.0])]):
        pending.add(step, value)
    with torch.no_grad():
        running += 10
    assert len(pending) == 4
    assert pending.read() == [(0, 1.0), (1, 2.0), (2, 3.0), (3, 4.0)]
    assert pending.read() == []


def test_values_on_a_device_wait_and_come_in_one_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for a device: a value is read only through `torch.stack`, once."""
    reads: list[int] = []

    class OnDevice:
        def __init__(self, value: float) -> None:
            self.value, self.device = value, torch.device("cuda", 0)

        def __getattr__(self, name: str) -> Any:
            assert name in {"detach", "clone", "float", "reshape"}
            return lambda *_: OnDevice(self.value)

        def __float__(self) -> float:
            raise AssertionError("a synchronisation for one value")

    def stack(values: list[OnDevice]) -> torch.Tensor:
        reads.append(len(values))
        return torch.tensor([each.value for each in values])

    monkeypatch.setattr(torch, "stack", stack)
    pending = Pending()
    pending.add(1, OnDevice(1.0))
    pending.add(2, 7.0)
    pending.add(3, OnDevice(3.0))
    assert reads == []
    assert pending.read() == [(1, 1.0), (2, 7.0), (3, 3.0)]
    assert reads == [2]
