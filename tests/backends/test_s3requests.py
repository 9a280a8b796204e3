"""The data calls without boto3: which buckets they are for, and that they say what boto3 would."""

from __future__ import annotations

import contextlib
import hashlib
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.awsrequest import AWSResponse

from ckptmgr.backends.body import FileBody
from ckptmgr.backends.http import BadAnswerError, HttpPool
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.s3client import S3Client
from ckptmgr.backends.s3data import DataCalls, Target
from ckptmgr.backends.sigv4 import Keys
from ckptmgr.core.errors import (
    ConfigError,
    TransientBackendError,
)
from ckptmgr.testing.memory_parts import crc64xz

# Each test has clients of its own, and botocore reads its models anew for each.
pytestmark = pytest.mark.usefixtures("_s3_models_parsed_once")

CRC = "AAAAAAAAAAA="


def data_of(client: S3Client) -> DataCalls:
    data = client._open()._data
    assert data is not None
    return data


def target_of(bucket: str = "bkt", client: S3Client | None = None) -> Target | None:
    return data_of(client or S3Client()).target("get_object", bucket)


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Points at Amazon itself, with so many settings of `~/.aws/config`; nothing is sent."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION"):
        monkeypatch.setenv(name, "eu-west-1")

    def configure(*lines: str) -> None:
        path = Path(os.environ["AWS_CONFIG_FILE"])
        monkeypatch.setenv("AWS_CONFIG_FILE", str(path.with_name("of-this-test")))
        path.with_name("of-this-test").write_text("\n".join(("[default]", *lines)))

    return configure


# --- where buckets are ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "bucket", "host", "prefix"),
    [
        ((), "bkt", "bkt.s3.eu-west-1.amazonaws.com", ""),
        ((), "with.dots", "s3.eu-west-1.amazonaws.com", "/with.dots"),
        ((), "point-s3alias", "point-s3alias.s3.eu-west-1.amazonaws.com", ""),
        (("use_dualstack_endpoint = true",), "bkt", "bkt.s3.dualstack.eu-west-1.amazonaws.com", ""),
        (("use_fips_endpoint = true",), "bkt", "bkt.s3-fips.eu-west-1.amazonaws.com", ""),
        (("s3 =", "    addressing_style = path"), "bkt", "s3.eu-west-1.amazonaws.com", "/bkt"),
        (("s3 =", "    use_accelerate_endpoint = true"), "bkt", "bkt.s3-accelerate.amazonaws.com", ""),
        (("endpoint_url = https://store.example:8443/below",), "bkt", "store.example:8443", "/below/bkt"),
    ],
)
def test_botocore_says_where_a_bucket_is(
    amazon: Callable[..., None], lines: tuple[str, ...], bucket: str, host: str, prefix: str
) -> None:
    """Endpoints, addressing, dual stack and regions are the user's configuration as botocore reads it."""
    amazon(*lines)
    target = target_of(bucket)
    assert target is not None
    assert (target.host, target.prefix) == (host, prefix)
    signed = target.signer.sign("GET", "/", "", {"host": host}, "x", Keys("a", "b"), 0)
    assert "/eu-west-1/s3/aws4_request" in signed["authorization"]


@pytest.mark.parametrize("bucket", ["directory--euw1-az1--x-s3", "arn:aws:s3:eu-west-1:123456789012:accesspoint"])
def test_what_is_boto3s(amazon: Callable[..., None], bucket: str) -> None:
    """Buckets with sessions or signatures of their own."""
    assert target_of(bucket) is None


def test_configured_out(amazon: Callable[..., None]) -> None:
    """Unsigned requests, certificates of clients, proxies in the configuration, and whoever asks for boto3."""
    from botocore import UNSIGNED

    for config in (
        {"signature_version": UNSIGNED},
        {"signature_version": "s3"},
        {"client_cert": "some.pem"},
        {"proxies": {"https": "http://proxy.example:3128"}},
    ):
        assert target_of(client=S3Client(config)) is None
    assert S3Client(options=StoreOptions(engine="boto3"))._open()._data is None
    assert data_of(S3Client()).target("delete_objects", "bkt") is None
    assert target_of() is not None


@pytest.mark.parametrize(
    ("variable", "value", "no_proxy", "is_ours"),
    [
        ("HTTPS_PROXY", "http://proxy.example:3128", "", False),
        ("HTTPS_PROXY", "http://proxy.example:3128", "amazonaws.com", True),
        ("HTTP_PROXY", "http://proxy.example:3128", "", True),
    ],
)
def test_proxies_of_the_environment(
    amazon: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    no_proxy: str,
    is_ours: bool,
) -> None:
    """Where a proxy applies to the endpoint, boto3 speaks to it."""
    for name in (variable, variable.lower()):
        monkeypatch.setenv(name, value)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, no_proxy)
    assert (target_of() is not None) is is_ours


def test_trusted_certificates(amazon: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same file as botocore's: the user's, requests', or the one that comes with it."""
    from botocore.httpsession import get_cert_path

    for name in ("REQUESTS_CA_BUNDLE", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    default = get_cert_path(True)
    copies = [tmp_path / name for name in ("configured.pem", "of-requests.pem", "of-aws.pem")]
    for copy in copies:
        copy.write_bytes(Path(default).read_bytes())
    loaded: list[str] = []
    load = ssl.SSLContext.load_verify_locations

    def note(context: ssl.SSLContext, path: str) -> None:
        loaded.append(path)
        load(context, path)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", note)

    def check(expected: str | Path) -> None:
        client = S3Client()
        loaded.clear()
        assert target_of(client=client) is not None
        verify = client._client()._endpoint.http_session._verify
        assert loaded[-1] == str(expected) == (default if verify is True else verify)

    check(default)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(copies[1]))
    check(copies[1])
    amazon(f"ca_bundle = {copies[0]}")
    check(copies[0])
    monkeypatch.setenv("AWS_CA_BUNDLE", str(copies[2]))
    check(copies[2])


# --- what is said ---------------------------------------------------------------------------------------------------------


class Sent:
    """Requests that a client would have sent, through boto3 or by ours, as (method, URL, query, headers)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.last: tuple[str, str, list[tuple[str, str]], dict[str, str]] | None = None

        def keep(pool: Any, head: bytes, body: Any = None, *, is_head: bool = False) -> Any:
            first, *lines = head.decode("latin-1").rstrip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            method, path, _ = first.split(" ")
            self._note(method, f"http://{headers['host']}{path}", headers)
            if body is not None and not isinstance(body, bytes):
                view = memoryview(bytearray(1 << 20))
                while body.readinto(view):
                    pass
            raise BadAnswerError("not sent")

        monkeypatch.setattr(HttpPool, "request", keep)

    def watch(self, client: S3Client) -> None:
        def answer(request: Any, **kwargs: Any) -> AWSResponse:
            headers = {k: v.decode() if isinstance(v, bytes) else str(v) for k, v in request.headers.items()}
            self._note(request.method, request.url, headers)
            raw = SimpleNamespace(stream=lambda *arguments, **options: iter(()), read=lambda *arguments: b"")
            return AWSResponse(request.url, 200, {"ETag": '"e"'}, raw)

        client._client().meta.events.register_last("before-send.s3", answer)

    def _note(self, method: str, url: str, headers: dict[str, str]) -> None:
        parts = urlsplit(url)
        query = sorted(parse_qsl(parts.query, keep_blank_values=True))
        told = {
            name.lower(): value
            for name, value in headers.items()
            if name.lower().startswith(("x-amz-", "if-", "range", "content-"))
        }
        for name in ("x-amz-date", "content-type"):
            told.pop(name, None)
        self.last = (method, parts.path, query, told)


DATA = b"x" * 70_000
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "put": ("put_object", {"Body": DATA, "ChecksumCRC64NVME": CRC, "IfNoneMatch": "*"}),
    "put kept as": (
        "put_object",
        {
            "Body": DATA,
            "ServerSideEncryption": "aws:kms",
            "SSEKMSKeyId": "arn:aws:kms:eu-west-1:1:key/2",
            "StorageClass": "STANDARD_IA",
        },
    ),
    "put nothing": ("put_object", {"Body": b"", "ChecksumCRC64NVME": CRC}),
    "part": ("upload_part", {"Body": DATA, "UploadId": "u+/=~2", "PartNumber": 7, "ChecksumCRC64NVME": CRC}),
    "begin": ("create_multipart_upload", {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}),
    "begin kept as": ("create_multipart_upload", {"ServerSideEncryption": "AES256", "StorageClass": "STANDARD_IA"}),
    "end": (
        "complete_multipart_upload",
        {
            "UploadId": "u+/=~2",
            "MultipartUpload": {
                "Parts": [{"PartNumber": n, "ETag": '"<&>"', "ChecksumCRC64NVME": CRC} for n in (1, 2)]
            },
            "ChecksumCRC64NVME": CRC,
            "ChecksumType": "FULL_OBJECT",
            "IfNoneMatch": "*",
        },
    ),
    "end of a plain one": (
        "complete_multipart_upload",
        {"UploadId": "u", "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": '"1"'}]}},
    ),
    "get": ("get_object", {}),
    "range": ("get_object", {"Range": "bytes=3-9", "IfMatch": '"etag-2"'}),
    "head": ("head_object", {"ChecksumMode": "ENABLED"}),
    "delete": ("delete_object", {}),
}


@pytest.mark.parametrize(("style", "sign_payload"), [("path", "auto"), ("virtual", "always")])
def test_requests_are_those_of_boto3(monkeypatch: pytest.MonkeyPatch, style: Any, sign_payload: Any) -> None:
    """Method, path, query and every header that means something, for odd keys too."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    sent = Sent(monkeypatch)
    options = StoreOptions(sign_payload=sign_payload, addressing=style)
    ours, boto3s = S3Client(options=options), S3Client(options=StoreOptions(engine="boto3", addressing=style))
    sent.watch(boto3s)
    for name, (operation, arguments) in REQUESTS.items():
        for key in ("plain", "a//b", " s p ", "per%20cent+plus", "検/🚀", "q?&=#;", "k" * 1000):
            with pytest.raises(TransientBackendError, match="not sent"):
                ours.request(operation, "bkt/k", Bucket="bkt", Key=key, **arguments)
            own, sent.last = sent.last, None
            with contextlib.suppress(TransientBackendError):  # what `Sent` answers is no answer to some
                boto3s.request(operation, "bkt/k", Bucket="bkt", Key=key, **arguments)
            assert own == sent.last, name


def test_listings_are_those_of_boto3(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all that a listing may be asked for."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example:9000")
    sent = Sent(monkeypatch)
    ours, boto3s = S3Client(), S3Client(options=StoreOptions(engine="boto3"))
    sent.watch(boto3s)
    for more in ({"Prefix": "", "Delimiter": "", "MaxKeys": 1}, {"Prefix": "a b/検+", "ContinuationToken": "1/+=="}):
        with pytest.raises(TransientBackendError, match="not sent"):
            ours.request("list_objects_v2", "bkt/", Bucket="bkt", **more)
        own, sent.last = sent.last, None
        with pytest.raises(TransientBackendError, match="not a store"):  # what `Sent` answers is no listing
            boto3s.request("list_objects_v2", "bkt/", Bucket="bkt", **more)
        assert own == sent.last


SIGNED = hashlib.sha256(DATA).hexdigest()
UNSIGNED = "UNSIGNED-PAYLOAD"


@pytest.mark.parametrize(
    ("endpoint", "asked", "crc", "users", "expected"),
    [
        ("http://127.0.0.1:9", "auto", CRC, None, UNSIGNED),
        ("http://127.0.0.1:9", "auto", None, None, SIGNED),
        ("http://127.0.0.1:9", "always", CRC, None, SIGNED),
        ("http://[::1]:9", "auto", CRC, None, UNSIGNED),
        ("http://localhost:9", "auto", CRC, None, UNSIGNED),
        ("http://10.1.2.3:9", "auto", CRC, None, SIGNED),
        ("http://10.1.2.3:9", "never", CRC, None, UNSIGNED),
        ("http://10.1.2.3:9", "never", None, None, SIGNED),
        ("https://store.example", "auto", CRC, None, UNSIGNED),
        ("https://store.example", "auto", None, None, SIGNED),
        ("https://store.example", "always", CRC, None, SIGNED),
        ("https://store.example", "auto", CRC, "true", SIGNED),
        ("http://10.1.2.3:9", "auto", CRC, "false", UNSIGNED),
    ],
)
def test_bodies_are_signed_where_nothing_else_protects_them(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    endpoint: str,
    asked: Any,
    crc: str | None,
    users: str | None,
    expected: str,
) -> None:
    """Not over TLS and within this machine, if a CRC goes along; what the user's own configuration says goes over it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    if users is not None:
        (tmp_path / "config").write_text(f"[default]\ns3 =\n    payload_signing_enabled = {users}\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    (tmp_path / "f").write_bytes(DATA)
    sent = Sent(monkeypatch)
    client = S3Client(options=StoreOptions(sign_payload=asked))
    more = {} if crc is None else {"ChecksumCRC64NVME": crc}
    with SourceFile(tmp_path / "f") as source:
        for body in (DATA, FileBody(source, 0, len(DATA), crc=crc64xz)):
            with pytest.raises(TransientBackendError, match="not sent"):
                client.request("put_object", "bkt/k", Bucket="bkt", Key="k", Body=body, **more)
            assert isinstance(body, bytes) or body.sent == len(DATA)
            assert sent.last is not None
            assert sent.last[3]["x-amz-content-sha256"] == expected


def test_no_header_of_a_users_making(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line break in a value is refused, not sent; so is what no header can hold. What it was is not repeated: it may be a token."""
    sent = Sent(monkeypatch)
    for value in ("a\r\nx-evil: 1", "a\nb", "a\rb", "schlüssel"):
        with pytest.raises(ConfigError, match="kms-key-id: no value for a header"):
            S3Client().request("put_object", "bkt/k", Bucket="bkt", Key="k", Body=b"", SSEKMSKeyId=value)
    monkeypatch.setenv("AWS_SESSION_TOKEN", "secret\n")
    with pytest.raises(ConfigError, match="x-amz-security-token") as caught:
        S3Client().request("get_object", "bkt/k", Bucket="bkt", Key="k")
    assert "secret" not in str(caught.value)
    assert sent.last is None
