"""Clipping: once per optimizer step, after unscaling, never to NaN, and never beside the host's own."""

from __future__ import annotations

import json
import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.gradient_clip import GradientClipCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments


def said(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.endswith("gradient_clip") and r.levelno == level]


class Norms(Callback):
    """What the optimizer gets."""

    priority = Priority.LOG

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_pre_optimizer_step(self, model: torch.nn.Module, **kwargs: Any) -> None:
        self.seen.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))


def train(
    callback: GradientClipCallback, factors: list[float], *, accumulation: int = 1, **options: Any
) -> list[float]:
    """One step per factor, whose true gradient has that norm; what the optimizer got."""
    model, norms = torch.nn.Linear(1, 1, bias=False), Norms()
    args = TrainingArguments(
        max_steps=len(factors), gradient_accumulation_steps=accumulation, logging_steps=None, **options
    )
    trainer = Trainer(
        model,
        args,
        train_dataloader=[torch.ones(1)] * (accumulation * len(factors)),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn=lambda model, batch: model(batch).sum() * factors[trainer.state.global_step],
        callbacks=[callback, norms],
    )
    trainer.train()
    assert trainer.callbacks.failures == {}
    return norms.seen


def test_true_gradients_are_clipped_once_per_step(caplog: pytest.LogCaptureFixture) -> None:
    """K003: scaled by 65536, accumulated over 4: norms of 0.5 stay as they are, 2.0 becomes 1.0; an overflow is reported and not made NaN."""
    callback = GradientClipCallback(1.0, log_interval=5)
    seen = train(callback, [0.5, 0.5, 0.5, 2.0, math.inf], accumulation=4, grad_scaler=True)
    assert seen[:3] == [0.5] * 3
    assert seen[3] == pytest.approx(1.0, rel=1e-5)
    assert seen[4] == math.inf
    assert (callback.steps, callback.clipped, callback.nonfinite, callback.last_norm) == (5, 1, 1, math.inf)
    assert said(caplog) == ["the gradient's norm was not finite, and nothing was clipped, at step 5 (inf)"]
    assert said(caplog, logging.INFO) == ["step 5: gradient norm inf; 1 of the last 5 were clipped"]


def test_by_value(caplog: pytest.LogCaptureFixture) -> None:
    callback = GradientClipCallback(max_value=0.5)
    assert train(callback, [0.25, -2.0, math.inf, math.nan])[:3] == [0.25, 0.5, math.inf]
    assert (callback.steps, callback.nonfinite) == (4, 2)
    assert said(caplog, logging.INFO) == ["step 4: gradient norm nan; elements are limited to 0.5"]


@pytest.mark.parametrize("hand_over", ["scaler", "optimizer"])
@pytest.mark.parametrize("unscaled", [False, True])
def test_what_is_still_scaled_is_unscaled(hand_over: str, unscaled: bool) -> None:
    """A loop of one's own, or Accelerate's wrapped optimizer; unscaled by somebody else before, or not."""
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    callback = GradientClipCallback(1.0, scaler=scaler if hand_over == "scaler" else None)
    wrapped: Any = SimpleNamespace(optimizer=optimizer, scaler=scaler, param_groups=optimizer.param_groups)
    scaler.scale(model(torch.full((1,), 4.0)).sum()).backward()
    if unscaled:
        scaler.unscale_(optimizer)
    given = optimizer if hand_over == "scaler" else wrapped
    callback.on_pre_optimizer_step(None, TrainerState(), TrainerControl(), optimizer=given)
    assert model.weight.grad is not None
    assert model.weight.grad.item() == pytest.approx(1.0, rel=1e-5)
    before = model.weight.item()
    scaler.step(optimizer)
    scaler.update()
    assert model.weight.item() == pytest.approx(before - 1.0, rel=1e-4)


def test_a_host_that_clips_is_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    callback = GradientClipCallback(0.25)
    assert train(callback, [2.0, 2.0], max_grad_norm=0.5) == pytest.approx([0.5, 0.5], rel=1e-5)
    assert callback.steps == 0
    assert [("max_grad_norm=0.5" in line, "does nothing" in line) for line in said(caplog)] == [(True, True)]


def test_the_hosts_clipping_can_be_replaced() -> None:
    callback = GradientClipCallback(1.0, replace_host=True)
    assert train(callback, [2.0, 0.75], max_grad_norm=0.5) == pytest.approx([1.0, 0.75], rel=1e-5)


@pytest.mark.parametrize(
    ("args", "name", "off"),
    [
        (TrainingArguments(max_grad_norm=0.5), "max_grad_norm", None),
        (SimpleNamespace(max_grad_norm=0.5, output_dir="out"), "max_grad_norm", 0.0),
        (SimpleNamespace(gradient_clip_val=0.5), "gradient_clip_val", None),
    ],
    ids=["ours", "huggingface", "lightning"],
)
def test_the_host_has_its_limit_again_at_the_end(args: Any, name: str, off: float | None) -> None:
    callback, control = GradientClipCallback(1.0, replace_host=True), TrainerControl()
    for _ in range(2):
        callback.on_train_begin(args, TrainerState(), control)
        assert getattr(args, name) == off
        callback.on_train_end(args, TrainerState(), control)
        assert getattr(args, name) == 0.5


@pytest.mark.parametrize("call", ["position", "manager"])
def test_it_works_by_position_and_by_keyword(call: str) -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    callback, state, control = GradientClipCallback(1.0), TrainerState(), TrainerControl()
    if call == "position":
        callback.on_pre_optimizer_step(None, state, control, model=model, optimizer=None)
    else:
        CallbackManager([callback]).call("on_pre_optimizer_step", args=None, state=state, control=control, model=model)
    assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-5)
    callback.on_train_end(None, state, control)
    assert callback.last_norm == 5.0


def test_sharded_gradients(tmp_path: Any) -> None:
    """FSDP2, one rank: the norm is of the whole, and each part is scaled by it."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for options, wanted in (({"max_norm": 1.0}, 1.0), ({"max_value": 2.0}, math.hypot(2.0, 2.0))):
            model = torch.nn.Linear(2, 1, bias=False)
            fully_shard(model, mesh=mesh)
            model(torch.tensor([3.0, 4.0])).sum().backward()
            callback = GradientClipCallback(**options)  # type: ignore[arg-type]
            callback.on_pre_optimizer_step(None, TrainerState(), TrainerControl(), model=model)
            grad: Any = model.weight.grad
            assert grad.full_tensor().norm().item() == pytest.approx(wanted, rel=1e-5)
            callback.on_train_end(None, TrainerState(), TrainerControl())
            assert callback.last_norm == 5.0
    finally:
        dist.destroy_process_group()


def test_the_counts_survive_a_resume() -> None:
    """What was not looked at yet is counted."""
    callback = GradientClipCallback(1.0, log_interval=1000)
    model = torch.nn.Linear(1, 1, bias=False)
    for factor in (0.5, 2.0, math.nan):
        model.weight.grad = torch.full((1, 1), factor)
        callback.on_pre_optimizer_step(None, TrainerState(), TrainerControl(), model=model)
    resumed = GradientClipCallback(1.0)
    resumed.load_state_dict(json.loads(json.dumps(callback.state_dict())))
    assert (resumed.steps, resumed.clipped, resumed.nonfinite) == (3, 1, 1)
    callback.on_train_end(None, TrainerState(), TrainerControl())
    assert callback.state_dict() == resumed.state_dict()


def test_no_gradients_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    callback = GradientClipCallback(1.0)
    for _ in range(2):
        callback.on_pre_optimizer_step(None, TrainerState(), TrainerControl(), model=torch.nn.Linear(1, 1))
    assert ["finds no gradients" in line for line in said(caplog)] == [True]


def test_other_errors_of_a_scaler_are_not_hidden() -> None:
    class Scaler:
        def is_enabled(self) -> bool:
            return True

        def unscale_(self, optimizer: Any) -> None:
            raise RuntimeError("it is broken")

    with pytest.raises(RuntimeError, match="broken"):
        GradientClipCallback(1.0, scaler=Scaler()).on_pre_optimizer_step(None, TrainerState(), TrainerControl())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_norm": 1.0, "max_value": 1.0},
        {"max_norm": 0},
        {"max_norm": math.inf},
        {"max_value": -1},
        {"max_norm": 1.0, "log_interval": 0},
        {"max_norm": 1.0, "replace_host": "yes"},
    ],
)
def test_arguments_are_looked_at(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        GradientClipCallback(**options)
    assert "GradientClipCallback: " in str(caught.value)
    assert caught.value.hint
