"""The final model of a training, pushed as an artifact beside the run's checkpoints."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmgr.callbacks.seams import TakingManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem

if TYPE_CHECKING:
    from ckptmgr.run.artifacts import Artifact

_WRAPPERS = ("DistributedDataParallel", "DataParallel")

_log = logging.getLogger(__name__)


def artifact_url(run_url: str, name: str | bool) -> str:
    """Where the final model of a run is kept: `<run>-final` beside it, a name of one's own beside it, or a URL."""
    store, _, run_name = run_url.rpartition("/")
    if isinstance(name, bool):
        return f"{store}/{run_name}-final"
    return name if "://" in name or name.startswith(("/", ".")) else f"{store}/{name}"


def push_final(
    manager: TakingManager,
    name: str | bool,
    model: Any,
    processing_class: Any,
    *,
    checkpoint_id: str | None,
    metrics: Mapping[str, float],
    metadata: Mapping[str, Any],
) -> Artifact:
    """Write a model and its tokenizer, and push them as the next version of the artifact; one with the same bytes as the latest is that version.

    A model with `save_pretrained` (transformers, PEFT) writes itself, with its configuration; of any other one the weights are written, as
    `model.safetensors` where the format holds them. Wrappers of `DistributedDataParallel` and `torch.compile` are left off.

    It is written beside the local tier, to `<local_dir>.final`, which is removed once the artifact is committed. After a failure it stays, and the log
    says where.

    Args:
        manager: of the run's checkpoints.
        name: see `artifact_url`.
        processing_class: a tokenizer or processor, or None.
        checkpoint_id: the checkpoint that was saved of the same step; None if there is none.

    Raises:
        ConfigError: there is no model.
        CkptmgrError, OSError: it could not be written or pushed.
    """
    if model is None:
        raise ConfigError("this host hands over no model at the end of training", hint="push it with push_artifact")
    from ckptmgr.run.artifact_links import Origin
    from ckptmgr.run.artifact_push import push_artifact
    from ckptmgr.run.directory import RunDirectory

    directory = manager.local_dir.with_name(f"{manager.local_dir.name}.final")
    shutil.rmtree(directory, ignore_errors=True)  # of a training that failed here before
    directory.mkdir(parents=True)
    url = artifact_url(manager.url, name)
    _write(_unwrapped(model), directory)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(str(directory))
    try:
        origin = (
            None
            if checkpoint_id is None
            else Origin(run=RunDirectory.open(manager.url), stem=Stem.parse(checkpoint_id))
        )
        pushed = push_artifact(directory, url, source=origin, metrics=metrics, metadata=metadata)
    except Exception:
        _log.error("the final model stays in %s; push it with `ckptmgr artifact push %s %s`", directory, directory, url)
        raise
    shutil.rmtree(directory, ignore_errors=True)
    _log.info("the final model is %s, version %s", url, pushed.version)
    return pushed


def _unwrapped(model: Any) -> Any:
    if hasattr(model, "_orig_mod"):
        return _unwrapped(model._orig_mod)
    return _unwrapped(model.module) if type(model).__name__ in _WRAPPERS else model


def _write(model: Any, directory: Path) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(str(directory))
        return
    from ckptmgr.training.state import capture, write

    write(capture({"model": model}, rng=False), directory)
