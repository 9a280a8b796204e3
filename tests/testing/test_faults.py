"""The faults that test stores inject, seen from a client."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from ckptmgr.testing.faults import Fault, Faults, Seen
from ckptmgr.testing.servers import MotoServer, OssServer

boto3 = pytest.importorskip("boto3", exc_type=ImportError)
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, ConnectionClosedError

# What botocore makes of a connection that is reset: it depends on whether the client was still sending.
RESET = (ConnectionClosedError, BotoCoreError, ConnectionError, http.client.HTTPException)
DEADLINE_S = 60


@pytest.fixture
def s3(moto_server: MotoServer, bucket_name: str) -> Iterator[Any]:
    """A client that never tries again, in an empty bucket."""
    moto_server.create_bucket(bucket_name)
    client = boto3.client(
        "s3", endpoint_url=moto_server.url, config=Config(retries={"total_max_attempts": 1}, read_timeout=DEADLINE_S)
    )
    yield client
    client.close()


def seen(method: str = "PUT", key: str = "a", **query: str) -> Seen:
    return Seen(method=method, bucket="b", key=key, query=query, headers={})


class TestRules:
    def test_without_a_selector_everything_is_hit(self) -> None:
        faults = Faults()
        active = faults.add(Fault(times=None))
        assert [faults.pick(seen(method)) for method in ("GET", "PUT")] == [active, active]

    @pytest.mark.parametrize(
        ("fault", "other"),
        [
            (Fault(method="PUT"), seen("GET")),
            (Fault(key="*/manifests/*"), seen(key="run/data/x")),
            (Fault(query="partNumber"), seen(uploadId="1")),
            (Fault(match=lambda request: request.bucket == "c"), seen()),
        ],
    )
    def test_a_selector_lets_others_pass(self, fault: Fault, other: Seen) -> None:
        faults = Faults()
        active = faults.add(fault)
        assert faults.pick(other) is None
        assert active.hits == 0

    def test_times_and_skip(self) -> None:
        faults = Faults()
        active = faults.add(Fault(skip=2, times=3))
        assert [faults.pick(seen()) is active for _ in range(7)] == [False, False, True, True, True, False, False]
        assert active.is_spent

    def test_what_one_rule_skips_the_next_may_take(self) -> None:
        faults = Faults()
        first, second = faults.add(Fault(skip=1)), faults.add(Fault())
        assert [faults.pick(seen()), faults.pick(seen()), faults.pick(seen())] == [second, first, None]

    def test_injected_ends_with_its_block(self) -> None:
        faults = Faults()
        with faults.injected(Fault(times=None)) as active:
            assert faults.pick(seen()) is active
        assert faults.pick(seen()) is None


class TestEffects:
    def test_status_code_and_retry_after(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        moto_server.faults.add(Fault(method="PUT", status=503, code="SlowDown", retry_after_s=7))
        with pytest.raises(ClientError) as caught:
            s3.put_object(Bucket=bucket_name, Key="a", Body=b"x")
        response = caught.value.response
        assert response["Error"]["Code"] == "SlowDown"
        assert response["ResponseMetadata"]["HTTPStatusCode"] == 503
        assert response["ResponseMetadata"]["HTTPHeaders"]["retry-after"] == "7"
        assert moto_server.raw_keys(bucket_name) == []
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"x")
        assert moto_server.raw_get(bucket_name, "a") == b"x"

    @pytest.mark.parametrize(("drop", "stored"), [("before", []), ("after", ["a"])])
    def test_a_dropped_answer(
        self, moto_server: MotoServer, s3: Any, bucket_name: str, drop: Any, stored: list[str]
    ) -> None:
        """The client cannot tell the two apart; the store can."""
        moto_server.faults.add(Fault(method="PUT", drop=drop))
        with pytest.raises(RESET):
            s3.put_object(Bucket=bucket_name, Key="a", Body=b"x")
        assert moto_server.raw_keys(bucket_name) == stored
        assert [request.status for request in moto_server.log] == [None]

    def test_a_cut_body(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        moto_server.raw_put(bucket_name, "a", b"0123456789" * 1000)
        moto_server.faults.add(Fault(method="GET", cut_body=4000))
        with pytest.raises(RESET):
            s3.get_object(Bucket=bucket_name, Key="a")["Body"].read()

    def test_a_body_that_ends_too_early(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        """What was sent arrives, and then the connection ends."""
        moto_server.raw_put(bucket_name, "a", b"0123456789" * 1000)
        moto_server.faults.add(Fault(method="GET", cut_body=4000, cut_by="end"))
        body = s3.get_object(Bucket=bucket_name, Key="a")["Body"]
        assert body.read(4000) == b"0123456789" * 400
        with pytest.raises(RESET):
            body.read()

    def test_a_trickling_body(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        """The first half comes at once, the rest in drops, and what is left when it is released."""
        data = b"0123456789" * 1000
        moto_server.raw_put(bucket_name, "a", data)
        active = moto_server.faults.add(Fault(method="GET", trickle_bytes_s=1000))
        body = s3.get_object(Bucket=bucket_name, Key="a")["Body"]
        assert body.read(5000) == data[:5000]
        started = time.monotonic()
        assert body.read(100) == data[5000:5100]
        assert 0.05 <= time.monotonic() - started < DEADLINE_S
        active.release()
        assert body.read() == data[5100:]

    def test_a_header_that_the_store_does_not_know(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        """A range that is ignored is answered with the whole."""
        moto_server.raw_put(bucket_name, "a", b"0123456789")
        moto_server.faults.add(Fault(method="GET", ignore_headers=("range",)))
        for expected in (b"0123456789", b"34"):
            assert s3.get_object(Bucket=bucket_name, Key="a", Range="bytes=3-4")["Body"].read() == expected

    def test_a_body_damaged_on_the_way_out(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        moto_server.raw_put(bucket_name, "a", b"0" * 100)
        moto_server.faults.add(Fault(method="GET", corrupt=True))
        damaged = s3.get_object(Bucket=bucket_name, Key="a")["Body"].read()
        assert sum(a != b for a, b in zip(damaged, b"0" * 100, strict=True)) == 1
        assert moto_server.raw_get(bucket_name, "a") == b"0" * 100

    def test_a_body_damaged_on_the_way_in_fails_its_checksum(
        self, moto_server: MotoServer, s3: Any, bucket_name: str
    ) -> None:
        moto_server.faults.add(Fault(method="PUT", corrupt_request=True))
        with pytest.raises(ClientError, match="BadDigest"):
            s3.put_object(Bucket=bucket_name, Key="a", Body=b"0" * 100, ChecksumAlgorithm="SHA256")
        assert moto_server.raw_keys(bucket_name) == []

    def test_an_error_in_the_body_of_a_200(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        """S3 reports a failed CompleteMultipartUpload so; botocore makes an error of it."""
        upload = s3.create_multipart_upload(Bucket=bucket_name, Key="a")["UploadId"]
        etag = s3.upload_part(Bucket=bucket_name, Key="a", UploadId=upload, PartNumber=1, Body=b"x")["ETag"]
        moto_server.faults.add(Fault(method="POST", query="uploadId", status=200, code="InternalError"))
        with pytest.raises(ClientError, match="InternalError"):
            s3.complete_multipart_upload(
                Bucket=bucket_name,
                Key="a",
                UploadId=upload,
                MultipartUpload={"Parts": [{"ETag": etag, "PartNumber": 1}]},
            )
        assert moto_server.raw_keys(bucket_name) == []

    def test_latency(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        moto_server.faults.add(Fault(method="PUT", latency_s=0.3))
        start_s = time.monotonic()
        s3.put_object(Bucket=bucket_name, Key="a", Body=b"x")
        assert time.monotonic() - start_s >= 0.3

    @pytest.mark.parametrize(("hold", "meanwhile"), [("before", []), ("after", ["a"])])
    def test_a_held_request(
        self, moto_server: MotoServer, s3: Any, bucket_name: str, hold: Any, meanwhile: list[str]
    ) -> None:
        """A test can look at the store while a request stands in the middle."""
        active = moto_server.faults.add(Fault(method="PUT", hold=hold))
        thread = threading.Thread(target=s3.put_object, kwargs={"Bucket": bucket_name, "Key": "a", "Body": b"x"})
        thread.start()
        assert active.reached.wait(DEADLINE_S)
        assert moto_server.raw_keys(bucket_name) == meanwhile
        assert thread.is_alive()
        active.release()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert moto_server.raw_keys(bucket_name) == ["a"]

    def test_a_stalled_body(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        """The first half arrives, then nothing, until the test says so."""
        data = b"0123456789" * 100_000
        moto_server.raw_put(bucket_name, "a", data)
        active = moto_server.faults.add(Fault(method="GET", hold="body"))
        body = s3.get_object(Bucket=bucket_name, Key="a")["Body"]
        assert body.read(500_000) == data[:500_000]
        assert active.reached.wait(DEADLINE_S)
        active.release()
        assert body.read() == data[500_000:]

    def test_a_document_of_the_tests_own(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        """DeleteObjects answers 200 and names in its body what it did not delete."""
        failed = (
            b"<DeleteResult><Error><Key>a</Key><Code>InternalError</Code><Message>m</Message></Error></DeleteResult>"
        )
        moto_server.faults.add(Fault(query="delete", status=200, document=failed))
        answer = s3.delete_objects(Bucket=bucket_name, Delete={"Objects": [{"Key": "a"}]})
        assert answer["Errors"] == [{"Key": "a", "Code": "InternalError", "Message": "m"}]


class TestServerLife:
    def test_stop_refuses_and_start_goes_on(self) -> None:
        """A store that is down for a while has the same endpoint and the same data afterwards."""
        with MotoServer() as server:
            server.create_bucket("bkt")
            server.raw_put("bkt", "a", b"x")
            url = server.url
            server.stop()
            with pytest.raises(ConnectionRefusedError):
                _get(url, "/bkt/a")
            server.start()
            assert server.url == url
            assert _get(url, "/bkt?list-type=2")[0] == 200
            assert server.raw_get("bkt", "a") == b"x"

    def test_close_lets_go_of_held_requests(self) -> None:
        failures: list[BaseException] = []

        def get(url: str) -> None:
            try:
                _get(url, "/bkt/a")
            except (ConnectionError, http.client.HTTPException) as error:
                failures.append(error)

        with OssServer() as server:
            active = server.faults.add(Fault(hold="before"))
            thread = threading.Thread(target=get, args=(server.url,))
            thread.start()
            assert active.reached.wait(DEADLINE_S)
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert len(failures) == 1

    def test_two_servers_share_nothing(self) -> None:
        with MotoServer() as one, MotoServer() as two:
            one.create_bucket("bkt")
            two.create_bucket("bkt")
            one.raw_put("bkt", "a", b"1")
            assert two.raw_keys("bkt") == []
            assert b"<Name>bkt</Name>" in _get(one.url, "/")[1]

    def test_a_client_that_dies_in_the_middle_leaves_nothing(self, moto_server: MotoServer, bucket_name: str) -> None:
        moto_server.create_bucket(bucket_name)
        host = moto_server.url.removeprefix("http://")
        connection = http.client.HTTPConnection(host, timeout=DEADLINE_S)
        connection.putrequest("PUT", f"/{bucket_name}/a")
        connection.putheader("Content-Length", "1000")
        connection.endheaders(b"only this much")
        connection.close()
        # The next request is served after the broken one was given up: its log entry is what we wait for.
        deadline_s = time.monotonic() + DEADLINE_S
        while not any(request.key == "a" for request in moto_server.log) and time.monotonic() < deadline_s:
            _get(moto_server.url, f"/{bucket_name}?list-type=2")
        assert [request.status for request in moto_server.log if request.key == "a"] == [None]
        assert moto_server.raw_keys(bucket_name) == []

    def test_the_log_tells_what_came(self, moto_server: MotoServer, s3: Any, bucket_name: str) -> None:
        s3.put_object(Bucket=bucket_name, Key="a/ü", Body=b"12345", Metadata={"step_x": "7"})
        s3.list_objects_v2(Bucket=bucket_name, Prefix="a/")
        put, listing = moto_server.log
        assert (put.method, put.bucket, put.key, put.status, put.size_bytes) == ("PUT", bucket_name, "a/ü", 200, 5)
        assert put.headers["x-amz-meta-step_x"] == "7"
        assert (listing.method, listing.key, listing.query["prefix"]) == ("GET", "", "a/")
        assert put.time_s <= listing.time_s
        assert s3.head_object(Bucket=bucket_name, Key="a/ü")["Metadata"] == {"step_x": "7"}


def _get(url: str, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=DEADLINE_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
