"""How the OSS client finds its endpoint, signs, and is configured; no request is sent but to the test server."""

from __future__ import annotations

import hmac
import logging
import random
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import oss2  # type: ignore[import-untyped, unused-ignore]
import pytest

from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.oss import OSSBackend
from ckptmgr.backends.ossclient import Oss2Client
from ckptmgr.backends.osscredentials import Keys, OssCredentials
from ckptmgr.backends.ossendpoint import endpoint_of
from ckptmgr.backends.osssigning import Signer, SignerV1
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    ConfigError,
    ObjectExistsError,
    TransientBackendError,
)
from ckptmgr.testing.certificates import Certificates, make_certificates
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.moto_core import QuietRequestHandler, make_server
from ckptmgr.testing.server_store import ServerStore
from ckptmgr.testing.servers import OssServer

OSS = "aliyuncs.com"


@pytest.mark.parametrize(
    ("variables", "url", "region"),
    [
        ({"OSS_ENDPOINT": f"https://oss-cn-beijing.{OSS}"}, f"https://oss-cn-beijing.{OSS}", "cn-beijing"),
        ({"OSS_ENDPOINT": f"oss-cn-beijing.{OSS}/"}, f"https://oss-cn-beijing.{OSS}", "cn-beijing"),
        (
            {"OSS_ENDPOINT": f"http://oss-cn-beijing-internal.{OSS}"},
            f"http://oss-cn-beijing-internal.{OSS}",
            "cn-beijing",
        ),
        ({"OSS_ENDPOINT": f"oss-ap-southeast-1.{OSS}"}, f"https://oss-ap-southeast-1.{OSS}", "ap-southeast-1"),
        ({"OSS_ENDPOINT": f"cn-beijing.oss.{OSS}"}, f"https://cn-beijing.oss.{OSS}", "cn-beijing"),
        (
            {"OSS_ENDPOINT": f"oss-cn-shanghai-finance-1-pub.{OSS}"},
            f"https://oss-cn-shanghai-finance-1-pub.{OSS}",
            "cn-shanghai-finance-1",
        ),
        ({"OSS_REGION": "cn-shanghai"}, f"https://oss-cn-shanghai.{OSS}", "cn-shanghai"),
        ({"OSS_REGION": "oss-cn-shanghai"}, f"https://oss-cn-shanghai.{OSS}", "cn-shanghai"),
        ({"OSS_REGION": "cn-a", "OSS_INTERNAL": "1"}, f"https://oss-cn-a-internal.{OSS}", "cn-a"),
        ({"OSS_ENDPOINT": f"oss-cn-a.{OSS}", "OSS_INTERNAL": "true"}, f"https://oss-cn-a-internal.{OSS}", "cn-a"),
        (
            {"OSS_ENDPOINT": f"http://oss-cn-a-internal.{OSS}", "OSS_INTERNAL": "1"},
            f"http://oss-cn-a-internal.{OSS}",
            "cn-a",
        ),
        ({"OSS_ENDPOINT": f"oss-accelerate.{OSS}", "OSS_REGION": "cn-a"}, f"https://oss-accelerate.{OSS}", "cn-a"),
        ({"OSS_ENDPOINT": "http://data.example.com", "OSS_REGION": "cn-a"}, "http://data.example.com", "cn-a"),
        ({"OSS_ENDPOINT": "http://127.0.0.1:9000"}, "http://127.0.0.1:9000", ""),
    ],
)
def test_endpoint_and_region(variables: dict[str, str], url: str, region: str) -> None:
    """Either is enough where one follows from the other; https is the default; internal and dual-stack endpoints have their region too."""
    found = endpoint_of(variables)
    assert (found.url, found.region) == (url, region)
    assert found.style == ("path" if "127.0.0.1" in url else "virtual")


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "no OSS endpoint is set.*OSS_ENDPOINT"),
        ({"OSS_ENDPOINT": "http://non sense"}, "OSS_ENDPOINT"),
        ({"OSS_ENDPOINT": "ftp://a"}, "OSS_ENDPOINT is not an address"),
        ({"OSS_ENDPOINT": f"https://bkt.oss-cn-a.{OSS}"}, f"names a bucket.*OSS_ENDPOINT=https://oss-cn-a.{OSS}"),
        ({"OSS_ENDPOINT": f"oss-cn-a.{OSS}/bkt"}, f"has a path.*OSS_ENDPOINT=https://oss-cn-a.{OSS}"),
        ({"OSS_ENDPOINT": f"https://me:secret@oss-cn-a.{OSS}"}, "must not carry credentials"),
        ({"OSS_ENDPOINT": "data.example.com", "OSS_REGION": "cn-a", "OSS_INTERNAL": "1"}, "OSS_INTERNAL=1 needs"),
        ({"OSS_ENDPOINT": f"oss-accelerate.{OSS}", "OSS_INTERNAL": "1"}, "OSS_INTERNAL=1 needs"),
    ],
)
def test_what_does_not_fit_is_named(variables: dict[str, str], words: str) -> None:
    """With the variable to set, and never with a secret."""
    with pytest.raises(ConfigError, match=words) as caught:
        endpoint_of(variables)
    assert "secret" not in str(caught.value)


def _client(monkeypatch: pytest.MonkeyPatch, options: StoreOptions | None = None, **variables: str) -> Oss2Client:
    for name in ("OSS_ENDPOINT", "OSS_REGION"):
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return Oss2Client(options=options)


def test_version_4_needs_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """An acceleration endpoint serves all of them; version 1 does without."""
    with pytest.raises(ConfigError, match=r"serves all of them.*OSS_REGION"):
        _client(monkeypatch, OSS_ENDPOINT=f"oss-accelerate-overseas.{OSS}")
    monkeypatch.setenv("OSS_ENDPOINT", "https://data.example.com")
    with pytest.raises(ConfigError, match="OSS_REGION"):
        Oss2Client()
    monkeypatch.setenv("OSS_SIGNATURE_VERSION", "v1")
    assert Oss2Client()._bucket("bkt").region is None


@pytest.mark.parametrize(
    ("variables", "options", "url"),
    [
        ({"OSS_REGION": "cn-a"}, StoreOptions(), f"https://bkt.oss-cn-a.{OSS}/k%2F1"),
        ({"OSS_REGION": "cn-a", "OSS_INTERNAL": "1"}, StoreOptions(), f"https://bkt.oss-cn-a-internal.{OSS}/k%2F1"),
        (
            {"OSS_REGION": "cn-a", "OSS_ENDPOINT": f"oss-accelerate.{OSS}"},
            StoreOptions(),
            f"https://bkt.oss-accelerate.{OSS}/k%2F1",
        ),
        (
            {"OSS_REGION": "cn-a", "OSS_ENDPOINT": "https://data.example.com", "OSS_CNAME": "1"},
            StoreOptions(),
            "https://data.example.com/k%2F1",
        ),
        ({"OSS_REGION": "cn-a", "OSS_ENDPOINT": "http://127.0.0.1:9"}, StoreOptions(), "http://127.0.0.1:9/bkt/k%2F1"),
        (
            {"OSS_REGION": "cn-a", "OSS_ENDPOINT": "http://minio.lab:9"},
            StoreOptions(addressing="path"),
            "http://minio.lab:9/bkt/k%2F1",
        ),
    ],
)
def test_urls(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], options: StoreOptions, url: str) -> None:
    """The bucket is a host name, nothing at all for a custom domain, or a path for an IP address and where somebody says so."""
    assert _client(monkeypatch, options, **variables)._bucket("bkt")._make_url("bkt", "k/1") == url


def test_proxies_and_authorities_are_those_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked up once; a password that ~/.netrc has for the host does not take the place of the signature."""
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:3128")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/ca.pem")
    client = _client(monkeypatch, OSS_REGION="cn-a")
    bucket = client._bucket("bkt")
    assert bucket.proxies["https"] == "http://proxy:3128"
    session = bucket.session._through_proxy().session
    assert (session.verify, session.trust_env) == ("/ca.pem", False)
    monkeypatch.setenv("no_proxy", OSS)
    assert not Oss2Client()._bucket("bkt").proxies.get("https")


# -- signatures ---------------------------------------------------------------------------------------------------


def _request(region: str | None = "cn-hangzhou") -> Any:
    return oss2.http.Request(
        "PUT",
        "http://127.0.0.1/bkt/k",
        headers={"Content-Type": "a/b", "x-oss-forbid-overwrite": "true", "x-oss-meta-ü": "ß", "Date": "x"},
        params={"uploadId": "A+/=", "partNumber": "7", "uploads": ""},
        region=region,
        product="oss",
    )


class _Given:
    name = "the test"
    is_cheap = True

    def __init__(self, keys: Keys) -> None:
        self.keys = keys

    def fetch(self) -> Keys:
        return self.keys


@pytest.mark.parametrize("token", ["", "a token"])
@pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")
def test_signatures_are_those_of_oss2(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """Whatever the key, the headers and the parameters; of both versions."""
    keys = Keys(access_key_id="id", secret="secret", token=token)
    credentials = OssCredentials([_Given(keys)])
    provider = oss2.credentials.StaticCredentialsProvider("id", "secret", token)
    now = 1_700_000_000.0
    key = "a/ü +&~*.bin"
    for ours, theirs in (
        (Signer(credentials, now=lambda: now), oss2.ProviderAuthV4(provider)),
        (SignerV1(credentials, now=lambda: now), oss2.ProviderAuth(provider)),
    ):
        expected, signed = _request(), _request()
        ours._sign_request(signed, "bkt", key)
        assert ours.used == keys

        class Fixed(oss2.auth.datetime):  # type: ignore[misc, name-defined, unused-ignore]
            @classmethod
            def utcnow(cls) -> Any:
                return cls.utcfromtimestamp(now)

        monkeypatch.setattr(oss2.auth, "datetime", Fixed)
        if "x-oss-date" in signed.headers and theirs.auth_version() == "v1":
            expected.headers["x-oss-date"] = signed.headers["x-oss-date"]
        theirs._sign_request(expected, "bkt", key)
        assert signed.headers["authorization"] == expected.headers["authorization"]


def test_the_key_of_a_day_is_derived_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew for other keys, and the next day."""
    made: list[bytes] = []
    real = hmac.new

    def counted(key: bytes, *rest: Any) -> Any:
        made.append(key)
        return real(key, *rest)

    monkeypatch.setattr("ckptmgr.backends.osssigning.hmac", SimpleNamespace(new=counted))
    given = _Given(Keys(access_key_id="id", secret="one"))
    clock = [1_700_000_000.0]
    signer = Signer(OssCredentials([given]), now=lambda: clock[0])

    def derivations() -> int:
        made.clear()
        signer._sign_request(_request(), "bkt", "k")
        return len(made) - 1

    assert [derivations(), derivations()] == [4, 0]
    given.keys = Keys(access_key_id="id", secret="two")
    assert [derivations(), derivations()] == [4, 0]
    clock[0] += 86_400
    assert [derivations(), derivations()] == [4, 0]


def test_works_with_version_1(oss: ServerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The older signature is accepted by the store, for endpoints without a region."""
    monkeypatch.delenv("OSS_REGION")
    monkeypatch.setenv("OSS_SIGNATURE_VERSION", "v1")
    backend = OSSBackend()
    backend.pipe_file(oss.at("k"), b"1", mode="create")
    assert oss.server.raw_get(oss.bucket, "k") == b"1"
    assert backend.find(oss.bucket) == [oss.at("k")]


def test_nothing_secret_gets_into_the_log(oss: ServerStore, caplog: pytest.LogCaptureFixture) -> None:
    """Not even at its most talkative, where oss2 would write all headers, tokens too."""
    assert isinstance(oss.server, OssServer)
    session = oss.server.app.sessions.begin(oss.server.identity("admin"))
    secrets = {
        "OSS_ACCESS_KEY_ID": session.access_key,
        "OSS_ACCESS_KEY_SECRET": session.secret_key,
        "OSS_SESSION_TOKEN": session.token,
    }
    for name, value in secrets.items():
        oss.setenv(name, value)
    with caplog.at_level(logging.DEBUG):
        backend = oss.plain()
        backend.pipe_file(oss.at("k"), b"1")
        assert backend.cat_file(oss.at("k")) == b"1"
        oss.server.app.sessions.end(session)
        with pytest.raises(AccessDeniedError, match="OSS_SESSION_TOKEN") as caught:
            backend.find(oss.bucket)
    texts = [caplog.text, str(caught.value), repr(caught.value), repr(backend), repr(vars(backend))]
    for secret in (session.secret_key, session.token):
        assert not any(secret in text for text in texts)


# -- over TLS -----------------------------------------------------------------------------------------------------


@pytest.fixture
def over_tls(oss: ServerStore, tmp_path: Path) -> Iterator[Certificates]:
    """The store at an https endpoint too, where the environment leads; nobody trusts it yet."""
    certificates = make_certificates(tmp_path)
    context = (str(certificates.certificate), str(certificates.key))
    server = make_server(
        "127.0.0.1", 0, oss.server.app, threaded=True, request_handler=QuietRequestHandler, ssl_context=context
    )
    thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.02))
    thread.start()
    oss.setenv("OSS_ENDPOINT", f"https://127.0.0.1:{server.server_address[1]}")
    yield certificates
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("is_directory", [False, True])
def test_over_tls(oss: ServerStore, over_tls: Certificates, tmp_path: Path, is_directory: bool) -> None:
    """Up, down and listed, with an authority of one's own: a file, or a directory of them."""
    bundle = over_tls.authority
    if is_directory:
        bundle = tmp_path / "authorities"
        bundle.mkdir()
        subprocess.run(["cp", str(over_tls.authority), str(bundle / "a.pem")], check=True)
        rehashed = subprocess.run(["openssl", "rehash", str(bundle)], capture_output=True, check=False)
        if rehashed.returncode != 0:
            pytest.skip("openssl cannot make a directory of certificates here")
    oss.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    backend = OSSBackend(multipart_threshold=1 << 20, part_bytes=1 << 20)
    path, data = tmp_path / "f", random.Random(2).randbytes(2_500_000)
    path.write_bytes(data)
    backend.put_file(str(path), oss.at("large"))
    backend.pipe_file(oss.at("small"), b"1")
    path.unlink()
    backend.get_file(oss.at("large"), str(path))
    assert path.read_bytes() == data
    assert backend.find(oss.bucket) == [oss.at("large"), oss.at("small")]


def test_authorities_that_cannot_be_read(oss: ServerStore, over_tls: Certificates, tmp_path: Path) -> None:
    """Named, not taken for a network in trouble."""
    oss.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "gone.pem"))
    with pytest.raises(ConfigError, match=r"gone\.pem.*REQUESTS_CA_BUNDLE"):
        OSSBackend().find(oss.bucket)


# -- through a proxy ----------------------------------------------------------------------------------------------


def test_through_a_proxy(oss: ServerStore, tmp_path: Any) -> None:
    """Where the environment names one, all goes through it; here it is the store itself."""
    oss.setenv("http_proxy", oss.server.url)
    oss.setenv("no_proxy", "elsewhere")
    oss.setenv("NO_PROXY", "elsewhere")
    oss.setenv("OSS_ENDPOINT", "http://store.invalid")
    backend = OSSBackend(store_options=StoreOptions(addressing="path"), multipart_threshold=1 << 20, part_bytes=1 << 20)
    data = random.Random(1).randbytes(2_500_000)
    path = tmp_path / "f"
    path.write_bytes(data)
    backend.put_file(str(path), oss.at("large"))
    backend.pipe_file(oss.at("small"), b"1")
    path.unlink()
    backend.get_file(oss.at("large"), str(path))
    assert path.read_bytes() == data
    assert backend.cat_file(oss.at("small")) == b"1"
    assert backend.find(oss.bucket) == [oss.at("large"), oss.at("small")]
    with oss.server.faults.injected(Fault(cut_body=1000)), pytest.raises(BackendTimeoutError):
        backend.cat_file(oss.at("large"))
    with oss.server.faults.injected(Fault(drop="before")), pytest.raises(BackendTimeoutError, match=r"store\.invalid"):
        backend.pipe_file(oss.at("small"), b"2")


def test_a_proxy_that_is_dead_is_named(oss: ServerStore) -> None:
    """Not the store, which may be well; and its password is not repeated."""
    oss.setenv("http_proxy", "http://user:topsecret@127.0.0.1:9")
    oss.setenv("no_proxy", "elsewhere")
    oss.setenv("NO_PROXY", "elsewhere")
    with pytest.raises(
        TransientBackendError, match=r"by the proxy http://…@127\.0\.0\.1:9 - check HTTP_PROXY"
    ) as caught:
        OSSBackend(store_options=StoreOptions(addressing="path")).find(oss.bucket)
    assert "topsecret" not in str(caught.value)


def test_a_header_with_a_line_break_is_refused(oss: ServerStore) -> None:
    """It would be another header."""
    backend = OSSBackend(store_options=StoreOptions(sse="KMS", sse_key="a\r\nx-oss-object-acl: public-read"))
    with pytest.raises(ConfigError, match="line break"):
        backend.pipe_file(oss.at("k"), b"1")
    assert oss.server.log == []


# -- what new objects are ------------------------------------------------------------------------------------------


@pytest.fixture
def with_options(oss: ServerStore) -> Callable[[StoreOptions], OSSBackend]:
    return lambda options: OSSBackend(store_options=options, multipart_threshold=2 << 20, part_bytes=1 << 20)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (StoreOptions(sse="AES256"), {"x-oss-server-side-encryption": "AES256"}),
        (
            StoreOptions(sse="KMS", sse_key="key-1", storage_class="IA"),
            {
                "x-oss-server-side-encryption": "KMS",
                "x-oss-server-side-encryption-key-id": "key-1",
                "x-oss-storage-class": "IA",
            },
        ),
        (StoreOptions(sse="aws:kms"), {"x-oss-server-side-encryption": "KMS"}),
        (StoreOptions(), {"x-oss-server-side-encryption": None, "x-oss-storage-class": "Standard"}),
    ],
)
def test_encryption_and_storage_class(
    oss: ServerStore,
    with_options: Callable[[StoreOptions], OSSBackend],
    tmp_path: Any,
    options: StoreOptions,
    expected: dict[str, str | None],
) -> None:
    """Files in one request, in parts, and copies; small records are encrypted too, and stay where everybody can read them."""
    backend = with_options(options)
    path = tmp_path / "f"
    for size, key in ((1_500_000, "one"), (2_500_000, "parts")):
        path.write_bytes(b"x" * size)
        backend.put_file(str(path), oss.at(key))
    backend.cp_file(oss.at("one"), oss.at("copy"))
    backend.pipe_file(oss.at("record"), b"{}")
    handle = oss2.Bucket(
        oss2.AuthV4(oss.server.identities[0].access_key, oss.server.identities[0].secret_key),
        oss.server.url,
        oss.bucket,
        region="cn-hangzhou",
    )
    for key in ("one", "parts", "copy"):
        headers = handle.head_object(key).headers
        assert {name: headers.get(name) for name in expected} == expected, key
        assert backend.cat_file(oss.at(key))[:1] == b"x"
    record = handle.head_object("record").headers
    assert record.get("x-oss-server-side-encryption") == expected["x-oss-server-side-encryption"]
    assert record["x-oss-storage-class"] == "Standard"


def test_encryption_that_oss_does_not_have(with_options: Callable[[StoreOptions], OSSBackend]) -> None:
    """Refused before anything is sent."""
    with pytest.raises(ConfigError, match=r"'aws:kms:dsse'.*CKPTMGR_SSE"):
        with_options(StoreOptions(sse="aws:kms:dsse"))


def test_a_store_that_is_said_to_have_no_create_only(
    oss: ServerStore, with_options: Callable[[StoreOptions], OSSBackend], tmp_path: Any
) -> None:
    """The condition is left out, and what is there is looked for; that is all one can do."""
    backend = with_options(StoreOptions(create_only="no"))
    assert not backend.capabilities.create_only
    path = tmp_path / "f"
    path.write_bytes(b"x" * 2_500_000)
    writes: tuple[Callable[[], None], ...] = (
        lambda: backend.pipe_file(oss.at("small"), b"1", mode="create"),
        lambda: backend.put_file(str(path), oss.at("large"), mode="create"),
    )
    for write in writes:
        write()
        with pytest.raises(ObjectExistsError):
            write()
    assert not any("x-oss-forbid-overwrite" in each.headers for each in oss.server.log)
