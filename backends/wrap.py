"""A backend around another one: the base of the retrying and of the fault-injecting wrapper."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckptmgr.backends.base import Backend, BucketFacts, Capabilities, Connection, CrcKind, PendingUpload, WriteMode
from ckptmgr.core.checksums import Digests

if TYPE_CHECKING:
    from ckptmgr.backends.parts import PartJournal

T = TypeVar("T")


class WrappedBackend(Backend):
    """Passes every verb of the interface through `_around`, which a subclass fills in.

    Attributes:
        inner: the backend that does the work.
    """

    def __init__(self, inner: Backend) -> None:
        super().__init__()
        self.inner = inner
        self.protocol = inner.protocol
        self.kind = inner.kind
        # fsspec has a class method here; what counts is how the inner filesystem writes its paths.
        self._strip_protocol = inner._strip_protocol

    @abstractmethod
    def _around(self, verb: str, path: str, call: Callable[[], T]) -> T:
        """Do `call`, the inner backend's `verb` on `path`, and whatever the wrapper adds to it."""

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return self.inner.capabilities

    @property
    def retries(self) -> int:
        return self.inner.retries

    @property
    def concurrency(self) -> int:
        return self.inner.concurrency

    def pipe_file(self, path: str, value: bytes, mode: WriteMode = "overwrite", **kwargs: Any) -> None:
        return self._around("pipe_file", path, lambda: self.inner.pipe_file(path, value, mode, **kwargs))

    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = None,
        mode: WriteMode = "overwrite",
        *,
        expected: Digests | None = None,
        parts: PartJournal | None = None,
        **kwargs: Any,
    ) -> None:
        def put() -> None:
            self.inner.put_file(lpath, rpath, callback, mode, expected=expected, parts=parts, **kwargs)

        return self._around("put_file", rpath, put)

    def abort_upload(self, path: str, upload_id: str) -> None:
        return self._around("abort_upload", path, lambda: self.inner.abort_upload(path, upload_id))

    def list_uploads(self, path: str) -> list[PendingUpload]:
        return self._around("list_uploads", path, lambda: self.inner.list_uploads(path))

    def bucket_facts(self, path: str) -> BucketFacts:
        return self._around("bucket_facts", path, lambda: self.inner.bucket_facts(path))

    def connection(self) -> Connection:
        return self._around("connection", "", self.inner.connection)

    def get_file(
        self, rpath: str, lpath: str, callback: Any = None, *, expected: Digests | None = None, **kwargs: Any
    ) -> bool:
        def get() -> bool:
            return self.inner.get_file(rpath, lpath, callback, expected=expected, **kwargs)

        return self._around("get_file", rpath, get)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return self._around("cat_file", path, lambda: self.inner.cat_file(path, start, end, **kwargs))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._around("info", path, lambda: self.inner.info(path, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        return self._around("ls", path, lambda: self.inner.ls(path, detail, **kwargs))

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> list[str] | dict[str, dict[str, Any]]:
        return self._around("find", path, lambda: self.inner.find(path, maxdepth, withdirs, detail, **kwargs))

    def rm_file(self, path: str) -> None:
        return self._around("rm_file", path, lambda: self.inner.rm_file(path))

    def rm_files(self, paths: Sequence[str]) -> None:
        return self._around("rm_files", paths[0] if paths else "", lambda: self.inner.rm_files(paths))

    def rmdir(self, path: str) -> None:
        return self._around("rmdir", path, lambda: self.inner.rmdir(path))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        return self._around("cp_file", path2, lambda: self.inner.cp_file(path1, path2, **kwargs))

    def stored_crc(self, path: str) -> tuple[CrcKind, str] | None:
        return self._around("stored_crc", path, lambda: self.inner.stored_crc(path))
