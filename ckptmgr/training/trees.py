"""Trees of state: nested dicts and lists of tensors and plain values, copied to host memory, and written as JSON where that is exact."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from ckptmgr.core.errors import ConfigError

_IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.Size, torch.device})
_FLOAT_TAG = "$float"


class HostMemory(Protocol):
    """Where the copies of storages go."""

    def copy(self, source: torch.Tensor, *, made_now: bool) -> torch.Tensor:
        """A CPU tensor that lies over a copy of the whole storage of `source` as that does over its own.

        The bytes may arrive later, if `source` is on a device.

        Args:
            source: strided, without lazy conjugation. Autograd is off.
            made_now: it was made a moment ago, by work that its device may not have done yet.
        """


class FreshMemory:
    """Memory of its own for each copy, which is there at once."""

    def copy(self, source: torch.Tensor, *, made_now: bool) -> torch.Tensor:
        """See `HostMemory`."""
        if source.is_cpu and is_whole(source):
            return source.clone()
        storage: Any = source.untyped_storage()  # torch's storages have no types
        return tensor_over(storage.clone() if source.is_cpu else storage.cpu(), source)


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether it covers all of its storage, in order."""
    return tensor.nbytes == tensor.untyped_storage().nbytes() and tensor.is_contiguous()


def tensor_over(storage: torch.UntypedStorage, source: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that lies over `storage` as `source` does over its own."""
    empty = torch.empty(0, dtype=source.dtype, device="cpu")  # whatever the default device is
    return empty.set_(storage, source.storage_offset(), source.size(), source.stride())


class _Refused(Exception):
    """What cannot be saved, met at the place that `path` names from the inside out."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint
        self.path: list[str] = []


class TreeCopier:
    """Deep copies of trees on the CPU, for one snapshot.

    Tensors that share a storage share the copy of it as well, across all trees of this copier, and each storage is copied once. What comes
    out is made only of types that torch loads with `weights_only=True`. Not thread-safe.
    """

    def __init__(self, memory: HostMemory | None = None) -> None:
        # The source stays referenced beside its copy: were it freed, the next storage could get its address and be taken for it.
        self._storages: dict[tuple[int, torch.dtype], tuple[torch.UntypedStorage, torch.Tensor]] = {}
        self._memory = memory or FreshMemory()
        self.size_bytes = 0

    def copy(self, value: Any, where: str) -> Any:
        """A deep copy of `value` that shares no memory with it; `where` names it in errors.

        Tensors lose `requires_grad`; dict subclasses other than OrderedDict and Counter become dicts.

        Raises:
            ConfigError: something in it is of a type that safe loading would refuse.
        """
        try:
            # Inference mode would make tensors that nobody may write to after it, and buffers are written to again.
            with torch.inference_mode(False), torch.no_grad():
                return self._copy(value)
        except _Refused as refused:
            place = where + "".join(reversed(refused.path))
            raise ConfigError(f"{place} is a {refused.what}", hint=refused.hint) from None
        except RecursionError:
            raise ConfigError(
                f"{where} is nested too deeply to be saved, or holds itself",
                hint="return tensors, numbers, strings, lists and dicts from state_dict()",
            ) from None

    def _copy(self, value: Any) -> Any:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value)
        if kind in _IMMUTABLE:
            return value
        if isinstance(value, dict):
            return self._dict(value)
        if kind is tuple:
            return tuple(self._items(value))
        if isinstance(value, list):
            return self._items(value)
        if isinstance(value, set):
            return set(self._items(value))
        if isinstance(value, bytearray):
            return bytearray(value)
        if (copied := _copied_numpy(value)) is not None:
            return copied
        # IntEnum, str enums and other named numbers compare equal to what they are made of.
        for plain in (int, float, str):
            if isinstance(value, plain):
                return plain(value)
        if isinstance(value, torch.Tensor):
            raise _without_bytes(kind.__qualname__)
        raise _Refused(
            f"{kind.__module__}.{kind.__qualname__}, which loading without pickle would refuse",
            hint="return tensors, numbers, strings, lists and dicts from state_dict()",
        )

    def _items(self, values: Iterable[Any]) -> list[Any]:
        copies: list[Any] = []
        try:
            for item in values:
                copies.append(self._copy(item))
        except _Refused as refused:
            refused.path.append(f"[{len(copies)}]")
            raise
        return copies

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        copies: dict[Any, Any] = {}
        try:
            for key, item in value.items():
                copies[key if type(key) is str else self._key(key)] = self._copy(item)
        except _Refused as refused:
            refused.path.append(f".{key}")
            raise
        if type(value) is Counter:
            return Counter(copies)
        if type(value) is not OrderedDict:
            return copies
        ordered = OrderedDict(copies)
        if vars(value):
            # A module's state dict carries the version of each layer's format here; loading converts old ones by it.
            ordered.__dict__.update(self._dict(vars(value)))
        return ordered

    def _key(self, key: Any) -> Any:
        try:
            return self._copy(key)
        except _Refused as refused:
            refused.path.append(" (the key)")
            raise

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            raise _without_bytes("meta tensor")
        if not _has_storage(tensor):
            self.size_bytes += _bytes_without_storage(tensor)
            return tensor.detach().to("cpu", copy=True)
        made_now = _is_lazy(tensor)
        if made_now:
            tensor = tensor.resolve_conj().resolve_neg()
        storage: Any = tensor.untyped_storage()
        # By dtype as well: torch.save refuses two views of one storage with different types.
        key = (storage._cdata, tensor.dtype)
        known = self._storages.get(key)
        if known is not None:
            return tensor_over(known[1].untyped_storage(), tensor)
        copy = self._memory.copy(tensor, made_now=made_now)
        self._storages[key] = (storage, copy)
        self.size_bytes += storage.nbytes()
        return copy


def _without_bytes(kind: str) -> _Refused:
    return _Refused(
        f"{kind}, which has no bytes of its own to save here",
        hint="gather sharded tensors first, and hand over plain ones",
    )


class Census:
    """The storages that a `TreeCopier` will copy, counted beforehand. What it would refuse is passed over.

    Attributes:
        storages: the bytes and the device type of each.
        other_bytes: of tensors that have no storage of their own: sparse and quantized ones.
    """

    def __init__(self) -> None:
        # Referenced for the same reason as in the copier.
        self._seen: dict[tuple[int, torch.dtype], torch.UntypedStorage] = {}
        self.storages: list[tuple[int, str]] = []
        self.other_bytes = 0

    @property
    def size_bytes(self) -> int:
        """All of it."""
        return self.other_bytes + sum(size for size, _ in self.storages)

    @classmethod
    def of(cls, tree: Any) -> Census:
        """Of what is in `tree`."""
        census = cls()
        census.count(tree)
        return census

    def count(self, value: Any) -> None:
        """Count what is in the tree `value`."""
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, dict):
            for item in value.values():
                self.count(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                self.count(item)

    def _tensor(self, tensor: torch.Tensor) -> None:
        if not _is_plain(tensor):
            return
        if not _has_storage(tensor):
            self.other_bytes += _bytes_without_storage(tensor)
        elif _is_lazy(tensor):
            self.storages.append((tensor.numel() * tensor.element_size(), tensor.device.type))
        else:
            storage: Any = tensor.untyped_storage()
            key = (storage._cdata, tensor.dtype)
            if key not in self._seen:
                self._seen[key] = storage
                self.storages.append((storage.nbytes(), storage.device.type))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has bytes of its own: sharded and other special tensors keep them elsewhere."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type != "meta"


def _has_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its bytes are to be read as conjugated or negated; files have no such mark."""
    return tensor.is_conj() or tensor.is_neg()


def _bytes_without_storage(tensor: torch.Tensor) -> int:
    """About what a sparse or quantized tensor takes."""
    if tensor.layout is torch.strided:
        return tensor.element_size() * tensor.numel()
    parts = {
        torch.sparse_coo: ("_indices", "_values"),
        torch.sparse_csr: ("crow_indices", "col_indices", "values"),
        torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
        torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
    }.get(tensor.layout, ())
    return sum(part.element_size() * part.numel() for part in (getattr(tensor, name)() for name in parts))


def _copied_numpy(value: Any) -> Any:
    """A copy of `value`, if it is a NumPy scalar or an array of numbers or strings, else None; without importing NumPy.

    Of arrays of other classes only those in a file are taken, as plain ones: masked arrays and matrices would be saved, and never loaded.
    """
    numpy: Any = sys.modules.get("numpy")
    if numpy is None or getattr(getattr(value, "dtype", None), "kind", "O") not in "biufcSU":
        return None
    if type(value) in (numpy.ndarray, numpy.memmap):
        # In the order that it has: sums over another one may differ in their last bits.
        return numpy.array(value, order="K", subok=False)
    return value.copy() if isinstance(value, numpy.generic) else None


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
