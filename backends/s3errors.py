"""What S3's, botocore's and the network's errors mean; the one table.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import botocore.exceptions as bc

from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    BucketNotFoundError,
    CkptmgrError,
    ConfigError,
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)

_Kind = type[BackendError]
_KEYS_HINT = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_EXPIRED_HINT = "renew the session credentials (AWS_SESSION_TOKEN)"
_CLOCK_HINT = "set this machine's clock (NTP)"
_REGION_HINT = "set AWS_DEFAULT_REGION to the bucket's region"

# code -> class, hint
_CODES: dict[str, tuple[_Kind, str]] = {
    "NoSuchBucket": (BucketNotFoundError, "create the bucket or correct the URL"),
    "NoSuchKey": (ObjectNotFoundError, ""),
    "NoSuchVersion": (ObjectNotFoundError, ""),
    "PreconditionFailed": (ObjectExistsError, ""),
    # Raced with another write of the key: the outcome of the race is not ours to guess.
    "ConditionalRequestConflict": (TransientBackendError, ""),
    "OperationAborted": (TransientBackendError, ""),
    # The upload was completed by an earlier try whose answer was lost, or aborted by a lifecycle rule: begin again.
    "NoSuchUpload": (TransientBackendError, ""),
    # Damaged on the way and refused by the store.
    "BadDigest": (TransientBackendError, ""),
    "XAmzContentChecksumMismatch": (TransientBackendError, ""),
    "IncompleteBody": (TransientBackendError, ""),
    "AccessDenied": (AccessDeniedError, "check the permissions of these credentials on the bucket"),
    "AllAccessDisabled": (AccessDeniedError, "check the bucket and the account"),
    "AccountProblem": (AccessDeniedError, "check the account"),
    "InvalidAccessKeyId": (AccessDeniedError, _KEYS_HINT),
    "SignatureDoesNotMatch": (AccessDeniedError, _KEYS_HINT),
    "UnrecognizedClientException": (AccessDeniedError, _KEYS_HINT),
    "InvalidToken": (AccessDeniedError, _EXPIRED_HINT),
    "ExpiredToken": (AccessDeniedError, _EXPIRED_HINT),
    "ExpiredTokenException": (AccessDeniedError, _EXPIRED_HINT),
    "TokenRefreshRequired": (AccessDeniedError, _EXPIRED_HINT),
    "RequestTimeTooSkewed": (PermanentBackendError, _CLOCK_HINT),
    "RequestExpired": (PermanentBackendError, _CLOCK_HINT),
    "PermanentRedirect": (PermanentBackendError, _REGION_HINT),
    "AuthorizationHeaderMalformed": (PermanentBackendError, _REGION_HINT),
    "IllegalLocationConstraintException": (PermanentBackendError, _REGION_HINT),
    "InvalidObjectState": (PermanentBackendError, "the object is archived: restore it first"),
    "SlowDown": (ThrottledError, ""),
    "Throttling": (ThrottledError, ""),
    "ThrottlingException": (ThrottledError, ""),
    "RequestLimitExceeded": (ThrottledError, ""),
    "TooManyRequests": (ThrottledError, ""),
    "BandwidthLimitExceeded": (ThrottledError, ""),
    "ServiceUnavailable": (ThrottledError, ""),
    "RequestTimeout": (BackendTimeoutError, ""),
    "InternalError": (TransientBackendError, ""),
    "QuotaExceeded": (DiskFullError, "raise the bucket's quota or prune"),
    "XMinioStorageFull": (DiskFullError, "the store's disks are full"),
    "InsufficientStorage": (DiskFullError, "the store's disks are full"),
}

# status -> class, hint; for codes that are not in the table, and for HEAD, whose answers have no body and so no code.
_STATUSES: dict[int, tuple[_Kind, str]] = {
    301: (PermanentBackendError, _REGION_HINT),
    401: (AccessDeniedError, _KEYS_HINT),
    # Without permission to list, S3 says 403 for a key that does not exist: it is a refusal, never "not found" (I7).
    403: (AccessDeniedError, "check the credentials and their permissions on the bucket"),
    404: (ObjectNotFoundError, ""),
    408: (BackendTimeoutError, ""),
    412: (ObjectExistsError, ""),
    429: (ThrottledError, ""),
    503: (ThrottledError, ""),
    507: (DiskFullError, "the store's disks are full"),
}

_WORDS = {
    "put_object": "write",
    "get_object": "read",
    "head_object": "look up",
    "list_objects_v2": "list",
    "delete_object": "delete",
    "delete_objects": "delete",
    "copy_object": "copy to",
    "create_multipart_upload": "begin to write",
    "upload_part": "write a part of",
    "upload_part_copy": "copy a part to",
    "complete_multipart_upload": "finish writing",
    "abort_multipart_upload": "abandon",
}

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}


@contextlib.contextmanager
def s3_errors(operation: str, path: str, endpoint: str) -> Iterator[None]:
    """Raise any error of botocore or the network in the body as one of ours; ours pass."""
    try:
        yield
    except CkptmgrError:
        raise
    except (bc.ClientError, bc.BotoCoreError, bc.HTTPClientError, OSError) as error:
        raise translate(error, operation, path, endpoint) from error


def code_of(error: bc.ClientError) -> str:
    """The store's code; "" for a HEAD, whose answer has no body (botocore fills in the status)."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return "" if code.isdigit() else code


def classify(code: str, status: int) -> tuple[_Kind, str]:
    """The class of ours, and the hint, for an answer of S3."""
    if code in _CODES:
        return _CODES[code]
    if status in _STATUSES:
        return _STATUSES[status]
    return (TransientBackendError if status >= 500 and status != 501 else PermanentBackendError), ""


def translate(error: Exception, operation: str, path: str, endpoint: str) -> CkptmgrError:
    """The error of ours that stands for `error`, met by `operation` on `path` at `endpoint`."""
    facts: dict[str, Any] = {"backend": "s3", "operation": operation, "key": path}
    what = f"cannot {_WORDS.get(operation, operation)} s3://{path}"
    if isinstance(error, bc.ClientError):
        return _from_answer(error, what, facts)
    for kinds, ours, text, hint in _LOCAL:
        if isinstance(error, kinds):
            if ours is ConfigError:
                return ConfigError(f"{what}: {text.format(endpoint=endpoint, error=error)}", hint=hint)
            return ours(f"{what}: {text.format(endpoint=endpoint, error=error)}", hint=hint, **facts)
    if isinstance(error, bc.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "point AWS_CA_BUNDLE at the certificate of its authority"
        return PermanentBackendError(f"{what}: the certificate of {endpoint} is not trusted", hint=hint, **facts)
    if isinstance(error, bc.HTTPClientError | OSError | bc.IncompleteReadError | bc.ResponseStreamingError):
        return BackendTimeoutError(f"{what}: the connection to {endpoint} broke: {error}", **facts)
    # A malformed answer: a proxy or a captive portal spoke instead of the store.
    return TransientBackendError(f"{what} at {endpoint}: {type(error).__name__}: {error}", **facts)


_LOCAL: tuple[tuple[tuple[type[Exception], ...], type[CkptmgrError], str, str], ...] = (
    (
        (bc.NoCredentialsError, bc.PartialCredentialsError),
        AccessDeniedError,
        "{error}",
        "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or an instance role",
    ),
    ((bc.ProfileNotFound, bc.ConfigParseError, bc.InvalidConfigError), ConfigError, "{error}", "check ~/.aws/config"),
    ((bc.NoRegionError,), ConfigError, "no region is set", _REGION_HINT),
    ((bc.ParamValidationError,), ConfigError, "{error}", "check the URL"),
    # The instance's metadata service or a login provider may answer the next time.
    ((bc.CredentialRetrievalError, bc.MetadataRetrievalError), TransientBackendError, "no credentials: {error}", ""),
    ((bc.ConnectTimeoutError, bc.ReadTimeoutError), BackendTimeoutError, "no answer from {endpoint} in time", ""),
    (
        (bc.EndpointConnectionError, bc.ProxyConnectionError),
        TransientBackendError,
        "cannot connect to {endpoint}",
        "check AWS_ENDPOINT_URL and the network",
    ),
)


def _from_answer(error: bc.ClientError, what: str, facts: dict[str, Any]) -> BackendError:
    meta = error.response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    code = code_of(error)
    kind, hint = classify(code, status)
    message = error.response.get("Error", {}).get("Message", "")
    if kind is ObjectNotFoundError:
        text = f"no object s3://{facts['key']}"
    elif kind is ObjectExistsError:
        text = f"s3://{facts['key']} exists already"
    elif kind is AccessDeniedError and facts["operation"] == "list_objects_v2" and code in ("AccessDenied", ""):
        text, hint = (
            f"no permission to list s3://{facts['key']}",
            "grant s3:ListBucket on the bucket to these credentials",
        )
    else:
        text = f"{what}: {code or status}{f': {message}' if message and message != code else ''}"
    if kind is ThrottledError:
        facts["retry_after_s"] = _retry_after(meta.get("HTTPHeaders", {}))
    return kind(text, hint=hint, code=code, status=status, **facts)


def _retry_after(headers: dict[str, str]) -> float | None:
    """Seconds; the form with a date is not used by any store we know."""
    try:
        return max(0.0, float(headers.get("retry-after", "")))
    except ValueError:
        return None
