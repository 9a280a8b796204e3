"""What one pass takes and gives: batches on their device, the loss out of whatever a model returns, modes, and the optimizer's step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ckptmgr.core.errors import ConfigError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Outputs(dict[str, Any]):
    """What a pass gave, by name, as hooks get it: `outputs["loss"]` and `outputs.loss`, as models of transformers do it."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the outputs have no {name!r}; they have {', '.join(self)}") from None


def call_model(model: torch.nn.Module, batch: Any) -> Any:
    """The forward of `model`, with the arguments that a mapping, a list or tuple, or any other batch stands for."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (list, tuple)) else model(batch)


def split_loss(result: Any) -> tuple[torch.Tensor, Outputs]:
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
    detached = {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in named.items()}
    return loss, Outputs(detached)


def to_device(batch: Any, device: torch.device) -> Any:
    """`batch` with all tensors in mappings, lists and tuples on `device`; other values stay as they are."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if type(batch) in (list, tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


def autocast(device: torch.device, amp: str | None) -> contextlib.AbstractContextManager[Any]:
    """Automatic mixed precision as `TrainingArguments.amp` says; nothing if None."""
    return torch.autocast(device.type, _DTYPES[amp]) if amp else contextlib.nullcontext()


@contextlib.contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Without gradient and in eval mode; afterwards in the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    scaler: torch.amp.GradScaler | None,
    *,
    max_grad_norm: float | None,
    before: Callable[[torch.Tensor | None], None],
) -> bool:
    """Unscale, clip, and step.

    Args:
        before: called when the gradients are complete, unscaled and clipped, with their norm before they were clipped; None if they were not.

    Returns:
        Whether it stepped; False when the scaler found an overflow.
    """
    if scaler is not None:
        # Before the hook: clipping and norms are of the true gradients (K003).
        scaler.unscale_(optimizer)
    norm = None if max_grad_norm is None else torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    before(norm)
    if scaler is None:
        optimizer.step()
        return True
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() >= scale
