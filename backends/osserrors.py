"""What OSS's, oss2's and the network's errors mean; the one table.

Source: https://www.alibabacloud.com/help/en/oss/support/http-status-code-and-error-code
"""

from __future__ import annotations

import contextlib
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from email.utils import parsedate_to_datetime
from typing import Any

import oss2.exceptions as ox  # type: ignore[import-untyped, unused-ignore]
import requests
import urllib3.exceptions

from ckptmgr.backends import http
from ckptmgr.backends.answers import PROXY_HINT, AnswerTable, Meaning, NoStoreError, is_no_stores, retry_after_s
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

#: Codes of keys that were valid once. OSS also answers the second to those of a session that has ended, and the third to a token that is not that of the
#: key: https://www.alibabacloud.com/help/en/oss/support/0002-00000007, 0002-00000002, 0002-00000006
EXPIRED = ("SecurityTokenExpired", "InvalidAccessKeyId", "InvalidSecurityToken")
#: Codes that say something about the keys, not about what they may do.
ABOUT_KEYS = (*EXPIRED, "SignatureDoesNotMatch")
SKEWED = "RequestTimeTooSkewed"

_KEYS_HINT = "check OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET"
_EXPIRED_HINT = "renew the STS credentials (OSS_SESSION_TOKEN)"
# A clock that is not further off than that has nothing to do with a refusal at 15 minutes.
_HELD_BACK_S = 600.0
_NETWORK = (requests.RequestException, urllib3.exceptions.HTTPError, OSError, http.HttpError)
_READERS = ("oss2.xml_utils", "oss2.models", "oss2.utils", "ckptmgr.backends.ossbucket")
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
    "InvalidObjectState": (
        PermanentBackendError,
        "the object is in an archive class: restore it first, e.g. with 'ossutil restore'",
    ),
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
def oss_errors(operation: str, path: str, endpoint: str, *, now: Callable[[], float] = time.time) -> Iterator[None]:
    """Raise any error of oss2 or the network in the body as one of ours; ours pass."""
    try:
        yield
    except CkptmgrError:
        raise
    except (ox.OssError, *_NETWORK, ET.ParseError) as error:
        raise translate(error, operation, path, endpoint, now_s=now()) from error
    except (RuntimeError, ValueError, LookupError, TypeError, AttributeError) as error:
        if not _is_about_an_answer(error):
            raise
        raise translate(ET.ParseError(str(error)), operation, path, endpoint) from error


def translate(
    error: Exception, operation: str, path: str, endpoint: str, *, now_s: float | None = None
) -> CkptmgrError:
    """The error of ours that stands for `error`, met by `operation` on `path` at `endpoint`.

    Args:
        now_s: seconds since 1970 by this machine's clock; to say by how much it is wrong.
    """
    facts: dict[str, Any] = {"backend": "oss", "operation": operation, "key": path}
    what = f"cannot {operation} oss://{path}"
    if isinstance(error, ox.RequestError):
        # oss2 wraps the errors of requests here, but not those met while a body is read.
        error = error.exception
    if isinstance(error, ox.ServerError):
        return _from_answer(error, what, facts, now_s, endpoint)
    if isinstance(error, NoStoreError):
        return TransientBackendError(f"{what}: {endpoint} {error}", hint="check OSS_ENDPOINT", **facts)
    if isinstance(error, ET.ParseError | http.BadAnswerError):
        # Something in between, a portal's page perhaps.
        return TransientBackendError(
            f"{what}: the answer of {endpoint} is not that of OSS", hint="check OSS_ENDPOINT", **facts
        )
    if isinstance(error, ox.ClientError):
        return ConfigError(f"{what}: {error.body}", hint="check OSS_ENDPOINT and the URL")
    if isinstance(error, ox.OssError):
        return TransientBackendError(f"{what}: {type(error).__name__}: {error.body}", **facts)
    if isinstance(error, http.UntrustedError) or (
        isinstance(error, requests.exceptions.SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error)
    ):
        hint = "point REQUESTS_CA_BUNDLE at the certificate of its authority"
        return PermanentBackendError(f"{what}: the certificate of {endpoint} is not trusted", hint=hint, **facts)
    if isinstance(error, http.PlainHttpError) or (
        isinstance(error, requests.exceptions.SSLError) and http.NOT_TLS in str(error)
    ):
        hint = "the endpoint speaks plain HTTP: use http:// in OSS_ENDPOINT"
        return PermanentBackendError(f"{what}: {endpoint} does not speak TLS", hint=hint, **facts)
    if isinstance(error, requests.exceptions.InvalidURL | requests.exceptions.MissingSchema):
        return ConfigError(f"{what}: {error}", hint="check OSS_ENDPOINT")
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError | http.StalledError):
        return BackendTimeoutError(f"{what}: no answer from {endpoint} in time", **facts)
    if isinstance(error, requests.exceptions.ProxyError) and _never_connected(error):
        proxy = getattr(getattr(error.args[0] if error.args else None, "pool", None), "proxy", None)
        text = f"{what}: cannot connect to {endpoint} by {f'the proxy {proxy}' if proxy else 'a proxy'}"
        return TransientBackendError(text, hint=PROXY_HINT, **facts)
    if isinstance(error, http.ConnectError) or _never_connected(error):
        return TransientBackendError(
            f"{what}: cannot connect to {endpoint}", hint="check OSS_ENDPOINT and the network", **facts
        )
    return BackendTimeoutError(f"{what}: the connection to {endpoint} broke: {error}", **facts)


def _is_about_an_answer(error: Exception) -> bool:
    """Whether reading an answer failed: oss2 expects what it looks for to be there, and to be what it should."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = trace.tb_frame.f_globals.get("__name__", "") if trace is not None else ""
    return where in _READERS


def _never_connected(error: Exception) -> bool:
    reason = getattr(error.args[0], "reason", None) if error.args else None
    reason = getattr(reason, "original_error", reason)  # by a proxy
    return isinstance(error, requests.exceptions.ConnectionError) and isinstance(
        reason, urllib3.exceptions.NewConnectionError
    )


def _from_answer(error: Any, what: str, facts: dict[str, Any], now_s: float | None, endpoint: str) -> BackendError:
    kind, hint = classify(error.code, error.status)
    skew_s = _skew_s(error, now_s) if error.code == SKEWED else None
    if is_no_stores(error.code, error.status, is_head=facts["operation"] == "look up"):
        stranger = NoStoreError(error.status, "an OSS error", str(error.headers.get("location", "")))
        kind = TransientBackendError if stranger.may_pass else kind
        text, hint = f"{what}: {endpoint} {stranger}", "check OSS_ENDPOINT"
    elif kind is ObjectNotFoundError:
        text = f"no object oss://{facts['key']}"
    elif kind is ObjectExistsError:
        text = f"oss://{facts['key']} exists already"
    elif kind is AccessDeniedError and facts["operation"] == "list" and error.code == "AccessDenied":
        text, hint = f"no permission to list oss://{facts['key']}", "grant oss:ListObjects to these credentials"
    elif skew_s is not None and abs(skew_s) < _HELD_BACK_S:
        # Ours is right: the request was on its way for so long. Signed anew, it has another date.
        kind, hint, text = (
            TransientBackendError,
            "",
            f"{what}: {SKEWED}: the request was held back on its way, this machine's clock is right",
        )
    elif skew_s is not None:
        where = "behind" if skew_s > 0 else "ahead of"
        text = f"{what}: {SKEWED}: this machine's clock is {abs(skew_s) / 60:.0f} minutes {where} the store's"
        facts["skew_s"] = skew_s
    else:
        text = f"{what}: {error.code or error.status}{f': {error.message}' if error.message else ''}"
        if "signing region" in error.message or error.details.get("Endpoint"):
            # In the second case OSS says which.
            hint = _ENDPOINT_HINT
    if issubclass(kind, TransientBackendError):
        facts["retry_after_s"] = retry_after_s(error.headers)
    # Support asks for the request id first.
    return kind(text, hint=hint, code=error.code, status=error.status, request_id=error.request_id, **facts)


def _skew_s(error: Any, now_s: float | None) -> float | None:
    """The store's clock less ours."""
    try:
        return None if now_s is None else parsedate_to_datetime(error.headers.get("date", "")).timestamp() - now_s
    except (TypeError, ValueError):
        return None
