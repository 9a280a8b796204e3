"""What one forward pass takes and gives: batches on their device, and the loss out of whatever a model returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckptmgr.core.errors import ConfigError


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """The forward of `model`, with the arguments that a mapping, a list or tuple, or any other batch stands for."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)


def split_loss(result: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """The loss of what a model or a loss function returned, with its graph, and everything named in it, detached.

    Raises:
        ConfigError: there is no scalar loss in it.
    """
    named = dict(result) if isinstance(result, Mapping) else {}
    if isinstance(result, (list, tuple)) and result:
        named = {"loss": result[0]}
    loss = named.get("loss", getattr(result, "loss", result))
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        shown = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(
            f"the loss is {shown}, not a scalar tensor", hint="return the mean loss, or a mapping with it under 'loss'"
        )
    named["loss"] = loss
    return loss, {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in named.items()}


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with all tensors in mappings, lists and tuples on `device`; other values stay as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
