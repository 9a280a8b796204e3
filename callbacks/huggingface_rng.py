"""The random states that loading data draws from, as JSON values: they have a place in Hugging Face's `trainer_state.json`."""

from __future__ import annotations

import base64
import random
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckptmgr.training.random_sources import generators

_WORD = "I"  # 32 bits, as Python's and NumPy's Mersenne twisters have them


class CpuRng:
    """The states of Python's, NumPy's and torch's CPU generators at one moment; those of GPUs, which no dataset draws from, are not looked at.

    Cheap enough to be taken for every batch: less than 0.1 ms, and no call into a driver.
    """

    def __init__(self, python: Any, numpy: Any, cpu: torch.Tensor) -> None:
        self._python = python
        self._numpy = numpy
        self._cpu = cpu

    @classmethod
    def now(cls) -> CpuRng:
        """Those of this moment. NumPy counts if it is imported and its global generator is the usual one."""
        numpy: Any = sys.modules.get("numpy")
        state = None if numpy is None else numpy.random.get_state()
        return cls(random.getstate(), state if isinstance(state, tuple) else None, torch.get_rng_state())

    def go_back(self) -> None:
        """Set the generators to them."""
        random.setstate(self._python)
        numpy: Any = sys.modules.get("numpy")
        if self._numpy is not None and numpy is not None:
            numpy.random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)

    def as_document(self) -> dict[str, Any]:
        """JSON values, about 14 kB."""
        version, words, gauss = self._python
        document = {"python": [version, _text(array(_WORD, words)), gauss], "cpu": _text(self._cpu.numpy())}
        if self._numpy is not None:
            kind, keys, *rest = self._numpy
            document["numpy"] = [kind, _text(keys), *rest]
        return document

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> CpuRng:
        """What `as_document` gave.

        Raises:
            ValueError, KeyError, TypeError: it is not that.
        """
        version, words, gauss = document["python"]
        numpy = None
        if document.get("numpy") is not None:
            kind, keys, *rest = document["numpy"]
            numpy = (kind, _words(keys), *rest)
        return cls((version, tuple(_words(words)), gauss), numpy, _tensor(document["cpu"]))

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
