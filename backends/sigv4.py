"""AWS signature version 4 in headers, as S3 wants it: the path encoded once and not normalised.

Source: https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
UNSIGNED = "UNSIGNED-PAYLOAD"
_SERVICE = "s3"


@dataclass(frozen=True, slots=True)
class Keys:
    """Credentials at one moment; `token` only with those of a session."""

    access_key: str
    secret_key: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class Signer:
    """Signs requests for one region. Safe from any thread; keeps the key of the day."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._kept: tuple[tuple[str, str], bytes] | None = None

    def sign(
        self, method: str, path: str, query: str, headers: Mapping[str, str], payload: str, keys: Keys, now_s: float
    ) -> dict[str, str]:
        """The headers that the request has in addition, its signature among them.

        Args:
            path: as it is sent, from `encode_path`.
            query: as it is sent, from `encode_query`.
            headers: all that are to be signed, `host` among them; names in lower case, no two spaces in a row within the values.
            payload: SHA-256 of the body in hexadecimal, or `UNSIGNED`.
            now_s: seconds since 1970 by the store's clock.
        """
        moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_s))
        added = {"x-amz-content-sha256": payload, "x-amz-date": moment}
        if keys.token:
            added["x-amz-security-token"] = keys.token
        signed = sorted({**headers, **added}.items())
        names = ";".join([name for name, _ in signed])
        lines = "".join([f"{name}:{value}\n" for name, value in signed])
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{payload}"
        scope = f"{moment[:8]}/{self._region}/{_SERVICE}/aws4_request"
        text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signature = _mac(self._key(keys.secret_key, moment[:8]), text).hex()
        added["authorization"] = (
            f"AWS4-HMAC-SHA256 Credential={keys.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
        )
        return added

    def _key(self, secret_key: str, day: str) -> bytes:
        kept = self._kept
        if kept is not None and kept[0] == (secret_key, day):
            return kept[1]
        key = f"AWS4{secret_key}".encode()
        for text in (day, self._region, _SERVICE, "aws4_request"):
            key = _mac(key, text)
        self._kept = (secret_key, day), key
        return key


def encode_path(path: str) -> str:
    """A path as it is sent and signed: each byte but letters, digits, `-._~/` as %XX."""
    return quote(path, safe="/~")


def encode_query(parameters: Iterable[tuple[str, str]]) -> str:
    """Parameters as they are sent and signed, sorted."""
    encoded = sorted([(quote(name, safe="~"), quote(value, safe="~")) for name, value in parameters])
    return "&".join([f"{name}={value}" for name, value in encoded])


def _mac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
