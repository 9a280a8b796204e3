"""Trees of state: nested dicts and lists of tensors and plain values, copied to host memory, and written as JSON where that is exact."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import torch

from ckptmgr.core.errors import ConfigError

_IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device)
_FLOAT_TAG = "$float"


class TreeCopier:
    """Deep copies of trees on the CPU, for one snapshot.

    Tensors that share a storage share the copy of it as well, across all trees of this copier, and each storage is copied once. What comes
    out is made only of types that torch loads with `weights_only=True`. Not thread-safe.
    """

    def __init__(self) -> None:
        # The source stays referenced beside its copy: were it freed, the next storage could get its address and be taken for it.
        self._storages: dict[tuple[int, torch.dtype], tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.size_bytes = 0

    def copy(self, value: Any, where: str) -> Any:
        """A deep copy of `value` that shares no memory with it; `where` names it in errors.

        Tensors lose `requires_grad`; dict subclasses other than OrderedDict and Counter become dicts.

        Raises:
            ConfigError: something in it is of a type that safe loading would refuse.
        """
        if isinstance(value, torch.Tensor):
            return self._tensor(value, where)
        if isinstance(value, _IMMUTABLE) and type(value) in _IMMUTABLE:
            return value
        if isinstance(value, dict):
            return self._dict(value, where)
        if isinstance(value, tuple) and type(value) is tuple:
            return tuple(self.copy(item, f"{where}[{i}]") for i, item in enumerate(value))
        if isinstance(value, list):
            return [self.copy(item, f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, set):
            return {self.copy(item, f"{where} (set)") for item in value}
        if isinstance(value, bytearray):
            return bytearray(value)
        if _is_plain_numpy(value):
            return value.copy()
        # IntEnum, str enums and other named numbers compare equal to what they are made of.
        for plain in (int, float, str):
            if isinstance(value, plain):
                return plain(value)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise ConfigError(
            f"{where} is a {kind}, which loading without pickle would refuse",
            hint="return tensors, numbers, strings, lists and dicts from state_dict()",
        )

    def _dict(self, value: dict[Any, Any], where: str) -> dict[Any, Any]:
        items = (
            (self.copy(key, f"key {key!r} of {where}"), self.copy(item, f"{where}.{key}"))
            for key, item in value.items()
        )
        if type(value) is Counter:
            return Counter(dict(items))
        if type(value) is not OrderedDict:
            return dict(items)
        ordered = OrderedDict(items)
        if vars(value):
            # A module's state dict carries the version of each layer's format here; loading converts old ones by it.
            ordered.__dict__.update(self._dict(vars(value), where))
        return ordered

    def _tensor(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta":
            kind = "meta tensor" if tensor.device.type == "meta" else type(tensor).__qualname__
            raise ConfigError(
                f"{where} is a {kind}, which has no bytes of its own to save here",
                hint="gather sharded tensors first, and hand over plain ones",
            )
        source = tensor.detach()
        if source.layout is not torch.strided or source.is_quantized:
            self.size_bytes += source.element_size() * source.numel() if source.layout is torch.strided else 0
            return source.to("cpu", copy=True)
        source = source.resolve_conj().resolve_neg()
        storage = self._storage(source.untyped_storage(), source.dtype)
        return torch.empty(0, dtype=source.dtype).set_(storage, source.storage_offset(), source.size(), source.stride())

    def _storage(self, source: Any, dtype: torch.dtype) -> torch.UntypedStorage:
        # By dtype as well: torch.save refuses two views of one storage with different types.
        key = (source._cdata, dtype)
        if key not in self._storages:
            self._storages[key] = (source, source.clone() if source.device.type == "cpu" else source.cpu())
            self.size_bytes += source.nbytes()
        return self._storages[key][1]


def _is_plain_numpy(value: Any) -> bool:
    """Whether `value` is a NumPy scalar or an array of numbers or strings; without importing NumPy."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return False
    dtype = getattr(value, "dtype", None)
    return getattr(dtype, "kind", "O") in "biufcSU" and callable(getattr(value, "copy", None))


def to_json(tree: Any) -> bytes | None:
    """`tree` as JSON that gives back exactly the same tree, types and order included; None where JSON cannot.

    Tuples, keys that are no strings, and tensors are what it cannot. NaN and infinities are written as `{"$float": "nan"}`,
    so that the file is JSON for every reader.
    """
    if not _is_exact(tree):
        return None
    return json.dumps(_tagged(tree), allow_nan=False).encode()


def from_json(data: bytes) -> Any:
    """What `to_json` was given.

    Raises:
        ValueError: `data` is not JSON.
    """
    return json.loads(data, object_hook=_untagged)


def _is_exact(tree: Any) -> bool:
    kind = type(tree)
    if kind is list:
        return all(map(_is_exact, tree))
    if kind is dict:
        return set(tree) != {_FLOAT_TAG} and all(type(key) is str and _is_exact(item) for key, item in tree.items())
    return kind in (str, int, float, bool, type(None))


def _tagged(tree: Any) -> Any:
    if type(tree) is float and not math.isfinite(tree):
        return {_FLOAT_TAG: str(tree)}
    if type(tree) is list:
        return [_tagged(item) for item in tree]
    if type(tree) is dict:
        return {key: _tagged(item) for key, item in tree.items()}
    return tree


def _untagged(value: Mapping[str, Any]) -> Any:
    return float(value[_FLOAT_TAG]) if set(value) == {_FLOAT_TAG} else value
