"""The data calls without boto3: who makes which, and what becomes of their answers."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends import s3answers, s3client, s3data
from ckptmgr.backends.options import Engine, StoreOptions
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.backends.s3 import S3Backend
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    ObjectNotFoundError,
    PermanentBackendError,
    TransientBackendError,
)
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.server_store import PART_BYTES, ServerStore

# Each test has clients of its own, and botocore reads its models anew for each.
pytestmark = pytest.mark.usefixtures("_s3_models_parsed_once")

# --- what becomes of answers ----------------------------------------------------------------------------------------------


def by_boto3(seen: Any) -> bool:
    return "amz-sdk-invocation-id" in seen.headers


def test_data_goes_without_boto3(s3: ServerStore, tmp_path: Path) -> None:
    """All data calls, and those that begin and end an upload; boto3's client is not even made. With `engine="boto3"` it makes all."""
    source = tmp_path / "f"
    source.write_bytes(os.urandom(PART_BYTES + 1))
    for options, is_boto3s in ((StoreOptions(), False), (StoreOptions(engine="boto3"), True)):
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
            assert by_boto3(seen) is is_boto3s, seen
        assert (backend._s3._open().made._client is None) is not is_boto3s


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


def test_k123_a_wrong_clock(
    s3: ServerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests are signed with the store's clock from the first refusal on, by ours and by boto3; it is said once; and with ours once that is right."""

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
    # Set right, it goes on without a restart.
    for module in (s3client, s3data):
        monkeypatch.setattr(module, "time", time)
    backend.pipe_file(s3.at("right"), b"1")
    assert fault.hits == 2
    assert s3.server.raw_get(s3.bucket, "right") == b"1"


@pytest.mark.parametrize("engine", ["auto", "boto3"])
def test_k123_a_request_that_was_held_back(
    s3: ServerStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, engine: Engine
) -> None:
    """A part that waited on its way until its signature was too old is signed anew and sent again; of the clock, which is right, nothing is said."""
    (tmp_path / "f").write_bytes(os.urandom(2 * PART_BYTES + 1))
    fault = s3.server.faults.add(Fault(query="partNumber", skip=1, status=403, code="RequestTimeTooSkewed"))
    options: dict[str, Any] = {
        "store_options": StoreOptions(engine=engine),
        "retrier": Retrier(RetryPolicy(attempts=1)),
    }
    backend = S3Backend(part_bytes=PART_BYTES, multipart_threshold=PART_BYTES, **options)
    backend.put_file(str(tmp_path / "f"), s3.at("k"))
    assert fault.hits == 1
    assert s3.server.raw_get(s3.bucket, "k") == (tmp_path / "f").read_bytes()
    assert "clock" not in caplog.text


def test_a_store_whose_own_clock_is_wrong(s3: ServerStore) -> None:
    """Refused although signed with the very time that it tells, twice, for the first may have been held back: an error."""
    fault = s3.server.faults.add(Fault(status=403, code="RequestTimeTooSkewed", times=None))
    with pytest.raises(PermanentBackendError, match="RequestTimeTooSkewed"):
        s3.plain().pipe_file(s3.at("k"), b"1")
    assert fault.hits == 2


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


_BEGUN = b"<InitiateMultipartUploadResult><UploadId>%s</UploadId></InitiateMultipartUploadResult>"
_ENDED = (
    b"<CompleteMultipartUploadResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'>%s</CompleteMultipartUploadResult>"
)


@pytest.mark.parametrize(
    ("operation", "status", "document"),
    [
        ("create_multipart_upload", 200, _BEGUN % b"u&amp;1"),
        ("create_multipart_upload", 200, _BEGUN % b""),
        ("create_multipart_upload", 200, b"<html/>"),
        ("create_multipart_upload", 200, b""),
        ("create_multipart_upload", 503, b"<Error><Code>SlowDown</Code><Message>m</Message></Error>"),
        ("complete_multipart_upload", 200, _ENDED % b'<ETag>"e-1"</ETag>'),
        (
            "complete_multipart_upload",
            200,
            b"<?xml version='1.0'?>\n   \n"
            + _ENDED
            % b"<ETag>e</ETag><ChecksumCRC64NVME>AAAAAAAAAAA=</ChecksumCRC64NVME><ChecksumType>FULL_OBJECT</ChecksumType>",
        ),
        ("complete_multipart_upload", 200, _ENDED % b""),
        ("complete_multipart_upload", 200, b"<Error><Code>InternalError</Code><Message>try again</Message></Error>"),
        ("complete_multipart_upload", 200, b"<Error><Code>NoSuchUpload</Code><Message>m</Message></Error>"),
        ("complete_multipart_upload", 404, b"<Error><Code>NoSuchUpload</Code><Message>m</Message></Error>"),
        ("complete_multipart_upload", 412, b"<Error><Code>PreconditionFailed</Code><Message>m</Message></Error>"),
        ("complete_multipart_upload", 200, b"<html/>"),
    ],
)
def test_uploads_begin_and_end_as_with_boto3(s3: ServerStore, operation: str, status: int, document: bytes) -> None:
    """The same answer, or the same error: also of an end that fails only after its answer has begun."""
    arguments: dict[str, Any] = {"Bucket": s3.bucket, "Key": "k"}
    if operation == "complete_multipart_upload":
        arguments |= {"UploadId": "u", "MultipartUpload": {"Parts": [{"PartNumber": 1, "ETag": '"1"'}]}}
    told: list[Any] = []
    for options in (StoreOptions(), StoreOptions(engine="boto3")):
        s3.server.faults.add(Fault(method="POST", status=status, document=document))
        try:
            answer = S3Backend(store_options=options)._s3.request(operation, s3.at("k"), **arguments)
            told.append({name: answer.get(name) for name in ("UploadId", "ETag", "ChecksumCRC64NVME", "ChecksumType")})
        except BackendError as error:
            told.append((type(error), getattr(error, "code", None), getattr(error, "status", None)))
    assert told[0] == told[1]


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
