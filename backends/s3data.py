"""The requests that move data, as signed HTTP of our own: boto3 takes milliseconds of processor for each, this some hundred microseconds.

Where a bucket is (host, path, region, scheme) and how requests to it are signed is known in the ordinary cases (`s3place`), and otherwise asked of boto3's
client, once per bucket. A bucket with another kind of signature, behind a proxy, or somewhere else than botocore thought stays with boto3.
What goes wrong is raised as botocore would: one table tells what it means, and no caller sees who made the request.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import re
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import botocore.awsrequest
import botocore.exceptions
import botocore.httpsession
import botocore.utils

from ckptmgr.backends.answers import NoStoreError
from ckptmgr.backends.body import FileBody
from ckptmgr.backends.http import Answer, HttpPool
from ckptmgr.backends.options import SignPayload
from ckptmgr.backends.s3answers import (
    check_range,
    format_parts,
    parse_begun,
    parse_completed,
    parse_error,
    parse_headers,
    parse_page,
)
from ckptmgr.backends.s3errors import client_error
from ckptmgr.backends.s3place import BucketUrl, Place
from ckptmgr.backends.sigv4 import EMPTY_SHA256, UNSIGNED, Keys, Signer, encode_path, encode_query

# method, and the name of the operation in botocore's errors
_OPERATIONS = {
    "put_object": ("PUT", "PutObject"),
    "create_multipart_upload": ("POST", "CreateMultipartUpload"),
    "upload_part": ("PUT", "UploadPart"),
    "complete_multipart_upload": ("POST", "CompleteMultipartUpload"),
    "get_object": ("GET", "GetObject"),
    "head_object": ("HEAD", "HeadObject"),
    "list_objects_v2": ("GET", "ListObjectsV2"),
    "delete_object": ("DELETE", "DeleteObject"),
}
_HEADERS = {
    "ChecksumAlgorithm": "x-amz-checksum-algorithm",
    "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme",
    "ChecksumMode": "x-amz-checksum-mode",
    "ChecksumType": "x-amz-checksum-type",
    "IfMatch": "if-match",
    "IfNoneMatch": "if-none-match",
    "Range": "range",
    "SSEKMSKeyId": "x-amz-server-side-encryption-aws-kms-key-id",
    "ServerSideEncryption": "x-amz-server-side-encryption",
    "StorageClass": "x-amz-storage-class",
}
_QUERY = {
    "ContinuationToken": "continuation-token",
    "Delimiter": "delimiter",
    "MaxKeys": "max-keys",
    "PartNumber": "partNumber",
    "Prefix": "prefix",
    "UploadId": "uploadId",
}
_ELSEWHERE = {
    "PermanentRedirect",
    "TemporaryRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^,]*/\d{8}/(?P<region>[^/,]+)/s3/aws4_request,")
_MOST_ERROR_BYTES = 1 << 20
_MOST_PAGE_BYTES = 32 << 20
_PROBE_KEY = "k"


class ElsewhereError(Exception):
    """Raised when the store says that the bucket is not where the request went; nothing was done with it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how the requests of a bucket go.

    Attributes:
        prefix: the path that comes before a key, encoded: "" or "/bucket".
        host: the header.
        head: the end of every request's head: what is neither signed nor different.
        signs_payload: whether a body that has a CRC is signed too.
    """

    pool: HttpPool
    prefix: str
    host: str
    head: str
    signer: Signer
    signs_payload: bool


class DataCalls:
    """The data calls of one opened store. Safe from any thread.

    Args:
        client: gives boto3's client, which tells where buckets are that are not in `place`.
        credentials: botocore's, which renew themselves.
        place: where buckets are, in the ordinary cases.
        limits_s: seconds for a connection to come about, and without a byte.
        ca_bundle: a file with the certificates to trust; None for botocore's own.
        sign_payload: whether bodies are signed; `auto` does without over TLS and within this machine, where a CRC goes along.
    """

    def __init__(
        self,
        client: Callable[[], Any],
        credentials: Any,
        place: Place | None,
        *,
        limits_s: tuple[float, float],
        ca_bundle: str | None,
        sign_payload: SignPayload,
    ) -> None:
        self._client = client
        self._credentials = credentials
        self._place = place
        self._limits_s = limits_s
        self._ca_bundle = ca_bundle
        self._sign_payload = sign_payload
        self._targets: dict[str, Target | None] = {}
        self._pools: dict[tuple[str, str, int], HttpPool] = {}
        self._moved: set[str] = set()
        self._context: ssl.SSLContext | None = None
        self._lock = threading.Lock()
        self._capturing = threading.local()

    def target(self, operation: str, bucket: str) -> Target | None:
        """Where such a request goes; None if it is boto3's."""
        if operation not in _OPERATIONS:
            return None
        try:
            return self._targets[bucket]
        except KeyError:
            with self._lock:
                if bucket not in self._targets:
                    self._targets[bucket] = self._find(bucket)
                return self._targets[bucket]

    def call(
        self, operation: str, target: Target, arguments: dict[str, Any], *, offset_s: float = 0.0
    ) -> dict[str, Any]:
        """One request, with the arguments of boto3's client and the parts of its answer that are used here.

        The `Body` of an object that is read is an `http.Answer`.

        Args:
            offset_s: how far the store's clock is ahead of this machine's.

        Raises:
            ElsewhereError: the bucket is not there.
            botocore.exceptions.ClientError: the store refused.
            HttpError: no answer, or none that can be understood.
        """
        method, name = _OPERATIONS[operation]
        head, body = self._head(operation, target, arguments, offset_s)
        answer = target.pool.request(head, body, is_head=method == "HEAD")
        if not 200 <= answer.status < 300:
            raise self._refused(answer, name, arguments["Bucket"], target)
        if operation == "list_objects_v2":
            return parse_page(answer.read(_MOST_PAGE_BYTES))
        if operation == "create_multipart_upload":
            return parse_begun(answer.read(_MOST_ERROR_BYTES))
        if operation == "complete_multipart_upload":
            document = answer.read(_MOST_ERROR_BYTES)
            completed = parse_completed(document)
            if completed is None:
                # As botocore: the answer had begun before the store failed.
                raise client_error(name, 500, answer.headers, *parse_error(document.strip()))
            return completed
        parsed = parse_headers(answer.headers, is_of_object=operation in ("get_object", "head_object"))
        if operation == "get_object":
            try:
                check_range(answer, arguments.get("Range"))
                if "ETag" not in parsed:
                    raise NoStoreError(answer.status, "an ETag")
            except BaseException:
                answer.close()
                raise
            parsed["Body"] = answer
            return parsed
        answer.read(_MOST_ERROR_BYTES)
        if operation != "delete_object" and "ETag" not in parsed:
            raise NoStoreError(answer.status, "an ETag")
        return parsed

    def moved(self, bucket: str, target: Target) -> None:
        """The bucket was not at `target`: until `settled` it is boto3's."""
        with self._lock:
            if self._targets.get(bucket) is target:
                self._targets[bucket] = None

    def settled(self, bucket: str) -> None:
        """boto3 has found the bucket: it is looked for once more, and after another move left to boto3."""
        with self._lock:
            if bucket not in self._moved:
                self._moved.add(bucket)
                self._targets.pop(bucket, None)

    # --- the request ------------------------------------------------------------------------------------------------------

    def _head(
        self, operation: str, target: Target, arguments: dict[str, Any], offset_s: float
    ) -> tuple[bytes, bytes | FileBody | None]:
        method, key, body = _OPERATIONS[operation][0], arguments.get("Key"), arguments.get("Body")
        path = target.prefix if key is None else f"{target.prefix}/{encode_path(key)}"
        headers, query = {"host": target.host}, []
        if key is None:
            query = [("list-type", "2"), ("encoding-type", "url")]
        elif operation == "create_multipart_upload":
            query = [("uploads", "")]
        for argument, value in arguments.items():
            if argument in _HEADERS:
                headers[_HEADERS[argument]] = value
            elif argument in _QUERY:
                query.append((_QUERY[argument], str(value)))
        if operation == "complete_multipart_upload":
            # The checksum among the headers is the object's, and says nothing of this body.
            body = format_parts(arguments["MultipartUpload"]["Parts"])
            payload = hashlib.sha256(body).hexdigest()
        else:
            payload = EMPTY_SHA256 if body is None else self._payload(target, body, headers)
        frozen = self._credentials.get_frozen_credentials()
        keys = Keys(frozen.access_key, frozen.secret_key, frozen.token)
        path, text = path or "/", encode_query(query)
        added = target.signer.sign(method, path, text, headers, payload, keys, time.time() + offset_s)
        headers.update(added)
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers) or not lines.isascii():
            # Named, not shown: it may be a token with a line break.
            names = [name for name, value in headers.items() if not (value.isascii() and value.isprintable())]
            raise botocore.exceptions.ParamValidationError(report=f"{', '.join(names)}: no value for a header")
        length = "" if method in ("GET", "HEAD") else f"content-length: {0 if body is None else len(body)}\r\n"
        head = f"{method} {path}{'?' if text else ''}{text} HTTP/1.1\r\n{lines}{length}{target.head}\r\n"
        return head.encode("latin-1"), body

    def _payload(self, target: Target, body: bytes | FileBody, headers: dict[str, str]) -> str:
        if isinstance(body, FileBody):
            body.rewind()
        if "x-amz-checksum-crc64nvme" in headers and not target.signs_payload:
            payload = UNSIGNED
        elif isinstance(body, FileBody):
            payload = body.sha256()
        else:
            payload = hashlib.sha256(body).hexdigest()
        if isinstance(body, FileBody):
            body.rewind()
            body.start_sending()
        return payload

    # --- where buckets are ------------------------------------------------------------------------------------------------

    def _find(self, bucket: str) -> Target | None:
        found = None if self._place is None else self._place.find(bucket)
        if self._place is None or found is None:
            return self._ask(bucket)
        if self._credentials is None:
            raise botocore.exceptions.NoCredentialsError
        return self._target(found, self._place.agent, proxies=None, signs=None)

    def _ask(self, bucket: str) -> Target | None:
        """As boto3's client says."""
        # Directory buckets have sessions of their own, access points signatures of their own; neither is a plain name.
        if ":" in bucket or bucket.endswith("--x-s3"):
            return None
        client = self._client()
        config = client.meta.config
        if config.client_cert or config.proxies_config:
            return None
        request = self._made_request(client, bucket)
        url = urlsplit(request.url)
        scope = _SCOPE.match(_text(request.headers.get("Authorization", "")))
        ending = f"/{_PROBE_KEY}"
        if scope is None or url.query or not url.path.endswith(ending) or url.scheme not in ("http", "https"):
            return None
        found = BucketUrl(
            scheme=url.scheme, netloc=url.netloc, prefix=url.path.removesuffix(ending), region=scope["region"]
        )
        agent = _text(request.headers.get("User-Agent", "ckptmgr"))
        signs = (config.s3 or {}).get("payload_signing_enabled")
        return self._target(found, agent, proxies=config.proxies, signs=signs)

    def _target(
        self, found: BucketUrl, agent: str, *, proxies: dict[str, str] | None, signs: bool | None
    ) -> Target | None:
        """The target there, unless a proxy is in between: one of `proxies`, or of the environment where that is None."""
        url = urlsplit(f"{found.scheme}://{found.netloc}{found.prefix}/{_PROBE_KEY}")
        if proxies is None:
            proxies = botocore.utils.get_environ_proxies(url.geturl())
        if not url.hostname or proxies.get(url.scheme):
            return None
        if signs is None:
            is_protected = url.scheme == "https" or _is_loopback(url.hostname)
            signs = self._sign_payload == "always" or (self._sign_payload == "auto" and not is_protected)
        return Target(
            pool=self._pool(url.scheme, url.hostname, url.port or (443 if url.scheme == "https" else 80)),
            prefix=found.prefix,
            host=url.netloc.rpartition("@")[2],
            head=f"accept-encoding: identity\r\nuser-agent: {agent}\r\n",
            signer=Signer(found.region),
            signs_payload=bool(signs),
        )

    def _made_request(self, client: Any, bucket: str) -> Any:
        """A request of botocore's to the bucket, signed and not sent."""
        # Under the name it is registered once, however often it is.
        client.meta.events.register_last("before-send.s3.HeadObject", self._capture, unique_id="ckptmgr-capture")
        self._capturing.request = None
        self._capturing.is_on = True
        try:
            client.head_object(Bucket=bucket, Key=_PROBE_KEY)
        finally:
            self._capturing.is_on = False
        return self._capturing.request

    def _capture(self, request: Any, **kwargs: Any) -> Any:
        if not getattr(self._capturing, "is_on", False):
            return None
        self._capturing.request = request
        return botocore.awsrequest.AWSResponse(request.url, 200, {"etag": '"none"'}, _Nothing())

    def _pool(self, scheme: str, host: str, port: int) -> HttpPool:
        pool = self._pools.get((scheme, host, port))
        if pool is None:
            connect_s, stall_s = self._limits_s
            pool = self._pools[scheme, host, port] = HttpPool(
                host,
                port,
                connect_s=connect_s,
                stall_s=stall_s,
                context=self._tls_context() if scheme == "https" else None,
            )
        return pool

    def _tls_context(self) -> ssl.SSLContext:
        if self._context is None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.set_alpn_protocols(["http/1.1"])
            # As botocore: many a private authority's certificates are not as strict as newer Pythons would have them.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            bundle = self._ca_bundle or botocore.httpsession.get_cert_path(True)
            try:
                context.load_verify_locations(bundle)
            except OSError as error:
                raise botocore.exceptions.InvalidConfigError(
                    error_msg=f"the certificates in {bundle!r} cannot be read: {error}"
                ) from error
            self._context = context
        return self._context

    # --- refusals ---------------------------------------------------------------------------------------------------------

    def _refused(self, answer: Answer, name: str, bucket: str, target: Target) -> Exception:
        status, headers = answer.status, answer.headers
        code, message = parse_error(answer.read(_MOST_ERROR_BYTES))
        if not code:
            code, message = str(status), http.client.responses.get(status, "")
        region = headers.get("x-amz-bucket-region")
        if status in (301, 302, 307, 308) or code in _ELSEWHERE or (status == 400 and name == "HeadObject" and region):
            self.moved(bucket, target)
            return ElsewhereError(code)
        return client_error(name, status, headers, code, message)


class _Nothing:
    """The body of an answer that has none, as botocore reads it."""

    def stream(self, *arguments: Any, **options: Any) -> list[bytes]:
        return []


def _text(value: str | bytes) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
