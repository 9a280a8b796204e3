"""What callers hand in wrongly is one clear error where they do it, and costs no later save."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckptmgr.core.errors import CkptmgrError, ConfigError, ConflictError
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.preemption import Preemption
from ckptmgr.transfer.alarm import FailureBudget
from ckptmgr.transfer.queue import QueueRules

STATE = {"n": {"value": 1}}


@pytest.fixture
def saving(tmp_path: Path) -> CheckpointManager:
    rules = QueueRules(max_block_s=5.0)
    return CheckpointManager(tmp_path / "run", local_dir=tmp_path / "disk", queue=rules, transfer="thread")


@pytest.mark.parametrize(
    "bad",
    [
        {"step": -1},
        {"step": "5"},
        {"step": 12.0},
        {"step": True},
        {"metrics": {"loss": None}},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": torch.ones(2)}},
        {"metrics": {1: 1.0}},
        {"metrics": [1.0]},
        {"epoch": float("nan")},
        {"state": torch.nn.Linear(1, 1)},
        {"state": {"n": {"value": object()}}},
    ],
    ids=lambda bad: " ".join(map(repr, bad.items()))[:40],
)
def test_a_mistake_is_named_and_later_saves_are_made(
    saving: CheckpointManager, tmp_path: Path, bad: dict[str, Any]
) -> None:
    """The writer is free again: the next save waits for nothing."""
    with saving:
        with pytest.raises(ConfigError):
            saving.save(**{"step": 1, "state": STATE, **bad})
        assert saving.save(2, STATE, wait=True) is not None
        assert saving.status().skipped == 0
    assert [stem.step for stem in RunDirectory.open(str(tmp_path / "run")).stems()] == [2]


def test_a_failed_state_dict_frees_the_writer(saving: CheckpointManager) -> None:
    """I9: the save is lost, the next one is not."""

    class Broken:
        def state_dict(self) -> Any:
            raise RuntimeError("no")

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    with saving:
        assert saving.save(1, {"n": Broken()}) is None
        assert saving.save(2, STATE) is not None


def test_numbers_of_others_are_numbers(saving: CheckpointManager, tmp_path: Path) -> None:
    """Steps and metrics come from NumPy, from tensors, and as truth values."""
    metrics = {"a": np.float32(0.5), "b": torch.tensor(0.25), "c": True, "d": np.int64(3), "e": float("inf")}
    with saving:
        saving.save(np.int64(10), STATE, metrics=metrics, epoch=np.float64(1.5), reasons="asked")  # type: ignore[arg-type]
        saving.save(torch.tensor(11), STATE)  # type: ignore[arg-type]
    history = RunDirectory.open(str(tmp_path / "run")).history()
    assert not history.broken
    first, second = (history.manifests[stem] for stem in sorted(history.manifests))
    assert (first.step, second.step) == (10, 11)
    assert dict(first.metrics) == {"a": 0.5, "b": 0.25, "c": 1.0, "d": 3.0, "e": float("inf")}
    assert (first.epoch, first.reasons) == (1.5, ("asked",))


@pytest.mark.parametrize(
    "wrong",
    [
        {"save": 500},
        {"keep": 3},
        {"keep_local": None},
        {"queue": 5},
        {"failures": 3},
        {"preemption": 75},
        {"retry": 3},
        {"strict": "no"},
        {"linger_s": "x"},
        {"linger_s": -1},
        {"close_timeout_s": -3},
        {"retry_after_s": float("nan")},
        {"wrap_backend": "x"},
        {"transfer": "carrier pigeon"},
    ],
    ids=lambda wrong: " ".join(map(repr, wrong.items())),
)
def test_an_argument_of_the_wrong_kind_is_refused_at_once(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """Not at the first step, and not in the background."""
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        CheckpointManager(tmp_path / "run", local_dir=tmp_path / "disk", **wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    [
        lambda: KeepLast("3"),  # type: ignore[arg-type]
        lambda: QueueRules(max_bytes="200GB"),  # type: ignore[arg-type]
        lambda: FailureBudget(failures="3"),  # type: ignore[arg-type]
        lambda: Preemption(grace_s="110"),  # type: ignore[arg-type]
        lambda: CheckpointManager(None),  # type: ignore[arg-type]
    ],
    ids=["KeepLast", "QueueRules", "FailureBudget", "Preemption", "CheckpointManager"],
)
def test_values_of_the_wrong_kind_are_refused(make: Callable[[], Any]) -> None:
    """Text where a number is meant, and the like."""
    with pytest.raises(ConfigError):
        make()


def test_a_local_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """With the argument that it came from, and what to do."""
    with (
        CheckpointManager(tmp_path / "run", local_dir="/dev/null/x") as manager,
        pytest.raises(CkptmgrError, match=r"local directory cannot be used.* - give local_dir"),
    ):
        manager.begin()


def test_a_manager_that_was_never_closed_is_told_from_another_process(tmp_path: Path) -> None:
    """As in a notebook, where a cell is run again."""
    old = CheckpointManager(tmp_path / "run", local_dir=tmp_path / "disk", transfer="thread")
    old.begin()
    new = CheckpointManager(tmp_path / "run", local_dir=tmp_path / "disk", transfer="thread")
    with pytest.raises(ConflictError, match=r"this process is saving .* already .*close"):
        new.begin()
    old.close()
    new.begin()
    new.close()


def test_a_fork_is_named_as_what_it_is(saving: CheckpointManager) -> None:
    """A forked child owns no writer: its save is skipped at once, for that reason."""
    with saving:
        saving.save(1, STATE, wait=True)
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            saved = saving.save(2, STATE)
            os.write(writer, b"skipped" if saved is None else b"saved")
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(reader, 10) == b"skipped"
        os.close(reader)
        os.close(writer)
