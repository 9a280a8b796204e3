"""fsspec's many-at-once verbs `get`, `put` and `copy` on a backend, for other tools of the fsspec world.

fsspec hands directories to its one-file verbs and expects them to be made, or skipped; a backend's own verbs are strict, because
a directory where a file should be is an error everywhere in ckptmgr.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from ckptmgr.backends.base import WriteMode
from ckptmgr.backends.wrap import WrappedBackend
from ckptmgr.core.checksums import Digests

T = TypeVar("T")


class BulkView(WrappedBackend):
    """The backend `inner` with one-file verbs that know what to do with directories."""

    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        return call()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.inner.makedirs(path, exist_ok=exist_ok)

    def get_file(
        self, rpath: str, lpath: str, callback: Any = None, *, expected: Digests | None = None, **kwargs: Any
    ) -> bool:
        if self.inner.isdir(rpath):
            os.makedirs(lpath, exist_ok=True)
            return False
        os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        return self.inner.get_file(rpath, lpath, callback, expected=expected)

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = None,
        mode: WriteMode = "overwrite",
        *,
        expected: Digests | None = None,
        **kwargs: Any,
    ) -> None:
        if os.path.isdir(lpath):
            self.inner.makedirs(rpath, exist_ok=True)
            return
        self.inner.put_file(lpath, rpath, callback, mode, expected=expected)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.inner.isdir(path1):
            self.inner.makedirs(path2, exist_ok=True)
            return
        self.inner.cp_file(path1, path2)
