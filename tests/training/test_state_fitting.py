"""What a checkpoint replaces in the objects that it is loaded into is said, where torch says nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers

from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.training.state import capture, restore, write


def tied(is_tied: bool = True) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(5, 3), "head": torch.nn.Linear(3, 5, bias=False)})
    if is_tied:
        model["head"].weight = model["embed"].weight
    return model


def optimizer_of(model: torch.nn.Module, **options: Any) -> torch.optim.AdamW:
    groups = [{"params": [parameter]} for parameter in model.parameters()]
    return torch.optim.AdamW(groups, **{"lr": 0.1, **options})


def notes(directory: Path, before: dict[str, Any], now: dict[str, Any]) -> tuple[str, ...]:
    """What a restore into `now` of what was saved of `before` has to say."""
    write(capture(before), directory)
    return restore(directory, now).notes


def test_what_is_built_as_before_needs_no_word(tmp_path: Path) -> None:
    """After some steps as well, which have changed all that changes in training."""

    def built() -> dict[str, Any]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        optimizer = optimizer_of(model)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": schedulers.SequentialLR(
                optimizer, [schedulers.LinearLR(optimizer, total_iters=2), schedulers.StepLR(optimizer, 1)], [2]
            ),
            "scaler": torch.amp.GradScaler("cpu"),
            "tied": tied(),
        }

    before = built()
    for _ in range(4):
        loss = before["model"](torch.randn(4, 3)).square().sum()
        before["scaler"].scale(loss).backward()
        before["scaler"].step(before["optimizer"])
        before["scaler"].update()
        before["scheduler"].step()
    assert notes(tmp_path, before, built()) == ()


def test_weights_that_were_converted(tmp_path: Path) -> None:
    """From fp32 to bf16 they are no longer those that were trained; nor do buffers that are no floats count."""
    before, now = (torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)) for _ in range(2))
    assert notes(tmp_path, {"model": before}, {"model": now.bfloat16()}) == (
        "model: 0.weight and 5 more: torch.float32 in the checkpoint, converted to torch.bfloat16",
    )


@pytest.mark.parametrize(
    ("before", "said"),
    [
        (True, "model: embed.weight and head.weight are one tensor in the checkpoint, and not in this model"),
        (False, "model: embed.weight and head.weight are one tensor in this model, and not in the checkpoint"),
    ],
)
def test_tensors_that_are_tied_in_one_of_them_only(before: bool, said: str, tmp_path: Path) -> None:
    """Loading passes, and the first step goes another way."""
    assert notes(tmp_path, {"model": tied(before)}, {"model": tied(not before)}) == (said,)


def test_settings_of_an_optimizer(tmp_path: Path) -> None:
    """torch takes them from the checkpoint; a program that was changed in between does not get what it says."""
    model = torch.nn.Linear(3, 2)
    now = {"optimizer": optimizer_of(model, lr=0.2, weight_decay=0.5, betas=[0.8, 0.999])}
    assert notes(tmp_path, {"optimizer": optimizer_of(model)}, now) == (
        "optimizer: betas of group 0, 1 is [0.9, 0.999], as in the checkpoint, and not [0.8, 0.999]",
        "optimizer: lr of group 0, 1 is 0.1, as in the checkpoint, and not 0.2",
        "optimizer: weight_decay of group 0, 1 is 0.01, as in the checkpoint, and not 0.5",
    )
    assert now["optimizer"].param_groups[1]["weight_decay"] == 0.01


def test_settings_of_schedulers(tmp_path: Path) -> None:
    """Those within others too. The learning rate of the moment is no setting; the one to begin with is."""

    def built(length: int, steps: int, rate: float) -> dict[str, Any]:
        optimizer = optimizer_of(torch.nn.Linear(1, 1, bias=False), lr=rate)
        inner = [schedulers.LinearLR(optimizer, total_iters=steps), schedulers.CosineAnnealingLR(optimizer, length)]
        return {"optimizer": optimizer, "scheduler": schedulers.SequentialLR(optimizer, inner, [5])}

    before = built(10, 5, 0.1)
    before["optimizer"].step()
    before["scheduler"].step()
    assert notes(tmp_path, before, built(20, 6, 0.2)) == (
        "optimizer: initial_lr is 0.1, as in the checkpoint, and not 0.2",
        "scheduler: total_iters is 5, as in the checkpoint, and not 6",
        "scheduler: T_max is 10, as in the checkpoint, and not 20",
    )


def test_the_learning_rate_of_a_callback_is_no_setting(tmp_path: Path) -> None:
    """One that sets it, however deep in managers, is as good as a scheduler."""

    def built(rate: float) -> dict[str, Any]:
        optimizer = optimizer_of(torch.nn.Linear(1, 1, bias=False), lr=rate)
        return {
            "optimizer": optimizer,
            "callbacks": CallbackManager([CallbackManager([LRSchedulerCallback("constant")])]),
        }

    assert notes(tmp_path, built(0.1), built(0.2)) == ()


def test_a_scaler_that_does_not_take_anything(tmp_path: Path) -> None:
    """A disabled one ignores what it is given; one that is given nothing is refused."""
    enabled, disabled = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", enabled=False)
    (said,) = notes(tmp_path / "one", {"scaler": enabled}, {"scaler": disabled})
    assert said == "scaler: it is disabled, and does not take up the scale of the checkpoint"
    with pytest.raises(IncompatibleStateError, match="'scaler' does not fit"):
        notes(tmp_path / "two", {"scaler": disabled}, {"scaler": enabled})


def test_long_lists_are_cut(tmp_path: Path) -> None:
    """A line for each of hundreds of parameter groups would be read by nobody."""
    model = torch.nn.Sequential(*[torch.nn.Linear(1, 1) for _ in range(6)])
    now = {"optimizer": optimizer_of(model)}
    for number, group in enumerate(now["optimizer"].param_groups):
        group["weight_decay"] = number
    said = notes(tmp_path, {"optimizer": optimizer_of(model)}, now)
    assert (len(said), said[-1]) == (9, "optimizer: 4 more settings of the checkpoint replace others")
