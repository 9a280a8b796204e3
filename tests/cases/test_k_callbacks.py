"""Cases of callbacks that watch and steer, as a user gets them: named in a configuration, at work in a training."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import Callback, Priority
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.trainer import Trainer, TrainingArguments, TrainingResult


def configured(folder: Path, *callbacks: Mapping[str, Any]) -> CallbackManager:
    """What `CallbackManager.from_config` makes of a file with these entries; JSON is YAML."""
    path = folder / "ckptmgr.yaml"
    path.write_text(json.dumps({"callbacks": callbacks}), encoding="utf-8")
    return CallbackManager.from_config(path)


def train(
    callbacks: Sequence[Any],
    *,
    losses: Sequence[float] = (),
    evaluations: Sequence[float] = (),
    metric: str = "loss",
    factor: Callable[[int], float] = lambda step: 0.0,
    **options: Any,
) -> TrainingResult:
    """A training of one weight: a loss per step and a metric per evaluation as given, a gradient of `factor(finished steps)`."""
    model = torch.nn.Linear(1, 1, bias=False)
    accumulation = options.get("gradient_accumulation_steps", 1)
    steps = options.setdefault("max_steps", max(len(losses), len(evaluations)))

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        output: torch.Tensor = model(batch).sum()
        step = trainer.state.global_step
        return output * factor(step) if not losses else output * 0 + losses[step]

    trainer = Trainer(
        model,
        TrainingArguments(eval_steps=1 if evaluations else None, logging_steps=1, **options),
        train_dataloader=[torch.ones(1)] * (steps * accumulation),
        eval_dataloader=[torch.ones(1)] if evaluations else None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn=loss_fn,
        eval_fn=lambda model, loader: {metric: evaluations[trainer.state.global_step - 1]},
        callbacks=callbacks,
    )
    result = trainer.train()
    assert trainer.callbacks.failures == {}
    return result


@pytest.mark.parametrize(("more", "last"), [({}, 7), ({"min_delta": 0.15}, 3)], ids=["plain", "min_delta"])
def test_k063_patience_begins_anew_at_each_improvement(tmp_path: Path, more: dict[str, Any], last: int) -> None:
    """mode min, patience 2: ended after the seventh evaluation, with min_delta 0.15 after the third."""
    params = {"monitor": "eval_loss", "mode": "min", "patience": 2, **more}
    manager = configured(tmp_path, {"type": "EarlyStoppingCallback", "params": params})
    result = train([manager], evaluations=[1.0, 1.1, 0.9, 1.0, 0.8, 0.9, 0.85, 0.1, 0.1])
    assert (result.global_step, result.stopped) == (last, "EarlyStoppingCallback")


def test_k003_true_gradients_are_clipped_once_per_optimizer_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Loss scale 65536, accumulation 4, limit 1: three norms of 0.5 are unchanged, one of 2 becomes 1, one that is not finite is reported."""
    seen: list[float] = []
    calls: list[int] = []
    norms = [0.5, 0.5, 0.5, 2.0, math.nan]
    manager = configured(tmp_path, {"type": "GradientClipCallback", "params": {"max_norm": 1.0}})
    (clip,) = manager.callbacks

    class Watch(Callback):
        priority = Priority.LOG

        def on_pre_optimizer_step(self, model: torch.nn.Module, state: Any, **kwargs: Any) -> None:
            calls.append(state.global_step)
            seen.extend(p.grad.norm().item() for p in model.parameters() if p.grad is not None)

    train(
        [manager, Watch()],
        factor=lambda step: norms[step],
        max_steps=5,
        gradient_accumulation_steps=4,
        grad_scaler=True,
    )
    assert calls == [0, 1, 2, 3, 4]
    assert seen[:3] == [0.5] * 3
    assert seen[3] == pytest.approx(1.0, rel=1e-5)
    assert (clip.steps, clip.clipped, clip.nonfinite) == (5, 1, 1)
    assert "was not finite, and nothing was clipped, at step 5 (nan)" in caplog.text


def test_k111_one_infinite_loss_does_not_poison_the_mean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Losses 1, 2, inf, 3, NaN, 4, window 3: the mean is over the last three finite values, and two anomalies have their steps."""
    means: list[float] = []
    params = {"log_interval": 1, "window": 3, "gradients": False}
    manager = configured(tmp_path, {"type": "LossMonitorCallback", "params": params})
    (monitor,) = manager.callbacks

    class Watch(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            means.append(monitor.mean)

    caplog.set_level(logging.INFO)
    train([manager, Watch()], losses=[1.0, 2.0, math.inf, 3.0, math.nan, 4.0])
    assert means == [1, 1.5, 1.5, 2, 2, 3]
    assert [(anomaly.kind, anomaly.step) for anomaly in monitor.anomalies] == [("nonfinite", 3), ("nonfinite", 5)]
    assert "step 3: the loss is inf, its mean was 1.5" in caplog.text
    assert "step 6: loss 4, mean 3 of the last 3" in caplog.text


def test_k115_a_metric_that_is_not_there_is_said_and_training_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a callback as of a policy: the names present are listed at the first evaluation, nothing else happens."""
    params = {"monitor": "val_loss", "patience": 1}
    manager = configured(tmp_path, {"type": "EarlyStoppingCallback", "params": params})
    result = train([manager], evaluations=[1.0, 2.0, 3.0], metric="custom_loss")
    assert (result.global_step, result.stopped) == (3, None)
    lines = [record.getMessage() for record in caplog.records if "no metric 'val_loss'" in record.getMessage()]
    assert len(lines) == 1
    assert "step 1 has no metric 'val_loss'; present: eval_custom_loss" in lines[0]
