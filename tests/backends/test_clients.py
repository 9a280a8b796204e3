"""How the S3 and OSS clients are configured, without a request."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.awsrequest import AWSResponse

from ckptmgr.backends.body import FileBody
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.ossclient import Oss2Client
from ckptmgr.backends.s3client import S3Client
from ckptmgr.core.errors import ConfigError
from ckptmgr.testing.memory_parts import crc64xz


def _url(client: S3Client) -> str:
    url = client._client().generate_presigned_url("get_object", Params={"Bucket": "bkt", "Key": "k"})
    return str(url.partition("?")[0])


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://127.0.0.1:9000", "http://127.0.0.1:9000/bkt/k"),
        ("http://minio:9000", "http://minio:9000/bkt/k"),
        ("https://s3.oss-cn-hangzhou.aliyuncs.com", "https://bkt.s3.oss-cn-hangzhou.aliyuncs.com/k"),
    ],
)
def test_urls(monkeypatch: pytest.MonkeyPatch, endpoint: str, url: str) -> None:
    """The bucket is where the endpoint expects it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    assert _url(S3Client()) == url


def test_amazon_itself_is_used_with_bucket_host_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an endpoint, requests go to the bucket's own host."""
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert re.fullmatch(r"https://bkt\.s3(\.eu-west-1)?\.amazonaws\.com/k", _url(S3Client()))


def test_the_service_specific_endpoint_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_ENDPOINT_URL_S3 goes over AWS_ENDPOINT_URL, as in every AWS tool."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    assert S3Client().endpoint == "http://127.0.0.1:2"


def test_the_users_own_configuration_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`~/.aws/config` may ask for virtual-hosted addressing of a named endpoint, and names profiles."""
    config = tmp_path / "config"
    config.write_text("[profile lab]\nregion = eu-north-1\ns3 =\n    addressing_style = virtual\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example.com")
    assert _url(S3Client()) == "http://bkt.store.example.com/k"
    monkeypatch.setenv("AWS_PROFILE", "none")
    with pytest.raises(ConfigError, match="none"):
        S3Client()._client()


def test_botocore_never_retries_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second try inside botocore would turn our own conditional write into a refusal."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "7")
    config = S3Client()._client().meta.config
    assert config.retries["total_max_attempts"] == 1
    assert config.request_checksum_calculation == "when_required"


def test_silence_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 22: 10 s to connect, 30 s without a byte; both shorter when asked for; the user's own options go over these."""
    for client, limits in (
        (S3Client(), (10, 30)),
        (S3Client(stall_s=2), (2, 2)),
        (S3Client({"read_timeout": 99}, stall_s=2), (2, 99)),
    ):
        config = client._client().meta.config
        assert (config.connect_timeout, config.read_timeout) == limits
    monkeypatch.setenv("OSS_ENDPOINT", "https://oss-cn-hangzhou.aliyuncs.com")
    assert Oss2Client()._bucket("bkt").timeout == (10, 30)
    assert Oss2Client(stall_s=2)._bucket("bkt").timeout == (2, 2)


class Answered:
    """Answers every request of a client with 200, before it is sent, and keeps it."""

    def __init__(self, client: S3Client) -> None:
        self.requests: list[Any] = []
        client._client().meta.events.register_last("before-send.s3", self._answer)

    def _answer(self, request: Any, **kwargs: Any) -> AWSResponse:
        self.requests.append(request)
        raw = SimpleNamespace(stream=lambda *arguments, **options: iter(()), read=lambda *arguments: b"")
        return AWSResponse(request.url, 200, {"ETag": '"e"'}, raw)

    def signed_as(self) -> str:
        return self.requests[-1].headers["X-Amz-Content-SHA256"].decode()  # type: ignore[no-any-return]


@pytest.fixture
def body(tmp_path: Path) -> Iterator[FileBody]:
    (tmp_path / "f").write_bytes(b"x" * (3 << 20))
    with SourceFile(tmp_path / "f") as source:
        yield FileBody(source, 0, source.size, crc=crc64xz)


def test_bodies_are_signed_where_nothing_else_protects_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: FileBody
) -> None:
    """Over TLS a body has a CRC and needs no SHA-256, which costs more than all else; in the clear it is signed, and where the user says so."""
    arguments = {"Bucket": "bkt", "Key": "k", "ChecksumCRC64NVME": "AAAAAAAAAAA="}
    sha256 = hashlib.sha256(b"x" * len(body)).hexdigest()
    for endpoint, expected in (("http://127.0.0.1:9", sha256), ("https://s3.example.com", "UNSIGNED-PAYLOAD")):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        client = S3Client(options=StoreOptions(engine="boto3"))
        answered = Answered(client)
        client.request("put_object", "bkt/k", Body=body, **arguments)
        assert answered.signed_as() == expected
    config = tmp_path / "config"
    config.write_text("[default]\ns3 =\n    payload_signing_enabled = true\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    client = S3Client(options=StoreOptions(engine="boto3"))
    answered = Answered(client)
    client.request("put_object", "bkt/k", Body=body, **arguments)
    assert answered.signed_as() == sha256


def test_a_body_is_read_in_large_blocks_and_sent_without_asking(
    monkeypatch: pytest.MonkeyPatch, body: FileBody
) -> None:
    """Signing reads it once, in blocks of 1 MiB, whatever signer botocore would take; there is no round trip for leave to send it, and it
    begins at its beginning when its credentials are renewed and it is sent again."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    sizes: list[int] = []
    read = body.read

    def counted(size: int | None = -1) -> bytes:
        block = read(size)
        sizes.append(len(block))
        return block

    monkeypatch.setattr(body, "read", counted)
    client = S3Client(options=StoreOptions(engine="boto3"))
    answered = Answered(client)
    for operation, more in (("put_object", {}), ("upload_part", {"UploadId": "u", "PartNumber": 1})):
        read(1000)
        sizes.clear()
        client.request(operation, "bkt/k", Bucket="bkt", Key="k", Body=body, **more)
        assert sizes == [1 << 20] * 3 + [0]
        assert "Expect" not in answered.requests[-1].headers
        assert answered.requests[-1].headers["Content-Length"] == str(len(body))
        assert body.tell() == 0


def test_a_child_process_gets_a_client_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets are not shared across a fork: another pid means another client."""
    client = S3Client()
    ours = client._client()
    assert client._client() is ours
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert client._client() is not ours
