"""The places where Aliyun's tools look for keys on this machine: the environment, the CLI's profiles, the credentials file.

Formats and names: https://github.com/aliyun/credentials-python (`provider/env.py`, `provider/cli_profile.py`, `provider/profile.py`),
https://github.com/aliyun/aliyun-cli (docs/en/configuration.md). OSS's own tools have names of their own for the environment.
"""

from __future__ import annotations

import configparser
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckptmgr.backends.osscredentials import Keys, KeySource
from ckptmgr.backends.ossremotekeys import AssumedRole, CredentialsUri, InstanceRole, OidcRole
from ckptmgr.core.errors import AccessDeniedError, ConfigError

# OSS's own names go first: they say more.
_NAMES = (
    ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET", "OSS_SESSION_TOKEN"),
    ("ALIBABA_CLOUD_ACCESS_KEY_ID", "ALIBABA_CLOUD_ACCESS_KEY_SECRET", "ALIBABA_CLOUD_SECURITY_TOKEN"),
)


def default_chain(environ: Mapping[str, str] | None = None) -> list[KeySource]:
    """Aliyun's chain; nothing is looked at yet.

    Args:
        environ: in place of the process's own.
    """
    environ = os.environ if environ is None else environ
    chain: list[KeySource] = [Environment(environ)]
    oidc = [environ.get(f"ALIBABA_CLOUD_{name}", "") for name in ("ROLE_ARN", "OIDC_PROVIDER_ARN", "OIDC_TOKEN_FILE")]
    if all(oidc):
        chain.append(OidcRole(*oidc, session=environ.get("ALIBABA_CLOUD_ROLE_SESSION_NAME", ""), environ=environ))
    if not _is_true(environ, "ALIBABA_CLOUD_CLI_PROFILE_DISABLED"):
        chain.append(CliProfile(environ))
    chain.append(CredentialsFile(environ))
    if not _is_true(environ, "ALIBABA_CLOUD_ECS_METADATA_DISABLED"):
        chain.append(InstanceRole(environ.get("ALIBABA_CLOUD_ECS_METADATA", ""), environ=environ))
    if uri := environ.get("ALIBABA_CLOUD_CREDENTIALS_URI", ""):
        chain.append(CredentialsUri(uri))
    return chain


class Environment:
    """The variables, read at every request: whoever renews an STS token in this process does it there."""

    name = "the environment"
    is_cheap = True

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def fetch(self) -> Keys | None:
        for names in _NAMES:
            key_id, secret, token = (self._environ.get(name, "").strip() for name in names)
            if key_id and secret:
                return Keys(access_key_id=key_id, secret=secret, token=token)
            if key_id or secret:
                given, missing = names[:2] if key_id else (names[1], names[0])
                raise _refused(f"{given} is set without {missing}", f"set {names[0]} and {names[1]}")
        return None


class _Fixed:
    """Keys that were written down."""

    is_cheap = True

    def __init__(self, name: str, keys: Keys) -> None:
        self.name = name
        self._keys = keys

    def fetch(self) -> Keys | None:
        return self._keys


class _ProfileFile:
    """A file of profiles. It is read again when the store refuses what it said: whoever renews a token rewrites the file."""

    is_cheap = False

    def __init__(self, path: Path, environ: Mapping[str, str]) -> None:
        self.name = _shown(path)
        self._path = path
        self._environ = environ
        # What the file leads to, as long as it does not change: an instance's role knows by then that it is there.
        self._inner: tuple[str, KeySource] | None = None

    def fetch(self) -> Keys | None:
        try:
            text = self._path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or "it is not text"
            raise _refused(f"{self.name} cannot be read: {why}", "correct its permissions") from error
        if self._inner is None or self._inner[0] != text:
            profile = self._profile(text)
            if profile is None:
                return None
            self._inner = text, self._source_of(profile)
        return self._inner[1].fetch()

    def _profile(self, text: str) -> dict[str, Any] | None:
        """The chosen profile of the file; None if it has no such one."""
        raise NotImplementedError

    def _source_of(self, profile: dict[str, Any]) -> KeySource:
        raise NotImplementedError

    def _broken(self, what: str) -> ConfigError:
        # Not the parser's own words: they may quote the line, and with it a secret.
        return ConfigError(f"{self.name} {what}", hint="correct it, or run 'aliyun configure'")

    def _fixed(self, profile: Mapping[str, Any], token: str = "") -> _Fixed:
        keys = Keys(
            access_key_id=self._text(profile, "access_key_id"),
            secret=self._text(profile, "access_key_secret"),
            token=self._text(profile, token) if token else "",
        )
        return _Fixed(self.name, keys)

    def _text(self, profile: Mapping[str, Any], name: str, *, default: str | None = None) -> str:
        value = profile.get(name)
        if isinstance(value, str) and value.strip():
            return value.strip()
        if default is None:
            raise self._broken(f"has no {name} in profile {profile.get('name', 'default')!r}")
        return default


class CliProfile(_ProfileFile):
    """The current profile of the `aliyun` command, or the one that ALIBABA_CLOUD_PROFILE names, in ~/.aliyun/config.json."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        super().__init__(_home(environ) / ".aliyun" / "config.json", environ)

    def _profile(self, text: str) -> dict[str, Any] | None:
        self._profiles = self._parse(text)
        return self._profiles.get(self._environ.get("ALIBABA_CLOUD_PROFILE") or self._current)

    def _parse(self, text: str) -> dict[str, dict[str, Any]]:
        try:
            config = json.loads(text)
            profiles = {profile["name"]: profile for profile in config["profiles"]}
            self._current = config.get("current") or ""
        except (ValueError, TypeError, KeyError, AttributeError):
            raise self._broken("is not a configuration of the aliyun command") from None
        return profiles

    def _source_of(self, profile: dict[str, Any]) -> KeySource:
        return self._by_mode(profile, ())

    def _by_mode(self, profile: dict[str, Any], above: tuple[str, ...]) -> KeySource:
        name, mode = str(profile.get("name")), profile.get("mode") or "AK"
        if mode == "AK":
            return self._fixed(profile)
        if mode == "StsToken":
            return self._fixed(profile, "sts_token")
        if mode == "EcsRamRole":
            return InstanceRole(self._text(profile, "ram_role_name", default=""), environ=self._environ, is_named=True)
        if mode == "CredentialsURI":
            fallback = self._environ.get("ALIBABA_CLOUD_CREDENTIALS_URI") or None
            return CredentialsUri(self._text(profile, "credentials_uri", default=fallback))
        if mode == "OIDC":
            return OidcRole(
                self._text(profile, "ram_role_arn"),
                self._text(profile, "oidc_provider_arn"),
                self._text(profile, "oidc_token_file"),
                session=self._text(profile, "role_session_name", default=""),
                region=self._text(profile, "sts_region", default=""),
                environ=self._environ,
            )
        if mode in ("RamRoleArn", "ChainableRamRoleArn"):
            source: KeySource = (
                self._fixed(profile) if mode == "RamRoleArn" else self._previous(profile, (*above, name))
            )
            return AssumedRole(
                source,
                self._text(profile, "ram_role_arn"),
                session=self._text(profile, "ram_session_name", default=""),
                external_id=self._text(profile, "external_id", default=""),
                region=self._text(profile, "sts_region", default=""),
                environ=self._environ,
            )
        raise ConfigError(
            f"profile {name!r} of {self.name} has mode {mode!r}, which is not supported",
            hint="use AK, StsToken, RamRoleArn, ChainableRamRoleArn, EcsRamRole, OIDC or CredentialsURI, or set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET",
        )

    def _previous(self, profile: dict[str, Any], above: tuple[str, ...]) -> KeySource:
        name = self._text(profile, "source_profile")
        if name in above:
            raise self._broken(f"has profiles that lead to each other: {' -> '.join((*above, name))}")
        if name not in self._profiles:
            raise self._broken(f"has no profile {name!r}, which {profile.get('name')!r} begins with")
        return self._by_mode(self._profiles[name], above)


class CredentialsFile(_ProfileFile):
    """The section `default`, or the one that ALIBABA_CLOUD_PROFILE names, of ~/.alibabacloud/credentials (some SDKs: credentials.ini), or of the file that
    ALIBABA_CLOUD_CREDENTIALS_FILE names."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        given = environ.get("ALIBABA_CLOUD_CREDENTIALS_FILE")
        folder = _home(environ) / ".alibabacloud"
        found = (folder / name for name in ("credentials", "credentials.ini") if (folder / name).exists())
        super().__init__(Path(given).expanduser() if given else next(found, folder / "credentials"), environ)

    def _profile(self, text: str) -> dict[str, Any] | None:
        parser = configparser.ConfigParser(interpolation=None, inline_comment_prefixes=("#",))
        try:
            parser.read_string(text)
        except configparser.Error:
            raise self._broken("is not a file of sections and 'name = value'") from None
        name = self._environ.get("ALIBABA_CLOUD_PROFILE") or "default"
        if not parser.has_section(name):
            return None
        return {**parser[name], "name": name}

    def _source_of(self, profile: dict[str, Any]) -> KeySource:
        kind = profile.get("type", "access_key")
        if kind == "access_key":
            return self._fixed(profile)
        if kind == "sts":
            return self._fixed(profile, "security_token")
        if kind == "ecs_ram_role":
            return InstanceRole(self._text(profile, "role_name", default=""), environ=self._environ, is_named=True)
        session = self._text(profile, "role_session_name", default="")
        if kind == "ram_role_arn":
            role = self._text(profile, "role_arn")
            return AssumedRole(self._fixed(profile), role, session=session, environ=self._environ)
        if kind == "oidc_role_arn":
            names = ("role_arn", "oidc_provider_arn", "oidc_token_file_path")
            return OidcRole(*(self._text(profile, name) for name in names), session=session, environ=self._environ)
        raise ConfigError(
            f"section {profile['name']!r} of {self.name} has type {kind!r}, which is not supported",
            hint="use access_key, sts, ecs_ram_role, ram_role_arn or oidc_role_arn, or set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET",
        )


def _refused(text: str, hint: str) -> AccessDeniedError:
    return AccessDeniedError(text, hint=hint, backend="oss", operation="sign")


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true")


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home())


def _shown(path: Path) -> str:
    try:
        return f"~/{path.relative_to(Path.home())}"
    except ValueError:
        return str(path)
