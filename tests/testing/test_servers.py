"""The S3 test servers: what SeaweedFS refuses by itself, moto must refuse too; and all servers from the command line."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from ckptmgr.testing.servers import MotoServer, StoreServer, WeedServer

boto3 = pytest.importorskip("boto3", exc_type=ImportError)
from botocore.config import Config
from botocore.exceptions import ClientError

DEADLINE_S = 60
PART = 5 * 1024 * 1024
CRC64NVME_OF_DIGITS = base64.b64encode(0xAE8B14860A799888.to_bytes(8, "big")).decode()


def connect(server: StoreServer, *, identity: str = "admin", secret: str | None = None, **config: Any) -> Any:
    who = server.identity(identity)
    return boto3.client(
        "s3",
        endpoint_url=server.url,
        aws_access_key_id=who.access_key,
        aws_secret_access_key=secret or who.secret_key,
        config=Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}, **config),
    )


def refusal(call: Any, **arguments: Any) -> tuple[int, str]:
    """Status and code of the refusal that the call must end in."""
    with pytest.raises(ClientError) as caught:
        call(**arguments)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


@pytest.fixture(params=["moto", "weed"])
def server(request: pytest.FixtureRequest, bucket_name: str) -> StoreServer:
    server: StoreServer = request.getfixturevalue(f"{request.param}_server")
    server.create_bucket(bucket_name)
    return server


@pytest.fixture
def s3(server: StoreServer) -> Iterator[Any]:
    client = connect(server)
    yield client
    client.close()


class TestRawAccess:
    def test_round_trip(self, server: StoreServer, bucket_name: str) -> None:
        server.create_bucket(bucket_name)
        for key in ("b/2", "a/ü +&.bin", "b/10"):
            server.raw_put(bucket_name, key, key.encode())
        assert server.raw_keys(bucket_name) == ["a/ü +&.bin", "b/10", "b/2"]
        assert server.raw_keys(bucket_name, "b/") == ["b/10", "b/2"]
        assert server.raw_get(bucket_name, "a/ü +&.bin") == "a/ü +&.bin".encode()
        server.raw_delete(bucket_name, "b/2")
        server.raw_delete(bucket_name, "b/2")
        assert server.raw_keys(bucket_name, "b/") == ["b/10"]
        with pytest.raises(KeyError):
            server.raw_get(bucket_name, "b/2")

    def test_unfinished_uploads_are_seen(self, server: StoreServer, s3: Any, bucket_name: str) -> None:
        upload = s3.create_multipart_upload(Bucket=bucket_name, Key="a/b")["UploadId"]
        assert server.raw_uploads(bucket_name) == {upload: "a/b"}

    def test_a_removed_bucket_is_gone_with_all_its_versions_and_parts(
        self, server: StoreServer, s3: Any, bucket_name: str
    ) -> None:
        s3.put_bucket_versioning(Bucket=bucket_name, VersioningConfiguration={"Status": "Enabled"})
        for data in (b"1", b"2" * (6 << 20)):
            s3.put_object(Bucket=bucket_name, Key="a", Body=data)
        upload = s3.create_multipart_upload(Bucket=bucket_name, Key="b")["UploadId"]
        s3.upload_part(Bucket=bucket_name, Key="b", UploadId=upload, PartNumber=1, Body=b"3" * (6 << 20))
        server.remove_bucket(bucket_name)
        server.remove_bucket(bucket_name)
        assert refusal(s3.get_object, Bucket=bucket_name, Key="a") == (404, "NoSuchBucket")
        server.create_bucket(bucket_name)
        assert server.raw_keys(bucket_name) == []
        assert server.raw_uploads(bucket_name) == {}


class TestChecksums:
    @pytest.mark.parametrize("algorithm", ["CRC32", "CRC32C", "SHA256", "CRC64NVME"])
    def test_a_wrong_one_is_refused(self, server: StoreServer, s3: Any, bucket_name: str, algorithm: str) -> None:
        size = {"SHA256": 32, "CRC64NVME": 8}.get(algorithm, 4)
        wrong = {f"Checksum{algorithm}": base64.b64encode(bytes(size)).decode()}
        assert refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"x", **wrong) == (400, "BadDigest")
        assert server.raw_keys(bucket_name) == []

    def test_a_wrong_content_md5_is_refused(self, server: StoreServer, s3: Any, bucket_name: str) -> None:
        wrong = base64.b64encode(hashlib.md5(b"y").digest()).decode()
        status, code = refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"x", ContentMD5=wrong)
        assert (status, code) in [(400, "BadDigest"), (400, "InvalidDigest")]
        assert server.raw_keys(bucket_name) == []

    def test_a_wrong_one_of_a_part_is_refused(self, s3: Any, bucket_name: str) -> None:
        upload = s3.create_multipart_upload(Bucket=bucket_name, Key="a", ChecksumAlgorithm="CRC64NVME")["UploadId"]
        arguments = {"Bucket": bucket_name, "Key": "a", "UploadId": upload, "PartNumber": 1, "Body": b"x"}
        assert refusal(s3.upload_part, **arguments, ChecksumCRC64NVME="AAAAAAAAAAA=") == (400, "BadDigest")

    def test_crc64nvme_of_a_put_is_kept(self, s3: Any, bucket_name: str) -> None:
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"123456789", ChecksumCRC64NVME=CRC64NVME_OF_DIGITS)
        head = s3.head_object(Bucket=bucket_name, Key="a", ChecksumMode="ENABLED")
        assert head["ChecksumCRC64NVME"] == CRC64NVME_OF_DIGITS
        # SeaweedFS 4.48 does not name the type of an object that was stored in one piece.
        assert head.get("ChecksumType", "FULL_OBJECT") == "FULL_OBJECT"

    def test_crc64nvme_of_a_multipart_upload_is_that_of_the_whole(self, s3: Any, bucket_name: str) -> None:
        checksums = pytest.importorskip("awscrt.checksums")
        pieces = [os.urandom(PART), b"tail"]
        whole = base64.b64encode(checksums.crc64nvme(b"".join(pieces)).to_bytes(8, "big")).decode()
        target = {"Bucket": bucket_name, "Key": "a"}
        upload = s3.create_multipart_upload(**target, ChecksumAlgorithm="CRC64NVME", ChecksumType="FULL_OBJECT")
        parts = []
        for number, piece in enumerate(pieces, 1):
            crc = base64.b64encode(checksums.crc64nvme(piece).to_bytes(8, "big")).decode()
            part = s3.upload_part(
                **target, UploadId=upload["UploadId"], PartNumber=number, Body=piece, ChecksumCRC64NVME=crc
            )
            parts.append({"ETag": part["ETag"], "PartNumber": number, "ChecksumCRC64NVME": crc})
        complete = {**target, "UploadId": upload["UploadId"], "MultipartUpload": {"Parts": parts}}
        wrong = refusal(
            s3.complete_multipart_upload, **complete, ChecksumCRC64NVME="AAAAAAAAAAA=", ChecksumType="FULL_OBJECT"
        )
        assert wrong[0] == 400
        done = s3.complete_multipart_upload(**complete, ChecksumCRC64NVME=whole, ChecksumType="FULL_OBJECT")
        head = s3.head_object(**target, ChecksumMode="ENABLED")
        assert (head["ChecksumCRC64NVME"], head["ChecksumType"]) == (whole, "FULL_OBJECT")
        assert done["ChecksumCRC64NVME"] == whole

    @pytest.mark.parametrize("is_right", [True, False])
    def test_a_trailing_checksum_is_checked(self, moto_server: MotoServer, bucket_name: str, is_right: bool) -> None:
        """Over https botocore sends the checksum behind the body, which is framed in chunks for that (aws-chunked)."""
        moto_server.create_bucket(bucket_name)
        data = b"0123456789" * 1000
        crc = base64.b64encode(zlib.crc32(data if is_right else b"other").to_bytes(4, "big")).decode()
        framed = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in (data[:7000], data[7000:]))
        request = urllib.request.Request(
            f"{moto_server.url}/{bucket_name}/a",
            method="PUT",
            data=framed + f"0\r\nx-amz-checksum-crc32:{crc}\r\n\r\n".encode(),
            headers={
                "Content-Encoding": "aws-chunked",
                "Content-Type": "application/octet-stream",
                "X-Amz-Content-Sha256": "STREAMING-UNSIGNED-PAYLOAD-TRAILER",
                "X-Amz-Decoded-Content-Length": str(len(data)),
                "X-Amz-Trailer": "x-amz-checksum-crc32",
            },
        )
        if not is_right:
            with pytest.raises(urllib.error.HTTPError, match="400") as caught:
                urllib.request.urlopen(request, timeout=DEADLINE_S)
            assert b"BadDigest" in caught.value.read()
            caught.value.close()
            assert moto_server.raw_keys(bucket_name) == []
            return
        urllib.request.urlopen(request, timeout=DEADLINE_S).close()
        assert moto_server.raw_get(bucket_name, "a") == data
        head = connect(moto_server).head_object(Bucket=bucket_name, Key="a", ChecksumMode="ENABLED")
        assert (head["ChecksumCRC32"], head.get("ContentEncoding")) == (crc, None)


class TestConditions:
    def test_create_only(self, server: StoreServer, s3: Any, bucket_name: str) -> None:
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"1", IfNoneMatch="*")
        again = refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"2", IfNoneMatch="*")
        assert again == (412, "PreconditionFailed")
        assert server.raw_get(bucket_name, "a") == b"1"

    def test_create_only_multipart(self, server: StoreServer, s3: Any, bucket_name: str) -> None:
        server.raw_put(bucket_name, "a", b"1")
        upload = s3.create_multipart_upload(Bucket=bucket_name, Key="a")["UploadId"]
        etag = s3.upload_part(Bucket=bucket_name, Key="a", UploadId=upload, PartNumber=1, Body=b"2")["ETag"]
        complete = refusal(
            s3.complete_multipart_upload,
            Bucket=bucket_name,
            Key="a",
            UploadId=upload,
            MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]},
            IfNoneMatch="*",
        )
        assert complete == (412, "PreconditionFailed")
        assert server.raw_get(bucket_name, "a") == b"1"

    def test_if_match(self, server: StoreServer, s3: Any, bucket_name: str) -> None:
        etag = s3.put_object(Bucket=bucket_name, Key="a", Body=b"1")["ETag"]
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"2", IfMatch=etag)
        stale = refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"3", IfMatch=etag)
        assert stale == (412, "PreconditionFailed")
        assert server.raw_get(bucket_name, "a") == b"2"

    def test_one_of_eight_wins(self, server: StoreServer, s3: Any, bucket_name: str) -> None:
        barrier = threading.Barrier(8)

        def write(i: int) -> str:
            barrier.wait(60)
            try:
                s3.put_object(Bucket=bucket_name, Key="race", Body=b"writer %d" % i, IfNoneMatch="*")
            except ClientError as error:
                return str(error.response["Error"]["Code"])
            return "won"

        with ThreadPoolExecutor(8) as pool:
            outcomes = list(pool.map(write, range(8)))
        assert outcomes.count("won") == 1
        assert set(outcomes) <= {"won", "PreconditionFailed", "ConditionalRequestConflict"}
        assert server.raw_get(bucket_name, "race") == b"writer %d" % outcomes.index("won")

    def test_looking_and_writing_are_one(
        self, moto_server: MotoServer, bucket_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two writers that may both look before either writes: the second one must not have looked yet."""
        moto_server.create_bucket(bucket_name)
        s3, call, both_looked = connect(moto_server), moto_server.app.core.call, threading.Barrier(2)

        def slow_look(method: str, *args: Any, **kwargs: Any) -> Any:
            reply = call(method, *args, **kwargs)
            if method == "HEAD":
                with contextlib.suppress(threading.BrokenBarrierError):
                    both_looked.wait(0.5)
            return reply

        def write(data: bytes) -> str:
            try:
                s3.put_object(Bucket=bucket_name, Key="a", Body=data, IfNoneMatch="*")
            except ClientError as error:
                return str(error.response["Error"]["Code"])
            return "won"

        monkeypatch.setattr(moto_server.app.core, "call", slow_look)
        with ThreadPoolExecutor(2) as pool:
            outcomes = list(pool.map(write, [b"0", b"1"]))
        assert sorted(outcomes) == ["PreconditionFailed", "won"]
        assert moto_server.raw_get(bucket_name, "a") == b"%d" % outcomes.index("won")

    def test_a_store_may_ignore_conditions(self, moto_server: MotoServer, bucket_name: str) -> None:
        """The mode of stores that take If-None-Match and overwrite all the same."""
        moto_server.create_bucket(bucket_name)
        moto_server.app.ignores_conditions = True
        s3 = connect(moto_server)
        for data in (b"1", b"2"):
            s3.put_object(Bucket=bucket_name, Key="a", Body=data, IfNoneMatch="*")
        assert moto_server.raw_get(bucket_name, "a") == b"2"


class TestLimits:
    def test_a_part_of_an_unknown_upload(self, s3: Any, bucket_name: str) -> None:
        arguments = {"Bucket": bucket_name, "Key": "a", "UploadId": "nope", "PartNumber": 1, "Body": b"x"}
        assert refusal(s3.upload_part, **arguments) == (404, "NoSuchUpload")

    def test_missing_key_and_bucket(self, s3: Any, bucket_name: str) -> None:
        assert refusal(s3.get_object, Bucket=bucket_name, Key="nope") == (404, "NoSuchKey")
        assert refusal(s3.head_object, Bucket=bucket_name, Key="nope") == (404, "404")
        assert refusal(s3.put_object, Bucket="no-such-bucket-xyz", Key="a", Body=b"") == (404, "NoSuchBucket")

    def test_small_parts(self, s3: Any, bucket_name: str) -> None:
        upload = s3.create_multipart_upload(Bucket=bucket_name, Key="a")["UploadId"]
        parts = []
        for number in (1, 2):
            etag = s3.upload_part(Bucket=bucket_name, Key="a", UploadId=upload, PartNumber=number, Body=b"x")["ETag"]
            parts.append({"ETag": etag, "PartNumber": number})
        arguments = {"Bucket": bucket_name, "Key": "a", "UploadId": upload, "MultipartUpload": {"Parts": parts}}
        assert refusal(s3.complete_multipart_upload, **arguments) == (400, "EntityTooSmall")

    def test_pages_and_batches_have_1000_keys(self, moto_server: MotoServer, bucket_name: str) -> None:
        moto_server.create_bucket(bucket_name)
        for i in range(1001):
            moto_server.raw_put(bucket_name, f"k{i:04}", b"")
        s3 = connect(moto_server)
        page = s3.list_objects_v2(Bucket=bucket_name, MaxKeys=5000)
        assert (page["KeyCount"], page["IsTruncated"]) == (1000, True)
        batch = {"Objects": [{"Key": f"k{i:04}"} for i in range(1001)]}
        assert refusal(s3.delete_objects, Bucket=bucket_name, Delete=batch) == (400, "MalformedXML")
        assert len(moto_server.raw_keys(bucket_name)) == 1001


class TestPermissions:
    def test_without_list_one_may_read_and_write(self, server: StoreServer, bucket_name: str) -> None:
        s3 = connect(server, identity="no-list")
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"x")
        assert s3.get_object(Bucket=bucket_name, Key="a")["Body"].read() == b"x"
        assert refusal(s3.list_objects_v2, Bucket=bucket_name) == (403, "AccessDenied")

    def test_without_list_a_missing_key_is_not_told(self, moto_server: MotoServer, bucket_name: str) -> None:
        """S3 says 403, not 404, to who may not list: "nothing there" must not be concluded from it."""
        moto_server.create_bucket(bucket_name)
        s3 = connect(moto_server, identity="no-list")
        assert refusal(s3.get_object, Bucket=bucket_name, Key="nope") == (403, "AccessDenied")
        assert refusal(s3.head_object, Bucket=bucket_name, Key="nope") == (403, "403")

    def test_a_reader_cannot_write(self, server: StoreServer, bucket_name: str) -> None:
        server.raw_put(bucket_name, "a", b"x")
        s3 = connect(server, identity="read-only")
        assert s3.get_object(Bucket=bucket_name, Key="a")["Body"].read() == b"x"
        assert refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"y") == (403, "AccessDenied")
        assert refusal(s3.delete_object, Bucket=bucket_name, Key="a") == (403, "AccessDenied")
        assert server.raw_get(bucket_name, "a") == b"x"

    def test_an_expired_token(self, moto_server: MotoServer, bucket_name: str) -> None:
        moto_server.create_bucket(bucket_name)
        moto_server.app.live_tokens = {"fresh"}
        s3 = connect(moto_server)
        assert refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"x") == (400, "ExpiredToken")


class TestWeed:
    def test_a_wrong_signature_is_refused(self, weed_server: WeedServer, bucket_name: str) -> None:
        weed_server.create_bucket(bucket_name)
        s3 = connect(weed_server, secret="wrong")
        assert refusal(s3.put_object, Bucket=bucket_name, Key="a", Body=b"x") == (403, "SignatureDoesNotMatch")


class TestDamage:
    def test_a_flipped_bit_changes_nothing_else(self, moto_server: MotoServer, bucket_name: str) -> None:
        moto_server.create_bucket(bucket_name)
        s3 = connect(moto_server)
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"123456789", ChecksumCRC64NVME=CRC64NVME_OF_DIGITS)
        before = s3.head_object(Bucket=bucket_name, Key="a", ChecksumMode="ENABLED")
        moto_server.raw_flip_bit(bucket_name, "a", 4)
        after = s3.head_object(Bucket=bucket_name, Key="a", ChecksumMode="ENABLED")
        assert moto_server.raw_get(bucket_name, "a") == b"123446789"
        assert [after[name] for name in ("ETag", "ContentLength", "ChecksumCRC64NVME", "LastModified")] == [
            before[name] for name in ("ETag", "ContentLength", "ChecksumCRC64NVME", "LastModified")
        ]
        with pytest.raises(KeyError):
            moto_server.raw_flip_bit(bucket_name, "nope")
