"""Aliyun OSS, over oss2 behind the `OssClient` seam.

Create-only is `x-oss-forbid-overwrite`. **OSS ignores it in a bucket whose versioning is enabled or suspended**: a run probes its bucket before it relies
on it. The kept CRC is CRC-64/XZ, `x-oss-hash-crc64ecma`, which every answer to a write carries.

Source: https://www.alibabacloud.com/help/en/oss/developer-reference/putobject
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Literal, TypeVar

from ckptmgr.backends.base import BucketFacts, Capabilities, Connection, PendingUpload, WriteMode
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.objectrequests import STALL_S, DamagedInTransitError, Page, Stored
from ckptmgr.backends.objectstore import ObjectStoreBackend, split
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.ossbucket import LifecycleRule
from ckptmgr.backends.ossclient import Oss2Client, OssClient
from ckptmgr.backends.parts import Incoming, Part, Receipt
from ckptmgr.backends.profiles import profile_of
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BucketNotFoundError,
    ObjectExistsError,
    ObjectNotFoundError,
    TransientBackendError,
)

T = TypeVar("T")
_READ_BYTES = 256 << 10
_Versioning = Literal["off", "enabled", "suspended"]
_VERSIONING: dict[str, _Versioning] = {"Enabled": "enabled", "Suspended": "suspended"}


class OSSBackend(ObjectStoreBackend):
    """Objects in OSS buckets.

    Args:
        client: the library; oss2, configured by the environment, if not given.
        stall_s: a request is cut, and tried again, after so many seconds without a byte; for the client that is not given.
        store_options: encryption, storage class and addressing; likewise.
        options: those of `ObjectStoreBackend`; OSS takes no part smaller than 100 KiB, except the last.
    """

    protocol = ("oss",)
    kind = "oss"
    crc_kind = "crc64xz"

    def __init__(
        self,
        *,
        client: OssClient | None = None,
        stall_s: float = STALL_S,
        store_options: StoreOptions | None = None,
        **options: Any,
    ) -> None:
        super().__init__(store_options=store_options, **options)
        self._oss: OssClient = client or Oss2Client(stall_s=stall_s, options=self.store_options)
        self._answers_crc = False

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        has_create_only = self.store_options.create_only != "no"
        return Capabilities(create_only=has_create_only, etags=True, stored_crc="crc64xz")

    def _is_new(self, path: str, mode: WriteMode) -> bool:
        """Whether the store is to refuse to overwrite.

        Raises:
            ObjectExistsError: it is said not to, and the object is there: a second writer may still come between.
        """
        if mode != "create" or self.capabilities.create_only:
            return mode == "create"
        try:
            self._head(path)
        except ObjectNotFoundError:
            return False
        raise ObjectExistsError(f"oss://{path} exists already", backend="oss", operation="write", key=path)

    @property
    def _store_checks(self) -> bool:
        return self._answers_crc

    def _put(self, path: str, data: bytes | FileBody, crc: str | None, mode: WriteMode) -> Stored:
        stored = self._oss.put(*split(path), data, create=self._is_new(path, mode))
        self._answers_crc = stored.crc is not None
        return stored

    def _head_once(self, path: str) -> Stored:
        return self._oss.head(*split(path))

    def _read(self, path: str, etag: str | None, first: int, last: int | None) -> Iterator[bytes]:
        with contextlib.closing(self._incoming(path, etag, first, last)) as incoming:
            view = memoryview(bytearray(_READ_BYTES if last is None else min(_READ_BYTES, max(1, last - first))))
            while count := incoming.readinto(view):
                yield bytes(view[:count])

    def _incoming(self, path: str, etag: str | None, first: int, last: int | None) -> Incoming:
        try:
            return self._oss.get(*split(path), first=first, last=last, etag=etag)
        except ObjectExistsError as error:
            text = f"oss://{path} was replaced while it was read"
            raise TransientBackendError(text, backend="oss", operation="read", key=path) from error

    def _page(self, bucket: str, prefix: str, delimiter: str, token: str | None, limit: int) -> Page:
        return self._oss.page(bucket, prefix=prefix, delimiter=delimiter, token=token, limit=limit)

    def _delete(self, path: str) -> None:
        self._oss.delete(*split(path))

    def _delete_batch(self, bucket: str, keys: list[str]) -> dict[str, BackendError]:
        gone = set(self._oss.delete_many(bucket, keys))
        # A batch is answered with success although some keys were refused; one by one, OSS says why.
        return self._delete_each([f"{bucket}/{key}" for key in keys if key not in gone])

    def _copy(self, source: str, target: str) -> None:
        self._oss.copy(*split(target), source=split(source))

    def _begin(self, path: str, mode: WriteMode) -> str:
        return self._oss.begin(*split(path), create=self._is_new(path, mode))

    def _send_part(self, path: str, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt:
        receipt = self._oss.send_part(*split(path), upload_id, part.number, body)
        self._answers_crc = receipt.crc is not None
        # OSS takes no CRC along with a request; it says what it got, and a damaged part is simply sent again.
        if receipt.crc is not None and receipt.crc != digest.crc:
            text = f"part {part.number} of oss://{path} arrived with CRC-64 {receipt.crc} instead of {digest.crc}"
            facts = {"backend": "oss", "operation": "write a part of", "key": path, "actual": receipt.crc}
            raise DamagedInTransitError(text, expected=digest.crc, **facts)
        return receipt

    def _list_parts(self, path: str, upload_id: str) -> list[Receipt]:
        return self._oss.list_parts(*split(path), upload_id)

    def _copy_part(self, path: str, upload_id: str, part: Part, source: str) -> Receipt:
        bucket, key = split(path)
        last = part.offset + part.length
        return self._oss.copy_part(
            bucket, key, upload_id, part.number, source=split(source), first=part.offset, last=last
        )

    def _complete(self, path: str, upload_id: str, receipts: list[Receipt], crc: str | None, mode: WriteMode) -> Stored:
        return self._oss.complete(*split(path), upload_id, receipts, create=self._is_new(path, mode))

    def _abort(self, path: str, upload_id: str) -> None:
        try:
            self._oss.abort(*split(path), upload_id)
        except BackendError as error:
            if getattr(error, "code", "") != "NoSuchUpload":
                raise

    # -- the bucket -------------------------------------------------------------------------------------------------------

    def list_uploads(self, path: str) -> list[PendingUpload]:
        bucket, _, prefix = self._strip_protocol(path).partition("/")
        return self._oss.list_uploads(bucket, f"{prefix}/" if prefix else "")

    def bucket_facts(self, path: str) -> BucketFacts:
        bucket, _, key = self._strip_protocol(path).partition("/")
        versioning = _if_allowed(lambda: self._oss.versioning(bucket))
        state: _Versioning | None = None if versioning is None else _VERSIONING.get(versioning, "off")
        rules: list[LifecycleRule] | None = _if_allowed(lambda: self._oss.lifecycle(bucket), none=list[LifecycleRule]())
        if rules is None:
            return BucketFacts(versioning=state)
        prefix = f"{key}/" if key else ""
        # A rule is sure to drop what is left behind if it is for all keys; to take objects away it need be for some.
        whole = [rule for rule in rules if prefix.startswith(rule.prefix) and not rule.is_narrowed]
        touching = [rule for rule in rules if prefix.startswith(rule.prefix) or rule.prefix.startswith(prefix)]
        return BucketFacts(
            versioning=state,
            abort_days=min((rule.abort_days for rule in whole if rule.abort_days), default=0),
            expires=any(rule.expires for rule in touching),
            archives=any(rule.archives for rule in touching),
            noncurrent_days=min((rule.noncurrent_days for rule in whole if rule.noncurrent_days), default=0),
        )

    def connection(self) -> Connection:
        endpoint, credentials = self._oss.endpoint, self._oss.credentials
        try:
            keys = credentials.current()
        except AccessDeniedError:
            keys = None
        return Connection(
            endpoint=endpoint.url,
            region=endpoint.region or None,
            addressing=endpoint.style,
            profile=profile_of("oss", endpoint.url, self.store_options),
            credentials=None if keys is None else credentials.found_in,
            is_temporary=keys is not None and bool(keys.token),
            expires_s=None if keys is None else keys.expires_s,
        )


def _if_allowed(ask: Callable[[], T], *, none: T | None = None) -> T | None:
    """What the bucket says; None when these credentials, or this store, do not let us know; `none` when there is no such setting."""
    try:
        return ask()
    except (BucketNotFoundError, TransientBackendError):
        raise
    except ObjectNotFoundError as error:
        # "NoSuchLifecycle".
        return none if getattr(error, "code", "").startswith("NoSuch") else None
    except BackendError:
        return None
