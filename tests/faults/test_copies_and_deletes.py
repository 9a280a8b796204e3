"""Row 41, and copies within the store: what is refused inside a success, batches, parts that fail, answers that are lost, objects that change meanwhile."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any
from xml.sax.saxutils import escape

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.backends.objectrequests import Stored
from ckptmgr.backends.pace import Pace
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.checksums import crc64xz_hex
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    ChecksumMismatchError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.memory_objects import MemoryObjects, When
from ckptmgr.testing.stores import BucketStore, retrying_backend

DATA = os.urandom(12_345)
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.002)


def retrier(policy: RetryPolicy = QUICK) -> Retrier:
    return Retrier(policy, sleep=lambda seconds: None)


def fails(request: str, times: int, error: Callable[[], BackendError], when: When = "before", path: str = "") -> Any:
    """Fails the first `times` requests of that name, on a path that ends so."""
    left, lock = [times], threading.Lock()

    def fail(made: str, on: str, at: When) -> None:
        with lock:
            hit = (made, at) == (request, when) and on.endswith(path) and left[0] > 0
            left[0] -= hit
        if hit:
            raise error()

    return fail


def lost() -> BackendError:
    return BackendTimeoutError("injected: the answer was lost")


def denied() -> BackendError:
    return AccessDeniedError("injected: no")


# --- deletes --------------------------------------------------------------------------------------------------------------


def test_more_than_a_batch_is_removed_in_batches() -> None:
    """Row 41: 2,500 keys of two buckets go in requests of at most 1000 keys of one bucket; those that are gone already are fine."""
    store = MemoryObjects(retrier=retrier())
    paths = [f"{bucket}/k{number}" for bucket, count in (("a", 2100), ("b", 400)) for number in range(count)]
    store.fill([*paths[::2], "a/other"])
    store.rm_files(paths)
    assert store.paths() == ["a/other"]
    assert store.requests == {"delete_batch": 4}


def test_keys_refused_for_a_while_are_tried_again_without_the_others() -> None:
    """Row 41: two keys of 1,500 are refused inside a success, twice: two more requests, of these two keys."""
    sizes: list[int] = []
    store = MemoryObjects(fails("delete_one", 4, lost, path="7"), retrier=retrier())
    delete = store._delete_batch

    def counted(bucket: str, keys: list[str]) -> dict[str, BackendError]:
        sizes.append(len(keys))
        return delete(bucket, keys)

    store._delete_batch = counted  # type: ignore[method-assign]
    paths = [f"a/{number:04}" for number in range(1000, 2500)]
    store.fill(paths)
    store.rm_files(paths)
    assert store.paths() == []
    assert sizes[0] == 1000
    assert sizes[-1] == 500
    assert sum(sizes) == 1500 + 4


def test_what_is_refused_for_good_is_reported_and_the_rest_removed() -> None:
    """Row 41: one key may not be removed, one cannot be for now, whatever is tried: both are named with their reasons, and nothing else is left."""

    def fail(request: str, path: str, when: When) -> None:
        if request == "delete_one" and path == "a/1":
            raise AccessDeniedError("no")
        if request == "delete_one" and path == "a/2":
            raise ThrottledError("slow down")

    inner = MemoryObjects(fail, retrier=retrier())
    store = RetryingBackend(inner, inner._retrier)
    paths = [f"a/{number}" for number in range(5)]
    inner.fill(paths)
    with pytest.raises(AccessDeniedError, match="2 objects") as caught:
        store.rm_files(paths)
    failed = caught.value.failed  # type: ignore[attr-defined]
    assert {path: type(error) for path, error in failed.items()} == {"a/1": AccessDeniedError, "a/2": ThrottledError}
    assert inner.paths() == ["a/1", "a/2"]
    # Four tries, and not four times four.
    assert inner.requests == {"delete_batch": QUICK.attempts}
    assert inner._retrier.pace.limit < inner._retrier.pace.concurrency


def test_a_key_that_fails_for_ever_is_not_tried_by_two_retriers() -> None:
    """Row 41: only failures that may pass: reported as one, after as many tries as the policy has."""
    inner = MemoryObjects(fails("delete_one", 99, lost, path="/2"), retrier=retrier())
    inner.fill(["a/1", "a/2", "a/3"])
    with pytest.raises(TransientBackendError) as caught:
        RetryingBackend(inner, inner._retrier).rm_files(["a/1", "a/2", "a/3"])
    assert list(caught.value.failed) == ["a/2"]  # type: ignore[attr-defined]
    assert inner.requests == {"delete_batch": QUICK.attempts}


def test_a_batch_whose_answer_is_lost_is_sent_again() -> None:
    """Removing twice is removing once; a request that is refused as a whole ends it, for all would be."""
    store = MemoryObjects(fails("delete_batch", 2, lost, "after"), retrier=retrier())
    store.fill(["a/1", "a/2"])
    store.rm_files(["a/1", "a/2"])
    assert store.paths() == []
    assert store.requests == {"delete_batch": 3}
    store = MemoryObjects(fails("delete_batch", 99, denied), retrier=retrier())
    with pytest.raises(AccessDeniedError):
        store.rm_files([f"a/{number}" for number in range(3000)])
    assert store.requests == {"delete_batch": 1}


@pytest.fixture(params=["moto", "oss"])
def store(request: pytest.FixtureRequest, make_store: Callable[[str], BucketStore]) -> BucketStore:
    """Both dialects."""
    return make_store(request.param)


def backend_of(store: BucketStore, **options: Any) -> Backend:
    return retrying_backend(store, retrier(), **options)


def test_keys_refused_inside_a_success_on_the_wire(store: BucketStore) -> None:
    """Row 41: a batch of three is answered with 200 and says that two were not removed (S3 names them, OSS leaves them out): the next request
    removes them, or says why not."""
    for key in "abc":
        store.put(key, b"1")
    keys = [f"exp/{key}" for key in "abc"]
    if store.name == "oss":
        document = f"<DeleteResult><Deleted><Key>{keys[0]}</Key></Deleted></DeleteResult>"
    else:
        errors = "".join(
            f"<Error><Key>{escape(key)}</Key><Code>{code}</Code><Message>m</Message></Error>"
            for key, code in ((keys[1], "SlowDown"), (keys[2], "InternalError"))
        )
        document = f"<DeleteResult>{errors}</DeleteResult>"
    lying = Fault(method="POST", query="delete", status=200, document=document.encode())
    refused = store.server.faults.add(lying)
    backend_of(store).rm_files([store.at(key) for key in "abc"])
    assert refused.hits == 1
    # What the answer called removed was not: the store is believed, as it must be.
    assert store.keys() == ["a"]


# --- copies ---------------------------------------------------------------------------------------------------------------


def copying(fail: Any = lambda request, path, when: None, **options: Any) -> MemoryObjects:
    """A store with an object of 13 parts at a/source."""
    made = {"retrier": retrier(), "part_bytes": 1000, "max_single_copy": 1000, **options}
    store = MemoryObjects(**made)
    store.fill(["a/source"], DATA)
    store.fail = fail
    return store


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("request_", ["head", "begin", "copy_part", "complete"])
def test_each_request_of_a_copy_may_fail(request_: str, when: When) -> None:
    """Lost requests and lost answers are outlived, part by part; the copy has the bytes, no upload stays, and no part is copied without need."""
    store = copying(fails(request_, 3, lost, when))
    RetryingBackend(store, store._retrier).cp_file("a/source", "a/target")
    assert store.data("a/target") == DATA
    # A begin that was made, and whose answer was lost, has begun an upload that nobody knows of.
    assert len(store.uploads) == (3 if (request_, when) == ("begin", "after") else 0)
    assert store.requests["copy_part"] == 13 + (3 if request_ == "copy_part" else 0)


def test_a_copy_that_is_given_up_leaves_nothing() -> None:
    """A part that is refused: nothing visible, no upload, and the others are not copied to the end."""
    store = copying(workers=2)
    gate = threading.Event()

    def fail(request: str, path: str, when: When) -> None:
        if request == "copy_part" and when == "before":
            if gate.is_set():
                raise AccessDeniedError("no")
            gate.set()

    store.fail = fail
    with pytest.raises(AccessDeniedError):
        store.cp_file("a/source", "a/target")
    assert store.paths() == ["a/source"]
    assert store.uploads == {}
    assert store.requests["copy_part"] <= 4


@pytest.mark.parametrize(("workers", "slots", "expected"), [(4, 16, 4), (8, 3, 3)])
def test_parts_are_copied_side_by_side_within_the_pace(workers: int, slots: int, expected: int) -> None:
    """As many at a time as there are workers, and as the process allows."""
    pace, full, used = Pace(slots), threading.Event(), list[int]()

    def fail(request: str, path: str, when: When) -> None:
        if request == "copy_part" and when == "before":
            used.append(pace.used)
            if used[-1] == expected:
                full.set()
            assert full.wait(60)

    store = copying(fail, workers=workers, retrier=Retrier(QUICK, pace=pace))
    store.cp_file("a/source", "a/target")
    assert store.data("a/target") == DATA
    assert max(used) == expected


def without_crc(store: MemoryObjects) -> None:
    """A store that keeps no CRC."""
    stored = store._stored

    def without(path: str) -> Stored:
        return Stored(etag=stored(path).etag, size=stored(path).size)

    store._stored = without  # type: ignore[method-assign]


@pytest.mark.parametrize("keeps_crc", [True, False])
def test_an_answer_to_complete_that_was_lost_is_settled(keeps_crc: bool) -> None:
    """Made, unanswered, and then "no such upload": the object is looked at. One of the same size that was there before is not taken for it."""
    store = copying(fails("complete", 1, lost, "after"))
    if not keeps_crc:
        without_crc(store)
    store.fill(["a/target"], bytes(len(DATA)))
    store.cp_file("a/source", "a/target")
    assert store.data("a/target") == DATA
    assert store.requests["complete"] == 2

    store = copying()
    if not keeps_crc:
        without_crc(store)
    store.fill(["a/target"], bytes(len(DATA)))
    gone = threading.Event()

    def fail(request: str, path: str, when: When) -> None:
        # A rule of the bucket drops the upload in the middle.
        if request == "complete" and when == "before" and not gone.is_set():
            gone.set()
            store.uploads.clear()
            raise lost()

    store.fail = fail
    with pytest.raises(TransientBackendError, match="no such upload"):
        store.cp_file("a/source", "a/target")
    assert store.data("a/target") == bytes(len(DATA))


def test_a_source_that_changes_meanwhile() -> None:
    """Parts of two versions: refused by the CRC where the store keeps one, else noticed by the ETag; nothing stays."""
    other = bytes(reversed(DATA))
    for keeps_crc in (True, False):
        store = copying()
        if not keeps_crc:
            without_crc(store)

        def change(request: str, path: str, when: When, store: MemoryObjects = store) -> None:
            if request == "copy_part" and when == "before" and store.requests["copy_part"] == 6:
                store.fill(["a/source"], other)

        store.fail = change
        with pytest.raises(TransientBackendError, match="replaced while" if not keeps_crc else "instead of") as caught:
            store.cp_file("a/source", "a/target")
        assert isinstance(caught.value, ChecksumMismatchError) is keeps_crc
        assert store.paths() == ["a/source"]
        assert store.uploads == {}
        # Once more, in peace.
        RetryingBackend(store, store._retrier).cp_file("a/source", "a/target")
        assert store.data("a/target") == other


def test_a_copy_in_parts_on_the_wire(store: BucketStore) -> None:
    """On both dialects: the parts are copied by the store, its CRC is that of the source, throttled parts are tried again, and a copy that is
    given up leaves no upload."""
    data = os.urandom((12 << 20) + 7)
    backend = backend_of(store, part_bytes=5 << 20, max_single_copy=1 << 20)
    backend.pipe_file(store.at("source"), data)
    store.server.log.clear()
    throttled = store.server.faults.add(Fault(method="PUT", query="partNumber", status=503, code="SlowDown", times=2))
    backend.cp_file(store.at("source"), store.at("target"))
    assert throttled.hits == 2
    assert store.get("target") == data
    assert backend.stored_crc(store.at("target")) == backend.stored_crc(store.at("source"))
    assert sum(request.size_bytes for request in store.server.log) < 4096
    assert store.uploads() == {}
    store.server.faults.add(Fault(method="PUT", query="partNumber", status=400, code="InvalidRequest", times=None))
    with pytest.raises(PermanentBackendError):
        backend.cp_file(store.at("source"), store.at("other"))
    assert store.keys() == ["source", "target"]
    assert store.uploads() == {}


@pytest.mark.parametrize("drop", [True, False], ids=["lost", "error in a 200"])
def test_a_copy_in_one_request(make_store: Callable[[str], BucketStore], drop: bool) -> None:
    """Row 15: S3 may report a failed copy in the body of a 200, which is never taken for success; a lost answer is asked for again."""
    store = make_store("moto")
    store.put("source", DATA)
    fault = Fault(method="PUT", key="*/target", drop="after") if drop else None
    failed = store.server.faults.add(
        fault or Fault(method="PUT", key="*/target", status=200, code="InternalError", times=2)
    )
    backend_of(store).cp_file(store.at("source"), store.at("target"))
    assert failed.hits == (1 if drop else 2)
    assert crc64xz_hex(store.get("target")) == crc64xz_hex(DATA)
