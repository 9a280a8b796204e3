"""Memory that only grows is said; peaks, saw-teeth and the first steps are not."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks import memory
from ckptmgr.callbacks.base import TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.memory import MemoryCallback
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments

MIB = 1024 * 1024


def none() -> None:
    return None


def reader(values: Iterable[int]) -> Any:
    """One value a look, in MiB."""
    iterator: Iterator[int] = iter(values)
    return lambda: next(iterator) * MIB


def play(callback: MemoryCallback, steps: int, first: int = 0, **state_options: Any) -> None:
    state, control = TrainerState(global_step=first, **state_options), TrainerControl()
    callback.on_train_begin(None, state, control)
    for _ in range(steps):
        state.global_step += 1
        callback.on_step_end(None, state, control)
    assert control == TrainerControl()


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


OPTIONS: dict[str, Any] = {"interval": 1, "window": 6, "warmup_steps": 0, "min_growth_mib": 50, "device_bytes": none}


@pytest.mark.parametrize(
    ("values", "leaks"),
    [
        ([1000] * 12, 0),
        ([1000, 1020, 1040, 1060, 1080, 1100], 1),
        ([1000, 1020, 1040, 1060, 1080, 1100] * 2, 2),  # each window for itself
        ([1000, 1020, 1040, 1060, 1080, 1100, 1120], 1),
        ([1000, 1000, 1000, 5000, 1000, 1000, 1000, 1000], 0),  # a peak
        ([1000, 2000] * 6, 0),  # a saw-tooth
        ([1000, 2000, 2100, 2100, 2100, 2100], 1),
        ([2000, 1000] + [2000] * 6, 0),
        ([1000, 1001, 1002, 1003, 1004, 1049], 0),  # too little
        ([10000, 10030, 10060, 10090, 10120, 10150], 0),  # too little of it
        ([2000, 1900, 1800, 1700, 1600, 1500], 0),
    ],
)
def test_growth_over_a_whole_window_is_a_leak(values: list[int], leaks: int, caplog: pytest.LogCaptureFixture) -> None:
    callback = MemoryCallback(host_bytes=reader(values), **OPTIONS)
    play(callback, len(values))
    assert callback.leaks == len(said(caplog)) == leaks
    assert callback.last == {"host": values[-1] * MIB}


def test_what_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """Where from and where to, how fast; host and device each for itself."""
    options = OPTIONS | {"interval": 10, "device_bytes": reader([100, 100, 150, 200, 250, 300])}
    play(MemoryCallback(host_bytes=reader([1000] * 6), **options), 60, first=40)
    assert said(caplog) == [
        "device memory grows: from 100 MiB at step 50 to 300 MiB at step 100, 4.29 MiB a step; something may be kept that is not needed any more"
    ]


def test_the_first_steps_of_a_process_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    """After a resume, too."""
    growing = [1000 + 100 * step for step in range(8)] + [1800] * 6
    callback = MemoryCallback(host_bytes=reader(growing[8:]), **OPTIONS | {"warmup_steps": 8})
    play(callback, 14, first=100)
    assert said(caplog) == []
    assert callback.last


def test_a_second_training_begins_anew() -> None:
    callback = MemoryCallback(host_bytes=reader([1000, 1100, 1200, 1300, 1400, 1500]), **OPTIONS)
    play(callback, 3)
    play(callback, 3)
    assert callback.leaks == 0


def test_other_processes_of_the_machine_do_not_look() -> None:
    callback = MemoryCallback(host_bytes=reader([]), **OPTIONS)
    play(callback, 6, is_local_process_zero=False)
    assert callback.last == {}


def test_the_memory_of_this_process(tmp_path: Path) -> None:
    """It is what the kernel says; a system without is one without."""
    before = memory.resident_bytes()
    assert before is not None
    held = torch.ones(64 * MIB // 4)
    after = memory.resident_bytes()
    assert after is not None
    assert after - before > 48 * MIB
    assert held.sum() > 0
    assert memory.resident_bytes(tmp_path / "nothing") is None
    (tmp_path / "odd").write_text("1")
    assert memory.resident_bytes(tmp_path / "odd") is None


def test_without_a_device_there_is_nothing_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """And CUDA is not set up for it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert memory.allocated_bytes() is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7)
    assert memory.allocated_bytes() == 7


def test_a_leak_in_a_training_is_found(caplog: pytest.LogCaptureFixture) -> None:
    """In the embedded Trainer and a manager: a list that keeps 4 MiB a step."""
    kept: list[torch.Tensor] = []
    callback = MemoryCallback(interval=2, window=6, warmup_steps=2, min_growth_mib=16, min_growth=0.01)
    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=16, logging_steps=None),
        train_dataloader=[torch.ones(1)] * 16,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn=lambda model, batch: kept.append(torch.ones(MIB)) or model(batch).sum(),  # type: ignore[func-returns-value]
        callbacks=[CallbackManager([callback])],
    )
    trainer.train()
    assert callback.leaks == 1
    assert "host memory grows" in said(caplog)[0]


@pytest.mark.parametrize(
    "options",
    [{"interval": 0}, {"window": 2}, {"min_growth_mib": -1}, {"min_growth": -0.1}, {"warmup_steps": -1}],
)
def test_arguments_are_looked_at(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryCallback(**options)
    assert "MemoryCallback: " in str(caught.value)
    assert caught.value.hint
