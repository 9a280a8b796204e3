"""Where buckets are without boto3's client: the same as with it, or left to it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3
import pytest

from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.s3client import S3Client
from ckptmgr.backends.s3data import DataCalls, Target
from ckptmgr.backends.sigv4 import Keys
from ckptmgr.core.errors import AccessDeniedError, ConfigError

# Each test has clients of its own, and botocore reads its models anew for each.
pytestmark = pytest.mark.usefixtures("_s3_models_parsed_once")

KEYS = ("aws_access_key_id = file", "aws_secret_access_key = of-file")
ROLE = ("[profile base]", "aws_access_key_id = base", "aws_secret_access_key = s", "[default]", "source_profile = base")


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Sets exactly these variables of AWS's, and writes the configuration file, and the one of credentials."""

    def configured(
        environment: dict[str, str], *lines: str, credentials: tuple[str, ...] = ("[default]", *KEYS, "[lab]", *KEYS)
    ) -> None:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        for file, text in (("config", lines), ("credentials", credentials)):
            (tmp_path / file).write_text("\n".join(text))
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        for name, value in environment.items():
            monkeypatch.setenv(name, value)

    return configured


ENV_KEYS = {"AWS_ACCESS_KEY_ID": "env", "AWS_SECRET_ACCESS_KEY": "of-env"}
LAB = {"AWS_ENDPOINT_URL": "http://lab.example:9000"}


def opened(client: S3Client) -> Any:
    return client._open()


def facts(data: DataCalls, target: Target | None) -> Any:
    """All that a request's way depends on, and whose it is."""
    if target is None:
        return None
    frozen = data._credentials.get_frozen_credentials()
    signed = target.signer.sign("GET", "/", "", {"host": target.host}, "x", Keys("a", "b"), 0)["authorization"]
    scope = signed.partition("/")[2].partition(",")[0]
    keys = (frozen.access_key, frozen.secret_key, frozen.token)
    return (target.host, target.prefix, target.pool._address, target.pool._context is None, scope, keys), (
        target.signs_payload
    )


# (variables of the environment, lines of ~/.aws/config, options)
ORDINARY: dict[str, tuple[dict[str, str], tuple[str, ...], StoreOptions]] = {
    "endpoint": (LAB, (), StoreOptions()),
    "endpoint with the scheme's port": ({"AWS_ENDPOINT_URL": "http://lab.example:80"}, (), StoreOptions()),
    "endpoint over TLS": ({"AWS_ENDPOINT_URL": "https://lab.example"}, (), StoreOptions()),
    "endpoint with TLS's port": ({"AWS_ENDPOINT_URL": "https://lab.example:443"}, (), StoreOptions()),
    "address": ({"AWS_ENDPOINT_URL": "http://10.0.0.7:9000"}, (), StoreOptions()),
    "this machine": ({"AWS_ENDPOINT_URL": "http://localhost:9000"}, (), StoreOptions()),
    "endpoint of s3": ({**LAB, "AWS_ENDPOINT_URL_S3": "http://other.example"}, (), StoreOptions()),
    "empty endpoint of s3": ({**LAB, "AWS_ENDPOINT_URL_S3": ""}, (), StoreOptions()),
    "endpoint of the profile": ({}, ("[default]", "endpoint_url = http://lab.example:9000"), StoreOptions()),
    "endpoint over the profile's": (LAB, ("[default]", "endpoint_url = http://not.example:9000"), StoreOptions()),
    "endpoints ignored": ({**LAB, "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS": "true"}, (), StoreOptions()),
    "endpoints ignored by the profile": (LAB, ("[default]", "ignore_configured_endpoint_urls = true"), StoreOptions()),
    "region": ({**LAB, "AWS_DEFAULT_REGION": "garage"}, (), StoreOptions()),
    "a region that botocore does not read": ({**LAB, "AWS_REGION": "eu-west-1"}, (), StoreOptions()),
    "oldest region": ({**LAB, "AWS_DEFAULT_REGION": "us-east-1"}, (), StoreOptions()),
    "region of the profile": (LAB, ("[default]", "region = eu-north-1"), StoreOptions()),
    "region over the profile's": (
        {**LAB, "AWS_DEFAULT_REGION": "eu-west-3"},
        ("[default]", "region = eu-north-1"),
        StoreOptions(),
    ),
    "named profile": (
        {"AWS_PROFILE": "lab"},
        ("[default]", "region = eu-north-1", "[profile lab]", "endpoint_url = http://lab.example", "region = lab-1"),
        StoreOptions(),
    ),
    "the other variable for a profile": (
        {"AWS_DEFAULT_PROFILE": "lab", "AWS_PROFILE": "not"},
        ("[profile lab]", "region = eu-north-1", "[profile not]", "region = eu-west-1"),
        StoreOptions(),
    ),
    "virtual addressing": (LAB, ("[default]", "s3 =", "  addressing_style = virtual"), StoreOptions()),
    "path addressing": (LAB, ("[default]", "s3 =", "  addressing_style = path"), StoreOptions()),
    "automatic addressing": (LAB, ("[default]", "s3 =", "  addressing_style = auto"), StoreOptions()),
    "our virtual addressing": (LAB, (), StoreOptions(addressing="virtual")),
    "our path addressing": (
        LAB,
        ("[default]", "s3 =", "  addressing_style = virtual"),
        StoreOptions(addressing="path"),
    ),
    "the command line's own settings": (LAB, ("[default]", "s3 =", "  max_concurrent_requests = 4"), StoreOptions()),
    "a store that wants host names": (
        {"AWS_ENDPOINT_URL": "https://s3.oss-cn-hangzhou.aliyuncs.com"},
        (),
        StoreOptions(),
    ),
    "a store with a region of its own": (
        {"AWS_ENDPOINT_URL": "https://account.r2.cloudflarestorage.com"},
        (),
        StoreOptions(),
    ),
    "that region overridden": (
        {"AWS_ENDPOINT_URL": "https://account.r2.cloudflarestorage.com", "AWS_DEFAULT_REGION": "weur"},
        (),
        StoreOptions(),
    ),
    "Amazon": ({"AWS_DEFAULT_REGION": "eu-west-1"}, (), StoreOptions()),
    "Amazon's oldest region": ({"AWS_DEFAULT_REGION": "us-east-1"}, (), StoreOptions()),
    "Amazon without a region": ({}, (), StoreOptions()),
    "Amazon by path": ({}, ("[default]", "region = ap-south-1", "s3 =", "  addressing_style = path"), StoreOptions()),
    "Amazon's oldest region by path": (
        {},
        ("[default]", "region = us-east-1", "s3 =", "  addressing_style = path"),
        StoreOptions(),
    ),
    "Amazon by host": ({}, ("[default]", "region = sa-east-1", "s3 =", "  addressing_style = virtual"), StoreOptions()),
    "Amazon, addressed by our path": ({"AWS_DEFAULT_REGION": "ca-west-1"}, (), StoreOptions(addressing="path")),
    "a newer region than botocore": ({"AWS_DEFAULT_REGION": "eu-nowhere-9"}, (), StoreOptions()),
    "Mexico": ({"AWS_DEFAULT_REGION": "mx-central-1"}, (), StoreOptions()),
    "Israel": ({"AWS_DEFAULT_REGION": "il-central-1"}, (), StoreOptions()),
    "keys of the environment": ({**LAB, **ENV_KEYS}, (), StoreOptions()),
    "keys of a session": ({**LAB, **ENV_KEYS, "AWS_SESSION_TOKEN": "t"}, (), StoreOptions()),
    "an older name for the token": ({**LAB, **ENV_KEYS, "AWS_SECURITY_TOKEN": "t"}, (), StoreOptions()),
    "a profile over keys of the environment": (
        {**LAB, **ENV_KEYS, "AWS_PROFILE": "default"},
        ("[default]",),
        StoreOptions(),
    ),
    "keys of another process": (
        {**LAB, "AWS_PROFILE": "other"},
        (
            "[profile other]",
            """credential_process = echo '{"Version": 1, "AccessKeyId": "p", "SecretAccessKey": "q", "SessionToken": "t"}'""",
        ),
        StoreOptions(),
    ),
    "bodies signed": ({"AWS_ENDPOINT_URL": "https://lab.example"}, (), StoreOptions(sign_payload="always")),
    "bodies unsigned": (LAB, (), StoreOptions(sign_payload="never")),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_it_is_where_boto3_says(configure: Callable[..., None], name: str) -> None:
    """Host, port, TLS, path, the scope of signatures, keys, and whether bodies are signed: found without the client, which says the same."""
    environment, lines, options = ORDINARY[name]
    configure(environment, *lines)
    client = S3Client(options=options)
    made, data = opened(client).made, opened(client)._data
    without = {bucket: facts(data, data.target("get_object", bucket)) for bucket in ("bkt", "a-1-b")}
    endpoint, profile = client.endpoint, client.profile
    assert made._client is None
    assert without["bkt"] is not None
    real = made.client()
    assert without == {bucket: facts(data, data._ask(bucket)) for bucket in without}
    assert endpoint == real.meta.endpoint_url
    assert profile == client.profile
    frozen = real._request_signer._credentials.get_frozen_credentials()
    assert without["bkt"][0][-1] == (frozen.access_key, frozen.secret_key, frozen.token)


UNUSUAL: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "dual stack": ({"AWS_DEFAULT_REGION": "eu-west-1", "AWS_USE_DUALSTACK_ENDPOINT": "true"}, ()),
    "FIPS": ({"AWS_DEFAULT_REGION": "us-west-2", "AWS_USE_FIPS_ENDPOINT": "true"}, ()),
    "dual stack of s3": (
        {},
        ("[default]", "region = eu-west-1", "s3 =", "  use_dualstack_endpoint = true"),
    ),
    "acceleration": ({}, ("[default]", "region = eu-west-1", "s3 =", "  use_accelerate_endpoint = true")),
    "signing of bodies": (LAB, ("[default]", "s3 =", "  payload_signing_enabled = true")),
    "regional endpoint": ({"AWS_DEFAULT_REGION": "us-east-1", "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT": "regional"}, ()),
    "modes": ({"AWS_DEFAULT_REGION": "us-east-1", "AWS_DEFAULTS_MODE": "standard"}, ()),
    "services": (
        {},
        ("[default]", "services = lab", "[services lab]", "s3 =", "  endpoint_url = http://lab.example:9000"),
    ),
    "schemes": ({**LAB, "AWS_AUTH_SCHEME_PREFERENCE": "sigv4"}, ()),
    "another signature": (LAB, ("[default]", "s3 =", "  signature_version = s3")),
    "China": ({"AWS_DEFAULT_REGION": "cn-north-1"}, ()),
    "GovCloud": ({"AWS_DEFAULT_REGION": "us-gov-west-1"}, ()),
    "a path below the endpoint": ({"AWS_ENDPOINT_URL": "http://lab.example/below"}, ()),
    "Amazon's endpoint by name": ({"AWS_ENDPOINT_URL": "https://s3.eu-west-1.amazonaws.com"}, ()),
    "version 6 of IP": ({"AWS_ENDPOINT_URL": "http://[::1]:9000"}, ()),
    "a slash at the end": ({"AWS_ENDPOINT_URL": "http://lab.example/"}, ()),
    "capitals": ({"AWS_ENDPOINT_URL": "http://LAB.example"}, ()),
    "an application's name": ({**LAB, "AWS_SDK_UA_APP_ID": "app"}, ()),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_boto3s_to_say(configure: Callable[..., None], name: str) -> None:
    """The client is made at once, and is asked."""
    environment, lines = UNUSUAL[name]
    configure(environment, *lines)
    made = opened(S3Client()).made
    assert made.place is None
    assert made._client is not None


def test_models_of_the_users_own(configure: Callable[..., None], tmp_path: Path) -> None:
    """Endpoints that are put into ~/.aws/models go over botocore's."""
    configure(LAB)
    (tmp_path / ".aws" / "models").mkdir(parents=True)
    assert opened(S3Client()).made.place is None


def test_options_of_the_client(configure: Callable[..., None]) -> None:
    """Any but the time limits."""
    configure(LAB)
    assert opened(S3Client({"read_timeout": 3})).made.place is not None
    assert opened(S3Client({"region_name": "eu-west-1"})).made.place is None
    assert opened(S3Client(options=StoreOptions(engine="boto3"))).made.place is None


@pytest.mark.parametrize(
    "bucket",
    [
        *(
            "with.dots",
            "point-s3alias",
            "directory--euw1-az1--x-s3",
            "Capitals",
            "under_score",
            "xn--a",
            "-a",
            "ab",
            "a" * 64,
        ),
        "arn:aws:s3:eu-west-1:123456789012:accesspoint",
    ],
)
def test_names_that_may_mean_more_than_a_bucket(configure: Callable[..., None], bucket: str) -> None:
    """Aliases, directory buckets, and what is none of the names that Amazon gives today."""
    configure({"AWS_DEFAULT_REGION": "eu-west-1"})
    place = opened(S3Client()).made.place
    assert place is not None
    assert place.find("bkt") is not None
    assert place.find(bucket) is None


def test_host_names_of_an_address(configure: Callable[..., None]) -> None:
    """There are none, whatever is asked for."""
    configure({"AWS_ENDPOINT_URL": "http://10.0.0.7:9000"})
    found = opened(S3Client(options=StoreOptions(addressing="virtual"))).made.place.find("bkt")
    assert found is None


def test_no_keys_anywhere(configure: Callable[..., None]) -> None:
    """As with boto3's client: an error of the first request, that says so."""
    configure(LAB, credentials=())
    for options in (StoreOptions(), StoreOptions(engine="boto3")):
        with pytest.raises(AccessDeniedError, match="credentials"):
            S3Client(options=options).request("head_object", "bkt/k", Bucket="bkt", Key="k")


def test_keys_of_a_role_that_is_assumed(configure: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are boto3's: the session finds them, in whatever way, and the client has the very same."""
    configure(LAB, *ROLE, "role_arn = arn:aws:iam::123456789012:role/r", credentials=())
    made = opened(S3Client()).made
    assert made.place is not None
    assert made.credentials.method == "assume-role"
    assert made.client()._request_signer._credentials is made.credentials


def test_credentials_in_the_endpoint(configure: Callable[..., None]) -> None:
    """Are refused, and not shown."""
    configure({"AWS_ENDPOINT_URL": "http://user:secret@lab.example"})
    with pytest.raises(ConfigError, match="must not carry credentials") as caught:
        S3Client().request("head_object", "bkt/k", Bucket="bkt", Key="k")
    assert "secret" not in str(caught.value)


def test_a_profile_that_is_not_there(configure: Callable[..., None]) -> None:
    """Is named."""
    configure({**LAB, "AWS_PROFILE": "nowhere"})
    with pytest.raises(ConfigError, match="nowhere"):
        S3Client().request("head_object", "bkt/k", Bucket="bkt", Key="k")


def test_agents_name_the_same_programs(configure: Callable[..., None]) -> None:
    """For whoever reads the store's log."""
    configure(LAB)
    client = S3Client()
    head = opened(client)._data.target("get_object", "bkt").head
    assert f"Boto3/{boto3.__version__}" in head
    assert "ckptmgr" in head
