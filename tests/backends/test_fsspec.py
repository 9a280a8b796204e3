"""A backend is an fsspec filesystem: fsspec's own suite, and `open`."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from fsspec.tests import abstract

from ckptmgr.backends.base import Backend
from ckptmgr.backends.local import LocalBackend
from ckptmgr.core.errors import AccessDeniedError, ObjectNotFoundError
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied
from ckptmgr.testing.server_store import ServerStore

# The suite is fsspec's, and so are its fixtures.
pytestmark = pytest.mark.filterwarnings("ignore:Class-scoped fixtures")


class _Absent:
    """In place of a part of the suite that the oldest supported fsspec does not have."""


PipeTests: Any = getattr(abstract, "AbstractPipeTests", _Absent)
OpenTests: Any = getattr(abstract, "AbstractOpenTests", _Absent)


class LocalFixtures(abstract.AbstractFixtures):  # type: ignore[misc, unused-ignore]
    @pytest.fixture
    def fs(self) -> Backend:
        return LocalBackend()

    @pytest.fixture
    def fs_path(self, tmp_path: Path) -> str:
        return str(tmp_path / "store")


class TestLocalCopy(abstract.AbstractCopyTests, LocalFixtures):  # type: ignore[misc, unused-ignore]
    pass


class TestLocalGet(abstract.AbstractGetTests, LocalFixtures):  # type: ignore[misc, unused-ignore]
    pass


class TestLocalPut(abstract.AbstractPutTests, LocalFixtures):  # type: ignore[misc, unused-ignore]
    pass


class TestLocalPipe(PipeTests, LocalFixtures):  # type: ignore[misc, unused-ignore]
    pass


class TestLocalOpen(OpenTests, LocalFixtures):  # type: ignore[misc, unused-ignore]
    pass


class ObjectFixtures(abstract.AbstractFixtures):  # type: ignore[misc, unused-ignore]
    @pytest.fixture
    def fs(self, store: ServerStore) -> Backend:
        return store.plain()

    @pytest.fixture
    def fs_path(self, store: ServerStore) -> str:
        return store.at("root")

    @pytest.fixture
    def supports_empty_directories(self) -> bool:
        return False


class TestObjectPipe(PipeTests, ObjectFixtures):  # type: ignore[misc, unused-ignore]
    pass


class TestObjectOpen(OpenTests, ObjectFixtures):  # type: ignore[misc, unused-ignore]
    pass


def test_trees_go_up_and_come_down(store: ServerStore, tmp_path: Path) -> None:
    """`put`, `copy` and `get` of a directory move every file below it, and make the directories they need."""
    tree = {"a": b"1", "sub/b": b"2", "sub/deep/c": b""}
    for name, data in tree.items():
        (tmp_path / "up" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "up" / name).write_bytes(data)
    backend = store.plain()
    backend.put(str(tmp_path / "up"), store.at("tree"), recursive=True)
    assert store.server.raw_keys(store.bucket) == sorted(f"tree/{name}" for name in tree)
    backend.copy(store.at("tree"), store.at("copy"), recursive=True)
    backend.get(store.at("copy"), str(tmp_path / "down"), recursive=True)
    down = {
        str(path.relative_to(tmp_path / "down")): path.read_bytes()
        for path in (tmp_path / "down").rglob("*")
        if path.is_file()
    }
    assert down == tree
    backend.rm(store.at("tree"), recursive=True)
    assert store.server.raw_keys(store.bucket) == sorted(f"copy/{name}" for name in tree)


def test_open_reads_parts(store: ServerStore) -> None:
    """An opened object is seekable, and text is decoded."""
    store.server.raw_put(store.bucket, "k", "zweite Zeile: ü\nend".encode())
    backend = store.plain()
    with backend.open(store.at("k")) as file:
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"end"
        file.seek(0)
        assert file.read(6) == b"zweite"
    with backend.open(store.at("k"), "r", encoding="utf-8") as file:
        assert file.readline() == "zweite Zeile: ü\n"
    with pytest.raises(ObjectNotFoundError):
        backend.open(store.at("none"))


def test_an_opened_object_appears_when_it_is_closed(store: ServerStore) -> None:
    """Nothing is visible before the end of the block; what is written then is all there."""
    backend = store.plain()
    with backend.open(store.at("k"), "wb") as file:
        file.write(b"one ")
        assert store.server.raw_keys(store.bucket) == []
        file.write(b"two")
    assert store.server.raw_get(store.bucket, "k") == b"one two"


def test_a_block_that_raises_stores_nothing(store: ServerStore) -> None:
    """Half-written is not written; neither is what was forgotten open."""
    backend = store.plain()

    def half() -> None:
        with backend.open(store.at("k"), "wb") as file:
            file.write(b"half")
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        half()
    file = backend.open(store.at("k"), "wb")
    file.write(b"forgotten")
    del file
    gc.collect()
    assert store.server.raw_keys(store.bucket) == []


def test_create_only_open(store: ServerStore) -> None:
    """Mode "xb" refuses an existing object when it is opened, and one that came meanwhile when it is closed."""
    backend = store.plain()
    store.server.raw_put(store.bucket, "k", b"theirs")
    with pytest.raises(FileExistsError):
        backend.open(store.at("k"), "xb")
    file = backend.open(store.at("new"), "xb")
    file.write(b"mine")
    store.server.raw_put(store.bucket, "new", b"theirs")
    with pytest.raises(FileExistsError):
        file.close()
    assert store.server.raw_get(store.bucket, "new") == b"theirs"


@pytest.mark.parametrize("verb", ["exists", "isfile", "isdir", "open", "walk", "glob", "rm"])
def test_conveniences_do_not_hide_a_refusal(tmp_path: Path, verb: str) -> None:
    """I7: where fsspec's own convenience would answer "no" or "nothing" to a refused look-up, a backend raises."""
    (tmp_path / "f").write_bytes(b"1")
    backend = FaultyBackend(LocalBackend())
    backend.add(StoreFault(times=None, error=denied))
    path = {"walk": str(tmp_path), "glob": f"{tmp_path}/*"}.get(verb, f"{tmp_path}/f")
    with pytest.raises(AccessDeniedError):
        # Lazy ones are asked for their first result.
        list(getattr(backend, verb)(path))
    assert (tmp_path / "f").exists()
