"""A slow link, for the demo and for whoever wants to see what a kill in the middle of an upload does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from ckptmgr.backends.base import Backend
from ckptmgr.backends.wrap import WrappedBackend

_T = TypeVar("_T")


class PacedBackend(WrappedBackend):
    """Takes `seconds` longer for each file it stores.

    In a module of its own, not in the training script: the transfer process gets `functools.partial(PacedBackend, seconds=…)` by pickle, that is
    by the name of this module, and must not run the script to find it.
    """

    def __init__(self, inner: Backend, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._never = threading.Event()

    @property
    def concurrency(self) -> int:
        """One file after the other, so that an upload is half done for a while."""
        return 1

    def _around(self, verb: str, path: str, call: Callable[[], _T]) -> _T:
        result = call()
        if verb == "put_file":
            self._never.wait(self._seconds)
        return result
