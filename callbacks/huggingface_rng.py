"""The random states that loading data draws from, as JSON values: they have a place in Hugging Face's `trainer_state.json`."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptmgr.training.random_sources import generators
from ckptmgr.training.rng import CpuMark

_WORD = "I"  # 32 bits, as Python's and NumPy's Mersenne twisters have them
_NUMPY_KIND = "MT19937"


class CpuRng(CpuMark):
    """A `CpuMark` that can be saved; NumPy's generator counts if it is the usual one. GPUs' generators are not looked at: no dataset draws from them."""

    @classmethod
    def now(cls) -> CpuRng:
        """Those of this moment."""
        return cls()

    def as_document(self) -> dict[str, Any]:
        """JSON values, about 14 kB."""
        version, words, gauss = self._python
        document = {"python": [version, _text(array(_WORD, words)), gauss], "cpu": _text(self._torch.numpy())}
        if self._numpy is not None and self._numpy["bit_generator"] == _NUMPY_KIND:
            state, gauss = self._numpy["state"], (self._numpy["has_gauss"], self._numpy["gauss"])
            document["numpy"] = [_NUMPY_KIND, _text(state["key"]), state["pos"], *gauss]
        return document

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> CpuRng:
        """What `as_document` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that.
        """
        mark = cls.__new__(cls)
        version, words, gauss = document["python"]
        mark._python = (version, tuple(_words(words)), gauss)
        mark._torch = _tensor(document["cpu"])
        mark._numpy = None
        if document.get("numpy") is not None:
            kind, keys, position, has_gauss, gauss = document["numpy"]
            state = {"key": _words(keys), "pos": position}
            mark._numpy = {"bit_generator": kind, "state": state, "has_gauss": has_gauss, "gauss": gauss}
        return mark

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CpuRng) and self.as_document() == other.as_document()

    __hash__ = None  # type: ignore[assignment]


def own_states(loader: Any) -> list[str]:
    """The states of the generators that `loader` and its samplers own, as JSON values of about 7 kB each."""
    return [_text(generator.get_state().numpy()) for generator in generators(loader)]


def set_own_states(loader: Any, states: Sequence[str]) -> None:
    """Set them to what `own_states` returned.

    Raises:
        ValueError, TypeError, RuntimeError: it is not that, or the loader has another number of them.
    """
    for generator, state in zip(generators(loader), states, strict=True):
        generator.set_state(_tensor(state))


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _text(data: Any) -> str:
    return base64.b64encode(data.tobytes()).decode("ascii")


def _words(text: str) -> array[int]:
    return array(_WORD, base64.b64decode(text))
