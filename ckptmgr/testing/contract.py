"""The contract of `ckptmgr.backends.base` as a test class, for every backend, also one of your own.

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def store(self) -> ContractStore:
            return ContractStore(make=MyBackend, root="bucket/prefix", raw=MyRawAccess())

What a test writes through the backend it checks by raw access, and the other way round, so that a backend cannot agree with itself
only. Skips come from `Capabilities`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import BucketNotFoundError, ObjectNotFoundError
from ckptmgr.testing.contract_store import (
    MANY,
    RACERS,
    At,
    ContractStore,
    FilesRaw,
    RawAccess,
    ServerRaw,
    check_crc,
    new_file,
    race,
    random_bytes,
)
from ckptmgr.testing.contract_writes import WriteContract

__all__ = ["BackendContract", "ContractStore", "FilesRaw", "RawAccess", "ServerRaw"]


class BackendContract(WriteContract):
    """Subclass with a fixture `store` that returns a `ContractStore`; pytest collects the rest."""

    # -- reading --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("start", "end"),
        [
            (None, None),
            (0, 4),
            (3, None),
            (None, 3),
            (-3, None),
            (None, -3),
            (-5, -2),
            (4, 4),
            (6, 2),
            (2, 99),
            (99, None),
        ],
    )
    def test_cat_file_ranges_are_slices(
        self, store: ContractStore, backend: Backend, at: At, start: int | None, end: int | None
    ) -> None:
        """Ranges mean what they mean in a slice, also beyond the end."""
        store.raw.put(at("f"), b"0123456789")
        assert backend.cat_file(at("f"), start, end) == b"0123456789"[start:end]

    @pytest.mark.parametrize(("start", "end"), [(None, None), (0, 2), (-1, None)])
    def test_ranges_of_an_empty_object(
        self, store: ContractStore, backend: Backend, at: At, start: int | None, end: int | None
    ) -> None:
        """An object of 0 bytes has only empty ranges."""
        store.raw.put(at("f"), b"")
        assert backend.cat_file(at("f"), start, end) == b""

    def test_absent_object(self, store: ContractStore, backend: Backend, at: At, tmp_path: Path) -> None:
        """Every read of a key that is not there says so, with the error that names it, and makes no file."""
        store.raw.put(at("there/file"), b"1")
        for path in (at("none"), at("there/fil"), at("there/file/below")):
            for read in (
                backend.cat_file,
                lambda path: backend.cat_file(path, 0, 1),
                backend.info,
                backend.ls,
                backend.stored_crc,
                lambda path: backend.get_file(path, str(tmp_path / "got")),
            ):
                with pytest.raises(ObjectNotFoundError) as caught:
                    read(path)
                assert isinstance(caught.value, FileNotFoundError)
                assert path in str(caught.value)
            assert not backend.exists(path)
            assert not backend.isfile(path)
            assert not backend.isdir(path)
            assert backend.find(path) == []
        assert not (tmp_path / "got").exists()

    def test_a_directory_is_no_object(self, store: ContractStore, backend: Backend, at: At, tmp_path: Path) -> None:
        """A prefix is found as a directory, and is not readable."""
        store.raw.put(at("dir/file"), b"1")
        assert backend.info(at("dir"))["type"] == "directory"
        assert backend.info(at("dir"))["name"] == at("dir")
        assert backend.exists(at("dir"))
        assert backend.isdir(at("dir"))
        assert not backend.isfile(at("dir"))
        with pytest.raises(ObjectNotFoundError):
            backend.cat_file(at("dir"))
        with pytest.raises(ObjectNotFoundError):
            backend.get_file(at("dir"), str(tmp_path / "got"))

    def test_info_of_a_file(self, store: ContractStore, backend: Backend, at: At) -> None:
        """Size, type and an ETag that follows the content."""
        store.raw.put(at("f"), b"12345")
        first = backend.info(at("f"))
        assert (first["name"], first["size"], first["type"]) == (at("f"), 5, "file")
        store.raw.put(at("f"), b"123456")
        assert backend.info(at("f"))["size"] == 6
        if "etag" in first:
            assert backend.info(at("f"))["etag"] != first["etag"]

    def test_stored_crc_is_that_of_the_bytes(self, store: ContractStore, backend: Backend, at: At) -> None:
        """The store's own CRC, where it keeps one, equals the digest of what was written."""
        data = random_bytes(5000)
        backend.pipe_file(at("f"), data)
        check_crc(backend, at("f"), digest_bytes(data))

    # -- listing --------------------------------------------------------------------------------------------------

    def test_find_and_ls(self, store: ContractStore, backend: Backend, at: At) -> None:
        """find goes all the way down, ls one level; both are sorted and tell files from directories."""
        for name in ("b/2", "b/c/3", "b-1", "a", "b/c/d/4"):
            store.raw.put(at(name), b"1" * len(name))
        assert backend.find(at("")) == [at(name) for name in ("a", "b-1", "b/2", "b/c/3", "b/c/d/4")]
        assert backend.ls(at(""), detail=False) == [at("a"), at("b"), at("b-1")]
        assert [(one["name"], one["type"], one["size"]) for one in backend.ls(at("b"))] == [
            (at("b/2"), "file", 3),
            (at("b/c"), "directory", 0),
        ]
        assert backend.find(at(""), maxdepth=1) == [at("a"), at("b-1")]
        assert backend.find(at(""), maxdepth=2) == [at("a"), at("b-1"), at("b/2")]
        assert backend.find(at("b"), withdirs=True) == [at(n) for n in ("b/2", "b/c", "b/c/3", "b/c/d", "b/c/d/4")]
        assert backend.find(at("b"), maxdepth=1, withdirs=True) == [at("b/2"), at("b/c")]
        detail = backend.find(at("b"), detail=True)
        assert isinstance(detail, dict)
        assert {name: record["size"] for name, record in detail.items()} == {
            at("b/2"): 3,
            at("b/c/3"): 5,
            at("b/c/d/4"): 7,
        }

    def test_a_file_lists_itself_and_has_nothing_below(self, store: ContractStore, backend: Backend, at: At) -> None:
        """ls of a file is that file; find of it is empty."""
        store.raw.put(at("f"), b"123")
        assert [(one["name"], one["size"]) for one in backend.ls(at("f"))] == [(at("f"), 3)]
        assert backend.find(at("f")) == []

    def test_only_whole_components_match(self, store: ContractStore, backend: Backend, at: At) -> None:
        """`run1` neither lists nor finds, nor removes, what belongs to `run10`."""
        store.raw.put(at("run1/a"), b"1")
        store.raw.put(at("run10/a"), b"1")
        store.raw.put(at("run1.bak"), b"1")
        assert backend.find(at("run1")) == [at("run1/a")]
        assert backend.ls(at("run1"), detail=False) == [at("run1/a")]
        assert backend.ls(at("run1/"), detail=False) == [at("run1/a")]
        backend.rm(at("run1"), recursive=True)
        assert store.raw.keys(at("")) == [at("run1.bak"), at("run10/a")]

    def test_more_than_a_page(self, store: ContractStore, backend: Backend, at: At) -> None:
        """1,100 keys and 1,100 directories are all listed, and all removed, whatever the size of a page."""
        names = [f"d{number:04d}/f" for number in range(MANY)]
        for name in names:
            store.raw.put(at(name), b"")
        assert backend.find(at("")) == [at(name) for name in names]
        assert backend.ls(at(""), detail=False) == [at(name[:-2]) for name in names]
        backend.rm_files([at(name) for name in names])
        assert store.raw.keys(at("")) == []

    def test_nothing_is_cached(self, store: ContractStore, backend: Backend, at: At) -> None:
        """What another process wrote, replaced or removed is seen at the next call (K112)."""
        other = store.make()
        assert backend.find(at("")) == []
        assert not backend.exists(at("m/1"))
        other.pipe_file(at("m/1"), b"1")
        assert backend.find(at("")) == [at("m/1")]
        assert backend.exists(at("m/1"))
        assert backend.ls(at("m"), detail=False) == [at("m/1")]
        other.pipe_file(at("m/2"), b"2")
        other.pipe_file(at("m/1"), b"one")
        assert backend.ls(at("m"), detail=False) == [at("m/1"), at("m/2")]
        assert backend.cat_file(at("m/1")) == b"one"
        assert backend.info(at("m/1"))["size"] == 3
        other.rm_file(at("m/1"))
        assert backend.find(at("m")) == [at("m/2")]
        assert not backend.exists(at("m/1"))

    # -- removing -------------------------------------------------------------------------------------------------

    def test_rm_file_twice(self, store: ContractStore, backend: Backend, at: At) -> None:
        """Removing what is gone is success."""
        store.raw.put(at("f"), b"1")
        store.raw.put(at("g"), b"1")
        backend.rm_file(at("f"))
        backend.rm_file(at("f"))
        backend.rm_file(at("never/was"))
        assert store.raw.keys(at("")) == [at("g")]

    def test_rm_files_some_of_them_gone(self, store: ContractStore, backend: Backend, at: At) -> None:
        """A clean-up that was interrupted can be repeated with the same list."""
        for name in ("a", "b", "c"):
            store.raw.put(at(name), b"1")
        backend.rm_files([at("a"), at("none"), at("b")])
        backend.rm_files([at("a"), at("none"), at("b")])
        backend.rm_files([])
        assert store.raw.keys(at("")) == [at("c")]

    def test_rmdir_leaves_files_alone(self, store: ContractStore, backend: Backend, at: At) -> None:
        """Removing a directory that is not empty, or not there, does nothing."""
        store.raw.put(at("d/f"), b"1")
        backend.rmdir(at("d"))
        backend.rmdir(at("none"))
        assert store.raw.get(at("d/f")) == b"1"
        backend.rm_file(at("d/f"))
        backend.rmdir(at("d"))
        assert not backend.exists(at("d"))

    # -- failures -------------------------------------------------------------------------------------------------

    def test_missing_bucket(self, store: ContractStore, backend: Backend, tmp_path: Path) -> None:
        """A bucket that does not exist is never an empty one, nor a missing key."""
        path = store.missing_bucket
        if path is None:
            pytest.skip("this store has no buckets")
        source = new_file(tmp_path, random_bytes(2 * store.part_bytes + 7))
        for call in (
            lambda: backend.pipe_file(path, b"1"),
            lambda: backend.pipe_file(path, b"1", mode="create"),
            lambda: backend.put_file(str(source), path),
            lambda: backend.get_file(path, str(tmp_path / "got")),
            lambda: backend.cat_file(path),
            lambda: backend.cat_file(path, 0, 1),
            lambda: backend.info(path),
            lambda: backend.exists(path),
            lambda: backend.ls(path),
            lambda: backend.find(path),
            lambda: backend.stored_crc(path),
            lambda: backend.rm_files([path]),
        ):
            with pytest.raises(BucketNotFoundError):
                call()

    def test_many_threads_share_a_backend(self, store: ContractStore, backend: Backend, at: At, tmp_path: Path) -> None:
        """One instance serves eight threads, each with its own keys, without mixing them up."""

        def work(number: int) -> None:
            data = b"%d" % number * 1000
            backend.pipe_file(at(f"t/{number}"), data)
            backend.get_file(at(f"t/{number}"), str(tmp_path / str(number)))
            assert (tmp_path / str(number)).read_bytes() == data == backend.cat_file(at(f"t/{number}"))

        assert race(work) == [None] * RACERS
        assert backend.find(at("t")) == [at(f"t/{number}") for number in range(RACERS)]
