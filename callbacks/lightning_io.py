"""Lightning's `CheckpointIO`: files that appear whole, are read without running what is in them, and are uploaded."""

from __future__ import annotations

import importlib
import io
import logging
import os
import shutil
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ckptmgr.backends.atomic import write_atomic
from ckptmgr.core.errors import CheckpointNotFoundError, CkptmgrError, ConflictError, IntegrityError, MissingExtraError
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.run.verify import verify_directory
from ckptmgr.training.torch_files import load_file

_log = logging.getLogger(__name__)


def package() -> str:
    """The Lightning in use: the one that is imported, else the one that is installed.

    Raises:
        MissingExtraError: there is none.
    """
    for name in ("lightning.pytorch", "pytorch_lightning"):
        if name in sys.modules:
            return name
    for name, top in (("lightning.pytorch", "lightning"), ("pytorch_lightning", "pytorch_lightning")):
        if find_spec(top) is not None:
            return name
    raise MissingExtraError("Lightning is not installed", hint="pip install lightning", extra="lightning")


def base_class(module: str, name: str) -> Any:
    """The class `name` of the Lightning in use."""
    return getattr(importlib.import_module(f"{package()}.{module}"), name)


def framework() -> dict[str, str]:
    """What writes the files, for the manifest."""
    found = sys.modules.get("lightning") or sys.modules.get("pytorch_lightning")
    version = getattr(found, "__version__", None)
    return {"framework": "lightning"} | ({"lightning": str(version)} if version else {})


_TorchIO: Any = base_class("plugins.io", "TorchCheckpointIO")


class LightningCheckpointIO(_TorchIO):  # type: ignore[misc]
    """Writes checkpoints of `ModelCheckpoint` and `trainer.save_checkpoint` all or nothing, durable, and hands them to a manager for upload.

        Trainer(plugins=[LightningCheckpointIO(manager)], callbacks=[LightningCallback(manager), ModelCheckpoint(…)])

    Reading verifies a file that `ckptmgr resume` or `manager.resume_path()` has brought, and loads it with `weights_only=True` unless False is asked for by
    name. The names that Lightning gives (`last.ckpt`, `last-v1.ckpt`, `step=10.ckpt`) mean nothing here: what is newest, the manifest says. A checkpoint of
    weights alone is not uploaded: nothing can be resumed from it. One upload per step. Files on remote file systems are Lightning's own business.

    Args:
        manager: where to; None: only the local part.
    """

    def __init__(self, manager: Any = None) -> None:
        super().__init__()
        self.manager = manager
        self.failures = 0
        self._resumed_from: Path | None = None
        self._taken = -1

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write `checkpoint`, and have it uploaded in the background. Failures are logged and counted, training goes on (I9).

        Raises:
            ConflictError: the run has checkpoints and this training does not resume from one of them (I12).
        """
        if storage_options is not None or "://" in os.fspath(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(os.path.abspath(path))
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            buffer = io.BytesIO()
            torch.save(checkpoint, buffer)
            write_atomic(target, buffer.getvalue())
            self._upload(checkpoint, target)
        except ConflictError:
            raise
        except (CkptmgrError, OSError, RuntimeError) as error:
            self.failures += 1
            _log.error("%s was not saved (failure %d), training goes on: %s", target, self.failures, error)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        """What `path` holds, on the CPU unless `map_location` says otherwise.

        Raises:
            IntegrityError: it is not what `ckptmgr resume` has put there.
            IncompatibleStateError: it holds Python objects, and `weights_only` is not False.
        """
        if "://" in os.fspath(path):
            remote: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only is not False)
            return remote
        target = Path(os.path.abspath(path))
        _verify(target)
        self._resumed_from = target
        if weights_only is False or map_location is not None:
            loaded: dict[str, Any] = super().load_checkpoint(target, map_location, weights_only is not False)
            return loaded
        found: dict[str, Any] = load_file(target)
        return found

    def teardown(self) -> None:
        """Nothing: the manager closes with `LightningCallback`, or at the end of the program."""

    def _upload(self, checkpoint: dict[str, Any], path: Path) -> None:
        manager, step = self.manager, int(checkpoint["global_step"])
        if manager is None or "optimizer_states" not in checkpoint or step == self._taken:
            return
        if path.is_relative_to(manager.local_dir):
            return  # the callback's own, which it hands over itself
        manager.begin(resume_from=self._resumed_from)
        folder = Path(manager.local_dir, "lightning", f"io-{step}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copyfile(path, folder / path.name)
            # Written by renaming only: the link is safe.
            manager.take(step, folder, reasons=("model_checkpoint",), framework=framework())
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._taken = step


class TakesFiles:
    """The manager, as one that is handed the directory of a file where it would be handed a state."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def save(self, step: int, state: Mapping[str, Any], **how: Any) -> str | None:
        taken: str | None = self._manager.take(step, state["directory"], framework=framework(), **how)
        return taken

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Nothing is staged in memory."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def _verify(path: Path) -> None:
    try:
        read_sidecar(path)
    except CheckpointNotFoundError:
        return  # a file of somebody else's
    _, damage = verify_directory(path)
    if damage:
        raise IntegrityError(
            f"{path} is not the checkpoint that was put there: {damage[0].file} {damage[0].why}",
            hint="run `ckptmgr resume` again with --replace",
        )
