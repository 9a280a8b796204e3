"""Any other fsspec filesystem as a backend, with what it can and cannot promise stated in its capabilities.

The adapter adds the contract's errors, uncached listings, and verification of what was stored. It cannot add atomicity: whether readers
may see part of an object is up to the filesystem (memory:// and the large object stores: never).
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from ckptmgr.backends.base import Backend, Capabilities, CrcKind, WriteMode
from ckptmgr.backends.localfile import SourceFile, open_target, write_all
from ckptmgr.core.checksums import Digests
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    CkptmgrError,
    ConfigError,
    MissingExtraError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    TransientBackendError,
)

_BLOCK_BYTES = 4 << 20
_WHOLE_BYTES = 64 << 20
# Filesystems of this process alone: a lock here decides a create among all writers there are, and all is gone when it ends.
_IN_PROCESS = ("memory",)
# Filesystems whose `pipe_file(mode="create")` is decided by the store (s3fs sends If-None-Match, gcsfs a generation match).
_STORE_DECIDES = ("s3", "s3a", "gs", "gcs")
# Views of another file or filesystem, read-only, or of a service that keeps no files.
_NO_STORES = (
    *(
        "async_wrapper",
        "asynclocal",
        "asyncwrapper",
        "blockcache",
        "cached",
        "data",
        "dir",
        "filecache",
        "generic",
        "git",
    ),
    *("github", "http", "https", "libarchive", "reference", "simplecache", "tar", "zip"),
)
_create_lock = threading.Lock()


def open_generic(scheme: str) -> GenericBackend:
    """The backend for a scheme that only fsspec knows.

    Raises:
        MissingExtraError: the package behind the scheme is not installed.
        ConfigError: the filesystem cannot be opened from a URL alone.
    """
    if scheme in _NO_STORES:
        raise ConfigError(f"{scheme}:// is no place to keep runs in", hint="use s3, oss, or a directory", scheme=scheme)
    try:
        filesystem = fsspec.filesystem(scheme, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        raise MissingExtraError(
            f"{scheme}:// cannot be opened: {error}", hint="install that package", extra=scheme
        ) from error
    except Exception as error:  # what a filesystem makes of no options at all is its own affair
        raise ConfigError(
            f"{scheme}:// cannot be opened from a URL alone: {error}", hint="use s3, oss or file"
        ) from error
    return GenericBackend(filesystem)


class GenericBackend(Backend):
    """Adapts `filesystem`. Create-only is claimed only for filesystems known to decide it atomically; elsewhere `create` looks first."""

    def __init__(self, filesystem: Any) -> None:
        super().__init__()
        protocol = filesystem.protocol
        self.inner = filesystem
        self.protocol = protocol
        self.kind = protocol if isinstance(protocol, str) else protocol[0]
        self._strip_protocol = filesystem._strip_protocol
        self.capabilities = Capabilities(
            create_only=self.kind in _IN_PROCESS + _STORE_DECIDES,
            stored_crc=None,
            is_lasting=self.kind not in _IN_PROCESS,
        )

    def pipe_file(self, path: str, value: bytes, mode: WriteMode = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        with self._errors("pipe_file", path):
            if mode == "create":
                self._create(path, value)
            else:
                self._make_parent(path)
                self.inner.pipe_file(path, value)

    def _create(self, path: str, value: bytes) -> None:
        if self.kind in _STORE_DECIDES:
            self.inner.pipe_file(path, value, mode="create")
            return
        with _create_lock:
            if self._type_at(path) is not None:
                raise FileExistsError(errno.EEXIST, "exists already", path)
            self._make_parent(path)
            self.inner.pipe_file(path, value)

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
        """Files of up to 64 MiB go up in one call. Larger ones are streamed: all or nothing where the filesystem buffers uploads, as those
        of object stores do; elsewhere readers may see a part of the file, and after a failure it is removed."""
        rpath = self._strip_protocol(rpath)
        with SourceFile(lpath, expected) as source:
            if source.size <= _WHOLE_BYTES or self.kind in _IN_PROCESS:
                data = source.digest_at(0, source.size)
                source.finish()
                self.pipe_file(rpath, data, mode)
                if callback is not None:
                    callback.relative_update(len(data))
                return
            with self._errors("put_file", rpath):
                if mode == "create" and self._type_at(rpath) is not None:
                    raise FileExistsError(errno.EEXIST, "exists already", rpath)
                self._make_parent(rpath)
                self._stream_up(source, rpath, callback)

    def _stream_up(self, source: SourceFile, rpath: str, callback: Any) -> None:
        stream = self.inner.open(rpath, "wb")
        try:
            for block in source.blocks(_BLOCK_BYTES):
                stream.write(block)
                if callback is not None:
                    callback.relative_update(len(block))
            source.finish()
        except BaseException:
            if isinstance(stream, AbstractBufferedFile):
                # Closing it, which the garbage collector does too, would make the object.
                stream.discard()
                stream.closed = True
            else:
                stream.close()
                self.rm_file(rpath)
            raise
        stream.close()

    def _make_parent(self, path: str) -> None:
        parent = path.rpartition("/")[0]
        if parent:
            self.inner.makedirs(parent, exist_ok=True)

    def get_file(
        self, rpath: str, lpath: str, callback: Any = None, *, expected: Digests | None = None, **kwargs: Any
    ) -> bool:
        rpath = self._strip_protocol(rpath)
        with self._errors("get_file", rpath):
            size = self._file_size(rpath)
            fd = open_target(lpath)
            try:
                moved = 0
                with self.inner.open(rpath, "rb") as stream:
                    while block := stream.read(_BLOCK_BYTES):
                        write_all(fd, block)
                        moved += len(block)
                        if callback is not None:
                            callback.relative_update(len(block))
            finally:
                os.close(fd)
            if moved != size:
                raise TransientBackendError(
                    f"{rpath!r} ended after {moved} of {size} bytes", backend=self.kind, operation="get_file", key=rpath
                )
        return False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        with self._errors("cat_file", path):
            first, last, _ = slice(start, end).indices(self._file_size(path))
            return b"" if last <= first else bytes(self.inner.cat_file(path, start=first, end=last))

    def _file_size(self, path: str) -> int:
        record = self.inner.info(path)
        if record["type"] != "file":
            raise FileNotFoundError(errno.ENOENT, "not a file", path)
        return int(record["size"])

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with self._errors("info", path):
            return _record(self.inner.info(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        with self._errors("ls", path):
            records = sorted(
                (_record(one) for one in self.inner.ls(path, detail=True)), key=lambda one: str(one["name"])
            )
        return records if detail else [one["name"] for one in records]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> list[str] | dict[str, dict[str, Any]]:
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        with self._errors("find", path):
            self._find_below(path, maxdepth, withdirs, found)
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def _find_below(self, path: str, depth: int | None, withdirs: bool, found: dict[str, dict[str, Any]]) -> None:
        # Not the filesystem's own find: fsspec's default hides a directory that could not be read (I7).
        try:
            records = [_record(one) for one in self.inner.ls(path, detail=True)]
        except (FileNotFoundError, NotADirectoryError):
            return
        for record in records:
            name = str(record["name"])
            if name == path:
                continue
            if withdirs or record["type"] == "file":
                found[name] = record
            if record["type"] == "directory" and (depth is None or depth > 1):
                self._find_below(name, None if depth is None else depth - 1, withdirs, found)

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        with self._errors("rm_file", path), contextlib.suppress(FileNotFoundError):
            self.inner.rm_file(path)

    def rmdir(self, path: str) -> None:
        """Remove a directory if it is empty; where the filesystem refuses, it stays."""
        with contextlib.suppress(OSError, NotImplementedError):
            self.inner.rmdir(self._strip_protocol(path))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        path1, path2 = self._strip_protocol(path1), self._strip_protocol(path2)
        with self._errors("cp_file", path1):
            self._file_size(path1)
            self._make_parent(path2)
            self.inner.cp_file(path1, path2)

    def stored_crc(self, path: str) -> tuple[CrcKind, str] | None:
        self.info(path)
        return None

    @contextlib.contextmanager
    def _errors(self, operation: str, path: str) -> Iterator[None]:
        facts = {"backend": self.kind, "operation": operation, "key": path}
        try:
            yield
        except CkptmgrError:
            raise
        except FileNotFoundError as error:
            raise ObjectNotFoundError(f"no object {path!r}", **facts) from error
        except FileExistsError as error:
            raise ObjectExistsError(f"{path!r} exists already", **facts) from error
        except PermissionError as error:
            raise AccessDeniedError(f"{operation} {path!r} was refused: {error}", **facts) from error
        except TimeoutError as error:
            raise BackendTimeoutError(f"no answer to {operation} {path!r}: {error}", **facts) from error
        except ConnectionError as error:
            raise TransientBackendError(f"{operation} {path!r} failed: {error}", **facts) from error
        # Libraries behind fsspec raise whatever they like; an unknown error must not pass for "not found", nor be tried for ever.
        except Exception as error:
            raise PermanentBackendError(
                f"{operation} {path!r} failed: {type(error).__name__}: {error}", **facts
            ) from error


def _record(info: dict[str, Any]) -> dict[str, Any]:
    record = {"name": str(info["name"]).rstrip("/"), "size": int(info.get("size") or 0), "type": str(info["type"])}
    for ours, theirs in (
        ("etag", "ETag"),
        ("etag", "etag"),
        ("mtime", "LastModified"),
        ("mtime", "created"),
        ("mtime", "mtime"),
    ):
        value = info.get(theirs)
        if value is not None:
            record[ours] = value.timestamp() if hasattr(value, "timestamp") else value
    return record
