"""The embedded Trainer resumes to the last bit, wherever a run was interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from ckptmgr.callbacks.base import Callback, TrainerState
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNEpochs, EveryNSteps, SavePolicy
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training import state as training_state

pytestmark = pytest.mark.usefixtures("exact_bits")


class Killed(BaseException):
    """Stands for the end of a process: nothing that handles errors may handle it."""


class Noisy(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with random augmentation from all three global generators; `seen` are the indices it was asked for."""

    def __init__(self, size: int) -> None:
        rows = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 6, generator=rows)
        self.y = torch.randn(size, 1, generator=rows)
        self.seen: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(index)
        noise = torch.rand(6) + random.random() + float(np.random.rand())
        return self.x[index] + 0.01 * noise, self.y[index]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The same rows without a length, in a random order."""

    def __init__(self, size: int) -> None:
        self.rows = Noisy(size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for index in torch.randperm(len(self.rows)).tolist():
            yield self.rows[index]


def shuffled(size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(size), batch_size=4, shuffle=True, **options)


def with_own_generators(size: int) -> DataLoader[Any]:
    """The sampler's generator and the loader's are two, and neither is the global one."""
    rows = Noisy(size)
    sampler = RandomSampler(rows, generator=torch.Generator().manual_seed(5))
    return DataLoader(rows, batch_size=4, sampler=sampler, generator=torch.Generator().manual_seed(6))


@dataclass
class Folders:
    """A manager that writes each checkpoint into a directory named by its step."""

    root: Path
    save_policy: SavePolicy | None = None
    saves: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)
    began: list[Path | None] = field(default_factory=list)
    closed: int = 0
    preemption: Any = None
    strict: bool = False
    should_stop: str | None = None

    def begin(self, *, resume_from: Path | None = None, **facts: Any) -> None:
        self.began.append(resume_from)

    def reserve(self, state: Mapping[str, Any]) -> None:
        pass

    def hurry(self, deadline_s: float) -> None:
        pass

    def save(self, step: int, state: Mapping[str, Any], *, reasons: Sequence[str] = (), **facts: Any) -> str:
        training_state.write(training_state.capture(state), self.root / str(step))
        self.saves.append((step, tuple(reasons)))
        return str(step)

    def poll_errors(self) -> Sequence[Exception]:
        return []

    def close(self, timeout_s: float | None = None, **limits: Any) -> Any:
        self.closed += 1
        return type("Report", (), {"pending": (), "errors": (), "exit_code": 0})


class Losses(Callback):
    """Every step's loss to the last bit; dies as a given step begins."""

    def __init__(self, die_before: int | None = None) -> None:
        self.by_step: dict[int, str] = {}
        self.die_before = die_before

    def on_step_begin(self, state: TrainerState, **kwargs: Any) -> None:
        if state.global_step + 1 == self.die_before:
            raise Killed

    def on_step_end(self, state: TrainerState, outputs: Mapping[str, torch.Tensor], **kwargs: Any) -> None:
        self.by_step[state.global_step] = float(outputs["loss"]).hex()


class Draws(Callback):
    """Uses random numbers at the start, which a resumed run draws once more than the whole one."""

    def on_train_begin(self, **kwargs: Any) -> None:
        torch.rand(17), random.random(), np.random.rand()


def build(
    loader: DataLoader[Any], args: TrainingArguments, callbacks: Sequence[Callback] = (), *, seed: int = 0
) -> Trainer:
    """A trainer as a fresh process would build it."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Trainer(
        model,
        args,
        train_dataloader=loader,
        eval_dataloader=shuffled(8),
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 9]),
        loss_fn=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        callbacks=callbacks,
    )


def weights(trainer: Trainer) -> bytes:
    return b"".join(
        tensor.numpy().tobytes() for _, tensor in sorted(trainer.model.state_dict().items()) if tensor.numel()
    )


def run_whole(make_loader: Callable[[], DataLoader[Any]], args: TrainingArguments) -> tuple[Losses, Trainer]:
    losses = Losses()
    trainer = build(make_loader(), args, [losses, Draws()])
    trainer.train()
    return losses, trainer


def run_interrupted(
    make_loader: Callable[[], DataLoader[Any]], args: TrainingArguments, kills: Sequence[int], root: Path
) -> tuple[dict[int, str], Trainer, list[dict[int, str]]]:
    """Die before each step of `kills`, each time resuming from the newest save (one every 3 steps) in a fresh trainer."""
    merged: dict[int, str] = {}
    parts = []
    for number, kill in enumerate([*kills, None]):
        losses = Losses(kill)
        trainer = build(
            make_loader(), args, [SaveModelCallback(Folders(root, EveryNSteps(3))), losses, Draws()], seed=99 * number
        )
        newest = max((int(path.name) for path in root.iterdir()), default=None)
        try:
            trainer.train(None if newest is None else root / str(newest))
        except Killed:
            assert kill is not None
        parts.append(losses.by_step)
        merged |= losses.by_step
    return merged, trainer, parts


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: shuffled(38),
    "own generators": lambda: with_own_generators(38),
    "workers": lambda: shuffled(38, num_workers=2),
    "stream": lambda: DataLoader(Stream(38), batch_size=4),
}


@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param((5,), id="within an epoch"),
        pytest.param((8,), id="within a later epoch"),
        pytest.param((5, 8, 8), id="again and again"),
        pytest.param((11,), id="near an end of epoch"),
    ],
)
def test_resume_is_exact(loader: str, kills: Sequence[int], tmp_path: Path) -> None:
    """Losses, weights and logs equal the uninterrupted run's, with shuffling, augmentation, dropout and accumulation."""
    if loader == "workers" and len(kills) > 1:
        kills = kills[:2]  # starting processes is slow
    args = TrainingArguments(num_train_epochs=3, gradient_accumulation_steps=2, logging_steps=2, eval_steps=4)
    whole, reference = run_whole(LOADERS[loader], args)
    losses, trainer, _ = run_interrupted(LOADERS[loader], args, kills, tmp_path)
    assert losses == whole.by_step
    assert len(losses) == 15  # 10 batches an epoch, the last one short: 5 steps
    assert weights(trainer) == weights(reference)
    assert trainer.state.log_history == reference.state.log_history


@pytest.mark.parametrize("loader", ["shuffled", "own generators", "stream"])
def test_resume_at_an_epoch_boundary_is_exact(loader: str, tmp_path: Path) -> None:
    """The save of the last step of an epoch goes on with the next epoch, in its own order."""
    args = TrainingArguments(num_train_epochs=3, eval_epochs=1)
    whole, reference = run_whole(LOADERS[loader], args)
    manager = Folders(tmp_path, EveryNEpochs(1))
    with pytest.raises(Killed):
        build(LOADERS[loader](), args, [SaveModelCallback(manager), Losses(14), Draws()]).train()
    assert manager.saves == [(10, ("every_n_epochs:1",))]
    resumed = Losses()
    trainer = build(LOADERS[loader](), args, [resumed, Draws()], seed=7)
    trainer.train(tmp_path / "10")
    assert resumed.by_step == {step: loss for step, loss in whole.by_step.items() if step > 10}
    assert weights(trainer) == weights(reference)


def test_persistent_workers_keep_the_order(tmp_path: Path) -> None:
    """Their first start draws a seed that later epochs do not draw; a resume in a later epoch must not be shifted by it."""

    class Plain(Noisy):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return self.x[index], self.y[index]

    def loader() -> DataLoader[Any]:
        return DataLoader(Plain(24), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)

    args = TrainingArguments(num_train_epochs=3)
    whole, _ = run_whole(loader, args)
    losses, _, _ = run_interrupted(loader, args, [12], tmp_path)
    assert losses == whole.by_step


def test_k108_resume_with_a_loss_scaler_is_exact(tmp_path: Path) -> None:
    """K108: scale and growth counter come back, so the next growth happens at the same step."""

    def scaled(callbacks: Sequence[Callback], seed: int = 0) -> Trainer:
        args = TrainingArguments(num_train_epochs=2, amp="bf16", grad_scaler=True, max_grad_norm=0.5)
        trainer = build(shuffled(32), args, callbacks, seed=seed)
        assert trainer.scaler is not None
        trainer.scaler.set_growth_interval(3)
        return trainer

    whole, resumed = Losses(), Losses()
    reference = scaled([whole])
    reference.train()
    with pytest.raises(Killed):
        scaled([SaveModelCallback(Folders(tmp_path, EveryNSteps(5))), Losses(8)]).train()
    trainer = scaled([resumed], seed=5)
    trainer.train(tmp_path / "5")
    assert resumed.by_step == {step: loss for step, loss in whole.by_step.items() if step > 5}
    assert trainer.scaler is not None
    assert reference.scaler is not None
    assert trainer.scaler.state_dict() == reference.scaler.state_dict()
    assert trainer.scaler.get_scale() == 65536 * 2**5


def test_k018_an_interrupted_epoch_gives_every_sample_once(tmp_path: Path) -> None:
    """K018: 64 samples, batch 4, killed in epoch 2 after batch 5; the next epoch's order is its own."""
    args = TrainingArguments(num_train_epochs=3)
    build(loader := shuffled(64), args).train()
    order = loader.dataset.seen  # type: ignore[attr-defined]
    with pytest.raises(Killed):
        build(first := shuffled(64), args, [SaveModelCallback(Folders(tmp_path, EveryNSteps(1))), Losses(22)]).train()
    build(second := shuffled(64), args, seed=3).train(tmp_path / "21")
    # The five batches of epoch 2 that were used are not read again.
    assert second.dataset.seen == order[84:]  # type: ignore[attr-defined]
    # The first batch of epoch 2 was loaded once more, for the digest in the checkpoint of the edge before it.
    seen = first.dataset.seen  # type: ignore[attr-defined]
    trained = seen[:64] + seen[68:88] + second.dataset.seen  # type: ignore[attr-defined]
    assert trained == order
    assert [sorted(trained[64 * e : 64 * (e + 1)]) for e in range(3)] == [list(range(64))] * 3
    assert order[64:128] != order[128:]


def test_k033_the_second_interruption_of_an_epoch_keeps_the_offset_of_the_first(tmp_path: Path) -> None:
    """K033: 30 batches, then 10 more, then run 3 begins at batch 40."""

    class Indices(Dataset[int]):
        def __len__(self) -> int:
            return 50

        def __getitem__(self, index: int) -> int:
            return index

    used: list[int] = []

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        used.extend(batch.tolist())
        return model(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]

    def run(kill: int | None, resume: Path | None) -> None:
        model = torch.nn.Linear(1, 1)
        trainer = Trainer(
            model,
            train_dataloader=DataLoader(Indices(), shuffle=True),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            loss_fn=loss_fn,
            callbacks=[SaveModelCallback(Folders(tmp_path, EveryNSteps(10))), Losses(kill)],
        )
        trainer.train(resume)

    with pytest.raises(Killed):
        run(31, None)
    with pytest.raises(Killed):
        run(41, tmp_path / "30")
    assert len(used) == 40
    run(None, tmp_path / "40")
    assert sorted(used) == list(range(50))


@pytest.mark.parametrize(("resume_at", "epoch", "batch", "steps"), [(500, 20, 0, 250), (510, 20, 40, 240)])
def test_k001_offsets_count_micro_batches(resume_at: int, epoch: int, batch: int, steps: int, tmp_path: Path) -> None:
    """K001: 100 batches an epoch, accumulation 4, 750 steps; resumed at 500 and 510."""
    args = TrainingArguments(max_steps=750, gradient_accumulation_steps=4, logging_steps=None)

    def tiny(callbacks: Sequence[Callback], used: list[int]) -> Trainer:
        def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
            used.append(int(batch))
            return model(torch.ones(1, 1)).sum()  # type: ignore[no-any-return]

        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: DataLoader[Any] = DataLoader(range(100))  # type: ignore[arg-type]
        return Trainer(model, args, train_dataloader=loader, optimizer=optimizer, loss_fn=loss_fn, callbacks=callbacks)

    with pytest.raises(Killed):
        tiny([SaveModelCallback(Folders(tmp_path, EveryNSteps(resume_at))), Losses(resume_at + 1)], []).train()
    used: list[int] = []
    trainer = tiny([], used)
    trainer.restore(tmp_path / str(resume_at))
    assert trainer.state.epoch == epoch + batch / 100
    result = trainer.train()
    assert used[0] == batch
    assert (result.steps_run, result.global_step, len(used)) == (steps, 750, 4 * steps)


def test_resuming_a_finished_training_says_so_and_runs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last step's checkpoint has nothing left to do; weights stay."""
    args = TrainingArguments(num_train_epochs=2)
    first = build(shuffled(16), args, [SaveModelCallback(Folders(tmp_path))])
    first.train()
    trainer = build(shuffled(16), args, [losses := Losses()], seed=4)
    result = trainer.train(tmp_path / "8")
    assert (result.steps_run, result.global_step) == (0, 8)
    assert losses.by_step == {}
    assert weights(trainer) == weights(first)
    assert "nothing left to do: step 8 of 8 is done" in caplog.text


def test_a_longer_training_goes_on_where_the_shorter_one_ended(tmp_path: Path) -> None:
    """A run that max_steps ended within an epoch is resumed with a larger max_steps, and equals the long one."""
    whole, reference = run_whole(lambda: shuffled(38), TrainingArguments(max_steps=14))
    build(shuffled(38), TrainingArguments(max_steps=6), [SaveModelCallback(Folders(tmp_path)), Draws()]).train()
    trainer = build(shuffled(38), TrainingArguments(max_steps=14), [losses := Losses()], seed=4)
    trainer.train(tmp_path / "6")
    assert losses.by_step == {step: loss for step, loss in whole.by_step.items() if step > 6}
    assert weights(trainer) == weights(reference)


def test_restoring_the_pieces_by_hand_is_exact_too(tmp_path: Path) -> None:
    """`manager.restore(trainer.pieces())` and then `train()`: no path is needed."""
    args = TrainingArguments(num_train_epochs=2)
    whole, _ = run_whole(lambda: shuffled(38), args)
    with pytest.raises(Killed):
        build(shuffled(38), args, [SaveModelCallback(Folders(tmp_path, EveryNSteps(7))), Losses(9), Draws()]).train()
    trainer = build(shuffled(38), args, [losses := Losses(), Draws()], seed=8)
    training_state.restore(tmp_path / "7", trainer.pieces())
    trainer.train()
    assert losses.by_step == {step: loss for step, loss in whole.by_step.items() if step > 7}
