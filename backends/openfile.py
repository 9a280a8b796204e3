"""`open()` on a backend, for other tools of the fsspec world; ckptmgr itself moves whole objects.

Reading fetches ranges. Writing collects everything in a temporary file, which becomes the object when it is closed without an error: a `with` block
that raises stores nothing.
"""

from __future__ import annotations

import errno
import io
import os
import tempfile
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

if TYPE_CHECKING:
    from ckptmgr.backends.base import Backend


class ReadFile(AbstractBufferedFile):  # type: ignore[misc,unused-ignore]
    """An object opened for reading, seekable, with fsspec's read-ahead."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


class WriteFile(io.BufferedIOBase):
    """An object being written; visible after `close`, never before. Use from one thread.

    Raises:
        FileExistsError: `create`, and the object exists, at the opening or by the time of closing.
    """

    def __init__(self, backend: Backend, path: str, *, create: bool) -> None:
        super().__init__()
        if create and backend.exists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._backend = backend
        self._create = create
        self.path = path
        self._file: Any = tempfile.NamedTemporaryFile(prefix="ckptmgr-open-")  # noqa: SIM115  closed in `discard`

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        return int(self._file.write(data))

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return int(self._file.seek(offset, whence))

    def flush(self) -> None:
        self._file.flush()

    def discard(self) -> None:
        """Close without storing anything."""
        if not self.closed:
            # In this order: the base class flushes.
            super().close()
            self._file.close()

    def close(self) -> None:
        """Store the object."""
        if self.closed:
            return
        try:
            self._file.flush()
            self._backend.put_file(self._file.name, self.path, mode="create" if self._create else "overwrite")
        finally:
            self.discard()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.discard()
        else:
            self.close()

    def __del__(self) -> None:
        # Forgotten, not finished: the base class would close, and so store, it. (No file if the opening was refused.)
        if hasattr(self, "_file"):
            self.discard()
