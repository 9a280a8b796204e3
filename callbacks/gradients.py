"""Gradients as a whole: their norm, and what limits it. torch is imported when there is a gradient to look at."""

from __future__ import annotations

import math
from typing import Any


def with_gradients(model: Any, optimizer: Any = None) -> list[Any]:
    """The parameters that have a gradient: those of `model`, or without one those of `optimizer`."""
    if hasattr(model, "parameters"):
        parameters = list(model.parameters())
    else:
        parameters = [each for group in getattr(optimizer, "param_groups", ()) for each in group["params"]]
    return [parameter for parameter in parameters if parameter.grad is not None]


def total_norm(parameters: list[Any]) -> Any:
    """The 2-norm of all gradients together, a scalar tensor on their device. Waits for no device.

    Where gradients are sharded it is a DTensor, whose parts the ranks have; see `readable`.
    """
    from torch.nn.utils import get_total_norm

    return get_total_norm([parameter.grad for parameter in parameters])


def readable(norm: Any) -> Any:
    """`norm` as a plain tensor. A collective where it is sharded: every rank must come here at the same point, as for clipping."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def clip_norm(parameters: list[Any], limit: float, norm: Any) -> None:
    """Scale all gradients so that their `norm` is at most `limit`; not if it is not finite: scaled by it, all of them would be NaN.

    Gradients whose norm is below the limit stay as they are, to the last bit.
    """
    import torch

    usable = torch.where(torch.isfinite(norm), norm, torch.zeros_like(norm))
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, usable)


def clip_value(parameters: list[Any], limit: float, norm: Any) -> None:
    """Bring each element of the gradients between -limit and limit; not if their `norm`, a plain tensor, is not finite: an overflow would look like a
    gradient."""
    import torch

    bound = torch.where(torch.isfinite(norm), torch.full_like(norm, limit), torch.full_like(norm, math.inf))
    for parameter in parameters:
        local = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
        here = bound.to(local.device, local.dtype)
        local.clamp_(-here, here)
