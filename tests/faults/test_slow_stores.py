"""Rows 22 and 23: connections that stand still, and links that are slow."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import BackendTimeoutError
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.relay import Relay
from ckptmgr.testing.stores import Store
from ckptmgr.testing.waits import Stopwatch

STALL_S = 1.0
PART_BYTES = 5 << 20
DATA = os.urandom(3 * PART_BYTES + 11)
# Nothing may take as long as the clients' own limit of 30 s: then it was not this one that has cut it.
SOON_S = 20.0
# More tries than are asked for: on a busy machine a working store may be silent for STALL_S, too.
QUICK = RetryPolicy(attempts=20, base_s=0.01, cap_s=0.02, deadline_s=60.0)

Open = Callable[..., Backend]


@pytest.fixture(params=["s3", "moto", "oss"])
def store(request: pytest.FixtureRequest, make_store: Callable[[str], Store]) -> Store:
    """Real S3, and both dialects."""
    return make_store(request.param)


@pytest.fixture
def open_backend(store: Store) -> Open:
    """Makes a backend of that store; its clients read the environment."""

    def make(*, retry: bool = True, stall_s: float = STALL_S, **options: Any) -> Backend:
        from ckptmgr.backends.oss import OSSBackend
        from ckptmgr.backends.s3 import S3Backend

        retrier = Retrier(QUICK if retry else RetryPolicy(attempts=1))
        kind = OSSBackend if store.name == "oss" else S3Backend
        sizes = {"multipart_threshold": PART_BYTES, "part_bytes": PART_BYTES}
        backend = kind(retrier=retrier, stall_s=stall_s, **{**sizes, **options})
        return RetryingBackend(backend, retrier) if retry else backend

    return make


def at(store: Store, key: str) -> str:
    return f"{store.url.split('://')[1]}/{key}"


@pytest.fixture
def through(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Relay]]:
    """Puts a relay between the clients and the store."""
    relays: list[Relay] = []

    def put(**options: Any) -> Relay:
        relays.append(Relay(store.server.url, **options).__enter__())
        monkeypatch.setenv("OSS_ENDPOINT" if store.name == "oss" else "AWS_ENDPOINT_URL", relays[-1].url)
        return relays[-1]

    yield put
    for relay in relays:
        relay.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("store", "threshold"),
    [
        pytest.param("s3", 1 << 30, id="s3-whole"),
        pytest.param("moto", PART_BYTES, id="moto-parts"),
        pytest.param("oss", 1 << 30, id="oss-whole"),
        pytest.param("oss", PART_BYTES, id="oss-parts"),
        pytest.param("s3", PART_BYTES, id="s3-parts", marks=pytest.mark.slow),
        pytest.param("moto", 1 << 30, id="moto-whole", marks=pytest.mark.slow),
    ],
    indirect=["store"],
)
def test_a_store_that_stops_reading_is_cut(
    store: Store, open_backend: Open, through: Callable[..., Relay], tmp_path: Path, threshold: int
) -> None:
    """Row 22: in the middle of a body nothing is taken any more, and the client is stuck in sending, for there is more than the kernel holds:
    the request is cut after the limit, and tried again."""
    relay = through(buffer_bytes=64 << 10)
    source = tmp_path / "f"
    source.write_bytes(DATA)
    relay.freeze_after(1 << 20)
    watch = Stopwatch()
    with pytest.raises(BackendTimeoutError):
        open_backend(retry=False, multipart_threshold=threshold).put_file(str(source), at(store, "f"))
    assert watch.seconds < SOON_S
    assert relay.frozen.is_set()
    relay.thaw()

    relay.freeze_after(1 << 20)
    backend = open_backend(multipart_threshold=threshold)
    retried = 0

    def thaw() -> None:
        nonlocal retried
        retried += 1
        relay.thaw()

    backend.retrier._on_retry = thaw
    watch = Stopwatch()
    backend.put_file(str(source), at(store, "f"), expected=digest_bytes(DATA))
    assert watch.seconds < SOON_S
    assert retried >= 1
    assert backend.retries == retried
    assert store.get("f") == DATA


@pytest.fixture(params=["moto", "oss"])
def faulty_store(request: pytest.FixtureRequest, make_store: Callable[[str], Store]) -> Store:
    """The dialects, whose answers can be held."""
    return make_store(request.param)


class TestDialects:
    """Servers that take a request and say nothing, or stop in the middle of the answer; and a slow link to one that works."""

    @pytest.fixture
    def store(self, faulty_store: Store) -> Store:
        return faulty_store

    @pytest.mark.parametrize("size", [1000, len(DATA)], ids=["whole", "parts"])
    def test_a_write_without_an_answer(self, store: Store, open_backend: Open, tmp_path: Path, size: int) -> None:
        """Row 22: cut and made again; the bytes are right."""
        source = tmp_path / "f"
        source.write_bytes(DATA[:size])
        held = store.server.faults.add(Fault(method="PUT", hold="before"))
        watch = Stopwatch()
        backend = open_backend()
        backend.put_file(str(source), at(store, "f"), expected=digest_bytes(DATA[:size]))
        assert watch.seconds < SOON_S
        assert held.hits == 1
        assert backend.retries >= 1
        held.release()
        assert store.get("f") == DATA[:size]

    def test_a_look_without_an_answer(self, store: Store, open_backend: Open) -> None:
        """Small requests are cut as well."""
        store.put("f", DATA[:100])
        store.server.faults.add(Fault(method="HEAD", hold="before"))
        store.server.faults.add(Fault(method="GET", hold="before"))
        backend = open_backend()
        assert backend.info(at(store, "f"))["size"] == 100
        assert backend.cat_file(at(store, "f")) == DATA[:100]
        assert backend.retries >= 2

    def test_a_read_that_stops_in_the_middle(self, store: Store, open_backend: Open, tmp_path: Path) -> None:
        """Row 22: a download goes on where it stood still."""
        store.put("f", DATA)
        store.server.faults.add(Fault(method="GET", key="*/f", hold="body"))
        watch = Stopwatch()
        backend = open_backend()
        backend.get_file(at(store, "f"), str(tmp_path / "got"))
        assert watch.seconds < SOON_S
        assert (tmp_path / "got").read_bytes() == DATA
        assert backend.retries >= 1

    @pytest.mark.parametrize("faulty_store", ["moto", pytest.param("oss", marks=pytest.mark.slow)], indirect=True)
    def test_a_slow_link_is_not_taken_for_a_dead_one(
        self, store: Store, open_backend: Open, through: Callable[..., Relay], tmp_path: Path
    ) -> None:
        """Row 23: at 1 MB/s, shared by all parts, nothing is cut at the usual limit, no part goes twice, and progress is told all along."""
        relay = through(bytes_per_s=1e6, buffer_bytes=64 << 10)
        source = tmp_path / "f"
        source.write_bytes(DATA[: PART_BYTES + 1000])
        told: list[tuple[float, int]] = []

        class Callback:
            def relative_update(self, inc: int = 1) -> None:
                told.append((time.monotonic(), inc))

        backend = open_backend(stall_s=30.0)
        started = time.monotonic()
        backend.put_file(str(source), at(store, "f"), callback=Callback(), expected=digest_bytes(source.read_bytes()))
        took = time.monotonic() - started
        assert took > 4.0
        assert backend.retries == 0
        assert len(relay.requests("^PUT .*partNumber=1")) == 1
        assert sum(count for _, count in told) == PART_BYTES + 1000
        pauses = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(told)]
        assert max(pauses) < took / 2
        assert store.get("f") == source.read_bytes()
