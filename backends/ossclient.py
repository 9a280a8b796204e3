"""The seam to the OSS library: what `oss.py` needs of it, and oss2 behind it.

oss2 makes no retries of its own here, and its CRC (crcmod, which holds the GIL at 0.45 GB/s) is off: `oss.py` compares ours.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import oss2  # type: ignore[import-untyped, unused-ignore]
import oss2.credentials  # type: ignore[import-untyped, unused-ignore]

from ckptmgr.backends.body import FileBody
from ckptmgr.backends.objectrequests import CONNECT_S, STALL_S, Page, Stored
from ckptmgr.backends.osserrors import oss_errors
from ckptmgr.backends.parts import Receipt
from ckptmgr.core.errors import AccessDeniedError, ConfigError

_READ_BYTES = 1 << 20
_POOL = 32


class OssClient(Protocol):
    """Single requests to OSS, one try each, with the library's errors translated. Safe from any thread."""

    def put(self, bucket: str, key: str, data: bytes | FileBody, *, create: bool) -> Stored: ...

    def head(self, bucket: str, key: str) -> Stored: ...

    def read(self, bucket: str, key: str, *, first: int, last: int | None, etag: str | None) -> Iterator[bytes]: ...

    def page(self, bucket: str, *, prefix: str, delimiter: str, token: str | None, limit: int) -> Page: ...

    def delete(self, bucket: str, key: str) -> None: ...

    def delete_many(self, bucket: str, keys: list[str]) -> list[str]:
        """The keys that are gone now; what is missing in the answer was refused, for a reason OSS does not give."""
        ...

    def copy(self, bucket: str, key: str, *, source: tuple[str, str]) -> None: ...

    def begin(self, bucket: str, key: str, *, create: bool) -> str: ...

    def send_part(self, bucket: str, key: str, upload_id: str, number: int, body: FileBody) -> Receipt: ...

    def list_parts(self, bucket: str, key: str, upload_id: str) -> list[Receipt]: ...

    def copy_part(
        self, bucket: str, key: str, upload_id: str, number: int, *, source: tuple[str, str], first: int, last: int
    ) -> Receipt: ...

    def complete(self, bucket: str, key: str, upload_id: str, receipts: list[Receipt], *, create: bool) -> Stored: ...

    def abort(self, bucket: str, key: str, upload_id: str) -> None: ...


class Oss2Client:
    """oss2, configured by the environment: OSS_ENDPOINT, OSS_REGION, OSS_ACCESS_KEY_ID, OSS_ACCESS_KEY_SECRET, OSS_SESSION_TOKEN.

    Requests are signed with V4, which needs the region; `OSS_SIGNATURE_VERSION=v1` signs without it. `OSS_CNAME=1` says that the
    endpoint is a custom domain bound to the bucket. An endpoint that is an IP address is used path-style.

    Args:
        stall_s: seconds without a byte after which a request is cut.
    """

    def __init__(self, *, stall_s: float = STALL_S) -> None:
        # To connect, and to get the first block of a request out on a new connection; between two bytes of an answer, and for a later block.
        self._timeouts_s = (min(CONNECT_S, stall_s), stall_s)
        self._buckets: dict[tuple[int, str], Any] = {}
        self._sessions: dict[int, Any] = {}
        self._lock = threading.Lock()
        region = os.environ.get("OSS_REGION", "").removeprefix("oss-")
        self.endpoint = _endpoint(region)
        self._region = region or _region_of(self.endpoint)
        self._v1 = os.environ.get("OSS_SIGNATURE_VERSION", "v4").lower() in ("v1", "1")
        self._is_cname = os.environ.get("OSS_CNAME", "").lower() in ("1", "true", "yes")
        if not self._region and not self._v1:
            raise ConfigError(
                "no OSS region is set", hint="set OSS_REGION, e.g. cn-hangzhou, or OSS_SIGNATURE_VERSION=v1"
            )

    def _bucket(self, name: str) -> Any:
        # By process: a forked child must not share its parent's sockets.
        pid = os.getpid()
        bucket = self._buckets.get((pid, name))
        if bucket is None:
            with self._lock:
                session = self._sessions.setdefault(pid, oss2.Session(pool_size=_POOL))
                bucket = self._buckets[pid, name] = self._make_bucket(name, session)
        return bucket

    def _make_bucket(self, name: str, session: Any) -> Any:
        provider = _Environment()
        auth = oss2.ProviderAuth(provider) if self._v1 else oss2.ProviderAuthV4(provider)
        with oss_errors("open", name, self.endpoint):
            return oss2.Bucket(
                auth,
                self.endpoint,
                name,
                is_cname=self._is_cname,
                session=session,
                connect_timeout=self._timeouts_s,
                app_name="ckptmgr",
                enable_crc=False,
                region=self._region or None,
            )

    def _errors(self, operation: str, bucket: str, key: str) -> Any:
        return oss_errors(operation, f"{bucket}/{key}", self.endpoint)

    def put(self, bucket: str, key: str, data: bytes | FileBody, *, create: bool) -> Stored:
        if isinstance(data, FileBody):
            data.start_sending()
        with self._errors("write", bucket, key):
            return _stored(self._bucket(bucket).put_object(key, data, headers=_condition(create)))

    def head(self, bucket: str, key: str) -> Stored:
        with self._errors("look up", bucket, key):
            answer = self._bucket(bucket).head_object(key)
        crc = answer.headers.get("x-oss-hash-crc64ecma")
        return Stored(
            etag=answer.etag,
            size=answer.content_length,
            mtime=float(answer.last_modified),
            crc=None if crc is None else f"{int(crc):016x}",
        )

    def read(self, bucket: str, key: str, *, first: int, last: int | None, etag: str | None) -> Iterator[bytes]:
        # Without "standard", a range that does not fit is answered with the whole object.
        headers = {"x-oss-range-behavior": "standard"}
        if etag is not None:
            headers["If-Match"] = f'"{etag}"'
        byte_range = None if last is None else (first, last - 1)
        with self._errors("read", bucket, key):
            answer = self._bucket(bucket).get_object(key, byte_range=byte_range, headers=headers)
        # oss2's own reader hands on 8 KiB at a time.
        raw = answer.resp.response.raw
        left = answer.content_length
        try:
            while True:
                # Only the read: what the consumer of a block does wrong is not the store's fault.
                with self._errors("read", bucket, key):
                    block = raw.read(_READ_BYTES)
                    if not block and left:
                        # urllib3 1.x takes a body that ends too early for complete.
                        raise ConnectionError(f"{left} bytes are missing")
                if not block:
                    return
                if left is not None:
                    left -= len(block)
                yield block
        finally:
            answer.resp.response.close()

    def page(self, bucket: str, *, prefix: str, delimiter: str, token: str | None, limit: int) -> Page:
        with self._errors("list", bucket, prefix):
            answer = self._bucket(bucket).list_objects_v2(
                prefix=prefix, delimiter=delimiter, continuation_token=token or "", max_keys=limit
            )
        return Page(
            objects=[
                (entry.key, Stored(etag=entry.etag, size=entry.size, mtime=float(entry.last_modified)))
                for entry in answer.object_list
            ],
            prefixes=list(answer.prefix_list),
            token=answer.next_continuation_token if answer.is_truncated else None,
        )

    def delete(self, bucket: str, key: str) -> None:
        with self._errors("delete", bucket, key):
            self._bucket(bucket).delete_object(key)

    def delete_many(self, bucket: str, keys: list[str]) -> list[str]:
        with self._errors("delete", bucket, keys[0]):
            return list(self._bucket(bucket).batch_delete_objects(keys).deleted_keys)

    def copy(self, bucket: str, key: str, *, source: tuple[str, str]) -> None:
        with self._errors("copy to", bucket, key):
            self._bucket(bucket).copy_object(*source, key)

    def begin(self, bucket: str, key: str, *, create: bool) -> str:
        with self._errors("begin to write", bucket, key):
            return str(self._bucket(bucket).init_multipart_upload(key, headers=_condition(create)).upload_id)

    def send_part(self, bucket: str, key: str, upload_id: str, number: int, body: FileBody) -> Receipt:
        body.start_sending()
        with self._errors("write a part of", bucket, key):
            answer = self._bucket(bucket).upload_part(key, upload_id, number, body)
        return Receipt(number=number, etag=answer.etag, crc=None if answer.crc is None else f"{answer.crc:016x}")

    def list_parts(self, bucket: str, key: str, upload_id: str) -> list[Receipt]:
        # OSS also answers the CRC of each part, which oss2 does not read.
        receipts: list[Receipt] = []
        marker = ""
        while True:
            with self._errors("list the parts of", bucket, key):
                answer = self._bucket(bucket).list_parts(key, upload_id, marker=marker)
            receipts += [Receipt(number=one.part_number, etag=one.etag, size=one.size) for one in answer.parts]
            if not answer.is_truncated:
                return receipts
            marker = answer.next_marker

    def copy_part(
        self, bucket: str, key: str, upload_id: str, number: int, *, source: tuple[str, str], first: int, last: int
    ) -> Receipt:
        with self._errors("copy a part to", bucket, key):
            answer = self._bucket(bucket).upload_part_copy(*source, (first, last - 1), key, upload_id, number)
        return Receipt(number=number, etag=answer.etag)

    def complete(self, bucket: str, key: str, upload_id: str, receipts: list[Receipt], *, create: bool) -> Stored:
        parts = [oss2.models.PartInfo(receipt.number, receipt.etag) for receipt in receipts]
        with self._errors("finish writing", bucket, key):
            answer = self._bucket(bucket).complete_multipart_upload(key, upload_id, parts, headers=_condition(create))
        return _stored(answer)

    def abort(self, bucket: str, key: str, upload_id: str) -> None:
        with self._errors("abandon", bucket, key):
            self._bucket(bucket).abort_multipart_upload(key, upload_id)


class _Environment(oss2.credentials.CredentialsProvider):  # type: ignore[misc, unused-ignore]
    """Reads the credentials at every request: STS tokens are renewed in place by whoever set them."""

    def get_credentials(self) -> Any:
        key, secret = os.environ.get("OSS_ACCESS_KEY_ID", ""), os.environ.get("OSS_ACCESS_KEY_SECRET", "")
        if not key or not secret:
            raise AccessDeniedError(
                "no OSS credentials are set",
                hint="set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET",
                backend="oss",
                operation="sign",
            )
        return oss2.credentials.Credentials(key, secret, os.environ.get("OSS_SESSION_TOKEN", ""))


def _endpoint(region: str) -> str:
    endpoint = os.environ.get("OSS_ENDPOINT", "")
    if not endpoint and region:
        endpoint = f"oss-{region}.aliyuncs.com"
    if not endpoint:
        raise ConfigError("no OSS endpoint is set", hint="set OSS_ENDPOINT, e.g. https://oss-cn-hangzhou.aliyuncs.com")
    # oss2 would speak http; nobody who leaves the scheme out means that.
    return endpoint if "://" in endpoint else f"https://{endpoint}"


def _region_of(endpoint: str) -> str:
    """`cn-hangzhou` of `https://oss-cn-hangzhou[-internal].aliyuncs.com`; "" for other hosts."""
    host = urlsplit(endpoint).hostname or ""
    first, _, domain = host.partition(".")
    if domain != "aliyuncs.com" or not first.startswith("oss-"):
        return ""
    return first.removeprefix("oss-").removesuffix("-internal")


def _condition(create: bool) -> dict[str, str]:
    return {"x-oss-forbid-overwrite": "true"} if create else {}


def _stored(answer: Any) -> Stored:
    return Stored(etag=answer.etag or "", crc=None if answer.crc is None else f"{answer.crc:016x}")
