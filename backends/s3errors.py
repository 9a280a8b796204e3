"""What S3's, botocore's and the network's errors mean; the one table.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import botocore.exceptions as bc

from ckptmgr.backends import http
from ckptmgr.backends.answers import (
    CLOCK_HINT,
    PROXY_HINT,
    AnswerTable,
    Meaning,
    NoStoreError,
    is_no_stores,
    retry_after_s,
)
from ckptmgr.backends.s3answers import NO_ERROR
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    CkptmgrError,
    ConfigError,
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)

_KEYS_HINT = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_EXPIRED_HINT = "renew the session credentials (AWS_SESSION_TOKEN)"
_ENDPOINT_HINT = "check AWS_ENDPOINT_URL"
_REGION_HINT = "set AWS_DEFAULT_REGION to the bucket's region"

_CODES: dict[str, Meaning] = {
    "NoSuchVersion": (ObjectNotFoundError, ""),
    # Raced with another write of the key: the outcome of the race is not ours to guess.
    "ConditionalRequestConflict": (TransientBackendError, ""),
    "OperationAborted": (TransientBackendError, ""),
    # Damaged on the way and refused by the store.
    "BadDigest": (TransientBackendError, ""),
    "XAmzContentChecksumMismatch": (TransientBackendError, ""),
    "AllAccessDisabled": (AccessDeniedError, "check the bucket and the account"),
    "AccountProblem": (AccessDeniedError, "check the account"),
    "InvalidAccessKeyId": (AccessDeniedError, _KEYS_HINT),
    "SignatureDoesNotMatch": (AccessDeniedError, _KEYS_HINT),
    "UnrecognizedClientException": (AccessDeniedError, _KEYS_HINT),
    "InvalidToken": (AccessDeniedError, _EXPIRED_HINT),
    "ExpiredToken": (AccessDeniedError, _EXPIRED_HINT),
    "ExpiredTokenException": (AccessDeniedError, _EXPIRED_HINT),
    "TokenRefreshRequired": (AccessDeniedError, _EXPIRED_HINT),
    "RequestExpired": (PermanentBackendError, CLOCK_HINT),
    "PermanentRedirect": (PermanentBackendError, _REGION_HINT),
    "AuthorizationHeaderMalformed": (PermanentBackendError, _REGION_HINT),
    "IllegalLocationConstraintException": (PermanentBackendError, _REGION_HINT),
    "SlowDown": (ThrottledError, ""),
    "Throttling": (ThrottledError, ""),
    "ThrottlingException": (ThrottledError, ""),
    "RequestLimitExceeded": (ThrottledError, ""),
    "TooManyRequests": (ThrottledError, ""),
    "BandwidthLimitExceeded": (ThrottledError, ""),
    "XMinioStorageFull": (DiskFullError, "the store's disks are full"),
    "InsufficientStorage": (DiskFullError, "the store's disks are full"),
}

_STATUSES: dict[int, Meaning] = {
    301: (PermanentBackendError, _REGION_HINT),
    401: (AccessDeniedError, _KEYS_HINT),
}

classify = AnswerTable(_CODES, _STATUSES)

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
    "list_parts": "list the parts of",
    "upload_part_copy": "copy a part to",
    "complete_multipart_upload": "finish writing",
    "abort_multipart_upload": "abandon",
    "list_multipart_uploads": "list the unfinished uploads of",
    "get_bucket_versioning": "look up the versioning of",
    "get_bucket_lifecycle_configuration": "look up the lifecycle rules of",
}

EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "InvalidToken"}


def client_error(name: str, status: int, headers: dict[str, str], code: str, message: str) -> Exception:
    """The error that botocore would raise for an answer of `status` to the operation `name`."""
    refused: Exception = bc.ClientError(
        {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {
                "HTTPStatusCode": status,
                "HTTPHeaders": headers,
                "RequestId": headers.get("x-amz-request-id", ""),
            },
        },
        name,
    )
    return refused


@contextlib.contextmanager
def s3_errors(operation: str, path: str, endpoint: str) -> Iterator[None]:
    """Raise any error of botocore, of our own requests or of the network in the body as one of ours; ours pass."""
    try:
        yield
    except CkptmgrError:
        raise
    except (bc.ClientError, bc.BotoCoreError, bc.HTTPClientError, http.HttpError, OSError) as error:
        raise translate(error, operation, path, endpoint) from error
    except RuntimeError as error:
        # botocore has no class of its own for this one.
        if "still expired" not in str(error):
            raise
        facts = {"backend": "s3", "operation": operation, "key": path}
        text = f"cannot {_WORDS.get(operation, operation)} s3://{path}: the credentials that their source hands out are expired"
        raise AccessDeniedError(text, hint=f"check the source of the credentials, and {CLOCK_HINT}", **facts) from error


def code_of(error: bc.ClientError) -> str:
    """The store's code; "" for a HEAD, whose answer has no body (botocore fills in the status)."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    return "" if code.isdigit() else code


def translate(error: Exception, operation: str, path: str, endpoint: str) -> CkptmgrError:
    """The error of ours that stands for `error`, met by `operation` on `path` at `endpoint`."""
    facts: dict[str, Any] = {"backend": "s3", "operation": operation, "key": path}
    what = f"cannot {_WORDS.get(operation, operation)} s3://{path}"
    if isinstance(error, bc.ClientError):
        return _from_answer(error, what, facts, endpoint)
    if isinstance(error, NoStoreError):
        no_store = TransientBackendError if error.may_pass else PermanentBackendError
        return no_store(f"{what}: {endpoint} {error}", hint=_ENDPOINT_HINT, status=error.status, **facts)
    endpoint = _asked(error) or endpoint
    for kinds, ours, text, hint in _LOCAL:
        if isinstance(error, kinds):
            if ours is ConfigError:
                return ConfigError(f"{what}: {text.format(endpoint=endpoint, error=error)}", hint=hint)
            return ours(f"{what}: {text.format(endpoint=endpoint, error=error)}", hint=hint, **facts)
    is_untrusted = isinstance(error, bc.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
    if is_untrusted or isinstance(error, http.UntrustedError):
        hint = "point AWS_CA_BUNDLE at the certificate of its authority"
        return PermanentBackendError(f"{what}: the certificate of {endpoint} is not trusted", hint=hint, **facts)
    if isinstance(error, http.PlainHttpError) or (isinstance(error, bc.SSLError) and http.NOT_TLS in str(error)):
        hint = "the endpoint speaks plain HTTP: use http:// in AWS_ENDPOINT_URL"
        return PermanentBackendError(f"{what}: {endpoint} does not speak TLS", hint=hint, **facts)
    if isinstance(error, http.BadAnswerError):
        return TransientBackendError(f"{what}: {endpoint} {error}", **facts)
    broken = http.HttpError, bc.HTTPClientError, OSError, bc.IncompleteReadError, bc.ResponseStreamingError
    if isinstance(error, broken):
        return BackendTimeoutError(f"{what}: the connection to {endpoint} broke: {error}", **facts)
    # A malformed answer: a proxy or a captive portal spoke instead of the store.
    return TransientBackendError(f"{what} at {endpoint}: {type(error).__name__}: {error}", **facts)


def _asked(error: Exception) -> str:
    """The endpoint that botocore's `error` is about, which may be that of a credential service; "" if it does not say."""
    url = urlsplit(str(getattr(error, "kwargs", {}).get("endpoint_url") or ""))
    host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
    return "" if not host else f"{url.scheme}://{host}{f':{url.port}' if url.port else ''}"


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
    (
        (bc.CredentialRetrievalError, bc.MetadataRetrievalError),
        TransientBackendError,
        "no credentials: {error}",
        "check where they come from: AWS_PROFILE, ~/.aws, or the role of this machine",
    ),
    (
        (http.StalledError, bc.ConnectTimeoutError, bc.ReadTimeoutError),
        BackendTimeoutError,
        "no answer from {endpoint} in time",
        "",
    ),
    (
        (bc.ProxyConnectionError,),
        TransientBackendError,
        "cannot connect to {endpoint} by a proxy: {error}",
        PROXY_HINT,
    ),
    (
        (http.ConnectError, bc.EndpointConnectionError),
        TransientBackendError,
        "cannot connect to {endpoint}",
        "check AWS_ENDPOINT_URL and the network",
    ),
)


def _from_answer(error: bc.ClientError, what: str, facts: dict[str, Any], endpoint: str) -> BackendError:
    meta = error.response.get("ResponseMetadata", {})
    status = int(meta.get("HTTPStatusCode", 0))
    code = code_of(error)
    kind, hint = classify(code, status)
    message = error.response.get("Error", {}).get("Message", "")
    headers = meta.get("HTTPHeaders", {})
    is_from_elsewhere = is_no_stores(code, status, is_head=facts["operation"] == "head_object")
    # With this header a store says that the bucket is in another region.
    if is_from_elsewhere and "x-amz-bucket-region" not in headers:
        stranger = NoStoreError(status, NO_ERROR, str(headers.get("location", "")))
        kind = TransientBackendError if stranger.may_pass else kind
        if facts["operation"].startswith("get_bucket_"):
            # Not every store knows of versions and rules.
            kind = PermanentBackendError
        text, hint = f"{what}: {endpoint} {stranger}", _ENDPOINT_HINT
    elif kind is ObjectNotFoundError:
        text = f"no object s3://{facts['key']}"
    elif kind is ObjectExistsError:
        text = f"s3://{facts['key']} exists already"
    elif kind is AccessDeniedError and facts["operation"] == "list_objects_v2" and code == "AccessDenied":
        text, hint = (
            f"no permission to list s3://{facts['key']}",
            "grant s3:ListBucket on the bucket to these credentials",
        )
    else:
        text = f"{what}: {code or status}{f': {message}' if message and message != code else ''}"
    if issubclass(kind, TransientBackendError):
        facts["retry_after_s"] = retry_after_s(headers)
    return kind(text, hint=hint, code=code, status=status, **facts)
