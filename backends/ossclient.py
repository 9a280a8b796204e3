"""The seam to the OSS library: what `oss.py` needs of it, and oss2 behind it.

oss2 makes no retries of its own here, and its CRC (crcmod, which holds the GIL at 0.45 GB/s) is off: `oss.py` compares ours. One try may be two
requests, when the first was refused for keys that have expired or for this machine's clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from typing import Any, Protocol, TypeVar

import oss2  # type: ignore[import-untyped, unused-ignore]
import requests.utils

from ckptmgr.backends import ossbucket
from ckptmgr.backends.base import PendingUpload
from ckptmgr.backends.body import FileBody
from ckptmgr.backends.objectrequests import CONNECT_S, STALL_S, Page, Stored
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.ossbucket import LifecycleRule
from ckptmgr.backends.osscredentials import OssCredentials
from ckptmgr.backends.ossendpoint import OssEndpoint, endpoint_of, no_region
from ckptmgr.backends.osserrors import ABOUT_KEYS, EXPIRED, SKEWED, oss_errors
from ckptmgr.backends.osshttp import HttpSession, OssResponse
from ckptmgr.backends.osskeysources import Environment, default_chain
from ckptmgr.backends.osssigning import Signer, SignerV1
from ckptmgr.backends.parts import Incoming, Receipt
from ckptmgr.core.errors import AccessDeniedError, ConfigError

T = TypeVar("T")
log = logging.getLogger("ckptmgr.backends")

_SSE = ("AES256", "KMS", "SM4")
# As on S3, so that one word means one thing.
_CLASSED_BYTES = 128 << 10

# oss2 writes all headers of each request into its debug log, session tokens too. Who wants that says so.
if logging.getLogger("oss2").level == logging.NOTSET:
    logging.getLogger("oss2").setLevel(logging.WARNING)


class OssClient(Protocol):
    """Single requests to OSS, one try each, with the library's errors translated. Safe from any thread.

    Attributes:
        endpoint: where requests go.
        credentials: what they are signed with.
    """

    endpoint: OssEndpoint
    credentials: OssCredentials

    def put(self, bucket: str, key: str, data: bytes | FileBody, *, create: bool) -> Stored: ...

    def head(self, bucket: str, key: str) -> Stored: ...

    def get(self, bucket: str, key: str, *, first: int, last: int | None, etag: str | None) -> Incoming: ...

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

    def list_uploads(self, bucket: str, prefix: str) -> list[PendingUpload]: ...

    def versioning(self, bucket: str) -> str:
        """ "Enabled", "Suspended", or "" where there never was any."""
        ...

    def lifecycle(self, bucket: str) -> list[LifecycleRule]:
        """The rules in force."""
        ...


class Oss2Client:
    """oss2, configured by the environment: see `ossendpoint.py` for endpoints and `osscredentials.py` for keys.

    Requests are signed with V4, which needs the region; `OSS_SIGNATURE_VERSION=v1` signs without it.

    Args:
        stall_s: seconds without a byte after which a request is cut.
        options: encryption, storage class and addressing of them count here.
        credentials: in place of Aliyun's chain.
        now: seconds since 1970 (tests).

    Raises:
        ConfigError: the environment or the options make no sense for OSS.
    """

    def __init__(
        self,
        *,
        stall_s: float = STALL_S,
        options: StoreOptions | None = None,
        credentials: OssCredentials | None = None,
        now: Callable[[], float] = time.time,
    ) -> None:
        options = options or StoreOptions()
        # To connect, and to get the first block of a request out on a new connection; between two bytes of an answer, and for a later block.
        self._timeouts_s = (min(CONNECT_S, stall_s), stall_s)
        connect_s, stall_s = self._timeouts_s
        self._session = HttpSession(connect_s=connect_s, stall_s=stall_s)
        self._buckets: dict[str, Any] = {}
        self.endpoint = endpoint_of(addressing=options.addressing)
        self.credentials = credentials or OssCredentials(default_chain())
        is_v1 = os.environ.get("OSS_SIGNATURE_VERSION", "v4").lower() in ("v1", "1")
        if not self.endpoint.region and not is_v1:
            raise no_region(self.endpoint)
        self._now = now
        self._signer = (SignerV1 if is_v1 else Signer)(self.credentials, now=now)
        self._encryption = _encryption(options)
        self._storage_class = {"x-oss-storage-class": options.storage_class} if options.storage_class else {}

    def _bucket(self, name: str) -> Any:
        bucket = self._buckets.get(name)
        if bucket is None:
            # Made twice by two threads, it does no harm.
            bucket = self._buckets[name] = self._make_bucket(name)
        return bucket

    def _make_bucket(self, name: str) -> Any:
        endpoint = self.endpoint
        bucket = ossbucket.Bucket(
            self._signer,
            endpoint.url,
            name,
            is_cname=endpoint.style == "cname",
            is_path_style=endpoint.style == "path",
            session=self._session,
            connect_timeout=self._timeouts_s,
            app_name="ckptmgr",
            enable_crc=False,
            region=endpoint.region or None,
        )
        bucket.proxies = requests.utils.get_environ_proxies(bucket._make_url(name, ""))
        return bucket

    def _call(
        self, operation: str, bucket: str, key: str, call: Callable[[Any], T], body: bytes | FileBody | None = None
    ) -> T:
        try:
            with oss_errors(operation, f"{bucket}/{key}", self.endpoint.url, now=self._now):
                return self._try(self._bucket(bucket), call, body)
        except AccessDeniedError as error:
            found_in = self.credentials.found_in
            if getattr(error, "code", "") in ABOUT_KEYS and found_in not in ("", Environment.name):
                error.hint = f"the keys are those of {found_in}"
            raise

    def _try(self, handle: Any, call: Callable[[Any], T], body: bytes | FileBody | None) -> T:
        if isinstance(body, FileBody):
            body.start_sending()
        try:
            return call(handle)
        except oss2.exceptions.ServerError as error:
            if not self._is_mended(error):
                raise
        if isinstance(body, FileBody):
            body.rewind()
            body.start_sending()
        return call(handle)

    def _is_mended(self, error: Any) -> bool:
        """Whether the same request, signed anew, is worth one more try."""
        if error.code in EXPIRED:
            refused = self._signer.used
            return refused is not None and self.credentials.renew(refused) is not None
        if error.code == SKEWED:
            try:
                theirs = parsedate_to_datetime(error.headers.get("date", "")).timestamp()
            except (TypeError, ValueError):
                return False
            self._set_clock(theirs - self._now())
            return True
        return False

    def _set_clock(self, offset_s: float) -> None:
        # A request that was held back until its date was too old is refused likewise, and the clock is right.
        offset_s = offset_s if abs(offset_s) > 60.0 else 0.0
        if abs(offset_s - self._signer.offset_s) > 60.0:
            log.warning(
                "this machine's clock is %s of the store's; requests are dated by the store's - set the clock (NTP)",
                f"{abs(offset_s):.0f} s {'behind' if offset_s > 0 else 'ahead'}"
                if offset_s
                else "right again: it is that",
            )
        self._signer.offset_s = offset_s

    def put(self, bucket: str, key: str, data: bytes | FileBody, *, create: bool) -> Stored:
        # Records, which are small, are read often, and not kept for long: classes for seldom use charge for both.
        storage_class = self._storage_class if len(data) >= _CLASSED_BYTES else {}
        headers = _condition(create) | self._encryption | storage_class
        return _stored(
            self._call("write", bucket, key, lambda handle: handle.put_object(key, data, headers=headers), data)
        )

    def head(self, bucket: str, key: str) -> Stored:
        answer = self._call("look up", bucket, key, lambda handle: handle.head_object(key))
        crc = answer.headers.get("x-oss-hash-crc64ecma")
        return Stored(
            etag=answer.etag,
            size=answer.content_length,
            mtime=float(answer.last_modified),
            crc=None if crc is None else f"{int(crc):016x}",
        )

    def get(self, bucket: str, key: str, *, first: int, last: int | None, etag: str | None) -> Incoming:
        # Without "standard", a range that does not fit is answered with the whole object.
        headers = {"x-oss-range-behavior": "standard"}
        if etag is not None:
            headers["If-Match"] = f'"{etag}"'
        byte_range = None if last is None else (first, last - 1)
        answer = self._call(
            "read", bucket, key, lambda handle: handle.get_object(key, byte_range=byte_range, headers=headers)
        )
        return _Incoming(answer.resp, f"{bucket}/{key}", self.endpoint.url)

    def page(self, bucket: str, *, prefix: str, delimiter: str, token: str | None, limit: int) -> Page:
        def ask(handle: Any) -> Any:
            return handle.list_objects_v2(
                prefix=prefix, delimiter=delimiter, continuation_token=token or "", max_keys=limit
            )

        answer = self._call("list", bucket, prefix, ask)
        return Page(
            objects=[
                (entry.key, Stored(etag=entry.etag, size=entry.size, mtime=float(entry.last_modified)))
                for entry in answer.object_list
            ],
            prefixes=list(answer.prefix_list),
            token=answer.next_continuation_token if answer.is_truncated else None,
        )

    def delete(self, bucket: str, key: str) -> None:
        self._call("delete", bucket, key, lambda handle: handle.delete_object(key))

    def delete_many(self, bucket: str, keys: list[str]) -> list[str]:
        answer = self._call("delete", bucket, keys[0], lambda handle: handle.batch_delete_objects(keys))
        return list(answer.deleted_keys)

    def copy(self, bucket: str, key: str, *, source: tuple[str, str]) -> None:
        headers = self._encryption | self._storage_class
        self._call("copy to", bucket, key, lambda handle: handle.copy_object(*source, key, headers=headers))

    def begin(self, bucket: str, key: str, *, create: bool) -> str:
        headers = _condition(create) | self._encryption | self._storage_class
        answer = self._call(
            "begin to write", bucket, key, lambda handle: handle.init_multipart_upload(key, headers=headers)
        )
        return str(answer.upload_id)

    def send_part(self, bucket: str, key: str, upload_id: str, number: int, body: FileBody) -> Receipt:
        answer = self._call(
            "write a part of", bucket, key, lambda handle: handle.upload_part(key, upload_id, number, body), body
        )
        return Receipt(number=number, etag=answer.etag, crc=None if answer.crc is None else f"{answer.crc:016x}")

    def list_parts(self, bucket: str, key: str, upload_id: str) -> list[Receipt]:
        return self._call("list the parts of", bucket, key, lambda handle: handle.parts_with_crc(key, upload_id))

    def copy_part(
        self, bucket: str, key: str, upload_id: str, number: int, *, source: tuple[str, str], first: int, last: int
    ) -> Receipt:
        def ask(handle: Any) -> Any:
            return handle.upload_part_copy(*source, (first, last - 1), key, upload_id, number)

        return Receipt(number=number, etag=self._call("copy a part to", bucket, key, ask).etag)

    def complete(self, bucket: str, key: str, upload_id: str, receipts: list[Receipt], *, create: bool) -> Stored:
        parts = [oss2.models.PartInfo(receipt.number, receipt.etag) for receipt in receipts]

        def ask(handle: Any) -> Any:
            return handle.complete_multipart_upload(key, upload_id, parts, headers=_condition(create))

        return _stored(self._call("finish writing", bucket, key, ask))

    def abort(self, bucket: str, key: str, upload_id: str) -> None:
        self._call("abandon", bucket, key, lambda handle: handle.abort_multipart_upload(key, upload_id))

    def list_uploads(self, bucket: str, prefix: str) -> list[PendingUpload]:
        return self._call("list the uploads to", bucket, prefix, lambda handle: handle.pending_uploads(prefix))

    def versioning(self, bucket: str) -> str:
        return self._call("ask for the versioning of", bucket, "", lambda handle: str(handle.versioning()))

    def lifecycle(self, bucket: str) -> list[LifecycleRule]:
        return self._call("ask for the lifecycle of", bucket, "", lambda handle: handle.lifecycle_rules())


class _Incoming:
    """An object on its way, with what goes wrong in our own words."""

    def __init__(self, response: OssResponse, path: str, endpoint: str) -> None:
        self._response = response
        self._path = path
        self._endpoint = endpoint

    def readinto(self, view: memoryview, /) -> int:
        with oss_errors("read", self._path, self._endpoint):
            return self._response.readinto(view)

    def close(self) -> None:
        self._response.close()


def _encryption(options: StoreOptions) -> dict[str, str]:
    if options.sse is None:
        return {}
    # S3's word, for one environment that serves both.
    mode = "KMS" if options.sse == "aws:kms" else options.sse
    if mode not in _SSE:
        raise ConfigError(f"OSS has no encryption {options.sse!r}", hint=f"set CKPTMGR_SSE to one of {', '.join(_SSE)}")
    key = {"x-oss-server-side-encryption-key-id": options.sse_key} if options.sse_key else {}
    return {"x-oss-server-side-encryption": mode, **key}


def _condition(create: bool) -> dict[str, str]:
    return {"x-oss-forbid-overwrite": "true"} if create else {}


def _stored(answer: Any) -> Stored:
    return Stored(etag=answer.etag or "", crc=None if answer.crc is None else f"{answer.crc:016x}")
