"""What S3 and OSS answer alike: the codes and statuses that both have, and how an answer is classified."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from ckptmgr.backends.http import BadAnswerError
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    BucketNotFoundError,
    DiskFullError,
    ObjectExistsError,
    ObjectNotFoundError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)

Meaning: TypeAlias = tuple[type[BackendError], str]
"""The class of ours, and the hint."""

PROXY_HINT = "check HTTP_PROXY, HTTPS_PROXY and NO_PROXY"
CLOCK_HINT = "set this machine's clock (NTP)"

_CODES: dict[str, Meaning] = {
    "NoSuchBucket": (BucketNotFoundError, "create the bucket or correct the URL"),
    "NoSuchKey": (ObjectNotFoundError, ""),
    "PreconditionFailed": (ObjectExistsError, ""),
    # The upload was completed by an earlier try whose answer was lost, or aborted by a lifecycle rule: begin again.
    "NoSuchUpload": (TransientBackendError, ""),
    # Cut off on the way and refused by the store.
    "IncompleteBody": (TransientBackendError, ""),
    "AccessDenied": (AccessDeniedError, "check the permissions of these credentials on the bucket"),
    "RequestTimeTooSkewed": (PermanentBackendError, CLOCK_HINT),
    "InvalidObjectState": (PermanentBackendError, "the object is archived: restore it first"),
    "ServiceUnavailable": (ThrottledError, ""),
    "RequestTimeout": (BackendTimeoutError, ""),
    "InternalError": (TransientBackendError, ""),
    "QuotaExceeded": (DiskFullError, "raise the bucket's quota or prune"),
}

_STATUSES: dict[int, Meaning] = {
    # Without permission to list, S3 says 403 for a key that does not exist: it is a refusal, never "not found" (I7).
    403: (AccessDeniedError, "check the credentials and their permissions on the bucket"),
    404: (ObjectNotFoundError, ""),
    408: (BackendTimeoutError, ""),
    412: (ObjectExistsError, ""),
    429: (ThrottledError, ""),
    503: (ThrottledError, ""),
    507: (DiskFullError, "the store's disks are full"),
}


class AnswerTable:
    """What the answers of one kind of store mean.

    Args:
        codes: the store's own codes, beside those that all have.
        statuses: HTTP statuses that mean something else there, or in addition; for codes that are not known, and for answers without one.
    """

    def __init__(self, codes: Mapping[str, Meaning], statuses: Mapping[int, Meaning]) -> None:
        self._codes = {**_CODES, **codes}
        self._statuses = {**_STATUSES, **statuses}

    def __call__(self, code: str, status: int) -> Meaning:
        """The class of ours, and the hint, for an answer; an unknown one may pass only if the store says that it is its own fault."""
        if code in self._codes:
            return self._codes[code]
        if status in self._statuses:
            return self._statuses[status]
        return (TransientBackendError if status >= 500 and status != 501 else PermanentBackendError), ""


@contextlib.contextmanager
def encryption_named(sse: str | None) -> Iterator[None]:
    """Say in a refusal of the store's without a hint that the encryption `sse` was asked for: many stores have none, and call that their own fault."""
    try:
        yield
    except BackendError as error:
        kinds = (TransientBackendError, PermanentBackendError, AccessDeniedError)
        if sse is not None and type(error) in kinds and getattr(error, "code", None) and not error.hint:
            error.hint = f"CKPTMGR_SSE={sse} was asked for: does this store have it?"
        raise


# Such are answered without a document of the store's by balancers that wait for it or limit it, and are the same from both.
_MEANT_BY_ANYBODY = (408, 409, 412, 429)
_PASSING = (302, 303, 307, 404)
REDIRECTS = (301, 302, 303, 307, 308)


class NoStoreError(BadAnswerError):
    """Somebody else answered: a web server, an ingress without its backend, a portal. Never "nothing there" (I7).

    Args:
        status: of the answer.
        lacks: what every store's answer has.
        location: where a redirect leads; its query, which may hold tokens, is left out.
    """

    def __init__(self, status: int, lacks: str, location: str = "") -> None:
        self.status = status
        said = f"answered {status} without {lacks}"
        if status in REDIRECTS:
            said = f"answered {status}, a redirect to {_shown(location)}, without {lacks}"
        super().__init__(f"{said}: it is not a store, or something stands before it")

    @property
    def may_pass(self) -> bool:
        """Whether it is what stands there while the store is away."""
        return self.status < 300 or self.status in _PASSING


def is_no_stores(code: str, status: int, *, is_head: bool) -> bool:
    """Whether a refusal without the store's own code is not the store's; the answer to a HEAD, which has no body, does not tell."""
    return not code and not is_head and 300 <= status < 500 and status not in _MEANT_BY_ANYBODY


def _shown(location: str) -> str:
    try:
        url = urlsplit(location)
    except ValueError:
        return "no URL"
    shown = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}" if url.netloc else url.path
    return shown[:200] or "nowhere"


def retry_after_s(headers: Mapping[str, Any]) -> float | None:
    """What the store, or a proxy before it, asked for, in seconds; None if it did not. A date is compared with the answer's own, not with our clock."""
    asked = str(headers.get("retry-after", ""))
    with contextlib.suppress(ValueError):
        seconds = float(asked)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    with contextlib.suppress(ValueError, TypeError):
        until, now = (parsedate_to_datetime(text) for text in (asked, str(headers.get("date", ""))))
        return max(0.0, (until - now).total_seconds())
    return None
