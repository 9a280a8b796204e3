"""A local disk that runs full: the error is reported, training goes on, and earlier checkpoints stay whole."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import Callback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import DiskFullError
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import file_problem
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.stores import Store
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager

PAGE = 4096
WEIGHTS = 40_000  # float32: 160 kB a save, besides the random states


@pytest.fixture
def small_disk(disk_of: Callable[..., Path]) -> Path:
    """A file system of 1 MiB."""
    return disk_of(1024, "small")


def fill(disk: Path, *, leaving_bytes: int) -> Path:
    """Take all room but `leaving_bytes`, as another job on the machine would."""
    filler = disk / "of-another-job"
    room = os.statvfs(disk)
    filler.write_bytes(b"x" * max(0, room.f_bavail * room.f_frsize - leaving_bytes))
    return filler


def assert_whole(tier: LocalTier) -> list[int]:
    """The steps of the tier's checkpoints, each of which has every byte."""
    history = tier.run.history()
    for stem, manifest in history.manifests.items():
        assert [file_problem(tier.data_dir(stem) / e.path, e) for e in manifest.files] == [None] * len(manifest.files)
    return [stem.step for stem in sorted(history.manifests)]


class DiskOfOthers(Callback):
    """Another job fills the disk at step 2 and gives the room back at step 4."""

    def __init__(self, disk: Path, manager: CheckpointManager) -> None:
        self._disk = disk
        self._manager = manager
        self._filler: Path | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self._manager.wait_saved(30)
        if state.global_step == 1:
            self._filler = fill(self._disk, leaving_bytes=60_000)
        if state.global_step == 3 and self._filler is not None:
            self._filler.unlink()


def test_training_goes_on_over_a_full_disk(
    make_store: Callable[[str], Store], small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps 2 and 3 cannot be saved, and it says so; 1 and 4 are there, whole, in the store as on the disk."""
    store = make_store("local")
    caplog.set_level(logging.WARNING, "ckptmgr")
    model = torch.nn.Linear(WEIGHTS, 1, bias=False)
    manager = CheckpointManager(
        f"{store.url}/run", local_dir=small_disk / "disk", save=EveryNSteps(1), keep_local=KeepLast(1)
    )
    saving = SaveModelCallback(manager)
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=4),
        train_dataloader=[torch.ones(1, WEIGHTS)] * 4,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-9),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=[DiskOfOthers(small_disk, manager), saving],
    )
    assert trainer.train().global_step == 4
    # The uploader may meet the full disk as well, when it notes how far step 1 came, and says so in lines of its own.
    lines = [record.getMessage() for record in caplog.records if "training goes on" in record.getMessage()]
    assert [line.split(" was not")[0] for line in lines] == ["step 2", "step 3"]
    assert all("free some space" in line for line in lines)
    status = manager.status()
    assert status.save_failures == 2
    assert "free some space" in status.last_save_error
    run = RunDirectory.open(f"{store.url}/run")
    assert [stem.step for stem in run.stems()] == [1, 4]
    assert assert_whole(LocalTier.open(small_disk / "disk"))[-1] == 4


@pytest.mark.parametrize("missing_pages", [45, 30, 1, 0, -1], ids=["all", "some", "one page", "journal", "manifest"])
def test_a_save_that_does_not_fit_leaves_nothing_behind(
    make_store: Callable[[str], Store], small_disk: Path, missing_pages: int
) -> None:
    """However far it came: an error of ours, no trace on the disk, the earlier save whole; with room again it works."""
    store = make_store("local")
    disk = small_disk / "disk"
    state = {"model": {"w": torch.ones(WEIGHTS)}, "more": {"n": [1] * 1000}}
    manager = CheckpointManager(f"{store.url}/run", local_dir=disk, keep_local=KeepLast(9))
    manager.save(1, state)
    manager.close()
    manager = CheckpointManager(f"{store.url}/run", local_dir=disk, keep_local=KeepLast(9), on_save_error="raise")
    manager.restore({"model": {}, "more": {}})
    manager.begin()
    before = sorted(path.name for path in disk.rglob("*"))
    pages = sum(-(-path.stat().st_size // PAGE) for path in (disk / "checkpoints").rglob("*") if path.is_file())
    filler = fill(small_disk, leaving_bytes=max(0, pages - missing_pages) * PAGE)
    with pytest.raises(DiskFullError, match=str(disk)):
        manager.save(2, state, wait=True)
    assert sorted(path.name for path in disk.rglob("*")) == before
    assert assert_whole(LocalTier.open(disk)) == [1]
    filler.unlink()
    assert manager.save(3, state, wait=True) is not None
    assert manager.close().pending == ()
    assert assert_whole(LocalTier.open(disk)) == [1, 3]
    assert [stem.step for stem in RunDirectory.open(f"{store.url}/run").stems()] == [1, 3]


def test_a_start_on_a_full_disk_says_so(make_store: Callable[[str], Store], small_disk: Path) -> None:
    """Before step 1, as an error of ours that names the directory."""
    store = make_store("local")
    fill(small_disk, leaving_bytes=0)
    with (
        CheckpointManager(f"{store.url}/run", local_dir=small_disk / "disk") as manager,
        pytest.raises(DiskFullError, match="small"),
    ):
        manager.begin()
