"""A directory on this machine (or a network mount) as a store: durable, create-only, the same contract as a bucket."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from typing import Any

from ckptmgr.backends.atomic import copy_durable, fsync_dir, is_temp, make_dirs_durable, write_atomic
from ckptmgr.backends.base import Backend, Capabilities, CrcKind, WriteMode, raise_failed
from ckptmgr.backends.localfile import open_target, write_all
from ckptmgr.backends.oserrors import os_errors, translate_os_error
from ckptmgr.core.checksums import Digests
from ckptmgr.core.errors import BackendError, BucketNotFoundError, ConfigError, ObjectExistsError, ObjectNotFoundError

_COPY_BYTES = 4 << 20


class LocalBackend(Backend):
    """Files by absolute path. Directories come into being with the first file in them, as keys do in a bucket.

    Temporary files of writes under way are never listed. Symbolic links are followed, except those that lead back up.
    """

    protocol = ("file", "local")
    kind = "file"
    capabilities = Capabilities(create_only=True, stored_crc=None, is_local=True)
    concurrency = 1

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        path = os.fspath(path)
        for prefix in ("file://", "local://"):
            path = path.removeprefix(prefix)
        if ".." in path.split("/"):
            raise ConfigError(f"the path {path!r} leads upwards", hint="use a path without '..'")
        return os.path.abspath(path)

    def pipe_file(self, path: str, value: bytes, mode: WriteMode = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        make_dirs_durable(os.path.dirname(path))
        write_atomic(path, value, create=mode == "create")

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
        rpath = self._strip_protocol(rpath)
        make_dirs_durable(os.path.dirname(rpath))
        progress = callback.relative_update if callback is not None else None
        copy_durable(lpath, rpath, create=mode == "create", expected=expected, progress=progress)

    def get_file(
        self, rpath: str, lpath: str, callback: Any = None, *, expected: Digests | None = None, **kwargs: Any
    ) -> bool:
        rpath = self._strip_protocol(rpath)
        with os_errors("read", rpath), open(rpath, "rb", buffering=0) as source:
            fd = open_target(lpath)
            try:
                buffer = memoryview(bytearray(_COPY_BYTES))
                while count := source.readinto(buffer):
                    with os_errors("write", os.fspath(lpath)):
                        write_all(fd, buffer[:count])
                    if callback is not None:
                        callback.relative_update(count)
            finally:
                os.close(fd)
        return False

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        with os_errors("read", path), open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            first, last, _ = slice(start, end).indices(size)
            file.seek(first)
            return file.read(max(0, last - first))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        with os_errors("info", path):
            return _record(path, os.stat(path))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        try:
            records = _scan(path)
        except NotADirectoryError:
            records = [self.info(path)]
        except OSError as error:
            raise translate_os_error(error, "ls", path) from error
        records.sort(key=_by_name)
        return records if detail else [record["name"] for record in records]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> list[str] | dict[str, dict[str, Any]]:
        path = self._strip_protocol(path)
        found: list[dict[str, Any]] = []
        with os_errors("find", path):
            _walk(path, maxdepth, withdirs, found, ())
        found.sort(key=_by_name)
        return {record["name"]: record for record in found} if detail else [record["name"] for record in found]

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if _unlink(path):
            _sync_removal(os.path.dirname(path))

    def rm_files(self, paths: Sequence[str]) -> None:
        failed: dict[str, BackendError] = {}
        directories: dict[str, None] = {}
        for path in map(self._strip_protocol, paths):
            try:
                if _unlink(path):
                    directories[os.path.dirname(path)] = None
            except BackendError as error:
                failed[path] = error
        for directory in directories:
            _sync_removal(directory)
        raise_failed(failed)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Make a directory and its parents, durably. Nothing in ckptmgr needs an empty directory; other tools may."""
        path = self._strip_protocol(path)
        if not exist_ok and os.path.isdir(path):
            raise ObjectExistsError(f"{path!r} exists already", backend=self.kind, operation="mkdir", key=path)
        make_dirs_durable(path)

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """As `makedirs`."""
        self.makedirs(path)

    def rmdir(self, path: str) -> None:
        """Remove a directory if it is empty; a file in it, or no such directory, is fine."""
        path = self._strip_protocol(path)
        with os_errors("rmdir", path):
            try:
                os.rmdir(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR):
                    raise

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if self.info(path1)["type"] != "file":
            raise ObjectNotFoundError(f"no file {path1!r}", backend=self.kind, operation="copy", key=path1)
        self.put_file(self._strip_protocol(path1), path2)

    def stored_crc(self, path: str) -> tuple[CrcKind, str] | None:
        self.info(path)
        return None


def _record(path: str, stats: os.stat_result) -> dict[str, Any]:
    if stat.S_ISDIR(stats.st_mode):
        return {"name": path, "size": 0, "type": "directory"}
    return {
        "name": path,
        "size": stats.st_size,
        "type": "file",
        "etag": f"{stats.st_ino:x}-{stats.st_size:x}-{stats.st_mtime_ns:x}",
        "mtime": stats.st_mtime,
    }


def _by_name(record: dict[str, Any]) -> str:
    return str(record["name"])


def _scan(directory: str) -> list[dict[str, Any]]:
    """The entries of a directory. One that vanishes between being listed and being looked at, or a broken link, is left out."""
    records = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if not is_temp(entry.name):
                try:
                    records.append(_record(entry.path, entry.stat()))
                except OSError as error:
                    if error.errno not in (errno.ENOENT, errno.ELOOP):
                        raise
    return records


def _walk(
    directory: str, depth: int | None, withdirs: bool, found: list[dict[str, Any]], above: tuple[tuple[int, int], ...]
) -> None:
    try:
        stats = os.stat(directory)
        if (stats.st_dev, stats.st_ino) in above:
            return
        records = _scan(directory)
    except (FileNotFoundError, NotADirectoryError):
        return
    for record in records:
        if record["type"] == "file":
            found.append(record)
            continue
        if withdirs:
            found.append(record)
        if depth is None or depth > 1:
            below = None if depth is None else depth - 1
            _walk(record["name"], below, withdirs, found, (*above, (stats.st_dev, stats.st_ino)))


def _sync_removal(directory: str) -> None:
    """Make removals in `directory` durable. Another process that cleans up too may have removed it as soon as it was empty."""
    with contextlib.suppress(BucketNotFoundError):
        fsync_dir(directory)


def _unlink(path: str) -> bool:
    """Whether there was a file to remove. Its directory still has to be synced."""
    with os_errors("rm", path):
        try:
            os.unlink(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True
