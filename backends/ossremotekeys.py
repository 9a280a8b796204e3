"""Keys for OSS that somebody else hands out for some time: the metadata service of an ECS instance, a credentials URI, and STS, for a role.

What these answer is never quoted in a message: it may hold what it should not.

Source: https://www.alibabacloud.com/help/en/ecs/user-guide/attach-an-instance-ram-role-to-an-ecs-instance (the metadata service)
Source: https://github.com/aliyun/credentials-python (`provider/ecs_ram_role.py`, `oidc.py`, `ram_role_arn.py`, `uri.py`)
Source: https://www.alibabacloud.com/help/en/sdk/product-overview/rpc-mechanism (signatures of AssumeRole)
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import uuid
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit
from urllib.request import getproxies

from ckptmgr.backends.osscredentials import Keys, KeySource
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    ConfigError,
    TransientBackendError,
)

METADATA = "http://100.100.100.200"
_ROLES = "/latest/meta-data/ram/security-credentials/"
_TOKEN_HEADER = "X-aliyun-ecs-metadata-token"
_TOKEN_TTL_S = 21600
# Nobody may be there at all, and that is found out at each start.
_SEARCH_S = 1.0
_TIMEOUT_S = 10.0
_SESSION_S = 3600


class InstanceRole:
    """The RAM role of this ECS instance, asked of its metadata service, with a session token where that gives one (security hardening mode).

    Args:
        role: its name; "" finds it.
        is_named: somebody says that there is a role; else one without a name is looked for, and a machine that is no ECS instance has none.
        environ: CKPTMGR_ALIYUN_METADATA_ENDPOINT names another address, ALIBABA_CLOUD_IMDSV1_DISABLED insists on the session token.
    """

    name = "the RAM role of this ECS instance"
    is_cheap = False

    def __init__(self, role: str, *, environ: Mapping[str, str], is_named: bool = False) -> None:
        self._role = role
        self._is_sure = bool(role) or is_named
        self._endpoint = (environ.get("CKPTMGR_ALIYUN_METADATA_ENDPOINT") or METADATA).rstrip("/")
        self._needs_token = environ.get("ALIBABA_CLOUD_IMDSV1_DISABLED", "").lower() in ("1", "true")

    def fetch(self) -> Keys | None:
        try:
            keys = self._fetch()
        except TransientBackendError:
            if self._is_sure:
                raise
            return None
        self._is_sure = self._is_sure or keys is not None
        return keys

    def _fetch(self) -> Keys | None:
        headers = self._headers()
        role = self._role
        if not role:
            status, text = self._get(_ROLES, headers)
            role = text.split("\n", 1)[0].strip() if status == 200 else ""
            if not role:
                if not self._is_sure and status in (200, 404):
                    return None
                raise self._without_role("none", status)
        status, text = self._get(_ROLES + quote(role), headers)
        if status != 200:
            raise self._without_role(repr(role), status)
        return _read_keys(text, self.name)

    def _headers(self) -> dict[str, str]:
        ttl = {f"{_TOKEN_HEADER}-ttl-seconds": str(_TOKEN_TTL_S)}
        status, text = _ask("PUT", f"{self._endpoint}/latest/api/token", self.name, ttl, timeout_s=self._timeout_s)
        if status == 200:
            return {_TOKEN_HEADER: text.strip()}
        if self._needs_token:
            raise _refused(
                f"the metadata service gives no session token (status {status})", "allow one: hop limit, hardening mode"
            )
        return {}

    def _get(self, path: str, headers: dict[str, str]) -> tuple[int, str]:
        return _ask("GET", self._endpoint + path, self.name, headers, timeout_s=self._timeout_s)

    @property
    def _timeout_s(self) -> float:
        return _TIMEOUT_S if self._is_sure else _SEARCH_S

    def _without_role(self, role: str, status: int) -> AccessDeniedError:
        return _refused(
            f"this ECS instance gives no keys for a RAM role (role: {role}, status {status})",
            "attach a RAM role to the instance, or correct ALIBABA_CLOUD_ECS_METADATA",
        )


class CredentialsUri:
    """A URI, mostly of a helper on this machine, that answers as the metadata service does.

    Raises:
        ConfigError: it is no http(s) URI.
    """

    is_cheap = False

    def __init__(self, uri: str) -> None:
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(
                "the credentials URI is not an http or https address", hint="correct ALIBABA_CLOUD_CREDENTIALS_URI"
            )
        self._uri = uri
        # The rest may be a secret.
        self.name = f"the credentials URI at {parts.hostname}"

    def fetch(self) -> Keys | None:
        status, text = _ask("GET", self._uri, self.name)
        if status != 200:
            raise _refused(f"{self.name} answers status {status}", "correct ALIBABA_CLOUD_CREDENTIALS_URI")
        return _read_keys(text, self.name)


class _StsRole:
    """A role, asked of STS.

    Args:
        role: its ARN.
        session: how the session is called in audits.
        region: of the STS endpoint to use.
        environ: ALIBABA_CLOUD_STS_REGION, ALIBABA_CLOUD_VPC_ENDPOINT_ENABLED; CKPTMGR_ALIYUN_STS_ENDPOINT names another address.
    """

    is_cheap = False

    def __init__(self, role: str, *, session: str, region: str = "", environ: Mapping[str, str]) -> None:
        self.name = f"the role {role}"
        self._role = role
        self._session = session or "ckptmgr"
        self._endpoint = _sts_endpoint(region, environ)

    def _assume(self, action: str, more: dict[str, str], signer: Keys | None = None) -> Keys:
        form = {
            "Action": action,
            "Format": "JSON",
            "Version": "2015-04-01",
            "DurationSeconds": str(_SESSION_S),
            "RoleArn": self._role,
            "RoleSessionName": self._session,
            "Timestamp": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "SignatureNonce": uuid.uuid4().hex,
            **more,
        }
        if signer is not None:
            form |= signature_of(form, signer)
        # In the body, not in the URL: URLs end in logs of proxies.
        status, text = _ask("POST", self._endpoint, self.name, form=form)
        answer = _json(text)
        if status != 200:
            code = str(answer.get("Code", ""))[:80]
            if code.startswith("Throttling"):
                raise TransientBackendError(f"STS refuses {self.name}: {code}", backend="oss", operation="sign")
            raise _refused(
                f"STS refuses {self.name}: {code or f'status {status}'}",
                "check the role, its trust policy and the token",
            )
        return _keys_of(answer.get("Credentials"), self.name)


class OidcRole(_StsRole):
    """A role that an OIDC token of this pod stands for (RRSA). The token's file is read each time: Kubernetes renews it."""

    def __init__(
        self, role: str, provider: str, token_file: str, *, session: str, region: str = "", environ: Mapping[str, str]
    ) -> None:
        super().__init__(role, session=session, region=region, environ=environ)
        self._provider = provider
        self._token_file = token_file

    def fetch(self) -> Keys | None:
        try:
            token = Path(self._token_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise _refused(
                f"the OIDC token {self._token_file} cannot be read: {why}", "correct ALIBABA_CLOUD_OIDC_TOKEN_FILE"
            ) from error
        return self._assume("AssumeRoleWithOIDC", {"OIDCProviderArn": self._provider, "OIDCToken": token})


class AssumedRole(_StsRole):
    """A role that other keys may assume."""

    def __init__(
        self,
        source: KeySource,
        role: str,
        *,
        session: str,
        external_id: str = "",
        region: str = "",
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(role, session=session, region=region, environ=environ)
        self._source = source
        self._external_id = external_id

    def fetch(self) -> Keys | None:
        signer = self._source.fetch()
        if signer is None:
            return None
        return self._assume("AssumeRole", {"ExternalId": self._external_id} if self._external_id else {}, signer)


def _sts_endpoint(region: str, environ: Mapping[str, str]) -> str:
    if given := environ.get("CKPTMGR_ALIYUN_STS_ENDPOINT"):
        return given
    region = region or environ.get("ALIBABA_CLOUD_STS_REGION", "")
    if not region:
        return "https://sts.aliyuncs.com"
    is_vpc = environ.get("ALIBABA_CLOUD_VPC_ENDPOINT_ENABLED", "").lower() in ("1", "true")
    return f"https://sts{'-vpc' if is_vpc else ''}.{region}.aliyuncs.com"


def signature_of(form: dict[str, str], signer: Keys, *, method: str = "POST") -> dict[str, str]:
    """What signs `form`, and says for whom."""
    who = {"AccessKeyId": signer.access_key_id, "SignatureMethod": "HMAC-SHA1", "SignatureVersion": "1.0"}
    if signer.token:
        who["SecurityToken"] = signer.token
    query = "&".join(
        f"{quote(name, safe='~')}={quote(value, safe='~')}" for name, value in sorted({**form, **who}.items())
    )
    to_sign = f"{method}&%2F&{quote(query, safe='~')}"
    value = hmac.new(f"{signer.secret}&".encode(), to_sign.encode(), hashlib.sha1).digest()
    return {**who, "Signature": base64.b64encode(value).decode()}


def _ask(
    method: str,
    url: str,
    what: str,
    headers: Mapping[str, str] | None = None,
    *,
    form: Mapping[str, str] | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> tuple[int, str]:
    """Status and text of one request. No redirect is followed; a proxy only for what is in the internet, which is STS.

    Raises:
        TransientBackendError: no answer, or one that says that it may be better later.
    """
    import requests

    with requests.Session() as session:
        # Without: proxies, and a password for this host out of ~/.netrc.
        session.trust_env = False
        if form is not None:
            session.proxies = getproxies()
        try:
            answer = session.request(
                method, url, headers=headers, data=form, timeout=timeout_s, allow_redirects=False, verify=_authorities()
            )
            status, text = answer.status_code, answer.text
        except requests.RequestException as error:
            raise BackendTimeoutError(
                f"no keys for OSS: {what} does not answer ({type(error).__name__})", backend="oss", operation="sign"
            ) from None
    if status >= 500 or status == 429:
        raise TransientBackendError(
            f"no keys for OSS: {what} answers status {status}", backend="oss", operation="sign", status=status
        )
    return status, text


def _authorities() -> str | bool:
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or True


def _read_keys(text: str, what: str) -> Keys:
    answer = _json(text)
    if answer.get("Code") != "Success":
        code = str(answer.get("Code", ""))[:80]
        raise _refused(f"{what} gives no keys: {code or 'its answer makes no sense'}", "check the role")
    return _keys_of(answer, what)


def _keys_of(record: Any, what: str) -> Keys:
    try:
        return Keys(
            access_key_id=_full(record["AccessKeyId"]),
            secret=_full(record["AccessKeySecret"]),
            token=_full(record["SecurityToken"]),
            expires_s=datetime.fromisoformat(record["Expiration"].replace("Z", "+00:00")).timestamp(),
        )
    except (TypeError, KeyError, ValueError, AttributeError):
        raise _refused(f"{what} gives no keys: its answer makes no sense", "check the role") from None


def _full(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _json(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refused(text: str, hint: str) -> AccessDeniedError:
    return AccessDeniedError(text, hint=hint, backend="oss", operation="sign")
