"""Whether a saved state fits an object, beyond what torch itself looks at, and what of the object's own settings it replaces.

torch loads momenta of any shape, the state of any scheduler into any other, half precision into full, and takes settings such as `weight_decay`
from the checkpoint without a word. The first two are errors here; the others are what was asked for, perhaps, and are said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ckptmgr.core.errors import IncompatibleStateError

# What schedulers count or remember; the rest of their state is how they were built.
_COURSE = frozenset(
    {"last_epoch", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "T_i", "base_lrs", "mode_worse", "verbose"}
)
# Schedulers that say so in the group change these as they go.
_CYCLED = frozenset({"momentum", "betas"})
_NAMED_MAX = 8


def misfit(name: str, why: str) -> IncompatibleStateError:
    """The error for a state that does not fit."""
    return IncompatibleStateError(
        f"the saved state of {name!r} does not fit: {why}",
        hint=f"build {name} as it was when the checkpoint was made, or leave this piece out",
        piece=name,
    )


def check(name: str, piece: Any, tree: Any) -> None:
    """Refuse what torch would load although it is of another object; nothing is loaded.

    Raises:
        IncompatibleStateError: an optimizer's momenta are not of its parameters' shapes, or a scheduler is of another class.
    """
    if isinstance(piece, torch.optim.Optimizer):
        _check_optimizer(name, piece, tree)
    elif isinstance(piece, torch.optim.lr_scheduler.LRScheduler):
        _check_scheduler(name, piece, tree)


def differences(name: str, piece: Any, tree: Any, *, scheduled: bool) -> tuple[str, ...]:
    """What `tree`, which fits, replaces in `piece` besides its course, one line each. No collective, and no hook of a model, is called.

    Args:
        scheduled: learning rates are part of the course: a scheduler sets them.
    """
    if not isinstance(tree, Mapping):
        return ()
    if isinstance(piece, torch.nn.Module):
        lines = [*_types(piece, tree), *_ties(piece, tree)]
    elif isinstance(piece, torch.optim.Optimizer):
        lines = list(_group_settings(piece, tree, {"params", "lr"} if scheduled else {"params"}))
    elif isinstance(piece, torch.optim.lr_scheduler.LRScheduler):
        lines = list(_settings(piece.state_dict(), tree))
    elif isinstance(piece, torch.amp.GradScaler) and not piece.is_enabled():
        lines = ["it is disabled, and does not take up the scale of the checkpoint"] if tree else []
    else:
        lines = []
    left_out = len(lines) - _NAMED_MAX
    if left_out > 0:
        lines[_NAMED_MAX:] = [f"{left_out} more settings of the checkpoint replace others"]
    return tuple(f"{name}: {line}" for line in lines)


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer, tree: Any) -> None:
    """Compare the shapes of momenta with the parameters: torch loads any, and fails steps later, or broadcasts."""
    try:
        saved = [key for group in tree["param_groups"] for key in group["params"]]
        states = tree["state"]
    except (TypeError, KeyError) as error:
        raise misfit(name, "it is not the state of an optimizer") from error
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for key, parameter in zip(saved, parameters, strict=False):
        for what in ("exp_avg", "momentum_buffer"):
            momentum = states.get(key, {}).get(what)
            if isinstance(momentum, torch.Tensor) and momentum.shape != parameter.shape:
                shapes = f"{tuple(momentum.shape)} in the checkpoint, the parameter is {tuple(parameter.shape)}"
                raise misfit(name, f"{what} of parameter {key} is {shapes}")


def _check_scheduler(name: str, scheduler: Any, tree: Any) -> None:
    if not isinstance(tree, Mapping):
        raise misfit(name, "it is not the state of a scheduler")
    saved, own = _public(tree), _public(scheduler.state_dict())
    # Versions of torch add names, or drop some; another class does both.
    if saved - own and own - saved:
        raise misfit(
            name,
            f"it has {', '.join(sorted(saved - own))}, and a {type(scheduler).__name__} has {', '.join(sorted(own - saved))}",
        )


def _public(state: Mapping[str, Any]) -> set[str]:
    return {key for key in state if isinstance(key, str) and not key.startswith("_") and key not in _COURSE}


def _types(module: torch.nn.Module, tree: Mapping[str, Any]) -> Iterator[str]:
    """Tensors that were converted: to a type of fewer bits, training does not go on from where it was."""
    converted: dict[tuple[torch.dtype, torch.dtype], list[str]] = {}
    for key, tensor in _tensors(module).items():
        saved = tree.get(key)
        if isinstance(saved, torch.Tensor) and saved.dtype is not tensor.dtype:
            converted.setdefault((saved.dtype, tensor.dtype), []).append(key)
    for (before, after), keys in converted.items():
        which = keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
        yield f"{which}: {before} in the checkpoint, converted to {after}"


def _ties(module: torch.nn.Module, tree: Mapping[str, Any]) -> Iterator[str]:
    """Names that share a tensor in one of the two only: from the next step on they go different ways, or the same."""
    own = _tensors(module)
    known = own.keys() & tree.keys()
    before, after = (_shared({key: state[key] for key in sorted(known)}) for state in (tree, own))
    for names in sorted(map(sorted, before - after)):
        yield f"{' and '.join(names)} are one tensor in the checkpoint, and not in this model"
    for names in sorted(map(sorted, after - before)):
        yield f"{' and '.join(names)} are one tensor in this model, and not in the checkpoint"


def _tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names of its state dict, without calling it: a sharded model's is a collective."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    return parameters | dict(module.named_buffers(remove_duplicate=False))


def _shared(state: Mapping[str, Any]) -> set[frozenset[str]]:
    places: dict[Any, set[str]] = {}
    for name, tensor in state.items():
        plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
        if plain and not tensor.is_meta and tensor.nbytes:
            # By device: an address may be one on each.
            place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape)
            places.setdefault(place, set()).add(name)
    return {frozenset(names) for names in places.values() if len(names) > 1}


def _group_settings(optimizer: torch.optim.Optimizer, tree: Mapping[str, Any], course: set[str]) -> Iterator[str]:
    found: dict[tuple[str, str, str], list[int]] = {}
    for number, (saved, own) in enumerate(zip(tree["param_groups"], optimizer.param_groups, strict=False)):
        cycled = _CYCLED if any(key.endswith("_momentum") for key in saved) else frozenset()
        for key in saved.keys() & own.keys() - course - cycled:
            if _differ(saved[key], own[key]):
                found.setdefault((key, _text(saved[key]), _text(own[key])), []).append(number)
    several = len(optimizer.param_groups) > 1
    for (key, before, after), numbers in sorted(found.items()):
        of = f" of group {', '.join(map(str, numbers))}" if several else ""
        yield f"{key}{of} is {before}, as in the checkpoint, and not {after}"


def _settings(own: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for key in sorted(_public(own) & _public(saved)):
        if _differ(saved[key], own[key]):
            yield f"{key} is {_text(saved[key])}, as in the checkpoint, and not {_text(own[key])}"
    for mine, theirs in zip(own.get("_schedulers", ()), saved.get("_schedulers", ()), strict=False):
        yield from _settings(mine, theirs)


def _differ(one: Any, other: Any) -> bool:
    one, other = _plain(one), _plain(other)
    try:
        return bool(one != other)
    except (TypeError, ValueError, RuntimeError):  # arrays, and objects with an idea of their own of equality
        return False


def _plain(value: Any) -> Any:
    """Numbers that are tensors as numbers, tuples as lists."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _text(value: Any) -> str:
    text = repr(_plain(value))
    return text if len(text) <= 60 else f"{text[:60]}…"
