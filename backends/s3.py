"""S3 and what speaks it (R2, MinIO, Ceph, SeaweedFS, …), over boto3.

The endpoint, region and credentials are the AWS ecosystem's own: `AWS_ENDPOINT_URL`, `AWS_PROFILE`, `~/.aws/config`, instance roles.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

from ckptmgr.backends.base import Capabilities, WriteMode
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.http import Answer
from ckptmgr.backends.objectrequests import STALL_S, Page, Stored
from ckptmgr.backends.objectstore import ObjectStoreBackend, split
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.parts import Incoming, Part, Receipt
from ckptmgr.backends.s3bucket import S3Buckets
from ckptmgr.backends.s3client import S3Client
from ckptmgr.backends.s3errors import classify, s3_errors
from ckptmgr.core.checksums import crc_function
from ckptmgr.core.errors import BackendError, ConfigError, ObjectExistsError, ObjectNotFoundError, TransientBackendError

_READ_BYTES = 1 << 20
# Classes for data that is seldom read bill smaller objects as if they had so many bytes; and records, which are small, are read often.
# Source: https://aws.amazon.com/s3/storage-classes/
_CLASSED_BYTES = 128 << 10
_NO_BATCH_DELETE = {"NotImplemented", "MissingContentMD5", "MethodNotAllowed"}


class S3Backend(S3Buckets, ObjectStoreBackend):
    """Objects in S3 buckets. Create-only is `If-None-Match: *`; the kept CRC is a full-object CRC64NVME.

    Args:
        client_config: botocore `Config` options that go over ours.
        stall_s: a request is cut, and tried again, after so many seconds without a byte.
        options: those of `ObjectStoreBackend`; S3 takes no part smaller than 5 MiB, except the last.

    Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
    """

    protocol = ("s3", "s3a")
    kind = "s3"
    crc_kind = "crc64nvme"

    def __init__(
        self,
        *,
        client_config: dict[str, Any] | None = None,
        stall_s: float = STALL_S,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._kept_as = _kept_as(self.store_options)
        self._small_kept_as = {name: value for name, value in self._kept_as.items() if name != "StorageClass"}
        self._s3 = S3Client(client_config, stall_s=stall_s, options=self.store_options)

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return Capabilities(
            create_only=self._s3.profile.create_only != "no",
            etags=True,
            stored_crc=None if self._s3.takes_crc is False else "crc64nvme",
        )

    @property
    def _store_checks(self) -> bool:
        # Without awscrt no CRC goes along, whatever the store would take.
        return self._s3.takes_crc is True and crc_function(self.crc_kind) is not None

    def _put(self, path: str, data: bytes | FileBody, crc: str | None, mode: WriteMode) -> Stored:
        bucket, key = split(path)
        kept_as = self._kept_as if len(data) >= _CLASSED_BYTES else self._small_kept_as
        arguments = {"Bucket": bucket, "Key": key, "Body": data, **kept_as, **self._condition(path, mode)}
        return _stored(self._s3.checked_request("put_object", path, _crc_header(crc), **arguments))

    def _condition(self, path: str, mode: WriteMode) -> dict[str, str]:
        """The header of a create-only write.

        Raises:
            ObjectExistsError: the store is said not to know such writes, and the object is there: a second writer may still come between.
        """
        if mode != "create":
            return {}
        if self._s3.profile.create_only != "no":
            return {"IfNoneMatch": "*"}
        try:
            self._head(path)
        except ObjectNotFoundError:
            return {}
        raise ObjectExistsError(f"s3://{path} exists already", backend="s3", operation="put_object", key=path)

    def _head_once(self, path: str) -> Stored:
        bucket, key = split(path)
        mode = {} if self._s3.takes_crc is False else {"ChecksumMode": "ENABLED"}
        return _stored(self._s3.request("head_object", path, Bucket=bucket, Key=key, **mode))

    def _head_again(self, path: str) -> Stored:
        bucket, key = split(path)
        checksums = {"ChecksumMode": "ENABLED"}
        return _stored(self._s3.checked_request("head_object", path, checksums, Bucket=bucket, Key=key))

    def _read(self, path: str, etag: str | None, first: int, last: int | None) -> Iterator[bytes]:
        body, endpoint = self._get(path, etag, first, last), self._s3.endpoint
        try:
            while True:
                # Only the read: what the consumer of a block does wrong is not the store's fault.
                with s3_errors("get_object", path, endpoint):
                    block = bytes(body.block()) if isinstance(body, Answer) else body.read(_READ_BYTES)
                if not block:
                    return
                yield block
        finally:
            body.close()

    def _incoming(self, path: str, etag: str | None, first: int, last: int | None) -> Incoming:
        return _Incoming(self._get(path, etag, first, last), path, self._s3.endpoint)

    def _get(self, path: str, etag: str | None, first: int, last: int | None) -> Any:
        """The body of an object, open."""
        bucket, key = split(path)
        arguments = {"Bucket": bucket, "Key": key}
        if first or last is not None:
            arguments["Range"] = f"bytes={first}-{'' if last is None else last - 1}"
        # A weak ETag never matches.
        if etag is not None and not etag.startswith("W/"):
            arguments["IfMatch"] = f'"{etag}"'
        try:
            return self._s3.request("get_object", path, **arguments)["Body"]
        except ObjectExistsError as error:
            text = f"s3://{path} was replaced while it was read"
            raise TransientBackendError(text, backend="s3", operation="get_object", key=path) from error

    def _page(self, bucket: str, prefix: str, delimiter: str, token: str | None, limit: int) -> Page:
        arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "Delimiter": delimiter, "MaxKeys": limit}
        if token is not None:
            arguments["ContinuationToken"] = token
        answer = self._s3.request("list_objects_v2", f"{bucket}/{prefix}", **arguments)
        return Page(
            objects=[(entry["Key"], _listed(entry)) for entry in answer.get("Contents", [])],
            prefixes=[entry["Prefix"] for entry in answer.get("CommonPrefixes", [])],
            token=answer["NextContinuationToken"] if answer.get("IsTruncated") else None,
        )

    def _delete(self, path: str) -> None:
        bucket, key = split(path)
        self._s3.request("delete_object", path, Bucket=bucket, Key=key)

    def _delete_batch(self, bucket: str, keys: list[str]) -> dict[str, BackendError]:
        delete = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        try:
            answer = self._s3.request("delete_objects", f"{bucket}/{keys[0]}", Bucket=bucket, Delete=delete)
        except BackendError as error:
            if getattr(error, "code", "") not in _NO_BATCH_DELETE:
                raise
            return self._delete_each([f"{bucket}/{key}" for key in keys])
        # A batch is answered with success although some of its keys were refused.
        failed = {}
        for entry in answer.get("Errors", []):
            code, path = entry.get("Code", ""), f"{bucket}/{entry.get('Key', '')}"
            kind, hint = classify(code, 0)
            if kind is not ObjectNotFoundError:
                text = f"delete s3://{path}: {code}: {entry.get('Message', '')}"
                facts = {"backend": "s3", "operation": "delete_objects", "key": path, "code": code}
                failed[path] = kind(text, hint=hint, **facts)
        return failed

    def _copy(self, source: str, target: str) -> None:
        bucket, key = split(target)
        arguments = {"Bucket": bucket, "Key": key, "CopySource": _source(source), **self._kept_as}
        self._s3.checked_request("copy_object", target, {"ChecksumAlgorithm": "CRC64NVME"}, **arguments)

    def _begin(self, path: str, mode: WriteMode) -> str:
        bucket, key = split(path)
        checksums = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
        if crc_function(self.crc_kind) is None:
            # An upload that was begun with an algorithm takes no part without a value.
            checksums = {}
        arguments = {"Bucket": bucket, "Key": key, **self._kept_as}
        answer = self._s3.checked_request("create_multipart_upload", path, checksums, **arguments)
        return str(answer["UploadId"])

    def _send_part(self, path: str, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt:
        bucket, key = split(path)
        arguments = {"Bucket": bucket, "Key": key, "UploadId": upload_id, "PartNumber": part.number, "Body": body}
        answer = self._s3.checked_request("upload_part", path, _crc_header(digest.crc), **arguments)
        return Receipt(number=part.number, etag=answer["ETag"], crc=_crc_hex(answer))

    def _list_parts(self, path: str, upload_id: str) -> list[Receipt]:
        bucket, key = split(path)
        arguments: dict[str, Any] = {"Bucket": bucket, "Key": key, "UploadId": upload_id, "MaxParts": 1000}
        receipts: list[Receipt] = []
        while True:
            answer = self._s3.request("list_parts", path, **arguments)
            for entry in answer.get("Parts", []):
                number, size = int(entry["PartNumber"]), int(entry["Size"])
                receipts.append(Receipt(number=number, etag=entry["ETag"], crc=_crc_hex(entry), size=size))
            if not answer.get("IsTruncated"):
                return receipts
            arguments["PartNumberMarker"] = answer["NextPartNumberMarker"]

    def _copy_part(self, path: str, upload_id: str, part: Part, source: str) -> Receipt:
        bucket, key = split(path)
        answer = self._s3.request(
            "upload_part_copy",
            path,
            Bucket=bucket,
            Key=key,
            UploadId=upload_id,
            PartNumber=part.number,
            CopySource=_source(source),
            CopySourceRange=f"bytes={part.offset}-{part.offset + part.length - 1}",
        )["CopyPartResult"]
        return Receipt(number=part.number, etag=answer["ETag"], crc=_crc_hex(answer))

    def _complete(self, path: str, upload_id: str, receipts: list[Receipt], crc: str | None, mode: WriteMode) -> Stored:
        bucket, key = split(path)
        checksums = {**_crc_header(crc), "ChecksumType": "FULL_OBJECT"} if crc else {}
        parts = {"Parts": [_part_record(receipt) for receipt in receipts]}
        arguments = {"Bucket": bucket, "Key": key, "UploadId": upload_id, "MultipartUpload": parts}
        arguments |= self._condition(path, mode)
        return _stored(self._s3.checked_request("complete_multipart_upload", path, checksums, **arguments))

    def _abort(self, path: str, upload_id: str) -> None:
        bucket, key = split(path)
        try:
            self._s3.request("abort_multipart_upload", path, Bucket=bucket, Key=key, UploadId=upload_id)
        except BackendError as error:
            if getattr(error, "code", "") != "NoSuchUpload":
                raise


class _Incoming:
    """The body of an answer, with the errors of reading it translated."""

    def __init__(self, body: Any, path: str, endpoint: str) -> None:
        self._body = body
        self._path = path
        self._endpoint = endpoint

    def readinto(self, view: memoryview, /) -> int:
        with s3_errors("get_object", self._path, self._endpoint):
            count: int = self._body.readinto(view)
            return count

    def splice(self, pipe: int, most: int, /) -> int | None:
        if not isinstance(self._body, Answer):
            return None
        with s3_errors("get_object", self._path, self._endpoint):
            return self._body.splice(pipe, most)

    def close(self) -> None:
        self._body.close()


def _kept_as(options: StoreOptions) -> dict[str, str]:
    """How new objects are encrypted and stored, where not as the bucket says."""
    if options.sse == "SM4":
        raise ConfigError("S3 has no encryption SM4", hint="set CKPTMGR_SSE to AES256 or aws:kms")
    asked = {
        # OSS's word, for one environment that serves both.
        "ServerSideEncryption": "aws:kms" if options.sse == "KMS" else options.sse,
        "SSEKMSKeyId": options.sse_key,
        "StorageClass": options.storage_class,
    }
    return {name: value for name, value in asked.items() if value is not None}


def _crc_header(crc: str | None) -> dict[str, str]:
    return {} if crc is None else {"ChecksumCRC64NVME": base64.b64encode(bytes.fromhex(crc)).decode()}


def _crc_hex(answer: dict[str, Any]) -> str | None:
    crc = answer.get("ChecksumCRC64NVME")
    return None if not crc else base64.b64decode(crc).hex()


def _source(path: str) -> dict[str, str]:
    bucket, key = split(path)
    return {"Bucket": bucket, "Key": key}


def _part_record(receipt: Receipt) -> dict[str, Any]:
    return {"PartNumber": receipt.number, "ETag": receipt.etag, **_crc_header(receipt.crc)}


def _stored(answer: dict[str, Any]) -> Stored:
    modified = answer.get("LastModified")
    return Stored(
        etag=str(answer.get("ETag", "")).strip('"'),
        size=answer.get("ContentLength"),
        mtime=None if modified is None else modified.timestamp(),
        # A composite checksum, of the parts' checksums, says nothing about the bytes of the whole.
        crc=None if answer.get("ChecksumType") == "COMPOSITE" else _crc_hex(answer),
    )


def _listed(entry: dict[str, Any]) -> Stored:
    modified = entry["LastModified"]
    return Stored(etag=entry["ETag"].strip('"'), size=entry["Size"], mtime=modified.timestamp())
