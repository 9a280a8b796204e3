"""An object store in this process's memory, whose single requests fail on demand: for tests of what is built upon them, with any number of requests.

    store = MemoryObjects(fail=at_random(seed, 0.3), retrier=retrier, part_bytes=1000)

Nothing goes over a wire: what clients make of answers is tested on the servers of `ckptmgr.testing.servers`.
"""

from __future__ import annotations

import bisect
import random
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from ckptmgr.backends.base import Capabilities, WriteMode
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.objectrequests import Page, Stored
from ckptmgr.backends.objectstore import ObjectStoreBackend
from ckptmgr.backends.parts import Part, Receipt
from ckptmgr.core.checksums import crc64xz_hex
from ckptmgr.core.errors import (
    BackendError,
    BackendTimeoutError,
    ObjectExistsError,
    TransientBackendError,
)

When = Literal["before", "after"]
#: Called with the name of a request, its path, and whether it was not made yet, or was; may raise.
Fail = Callable[[str, str, When], None]

_BLOCK_BYTES = 64 << 10


def at_random(seed: int, share: float) -> Fail:
    """Lets that share of all requests fail, half of them after they were made. Which ones depends on the threads too; how many does not."""
    numbers, lock = random.Random(seed), threading.Lock()

    def fail(request: str, path: str, when: When) -> None:
        with lock:
            # Of those that pass the first look, as many again fail at the second: together it is the share.
            fails = numbers.random() < share / 2 / (1 if when == "before" else 1 - share / 2)
        if fails:
            raise BackendTimeoutError(f"injected: {request} {path}, {when} it was made", operation=request, key=path)

    return fail


@dataclass(frozen=True, slots=True, kw_only=True)
class _Object:
    data: bytes
    etag: str
    crc: str


class MemoryObjects(ObjectStoreBackend):
    """See the module's docstring. Buckets need not be made.

    Args:
        fail: see `Fail`.
        options: those of `ObjectStoreBackend`.

    Attributes:
        requests: how often each single request was asked for, by name.
        uploads: unfinished ones: path, and parts by number, by id.
    """

    protocol = ("memobj",)
    kind = "memobj"
    crc_kind = "crc64xz"
    capabilities = Capabilities(create_only=True, stored_crc="crc64xz")
    _store_checks = True

    def __init__(self, fail: Fail = lambda request, path, when: None, **options: Any) -> None:
        super().__init__(**options)
        self.fail = fail
        self.requests: dict[str, int] = {}
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        self._objects: dict[str, _Object] = {}
        self._names: list[str] = []
        self._lock = threading.RLock()

    def data(self, path: str) -> bytes:
        """The bytes of an object."""
        return self._objects[path].data

    def paths(self) -> list[str]:
        """The paths of all objects, sorted."""
        return list(self._names)

    def fill(self, paths: Iterable[str], data: bytes = b"") -> None:
        """Make many objects of the same bytes."""
        made = _object(data)
        with self._lock:
            self._objects.update(dict.fromkeys(paths, made))
            self._names = sorted(self._objects)

    @contextmanager
    def _made(self, request: str, path: str) -> Iterator[None]:
        with self._lock:
            self.requests[request] = self.requests.get(request, 0) + 1
        self.fail(request, path, "before")
        with self._lock:
            yield
        self.fail(request, path, "after")

    def _store(self, path: str, data: bytes, mode: WriteMode) -> Stored:
        if mode == "create" and path in self._objects:
            raise ObjectExistsError(f"{path} exists", backend=self.kind, key=path)
        if path not in self._objects:
            bisect.insort(self._names, path)
        self._objects[path] = _object(data)
        return self._stored(path)

    def _stored(self, path: str) -> Stored:
        found = self._objects.get(path)
        if found is None:
            raise self.not_found("look up", path)
        return Stored(etag=found.etag, size=len(found.data), mtime=0.0, crc=found.crc)

    def _put(self, path: str, data: bytes | FileBody, crc: str | None, mode: WriteMode) -> Stored:
        with self._made("put", path):
            return self._store(path, _bytes_of(data), mode)

    def _head_once(self, path: str) -> Stored:
        with self._made("head", path):
            return self._stored(path)

    def _read(self, path: str, etag: str | None, first: int, last: int | None) -> Iterator[bytes]:
        with self._made("get", path):
            stored = self._stored(path)
        if etag not in (None, stored.etag):
            raise TransientBackendError(f"{path} was replaced while it was read", backend=self.kind, key=path)
        data = self._objects[path].data[first:last]
        for at in range(0, len(data), _BLOCK_BYTES):
            yield data[at : at + _BLOCK_BYTES]

    def _page(self, bucket: str, prefix: str, delimiter: str, token: str | None, limit: int) -> Page:
        objects: list[tuple[str, Stored]] = []
        prefixes: dict[str, None] = {}
        start = f"{bucket}/{prefix}"
        with self._made("list", start):
            at = bisect.bisect_left(self._names, start) if token is None else bisect.bisect_right(self._names, token)
            while at < len(self._names) and self._names[at].startswith(start):
                name = self._names[at]
                rest = name[len(start) :]
                if delimiter and delimiter in rest:
                    prefixes[start[len(bucket) + 1 :] + rest.partition(delimiter)[0] + delimiter] = None
                else:
                    objects.append((name[len(bucket) + 1 :], self._stored(name)))
                at += 1
                if len(objects) + len(prefixes) >= limit:
                    return Page(objects=objects, prefixes=list(prefixes), token=name)
        return Page(objects=objects, prefixes=list(prefixes), token=None)

    def _delete(self, path: str) -> None:
        with self._made("delete", path):
            if self._objects.pop(path, None) is not None:
                self._names.remove(path)

    def _delete_batch(self, bucket: str, keys: list[str]) -> dict[str, BackendError]:
        assert len(keys) <= 1000, "stores take no more"
        refused: dict[str, BackendError] = {}
        with self._made("delete_batch", f"{bucket}/{keys[0]}"):
            for path in (f"{bucket}/{key}" for key in keys):
                try:
                    self.fail("delete_one", path, "before")
                except BackendError as error:
                    refused[path] = error
                else:
                    self._objects.pop(path, None)
            self._names = sorted(self._objects)
        return refused

    def _copy(self, source: str, target: str) -> None:
        with self._made("copy", target):
            self._store(target, self._objects[source].data, "overwrite")

    def _begin(self, path: str, mode: WriteMode) -> str:
        with self._made("begin", path):
            upload_id = uuid.uuid4().hex
            self.uploads[upload_id] = path, {}
            return upload_id

    def _parts(self, upload_id: str) -> dict[int, bytes]:
        if upload_id not in self.uploads:
            raise TransientBackendError("no such upload", backend=self.kind, code="NoSuchUpload")
        return self.uploads[upload_id][1]

    def _send_part(self, path: str, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt:
        with self._made("send", path):
            data = _bytes_of(body)
            crc = crc64xz_hex(data)
            if crc != digest.crc:
                raise TransientBackendError("bad digest", backend=self.kind, code="BadDigest")
            self._parts(upload_id)[part.number] = data
            return Receipt(number=part.number, etag=crc, crc=crc, size=len(data))

    def _list_parts(self, path: str, upload_id: str) -> list[Receipt]:
        with self._made("list_parts", path):
            parts = sorted(self._parts(upload_id).items())
            sums = {number: crc64xz_hex(data) for number, data in parts}
            return [Receipt(number=n, etag=sums[n], crc=sums[n], size=len(data)) for n, data in parts]

    def _copy_part(self, path: str, upload_id: str, part: Part, source: str) -> Receipt:
        with self._made("copy_part", path):
            data = self._objects[source].data[part.offset : part.offset + part.length]
            self._parts(upload_id)[part.number] = data
            return Receipt(number=part.number, etag=crc64xz_hex(data))

    def _complete(self, path: str, upload_id: str, receipts: list[Receipt], crc: str | None, mode: WriteMode) -> Stored:
        with self._made("complete", path):
            parts = self._parts(upload_id)
            assert len(receipts) <= 10_000, "stores take no more"
            data = b"".join(parts[receipt.number] for receipt in receipts)
            if crc not in (None, crc64xz_hex(data)):
                raise TransientBackendError("bad digest", backend=self.kind, code="BadDigest")
            stored = self._store(path, data, mode)
            del self.uploads[upload_id]
            return stored

    def _abort(self, path: str, upload_id: str) -> None:
        with self._made("abort", path):
            self.uploads.pop(upload_id, None)


def _object(data: bytes) -> _Object:
    return _Object(data=data, etag=uuid.uuid4().hex, crc=crc64xz_hex(data))


def _bytes_of(data: bytes | FileBody) -> bytes:
    if isinstance(data, bytes):
        return data
    data.rewind()
    data.start_sending()
    return b"".join(data)
