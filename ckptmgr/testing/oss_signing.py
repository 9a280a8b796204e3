"""Signatures of OSS requests, versions 1 and 4, in a header or in the URL: what a server does with them.

Source: https://www.alibabacloud.com/help/en/oss/developer-reference/include-signatures-in-the-authorization-header
Source: https://www.alibabacloud.com/help/en/oss/developer-reference/recommend-to-use-signature-version-4
"""

from __future__ import annotations

import base64
import calendar
import hashlib
import hmac
import re
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import quote

from ckptmgr.testing.store_app import Request

MAX_SKEW_S = 15 * 60

# The parameters that a version 1 signature covers.
_COVERED_BY_V1 = """acl append asyncFetch bucketArchiveDirectRead bucketInfo callback callback-var cname comp continuation-token cors
    delete encryption endTime group httpsConfig img inventory inventoryId lifecycle link live location logging metaQuery
    objectInfo objectMeta partNumber policy position qos qosInfo referer regionList replication replicationLocation
    replicationProgress requestPayment resourceGroup response-cache-control response-content-disposition
    response-content-encoding response-content-language response-content-type response-expires restore security-token
    sequential startTime stat status style styleName symlink tagging transferAcceleration uploadId uploads versionId
    versioning versions vod website worm wormExtend wormId x-oss-ac-forward-allow x-oss-ac-source-ip
    x-oss-ac-subnet-mask x-oss-ac-vpc-id x-oss-async-process x-oss-process x-oss-request-payer
    x-oss-traffic-limit"""
_SUBRESOURCES = frozenset(_COVERED_BY_V1.split())


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is not let in: the HTTP status, OSS's code and message."""

    status: int
    code: str
    message: str


ANONYMOUS = Refusal(status=403, code="AccessDenied", message="Anonymous access is forbidden for this operation.")
_MISMATCH = Refusal(
    status=403,
    code="SignatureDoesNotMatch",
    message="The request signature we calculated does not match the signature you provided. Check your key and signing method.",
)
_UNKNOWN_KEY = Refusal(
    status=403, code="InvalidAccessKeyId", message="The OSS Access Key Id you provided does not exist in our records."
)
_SKEWED = Refusal(
    status=403,
    code="RequestTimeTooSkewed",
    message="The difference between the request time and the current time is too large.",
)
TOKEN_EXPIRED = Refusal(status=403, code="SecurityTokenExpired", message="The security token you provided has expired.")
TOKEN_INVALID = Refusal(status=403, code="InvalidSecurityToken", message="The security token you provided is invalid.")
_VERSION_2 = Refusal(status=400, code="InvalidArgument", message="This test server does not know signature version 2.")
_EXPIRED = Refusal(status=403, code="AccessDenied", message="Request has expired.")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    """What a request says about its signature, whatever the version and the place."""

    access_key: str
    signature: str
    to_sign: bytes
    scope: tuple[str, ...] = ()
    refusal: Refusal | None = None


def check(request: Request, secrets: dict[str, str], *, now_s: float | None = None) -> str | Refusal:
    """The access key that signed the request, or why it is refused.

    A version 4 scope is taken as the client states it: a wrong region is not noticed.

    Args:
        secrets: secret key by access key.
        now_s: seconds since the epoch; None for the clock.
    """
    now_s = time.time() if now_s is None else now_s
    authorization = request.headers.get("authorization", "")
    if authorization.startswith("OSS4-HMAC-SHA256 "):
        claim = _header_v4(request, authorization, now_s)
    elif authorization.startswith("OSS "):
        claim = _header_v1(request, authorization, now_s)
    elif "OSS2" in (authorization[:4], request.query.get("x-oss-signature-version")):
        return _VERSION_2
    elif request.query.get("x-oss-signature-version") == "OSS4-HMAC-SHA256":
        claim = _url_v4(request, now_s)
    elif "Signature" in request.query:
        claim = _url_v1(request, now_s)
    else:
        return ANONYMOUS
    secret = secrets.get(claim.access_key)
    if secret is None:
        return _UNKNOWN_KEY
    # The clock is judged before the signature, as OSS does: a wrong clock must not look like a wrong key.
    if claim.refusal is not None:
        return claim.refusal
    expected = _sign_v4(secret, claim) if claim.scope else _sign_v1(secret, claim)
    return claim.access_key if hmac.compare_digest(expected.encode(), claim.signature.encode()) else _MISMATCH


def _sign_v1(secret: str, claim: _Claim) -> str:
    return base64.b64encode(hmac.new(secret.encode(), claim.to_sign, hashlib.sha1).digest()).decode()


def _sign_v4(secret: str, claim: _Claim) -> str:
    key = ("aliyun_v4" + secret).encode()
    for part in claim.scope:
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, claim.to_sign, hashlib.sha256).hexdigest()


def _header_v1(request: Request, authorization: str, now_s: float) -> _Claim:
    access_key, _, signature = authorization[4:].strip().partition(":")
    date = request.headers.get("x-oss-date") or request.headers.get("date", "")
    try:
        refusal = _skew(parsedate_to_datetime(date).timestamp(), now_s)
    except ValueError:
        refusal = Refusal(status=403, code="AccessDenied", message="OSS authentication requires a valid Date.")
    return _Claim(access_key=access_key, signature=signature, to_sign=_string_v1(request, date), refusal=refusal)


def _url_v1(request: Request, now_s: float) -> _Claim:
    query = request.query
    expires = query.get("Expires", "")
    return _Claim(
        access_key=query.get("OSSAccessKeyId", ""),
        signature=query["Signature"],
        to_sign=_string_v1(request, expires),
        refusal=None if expires.isdecimal() and int(expires) >= now_s else _EXPIRED,
    )


def _string_v1(request: Request, date: str) -> bytes:
    headers = sorted((name, value) for name, value in request.headers.items() if name.startswith("x-oss-"))
    covered = sorted((name, value) for name, value in request.query.items() if name in _SUBRESOURCES)
    resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    if covered:
        resource += "?" + "&".join(f"{name}={value}" if value else name for name, value in covered)
    lines = [
        request.method,
        request.headers.get("content-md5", ""),
        request.headers.get("content-type", ""),
        date,
        *(f"{name}:{value}" for name, value in headers),
    ]
    # Header values hold one character per byte as sent; the key is text.
    return "\n".join(lines).encode("latin-1") + b"\n" + resource.encode("utf-8", "surrogateescape")


def _header_v4(request: Request, authorization: str, now_s: float) -> _Claim:
    fields = dict(re.findall(r"(Credential|AdditionalHeaders|Signature)=([^,\s]+)", authorization))
    stamp = request.headers.get("x-oss-date") or request.headers.get("date", "")
    signed_s = _parse_stamp(stamp)
    return _claim_v4(
        request,
        credential=fields.get("Credential", ""),
        signature=fields.get("Signature", ""),
        additional=fields.get("AdditionalHeaders", ""),
        stamp=stamp,
        refusal=_SKEWED if signed_s is None else _skew(signed_s, now_s),
    )


def _url_v4(request: Request, now_s: float) -> _Claim:
    query = request.query
    signed_s, lifetime = _parse_stamp(query.get("x-oss-date", "")), query.get("x-oss-expires", "")
    alive = signed_s is not None and lifetime.isdecimal() and signed_s + int(lifetime) >= now_s
    return _claim_v4(
        request,
        credential=query.get("x-oss-credential", ""),
        signature=query.get("x-oss-signature", ""),
        additional=query.get("x-oss-additional-headers", ""),
        stamp=query.get("x-oss-date", ""),
        refusal=None if alive else _EXPIRED,
    )


def _claim_v4(
    request: Request, *, credential: str, signature: str, additional: str, stamp: str, refusal: Refusal | None
) -> _Claim:
    access_key, *scope = credential.split("/")
    extra = sorted(name.lower() for name in additional.split(";") if name)
    headers = sorted(
        (name, value.strip())
        for name, value in request.headers.items()
        if name.startswith("x-oss-") or name in ("content-type", "content-md5") or name in extra
    )
    resource = f"/{request.bucket}/{request.key}" if request.bucket else "/"
    query = sorted(
        (quote(name, safe=""), quote(value, safe=""))
        for name, value in request.query.items()
        if name != "x-oss-signature"
    )
    canonical = "\n".join(
        [
            request.method,
            quote(resource, safe="/", errors="surrogateescape"),
            "&".join(f"{name}={value}" if value else name for name, value in query),
            "".join(f"{name}:{value}\n" for name, value in headers),
            ";".join(extra),
            request.headers.get("x-oss-content-sha256", "UNSIGNED-PAYLOAD"),
        ]
    )
    to_sign = ["OSS4-HMAC-SHA256", stamp, "/".join(scope), hashlib.sha256(canonical.encode("latin-1")).hexdigest()]
    return _Claim(
        access_key=access_key,
        signature=signature,
        to_sign="\n".join(to_sign).encode(),
        # A scope that is not four parts cannot be signed; it is compared against a key nobody can have.
        scope=tuple(scope) if len(scope) == 4 else ("",),
        refusal=refusal,
    )


def _parse_stamp(stamp: str) -> float | None:
    try:
        return float(calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ")))
    except ValueError:
        return None


def _skew(signed_s: float, now_s: float) -> Refusal | None:
    return _SKEWED if abs(signed_s - now_s) > MAX_SKEW_S else None
