"""What S3 and OSS have in common: keys, prefixes, parts, and the checks around them. A subclass supplies single requests.

A path is `bucket/key`. A directory is a prefix that some key starts with; a key that ends with a slash (the mark that consoles leave
for an empty directory) is no file. Every listing asks the store.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from ckptmgr.backends.base import CrcKind, WriteMode, raise_failed
from ckptmgr.backends.localfile import SourceFile, closing_fd, open_target
from ckptmgr.backends.objectcopy import copy_parts
from ckptmgr.backends.objectrequests import Stored
from ckptmgr.backends.objectupload import ObjectUpload, ObjectUploads
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.parts import PART_BYTES, PartJournal, PartPlan, download_parts, plan_parts
from ckptmgr.backends.partupload import upload_parts
from ckptmgr.backends.retry import Retrier
from ckptmgr.core.checksums import Digests, blake3_hasher
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    ChecksumMismatchError,
    ConfigError,
    ObjectNotFoundError,
    PermanentBackendError,
    SizeMismatchError,
    TransientBackendError,
)

DELETE_BATCH = 1000
# S3 copies up to 5 GiB in one request, OSS 1 GB; neither says anything until it is done, and that must be before the limit on silence.
# Source: https://www.alibabacloud.com/help/en/oss/developer-reference/copyobject
_MAX_SINGLE_COPY = 512 << 20
_COPY_PART_BYTES = 128 << 20


class ObjectStoreBackend(ObjectUploads):
    """Objects by `bucket/key`. No request is made before the first call.

    Args:
        retrier: tries single parts again; whole calls are `RetryingBackend`'s business.
        multipart_threshold: files larger than this many bytes go up in parts; larger than a part of `store_options` if None.
        part_bytes: bytes per part; those of `store_options` if None.
        workers: parts under way at a time, a block of each in memory.
        page_size: keys per listing request, at most 1000.
        max_single_copy: objects larger than this many bytes are copied in parts.
        store_options: what the user says about the store; `StoreOptions()` if None.

    Attributes:
        store_options: as given.
    """

    def __init__(
        self,
        *,
        retrier: Retrier | None = None,
        multipart_threshold: int | None = None,
        part_bytes: int | None = None,
        workers: int = 4,
        page_size: int = 1000,
        max_single_copy: int = _MAX_SINGLE_COPY,
        store_options: StoreOptions | None = None,
    ) -> None:
        super().__init__()
        self.store_options = store_options or StoreOptions()
        self._retrier = retrier or Retrier()
        asked = self.store_options.part_bytes or PART_BYTES
        self._part_bytes = part_bytes or asked
        self._multipart_threshold = asked if multipart_threshold is None else multipart_threshold
        self._workers = workers
        self._page_size = page_size
        self._max_single_copy = max_single_copy

    # -- writes -------------------------------------------------------------------------------------------------------

    def pipe_file(self, path: str, value: bytes, mode: WriteMode = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        crc = self._crc_of(value)
        self._confirm(path, len(value), crc, self._put(path, value, crc, mode))

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
        rpath = self._strip_protocol(rpath)
        progress = callback.relative_update if callback is not None else None
        with SourceFile(lpath, expected) as source:
            if source.size <= self._multipart_threshold:
                self._put_whole(source, rpath, mode, progress)
                return
            upload_parts(
                source,
                plan_parts(source.size, self._part_bytes),
                ObjectUpload(self, rpath, mode, self._retrier),
                what=self._url(rpath),
                retrier=self._retrier,
                workers=self._workers,
                progress=progress,
                journal=parts,
            )

    def abort_upload(self, path: str, upload_id: str) -> None:
        self._abort(self._strip_protocol(path), upload_id)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        source, target = self._strip_protocol(path1), self._strip_protocol(path2)
        found = self._head(source)
        size = found.size or 0
        if size <= self._max_single_copy:
            with self._retrier.slot():
                self._copy(source, target)
            return
        plan = plan_parts(size, max(self._part_bytes, min(_COPY_PART_BYTES, self._max_single_copy)))
        copy_parts(self, source, target, found, plan, retrier=self._retrier, workers=self._workers)

    def rm_file(self, path: str) -> None:
        try:
            self._delete(self._strip_protocol(path))
        except ObjectNotFoundError:
            return

    def rm_files(self, paths: Sequence[str]) -> None:
        by_bucket: dict[str, list[str]] = {}
        for path in paths:
            bucket, key = split(self._strip_protocol(path))
            by_bucket.setdefault(bucket, []).append(key)
        failed: dict[str, BackendError] = {}
        for bucket, keys in by_bucket.items():
            for first in range(0, len(keys), DELETE_BATCH):
                failed.update(self._delete_keys(bucket, keys[first : first + DELETE_BATCH]))
        raise_failed(failed)

    def _delete_keys(self, bucket: str, keys: list[str]) -> dict[str, BackendError]:
        """Remove one batch; keys whose refusal may pass are tried again without the others. What could not be removed, by path.

        Raises:
            BackendError: the request as a whole failed for good; others would too.
        """
        failed: dict[str, BackendError] = {}
        # What was refused by the last answer, and may pass.
        passing: dict[str, BackendError] = {}
        left = keys

        def delete() -> None:
            nonlocal left, passing
            refused = self._delete_batch(bucket, left)
            passing = {path: error for path, error in refused.items() if isinstance(error, TransientBackendError)}
            failed.update({path: error for path, error in refused.items() if path not in passing})
            left = [split(path)[1] for path in passing]
            for error in passing.values():
                raise error

        try:
            self._retrier(f"delete from {self.kind}://{bucket}", delete)
        except TransientBackendError:
            if not passing:
                raise
            failed.update(passing)
        return failed

    # -- reads --------------------------------------------------------------------------------------------------------

    def get_file(
        self,
        rpath: str,
        lpath: str,
        callback: Any = None,
        *,
        expected: Digests | None = None,
        lasting: bool = True,
        **kwargs: Any,
    ) -> bool:
        rpath = self._strip_protocol(rpath)
        # What is known to be small needs no look before: its answer says all of it, and a digest tells two versions of it apart.
        is_whole = expected is not None and 0 < expected.size <= self._part_bytes
        etag, size = (
            (None, expected.size) if expected is not None and is_whole else self._etag_and_size(rpath, expected)
        )
        seen = blake3_hasher() if expected is not None else None
        fd = open_target(lpath)
        try:
            with closing_fd(fd):
                download_parts(
                    # With the ETag: parts of two versions of an object must not end up in one file.
                    lambda offset, length: self._incoming(rpath, etag, offset, None if is_whole else offset + length),
                    PartPlan(size=size, part_bytes=self._part_bytes),
                    fd,
                    what=self._url(rpath),
                    retrier=self._retrier,
                    workers=self._workers,
                    progress=callback.relative_update if callback is not None else None,
                    follow=None if seen is None else seen.update,
                    is_whole=is_whole,
                    lasting=lasting,
                )
            if seen is None or expected is None:
                return False
            found = seen.hexdigest()
            if found != expected.blake3:
                text = f"{self._url(rpath)} arrived with BLAKE3 {found} instead of {expected.blake3}"
                raise ChecksumMismatchError(text, expected=expected.blake3, actual=found, key=rpath)
        except BaseException:
            # It has its full length from the beginning, and would look whole.
            with contextlib.suppress(OSError):
                os.unlink(lpath)
            raise
        return True

    def _etag_and_size(self, path: str, expected: Digests | None) -> tuple[str, int]:
        head = self._head(path)
        size = head.size or 0
        if expected is not None and size != expected.size:
            text = f"{self._url(path)} has {size} bytes instead of {expected.size}"
            raise SizeMismatchError(text, expected=expected.size, actual=size, key=path)
        return head.etag, size

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)
        if start is None and end is None:
            return b"".join(self._read(path, None, 0, None))
        head = self._head(path)
        first, last, _ = slice(start, end).indices(head.size or 0)
        if last <= first:
            return b""
        # A block of a large file, by whoever verifies it: data, as a download's.
        with self._retrier.slot():
            data = b"".join(self._read(path, head.etag, first, last))
            self._retrier.pace.moved(len(data), self._retrier.stop)
        if len(data) != last - first:
            # Whoever ignores the range sends all of it.
            text = f"{self._url(path)} was answered with {len(data)} bytes instead of the {last - first} asked for"
            raise TransientBackendError(text, backend=self.kind, operation="cat_file", key=path)
        return data

    def stored_crc(self, path: str) -> tuple[CrcKind, str] | None:
        crc = self._head(self._strip_protocol(path)).crc
        return None if crc is None else (self.crc_kind, crc)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        bucket, _, key = path.partition("/")
        if key:
            try:
                return _file(path, self._head_once_coded(path))
            except ObjectNotFoundError:
                pass
        page = self._page(bucket, f"{key}/" if key else "", "", None, 1)
        if key and not page.objects and not page.prefixes:
            raise self.not_found("info", path)
        return _directory(path)

    def _head(self, path: str) -> Stored:
        try:
            return self._head_once_coded(path)
        except ObjectNotFoundError:
            # The answer to a HEAD has no body: it does not tell a missing key from a missing bucket. A listing does.
            self._probe(path)
            raise

    def _head_once_coded(self, path: str) -> Stored:
        """As `_head_once`, with the store's own words for a refusal, which the bodiless answer to a HEAD lacks."""
        split(path)
        try:
            return self._head_once(path)
        except ObjectNotFoundError:
            raise
        except (AccessDeniedError, PermanentBackendError) as error:
            if getattr(error, "code", ""):
                raise
            self._probe(path)
            return self._head_again(path)

    def _probe(self, path: str) -> None:
        bucket, _, key = path.partition("/")
        self._page(bucket, key, "", None, 1)

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        records = sorted(self._list(path, "/"), key=lambda record: str(record["name"]))
        if not records and "/" in path:
            record = self.info(path)
            # A directory that holds only its own mark has no entries.
            records = [record] if record["type"] == "file" else []
        return records if detail else [record["name"] for record in records]

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> list[str] | dict[str, dict[str, Any]]:
        path = self._strip_protocol(path)
        # One level needs one level's keys only: a run's manifests, not all of its data.
        records = self._list(path, "/" if maxdepth == 1 else "")
        found = {str(record["name"]): record for record in _within(records, path, maxdepth, withdirs)}
        names = sorted(found)
        return {name: found[name] for name in names} if detail else names

    def _list(self, path: str, delimiter: str) -> Iterator[dict[str, Any]]:
        """Every entry below `path`; with a delimiter only those of the next level."""
        bucket, _, key = path.partition("/")
        prefix = f"{key}/" if key else ""
        token = None
        while True:
            page = self._page(bucket, prefix, delimiter, token, self._page_size)
            for name, stored in page.objects:
                if not name.endswith("/"):
                    yield _file(f"{bucket}/{name}", stored)
            for name in page.prefixes:
                yield _directory(f"{bucket}/{name.rstrip('/')}")
            token = page.token
            if token is None:
                return

    def not_found(self, operation: str, path: str) -> ObjectNotFoundError:
        """The error for a key that the store said it does not have."""
        return ObjectNotFoundError(f"no object {self._url(path)}", backend=self.kind, operation=operation, key=path)


def split(path: str) -> tuple[str, str]:
    """Bucket and key of a path that must name an object."""
    bucket, _, key = path.partition("/")
    if not bucket or not key:
        raise ConfigError(f"{path!r} names no object", hint="a key follows the bucket")
    return bucket, key


def _file(path: str, stored: Stored) -> dict[str, Any]:
    record = {"name": path, "size": stored.size or 0, "type": "file", "etag": stored.etag}
    if stored.mtime is not None:
        record["mtime"] = stored.mtime
    return record


def _directory(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _within(
    records: Iterator[dict[str, Any]], root: str, maxdepth: int | None, withdirs: bool
) -> Iterator[dict[str, Any]]:
    """The files of a listing down to `maxdepth`, and with `withdirs` the directories that their keys imply."""
    seen: set[str] = set()
    for record in records:
        parts = str(record["name"])[len(root) + 1 :].split("/")
        if record["type"] == "file" and (maxdepth is None or len(parts) <= maxdepth):
            yield record
        if withdirs:
            deepest = len(parts) if record["type"] == "directory" else len(parts) - 1
            for depth in range(1, min(deepest, maxdepth or deepest) + 1):
                name = "/".join([root, *parts[:depth]])
                if name not in seen:
                    seen.add(name)
                    yield _directory(name)
