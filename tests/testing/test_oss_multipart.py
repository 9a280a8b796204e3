"""Multipart and resumable calls of oss2 against the OSS stand-in, with both versions of its signature."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fastcrc
import pytest

from ckptmgr.testing.servers import OssServer

oss2 = pytest.importorskip("oss2", exc_type=ImportError)
from oss2 import exceptions, models  # type: ignore[import-untyped, unused-ignore]


@pytest.fixture(params=["v1", "v4"])
def bucket(request: pytest.FixtureRequest, oss_server: OssServer, bucket_name: str) -> Any:
    oss_server.create_bucket(bucket_name)
    who = oss_server.identity("admin")
    auth = (oss2.Auth if request.param == "v1" else oss2.AuthV4)(who.access_key, who.secret_key)
    return oss2.Bucket(auth, oss_server.url, bucket_name, connect_timeout=60, region="cn-hangzhou")


def test_upload_list_and_complete(bucket: Any, oss_server: OssServer) -> None:
    upload = bucket.init_multipart_upload("m/1").upload_id
    data = [os.urandom(120 * 1024), os.urandom(110 * 1024), b"tail"]
    parts = []
    for number, piece in enumerate(data, 1):
        result = bucket.upload_part("m/1", upload, number, piece)
        assert result.crc == fastcrc.crc64.xz(piece)
        parts.append(models.PartInfo(number, result.etag, size=len(piece), part_crc=result.crc))
    assert [part.part_number for part in bucket.list_parts("m/1", upload).parts] == [1, 2, 3]
    assert [each.upload_id for each in bucket.list_multipart_uploads(prefix="m/").upload_list] == [upload]
    assert oss_server.raw_uploads(bucket.bucket_name) == {upload: "m/1"}

    result = bucket.complete_multipart_upload("m/1", upload, parts)
    assert result.crc == fastcrc.crc64.xz(b"".join(data))
    assert result.etag
    assert oss_server.raw_get(bucket.bucket_name, "m/1") == b"".join(data)
    assert bucket.head_object("m/1").headers["x-oss-object-type"] == "Multipart"
    assert oss_server.raw_uploads(bucket.bucket_name) == {}


def test_complete_does_not_overwrite_when_forbidden(bucket: Any, oss_server: OssServer) -> None:
    bucket.put_object("m/1", b"old")
    upload = bucket.init_multipart_upload("m/1").upload_id
    part = models.PartInfo(1, bucket.upload_part("m/1", upload, 1, b"new").etag)
    with pytest.raises(exceptions.OssError, match="FileAlreadyExists"):
        bucket.complete_multipart_upload("m/1", upload, [part], headers={"x-oss-forbid-overwrite": "true"})
    bucket.abort_multipart_upload("m/1", upload)
    assert oss_server.raw_get(bucket.bucket_name, "m/1") == b"old"


def test_a_part_after_abort_is_no_such_upload(bucket: Any) -> None:
    upload = bucket.init_multipart_upload("m/1").upload_id
    bucket.upload_part("m/1", upload, 1, b"q")
    bucket.abort_multipart_upload("m/1", upload)
    with pytest.raises(exceptions.NoSuchUpload):
        bucket.upload_part("m/1", upload, 2, b"q")


def test_part_copy(bucket: Any, oss_server: OssServer) -> None:
    big = os.urandom(200 * 1024)
    bucket.put_object("a", big)
    upload = bucket.init_multipart_upload("m/c").upload_id
    result = bucket.upload_part_copy(bucket.bucket_name, "a", (0, 150 * 1024 - 1), "m/c", upload, 1)
    bucket.complete_multipart_upload("m/c", upload, [models.PartInfo(1, result.etag)])
    assert oss_server.raw_get(bucket.bucket_name, "m/c") == big[: 150 * 1024]


@pytest.mark.parametrize(("size", "is_taken"), [(100 * 1024 - 1, False), (100 * 1024, True)])
def test_parts_but_the_last_have_100_kib(bucket: Any, oss_server: OssServer, size: int, is_taken: bool) -> None:
    upload = bucket.init_multipart_upload("m/small").upload_id
    pieces = [b"x" * size, b"y"]
    parts = [
        models.PartInfo(number, bucket.upload_part("m/small", upload, number, piece).etag)
        for number, piece in enumerate(pieces, 1)
    ]
    if is_taken:
        bucket.complete_multipart_upload("m/small", upload, parts)
    else:
        with pytest.raises(exceptions.OssError, match="EntityTooSmall"):
            bucket.complete_multipart_upload("m/small", upload, parts)
    assert oss_server.raw_keys(bucket.bucket_name) == (["m/small"] if is_taken else [])


def test_resumable_upload_with_three_threads(bucket: Any, oss_server: OssServer, tmp_path: Path) -> None:
    data = os.urandom(1024 * 1024 + 77)
    (tmp_path / "f").write_bytes(data)
    _resumable_upload(bucket, tmp_path, num_threads=3)
    assert oss_server.raw_get(bucket.bucket_name, "r/1") == data


def test_resumable_upload_goes_on_where_it_failed(
    bucket: Any, oss_server: OssServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try loses its fifth part; the second one sends the last four of eight."""
    data = os.urandom(1024 * 1024)
    (tmp_path / "f").write_bytes(data)
    upload_part, calls = oss2.Bucket.upload_part, list[int]()

    def flaky(self: Any, key: str, upload_id: str, part_number: int, *args: Any, **kwargs: Any) -> Any:
        calls.append(part_number)
        if len(calls) == 5:
            raise exceptions.RequestError(OSError("boom"))
        return upload_part(self, key, upload_id, part_number, *args, **kwargs)

    monkeypatch.setattr(oss2.Bucket, "upload_part", flaky)
    with pytest.raises(exceptions.RequestError):
        _resumable_upload(bucket, tmp_path, num_threads=1)
    _resumable_upload(bucket, tmp_path, num_threads=1)
    assert calls == [1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert oss_server.raw_get(bucket.bucket_name, "r/1") == data


def test_resumable_download(bucket: Any, oss_server: OssServer, tmp_path: Path) -> None:
    data = os.urandom(1024 * 1024 + 77)
    oss_server.raw_put(bucket.bucket_name, "r/1", data)
    oss2.resumable_download(
        bucket,
        "r/1",
        str(tmp_path / "o"),
        store=oss2.ResumableDownloadStore(root=str(tmp_path)),
        multiget_threshold=100 * 1024,
        part_size=200 * 1024,
        num_threads=2,
    )
    assert (tmp_path / "o").read_bytes() == data


def _resumable_upload(bucket: Any, directory: Path, *, num_threads: int) -> None:
    oss2.resumable_upload(
        bucket,
        "r/1",
        str(directory / "f"),
        store=oss2.ResumableStore(root=str(directory)),
        multipart_threshold=100 * 1024,
        part_size=128 * 1024,
        num_threads=num_threads,
    )
