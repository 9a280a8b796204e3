"""Store profiles: chosen by the endpoint, overridden by options, honest about what was tested."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Literal

import pytest

from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.profiles import PROFILES, profile_of, recognised
from ckptmgr.core.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "endpoint", "name"),
    [
        ("s3", "https://s3.eu-west-1.amazonaws.com", "aws"),
        ("s3", "https://s3.cn-north-1.amazonaws.com.cn", "aws"),
        ("s3", "https://ACCOUNT.eu.r2.cloudflarestorage.com", "r2"),
        ("s3", "https://storage.googleapis.com", "gcs-s3"),
        ("s3", "https://s3.oss-cn-hangzhou.aliyuncs.com", "oss-s3"),
        ("s3", "https://s3.us-west-004.backblazeb2.com", "b2"),
        ("s3", "https://s3.eu-central-1.wasabisys.com", "wasabi"),
        ("s3", "https://fly.storage.tigris.dev", "tigris"),
        ("s3", "https://ams3.digitaloceanspaces.com", "spaces"),
        ("s3", "http://127.0.0.1:8333", "other"),
        ("s3", "https://amazonaws.com.example.org", "other"),
        ("s3", "https://notamazonaws.com", "other"),
        ("oss", "https://oss-cn-hangzhou-internal.aliyuncs.com", "oss"),
        ("oss", "https://data.example.com", "oss-other"),
    ],
)
def test_by_endpoint(kind: Literal["s3", "oss"], endpoint: str, name: str) -> None:
    """The host decides; a part of a name is no match."""
    assert profile_of(kind, endpoint).name == name


def test_what_the_stores_are_known_for() -> None:
    """The facts that a wrong guess would pay for with failed or damaged uploads."""
    oss_s3 = profile_of("s3", "https://s3.oss-cn-beijing.aliyuncs.com")
    assert (oss_s3.addressing, oss_s3.checksum, oss_s3.create_only) == ("virtual", "none", "no")
    gcs = profile_of("s3", "https://storage.googleapis.com")
    assert (gcs.checksum, gcs.create_only) == ("none", "no")
    assert profile_of("s3", "https://x.r2.cloudflarestorage.com").equal_parts
    assert profile_of("s3", "https://s3.us-west-004.backblazeb2.com").checksum == "none"
    assert profile_of("oss", "https://oss-cn-beijing.aliyuncs.com").min_part_bytes == 102_400


def test_options_go_over_the_profile() -> None:
    """A named profile replaces the one found; single options replace its fields; an IP address is path-style."""
    assert profile_of("s3", "http://10.0.0.7:9000").addressing == "path"
    assert profile_of("s3", "http://[::1]:9000").addressing == "path"
    virtual = StoreOptions(addressing="virtual", checksum="none", create_only="no", profile="minio")
    changed = profile_of("s3", "http://10.0.0.7:9000", virtual)
    assert (changed.name, changed.addressing, changed.checksum, changed.create_only) == (
        *("minio", "virtual"),
        *("none", "no"),
    )


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("s3", StoreOptions(profile="mino"), "did you mean minio"),
        ("oss", StoreOptions(profile="minio"), "oss://"),
        ("s3", StoreOptions(part_bytes=1 << 20), "CKPTMGR_PART_SIZE"),
    ],
)
def test_what_does_not_fit_is_refused(kind: Literal["s3", "oss"], options: StoreOptions, says: str) -> None:
    """An unknown profile, one of another kind, and parts that the store does not take are configuration errors."""
    with pytest.raises(ConfigError, match=says):
        profile_of(kind, "http://127.0.0.1:1", options)


def test_every_profile_says_where_it_is_from() -> None:
    """Names are unique, each profile but the empty ones has sources, and only what the tests run against is called tested."""
    names = [profile.name for profile in PROFILES]
    assert len(set(names)) == len(names)
    assert [profile.name for profile in PROFILES if not profile.sources] == ["other"]
    assert [profile.name for profile in PROFILES if profile.tested] == ["seaweedfs"]


def test_recognised_by_its_server_header() -> None:
    """A store behind an address of its own is recognised by what it calls itself, and only then."""
    found = recognised("s3", "SeaweedFS 4.48")
    assert found is not None
    assert found.name == "seaweedfs"
    assert recognised("s3", "nginx") is None
    assert recognised("s3", None) is None
    assert recognised("oss", "MinIO") is None


def test_every_profile_and_option_is_documented() -> None:
    """`docs/stores.md` has a row for each profile, all their sources, and each variable; what it calls tested is what the code does."""
    page = (Path(__file__).parents[2] / "docs" / "stores.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for profile in PROFILES:
        assert ("**yes**" in rows[profile.name]) == profile.tested, profile.name
        if profile.name != "oss-other":
            assert not [source for source in profile.sources if source.startswith("https") and source not in page]
    names = set(re.findall("CKPTMGR_[A-Z0-9_]+", inspect.getsource(StoreOptions.from_env)))
    assert len(names) == 12
    assert not [name for name in names if name not in rows]
