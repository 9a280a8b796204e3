"""Where S3 buckets are and how requests to them are signed, in the ordinary cases, without boto3's client: to make one takes 60 ms of processor time.

Ordinary is a bucket with a plain name, at an endpoint that the user names or in a region of Amazon's that is open to all. Everything is read as botocore
reads it, from the same session; whatever else is configured, and any name that may mean more than a bucket, is left to boto3's client by the answer None.
The tests compare this with that client, setting by setting.

Source: https://docs.aws.amazon.com/sdkref/latest/guide/feature-ss-endpoints.html (the order in which endpoints are looked for)
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ckptmgr.backends.profiles import Profile

#: botocore `Config` options that have no say in where a request goes.
_TIMES = frozenset({"connect_timeout", "read_timeout"})
# Settings of the session that change an endpoint, a signature, or botocore's own data.
_UNUSUAL = (
    "api_versions",
    "auth_scheme_preference",
    "csm_enabled",
    "data_path",
    "proxies_config",
    "sigv4a_signing_region_set",
    "use_dualstack_endpoint",
    "use_fips_endpoint",
    "user_agent_appid",
)
_STYLES = ("auto", "path", "virtual")
# What the AWS command line keeps in the same section, and botocore does not look at.
_TRANSFER = frozenset(
    {
        "io_chunksize",
        "max_bandwidth",
        "max_concurrent_requests",
        "max_queue_size",
        "multipart_chunksize",
        "multipart_threshold",
        "preferred_transfer_client",
        "target_bandwidth",
    }
)
_OPEN_REGION = re.compile(r"(af|ap|ca|eu|il|me|mx|sa|us)-[a-z]+-[1-9]")
_ANY_REGION = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
# Without dots, and not one of the endings and beginnings by which Amazon tells other things from buckets: aliases of access points, directory buckets, …
_PLAIN_BUCKET = re.compile(r"(?!xn--|sthree-|amzn-s3-demo-)[a-z0-9][a-z0-9-]{1,61}[a-z0-9](?<!-s3alias)")
_PLAIN_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?")
_AMAZON = "amazonaws.com"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the requests of a session go.

    Attributes:
        scheme: `http` or `https`.
        netloc: host, and port if one is named.
        region: what is configured; None if nothing is.
        is_amazons: nobody named an endpoint.
        style: of addressing, as configured.
    """

    scheme: str
    netloc: str
    region: str | None
    is_amazons: bool
    style: str

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.netloc}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUrl:
    """Where the requests of one bucket go, and the region that they are signed for; `prefix` comes before a key: "" or "/bucket"."""

    scheme: str
    netloc: str
    prefix: str
    region: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An endpoint, with what is known of its store.

    Attributes:
        agent: the header `User-Agent`.
    """

    endpoint: Endpoint
    region: str
    by_host: bool
    agent: str

    @classmethod
    def of(cls, endpoint: Endpoint, profile: Profile, agent: str) -> Place:
        style = endpoint.style if profile.addressing == "auto" else profile.addressing
        region = endpoint.region or profile.region or "us-east-1"
        # An endpoint of one's own has buckets in its paths, unless one says otherwise; Amazon's are host names.
        by_host = style != "path" if endpoint.is_amazons else style == "virtual"
        return cls(endpoint=endpoint, region=region, by_host=by_host, agent=agent)

    def find(self, bucket: str) -> BucketUrl | None:
        """Where `bucket` is; None if only boto3's client knows."""
        if not _PLAIN_BUCKET.fullmatch(bucket) or "--" in bucket:
            return None
        scheme, netloc, region = self.endpoint.scheme, self.endpoint.netloc, self.region
        if not self.by_host:
            return BucketUrl(scheme=scheme, netloc=netloc, prefix=f"/{bucket}", region=region)
        if _is_address(netloc):
            return None
        return BucketUrl(scheme=scheme, netloc=f"{bucket}.{netloc}", prefix="", region=region)


def endpoint_of(session: Any, overrides: Mapping[str, Any]) -> Endpoint | None:
    """The endpoint of botocore's `session`; None if it is not an ordinary one.

    Args:
        overrides: botocore `Config` options that the user gives.

    Raises:
        botocore.exceptions.BotoCoreError: the configuration cannot be read, or there is no such profile.
    """
    read = session.get_config_variable
    scoped = session.get_scoped_config()
    if not _is_usual(read, scoped, overrides):
        return None
    style = (read("s3") or {}).get("addressing_style", "auto")
    region = read("region") or None
    if region is not None and not _ANY_REGION.fullmatch(region):
        return None
    url = None
    if not read("ignore_configured_endpoint_urls"):
        url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or scoped.get("endpoint_url")
    if url is None:
        if region is not None and not _OPEN_REGION.fullmatch(region):
            return None
        # Requests for the oldest region, or for none, go to the host without a name of a region in it, as they always have.
        host = f"s3.{_AMAZON}" if region in (None, "us-east-1") else f"s3.{region}.{_AMAZON}"
        return Endpoint(scheme="https", netloc=host, region=region, is_amazons=True, style=style)
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not _PLAIN_HOST.fullmatch(rest) or _AMAZON in rest:
        return None
    if urlsplit(url).hostname is None:
        return None
    return Endpoint(scheme=scheme, netloc=rest, region=region, is_amazons=False, style=style)


def _is_usual(read: Any, scoped: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Whether nothing is configured that changes where requests go, but what `endpoint_of` reads."""
    section = read("s3") or {}
    return (
        set(overrides) <= _TIMES
        and not any(read(name) for name in _UNUSUAL)
        and read("defaults_mode") in (None, "legacy")
        and not {"services", "signature_version"} & set(scoped)
        and isinstance(scoped.get("s3", {}), Mapping)
        and set(section) <= {"addressing_style", *_TRANSFER}
        and section.get("addressing_style", "auto") in _STYLES
        # Endpoints and models that the user has put there go over botocore's own.
        and not Path("~/.aws/models").expanduser().exists()
    )


def _is_address(netloc: str) -> bool:
    try:
        ipaddress.ip_address(netloc.rpartition(":")[0] if ":" in netloc else netloc)
    except ValueError:
        return False
    return True
