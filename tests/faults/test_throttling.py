"""Rows 13 and 14: stores that ask for less, that fail for ever, or at random."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.backends.answers import retry_after_s
from ckptmgr.backends.base import Backend
from ckptmgr.backends.pace import Pace
from ckptmgr.backends.retry import PATIENT, Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import BackendTimeoutError, PermanentBackendError, ThrottledError
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.memory_objects import MemoryObjects, When, at_random
from ckptmgr.testing.stores import BucketStore, retrying_backend
from ckptmgr.testing.waits import Waits

PART_BYTES = 5 << 20
DATA = os.urandom(7 * PART_BYTES + 11)
DEADLINE_S = 60.0

MakeStore = Callable[[str], BucketStore]


class Watched(Pace):
    """A pace that notes how many requests were under way, after the store asked for less and before."""

    def __init__(self, concurrency: int) -> None:
        super().__init__(concurrency)
        self.refusals = 0
        self.most = {False: 0, True: 0}
        self.limits: list[int] = []

    def slowed(self) -> None:
        super().slowed()
        self.refusals += 1
        self.limits.append(self.limit)

    def _acquire(self, ends: tuple[threading.Event, ...]) -> int:
        result = super()._acquire(ends)
        slow = self.refusals > 0
        self.most[slow] = max(self.most[slow], self.used)
        return result


@pytest.fixture(params=["moto", "oss"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> BucketStore:
    """Both dialects."""
    return make_store(request.param)


# --- SlowDown -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_store_that_asks_for_less_gets_it(store: BucketStore, tmp_path: Path, direction: str) -> None:
    """Row 13: five of eight parts are refused with SlowDown, and Retry-After: no try comes earlier, half as many go on at a time, and the
    bytes are right."""
    # S3 takes no smaller parts.
    part_bytes = PART_BYTES if (store.name, direction) == ("moto", "up") else 128 << 10
    data, source, got = DATA[: 7 * part_bytes + 11], tmp_path / "f", tmp_path / "got"
    source.write_bytes(data)
    waits, pace = Waits(), Watched(16)
    backend = retrying_backend(store, waits.retrier(PATIENT, pace), part_bytes=part_bytes)
    tries: dict[str, list[float]] = {}

    def note(seen: Seen) -> bool:
        part = seen.query.get("partNumber") or seen.headers.get("range")
        if part is not None:
            tries.setdefault(part, []).append(waits.clock())
        return False

    store.server.faults.add(Fault(match=note))
    if direction == "down":
        store.put("f", data)
        match: dict[str, Any] = {"method": "GET", "key": "*/f"}
    else:
        match = {"method": "PUT", "query": "partNumber"}
    refused = store.server.faults.add(Fault(**match, status=503, code="SlowDown", retry_after_s=9, times=5))
    if direction == "down":
        assert backend.get_file(store.at("f"), str(got), expected=digest_bytes(data))
        assert got.read_bytes() == data
    else:
        backend.put_file(str(source), store.at("f"), expected=digest_bytes(data))
        assert store.get("f") == data
    assert refused.hits == pace.refusals == 5
    assert len(tries) == 8
    again = [later - earlier for times in tries.values() for earlier, later in itertools.pairwise(times)]
    assert len(again) == 5
    assert min(again) >= 9.0 - 1e-6
    # Four of them were under way.
    assert min(pace.limits) <= 2
    assert pace.used == 0


def test_it_goes_on_with_half_of_what_it_had(tmp_path: Path) -> None:
    """Row 13: eight requests at a time until one is refused, then never more than four until as many as that went well."""
    pace, gate, refused = Watched(8), threading.Event(), threading.Event()
    after: list[int] = []

    def fail(request: str, path: str, when: When) -> None:
        if request != "send" or when == "after":
            return
        if not refused.is_set():
            # All eight are under way; the first that sees it is refused, while the others wait.
            if pace.used == 8 and not gate.is_set():
                gate.set()
                refused.set()
                raise ThrottledError("slow down")
            assert gate.wait(DEADLINE_S)
        elif len(after) < 4:
            after.append(pace.used)

    data = os.urandom(40_000)
    (tmp_path / "f").write_bytes(data)
    retrier = Retrier(RetryPolicy(attempts=3), pace=pace, sleep=lambda seconds: None)
    store = MemoryObjects(fail, retrier=retrier, part_bytes=1000, multipart_threshold=1000, workers=8)
    store.put_file(str(tmp_path / "f"), "a/f")
    assert store.data("a/f") == data
    assert pace.most[False] == 8
    assert pace.limits == [4]
    assert pace.limit == 8


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-3"}, 0.0),
        (
            {"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT", "date": "Fri, 31 Dec 1999 23:59:29 GMT"},
            30.0,
        ),
        ({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT", "date": "Sat, 01 Jan 2000 00:00:00 GMT"}, 0.0),
        ({"retry-after": "Fri, 31 Dec 1999 23:59:59 GMT"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after": "nan"}, None),
        ({}, None),
    ],
)
def test_what_was_asked_for(headers: Mapping[str, str], asked: float | None) -> None:
    """Seconds, or a date, which is compared with the answer's own: this machine's clock may be wrong. Nonsense asks for nothing."""
    assert retry_after_s(headers) == asked


@pytest.mark.parametrize("status", [500, 503, 429])
def test_any_answer_may_ask_for_time(store: BucketStore, status: int) -> None:
    """Row 13: a proxy before the store asks with whatever status."""
    store.server.faults.add(Fault(method="PUT", status=status, code="Busy", retry_after_s=7))
    waits = Waits()
    retrying_backend(store, waits.retrier(RetryPolicy())).pipe_file(store.at("k"), b"1")
    assert waits.asked == [7.0]
    assert store.get("k") == b"1"


def test_blocks_of_large_files_take_their_turn() -> None:
    """Who reads ranges, as verify does, keeps to the slots and the bandwidth; a manifest does not wait behind them."""
    waits = Waits()
    pace = Pace(1, 1000.0, waits.clock, waits.sleep)
    used: list[tuple[str, int]] = []

    def fail(request: str, path: str, when: When) -> None:
        used.append((request, pace.used))

    store = MemoryObjects(fail, retrier=waits.retrier(RetryPolicy(), pace))
    store.fill(["a/f"], bytes(5000))
    with pace.slot():
        assert len(store.cat_file("a/f")) == 5000
    assert waits.asked == []
    assert store.cat_file("a/f", 1000, 4000) == bytes(3000)
    assert ("get", 1) in used
    assert 2.8 <= sum(waits.asked) <= 3.0
    assert pace.used == 0


# --- for ever -------------------------------------------------------------------------------------------------------------


def test_failing_for_ever_ends_with_the_deadline(store: BucketStore, tmp_path: Path) -> None:
    """Row 14: 503 to everything: given up within the policy's time, whichever of its requests it is, and nothing stays."""
    (tmp_path / "f").write_bytes(DATA[: 2 * PART_BYTES])
    store.put("there", b"1" * 100)
    policy = RetryPolicy(attempts=1000, deadline_s=100.0, base_s=1.0, cap_s=20.0)
    calls: list[Callable[[Backend], object]] = [
        lambda backend: backend.put_file(str(tmp_path / "f"), store.at("f")),
        lambda backend: backend.get_file(store.at("there"), str(tmp_path / "got")),
        lambda backend: backend.pipe_file(store.at("k"), b"1"),
        lambda backend: backend.find(store.at("")),
        lambda backend: backend.rm_files([store.at("there")]),
        lambda backend: backend.cp_file(store.at("there"), store.at("copy")),
    ]
    with store.server.faults.injected(Fault(status=503, code="SlowDown", times=None)):
        for call in calls:
            waits, pace = Waits(), Pace(16)
            with pytest.raises(ThrottledError, match="gave up after") as caught:
                call(retrying_backend(store, waits.retrier(policy, pace), part_bytes=PART_BYTES))
            assert 50.0 < sum(waits.asked) <= 100.0 + 1e-6
            assert caught.value.attempts > 3  # type: ignore[attr-defined]
            assert (pace.used, pace.limit) == (0, 8)
    assert store.keys() == ["there"]
    assert not (tmp_path / "got").exists()
    assert store.uploads() == {}


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the waits in between."""
    monkeypatch.setattr("ckptmgr.backends.retry._JITTER", SimpleNamespace(uniform=lambda low, high: 0.0))


@pytest.mark.usefixtures("_no_waiting")
def test_what_a_store_does_not_take_stays_pending(
    store: BucketStore,
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: Callable[..., Stem],
    make_checkpoint: Callable[..., Path],
    cli_here: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Row 14: as long as a store refuses all writes, `drain` ends with 6 and `push` with 4, and nothing is visible or lost; after that both go through."""
    url = f"{store.url}/run"
    run = RunDirectory.open_or_create(url)
    tier = new_tier(run)
    stem = local_save(tier, run, 100)
    with store.server.faults.injected(Fault(method="PUT", status=503, code="SlowDown", times=None)):
        drained = cli_here("drain", tier.root)
        assert drained.returncode == 6, drained.stderr
        assert str(stem) in drained.stderr
        pushed = cli_here("push", make_checkpoint(200), url)
        assert pushed.returncode == 4, pushed.stderr
        assert "gave up after" in pushed.stderr
    assert store.keys("run/manifests/") == []
    assert [entry.stem for _, entry in tier.pending()] == [stem]
    assert cli_here("drain", tier.root).returncode == 0
    assert cli_here("push", make_checkpoint(200), url).returncode == 0
    assert [row["step"] for row in json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]] == [100, 200]


# --- at random ------------------------------------------------------------------------------------------------------------


def test_two_hundred_uploads_through_a_store_that_fails_every_third_time(tmp_path: Path) -> None:
    """30 % of all requests fail, half of them after they were made: 200 uploads of 40 parts all succeed unattended, each within its time."""
    seed = int.from_bytes(os.urandom(4), "big")
    waits = Waits()
    retrier = waits.retrier(PATIENT)
    inner = MemoryObjects(at_random(seed, 0.3), retrier=retrier, part_bytes=100, multipart_threshold=100)
    store = RetryingBackend(inner, retrier)
    data = os.urandom(4000)
    (tmp_path / "f").write_bytes(data)
    digests = digest_bytes(data)
    for number in range(200):
        store.put_file(str(tmp_path / "f"), f"a/{number:03}", expected=digests)
    assert len(inner.paths()) == 200, f"seed {seed}"
    assert all(inner.data(path) == data for path in inner.paths())
    made = sum(inner.requests.values())
    assert 0.25 < retrier.retries / made < 0.35
    assert max(waits.asked) <= PATIENT.cap_s


@pytest.mark.parametrize("error", [BackendTimeoutError, PermanentBackendError])
def test_only_what_may_pass_is_tried_again(error: type[Exception]) -> None:
    """The same failure of another class costs one request."""

    def fail(request: str, path: str, when: When) -> None:
        raise error("injected")

    inner = MemoryObjects(fail, retrier=Retrier(RetryPolicy(attempts=4), sleep=lambda seconds: None))
    with pytest.raises(error):
        RetryingBackend(inner, inner._retrier).find("a")
    assert inner.requests == {"list": 4 if error is BackendTimeoutError else 1}
