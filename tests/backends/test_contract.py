"""Every backend keeps the contract of `ckptmgr.backends.base`."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite(
    "ckptmgr.testing.contract", "ckptmgr.testing.contract_store", "ckptmgr.testing.contract_writes"
)

from ckptmgr.backends.generic import open_generic
from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.retry import RetryingBackend
from ckptmgr.testing.contract import BackendContract, ContractStore, FilesRaw, ServerRaw
from ckptmgr.testing.faulty import FaultyBackend

if TYPE_CHECKING:
    from ckptmgr.testing.servers import MotoServer, OssServer, StoreServer, WeedServer

MIB = 1 << 20


class MemoryRaw:
    """The dictionary behind memory://."""

    def __init__(self) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        self._files = MemoryFileSystem.store

    def get(self, path: str) -> bytes:
        return bytes(self._files[path].getvalue())

    def put(self, path: str, data: bytes) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        MemoryFileSystem().makedirs(path.rpartition("/")[0], exist_ok=True)
        MemoryFileSystem().pipe_file(path, data)

    def keys(self, path: str) -> list[str]:
        return sorted(key for key in self._files if key.startswith(f"{path}/"))

    def delete(self, path: str) -> None:
        del self._files[path]


class TestMemory(BackendContract):
    @pytest.fixture
    def store(self) -> ContractStore:
        return ContractStore(make=lambda: open_generic("memory"), root=f"/root-{uuid.uuid4().hex}", raw=MemoryRaw())


class TestLocal(BackendContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ContractStore:
        return ContractStore(make=LocalBackend, root=str(tmp_path / "store"), raw=FilesRaw(), part_bytes=2 * MIB)


class TestWrappedLocal(BackendContract):
    """The retrying and the fault-injecting wrapper change nothing as long as nothing fails."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> ContractStore:
        return ContractStore(
            make=lambda: RetryingBackend(FaultyBackend(LocalBackend())),
            root=str(tmp_path / "store"),
            raw=FilesRaw(),
            part_bytes=2 * MIB,
        )


class TestMotoS3(BackendContract):
    @pytest.fixture
    def store(self, moto_server: MotoServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ContractStore:
        return _s3(moto_server, bucket_name, monkeypatch)


class TestWeedS3(BackendContract):
    @pytest.fixture
    def store(self, weed_server: WeedServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ContractStore:
        # SeaweedFS keeps its keys as file paths and turns a backslash into a slash.
        return replace(_s3(weed_server, bucket_name, monkeypatch), reserved_names=frozenset({"back\\slash"}))


@pytest.mark.slow
class TestMotoS3ByBoto3(BackendContract):
    """With every request made by boto3, as behind a proxy; without what takes long, and is as with the others."""

    test_more_than_a_page = None  # type: ignore[assignment]

    @pytest.fixture
    def store(self, moto_server: MotoServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ContractStore:
        return _s3(moto_server, bucket_name, monkeypatch, StoreOptions(engine="boto3"))


@pytest.mark.slow
class TestWeedS3ByBoto3(BackendContract):
    """The same on a server that checks signatures and checksums."""

    test_more_than_a_page = None  # type: ignore[assignment]
    test_create_race_has_one_winner = None  # type: ignore[assignment]

    @pytest.fixture
    def store(self, weed_server: WeedServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ContractStore:
        by_boto3 = _s3(weed_server, bucket_name, monkeypatch, StoreOptions(engine="boto3"))
        return replace(by_boto3, reserved_names=frozenset({"back\\slash"}))


class TestOss(BackendContract):
    @pytest.fixture
    def store(self, oss_server: OssServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch) -> ContractStore:
        from ckptmgr.backends.oss import OSSBackend

        _enter(oss_server, bucket_name, monkeypatch)
        return ContractStore(
            make=lambda: OSSBackend(multipart_threshold=MIB, part_bytes=MIB, page_size=500),
            root=f"{bucket_name}/root",
            raw=ServerRaw(oss_server),
            part_bytes=MIB,
            missing_bucket="no-such-bucket/key",
        )


def _s3(
    server: StoreServer, bucket: str, monkeypatch: pytest.MonkeyPatch, options: StoreOptions | None = None
) -> ContractStore:
    from ckptmgr.backends.s3 import S3Backend

    _enter(server, bucket, monkeypatch)
    return ContractStore(
        make=lambda: S3Backend(multipart_threshold=5 * MIB, part_bytes=5 * MIB, page_size=500, store_options=options),
        root=f"{bucket}/root",
        raw=ServerRaw(server),
        part_bytes=5 * MIB,
        missing_bucket="no-such-bucket/key",
    )


def _enter(server: StoreServer, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    server.create_bucket(bucket)
