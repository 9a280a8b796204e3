"""The calls of oss2 that matter here, against the OSS stand-in, with both versions of its signature."""

from __future__ import annotations

import contextlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fastcrc
import pytest

from ckptmgr.testing.oss_dialect import crc64
from ckptmgr.testing.servers import OssServer

oss2 = pytest.importorskip("oss2", exc_type=ImportError)
from oss2 import exceptions, models  # type: ignore[import-untyped, unused-ignore]

BIG = os.urandom(350 * 1024)
FORBID = {"x-oss-forbid-overwrite": "true"}


def connect(server: OssServer, bucket: str, version: str = "v4", identity: str = "admin") -> Any:
    who = server.identity(identity)
    if version == "v1":
        return oss2.Bucket(oss2.Auth(who.access_key, who.secret_key), server.url, bucket, connect_timeout=60)
    auth = oss2.AuthV4(who.access_key, who.secret_key)
    return oss2.Bucket(auth, server.url, bucket, connect_timeout=60, region="cn-hangzhou")


@pytest.fixture(params=["v1", "v4"])
def bucket(request: pytest.FixtureRequest, oss_server: OssServer, bucket_name: str) -> Any:
    oss_server.create_bucket(bucket_name)
    return connect(oss_server, bucket_name, request.param)


class TestBuckets:
    def test_create(self, bucket: Any, oss_server: OssServer) -> None:
        other = oss2.Bucket(bucket.auth, bucket.endpoint, bucket.bucket_name + "-2", region=bucket.region)
        other.create_bucket()
        assert oss_server.raw_keys(other.bucket_name) == []

    def test_list(self, bucket: Any) -> None:
        service = oss2.Service(bucket.auth, bucket.endpoint, region=bucket.region)
        assert bucket.bucket_name in [each.name for each in service.list_buckets().buckets]

    def test_info(self, bucket: Any) -> None:
        assert bucket.get_bucket_info().name == bucket.bucket_name

    def test_missing_bucket_is_no_such_bucket(self, bucket: Any) -> None:
        missing = oss2.Bucket(bucket.auth, bucket.endpoint, "no-such-bucket-xyz", region=bucket.region)
        with pytest.raises(exceptions.NoSuchBucket):
            missing.put_object("x", b"y")
        with pytest.raises(exceptions.NoSuchBucket):
            missing.list_objects_v2()

    def test_versioning_and_list_of_versions(self, bucket: Any) -> None:
        config = models.BucketVersioningConfig()
        config.status = "Enabled"
        bucket.put_bucket_versioning(config)
        assert bucket.get_bucket_versioning().status == "Enabled"
        first, second = bucket.put_object("v/1", b"a"), bucket.put_object("v/1", b"b")
        assert first.versionid
        assert first.versionid != second.versionid
        assert len(bucket.list_object_versions(prefix="v/").versions) == 2
        assert bucket.get_object("v/1", params={"versionId": first.versionid}).read() == b"a"

    def test_lifecycle(self, bucket: Any) -> None:
        rule = models.LifecycleRule(
            "r1",
            "ckpt/",
            status=models.LifecycleRule.ENABLED,
            abort_multipart_upload=models.AbortMultipartUpload(days=3),
        )
        bucket.put_bucket_lifecycle(models.BucketLifecycle([rule]))
        read = bucket.get_bucket_lifecycle().rules[0]
        assert (read.prefix, read.abort_multipart_upload.days) == ("ckpt/", 3)


class TestPut:
    def test_reports_the_crc(self, bucket: Any, oss_server: OssServer) -> None:
        result = bucket.put_object("a/1.bin", BIG)
        assert result.crc == fastcrc.crc64.xz(BIG)
        assert result.etag
        assert oss_server.raw_get(bucket.bucket_name, "a/1.bin") == BIG

    def test_empty(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.put_object("a/empty", b"")
        assert oss_server.raw_get(bucket.bucket_name, "a/empty") == b""

    def test_metadata_and_type(self, bucket: Any) -> None:
        bucket.put_object("a/meta", b"x", headers={"x-oss-meta-step": "7", "Content-Type": "application/json"})
        head = bucket.head_object("a/meta")
        assert (head.headers["x-oss-meta-step"], head.headers["Content-Type"]) == ("7", "application/json")

    def test_generator_is_chunked(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.put_object("a/gen", (b"z" * 1000 for _ in range(4)))
        assert oss_server.raw_get(bucket.bucket_name, "a/gen") == b"z" * 4000

    def test_content_md5(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.put_object("md5/good", b"hello", headers={"Content-MD5": oss2.utils.content_md5(b"hello")})
        with pytest.raises(exceptions.OssError) as caught:
            bucket.put_object("md5/bad", b"hello", headers={"Content-MD5": oss2.utils.content_md5(b"nope")})
        assert (caught.value.status, caught.value.code) == (400, "InvalidDigest")
        assert oss_server.raw_keys(bucket.bucket_name) == ["md5/good"]

    def test_from_file(self, bucket: Any, oss_server: OssServer, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(BIG)
        bucket.put_object_from_file("a/file", str(tmp_path / "f"))
        assert oss_server.raw_get(bucket.bucket_name, "a/file") == BIG

    def test_keys_with_odd_characters(self, bucket: Any, oss_server: OssServer) -> None:
        key = "a/ü +%&模型=.bin"
        bucket.put_object(key, b"1")
        assert bucket.get_object(key).read() == b"1"
        assert [each.key for each in oss2.ObjectIteratorV2(bucket, prefix="a/")] == [key]
        assert oss_server.raw_keys(bucket.bucket_name) == [key]

    def test_copy(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.put_object("a/1.bin", BIG)
        bucket.copy_object(bucket.bucket_name, "a/1.bin", "a/copy")
        assert oss_server.raw_get(bucket.bucket_name, "a/copy") == BIG


class TestGet:
    @pytest.fixture(autouse=True)
    def _stored(self, bucket: Any) -> None:
        bucket.put_object("a/1.bin", BIG)

    def test_whole_with_crc(self, bucket: Any) -> None:
        result = bucket.get_object("a/1.bin")
        assert result.read() == BIG
        assert result.client_crc == result.server_crc == fastcrc.crc64.xz(BIG)

    def test_range(self, bucket: Any) -> None:
        result = bucket.get_object("a/1.bin", byte_range=(10, 19))
        assert (result.status, result.read()) == (206, BIG[10:20])
        assert result.headers["x-oss-hash-crc64ecma"] == crc64(BIG)

    def test_missing_is_no_such_key(self, bucket: Any) -> None:
        with pytest.raises(exceptions.NoSuchKey) as caught:
            bucket.get_object("nope").read()
        assert caught.value.status == 404
        assert caught.value.request_id

    def test_to_file(self, bucket: Any, tmp_path: Path) -> None:
        bucket.get_object_to_file("a/1.bin", str(tmp_path / "f"))
        assert (tmp_path / "f").read_bytes() == BIG

    def test_head(self, bucket: Any) -> None:
        head = bucket.head_object("a/1.bin")
        assert (head.content_length, head.server_crc) == (len(BIG), fastcrc.crc64.xz(BIG))
        assert head.last_modified
        assert head.headers["x-oss-object-type"] == "Normal"

    def test_head_missing_is_404_with_a_code(self, bucket: Any) -> None:
        with pytest.raises(exceptions.NotFound) as caught:
            bucket.head_object("nope")
        assert (caught.value.status, caught.value.code) == (404, "NoSuchKey")

    def test_exists(self, bucket: Any) -> None:
        assert bucket.object_exists("a/1.bin")
        assert not bucket.object_exists("nope")

    def test_object_meta(self, bucket: Any) -> None:
        assert bucket.get_object_meta("a/1.bin").content_length == len(BIG)

    def test_if_match_and_if_none_match(self, bucket: Any) -> None:
        etag = bucket.head_object("a/1.bin").etag
        assert bucket.get_object("a/1.bin", headers={"If-Match": etag}).read() == BIG
        with pytest.raises(exceptions.PreconditionFailed):
            bucket.get_object("a/1.bin", headers={"If-Match": '"x"'})
        with pytest.raises(exceptions.NotModified):
            bucket.get_object("a/1.bin", headers={"If-None-Match": etag})

    def test_signed_url(self, bucket: Any) -> None:
        import requests

        url = bucket.sign_url("GET", "a/1.bin", 60, slash_safe=True)
        assert requests.get(url, timeout=60).content == BIG
        assert requests.get(url.replace("1.bin", "2.bin"), timeout=60).status_code == 403


class TestList:
    @pytest.fixture(autouse=True)
    def _stored(self, bucket: Any, oss_server: OssServer) -> None:
        for i in range(5):
            oss_server.raw_put(bucket.bucket_name, f"l/{i}", b"x")
            oss_server.raw_put(bucket.bucket_name, f"l/d{i}/y", b"x")

    def test_v1_with_delimiter_and_pages(self, bucket: Any) -> None:
        page = bucket.list_objects("l/", delimiter="/", max_keys=3)
        assert len(page.object_list) + len(page.prefix_list) == 3
        assert page.is_truncated
        assert page.next_marker
        names = [each.key for each in oss2.ObjectIterator(bucket, prefix="l/", delimiter="/", max_keys=3)]
        assert names == [*(f"l/{i}" for i in range(5)), *(f"l/d{i}/" for i in range(5))]

    def test_v1_facts(self, bucket: Any) -> None:
        first = bucket.list_objects("l/").object_list[0]
        assert (first.size, first.storage_class) == (1, "Standard")
        assert first.etag
        assert first.last_modified > 0

    def test_v2_with_delimiter_and_pages(self, bucket: Any) -> None:
        page = bucket.list_objects_v2("l/", delimiter="/", max_keys=4)
        assert page.is_truncated
        assert page.next_continuation_token
        names = [each.key for each in oss2.ObjectIteratorV2(bucket, prefix="l/", delimiter="/", max_keys=3)]
        assert sorted(names) == [*(f"l/{i}" for i in range(5)), *(f"l/d{i}/" for i in range(5))]

    def test_v2_start_after(self, bucket: Any) -> None:
        assert bucket.list_objects_v2("l/", start_after="l/2").object_list[0].key == "l/3"

    def test_delete_is_idempotent(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.delete_object("l/0")
        bucket.delete_object("l/0")
        assert "l/0" not in oss_server.raw_keys(bucket.bucket_name)

    def test_batch_delete(self, bucket: Any, oss_server: OssServer) -> None:
        keys = [*(f"l/{i}" for i in range(5)), "l/ü &<模>"]
        oss_server.raw_put(bucket.bucket_name, keys[-1], b"")
        assert sorted(bucket.batch_delete_objects(keys).deleted_keys) == sorted(keys)
        assert oss_server.raw_keys(bucket.bucket_name) == [f"l/d{i}/y" for i in range(5)]

    def test_batch_delete_of_more_than_1000_is_refused(self, bucket: Any, oss_server: OssServer) -> None:
        with pytest.raises(exceptions.OssError) as caught:
            bucket.batch_delete_objects([f"l/{i}" for i in range(1001)])
        assert caught.value.status == 400
        assert "l/0" in oss_server.raw_keys(bucket.bucket_name)


class TestCreateOnly:
    def test_put_does_not_overwrite(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.put_object("fo/1", b"first", headers=FORBID)
        with pytest.raises(exceptions.OssError) as caught:
            bucket.put_object("fo/1", b"second", headers=FORBID)
        assert (caught.value.status, caught.value.code) == (409, "FileAlreadyExists")
        assert oss_server.raw_get(bucket.bucket_name, "fo/1") == b"first"

    def test_one_of_eight_wins(self, bucket: Any, oss_server: OssServer) -> None:
        keys, barrier = [f"fo/race{i}" for i in range(5)], threading.Barrier(8)

        def write(i: int) -> list[str]:
            own = oss2.Bucket(bucket.auth, bucket.endpoint, bucket.bucket_name, region=bucket.region)
            outcomes = []
            for key in keys:
                barrier.wait(60)
                try:
                    own.put_object(key, b"writer %d" % i, headers=FORBID)
                    outcomes.append("won")
                except exceptions.OssError as error:
                    outcomes.append(error.code)
            return outcomes

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(write, range(8)))
        for key, of_key in zip(keys, zip(*outcomes, strict=True), strict=True):
            assert sorted(of_key) == ["FileAlreadyExists"] * 7 + ["won"]
            assert oss_server.raw_get(bucket.bucket_name, key) == b"writer %d" % of_key.index("won")

    def test_looking_and_writing_are_one(
        self, bucket: Any, oss_server: OssServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two writers that may both look before either writes: the second one must not have looked yet."""
        call, both_looked = oss_server.app.core.call, threading.Barrier(2)

        def slow_look(method: str, *args: Any, **kwargs: Any) -> Any:
            reply = call(method, *args, **kwargs)
            if method == "HEAD":
                with contextlib.suppress(threading.BrokenBarrierError):
                    both_looked.wait(0.5)
            return reply

        def write(data: bytes) -> str:
            try:
                bucket.put_object("fo/1", data, headers=FORBID)
            except exceptions.OssError as error:
                return str(error.code)
            return "won"

        monkeypatch.setattr(oss_server.app.core, "call", slow_look)
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(write, [b"0", b"1"]))
        assert sorted(outcomes) == ["FileAlreadyExists", "won"]
        assert oss_server.raw_get(bucket.bucket_name, "fo/1") == b"%d" % outcomes.index("won")

    def test_copy_does_not_overwrite(self, bucket: Any, oss_server: OssServer) -> None:
        bucket.put_object("a", b"new")
        bucket.put_object("b", b"old")
        with pytest.raises(exceptions.OssError, match="FileAlreadyExists"):
            bucket.copy_object(bucket.bucket_name, "a", "b", headers=FORBID)
        assert oss_server.raw_get(bucket.bucket_name, "b") == b"old"

    @pytest.mark.parametrize("status", ["Enabled", "Suspended"])
    def test_has_no_effect_on_a_versioned_bucket(self, bucket: Any, oss_server: OssServer, status: str) -> None:
        config = models.BucketVersioningConfig()
        config.status = status
        bucket.put_bucket_versioning(config)
        bucket.put_object("fo/1", b"first", headers=FORBID)
        bucket.put_object("fo/1", b"second", headers=FORBID)
        assert oss_server.raw_get(bucket.bucket_name, "fo/1") == b"second"


class TestSpecial:
    def test_append(self, bucket: Any, oss_server: OssServer) -> None:
        result = bucket.append_object("ap/1", 0, b"hello ")
        assert result.next_position == 6
        result = bucket.append_object("ap/1", result.next_position, b"world", init_crc=result.crc)
        assert result.next_position == 11
        assert oss_server.raw_get(bucket.bucket_name, "ap/1") == b"hello world"
        assert bucket.head_object("ap/1").headers["x-oss-object-type"] == "Appendable"
        with pytest.raises(exceptions.PositionNotEqualToLength) as caught:
            bucket.append_object("ap/1", 3, b"bad")
        assert caught.value.next_position == 11

    def test_append_to_a_normal_object_is_refused(self, bucket: Any) -> None:
        bucket.put_object("a", b"x")
        with pytest.raises(exceptions.ObjectNotAppendable):
            bucket.append_object("a", 1, b"y")

    def test_tagging(self, bucket: Any) -> None:
        bucket.put_object("a", b"x")
        tagging = models.Tagging()
        tagging.tag_set.add("keep", "best")
        bucket.put_object_tagging("a", tagging)
        assert bucket.get_object_tagging("a").tag_set.tagging_rule == {"keep": "best"}

    def test_symlink(self, bucket: Any) -> None:
        bucket.put_symlink("a/1.bin", "latest")
        assert bucket.get_symlink("latest").target_key == "a/1.bin"
