"""Rows 15, 18, 20 to 22, 24, 27 and 37: answers that are lost, torn, damaged or not true, and connections that hardly move. On the wire, both dialects;
S3 with both engines where it is they that must notice."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends import pace
from ckptmgr.backends.base import Backend
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import (
    ChecksumMismatchError,
    CkptmgrError,
    ObjectExistsError,
    SizeMismatchError,
    TransientBackendError,
)
from ckptmgr.core.layout import Stem
from ckptmgr.core.protocol import replicate
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.memory_parts import MemoryJournal
from ckptmgr.testing.stores import BucketStore, retrying_backend
from ckptmgr.testing.waits import Stopwatch

PART_BYTES = 5 << 20
DATA = os.urandom(2 * PART_BYTES + 7)
DIGESTS = digest_bytes(DATA)
# To be read in parts; S3 sets no limit on these.
READ_PART = 2 << 20
READ = DATA[: 2 * READ_PART + 7]
READ_DIGESTS = digest_bytes(READ)
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.002)
SOON_S = 20.0

MakeStore = Callable[[str], BucketStore]


@pytest.fixture(params=["moto", "oss"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> BucketStore:
    """Both dialects."""
    return make_store(request.param)


@pytest.fixture(params=["moto raw", "moto boto3", "oss"])
def reading(request: pytest.FixtureRequest, make_store: MakeStore) -> tuple[BucketStore, dict[str, Any]]:
    """Both dialects, and both engines of S3: a store, and the options of its backend."""
    kind, _, engine = request.param.partition(" ")
    return make_store(kind), {"store_options": StoreOptions(engine="boto3")} if engine == "boto3" else {}


def backend_of(store: BucketStore, **options: Any) -> Backend:
    return retrying_backend(store, Retrier(QUICK), **{"part_bytes": PART_BYTES, **options})


def reader_of(store: BucketStore, **options: Any) -> Backend:
    return backend_of(store, part_bytes=READ_PART, **options)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of three parts."""
    (tmp_path / "f").write_bytes(DATA)
    return tmp_path / "f"


# --- the end of an upload -------------------------------------------------------------------------------------------------


def test_an_upload_that_is_gone_because_it_was_completed(store: BucketStore, source: Path) -> None:
    """Row 20: the answer to complete is lost, and the next one is "no such upload": size and CRC say that the object is ours; nothing is sent again."""
    faults = store.server.faults
    lost = faults.add(Fault(method="POST", query="uploadId", drop="after"))
    gone = faults.add(Fault(method="POST", query="uploadId", status=404, code="NoSuchUpload", times=None))
    backend_of(store).put_file(str(source), store.at("f"), expected=DIGESTS)
    assert (lost.hits, gone.hits) == (1, 1)
    assert store.get("f") == DATA
    assert len([1 for request in store.server.log if "partNumber" in request.query]) == 3


def test_an_upload_that_is_gone_because_it_was_aborted(store: BucketStore, source: Path) -> None:
    """Row 20: a rule of the bucket drops the upload before it is completed: a new one is begun at once, by the same call. An object of the same size
    that lies there is not taken for it."""
    store.put("f", bytes(len(DATA)))
    aborted = store.server.faults.add(Fault(method="POST", query="uploadId", status=404, code="NoSuchUpload"))
    journal = MemoryJournal()
    backend_of(store).put_file(str(source), store.at("f"), expected=DIGESTS, parts=journal)
    assert aborted.hits == 1
    assert store.get("f") == DATA
    assert len(journal.begun) == 2
    assert journal.upload_id is None


@pytest.mark.parametrize("journal", [None, MemoryJournal()], ids=["", "journal"])
def test_a_race_at_the_end_of_an_upload_begins_it_anew(
    make_store: MakeStore, source: Path, journal: MemoryJournal | None
) -> None:
    """Row 21: S3 answers complete with 409 ConditionalRequestConflict, after which it wants all parts again."""
    store = make_store("moto")
    raced = store.server.faults.add(
        Fault(method="POST", query="uploadId", status=409, code="ConditionalRequestConflict")
    )
    backend_of(store).put_file(str(source), store.at("f"), mode="create", expected=DIGESTS, parts=journal)
    assert raced.hits == 1
    assert store.get("f") == DATA
    sent = [request for request in store.server.log if "partNumber" in request.query]
    assert len({request.query["uploadId"] for request in sent}) == 2
    assert len(sent) == 6
    assert store.uploads() == {}


def test_a_race_of_a_put_is_tried_again(make_store: MakeStore) -> None:
    """Row 21: 409 at a conditional PUT says nothing of the key: it is made again, and then decided."""
    store = make_store("moto")
    raced = Fault(method="PUT", status=409, code="ConditionalRequestConflict", times=2)
    backend = backend_of(store)
    for data in (b"ours", b"not ours"):
        with store.server.faults.injected(raced) as active:
            if data == b"ours":
                backend.pipe_file(store.at("k"), data, mode="create")
            else:
                with pytest.raises(ObjectExistsError):
                    backend.pipe_file(store.at("k"), data, mode="create")
        assert active.hits == 2
        assert store.get("k") == b"ours"


# --- damage on the way ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1000, len(DATA)], ids=["whole", "parts"])
def test_damage_on_the_way_up_again_and_again(store: BucketStore, tmp_path: Path, size: int) -> None:
    """Row 24: every body arrives with a flipped bit: never stored as if it were right, and the next try, over a good line, is."""
    (tmp_path / "f").write_bytes(DATA[:size])
    digests = digest_bytes(DATA[:size])
    with store.server.faults.injected(Fault(method="PUT", corrupt_request=True, times=None)) as damaged:
        with pytest.raises(TransientBackendError):
            backend_of(store).put_file(str(tmp_path / "f"), store.at("f"), expected=digests)
        assert damaged.hits >= QUICK.attempts
    assert store.keys() == []
    assert store.uploads() == {}
    backend_of(store).put_file(str(tmp_path / "f"), store.at("f"), expected=digests)
    assert store.get("f") == DATA[:size]


@pytest.mark.parametrize("size", [1000, len(READ)], ids=["whole", "parts"])
def test_damage_on_the_way_down(reading: tuple[BucketStore, dict[str, Any]], tmp_path: Path, size: int) -> None:
    """Rows 24 and 27: a bit flips in an answer whose headers are right: what arrived has another CRC than it should, and is not left lying about."""
    store, options = reading
    store.put("f", READ[:size])
    target, digests = tmp_path / "got", digest_bytes(READ[:size])
    backend = reader_of(store, **options)
    damaged = store.server.faults.add(Fault(method="GET", key="*/f", corrupt=True))
    with pytest.raises(ChecksumMismatchError) as caught:
        backend.get_file(store.at("f"), str(target), expected=digests)
    assert damaged.hits == 1
    assert caught.value.expected != caught.value.actual  # type: ignore[attr-defined]
    assert not target.exists()
    assert backend.get_file(store.at("f"), str(target), expected=digests) is True
    assert target.read_bytes() == READ[:size]


# --- torn and wrong answers to reads --------------------------------------------------------------------------------------


def ranges(store: BucketStore) -> list[str]:
    """The ranges that were asked for, in order; "" for the whole."""
    return [request.headers.get("range", "") for request in store.server.log if request.method == "GET"]


def test_a_body_that_is_cut_goes_on_where_it_broke(reading: tuple[BucketStore, dict[str, Any]], tmp_path: Path) -> None:
    """Row 27: each of two parts breaks off once; what is asked for again begins where it broke, of the same version, and the whole is proven."""
    store, options = reading
    store.put("f", READ)

    def is_whole_part(seen: Seen) -> bool:
        return seen.headers.get("range") in (f"bytes=0-{READ_PART - 1}", f"bytes={READ_PART}-{2 * READ_PART - 1}")

    cut = Fault(method="GET", key="*/f", match=is_whole_part, cut_body=3 << 19, cut_by="end", times=2)
    active = store.server.faults.add(cut)
    store.server.log.clear()
    assert reader_of(store, workers=1, **options).get_file(store.at("f"), str(tmp_path / "got"), expected=READ_DIGESTS)
    assert (tmp_path / "got").read_bytes() == READ
    assert active.hits == 2
    begins = [int(text.split("=")[1].split("-")[0]) for text in ranges(store)]
    assert begins[::2] == [0, READ_PART, 2 * READ_PART]
    # Some clients lose the block in which it happens.
    assert 1 << 20 <= begins[1] <= 3 << 19
    assert 1 << 20 <= begins[3] - READ_PART <= 3 << 19
    assert all("if-match" in request.headers for request in store.server.log if request.method == "GET")


def test_a_small_object_that_is_cut_is_read_anew(reading: tuple[BucketStore, dict[str, Any]], tmp_path: Path) -> None:
    """Row 27: in one request, without a look before; after a break from its beginning, for it may be another by then."""
    store, options = reading
    data = READ[: 1 << 20]
    store.put("f", data)
    cut = store.server.faults.add(Fault(method="GET", key="*/f", cut_body=500_000))
    store.server.log.clear()
    assert reader_of(store, **options).get_file(store.at("f"), str(tmp_path / "got"), expected=digest_bytes(data))
    assert (tmp_path / "got").read_bytes() == data
    assert cut.hits == 1
    assert [(request.method, request.headers.get("range")) for request in store.server.log] == [("GET", None)] * 2


def test_a_range_that_is_ignored(reading: tuple[BucketStore, dict[str, Any]], tmp_path: Path) -> None:
    """A store, or a cache before it, that answers every range with the whole: an error, never other bytes than those asked for."""
    store, options = reading
    store.put("f", READ)
    ignoring = Fault(method="GET", key="*/f", ignore_headers=("range",), times=None)
    backend = reader_of(store, **options)
    with store.server.faults.injected(ignoring):
        with pytest.raises(TransientBackendError):
            backend.get_file(store.at("f"), str(tmp_path / "got"))
        with pytest.raises(TransientBackendError):
            backend.cat_file(store.at("f"), 1000, 2000)
    assert not (tmp_path / "got").exists()
    # Once, by a cache that has woken up since.
    ignored = store.server.faults.add(Fault(method="GET", key="*/f", ignore_headers=("range",)))
    backend.get_file(store.at("f"), str(tmp_path / "got"), expected=READ_DIGESTS)
    assert ignored.hits == 1
    assert (tmp_path / "got").read_bytes() == READ
    assert backend.cat_file(store.at("f"), 1000, 2000) == READ[1000:2000]


@pytest.mark.parametrize("size", [1000, len(READ)], ids=["whole", "parts"])
@pytest.mark.parametrize("less", [1, -1], ids=["truncated", "longer"])
def test_an_object_of_another_size(store: BucketStore, tmp_path: Path, size: int, less: int) -> None:
    """Row 26: what is shorter or longer than it should be is known before, or as soon as, it arrives, and not fetched again and again."""
    stored = (READ + b"x")[: size - less]
    store.put("f", stored)
    store.server.log.clear()
    with pytest.raises(SizeMismatchError):
        reader_of(store).get_file(store.at("f"), str(tmp_path / "got"), expected=digest_bytes(READ[:size]))
    assert len(store.server.log) == 1
    assert not (tmp_path / "got").exists()


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What trickles is noticed after half a second."""
    monkeypatch.setattr(pace, "TRICKLE_S", 0.5)


@pytest.mark.usefixtures("_impatient")
@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_a_connection_that_trickles_is_cut(make_store: MakeStore, tmp_path: Path, kind: str) -> None:
    """Row 22: one part of three comes in drops, each before anybody would call it silent: it is cut, and goes on over another connection from where
    it was; the others are not disturbed."""
    store = make_store(kind)
    store.put("f", READ)

    def is_second(seen: Seen) -> bool:
        return seen.headers.get("range", "").startswith(f"bytes={READ_PART}-")

    slow = store.server.faults.add(Fault(method="GET", key="*/f", match=is_second, trickle_bytes_s=300))
    store.server.log.clear()
    watch = Stopwatch()
    backend = reader_of(store, stall_s=30.0)
    assert backend.get_file(store.at("f"), str(tmp_path / "got"), expected=READ_DIGESTS)
    assert watch.seconds < SOON_S
    assert (tmp_path / "got").read_bytes() == READ
    assert slow.hits == 1
    assert backend.retries == 1
    slow.release()
    begins = sorted(int(text.split("=")[1].split("-")[0]) for text in ranges(store))
    assert len(begins) == 4
    assert READ_PART + READ_PART // 2 <= begins[2] < 2 * READ_PART


# --- two writers ----------------------------------------------------------------------------------------------------------


def test_two_writers_of_one_save(
    store: BucketStore,
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: Callable[..., Stem],
) -> None:
    """Row 37: the same save, replicated by two at the same moment: one manifest is created, and both end well, for it is theirs."""
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = new_tier(run)
    stem = local_save(tier, run, 100)
    manifest, _ = tier.pending()[0]
    held = store.server.faults.add(Fault(method="PUT", key="*/manifests/*", hold="before", times=2))
    failures: list[CkptmgrError] = []

    def write() -> None:
        try:
            fs = backend_of(store)
            other = RunDirectory.open(run.url, fs=fs, root=run.root)
            steps = replicate(manifest, new_nonce=lambda: "00000000")
            drive(steps, StoreDriver(other, source=tier.data_dir(stem)))
        except CkptmgrError as error:
            failures.append(error)

    threads = [threading.Thread(target=write) for _ in range(2)]
    for thread in threads:
        thread.start()
    # Both creates have arrived before either is answered.
    pause, deadline = threading.Event(), time.monotonic() + SOON_S
    while held.hits < 2:
        assert time.monotonic() < deadline
        pause.wait(0.01)
    held.release()
    for thread in threads:
        thread.join(SOON_S)
        assert not thread.is_alive()
    assert failures == []
    assert store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]
    statuses = [r.status for r in store.server.log if r.method == "PUT" and "/manifests/" in r.key]
    assert sorted(statuses) == [200, 409 if store.name == "oss" else 412]
