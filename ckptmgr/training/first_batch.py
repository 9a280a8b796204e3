"""A batch as a digest: what the next batch of a training is, to be compared with what a resumed one gets."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from ckptmgr.core.checksums import blake3_hasher

_DEEPEST = 32


class Undigestible(Exception):
    """Something in a batch has no bytes that are the same in every process; `what` names it."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


def digest(batch: Any) -> str:
    """BLAKE3 over the structure of `batch`, and the type, shape and bytes of all in it: 64 hexadecimal digits.

    Equal for equal batches in any process, on any device, whatever the strides. Mappings count in their order. Waits for a GPU if tensors are there.

    Raises:
        Undigestible: it holds an object that is no tensor, array, number, string, or container of them.
    """
    hasher = blake3_hasher()
    _add(hasher, batch, _DEEPEST)
    return str(hasher.hexdigest())


def _add(hasher: Any, value: Any, depth: int) -> None:
    if not depth:
        raise Undigestible("structure without an end")
    if isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif value is None or isinstance(value, (bool, int, float, complex, str)):
        _put(hasher, type(value).__name__, _text(value))
    elif isinstance(value, (bytes, bytearray)):
        _put(hasher, "bytes", bytes(value))
    elif isinstance(value, Mapping):
        _put(hasher, "mapping", str(len(value)).encode())
        for key, item in value.items():
            _add(hasher, key, depth - 1)
            _add(hasher, item, depth - 1)
    elif isinstance(value, (list, tuple)):
        _put(hasher, "sequence", str(len(value)).encode())
        for item in value:
            _add(hasher, item, depth - 1)
    elif _is_numpy(value):
        _put(hasher, "array", f"{value.dtype.str} {list(value.shape)}".encode())
        hasher.update(value.tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        _put(hasher, "mapping", type(value).__qualname__.encode())
        for each in fields(value):
            _put(hasher, "field", each.name.encode())
            _add(hasher, getattr(value, each.name), depth - 1)
    else:
        raise Undigestible(f"{type(value).__module__}.{type(value).__qualname__}")


def _text(value: Any) -> bytes:
    # NaNs are equal here, and 0.0 is not -0.0.
    return struct.pack("<d", value) if type(value) is float else str(value).encode("utf-8", "surrogatepass")


def _put(hasher: Any, kind: str, content: bytes) -> None:
    hasher.update(f"{kind}:{len(content)}:".encode())
    hasher.update(content)


def _add_tensor(hasher: Any, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise Undigestible(f"tensor of layout {tensor.layout}")
    _put(hasher, "tensor", f"{tensor.dtype} {list(tensor.shape)}".encode())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel():
        raw: Any = plain.reshape(-1).view(torch.uint8).numpy()  # NumPy's buffers have no types on Python 3.10
        hasher.update(memoryview(raw))


def _is_numpy(value: Any) -> bool:
    """Whether it is a NumPy array or scalar whose bytes are its content; without importing NumPy."""
    if type(value).__module__.partition(".")[0] != "numpy":
        return False
    return getattr(getattr(value, "dtype", None), "kind", "O") in "biufcSUmM" and callable(
        getattr(value, "tobytes", None)
    )
