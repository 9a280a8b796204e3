"""How OSS requests are signed: oss2's part of it in our own hands, for three reasons.

The date is the store's, once it was seen that this machine's clock is wrong. The keys of each request are known when it is refused. And oss2's own
signer writes session tokens into its debug log, derives the same key for each request, and uses what Python 3.12 deprecates.

Source: https://www.alibabacloud.com/help/en/oss/developer-reference/recommend-to-use-signature-version-4
"""

from __future__ import annotations

import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any
from urllib.parse import quote

import oss2  # type: ignore[import-untyped, unused-ignore]
import oss2.credentials  # type: ignore[import-untyped, unused-ignore]

from ckptmgr.backends.osscredentials import Keys, OssCredentials

_ALGORITHM = "OSS4-HMAC-SHA256"
_UNSIGNED = "UNSIGNED-PAYLOAD"


class Signer:
    """Signs with version 4, as oss2 calls it. Any thread.

    Args:
        now: seconds since 1970, by this machine's clock.

    Attributes:
        credentials: where the keys come from.
        offset_s: the store's clock less ours.
    """

    def __init__(self, credentials: OssCredentials, *, now: Callable[[], float] = time.time) -> None:
        self.credentials = credentials
        self.offset_s = 0.0
        self._now = now
        self._local = threading.local()
        self._key: tuple[tuple[str, ...], bytes] = ((), b"")

    @property
    def used(self) -> Keys | None:
        """What this thread's last request was signed with."""
        keys: Keys | None = getattr(self._local, "keys", None)
        return keys

    def auth_version(self) -> str:
        """For oss2."""
        return "v4"

    def _sign_request(self, request: Any, bucket: str, key: str) -> None:
        keys = self._keys()
        stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(self._now() + self.offset_s))
        headers = request.headers
        headers["x-oss-date"] = stamp
        headers["x-oss-content-sha256"] = _UNSIGNED
        if keys.token:
            headers["x-oss-security-token"] = keys.token
        scope = (stamp[:8], request.region, request.product, "aliyun_v4_request")
        canonical = _canonical(request, bucket, key)
        digest = hashlib.sha256(canonical.encode()).hexdigest()
        to_sign = f"{_ALGORITHM}\n{stamp}\n{'/'.join(scope)}\n{digest}"
        signature = hmac.new(self._signing_key(keys, scope), to_sign.encode(), hashlib.sha256).hexdigest()
        headers["authorization"] = (
            f"{_ALGORITHM} Credential={keys.access_key_id}/{'/'.join(scope)}, Signature={signature}"
        )

    def _keys(self) -> Keys:
        self._local.keys = None
        keys = self._local.keys = self.credentials.current()
        return keys

    def _signing_key(self, keys: Keys, scope: tuple[str, ...]) -> bytes:
        """One per day and secret, kept for the next request."""
        made_for, value = self._key
        wanted = (keys.secret, *scope)
        if made_for != wanted:
            value = f"aliyun_v4{keys.secret}".encode()
            for part in scope:
                value = hmac.new(value, part.encode(), hashlib.sha256).digest()
            self._key = wanted, value
        return value


class SignerV1(Signer):
    """Signs with version 1, for endpoints whose region nobody knows."""

    def __init__(self, credentials: OssCredentials, *, now: Callable[[], float] = time.time) -> None:
        super().__init__(credentials, now=now)
        self._v1 = oss2.ProviderAuth(self)

    def get_credentials(self) -> Any:
        """For oss2."""
        keys = self._keys()
        return oss2.credentials.Credentials(keys.access_key_id, keys.secret, keys.token)

    def auth_version(self) -> str:
        """For oss2."""
        return "v1"

    def _sign_request(self, request: Any, bucket: str, key: str) -> None:
        # It goes over the `date` that oss2 sets.
        request.headers["x-oss-date"] = formatdate(self._now() + self.offset_s, usegmt=True)
        self._v1._sign_request(request, bucket, key)


def _canonical(request: Any, bucket: str, key: str) -> str:
    path = f"/{bucket}/{key}" if bucket else "/"
    query = sorted((quote(name, safe="~"), quote(str(value), safe="~")) for name, value in request.params.items())
    headers = sorted(
        (name, str(value).strip())
        for name, value in ((name.lower(), value) for name, value in request.headers.items())
        if name.startswith("x-oss-") or name in ("content-type", "content-md5")
    )
    return "\n".join(
        [
            request.method,
            quote(path, safe="/~"),
            "&".join(f"{name}={value}" if value else name for name, value in query),
            "".join(f"{name}:{value}\n" for name, value in headers),
            "",
            _UNSIGNED,
        ]
    )
