"""S3 as S3 answers, where moto 5.2 answers otherwise.

moto stores a body whose checksum is wrong, decides conditional writes without a lock, answers 500 for a part of an unknown
upload, and has no page limits. `S3App` stands before it and corrects these; it checks no signatures (`WeedServer` does),
but knows the access keys of its identities, so that a missing permission can be tested.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/API_PutObject.html
Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import uuid
import zlib
from collections.abc import Callable
from dataclasses import replace
from urllib.parse import unquote
from xml.sax.saxutils import escape

from ckptmgr.testing.identities import Identity
from ckptmgr.testing.moto_core import MotoCore
from ckptmgr.testing.store_app import ConnectionLost, Reply, Request, StoreApp

try:
    from awscrt import checksums as _crt
except ImportError:
    _crt = None  # type: ignore[assignment,unused-ignore]

MIN_PART_SIZE_BYTES = 5 * 1024 * 1024
MAX_KEYS = 1000
_CHECKSUM = "x-amz-checksum-"


def _big_endian(value: int, size: int) -> bytes:
    return value.to_bytes(size, "big")


_DIGESTS: dict[str, Callable[[bytes], bytes]] = {
    "crc32": lambda data: _big_endian(zlib.crc32(data), 4),
    "sha1": lambda data: hashlib.sha1(data).digest(),
    "sha256": lambda data: hashlib.sha256(data).digest(),
}
if _crt is not None:
    _DIGESTS["crc32c"] = lambda data: _big_endian(_crt.crc32c(data), 4)
    _DIGESTS["crc64nvme"] = lambda data: _big_endian(_crt.crc64nvme(data), 8)


class S3App(StoreApp):
    """The S3 dialect before a private moto.

    Args:
        identities: who may do what. An access key that none of them has may do everything.

    Attributes:
        core: the store behind, without faults and log.
        ignores_conditions: answers a conditional write as if it had no condition, as some S3-like stores do.
    """

    def __init__(self, *, identities: tuple[Identity, ...] = ()) -> None:
        super().__init__()
        self.core = MotoCore()
        self.ignores_conditions = False
        self._identities = {identity.access_key: identity for identity in identities}
        # One writer at a time: moto looks whether the key exists and then writes, and two requests can both find nothing.
        self._writes = threading.Lock()

    def reset(self) -> None:
        """Behave normally again."""
        super().reset()
        self.ignores_conditions = False

    def error(self, status: int, code: str, message: str) -> Reply:
        """An S3 error document."""
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message>'
            f"<RequestId>{uuid.uuid4().hex[:16].upper()}</RequestId></Error>"
        )
        return Reply(status=status, headers={"content-type": "application/xml"}, body=body.encode())

    def answer(self, request: Request) -> Reply:
        """Check what moto does not, let moto do the rest, correct its answer."""
        refused = self._permission(request)
        if refused is not None:
            return refused
        request = _decode_aws_chunks(request)
        refused = self._checksums(request) or self._limits(request)
        if refused is not None:
            return refused
        if _is_write(request):
            with self._writes:
                reply = self._preconditions(request) or self._forward(request)
        else:
            reply = self._forward(request)
        return self._hide_missing(request, reply)

    def _identity(self, request: Request) -> Identity | None:
        credential = re.search(r"Credential=([^/,\s]+)/", request.headers.get("authorization", ""))
        key = (
            credential.group(1) if credential else unquote(request.query.get("X-Amz-Credential", "")).partition("/")[0]
        )
        return self._identities.get(key)

    def _permission(self, request: Request) -> Reply | None:
        token = request.headers.get("x-amz-security-token") or request.query.get("X-Amz-Security-Token")
        if self.live_tokens is not None and token not in self.live_tokens:
            return self.error(400, "ExpiredToken", "The provided token has expired.")
        identity = self._identity(request)
        if identity is None:
            return None
        lists = request.method == "GET" and _is_listing(request)
        writes = request.method in ("PUT", "POST", "DELETE")
        if (lists and not identity.may_list) or (writes and not identity.may_write):
            return self.error(403, "AccessDenied", "Access Denied")
        return None

    def _hide_missing(self, request: Request, reply: Reply) -> Reply:
        # Without s3:ListBucket, S3 does not tell "no such key" from "not allowed".
        identity = self._identity(request)
        hidden = reply.status == 404 and request.key and request.method in ("GET", "HEAD") and not request.query
        if hidden and identity is not None and not identity.may_list and b"NoSuchBucket" not in reply.body:
            return self.error(403, "AccessDenied", "Access Denied")
        return reply

    def _checksums(self, request: Request) -> Reply | None:
        if request.method not in ("PUT", "POST"):
            return None
        expected_md5 = request.headers.get("content-md5")
        if expected_md5 is not None and base64.b64encode(hashlib.md5(request.body).digest()).decode() != expected_md5:
            return self.error(400, "BadDigest", "The Content-MD5 you specified did not match what we received.")
        data = request.body
        if request.method == "POST" and "uploadId" in request.query:
            # Here the header is about the object that is completed, not about this body, and "-3" means a digest of digests.
            data = self.core.joined_parts(request.bucket, request.query["uploadId"], _part_numbers(request.body))
            promised = request.headers.get("x-amz-mp-object-size")
            if promised is not None and promised != str(len(data)):
                return self.error(
                    400, "InvalidRequest", "The provided x-amz-mp-object-size does not match the actual size."
                )
        for name, digest in _DIGESTS.items():
            value = request.headers.get(_CHECKSUM + name)
            if value is not None and "-" not in value and base64.b64encode(digest(data)).decode() != value:
                message = f"The {name.upper()} you specified did not match the calculated checksum."
                return self.error(400, "BadDigest", message)
        return None

    def _limits(self, request: Request) -> Reply | None:
        if request.method == "POST" and "delete" in request.query and request.body.count(b"<Key>") > MAX_KEYS:
            return self.error(400, "MalformedXML", "A multi-object delete names at most 1000 keys.")
        if request.method == "PUT" and "partNumber" in request.query and not request.query["partNumber"].isdecimal():
            return self.error(400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
        if request.method == "PUT" and not 1 <= int(request.query.get("partNumber", 1)) <= 10000:
            return self.error(400, "InvalidArgument", "Part number must be an integer between 1 and 10000, inclusive")
        return None

    def _preconditions(self, request: Request) -> Reply | None:
        """The refusal of a conditional write; the caller holds the lock of all writes."""
        matches, none_match = request.headers.get("if-match"), request.headers.get("if-none-match")
        if self.ignores_conditions or request.method not in ("PUT", "POST") or not (matches or none_match):
            return None
        if none_match is not None and none_match != "*":
            return self.error(501, "NotImplemented", "If-None-Match on a write takes * only.")
        head = self.core.call("HEAD", request.bucket, request.key)
        if none_match is not None and head.status == 200:
            return self.error(
                412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
            )
        if matches is not None and head.status == 404:
            return self.error(404, "NoSuchKey", "The specified key does not exist.")
        if matches is not None and head.headers.get("etag", "").strip('"') != matches.strip('"'):
            return self.error(
                412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold"
            )
        return None

    def _forward(self, request: Request) -> Reply:
        if request.method == "GET" and not request.bucket:
            return self._list_buckets()
        headers, query = dict(request.headers), dict(request.query)
        given = [name for name in headers if name.startswith(_CHECKSUM) and name.removeprefix(_CHECKSUM) in _DIGESTS]
        if given and "x-amz-sdk-checksum-algorithm" not in headers:
            # moto keeps a checksum only when the SDK's own header names it as well.
            headers["x-amz-sdk-checksum-algorithm"] = given[0].removeprefix(_CHECKSUM).upper()
        if request.method in ("PUT", "POST"):
            # Decided before, under the lock that moto does not have.
            headers = {name: value for name, value in headers.items() if name not in ("if-match", "if-none-match")}
        for name in ("max-keys", "max-uploads", "max-parts"):
            if query.get(name, "").isdecimal():
                query[name] = str(min(int(query[name]), MAX_KEYS))
        if request.method == "POST" and "uploadId" in query and (small := self._too_small(request)):
            return small
        reply = self.core.call(
            request.method, request.bucket, request.key, query=query, headers=headers, body=request.body
        )
        names, document = dict(reply.headers), reply.body
        # werkzeug writes these two itself.
        names.pop("date", None)
        names.pop("server", None)
        if request.method == "POST" and "uploadId" in query and reply.status == 200:
            document = self._with_checksum(request, document)
        if any(name.startswith(_CHECKSUM) and "-" not in value for name, value in names.items()):
            names.setdefault("x-amz-checksum-type", "FULL_OBJECT")
        names.setdefault("x-amz-request-id", uuid.uuid4().hex[:16].upper())
        return replace(reply, headers=names, body=document)

    def _with_checksum(self, request: Request, document: bytes) -> bytes:
        """The answer to CompleteMultipartUpload with the object's checksum, which moto leaves out of it."""
        head = self.core.call("HEAD", request.bucket, request.key, headers={"x-amz-checksum-mode": "ENABLED"}).headers
        kind = head.get("x-amz-checksum-type", "")
        elements = "".join(
            f"<Checksum{name.removeprefix(_CHECKSUM).upper()}>{value}</Checksum{name.removeprefix(_CHECKSUM).upper()}>"
            for name, value in head.items()
            if name.removeprefix(_CHECKSUM) in _DIGESTS
        )
        if not elements:
            return document
        elements += f"<ChecksumType>{kind}</ChecksumType>"
        return document.replace(
            b"</CompleteMultipartUploadResult>", f"{elements}</CompleteMultipartUploadResult>".encode()
        )

    def _too_small(self, request: Request) -> Reply | None:
        numbers = _part_numbers(request.body)
        sizes = self.core.part_sizes(request.bucket, request.query["uploadId"])
        if any(sizes.get(number, MIN_PART_SIZE_BYTES) < MIN_PART_SIZE_BYTES for number in numbers[:-1]):
            return self.error(400, "EntityTooSmall", "Your proposed upload is smaller than the minimum allowed size")
        return None

    def _list_buckets(self) -> Reply:
        buckets = "".join(
            f"<Bucket><Name>{name}</Name><CreationDate>2026-01-01T00:00:00.000Z</CreationDate></Bucket>"
            for name in self.core.list_buckets()
        )
        body = (
            '<?xml version="1.0" encoding="UTF-8"?>\n<ListAllMyBucketsResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Owner><ID>owner</ID></Owner><Buckets>{buckets}</Buckets></ListAllMyBucketsResult>"
        )
        return Reply(status=200, headers={"content-type": "application/xml"}, body=body.encode())


def _is_write(request: Request) -> bool:
    """Whether the request changes what a key holds; parts of an upload do not."""
    if not request.key:
        return request.method == "POST" and "delete" in request.query
    if request.method == "POST":
        return "uploadId" in request.query
    return request.method == "DELETE" or (request.method == "PUT" and "partNumber" not in request.query)


def _part_numbers(body: bytes) -> list[int]:
    return [int(number) for number in re.findall(rb"<PartNumber>\s*(\d+)\s*</PartNumber>", body)]


def _is_listing(request: Request) -> bool:
    return not request.key and not set(request.query) & {"location", "versioning", "lifecycle", "acl", "policy"}


def _decode_aws_chunks(request: Request) -> Request:
    """The request with the `aws-chunked` framing removed and its trailing checksum as an ordinary header.

    Raises:
        ConnectionLost: the framing ends too early, as it does when a client dies.
    """
    if "aws-chunked" not in request.headers.get("content-encoding", ""):
        return request
    body, rest = bytearray(), request.body
    while True:
        line, found, rest = rest.partition(b"\r\n")
        size = int(line.partition(b";")[0] or b"0", 16)
        if not found or len(rest) < size:
            raise ConnectionLost
        if size == 0:
            break
        body += rest[:size]
        rest = rest[size + 2 :]
    headers = dict(request.headers)
    encodings = [part.strip() for part in headers.pop("content-encoding").split(",")]
    if kept := ",".join(part for part in encodings if part != "aws-chunked"):
        headers["content-encoding"] = kept
    for trailer in rest.split(b"\r\n"):
        name, colon, value = trailer.decode("latin-1").partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    for name in ("x-amz-trailer", "x-amz-decoded-content-length", "x-amz-content-sha256", "transfer-encoding"):
        headers.pop(name, None)
    return replace(request, headers=headers, body=bytes(body))
