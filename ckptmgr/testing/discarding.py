"""A store that keeps small objects and throws the bytes of large ones away, so that what a client costs can be measured with any amount of data.

    with DiscardingServer() as server:
        subprocess.run([...], env={**os.environ, **server.env})

It speaks as much S3 and OSS as an upload and a look at a run need: both at once, for the two differ in headers only. It checks nothing, and says of a large
object what the client said. `GET` of one is refused.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

from ckptmgr.testing.identities import ADMIN

if TYPE_CHECKING:
    from typing_extensions import Self

_KEPT_BYTES = 1 << 20
_DATE = "Sun, 01 Mar 2026 00:00:00 GMT"
_CRC = "x-amz-checksum-crc64nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discarded:
    """One object: its size, its bytes if it is small, and the CRC that the client sent along."""

    size: int
    body: bytes | None = None
    crc: str = ""


class DiscardingServer:
    """See the module's docstring. Listens on 127.0.0.1 between `__enter__` and `__exit__`; any bucket exists.

    Attributes:
        objects: by `bucket/key`.
        received_bytes: of all bodies so far.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Discarded] = {}
        self.uploads: dict[str, dict[int, int]] = {}
        self.received_bytes = 0
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler())
        self._server.daemon_threads = True

    def handler(self) -> type[BaseHTTPRequestHandler]:
        """What serves a connection."""

        class Discarding(Handler):
            server_store = self

        return Discarding

    @property
    def url(self) -> str:
        """The endpoint."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def env(self) -> dict[str, str]:
        """The environment that points S3 and OSS clients here."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": ADMIN.access_key,
            "AWS_SECRET_ACCESS_KEY": ADMIN.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
            "OSS_ENDPOINT": self.url,
            "OSS_ACCESS_KEY_ID": ADMIN.access_key,
            "OSS_ACCESS_KEY_SECRET": ADMIN.secret_key,
            "OSS_REGION": "cn-hangzhou",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection to a `DiscardingServer`."""

    server_store: DiscardingServer
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.path, self.query = "", dict[str, str]()

    def do_PUT(self) -> None:
        size, body = self._receive()
        store = self.server_store
        if "partNumber" in self.query:
            with store.lock:
                store.uploads[self.query["uploadId"]][int(self.query["partNumber"])] = size
            self._answer(200, headers={"ETag": f'"{self.query["partNumber"]}"'})
            return
        self._put(size, body)

    def _put(self, size: int, body: bytes | None) -> bool:
        """Keep an object and say so, unless it is there and must not be: then False."""
        store, create = self.server_store, "x-oss-forbid-overwrite" in self.headers or "If-None-Match" in self.headers
        crc = self.headers.get(_CRC, "")
        with store.lock:
            exists = create and self._key in store.objects
            if not exists:
                store.objects[self._key] = Discarded(size=size, body=body, crc=crc)
        if exists:
            self._refuse(
                *((409, "FileAlreadyExists") if "oss" in str(self.headers).lower() else (412, "PreconditionFailed"))
            )
        else:
            self._answer(200, headers={"ETag": '"e"', **_crc_headers(crc)})
        return not exists

    def do_POST(self) -> None:
        self._receive()
        store = self.server_store
        if "uploads" in self.query:
            upload_id = uuid.uuid4().hex
            with store.lock:
                store.uploads[upload_id] = {}
            self._document("InitiateMultipartUploadResult", f"<UploadId>{upload_id}</UploadId>")
            return
        crc = self.headers.get(_CRC, "")
        with store.lock:
            sizes = store.uploads.pop(self.query["uploadId"])
            store.objects[self._key] = Discarded(size=sum(sizes.values()), crc=crc)
        said = f"<ChecksumCRC64NVME>{crc}</ChecksumCRC64NVME><ChecksumType>FULL_OBJECT</ChecksumType>" if crc else ""
        self._document("CompleteMultipartUploadResult", f'<ETag>"e"</ETag>{said}')

    def do_DELETE(self) -> None:
        with self.server_store.lock:
            self.server_store.uploads.pop(self.query.get("uploadId", ""), None)
            self.server_store.objects.pop(self._key, None)
        self._answer(204)

    def do_HEAD(self) -> None:
        found = self.server_store.objects.get(self._key)
        if found is None:
            self._answer(404)
            return
        headers = {"ETag": '"e"', "Last-Modified": _DATE, "Content-Length": str(found.size), **_crc_headers(found.crc)}
        self._answer(200, headers=headers)

    def do_GET(self) -> None:
        bucket, _, key = self._key.partition("/")
        if not key:
            self._document("ListBucketResult", "".join(self._listing(bucket)))
            return
        found = self.server_store.objects.get(self._key)
        if found is None or found.body is None:
            self._refuse(404, "NoSuchKey")
        else:
            self._answer(200, found.body, {"ETag": '"e"', "Last-Modified": _DATE})

    def _listing(self, bucket: str) -> Iterator[str]:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        with self.server_store.lock:
            objects = sorted(self.server_store.objects.items())
        yield f"<IsTruncated>false</IsTruncated><Prefix>{escape(prefix)}</Prefix>"
        prefixes: set[str] = set()
        for path, found in objects:
            owner, _, key = path.partition("/")
            if owner != bucket or not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                prefixes.add(prefix + rest.partition(delimiter)[0] + delimiter)
                continue
            yield (
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-03-01T00:00:00.000Z</LastModified>"
                f'<ETag>"e"</ETag><Type>Normal</Type><Size>{found.size}</Size><StorageClass>Standard</StorageClass></Contents>'
            )
        yield from (f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in sorted(prefixes))

    @property
    def _key(self) -> str:
        return unquote(urlsplit(self.path).path).strip("/")

    def parse_request(self) -> bool:
        done = super().parse_request()
        self.query = dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))
        return done

    def _receive(self) -> tuple[int, bytes | None]:
        """The size of the body, and the body itself if it is small."""
        size = int(self.headers.get("Content-Length", 0))
        if size <= _KEPT_BYTES:
            return size, self.rfile.read(size)
        left, buffer = size, memoryview(bytearray(_KEPT_BYTES))
        while left:
            count = self.rfile.readinto(buffer[: min(left, len(buffer))])
            if not count:
                raise ConnectionError("the client went away")
            left -= count
            with self.server_store.lock:
                self.server_store.received_bytes += count
        return size, None

    def _document(self, name: str, inner: str) -> None:
        bucket, _, key = self._key.partition("/")
        named = f"<Name>{bucket}</Name><Bucket>{bucket}</Bucket><Key>{escape(key)}</Key>"
        body = f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}>{named}{inner}</{name}>'.encode()
        self._answer(200, body, {"Content-Type": "application/xml"})

    def _refuse(self, status: int, code: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{code}</Message><RequestId>0</RequestId></Error>".encode()
        self._answer(status, body, {"Content-Type": "application/xml"})

    def _answer(self, status: int, body: bytes = b"", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), "x-oss-request-id": "0", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _crc_headers(crc: str) -> dict[str, str]:
    return {_CRC: crc, "x-amz-checksum-type": "FULL_OBJECT"} if crc else {}
