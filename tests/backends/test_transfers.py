"""What becomes of the bytes when requests, answers and objects are lost, damaged or replaced on the way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.body import FileBody
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import (
    AccessDeniedError,
    ChecksumMismatchError,
    ObjectExistsError,
    PermanentBackendError,
    SourceChangedError,
    TransientBackendError,
)
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.memory_parts import MemoryJournal
from ckptmgr.testing.server_store import PART_BYTES, QUICK, ServerStore

DATA = os.urandom(2 * PART_BYTES + 7)


def test_a_body_that_is_cut(store: ServerStore, tmp_path: Path) -> None:
    """A read that ends too early is an error, and with retries goes on where it stopped."""
    store.server.raw_put(store.bucket, "k", DATA)
    with (
        store.server.faults.injected(Fault(method="GET", key="k", cut_body=1000)),
        pytest.raises(TransientBackendError),
    ):
        store.plain().cat_file(store.at("k"))
    fault = store.server.faults.add(Fault(method="GET", key="k", cut_body=3_000_000, times=3))
    store.retrying().get_file(store.at("k"), str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == DATA
    assert fault.hits == 3


def is_first_part(seen: Seen) -> bool:
    return seen.headers.get("range", "").startswith("bytes=0-")


def test_an_object_replaced_while_it_is_read(store: ServerStore, tmp_path: Path) -> None:
    """Two versions of an object are never mixed in one file: the read fails, and a new one gets the new bytes."""
    store.server.raw_put(store.bucket, "k", DATA)
    other = bytes(reversed(DATA))
    # The first part, for the parts race: the last one has fewer bytes than the cut leaves.
    held = store.server.faults.add(Fault(method="GET", key="k", cut_body=1000, match=is_first_part))

    def replace_once(policy: RetryPolicy) -> Retrier:
        def sleep(seconds: float) -> None:
            store.server.raw_put(store.bucket, "k", other)

        return Retrier(policy, sleep=sleep)

    backend = store.plain()
    backend._retrier = replace_once(QUICK)
    with pytest.raises(TransientBackendError, match="replaced"):
        backend.get_file(store.at("k"), str(tmp_path / "got"))
    assert held.hits == 1
    backend.get_file(store.at("k"), str(tmp_path / "got"))
    assert (tmp_path / "got").read_bytes() == other


WRITE_FAULTS = {
    "before": Fault(method="PUT", drop="before"),
    "after": Fault(method="PUT", drop="after"),
    "throttled": Fault(method="PUT", status=503, code="SlowDown", times=3),
    "internal": Fault(method="PUT", status=500),
    "damaged": Fault(method="PUT", corrupt_request=True),
}


@pytest.mark.parametrize("name", WRITE_FAULTS)
@pytest.mark.parametrize("size", [1000, len(DATA)], ids=["whole", "parts"])
def test_uploads_outlive_faults(store: ServerStore, tmp_path: Path, name: str, size: int) -> None:
    """Rows 13-18, 24: lost requests, lost answers, throttling and damage on the way are outlived, and the bytes are right."""
    source = tmp_path / "f"
    source.write_bytes(DATA[:size])
    fault = store.server.faults.add(WRITE_FAULTS[name])
    store.retrying().put_file(str(source), store.at("k"), expected=digest_bytes(DATA[:size]))
    assert fault.hits == WRITE_FAULTS[name].times
    assert store.server.raw_get(store.bucket, "k") == DATA[:size]
    assert store.server.raw_uploads(store.bucket) == {}


@pytest.mark.parametrize("mode", ["create", "overwrite"])
@pytest.mark.parametrize("drop", ["before", "after"])
@pytest.mark.parametrize("step", ["begin", "complete"])
def test_the_ends_of_a_multipart_upload(store: ServerStore, tmp_path: Path, mode: Any, drop: Any, step: str) -> None:
    """Row 20: an unanswered begin or complete is settled: the object is there once, and is ours."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    fault = store.server.faults.add(
        Fault(method="POST", query={"begin": "uploads", "complete": "uploadId"}[step], drop=drop)
    )
    store.retrying().put_file(str(source), store.at("k"), mode=mode, expected=digest_bytes(DATA))
    assert fault.hits == 1
    assert store.server.raw_get(store.bucket, "k") == DATA


def test_a_completion_that_failed_in_a_200(s3: ServerStore, tmp_path: Path) -> None:
    """Row 15: S3 may report a failed completion in the body of a 200; it is never taken for success."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    s3.server.faults.add(Fault(method="POST", query="uploadId", status=200, code="InternalError", times=None))
    with pytest.raises(TransientBackendError):
        s3.plain().put_file(str(source), s3.at("k"))
    assert s3.server.raw_keys(s3.bucket) == []
    s3.server.faults.clear()
    s3.server.faults.add(Fault(method="POST", query="uploadId", status=200, code="InternalError"))
    s3.retrying().put_file(str(source), s3.at("k"))
    assert s3.server.raw_get(s3.bucket, "k") == DATA


def test_a_whole_that_is_not_what_was_sent(store: ServerStore, tmp_path: Path) -> None:
    """The store joins the parts and finds another checksum: these parts are dropped, and the next try sends all of them."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    journal = MemoryJournal()
    code = "BadDigest" if store.server.kind == "moto" else "InvalidPart"
    wrong = store.server.faults.add(Fault(method="POST", query="uploadId", status=400, code=code))
    with pytest.raises((ChecksumMismatchError, PermanentBackendError)):
        store.plain().put_file(str(source), store.at("k"), parts=journal)
    assert wrong.hits == 1
    assert store.server.raw_uploads(store.bucket) == {}
    assert journal.upload_id is None
    store.retrying().put_file(str(source), store.at("k"), parts=journal)
    assert store.server.raw_get(store.bucket, "k") == DATA


@pytest.mark.parametrize("size", [1000, len(DATA)], ids=["whole", "parts"])
def test_a_source_written_to_between_digest_and_sending(
    s3: ServerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """I10: the file is read twice. On a store that checks nothing, what is sent is compared with what was digested; nothing stays."""
    refuse = Fault(
        match=lambda seen: any(name.startswith("x-amz-checksum-") for name in seen.headers),
        status=501,
        code="NotImplemented",
        times=None,
    )
    s3.server.faults.add(refuse)
    backend = s3.plain()
    backend.pipe_file(s3.at("before"), b"1")
    source = tmp_path / "f"
    source.write_bytes(DATA[:size])
    times = source.stat()
    watch = FileBody.watch

    def change(body: FileBody) -> None:
        with open(source, "r+b") as file:
            file.write(b"not what was digested")
        # As a write through a memory map may do, or one within the clock's tick.
        os.utime(source, ns=(times.st_atime_ns, times.st_mtime_ns))
        watch(body)

    monkeypatch.setattr(FileBody, "watch", change)
    monkeypatch.setattr("ckptmgr.backends.objectupload._HELD_BYTES", 100)
    journal = MemoryJournal()
    with pytest.raises(SourceChangedError, match="between being digested and being sent"):
        backend.put_file(str(source), s3.at("k"), parts=journal)
    assert s3.server.raw_keys(s3.bucket) == ["before"]
    assert s3.server.raw_uploads(s3.bucket) == {}
    assert journal.upload_id is None


def test_a_failed_upload_leaves_no_parts(store: ServerStore, tmp_path: Path) -> None:
    """Parts of an upload that was given up are removed, so that nobody pays for what nobody sees."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    store.server.faults.add(Fault(query="partNumber", status=403, code="AccessDenied", times=None, skip=1))
    with pytest.raises(AccessDeniedError):
        store.retrying().put_file(str(source), store.at("k"))
    assert store.server.raw_uploads(store.bucket) == {}
    assert store.server.raw_keys(store.bucket) == []


def test_a_lost_answer_to_a_create(store: ServerStore) -> None:
    """Row 19, I3: a create tried again after a lost answer is refused by its own object, for the caller to settle."""
    store.server.faults.add(Fault(method="PUT", drop="after"))
    backend = store.retrying()
    with pytest.raises(ObjectExistsError):
        backend.pipe_file(store.at("manifest"), b"mine", mode="create")
    assert backend.cat_file(store.at("manifest")) == b"mine"


def test_what_the_store_holds_is_compared(oss: ServerStore) -> None:
    """OSS says what it received: other bytes are removed again, and the error is one of integrity."""
    oss.server.faults.add(Fault(method="PUT", corrupt_request=True, times=None))
    with pytest.raises(ChecksumMismatchError) as caught:
        oss.plain().pipe_file(oss.at("k"), b"0123456789")
    assert isinstance(caught.value, TransientBackendError)
    assert caught.value.expected == digest_bytes(b"0123456789").crc64xz  # type: ignore[attr-defined]
    assert oss.server.raw_keys(oss.bucket) == []


def test_damage_at_rest_does_not_change_the_stored_crc(store: ServerStore) -> None:
    """The CRC is the one of the bytes that were written: it is compared with digests of what is read, not trusted alone."""
    backend = store.plain()
    backend.pipe_file(store.at("k"), b"0123456789")
    before = backend.stored_crc(store.at("k"))
    store.server.raw_flip_bit(store.bucket, "k", 3)
    assert backend.stored_crc(store.at("k")) == before
    assert digest_bytes(backend.cat_file(store.at("k"))) != digest_bytes(b"0123456789")


def test_rm_files_reports_what_was_refused(s3: ServerStore) -> None:
    """Row 41: keys refused inside a successful batch are reported, by name and reason."""
    backend = s3.plain()
    client = backend._s3._client()

    def answer(http_response: Any, parsed: dict[str, Any], **kwargs: Any) -> None:
        errors = [
            {"Key": "b", "Code": "AccessDenied", "Message": "Access Denied"},
            {"Key": "c", "Code": "InternalError", "Message": "oops"},
        ]
        parsed["Errors"] = errors

    client.meta.events.register("after-call.s3.DeleteObjects", answer)
    with pytest.raises(AccessDeniedError, match="2 objects") as caught:
        backend.rm_files([s3.at(key) for key in "abc"])
    failed = caught.value.failed  # type: ignore[attr-defined]
    assert {path: type(error) for path, error in failed.items()} == {
        s3.at("b"): AccessDeniedError,
        s3.at("c"): TransientBackendError,
    }


def test_a_store_without_checksums_is_used_without(s3: ServerStore, tmp_path: Path) -> None:
    """A store that refuses checksum headers is found out once, and from then on written to without them."""
    refuse = Fault(
        match=lambda seen: any(name.startswith("x-amz-checksum-") for name in seen.headers),
        status=501,
        code="NotImplemented",
        times=None,
    )
    refused = s3.server.faults.add(refuse)
    backend = s3.plain()
    backend.pipe_file(s3.at("k"), b"1", mode="create")
    source = tmp_path / "f"
    source.write_bytes(DATA)
    backend.put_file(str(source), s3.at("big"))
    assert refused.hits == 1
    assert backend.capabilities.stored_crc is None
    assert s3.server.raw_get(s3.bucket, "k") == b"1"
    assert s3.server.raw_get(s3.bucket, "big") == DATA


def test_a_batch_delete_that_is_not_offered(s3: ServerStore) -> None:
    """Where DeleteObjects is not implemented (Google's interop), keys are removed one by one."""
    for key in "abc":
        s3.server.raw_put(s3.bucket, key, b"1")
    s3.server.faults.add(Fault(method="POST", query="delete", status=501, code="NotImplemented", times=None))
    s3.plain().rm_files([s3.at(key) for key in "abc"])
    assert s3.server.raw_keys(s3.bucket) == []


def test_the_requests_of_an_upload_in_parts(store: ServerStore, tmp_path: Path) -> None:
    """Begin, the parts, complete, and no look that nothing asks for; also with a journal that knows of no upload."""
    source = tmp_path / "f"
    source.write_bytes(DATA)
    for parts in (None, MemoryJournal()):
        store.server.log.clear()
        store.plain().put_file(str(source), store.at("k"), expected=digest_bytes(DATA), parts=parts)
        assert [request.method for request in store.server.log] == ["POST", "PUT", "PUT", "PUT", "POST"]


def test_the_requests_of_small_verbs(store: ServerStore) -> None:
    """The common verbs cost one request each; a refused look-up is not asked for again and again."""
    backend = store.plain()
    backend.pipe_file(store.at("a/k"), b"1", mode="create")
    for verb, most in (
        (lambda: backend.pipe_file(store.at("a/k"), b"1"), 1),
        (lambda: backend.cat_file(store.at("a/k")), 1),
        (lambda: backend.info(store.at("a/k")), 1),
        (lambda: backend.stored_crc(store.at("a/k")), 1),
        (lambda: backend.find(store.at("a")), 1),
        (lambda: backend.ls(store.at("a")), 1),
        (lambda: backend.info(store.at("a")), 2),
        (lambda: backend.exists(store.at("none")), 2),
        (lambda: backend.rm_file(store.at("a/k")), 1),
    ):
        store.server.log.clear()
        verb()
        assert len(store.server.log) <= most
