"""Alibaba Cloud OSS before moto's S3: what oss2 and the OSS backend need of it, with its real errors.

Emulated: signatures 1 and 4 (header and URL), STS tokens, `x-oss-*` headers and metadata, CRC-64, create-only writes
(`x-oss-forbid-overwrite`, atomic among all writers, without effect on a versioned bucket as in the real OSS), append, symlinks
(put and get, not followed), listings, multipart with parts from 100 KiB and a CRC for each, versions, tagging, lifecycle rules (kept, not
carried out), encryption and storage classes (echoed; archived objects cannot be read), Content-MD5.
Not emulated: signature version 2, RAM policies beyond `Identity`, virtual-host addressing, WORM, callbacks, regions.

Source: https://www.alibabacloud.com/help/en/oss/developer-reference/putobject
Source: https://www.alibabacloud.com/help/en/oss/developer-reference/check-data-transmission-integrity-by-using-crc-64
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
import uuid
from dataclasses import replace

import fastcrc

from ckptmgr.testing import oss_signing, oss_xml
from ckptmgr.testing.identities import DEFAULT_IDENTITIES, Identity
from ckptmgr.testing.moto_core import MotoCore
from ckptmgr.testing.oss_sessions import Sessions
from ckptmgr.testing.oss_translation import (
    CODE_OF_STATUS,
    CODES,
    MAX_KEYS,
    TARGET,
    TYPE,
    body_in,
    headers_in,
    headers_out,
    is_v1_list,
    is_write,
    query_in,
    v1_list_as_v2,
)
from ckptmgr.testing.store_app import Reply, Request, StoreApp

MIN_PART_SIZE_BYTES = 100 * 1024
_XML = {"content-type": "application/xml"}


def crc64(data: bytes) -> str:
    """The value of `x-oss-hash-crc64ecma`: CRC-64/XZ in decimal."""
    return str(fastcrc.crc64.xz(data))


class OssApp(StoreApp):
    """The OSS dialect before a private moto.

    Args:
        identities: who may do what; any other access key is refused.

    Attributes:
        core: the store behind, without signatures, faults and log.
        sessions: temporary keys of the identities, as STS gives them out.
        clock_offset_s: how far this server's clock is ahead of the machine's.
    """

    def __init__(self, *, identities: tuple[Identity, ...] = DEFAULT_IDENTITIES) -> None:
        super().__init__()
        self.core = MotoCore()
        self._identities = {identity.access_key: identity for identity in identities}
        self._secrets = {identity.access_key: identity.secret_key for identity in identities}
        self.sessions = Sessions()
        self.clock_offset_s = 0.0
        # One writer at a time: create-only is a look and a write, and nothing may come between the two.
        self._writes = threading.RLock()
        self._crcs: dict[tuple[str | None, ...], str] = {}
        self._begun_s: dict[str, float] = {}
        self._lifecycles: dict[str, bytes] = {}

    def reset(self) -> None:
        """As `StoreApp.reset`; the clock is right again, and all sessions have ended."""
        super().reset()
        self.sessions.clear()
        self.clock_offset_s = 0.0

    def error(self, status: int, code: str, message: str, *, ec: str = "0000-00000000") -> Reply:
        """An OSS error answer; `ec` is its detailed code."""
        request_id = _request_id()
        body = oss_xml.error_document(code=code, message=message, request_id=request_id, ec=ec)
        # The answer to a HEAD has no body, so OSS puts the document into a header.
        encoded = base64.b64encode(body).decode()
        return Reply(
            status=status,
            headers={**_XML, "x-oss-request-id": request_id, "x-oss-ec": ec, "x-oss-err": encoded},
            body=body,
        )

    def answer(self, request: Request) -> Reply:
        """Authenticate, translate, apply, translate back."""
        reply = self._refuse(request) or self._route(request)
        headers = {"x-oss-request-id": _request_id(), **reply.headers}
        if request.method != "HEAD":
            headers.pop("x-oss-err", None)
        return replace(reply, headers=headers)

    # Who may come in

    def _refuse(self, request: Request) -> Reply | None:
        now_s = time.time() + self.clock_offset_s
        who = oss_signing.check(request, self._secrets | self.sessions.secrets, now_s=now_s)
        if isinstance(who, oss_signing.Refusal):
            return self.error(who.status, who.code, who.message)
        query = request.query
        token = request.headers.get("x-oss-security-token")
        token = token or query.get("security-token") or query.get("x-oss-security-token") or ""
        refusal = self.sessions.refusal(who, token)
        if refusal is None and self.live_tokens is not None and token not in self.live_tokens:
            refusal = oss_signing.TOKEN_EXPIRED if token else oss_signing.ANONYMOUS
        if refusal is not None:
            return self.error(refusal.status, refusal.code, refusal.message, ec="0002-00000007")
        identity = self.sessions.identity(who) or self._identities[who]
        listing = not request.key and request.method == "GET" and "bucketInfo" not in query and "location" not in query
        writing = request.method in ("PUT", "POST", "DELETE")
        if (listing and not identity.may_list) or (writing and not identity.may_write):
            return self.error(403, "AccessDenied", "You have no right to access this object.", ec="0003-00000001")
        md5 = request.headers.get("content-md5")
        if writing and md5 and base64.b64encode(hashlib.md5(request.body).digest()).decode() != md5:
            return self.error(400, "InvalidDigest", "The Content-MD5 you specified was invalid.")
        return None

    # Which call it is

    def _route(self, request: Request) -> Reply:
        headers, query = headers_in(request), query_in(request.query)
        if not request.bucket:
            return Reply(status=200, headers=_XML, body=oss_xml.list_buckets(self.core.list_buckets()))
        if not request.key and "bucketInfo" in query:
            return self._bucket_info(request.bucket)
        if not request.key and "lifecycle" in query:
            return self._lifecycle(request)
        if not request.key and "uploads" in query:
            return self._list_uploads(request)
        if request.method == "POST" and "delete" in query and request.body.count(b"<Object>") > MAX_KEYS:
            return self.error(400, "MalformedXML", "A batch deletes at most 1000 objects.", ec="0007-00000006")
        if request.key and "append" in query:
            return self._append(request, headers)
        if request.key and "symlink" in query:
            return self._symlink(request, headers)
        if not is_write(request.method, request.key, query):
            return self._forward(request, query, headers)
        with self._writes:
            return self._exists(request) or self._forward(request, query, headers)

    def _exists(self, request: Request) -> Reply | None:
        """The refusal of a create-only write; the caller holds the lock of all writes."""
        if request.headers.get("x-oss-forbid-overwrite", "").lower() != "true" or request.method == "DELETE":
            return None
        # OSS ignores the header while versioning is enabled or suspended.
        if self._versioning(request.bucket) or self.core.call("HEAD", request.bucket, request.key).status != 200:
            return None
        message = "The object you specified already exists and can not be overwritten."
        return self.error(409, "FileAlreadyExists", message, ec="0026-00000002")

    def _versioning(self, bucket: str) -> str:
        state = re.search(rb"<Status>(\w+)", self.core.call("GET", bucket, query={"versioning": ""}).body)
        return state.group(1).decode() if state else ""

    def _forward(self, request: Request, query: dict[str, str], headers: dict[str, str]) -> Reply:
        method, bucket, key = request.method, request.bucket, request.key
        body = body_in(request, query)
        if method == "POST" and "uploadId" in query and (small := self._too_small(bucket, query["uploadId"], body)):
            return small
        is_v1 = method == "GET" and not key and is_v1_list(query)
        if is_v1:
            query = v1_list_as_v2(query)
        reply = self.core.call(method, bucket, key, query=query, headers=headers, body=body)
        out = headers_out(method, reply)
        if reply.status >= 300:
            return self._error_from_s3(reply, out)
        if key:
            out |= self._facts(request, query, headers, reply)
        document = reply.body
        if method == "POST" and "uploads" in query:
            self._begun_s[oss_xml.upload_id(document)] = time.time() + self.clock_offset_s
        if method == "GET" and "uploadId" in query:
            crcs = {number: crc64(value) for number, value in self.core.parts(bucket, query["uploadId"]).items()}
            document = oss_xml.with_crcs(document, crcs)
        if document[:200].lstrip().startswith(b"<") and (query or not key or "x-amz-copy-source" in headers):
            document = oss_xml.from_s3(document, is_v1_list=is_v1)
            out |= _XML
        return Reply(status=reply.status, headers=out, body=document)

    def _too_small(self, bucket: str, upload_id: str, body: bytes) -> Reply | None:
        numbers = [int(number) for number in re.findall(rb"<PartNumber>\s*(\d+)\s*</PartNumber>", body)]
        sizes = self.core.part_sizes(bucket, upload_id)
        if any(sizes.get(number, MIN_PART_SIZE_BYTES) < MIN_PART_SIZE_BYTES for number in numbers[:-1]):
            return self.error(400, "EntityTooSmall", "A part but the last is smaller than 100 KB.", ec="0042-00000106")
        return None

    def _error_from_s3(self, reply: Reply, out: dict[str, str]) -> Reply:
        code, message = oss_xml.read_error(reply.body)
        code = code or CODE_OF_STATUS.get(reply.status, "InternalError")
        error = self.error(reply.status, CODES.get(code, code), message or code)
        kept = {name: value for name, value in out.items() if name.startswith("x-oss-") or name == "etag"}
        return replace(error, headers={**kept, **error.headers})

    # What OSS says about an object

    def _facts(self, request: Request, query: dict[str, str], headers: dict[str, str], reply: Reply) -> dict[str, str]:
        sends_bytes = request.method == "PUT" and "x-amz-copy-source" not in headers
        if sends_bytes and (not query or "partNumber" in query):
            return {"x-oss-hash-crc64ecma": crc64(request.body)}
        if request.method == "POST" and "uploadId" in query:
            head = self.core.call("HEAD", request.bucket, request.key)
            return {
                "x-oss-hash-crc64ecma": self._stored_crc(request, head, {}),
                "etag": head.headers.get("etag", "").upper(),
            }
        if request.method in ("GET", "HEAD") and not set(query) - {"versionId"}:
            is_multipart = re.search(r"-\d+\"?$", reply.headers.get("etag", "")) is not None
            kind = "Multipart" if is_multipart else reply.headers.get(TYPE, "Normal")
            storage = oss_xml.STORAGE_CLASSES.get(reply.headers.get("x-amz-storage-class", "STANDARD"), "Standard")
            return {
                "x-oss-hash-crc64ecma": self._stored_crc(request, reply, query),
                "x-oss-object-type": kind,
                "x-oss-storage-class": storage,
            }
        return {}

    def _stored_crc(self, request: Request, reply: Reply, query: dict[str, str]) -> str:
        """The CRC of the whole object, of a range too: OSS always reports the one it keeps."""
        facts = (reply.headers.get(name) for name in ("x-amz-version-id", "etag", "last-modified"))
        identity = (request.bucket, request.key, *facts)
        if identity not in self._crcs:
            version = {name: value for name, value in query.items() if name == "versionId"}
            got = self.core.call("GET", request.bucket, request.key, query=version)
            # An archived object is not handed out, not even to us.
            body = got.body if got.status == 200 else self.core.stored_bytes(request.bucket, request.key)
            self._crcs[identity] = crc64(body)
        return self._crcs[identity]

    def keep_crc(self, bucket: str, key: str) -> None:
        """Take down the CRC of an object now, as OSS does when it is written, so that later damage does not change it."""
        request = Request(method="HEAD", bucket=bucket, key=key)
        self._stored_crc(request, self.core.call("HEAD", bucket, key), {})

    # Calls that S3 does not have

    def _append(self, request: Request, headers: dict[str, str]) -> Reply:
        with self._writes:
            current = self.core.call("GET", request.bucket, request.key)
            exists = current.status == 200
            if exists and current.headers.get(TYPE) != "Appendable":
                return self.error(409, "ObjectNotAppendable", "The object is not appendable.")
            before = current.body if exists else b""
            if request.query.get("position") != str(len(before)):
                error = self.error(409, "PositionNotEqualToLength", "Position is not equal to file length")
                facts = {"x-oss-next-append-position": str(len(before)), "x-oss-hash-crc64ecma": crc64(before)}
                return replace(error, headers={**error.headers, **facts})
            whole = before + request.body
            reply = self.core.call(
                "PUT", request.bucket, request.key, headers={**headers, TYPE: "Appendable"}, body=whole
            )
        if reply.status != 200:
            return self._error_from_s3(reply, {})
        etag = reply.headers.get("etag", "").upper()
        facts = {"x-oss-next-append-position": str(len(whole)), "x-oss-hash-crc64ecma": crc64(whole), "etag": etag}
        return Reply(status=200, headers=facts)

    def _symlink(self, request: Request, headers: dict[str, str]) -> Reply:
        if request.method == "PUT":
            target = request.headers.get("x-oss-symlink-target", "")
            with self._writes:
                refused = self._exists(request)
                reply = refused or self.core.call(
                    "PUT", request.bucket, request.key, headers={**headers, TARGET: target, TYPE: "Symlink"}
                )
            if refused is not None:
                return refused
            if reply.status != 200:
                return self._error_from_s3(reply, {})
            return Reply(status=200, headers={"etag": reply.headers.get("etag", "").upper()})
        head = self.core.call("HEAD", request.bucket, request.key)
        if head.status != 200:
            return self.error(404, "NoSuchKey", "The specified key does not exist.")
        if TARGET not in head.headers:
            return self.error(400, "NotSymlinkObject", "The object is not symlink object")
        etag = head.headers.get("etag", "").upper()
        return Reply(status=200, headers={"x-oss-symlink-target": head.headers[TARGET], "etag": etag})

    def _lifecycle(self, request: Request) -> Reply:
        bucket = request.bucket
        if self.core.call("HEAD", bucket).status != 200:
            return self._no_bucket()
        if request.method == "PUT":
            self._lifecycles[bucket] = request.body
            return Reply(status=200)
        if request.method == "DELETE":
            self._lifecycles.pop(bucket, None)
            return Reply(status=204)
        if bucket not in self._lifecycles:
            return self.error(404, "NoSuchLifecycle", "No Row found in Lifecycle Table.", ec="0013-00000003")
        return Reply(status=200, headers=_XML, body=self._lifecycles[bucket])

    def _list_uploads(self, request: Request) -> Reply:
        bucket, query = request.bucket, request.query
        if self.core.call("HEAD", bucket).status != 200:
            return self._no_bucket()
        uploads = [
            oss_xml.Upload(key=key, upload_id=upload_id, begun_s=self._begun_s.get(upload_id, 0.0))
            for upload_id, key in self.core.uploads(bucket).items()
            if key.startswith(query.get("prefix", ""))
        ]
        document = oss_xml.list_uploads(
            uploads,
            after=(query.get("key-marker", ""), query.get("upload-id-marker", "")),
            limit=min(int(query.get("max-uploads") or MAX_KEYS), MAX_KEYS),
            is_encoded=query.get("encoding-type") == "url",
        )
        return Reply(status=200, headers=_XML, body=document)

    def _no_bucket(self) -> Reply:
        return self.error(404, "NoSuchBucket", "The specified bucket does not exist.")

    def _bucket_info(self, bucket: str) -> Reply:
        if self.core.call("HEAD", bucket).status != 200:
            return self._no_bucket()
        return Reply(status=200, headers=_XML, body=oss_xml.bucket_info(bucket, versioning=self._versioning(bucket)))


def _request_id() -> str:
    return uuid.uuid4().hex[:24].upper()
