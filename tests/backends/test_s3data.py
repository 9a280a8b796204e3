"""The data calls without boto3: which buckets they are for, that they say what boto3 would, and what becomes of their answers."""

from __future__ import annotations

import hashlib
import os
import random
import re
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest
from botocore.awsrequest import AWSResponse

from ckptmgr.backends import s3answers, s3client, s3data
from ckptmgr.backends.body import FileBody
from ckptmgr.backends.http import BadAnswerError, HttpPool
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.s3 import S3Backend
from ckptmgr.backends.s3client import S3Client
from ckptmgr.backends.s3data import DataCalls, Target
from ckptmgr.backends.sigv4 import Keys
from ckptmgr.core.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectNotFoundError,
    PermanentBackendError,
    TransientBackendError,
)
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.memory_parts import crc64xz
from ckptmgr.testing.server_store import PART_BYTES, ServerStore

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
    assert data_of(S3Client()).target("create_multipart_upload", "bkt") is None
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


# --- what becomes of answers ----------------------------------------------------------------------------------------------


def by_boto3(seen: Any) -> bool:
    return "amz-sdk-invocation-id" in seen.headers


def test_data_goes_without_boto3(s3: ServerStore, tmp_path: Path) -> None:
    """All data calls; boto3 makes those that begin and end an upload. With `engine="boto3"` it makes all."""
    source = tmp_path / "f"
    source.write_bytes(os.urandom(PART_BYTES + 1))
    for options, others in ((StoreOptions(), {"POST"}), (StoreOptions(engine="boto3"), None)):
        backend = S3Backend(store_options=options, multipart_threshold=PART_BYTES, part_bytes=PART_BYTES)
        s3.server.log.clear()
        backend.pipe_file(s3.at("k"), b"1")
        backend.put_file(str(source), s3.at("big"))
        assert backend.cat_file(s3.at("big"), 1, 3) == source.read_bytes()[1:3]
        backend.get_file(s3.at("big"), str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == source.read_bytes()
        assert backend.find(s3.bucket) == [s3.at("big"), s3.at("k")]
        assert backend.info(s3.at("k"))["size"] == 1
        backend.rm_file(s3.at("k"))
        for seen in s3.server.log:
            assert by_boto3(seen) is (others is None or seen.method in others), seen


def test_a_bucket_that_is_elsewhere(s3: ServerStore) -> None:
    """boto3 goes where the store says; then the bucket is looked for once more, and after a second move it is boto3's."""
    backend = s3.plain()
    elsewhere = Fault(match=lambda seen: not by_boto3(seen), status=301, code="PermanentRedirect")
    for number, (fails, expected) in enumerate([(True, True), (False, False), (True, True), (False, True)]):
        fault = s3.server.faults.add(elsewhere) if fails else None
        s3.server.log.clear()
        if number == 0:
            # What boto3 finds there is not what is asked for: it has found the bucket all the same.
            with pytest.raises(ObjectNotFoundError):
                backend.cat_file(s3.at("none"))
            assert [by_boto3(seen) for seen in s3.server.log] == [False, True]
            continue
        backend.pipe_file(s3.at(f"k{number}"), b"%d" % number)
        assert fault is None or fault.hits == 1
        assert s3.server.raw_get(s3.bucket, f"k{number}") == b"%d" % number
        assert [by_boto3(seen) for seen in s3.server.log] == ([False, True] if fails else [expected])


class _LateClock:
    """The machine's clock, an hour slow."""

    strftime, gmtime, monotonic = staticmethod(time.strftime), staticmethod(time.gmtime), staticmethod(time.monotonic)

    @staticmethod
    def time() -> float:
        return time.time() - 3600


def test_a_wrong_clock(
    s3: ServerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are signed with the store's clock from the first refusal on, by ours and by boto3; it is said once."""

    def is_skewed(seen: Seen) -> bool:
        signed = time.mktime(time.strptime(seen.headers["x-amz-date"], "%Y%m%dT%H%M%SZ")) - time.timezone
        return abs(signed - time.time()) > 900

    for module in (s3client, s3data):
        monkeypatch.setattr(module, "time", _LateClock)
    fault = s3.server.faults.add(Fault(match=is_skewed, status=403, code="RequestTimeTooSkewed", times=None))
    source = tmp_path / "f"
    source.write_bytes(os.urandom(PART_BYTES + 1))
    backend = s3.plain()
    for number in range(2):
        backend.pipe_file(s3.at(f"k{number}"), b"1")
        backend.put_file(str(source), s3.at(f"big{number}"))
        assert backend.info(s3.at(f"big{number}"))["size"] == PART_BYTES + 1
    assert fault.hits == 1
    assert caplog.text.count("the store's; requests") == 1
    assert re.search(r"clock is (3599|3600) s behind", caplog.text)


def test_a_store_whose_own_clock_is_wrong(s3: ServerStore) -> None:
    """Refused although signed with the very time that it tells: an error, after one try."""
    fault = s3.server.faults.add(Fault(status=403, code="RequestTimeTooSkewed", times=None))
    with pytest.raises(PermanentBackendError, match="RequestTimeTooSkewed"):
        s3.plain().pipe_file(s3.at("k"), b"1")
    assert fault.hits == 1


def test_an_error_is_the_same_whoever_met_it(s3: ServerStore) -> None:
    """Class, message, hint and facts."""
    s3.server.raw_put(s3.bucket, "k", b"1")
    told = []
    for options in (StoreOptions(), StoreOptions(engine="boto3")):
        backend = S3Backend(store_options=options)
        for fault in (
            Fault(status=503, code="SlowDown", message="reduce your rate", retry_after_s=7),
            Fault(status=403, code="AccessDenied", message="Access Denied"),
            Fault(status=500, document=b"<html>no store</html>"),
            Fault(status=502, document=b""),
            Fault(status=404, code="NoSuchKey", message="The specified key does not exist."),
            Fault(status=412, code="PreconditionFailed", message="x"),
        ):
            s3.server.faults.add(fault)
            with pytest.raises(Exception) as caught:  # noqa: PT011
                backend.pipe_file(s3.at("k"), b"1", mode="create")
            told.append((type(caught.value), str(caught.value), vars(caught.value)))
    half = len(told) // 2
    assert told[:half] == told[half:]


def test_no_access_without_credentials(s3: ServerStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing credentials are an error of ours, before anything is sent."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(AccessDeniedError, match="AWS_ACCESS_KEY_ID"):
        s3.plain().cat_file(s3.at("k"))
    assert s3.server.log == []


@pytest.mark.parametrize(
    "document",
    [
        b"<html><body>log in first</body></html>",
        b"not even XML",
        b"",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
        b"<ListBucketResult><Contents><Key>k</Key></Contents></ListBucketResult>",
    ],
)
def test_a_listing_that_is_none(s3: ServerStore, document: bytes) -> None:
    """A captive portal's page, or half an answer, is never an empty listing (I7)."""
    s3.server.faults.add(Fault(method="GET", query="list-type", status=200, document=document))
    with pytest.raises(TransientBackendError):
        s3.plain().find(s3.bucket)


def test_a_write_that_is_answered_by_somebody_else(s3: ServerStore) -> None:
    """A 200 without an ETag is no store's."""
    s3.server.faults.add(Fault(method="PUT", status=200, document=b"welcome to this hotel"))
    with pytest.raises(TransientBackendError, match="ETag"):
        s3.plain().pipe_file(s3.at("k"), b"1")


def test_a_store_that_ignores_ranges(s3: ServerStore) -> None:
    """Its answer is all of the object, and not taken for the part that was asked for."""
    s3.server.raw_put(s3.bucket, "k", b"0123456789")
    s3.server.faults.add(Fault(method="GET", status=200, document=b"0123456789", times=None))
    with pytest.raises(TransientBackendError, match="bytes=2-4"):
        s3.plain().cat_file(s3.at("k"), 2, 5)


# --- listings -------------------------------------------------------------------------------------------------------------


def test_listings_are_read_as_boto3_reads_them(s3: ServerStore) -> None:
    """Keys with all that XML and URLs treat in a special way, sizes, ETags and times, over several pages."""
    source = random.Random(7)
    alphabet = " a+%/&<>'\"?#=;~検🚀\x7f"
    for _ in range(60):
        key = "d/" + "".join(source.choice(alphabet) for _ in range(1 + source.randrange(12))).strip("/") + "x"
        s3.server.raw_put(s3.bucket, key, b"x" * source.randrange(9))
    found = [S3Backend(store_options=StoreOptions(engine=engine), page_size=25) for engine in ("auto", "boto3")]
    listings = [
        (backend.find(s3.bucket, detail=True), backend.ls(s3.at("d")), backend.find(s3.at("d"), maxdepth=1))
        for backend in found
    ]
    assert len(listings[0][0]) > 50
    assert listings[0] == listings[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-11-30T01:02:03.000Z", 1796000523.0),
        ("2026-11-30T01:02:03Z", 1796000523.0),
        ("2026-11-30T01:02:03.25Z", 1796000523.25),
        ("2026-11-30T01:02:03.123456789Z", 1796000523.123456),
    ],
)
def test_times_of_listings(text: str, expected: float) -> None:
    """Stores write any number of digits."""
    assert s3answers._parse_time(text).timestamp() == expected
