"""`LightningCheckpointIO` under Lightning's own `ModelCheckpoint`."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckptmgr import CheckpointManager
from ckptmgr.core.errors import IntegrityError
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.stores import Store

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """In place of that for the tests of the other hosts."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed; CI runs these tests in an environment of their own")


def fit(manager: Any, folder: Path, steps: int, path: Path | None = None) -> None:
    import lightning as L  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.callbacks import ModelCheckpoint  # type: ignore[import-not-found, unused-ignore]
    from lightning.pytorch.demos.boring_classes import BoringModel  # type: ignore[import-not-found, unused-ignore]

    from ckptmgr.callbacks.lightning import LightningCheckpointIO

    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        limit_val_batches=0,
        plugins=[LightningCheckpointIO(manager)],
        callbacks=[
            ModelCheckpoint(folder / "ckpt", filename="{step}", every_n_train_steps=2, save_top_k=-1, save_last=True)
        ],
    )
    trainer.fit(BoringModel(), ckpt_path=path)


def test_model_checkpoint_is_uploaded_and_gone_on_with(make_store: Callable[[str], Store], tmp_path: Path) -> None:
    """One upload per step, whatever Lightning calls its files; `=` in a name survives; the resumed run descends from what it came from."""
    url = f"{make_store('local').url}/run"
    with CheckpointManager(url, local_dir=tmp_path / "disk-1", transfer="thread") as manager:
        fit(manager, tmp_path / "one", 4)
    manifests = RunDirectory.open(url).history().manifests
    assert {stem.step: manifests[stem].files[0].path for stem in manifests} == {2: "step=2.ckpt", 4: "step=4.ckpt"}
    with CheckpointManager(url, local_dir=tmp_path / "disk-2", transfer="thread") as manager:
        path = manager.resume_path()
        assert path is not None
        fit(manager, tmp_path / "two", 6, path)
    history = RunDirectory.open(url).history()
    parent = history.attempts[2].parent
    assert parent is not None
    assert (parent.step, sorted(stem.step for stem in history.manifests)) == (4, [2, 4, 6])


def test_a_damaged_file_is_never_loaded(make_store: Callable[[str], Store], tmp_path: Path) -> None:
    """I5: also when it was damaged after it had been put there."""
    url = f"{make_store('local').url}/run"
    with CheckpointManager(url, local_dir=tmp_path / "disk-1", transfer="thread") as manager:
        fit(manager, tmp_path / "one", 2)
    with CheckpointManager(url, local_dir=tmp_path / "disk-2", transfer="thread") as manager:
        path = manager.resume_path()
        assert path is not None
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.chmod(0o644)
        path.write_bytes(data)
        with pytest.raises(IntegrityError, match=r"step=2\.ckpt"):
            fit(manager, tmp_path / "two", 6, path)
