"""What S3 and OSS answer alike: the codes and statuses that both have, and how an answer is classified."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeAlias

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
