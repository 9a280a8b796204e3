"""What an evaluation's loader carries from one evaluation to the next."""

from __future__ import annotations

import base64
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ckptmgr.training.random_sources import generators

_log = logging.getLogger(__name__)


class EvaluationData:
    """What an evaluation's loader carries from one evaluation to the next: the states of generators that it owns, and whether its persistent workers
    were started, which draws a seed that later evaluations do not draw.

    Args:
        loader: gives the loader; None: there is none.
    """

    def __init__(self, loader: Callable[[], Iterable[Any] | None]) -> None:
        self._loader = loader
        self._saved: Mapping[str, Any] | None = None

    @property
    def generators(self) -> list[torch.Generator]:
        """The loader's own generators."""
        return generators(self._loader())

    def state_dict(self) -> dict[str, Any]:
        """JSON values; empty for the usual loader, which goes by the global random states alone."""
        states = [base64.b64encode(bytes(each.get_state().tolist())).decode() for each in self.generators]
        started = getattr(self._loader(), "_iterator", None) is not None
        return ({"generators": states} if states else {}) | ({"workers": True} if started else {})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what was saved; `begin` does it again, after what may have been evaluated in between."""
        self._saved = state
        self._set_generators()

    def begin(self) -> None:
        """Training begins: what is left to do of a saved state. The random states must be set afterwards."""
        if self._saved is None:
            return
        loader: Any = self._loader()
        if self._saved.get("workers") and getattr(loader, "persistent_workers", False) and loader._iterator is None:
            iter(loader)
        self._set_generators()
        self._saved = None

    def _set_generators(self) -> None:
        states = [] if self._saved is None else self._saved.get("generators", [])
        own = self.generators
        if len(states) != len(own):
            _log.warning(
                "the eval_dataloader has %d generators of its own, the checkpoint was made with %d: its order will not be that of an "
                "uninterrupted run",
                len(own),
                len(states),
            )
        for generator, state in zip(own, states, strict=False):
            generator.set_state(torch.tensor(list(base64.b64decode(state)), dtype=torch.uint8))
