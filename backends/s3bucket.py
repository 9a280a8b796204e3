"""What can be asked of an S3 bucket beside its objects: unfinished uploads, what it does by itself, and how it is reached.

All of it goes through boto3's control plane, whatever sends the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptmgr.backends.base import Backend, BucketFacts, Connection, PendingUpload
from ckptmgr.backends.s3client import S3Client
from ckptmgr.backends.s3errors import s3_errors
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BucketNotFoundError,
    ObjectNotFoundError,
    PermanentBackendError,
    TransientBackendError,
)

# Classes whose objects cannot be read before somebody has restored them.
_ARCHIVES = {"GLACIER", "DEEP_ARCHIVE"}
_WHERE = {
    "env": "the environment (AWS_ACCESS_KEY_ID)",
    "shared-credentials-file": "the shared credentials file",
    "config-file": "the configuration file",
    "assume-role": "a role assumed by the profile",
    "assume-role-with-web-identity": "a web identity token (AWS_WEB_IDENTITY_TOKEN_FILE)",
    "sso": "single sign-on",
    "custom-process": "the profile's credential_process",
    "container-role": "the container's role (AWS_CONTAINER_CREDENTIALS_…)",
    "iam-role": "the instance's role (metadata service)",
}


class S3Buckets(Backend):
    """The calls of `S3Backend` that concern a bucket."""

    _s3: S3Client

    def list_uploads(self, path: str) -> list[PendingUpload]:
        """The unfinished uploads below `path`."""
        path = self._strip_protocol(path)
        bucket, _, key = path.partition("/")
        prefix = f"{key}/" if key else ""
        found = self._uploads(path, bucket, prefix)
        if found or not prefix:
            return found
        # MinIO takes a prefix for a whole key, and tells of all uploads without one.
        # Source: https://github.com/minio/minio/issues/20989
        try:
            first = self._uploads(path, bucket, "", pages=1)
        except AccessDeniedError:
            return []
        if not any(upload.path.startswith(f"{path}/") for upload in first):
            return []
        return [upload for upload in self._uploads(path, bucket, "") if upload.path.startswith(f"{path}/")]

    def _uploads(self, path: str, bucket: str, prefix: str, *, pages: int | None = None) -> list[PendingUpload]:
        arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": prefix, "MaxUploads": 1000}
        found: list[PendingUpload] = []
        while True:
            answer = self._s3.request("list_multipart_uploads", path, **arguments)
            found += [_pending(bucket, entry) for entry in answer.get("Uploads", [])]
            pages = None if pages is None else pages - 1
            markers = answer.get("NextKeyMarker", ""), answer.get("NextUploadIdMarker", "")
            asked = arguments.get("KeyMarker"), arguments.get("UploadIdMarker")
            # A store that says "more" and does not say from where would be asked for ever.
            if not answer.get("IsTruncated") or pages == 0 or not markers[0] or markers == asked:
                return found
            arguments["KeyMarker"], arguments["UploadIdMarker"] = markers

    def bucket_facts(self, path: str) -> BucketFacts:
        bucket, _, key = self._strip_protocol(path).partition("/")
        versioning = self._asked("get_bucket_versioning", path, bucket)
        rules = self._rules(path, bucket)
        if rules is None:
            return BucketFacts(versioning=_versioning(versioning))
        prefix = f"{key}/" if key else ""
        above = [rule for rule in rules if prefix.startswith(_prefix(rule)) and not _is_narrowed(rule)]
        # Of those that take objects away, also the ones that concern a part of what lies below.
        touching = [rule for rule in rules if prefix.startswith(_prefix(rule)) or _prefix(rule).startswith(prefix)]
        aborts = [rule.get("AbortIncompleteMultipartUpload", {}).get("DaysAfterInitiation") for rule in above]
        ages = [rule.get("NoncurrentVersionExpiration", {}).get("NoncurrentDays") for rule in above]
        return BucketFacts(
            versioning=_versioning(versioning),
            abort_days=min((days for days in aborts if days), default=0),
            expires=any({"Days", "Date"} & set(rule.get("Expiration", {})) for rule in touching),
            archives=any(
                step.get("StorageClass") in _ARCHIVES for rule in touching for step in rule.get("Transitions", [])
            ),
            noncurrent_days=min((days for days in ages if days), default=0),
        )

    def connection(self) -> Connection:
        client = self._s3._client()
        profile = self._s3.profile
        # Not `get_credentials` of a session: that would look for others than those in use.
        credentials = client._request_signer._credentials
        if credentials is not None:
            # Some are fetched only when they are needed, and know no end before.
            with s3_errors("sign", "", client.meta.endpoint_url):
                credentials.get_frozen_credentials()
        method = getattr(credentials, "method", None)
        expires = getattr(credentials, "_expiry_time", None)
        return Connection(
            endpoint=client.meta.endpoint_url,
            region=client.meta.region_name,
            addressing=(client.meta.config.s3 or {}).get("addressing_style") or profile.addressing,
            profile=profile,
            credentials=None if method is None else _WHERE.get(method, method),
            is_temporary=bool(getattr(credentials, "_token", None) or getattr(credentials, "token", None)),
            expires_s=None if expires is None else expires.timestamp(),
        )

    def _rules(self, path: str, bucket: str) -> list[dict[str, Any]] | None:
        """The lifecycle rules in force; None when they may not be seen."""
        try:
            answer = self._s3.request("get_bucket_lifecycle_configuration", path, Bucket=bucket)
        except BucketNotFoundError:
            raise
        except (ObjectNotFoundError, AccessDeniedError, PermanentBackendError) as error:
            # "NoSuchLifecycleConfiguration": there are none. Other refusals are those of a store that knows no such thing, or does not tell.
            return [] if getattr(error, "code", "") == "NoSuchLifecycleConfiguration" else None
        return [rule for rule in answer.get("Rules", []) if rule.get("Status") == "Enabled"]

    def _asked(self, operation: str, path: str, bucket: str) -> dict[str, Any] | None:
        """The answer; None when the store, or a missing permission, does not let us know."""
        try:
            return self._s3.request(operation, path, Bucket=bucket)
        except (BucketNotFoundError, TransientBackendError):
            raise
        except BackendError:
            return None


def _pending(bucket: str, entry: dict[str, Any]) -> PendingUpload:
    started = entry.get("Initiated")
    return PendingUpload(
        path=f"{bucket}/{entry['Key']}",
        upload_id=entry["UploadId"],
        started_s=None if started is None else started.timestamp(),
    )


def _versioning(answer: dict[str, Any] | None) -> Any:
    return (
        None
        if answer is None
        else {"Enabled": "enabled", "Suspended": "suspended"}.get(answer.get("Status", ""), "off")
    )


def _prefix(rule: dict[str, Any]) -> str:
    """The keys that a rule is for; the prefix stands in one of three places."""
    filter_ = rule.get("Filter") or {}
    return str(rule.get("Prefix") or filter_.get("Prefix") or (filter_.get("And") or {}).get("Prefix") or "")


def _is_narrowed(rule: dict[str, Any]) -> bool:
    """Whether a rule is for some of the objects with its prefix only."""
    return bool(set(_conditions(rule)) - {"Prefix"})


def _conditions(rule: dict[str, Any]) -> Iterator[str]:
    filter_ = rule.get("Filter") or {}
    yield from (name for name in filter_ if name != "And")
    yield from filter_.get("And") or {}
