"""What the contract suite needs to know of a store, and its tools."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.core.checksums import Digests

At = Callable[[str], str]

RACERS = 8
DEADLINE_S = 60.0
MANY = 1100

ODD_NAMES = (
    "with space",
    " leading and trailing ",
    "uni-çødé-検査-🚀",
    "percent%20not-decoded%",
    "plus+sign",
    "quote'\"quote",
    "amp&lt;<tag>",
    "hash#question?mark",
    "equals=semi;colon:comma,",
    "tilde~star*brace{}[]",
    "back\\slash",
    "dot.",
    "...dots",
)


class RawAccess(Protocol):
    """The store seen from outside of any backend. Paths are the backend's."""

    def get(self, path: str) -> bytes:
        """The stored bytes; KeyError if there are none."""

    def put(self, path: str, data: bytes) -> None:
        """Store bytes as another tool would."""

    def keys(self, path: str) -> list[str]:
        """Every stored path below the directory `path`, sorted, temporary ones included."""

    def delete(self, path: str) -> None:
        """Remove one object."""


class FilesRaw:
    """Raw access to files by absolute path."""

    def get(self, path: str) -> bytes:
        if not os.path.isfile(path):
            raise KeyError(path)
        return Path(path).read_bytes()

    def put(self, path: str, data: bytes) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(data)

    def keys(self, path: str) -> list[str]:
        return sorted(str(file) for file in Path(path).rglob("*") if file.is_file())

    def delete(self, path: str) -> None:
        os.unlink(path)


class ServerRaw:
    """Raw access to the objects of a test server, or anything with its `raw_…` methods."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def get(self, path: str) -> bytes:
        return bytes(self._server.raw_get(*split_path(path)))

    def put(self, path: str, data: bytes) -> None:
        self._server.raw_put(*split_path(path), data)

    def keys(self, path: str) -> list[str]:
        bucket, _, prefix = path.partition("/")
        return [f"{bucket}/{key}" for key in self._server.raw_keys(bucket, f"{prefix}/" if prefix else "")]

    def delete(self, path: str) -> None:
        self._server.raw_delete(*split_path(path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractStore:
    """What the suite needs to know of a store.

    Attributes:
        make: a new backend; two of them share nothing but the store.
        root: a path of the store that nothing else uses.
        raw: access that bypasses the backend.
        part_bytes: a file of more than this many bytes is moved in pieces; 0 if none is.
        missing_bucket: a path in a bucket that does not exist; None where there are no buckets.
        max_name_bytes: the longest name between two slashes.
        reserved_names: odd names that this store cannot hold.
    """

    make: Callable[[], Backend]
    root: str
    raw: RawAccess
    part_bytes: int = 0
    missing_bucket: str | None = None
    max_name_bytes: int = 900
    reserved_names: frozenset[str] = field(default_factory=frozenset)


class ContractFixtures:
    """The fixtures of the suite; `store` is the subclass's."""

    @pytest.fixture
    def store(self) -> ContractStore:
        raise NotImplementedError("a subclass provides the store")

    @pytest.fixture
    def backend(self, store: ContractStore) -> Backend:
        return store.make()

    @pytest.fixture
    def at(self, store: ContractStore) -> At:
        """A path below a directory that only this test uses."""
        base = f"{store.root}/{uuid.uuid4().hex[:8]}"
        return lambda name: f"{base}/{name}" if name else base


class Progress:
    """Counts what it is told, as an fsspec callback does."""

    def __init__(self) -> None:
        self.total = 0

    def relative_update(self, inc: int = 1) -> None:
        self.total += inc


def race(work: Callable[[int], None]) -> list[Exception | None]:
    """Run `work` in all threads at the same moment; what each raised."""
    barrier = threading.Barrier(RACERS)
    results: list[Exception | None] = [AssertionError("a thread did not finish")] * RACERS

    def run(number: int) -> None:
        barrier.wait(DEADLINE_S)
        try:
            work(number)
        # Whatever a thread met is what the test judges.
        except Exception as error:  # noqa: BLE001
            results[number] = error
        else:
            results[number] = None

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return results


def check_crc(backend: Backend, path: str, digests: Digests) -> None:
    stored = backend.stored_crc(path)
    if backend.capabilities.stored_crc is None:
        assert stored is None
        return
    assert stored is not None
    kind, crc = stored
    assert kind == backend.capabilities.stored_crc
    assert crc == getattr(digests, kind)


def random_bytes(size: int) -> bytes:
    """Bytes that differ everywhere, so that parts in a wrong order show."""
    block = os.urandom(min(size, 1 << 16)) or b""
    return (block * (size // (1 << 16) + 1))[: max(0, size - 8)] + os.urandom(min(8, size)) if size else b""


def new_file(directory: Path, data: bytes) -> Path:
    path = directory / f"source-{uuid.uuid4().hex[:8]}"
    path.write_bytes(data)
    return path


def split_path(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key
