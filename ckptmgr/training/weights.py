"""Flat state dicts, such as a model's, as safetensors files, which every tool reads; what they cannot express is not written as one.

Beside the tensors, the file's metadata has what a state dict is besides: the order of its names, names that share a tensor, and the versions of the
layers' formats. The tensors are written straight from the snapshot, without a second copy in memory.

Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import torch

from ckptmgr.core.errors import ConfigError, IncompatibleStateError
from ckptmgr.training.torch_files import unreadable
from ckptmgr.training.trees import from_json, to_json

SUFFIX = ".safetensors"
_OURS = "ckptmgr"
_VERSION = 1
_MODULES = "_metadata"  # where torch keeps the version of each layer's format, on the dict itself
# What the library refuses to read.
_HEADER_BYTES_MAX = 100_000_000
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Output(Protocol):
    """What a file is written to."""

    def write(self, data: bytes | bytearray | memoryview) -> int:
        """Append all of `data`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A state dict that a safetensors file gives back exactly.

    Attributes:
        header: the bytes before those of the tensors.
        tensors: those to write after it, in that order.
    """

    header: bytes
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, tree: Any) -> Weights | None:
        """`tree` as such a file; None where that would not give back the same, or where the library to read it is missing.

        It must be a flat dict from names to dense CPU tensors in C order; of tensors that share memory, each must lie over all of what they share.
        """
        if type(tree) not in (dict, OrderedDict) or not tree or sys.byteorder != "little" or not _can_be_read():
            return None
        if not all(type(name) is str and _is_writable(tensor) for name, tensor in tree.items()):
            return None
        aliases = _aliases(tree)
        modules = _modules(tree)
        if aliases is None or modules is None:
            return None
        # Largest items first: each tensor lies at a multiple of its item's size then, as readers that map the file need it.
        names = sorted((name for name in tree if name not in aliases), key=lambda name: -tree[name].element_size())
        header = _header(tree, names, aliases, modules)
        return None if header is None else cls(header=header, tensors=tuple(tree[name] for name in names))

    def write(self, file: Output) -> None:
        """Append the whole file to `file`."""
        file.write(self.header)
        for tensor in self.tensors:
            if tensor.nbytes:
                file.write(_bytes_of(tensor))


def read_weights(path: Path, *, piece: str, mapped: bool = False) -> dict[str, torch.Tensor]:
    """The state dict in the safetensors file `path`, ours or another tool's, with its tensors on the CPU; names that shared a tensor share it.

    Args:
        piece: the name of what it holds, for errors.
        mapped: leave the bytes in the file until they are used, for a caller that copies them at once; writing to them does not change the file.

    Raises:
        ConfigError: the library is not installed.
        IncompatibleStateError: a newer version of ckptmgr wrote it.
        IntegrityError: it is damaged, or cannot be read.
    """
    if not _can_be_read():
        raise ConfigError(f"reading {path.name} needs safetensors", hint="pip install 'ckptmgr[torch]'")
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            names = file.keys()
            ours = from_json((file.metadata() or {}).get(_OURS, "null").encode())
            _check_version(path, piece, ours)
            loaded = {name: file.get_tensor(name) if mapped else file.get_tensor(name).clone() for name in names}
        return loaded if ours is None else _arranged(loaded, ours)
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(path, piece, error) from error


def _can_be_read() -> bool:
    return importlib.util.find_spec("safetensors") is not None


def _is_writable(tensor: Any) -> bool:
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in _DTYPES
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _aliases(tree: Mapping[str, torch.Tensor]) -> dict[str, str] | None:
    """For each name whose tensor another one before it has as well, that one; None if tensors overlap in another way."""
    known: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    extents: dict[int, list[tuple[int, int]]] = {}
    for name, tensor in tree.items():
        if not tensor.nbytes:
            continue
        storage: Any = tensor.untyped_storage()
        start = int(tensor.storage_offset()) * tensor.element_size()
        place = (storage._cdata, start, tensor.dtype, tensor.shape)
        first = known.setdefault(place, name)
        if first != name:
            aliases[name] = first
        else:
            extents.setdefault(storage._cdata, []).append((start, start + int(tensor.nbytes)))
    return None if any(map(_overlap, extents.values())) else aliases


def _overlap(extents: list[tuple[int, int]]) -> bool:
    extents.sort()
    return any(end > following for (_, end), (following, _) in pairwise(extents))


def _modules(tree: Any) -> dict[str, Any] | None:
    """What torch keeps on a model's state dict besides its items; None if there is anything else."""
    kept = getattr(tree, "__dict__", {})
    if not kept:
        return {}
    modules = kept.get(_MODULES)
    if set(kept) != {_MODULES} or type(modules) is not OrderedDict or vars(modules):
        return None
    return {_MODULES: dict(modules)}


def _header(
    tree: Mapping[str, torch.Tensor], names: Iterable[str], aliases: Mapping[str, str], modules: Mapping[str, Any]
) -> bytes | None:
    ours = {
        "version": _VERSION,
        "ordered": type(tree) is OrderedDict,
        "order": list(tree),
        "aliases": dict(aliases),
        **modules,
    }
    described = to_json(ours)
    if described is None or "__metadata__" in tree:
        return None
    # Others look for "format": transformers refuses a file without it.
    document: dict[str, Any] = {"__metadata__": {"format": "pt", _OURS: described.decode()}}
    offset = 0
    for name in names:
        tensor = tree[name]
        end = offset + tensor.nbytes
        document[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    try:
        data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a name with half of a surrogate pair
        return None
    data += b" " * (-len(data) % 8)
    return None if len(data) > _HEADER_BYTES_MAX else len(data).to_bytes(8, "little") + data


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, which must stay alive; not through NumPy, which has no bfloat16 and may not be installed."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _check_version(path: Path, piece: str, ours: Any) -> None:
    if ours is not None and ours["version"] > _VERSION:
        raise IncompatibleStateError(
            f"{path.name} is of version {ours['version']}, and this ckptmgr reads versions up to {_VERSION}",
            hint="upgrade ckptmgr",
            piece=piece,
        )


def _arranged(loaded: Mapping[str, torch.Tensor], ours: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """What was written, from what was read and our part of the metadata."""
    items = dict(_items(loaded, ours))
    if not ours["ordered"]:
        return items
    ordered = OrderedDict(items)
    if _MODULES in ours:
        ordered.__dict__[_MODULES] = OrderedDict(ours[_MODULES])
    return ordered


def _items(loaded: Mapping[str, torch.Tensor], ours: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name in ours["order"]:
        first = ours["aliases"].get(name)
        # A tensor of its own over the same memory, as in a state dict that was never saved.
        yield name, loaded[name] if first is None else loaded[first].detach()
