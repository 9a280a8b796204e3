"""What OSS's, oss2's and the network's errors mean; the one table.

Source: https://www.alibabacloud.com/help/en/oss/support/http-status-code-and-error-code
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import oss2.exceptions as ox  # type: ignore[import-untyped, unused-ignore]
import requests
import urllib3.exceptions

from ckptmgr.backends.answers import AnswerTable, Meaning, retry_after_s
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    CkptmgrError,
    ConfigError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)

_KEYS_HINT = "check OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET"
_EXPIRED_HINT = "renew the STS credentials (OSS_SESSION_TOKEN)"
_ENDPOINT_HINT = "set OSS_ENDPOINT and OSS_REGION to the bucket's region"

_CODES: dict[str, Meaning] = {
    "FileAlreadyExists": (ObjectExistsError, ""),
    # Damaged on the way and refused by the store.
    "InvalidDigest": (TransientBackendError, ""),
    "UserDisable": (AccessDeniedError, "check the account: it may be in arrears"),
    "InvalidAccessKeyId": (AccessDeniedError, _KEYS_HINT),
    "SignatureDoesNotMatch": (AccessDeniedError, _KEYS_HINT),
    "InvalidSecurityToken": (AccessDeniedError, _EXPIRED_HINT),
    "SecurityTokenExpired": (AccessDeniedError, _EXPIRED_HINT),
    "FileImmutable": (AccessDeniedError, "the bucket's retention policy forbids changing this object"),
    "InvalidBucketName": (PermanentBackendError, "correct the bucket's name in the URL"),
    "QpsLimitExceeded": (ThrottledError, ""),
    "TotalQpsLimitExceeded": (ThrottledError, ""),
    "DownloadTrafficRateLimitExceeded": (ThrottledError, ""),
    "UploadTrafficRateLimitExceeded": (ThrottledError, ""),
}

_STATUSES: dict[int, Meaning] = {
    301: (PermanentBackendError, _ENDPOINT_HINT),
    401: (AccessDeniedError, _KEYS_HINT),
}

classify = AnswerTable(_CODES, _STATUSES)


@contextlib.contextmanager
def oss_errors(operation: str, path: str, endpoint: str) -> Iterator[None]:
    """Raise any error of oss2 or the network in the body as one of ours; ours pass."""
    try:
        yield
    except CkptmgrError:
        raise
    except (ox.OssError, requests.RequestException, urllib3.exceptions.HTTPError, OSError) as error:
        raise translate(error, operation, path, endpoint) from error


def translate(error: Exception, operation: str, path: str, endpoint: str) -> CkptmgrError:
    """The error of ours that stands for `error`, met by `operation` on `path` at `endpoint`."""
    facts: dict[str, Any] = {"backend": "oss", "operation": operation, "key": path}
    what = f"cannot {operation} oss://{path}"
    if isinstance(error, ox.RequestError):
        # oss2 wraps the errors of requests here, but not those met while a body is read.
        error = error.exception
    if isinstance(error, ox.ServerError):
        return _from_answer(error, what, facts)
    if isinstance(error, ox.ClientError):
        return ConfigError(f"{what}: {error.body}", hint="check OSS_ENDPOINT and the URL")
    if isinstance(error, ox.OssError):
        return TransientBackendError(f"{what}: {type(error).__name__}: {error.body}", **facts)
    if isinstance(error, requests.exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        hint = "point REQUESTS_CA_BUNDLE at the certificate of its authority"
        return PermanentBackendError(f"{what}: the certificate of {endpoint} is not trusted", hint=hint, **facts)
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
        return ConfigError(f"{what}: {error}", hint="check OSS_ENDPOINT")
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return BackendTimeoutError(f"{what}: no answer from {endpoint} in time", **facts)
    if _never_connected(error):
        return TransientBackendError(
            f"{what}: cannot connect to {endpoint}", hint="check OSS_ENDPOINT and the network", **facts
        )
    return BackendTimeoutError(f"{what}: the connection to {endpoint} broke: {error}", **facts)


def _never_connected(error: Exception) -> bool:
    reason = getattr(error.args[0], "reason", None) if error.args else None
    return isinstance(error, requests.exceptions.ConnectionError) and isinstance(
        reason, urllib3.exceptions.NewConnectionError
    )


def _from_answer(error: Any, what: str, facts: dict[str, Any]) -> BackendError:
    kind, hint = classify(error.code, error.status)
    if kind is ObjectNotFoundError:
        text = f"no object oss://{facts['key']}"
    elif kind is ObjectExistsError:
        text = f"oss://{facts['key']} exists already"
    elif kind is AccessDeniedError and facts["operation"] == "list" and error.code in ("AccessDenied", ""):
        text, hint = f"no permission to list oss://{facts['key']}", "grant oss:ListObjects to these credentials"
    else:
        text = f"{what}: {error.code or error.status}{f': {error.message}' if error.message else ''}"
    if kind is ThrottledError:
        facts["retry_after_s"] = retry_after_s(error.headers)
    # Support asks for the request id first.
    return kind(text, hint=hint, code=error.code, status=error.status, request_id=error.request_id, **facts)
