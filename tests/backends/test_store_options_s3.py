"""What options and profiles make of the requests to an S3 store: seen at the store, and in what it keeps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.s3 import S3Backend
from ckptmgr.core.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectExistsError,
    PermanentBackendError,
    TransientBackendError,
)
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.faults import Fault

if TYPE_CHECKING:
    from ckptmgr.testing.servers import MotoServer
    from ckptmgr.testing.stores import Store

_CHUNKED = "aws-chunked encoding is not supported with the specified x-amz-content-sha256 value."


def _backend(options: StoreOptions, **more: Any) -> S3Backend:
    return S3Backend(store_options=options, **more)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of two parts, where parts have 5 MiB."""
    path = tmp_path / "file"
    path.write_bytes(b"w" * ((5 << 20) + 9))
    return path


def _sent_checksums(server: MotoServer) -> set[str]:
    return {name for entry in server.log for name in entry.headers if name.startswith("x-amz-checksum-")}


def test_no_checksum_headers(make_store: Callable[[str], Store], moto_server: MotoServer, file: Path) -> None:
    """Where a profile says that there are none, none is sent, on reads neither; without them nothing is lost but the store's own proof."""
    store: Any = make_store("moto")
    fs = _backend(StoreOptions(checksum="none"), multipart_threshold=5 << 20, part_bytes=5 << 20)
    path = f"{store.bucket}/k"
    fs.put_file(str(file), path)
    fs.pipe_file(f"{path}2", b"small", mode="create")
    fs.cp_file(path, f"{path}3")
    assert fs.stored_crc(path) is None
    assert fs.cat_file(f"{path}3") == file.read_bytes()
    assert fs.capabilities.stored_crc is None
    assert _sent_checksums(moto_server) == set()
    assert not any("aws-chunked" in entry.headers.get("content-encoding", "") for entry in moto_server.log)


def test_a_store_that_refuses_chunked_bodies(
    make_store: Callable[[str], Store], moto_server: MotoServer, file: Path
) -> None:
    """OSS's S3 endpoint answers `aws-chunked` with EC 0017-00000804: no upload has it, with nothing configured (fault row 35)."""
    store: Any = make_store("moto")
    refused = moto_server.faults.add(
        Fault(
            match=lambda seen: (
                "aws-chunked" in seen.headers.get("content-encoding", "") or "x-amz-trailer" in seen.headers
            ),
            status=400,
            code="InvalidArgument",
            message=_CHUNKED,
            times=None,
        )
    )
    for engine in ("auto", "boto3"):
        fs = _backend(StoreOptions(engine=engine), multipart_threshold=5 << 20, part_bytes=5 << 20)
        fs.put_file(str(file), f"{store.bucket}/{engine}")
        fs.pipe_file(f"{store.bucket}/{engine}-small", b"small", mode="create")
        assert store.server.raw_get(store.bucket, engine) == file.read_bytes()
    assert refused.hits == 0


def test_checksums_that_are_insisted_on(
    make_store: Callable[[str], Store], moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CKPTMGR_CHECKSUM=crc64nvme a store that refuses them is an error, and not used without; by default it is."""
    store: Any = make_store("moto")
    moto_server.faults.add(
        Fault(
            match=lambda seen: any(name.startswith("x-amz-checksum-") for name in seen.headers),
            status=400,
            code="InvalidArgument",
            times=None,
        )
    )
    _backend(StoreOptions()).pipe_file(f"{store.bucket}/k", b"x")
    assert store.server.raw_get(store.bucket, "k") == b"x"
    with pytest.raises(PermanentBackendError):
        _backend(StoreOptions(checksum="crc64nvme")).pipe_file(f"{store.bucket}/k2", b"x")
    assert store.server.raw_keys(store.bucket) == ["k"]


def test_create_only_is_not_relied_on(
    make_store: Callable[[str], Store], moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch, file: Path
) -> None:
    """Such a store is never sent a condition, which some refuse; what is there is still not overwritten; a run notes it without a probe."""
    store: Any = make_store("moto")
    moto_server.faults.add(
        Fault(match=lambda seen: "if-none-match" in seen.headers, status=501, code="NotImplemented", times=None)
    )
    monkeypatch.setenv("CKPTMGR_CREATE_ONLY", "no")
    fs, _ = open_store(store.url)
    path = f"{store.bucket}/k"
    fs.pipe_file(path, b"first", mode="create")
    with pytest.raises(ObjectExistsError):
        fs.pipe_file(path, b"second", mode="create")
    parted = _backend(StoreOptions(create_only="no"), multipart_threshold=5 << 20, part_bytes=5 << 20)
    with pytest.raises(ObjectExistsError):
        parted.put_file(str(file), path, mode="create")
    assert store.server.raw_get(store.bucket, "k") == b"first"
    assert store.server.raw_uploads(store.bucket) == {}
    assert not RunDirectory.open_or_create(f"{store.url}/run").record.create_only
    assert not [entry for entry in moto_server.log if ".probe-" in entry.key]


def test_encryption_and_storage_class(make_store: Callable[[str], Store], moto_server: MotoServer, file: Path) -> None:
    """Whole files, files in parts and copies are kept as asked; what is small is encrypted, and stays in the bucket's own class."""
    store: Any = make_store("moto")
    import boto3

    options = StoreOptions(sse="aws:kms", sse_key="key-of-the-test", storage_class="STANDARD_IA")
    bucket = store.bucket
    small = file.with_name("small")
    small.write_bytes(b"s" * (128 << 10))
    fs = _backend(options, multipart_threshold=5 << 20, part_bytes=5 << 20)
    fs.put_file(str(file), f"{bucket}/parts")
    fs.put_file(str(small), f"{bucket}/whole")
    fs.cp_file(f"{bucket}/whole", f"{bucket}/copy")
    fs.pipe_file(f"{bucket}/record", b"{}", mode="create")
    client = boto3.client("s3")
    for key in ("parts", "whole", "copy", "record"):
        head = client.head_object(Bucket=bucket, Key=key)
        assert (head["ServerSideEncryption"], head["SSEKMSKeyId"]) == ("aws:kms", "key-of-the-test"), key
        assert head.get("StorageClass") == (None if key == "record" else "STANDARD_IA"), key
    assert fs.cat_file(f"{bucket}/parts") == file.read_bytes()
    parts = [entry for entry in moto_server.log if "partNumber" in entry.query]
    assert parts
    assert not any("x-amz-server-side-encryption" in entry.headers for entry in parts)


def test_a_key_that_may_not_be_used(make_store: Callable[[str], Store], moto_server: MotoServer) -> None:
    """A refusal for the key's sake is permanent, and says what the store said."""
    store: Any = make_store("moto")
    denied = "User is not authorized to perform: kms:GenerateDataKey on the resource"
    moto_server.faults.add(Fault(method="PUT", status=403, code="AccessDenied", message=denied))
    with pytest.raises(AccessDeniedError, match="kms:GenerateDataKey"):
        _backend(StoreOptions(sse="aws:kms")).pipe_file(f"{store.bucket}/k", b"x")


def test_a_store_without_encryption(make_store: Callable[[str], Store], moto_server: MotoServer) -> None:
    """Such a store may call it its own fault: the option is named. What has nothing to do with it does not name it."""
    store: Any = make_store("moto")
    fs = _backend(StoreOptions(sse="aws:kms"))
    with (
        moto_server.faults.injected(Fault(method="PUT", status=500, code="InternalError", times=None)),
        pytest.raises(TransientBackendError, match="CKPTMGR_SSE=aws:kms was asked for"),
    ):
        fs.pipe_file(f"{store.bucket}/k", b"x")
    fs.pipe_file(f"{store.bucket}/k", b"x", mode="create")
    with pytest.raises(ObjectExistsError) as caught:
        fs.pipe_file(f"{store.bucket}/k", b"y", mode="create")
    assert "SSE" not in str(caught.value)


def test_a_proxy_that_is_dead_is_named(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the store, which may be well; and its password is not repeated."""
    store: Any = make_store("moto")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://user:topsecret@127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "elsewhere")
    with pytest.raises(TransientBackendError, match=r"proxy.*127\.0\.0\.1:9.*HTTP_PROXY") as caught:
        _backend(StoreOptions()).find(store.bucket)
    assert "topsecret" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["GLACIER", "DEEP_ARCHIVE", "Archive", "ColdArchive"])
def test_classes_that_cannot_be_read_back_are_refused(wrong: str) -> None:
    """What is in an archive cannot be resumed from."""
    with pytest.raises(ConfigError, match=wrong):
        StoreOptions(storage_class=wrong)
    with pytest.raises(ConfigError, match=wrong):
        StoreOptions.from_env({"CKPTMGR_STORAGE_CLASS": wrong})


def test_encryption_that_s3_does_not_have() -> None:
    """OSS's own is refused when the store is opened."""
    with pytest.raises(ConfigError, match="SM4"):
        open_store("s3://bucket/run", options=StoreOptions(sse="SM4"))


def test_addressing(make_store: Callable[[str], Store], monkeypatch: pytest.MonkeyPatch) -> None:
    """CKPTMGR_ADDRESSING and the profile of the endpoint decide where the bucket's name goes."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://store.example.com")
    for options, addressing in (
        (StoreOptions(), "auto"),
        (StoreOptions(addressing="virtual"), "virtual"),
        (StoreOptions(addressing="path"), "path"),
    ):
        assert _backend(options).connection().addressing == addressing
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://s3.oss-cn-hangzhou.aliyuncs.com")
    connection = _backend(StoreOptions()).connection()
    assert connection.addressing == "virtual"
    assert connection.profile is not None
    assert connection.profile.name == "oss-s3"


def test_without_awscrt(
    make_store: Callable[[str], Store], moto_server: MotoServer, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No CRC can be computed, so none is announced or sent; where the store does not compare the bytes with one, this machine does (I10)."""
    from ckptmgr.core import checksums

    store: Any = make_store("moto")
    monkeypatch.setattr(checksums, "_crc64nvme", lambda: None)
    options = StoreOptions(checksum="crc64nvme")
    fs = _backend(options, multipart_threshold=5 << 20, part_bytes=5 << 20)
    assert not fs._store_checks
    fs.put_file(str(file), f"{store.bucket}/k")
    assert store.server.raw_get(store.bucket, "k") == file.read_bytes()
    assert not {name for name in _sent_checksums(moto_server) if name.endswith(("crc64nvme", "algorithm"))}
