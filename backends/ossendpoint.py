"""Where OSS requests go and what region they are signed for, as the environment says.

OSS_ENDPOINT and OSS_REGION; either is enough where one follows from the other. `OSS_INTERNAL=1` takes the region's internal endpoint, which costs
no traffic and is reached from the same region only. `OSS_CNAME=1` says that the endpoint is a custom domain bound to the bucket.

Source: https://www.alibabacloud.com/help/en/oss/user-guide/regions-and-endpoints
Source: https://www.alibabacloud.com/help/en/oss/user-guide/access-oss-via-bucket-domain-name
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from ckptmgr.core.errors import ConfigError

_DOMAIN = ".aliyuncs.com"
# oss-cn-hangzhou, oss-cn-hangzhou-internal; of the finance cloud also oss-cn-shanghai-finance-1-pub.
_REGIONAL = re.compile(r"(?:vpc100-)?oss-(?P<region>[a-z]+-[a-z0-9-]+?)(?:-internal|-pub)?")
# With IPv4 and IPv6.
_DUAL_STACK = re.compile(r"(?P<region>[a-z]+-[a-z0-9-]+)\.oss")
_ACCELERATED = ("oss-accelerate", "oss-accelerate-overseas")


@dataclass(frozen=True, slots=True, kw_only=True)
class OssEndpoint:
    """Where a bucket is asked.

    Attributes:
        url: scheme, host and port.
        region: that signatures of version 4 name; "" if nobody says it.
        style: `cname`: the host is the bucket's own; `virtual`: the bucket's name goes before the host; `path`: it goes into the path, as it must with an
            IP address.
    """

    url: str
    region: str
    style: Literal["cname", "virtual", "path"] = "virtual"


def endpoint_of(
    environ: Mapping[str, str] | None = None, *, addressing: Literal["auto", "path", "virtual"] = "auto"
) -> OssEndpoint:
    """The endpoint that the environment names.

    Args:
        environ: in place of the process's own.
        addressing: where the bucket's name goes; `auto` as OSS demands.

    Raises:
        ConfigError: there is none, or what is said does not fit together.
    """
    environ = os.environ if environ is None else environ
    region = environ.get("OSS_REGION", "").strip().removeprefix("oss-")
    given = environ.get("OSS_ENDPOINT", "").strip()
    is_cname = _is_true(environ, "OSS_CNAME")
    if not given and not region:
        raise ConfigError(
            "no OSS endpoint is set", hint="set OSS_ENDPOINT, e.g. https://oss-cn-hangzhou.aliyuncs.com, or OSS_REGION"
        )
    # oss2 would speak http; nobody who leaves the scheme out means that.
    url = _checked(given if "://" in given else f"https://{given}") if given else f"https://oss-{region}{_DOMAIN}"
    label = _label(url)
    region = region or _region_of(label)
    if _is_true(environ, "OSS_INTERNAL"):
        url = _internal(url, label, region, is_cname=is_cname)
    if not is_cname and label.startswith("oss-") is False and re.match(r"[a-z0-9][a-z0-9-]+\.oss-", label):
        bucket, _, rest = label.partition(".")
        raise ConfigError(
            f"the OSS endpoint names a bucket: {bucket}.{rest}{_DOMAIN}",
            hint=f"set OSS_ENDPOINT={urlsplit(url).scheme}://{rest}{_DOMAIN}; the bucket's name is in the URL of the store",
        )
    if addressing == "path" or _is_address(urlsplit(url).hostname or ""):
        return OssEndpoint(url=url, region=region, style="path")
    return OssEndpoint(url=url, region=region, style="cname" if is_cname else "virtual")


def no_region(endpoint: OssEndpoint) -> ConfigError:
    """The error for requests that cannot be signed for want of a region."""
    if _label(endpoint.url) in _ACCELERATED:
        return ConfigError(
            "no OSS region is set, and an acceleration endpoint serves all of them",
            hint="set OSS_REGION to the bucket's, e.g. cn-hangzhou",
        )
    return ConfigError("no OSS region is set", hint="set OSS_REGION, e.g. cn-hangzhou, or OSS_SIGNATURE_VERSION=v1")


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        host = None
    if not re.fullmatch(r"[\w.-]+", host or "", re.ASCII) or parts.scheme not in ("http", "https"):
        # Not repeated: it may be anything, a secret pasted into the wrong variable too.
        raise ConfigError(
            "OSS_ENDPOINT is not an address",
            hint="set it like https://oss-cn-hangzhou.aliyuncs.com (check OSS_ENDPOINT)",
        )
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "OSS_ENDPOINT must not carry credentials", hint="set OSS_ACCESS_KEY_ID and OSS_ACCESS_KEY_SECRET"
        )
    if parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(
            "OSS_ENDPOINT has a path, which would be left out",
            hint=f"set OSS_ENDPOINT={parts.scheme}://{parts.netloc}; the bucket's name is in the URL of the store",
        )
    return f"{parts.scheme}://{parts.netloc}"


def _label(url: str) -> str:
    """What is before `.aliyuncs.com`; "" for other hosts."""
    host = (urlsplit(url).hostname or "").lower()
    return host.removesuffix(_DOMAIN) if host.endswith(_DOMAIN) else ""


def _region_of(label: str) -> str:
    if label in _ACCELERATED:
        return ""
    found = _REGIONAL.fullmatch(label) or _DUAL_STACK.fullmatch(label)
    return found["region"] if found else ""


def _internal(url: str, label: str, region: str, *, is_cname: bool) -> str:
    if is_cname or not region or not (_region_of(label) or label in _ACCELERATED):
        raise ConfigError(
            "OSS_INTERNAL=1 needs the endpoint of a region, which OSS_ENDPOINT is not",
            hint="set OSS_REGION and leave OSS_ENDPOINT out, or set OSS_ENDPOINT to the internal endpoint itself",
        )
    if label.endswith("-internal"):
        return url
    return f"{urlsplit(url).scheme}://oss-{region}-internal{_DOMAIN}"


def _is_address(host: str) -> bool:
    # As oss2 has it.
    return host == "localhost" or re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", host) is not None


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes")
