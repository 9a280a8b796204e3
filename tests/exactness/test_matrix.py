"""Resume is exact: hosts x interruptions x precisions, each to the last bit against the uninterrupted run.

Compared are losses, weights and buffers, the states of the optimizer, scheduler and scaler, learning rates, evaluations, and the ids of all samples, of
the epoch of the interruption and of those after it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ckptmgr import (
    CheckpointManager,
    EpochEnded,
    EveryNEpochs,
    EveryNSteps,
    ResumableLoader,
    StepEnded,
    Trainer,
    TrainingArguments,
)
from ckptmgr.callbacks import Callback, SaveModelCallback
from ckptmgr.callbacks.base import TrainerState

EPOCHS, ACCUMULATION, EVAL_STEPS = 3, 2, 4
SAVE = EveryNSteps(2) | EveryNEpochs(1)
Precision = Literal["fp32", "bf16", "fp16"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


pytestmark = pytest.mark.usefixtures("exact_bits")


class Killed(BaseException):
    """Stands for the end of a process: nothing that handles errors may handle it."""


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """18 rows with random augmentation from all three global generators: 9 batches of two, 5 steps an epoch, the last of a single batch."""

    def __init__(self, size: int = 18) -> None:
        rows = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 6, generator=rows)
        self.y = torch.randn(size, 1, generator=rows)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        return self.x[index] + 0.01 * noise, self.y[index], index


@dataclass
class Trace:
    """What one process of a training did, and what it ended with; dies in the n-th call of `here` with the name of a place."""

    die: tuple[str, int] | None = None
    counts: dict[str, int] = field(default_factory=dict)
    samples: list[list[int]] = field(default_factory=list)
    steps: dict[int, tuple[str, str, Any]] = field(default_factory=dict)
    evaluations: dict[int, str] = field(default_factory=dict)
    end: dict[str, Any] = field(default_factory=dict)

    def here(self, place: str) -> None:
        self.counts[place] = self.counts.get(place, 0) + 1
        if self.die == (place, self.counts[place]):
            raise Killed

    def forward(self, model: torch.nn.Module, batch: Any) -> torch.Tensor:
        x, y, ids = batch
        if model.training:
            self.samples.append(ids.tolist())
        self.here("forward" if model.training else "evaluation")
        return (model(x) - y).square().mean()  # type: ignore[no-any-return]

    def stepped(self, step: int, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        samples, self.samples = self.samples, []
        self.steps[step] = (float(loss).hex(), float(optimizer.param_groups[0]["lr"]).hex(), samples)

    def ended(self, **objects: Any) -> None:
        for name, thing in objects.items():
            self.end[name] = bits(thing.state_dict()) if hasattr(thing, "state_dict") else thing


def bits(tree: Any) -> Any:
    """`tree` with tensors as bytes."""
    if isinstance(tree, torch.Tensor):
        return (str(tree.dtype), tuple(tree.shape), tree.detach().numpy().tobytes())
    if isinstance(tree, Mapping):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, (list, tuple)) else tree


@dataclass
class Parts:
    """The objects of a training, as a fresh process builds them from its own seed."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    train: DataLoader[Any]
    evaluation: DataLoader[Any]


def parts(seed: int) -> Parts:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Parts(
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8, 12]),
        train=DataLoader(Rows(), batch_size=2, shuffle=True),
        evaluation=DataLoader(Rows(6), batch_size=2, shuffle=True),
    )


def manager(root: Path) -> CheckpointManager:
    return CheckpointManager(root / "run", local_dir=root / "local", save=SAVE, transfer="thread")


# --- the embedded Trainer -------------------------------------------------------------------------------------------------


class Watch(Callback):
    """Hands what happens to the trace; dies where an epoch begins or a step is about to."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace

    def on_epoch_begin(self, **kwargs: Any) -> None:
        self.trace.here("epoch")

    def on_step_begin(self, **kwargs: Any) -> None:
        self.trace.here("step")

    def on_step_end(self, state: TrainerState, outputs: Mapping[str, Any], optimizer: Any, **kwargs: Any) -> None:
        self.trace.stepped(state.global_step, outputs["loss"], optimizer)

    def on_evaluate(self, state: TrainerState, metrics: Mapping[str, float], **kwargs: Any) -> None:
        self.trace.evaluations[state.global_step] = metrics["eval_loss"].hex()


def embedded(trace: Trace, precision: Precision, seed: int, root: Path) -> int:
    """One process with the embedded Trainer; the step that it began at."""
    made = parts(seed)
    saving = manager(root)
    trainer = Trainer(
        made.model,
        TrainingArguments(
            num_train_epochs=EPOCHS,
            gradient_accumulation_steps=ACCUMULATION,
            eval_steps=EVAL_STEPS,
            logging_steps=3,
            amp=None if precision == "fp32" else precision,
            max_grad_norm=1.0,
        ),
        train_dataloader=made.train,
        eval_dataloader=made.evaluation,
        optimizer=made.optimizer,
        lr_scheduler=made.scheduler,
        loss_fn=trace.forward,
        callbacks=[SaveModelCallback(saving, preemption=False), Watch(trace)],
    )
    result = trainer.train(saving.resume_path())
    trace.ended(
        model=made.model,
        optimizer=made.optimizer,
        scheduler=made.scheduler,
        log=trainer.state.log_history,
        position=result.epoch,
    )
    if trainer.scaler is not None:
        trace.ended(scaler=trainer.scaler)
    return result.global_step - result.steps_run


# --- a loop of one's own --------------------------------------------------------------------------------------------------


def plain(trace: Trace, precision: Precision, seed: int, root: Path) -> int:
    """One process with a plain loop; the step that it began at."""
    made = parts(seed)
    model, optimizer, scheduler = made.model, made.optimizer, made.scheduler
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    loader = ResumableLoader(made.train)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "data": loader}

    def loss_of(batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", DTYPES.get(precision, torch.bfloat16), enabled=precision != "fp32"):
            return trace.forward(model, batch)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            losses = [loss_of(batch).double() for batch in made.evaluation]
        model.train()
        trace.evaluations[step] = float(torch.stack(losses).mean()).hex()

    with manager(root) as saving:
        restored = saving.restore(state)
        began = step = 0 if restored is None else restored.step
        for epoch in range(loader.epoch, EPOCHS):
            trace.here("epoch")
            total = torch.zeros(())
            for batch in loader:
                if loader.batches % ACCUMULATION == 1:
                    trace.here("step")
                loss = loss_of(batch) / ACCUMULATION
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
                if loader.batches % ACCUMULATION and loader.batches < len(loader):
                    continue
                scale = scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                if scaler.get_scale() >= scale:
                    scheduler.step()
                step += 1
                trace.stepped(step, total, optimizer)
                total.zero_()
                if step % EVAL_STEPS == 0:
                    evaluate(step)
                if reasons := saving.should_save(StepEnded(step=step)):
                    saving.save(step, state, reasons=reasons)
            if reasons := saving.should_save(EpochEnded(step=step, epoch=epoch + 1)):
                saving.save(step, state, epoch=epoch + 1, reasons=reasons)
    trace.ended(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler)
    return began


# --- the matrix -----------------------------------------------------------------------------------------------------------

HOSTS: dict[str, Callable[[Trace, Precision, int, Path], int]] = {"embedded": embedded, "plain loop": plain}

# Where each process but the last dies, counted within it; and the step that each process after it begins at. Saved is every second step, and the
# last of each epoch: 2, 4, 5, 6, 8, 10, 12, 14, 15.
INTERRUPTIONS: dict[str, tuple[list[tuple[str, int]], list[int]]] = {
    "epoch boundary": ([("epoch", 2)], [5]),
    "mid-epoch": ([("step", 8)], [6]),
    "second interruption in one epoch": ([("step", 8), ("step", 4)], [6, 8]),
    "between micro-batches": ([("forward", 15)], [6]),
    "during evaluation": ([("evaluation", 5)], [6]),
}


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Precision], Trace]:
    """The uninterrupted run of a host and a precision, made once; it saves as the interrupted ones do."""
    known: dict[tuple[str, str], Trace] = {}

    def whole(host: str, precision: Precision) -> Trace:
        key = (host, precision)
        if key not in known:
            known[key] = Trace()
            assert HOSTS[host](known[key], precision, 0, tmp_path_factory.mktemp("whole")) == 0
        return known[key]

    return whole


# In `make test` all interruptions in float32, and the two harder ones in float16; the rest in `make test-slow`.
_QUICK: dict[Precision, set[str]] = {
    "fp32": set(INTERRUPTIONS),
    "bf16": set(),
    "fp16": {"mid-epoch", "during evaluation"},
}


@pytest.mark.parametrize(
    ("interruption", "precision"),
    [
        pytest.param(interruption, precision, marks=() if interruption in quick else pytest.mark.slow)
        for precision, quick in _QUICK.items()
        for interruption in INTERRUPTIONS
    ],
)
@pytest.mark.parametrize("host", HOSTS)
def test_resumed_equals_uninterrupted(
    host: str, interruption: str, precision: Precision, wholes: Callable[[str, Precision], Trace], tmp_path: Path
) -> None:
    """Whatever was done twice was done alike, and the end is the same."""
    whole = wholes(host, precision)
    assert sorted(whole.steps) == list(range(1, 16))
    second = [id_ for step in range(6, 11) for ids in whole.steps[step][2] for id_ in ids]
    assert sorted(second) == list(range(18))
    deaths, begins = INTERRUPTIONS[interruption]
    began: list[int] = []
    steps: dict[int, Any] = {}
    evaluations: dict[int, str] = {}
    for number, die in enumerate([*deaths, None]):
        trace = Trace(die=die)
        # From another seed than the first one: what it resumes from must bring all.
        if die is None:
            began.append(HOSTS[host](trace, precision, 99 * number, tmp_path))
        else:
            with pytest.raises(Killed):
                HOSTS[host](trace, precision, 99 * number, tmp_path)
            began.append(min(trace.steps) - 1)
        assert trace.steps == {step: whole.steps[step] for step in trace.steps}
        steps |= trace.steps
        evaluations |= trace.evaluations
    assert began == [0, *begins]
    assert steps == whole.steps
    assert evaluations == whole.evaluations
    assert trace.end == whole.end


@pytest.mark.parametrize("host", HOSTS)
def test_saving_changes_nothing(
    host: str, wholes: Callable[[str, Precision], Trace], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that never saves is the same to the last bit as one that does: no save draws a random number or takes a batch away."""
    monkeypatch.setitem(globals(), "SAVE", EveryNSteps(1000))
    trace = Trace()
    HOSTS[host](trace, "fp32", 0, tmp_path)
    whole = wholes(host, "fp32")
    assert (trace.steps, trace.evaluations, trace.end) == (whole.steps, whole.evaluations, whole.end)


def test_scaler_overflows_are_part_of_it(wholes: Callable[[str, Precision], Trace]) -> None:
    """The fp16 runs of the matrix skip steps by overflow, or they would prove little: the scheduler knows how many steps were none."""
    end = wholes("embedded", "fp16").end
    assert end["scheduler"]["last_epoch"] < 15
    assert end["scaler"]["scale"] < 65536
