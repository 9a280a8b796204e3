"""moto's S3 as a function: one request in, one answer out, in a namespace of its own.

moto keeps its buckets in one table per process. Each `MotoCore` puts a random tag before its bucket names on the way in and
removes it on the way out, so that several servers in one process do not see each other's buckets.
"""

from __future__ import annotations

import io
import os
import re
import threading
import time
import uuid
import warnings
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote_plus, urlencode

from ckptmgr.core.errors import MissingExtraError
from ckptmgr.testing.store_app import Reply, Request

# moto asks the credential chain and the region at import; a test machine may have neither.
os.environ.setdefault("AWS_EC2_METADATA_DISABLED", "true")

try:
    with warnings.catch_warnings():
        # Deprecations inside moto and what it imports are not the business of whoever imports this.
        warnings.simplefilter("ignore")
        import moto.s3.models as moto_models
        from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
        from werkzeug.serving import BaseWSGIServer, make_server
        from werkzeug.test import run_wsgi_app
except ImportError as exc:
    raise MissingExtraError(
        f"the test servers need moto, and {exc.name or 'a part of it'} is not installed",
        hint="run: pip install 'ckptmgr[testing]'",
    ) from exc

__all__ = ["BaseWSGIServer", "MotoCore", "QuietRequestHandler", "make_server"]

_UPLOAD_UNKNOWN = b"<Error><Code>NoSuchUpload</Code><Message>The specified upload does not exist.</Message></Error>"
_AUTHORIZATION = "AWS4-HMAC-SHA256 Credential=raw/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"

# The two dialects have different limits (S3: 5 MiB, OSS: 100 KiB) and share this module's state, so they enforce their own.
moto_models.S3_UPLOAD_PART_MIN_SIZE = 0  # type: ignore[attr-defined]


class QuietRequestHandler(MotoRequestHandler):  # type: ignore[misc,unused-ignore]
    """Serves a test store without a line on stderr per request."""

    def date_time_string(self, timestamp: float | None = None) -> str:
        """The `Date` of an answer, by the clock of the application."""
        ahead_s = getattr(self.server.app, "clock_offset_s", 0.0)
        now_s = time.time() + ahead_s if timestamp is None else timestamp
        return super().date_time_string(now_s)  # type: ignore[no-any-return,unused-ignore]

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""

    def log(self, type: str, message: str, *args: Any) -> None:
        """Say nothing: a reset connection is what the tests ask for."""


class MotoCore:
    """One private set of buckets in moto, kept in this process's memory. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._app = create_backend_app("s3")
        self._app.config["PROPAGATE_EXCEPTIONS"] = True
        self._tag = f"{uuid.uuid4().hex[:10]}-"
        # moto walks its dictionaries and moves an object's only file position without locks: a listing beside a write fails,
        # and a read beside a write can give an object a wrong ETag for good.
        self._one_at_a_time = threading.RLock()

    def call(
        self,
        method: str,
        bucket: str = "",
        key: str = "",
        *,
        query: dict[str, str] | None = None,
        headers: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> Reply:
        """Apply one S3 request; header names in lower case both ways."""
        request = Request(
            method=method, bucket=self._tag + bucket if bucket else "", key=key, query=query or {}, body=body
        )
        sent = {"authorization": _AUTHORIZATION, "x-amz-date": "20260101T000000Z", **(headers or {})}
        if "x-amz-copy-source" in sent:
            sent["x-amz-copy-source"] = self._tag + sent["x-amz-copy-source"].lstrip("/")
        try:
            with self._one_at_a_time:
                chunks, status, received = run_wsgi_app(self._app, _environ(request, sent), buffered=True)
        except KeyError:
            # moto 5.2: a part for an unknown or aborted upload, which S3 answers with 404, is a KeyError.
            if "uploadId" not in request.query:
                raise
            return Reply(status=404, headers={"content-type": "application/xml"}, body=_UPLOAD_UNKNOWN)
        out = b"".join(chunks)
        names = {name.lower(): value.replace(self._tag, "") for name, value in received.items()}
        if not key or query or "x-amz-copy-source" in sent or int(status.split()[0]) >= 300:
            out = out.replace(self._tag.encode(), b"")
            if method != "HEAD":
                names.pop("content-length", None)
        return Reply(status=int(status.split()[0]), headers=names, body=out)

    def list_buckets(self) -> list[str]:
        """The names of this core's own buckets (the answer of `GET /` names those of other cores too)."""
        tag = self._tag
        return sorted(
            name[len(tag) :] for name in list(moto_models.s3_backends.bucket_accounts) if name.startswith(tag)
        )

    def keys(self, bucket: str, prefix: str = "") -> list[str]:
        """All keys of a bucket that start with `prefix`, sorted."""
        keys: list[str] = []
        query = {"list-type": "2", "prefix": prefix, "encoding-type": "url"}
        while True:
            page = self.call("GET", bucket, query=query)
            if page.status != 200:
                raise RuntimeError(f"cannot list {bucket}: {page.status} {page.body[:300]!r}")
            keys += [_unescape(key) for key in re.findall(rb"<Key>([^<]*)</Key>", page.body)]
            token = re.search(rb"<NextContinuationToken>([^<]*)", page.body)
            if token is None:
                return sorted(keys)
            query["continuation-token"] = token.group(1).decode()

    def part_sizes(self, bucket: str, upload_id: str) -> dict[int, int]:
        """Size in bytes of every part that an upload has so far; empty when there is no such upload."""
        with self._one_at_a_time:
            upload = self._upload(bucket, upload_id)
            return {number: part.contentsize for number, part in upload.parts.items()} if upload else {}

    def joined_parts(self, bucket: str, upload_id: str, numbers: Sequence[int]) -> bytes:
        """The bytes that these parts amount to; parts that are not there add nothing."""
        with self._one_at_a_time:
            upload = self._upload(bucket, upload_id)
            parts = upload.parts if upload is not None else {}
            return b"".join(parts[number].value for number in numbers if number in parts)

    def parts(self, bucket: str, upload_id: str) -> dict[int, bytes]:
        """What each part of an upload holds so far; empty when there is no such upload."""
        with self._one_at_a_time:
            upload = self._upload(bucket, upload_id)
            return {number: part.value for number, part in upload.parts.items()} if upload else {}

    def stored_bytes(self, bucket: str, key: str) -> bytes:
        """The bytes of an object, whatever its storage class; b"" when there is none."""
        with self._one_at_a_time:
            model = self._bucket(bucket)
            stored = model.keys.get(key) if model is not None else None
            return bytes(stored.value) if stored is not None else b""

    def flip_bit(self, bucket: str, key: str, offset: int) -> None:
        """Change one bit of a stored object and nothing else: its ETag, its checksum and its date stay as they are.

        Raises:
            KeyError: no such object.
            IndexError: it is not that long.
        """
        with self._one_at_a_time:
            model = self._bucket(bucket)
            stored = model.keys.get(key) if model is not None else None
            if stored is None:
                raise KeyError(f"{bucket}/{key}")
            # moto computes the ETag when it is first asked for, which must be before the damage.
            assert stored.etag
            stored._value_buffer.seek(offset)
            damaged = stored._value_buffer.read(1)[0] ^ 1
            stored._value_buffer.seek(offset)
            stored._value_buffer.write(bytes([damaged]))

    def uploads(self, bucket: str) -> dict[str, str]:
        """Unfinished multipart uploads: key by upload id."""
        model = self._bucket(bucket)
        return {} if model is None else {upload.id: upload.key_name for upload in list(model.multiparts.values())}

    def _bucket(self, name: str) -> Any:
        """moto's own record of a bucket, or None."""
        where = moto_models.s3_backends.bucket_accounts.get(self._tag + name)
        if where is None:
            return None
        partition, account = where
        return moto_models.s3_backends[account][partition].buckets.get(self._tag + name)

    def _upload(self, bucket: str, upload_id: str) -> Any:
        model = self._bucket(bucket)
        return model.multiparts.get(upload_id) if model is not None else None

    def remove_bucket(self, name: str) -> None:
        """Forget a bucket, so that its bytes do not stay in this process; nothing happens when there is none."""
        with self._one_at_a_time:
            where = moto_models.s3_backends.bucket_accounts.pop(self._tag + name, None)
            if where is None:
                return
            partition, account = where
            bucket = moto_models.s3_backends[account][partition].buckets.pop(self._tag + name, None)
            if bucket is not None:
                stored = [version for key in bucket.keys for version in bucket.keys.getlist(key)]
                for one in [*stored, *bucket.multiparts.values()]:
                    if hasattr(one, "dispose"):
                        one.dispose()

    def close(self) -> None:
        """Forget all buckets."""
        for name in self.list_buckets():
            self.remove_bucket(name)


def _unescape(encoded: bytes) -> str:
    return unquote_plus(encoded.decode())


def _environ(request: Request, headers: dict[str, str]) -> dict[str, Any]:
    query = urlencode(request.query, quote_via=quote)
    uri = request.path + (f"?{query}" if query else "")
    path = f"/{request.bucket}/{request.key}" if request.key else f"/{request.bucket}"
    environ: dict[str, Any] = {
        "REQUEST_METHOD": request.method,
        "SCRIPT_NAME": "",
        "PATH_INFO": path.encode("utf-8", "surrogateescape").decode("latin-1"),
        "QUERY_STRING": query,
        "RAW_URI": uri,
        "REQUEST_URI": uri,
        "SERVER_NAME": "127.0.0.1",
        "SERVER_PORT": "80",
        "SERVER_PROTOCOL": "HTTP/1.1",
        "HTTP_HOST": "127.0.0.1",
        "CONTENT_LENGTH": str(len(request.body)),
        "wsgi.version": (1, 0),
        "wsgi.url_scheme": "http",
        "wsgi.input": io.BytesIO(request.body),
        "wsgi.errors": io.StringIO(),
        "wsgi.multithread": True,
        "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }
    kept: dict[str, str] = {}
    for name, value in headers.items():
        if name in ("host", "content-length"):
            continue
        variable = "CONTENT_TYPE" if name == "content-type" else "HTTP_" + name.upper().replace("-", "_")
        environ[variable] = value
        if "_" in name:
            kept[variable] = name
    environ["moto.preserved_header_names"] = kept
    return environ
