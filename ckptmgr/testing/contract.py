"""The contract of `ckptmgr.backends.base` as a test class, for every backend, also one of your own.

    class TestMyBackend(BackendContract):
        @pytest.fixture
        def store(self) -> ContractStore:
            return ContractStore(make=MyBackend, root="bucket/prefix", raw=MyRawAccess())

What a test writes through the backend it checks by raw access, and the other way round, so that a backend cannot agree with itself
only. Skips come from `Capabilities`.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from ckptmgr.backends.atomic import digest_file
from ckptmgr.backends.base import Backend
from ckptmgr.core.checksums import Digests, digest_bytes
from ckptmgr.core.errors import BucketNotFoundError, ObjectExistsError, ObjectNotFoundError, SourceChangedError

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
        return bytes(self._server.raw_get(*_split(path)))

    def put(self, path: str, data: bytes) -> None:
        self._server.raw_put(*_split(path), data)

    def keys(self, path: str) -> list[str]:
        bucket, _, prefix = path.partition("/")
        return [f"{bucket}/{key}" for key in self._server.raw_keys(bucket, f"{prefix}/" if prefix else "")]

    def delete(self, path: str) -> None:
        self._server.raw_delete(*_split(path))


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


class BackendContract:
    """Subclass with a fixture `store` that returns a `ContractStore`; pytest collects the rest."""

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

    # -- writing --------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("data", [b"", b"x", b"\0\xff" * 5000], ids=["empty", "one", "10k"])
    def test_pipe_file_stores_exactly_these_bytes(
        self, store: ContractStore, backend: Backend, at: At, data: bytes
    ) -> None:
        """What was piped is what another tool reads."""
        backend.pipe_file(at("a/b"), data)
        assert store.raw.get(at("a/b")) == data
        assert backend.cat_file(at("a/b")) == data

    def test_pipe_file_overwrites(self, store: ContractStore, backend: Backend, at: At) -> None:
        """The last write wins, also when it is shorter."""
        backend.pipe_file(at("key"), b"first and long")
        backend.pipe_file(at("key"), b"second")
        assert store.raw.get(at("key")) == b"second"

    def test_create_refuses_what_exists(self, store: ContractStore, backend: Backend, at: At) -> None:
        """A create of an existing key changes nothing, and says which key."""
        store.raw.put(at("key"), b"theirs")
        with pytest.raises(ObjectExistsError) as caught:
            backend.pipe_file(at("key"), b"mine", mode="create")
        assert caught.value.key.endswith("/key")
        assert isinstance(caught.value, FileExistsError)
        assert store.raw.get(at("key")) == b"theirs"

    def test_create_makes_what_does_not_exist(self, store: ContractStore, backend: Backend, at: At) -> None:
        """A create of a free key is a write, and the key can be created again once it is gone."""
        backend.pipe_file(at("key"), b"1", mode="create")
        assert store.raw.get(at("key")) == b"1"
        backend.rm_file(at("key"))
        backend.pipe_file(at("key"), b"2", mode="create")
        assert store.raw.get(at("key")) == b"2"

    def test_create_race_has_one_winner(self, store: ContractStore, backend: Backend, at: At) -> None:
        """Of eight threads with backends of their own that create one key, exactly one succeeds, and its bytes are there."""
        if not backend.capabilities.create_only:
            pytest.skip("this store cannot decide a create")
        racers = [store.make() for _ in range(RACERS)]
        for attempt in range(3):
            path = at(f"race-{attempt}")
            results = _race(lambda number, path=path: racers[number].pipe_file(path, b"%d" % number, "create"))  # type: ignore[misc]
            winners = [number for number, error in enumerate(results) if error is None]
            assert len(winners) == 1, results
            assert all(isinstance(error, ObjectExistsError) for error in results if error is not None), results
            assert store.raw.get(path) == b"%d" % winners[0]

    def test_writes_leave_nothing_else_behind(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """No temporary objects, markers or claims remain after writes and refused creates."""
        backend.pipe_file(at("d/one"), b"1", mode="create")
        with pytest.raises(ObjectExistsError):
            backend.pipe_file(at("d/one"), b"2", mode="create")
        backend.put_file(str(_file(tmp_path, b"2")), at("d/two"))
        assert store.raw.keys(at("")) == [at("d/one"), at("d/two")]

    def test_long_key(self, store: ContractStore, backend: Backend, at: At) -> None:
        """A key of about 900 characters round-trips."""
        name = "n" * min(store.max_name_bytes, 100)
        path = at("/".join([name] * (900 // (len(name) + 1))))
        backend.pipe_file(path, b"deep")
        assert store.raw.get(path) == b"deep"
        assert backend.find(at("")) == [path]

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_odd_name(self, store: ContractStore, backend: Backend, at: At, tmp_path: Path, name: str) -> None:
        """A name that URLs and shells dislike round-trips through every verb."""
        if name in store.reserved_names:
            pytest.skip("this store cannot hold that name")
        path = at(f"{name}/{name}")
        backend.pipe_file(path, b"odd", mode="create")
        assert store.raw.get(path) == b"odd"
        assert backend.find(at("")) == [path]
        assert backend.ls(at(""), detail=False) == [at(name)]
        assert backend.info(path)["name"] == path
        assert backend.cat_file(path, 1, 3) == b"dd"
        backend.get_file(path, str(tmp_path / "got"))
        assert (tmp_path / "got").read_bytes() == b"odd"
        backend.cp_file(path, at("copy"))
        assert store.raw.get(at("copy")) == b"odd"
        backend.rm_files([path, at("copy")])
        assert store.raw.keys(at("")) == []

    # -- files ----------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("parts", ["empty", "small", "exactly one part", "parts", "equal parts"])
    def test_file_round_trip(self, store: ContractStore, backend: Backend, at: At, tmp_path: Path, parts: str) -> None:
        """Files of every shape go up and come down unchanged, and the store's CRC is the one we computed."""
        part = store.part_bytes or 1 << 20
        size = {"empty": 0, "small": 1, "exactly one part": part, "parts": 2 * part + 7, "equal parts": 2 * part}[parts]
        data = _bytes(size)
        source = _file(tmp_path, data)
        expected = digest_file(source)
        moved = _Progress()
        backend.put_file(str(source), at("f"), callback=moved, expected=expected)
        assert store.raw.get(at("f")) == data
        assert moved.total == size
        assert backend.info(at("f"))["size"] == size
        target = tmp_path / "got"
        moved = _Progress()
        backend.get_file(at("f"), str(target), callback=moved)
        assert target.read_bytes() == data
        assert moved.total == size
        _check_crc(backend, at("f"), expected)

    def test_put_file_create_refuses_what_exists(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """A create-only upload, small or in parts, changes nothing that is there, even if it is the same."""
        for size in {1, 2 * store.part_bytes + 7}:
            source = _file(tmp_path, _bytes(size))
            store.raw.put(at("f"), b"theirs")
            with pytest.raises(ObjectExistsError):
                backend.put_file(str(source), at("f"), mode="create")
            assert store.raw.get(at("f")) == b"theirs"
            backend.put_file(str(source), at("new"), mode="create")
            with pytest.raises(ObjectExistsError):
                backend.put_file(str(source), at("new"), mode="create")
            assert store.raw.get(at("new")) == source.read_bytes()
            backend.rm_file(at("new"))

    @pytest.mark.parametrize("size", ["small", "parts"])
    @pytest.mark.parametrize("change", ["content", "longer", "shorter", "gone", "directory"])
    def test_changed_source_leaves_nothing(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path, size: str, change: str
    ) -> None:
        """I10: a source that is not what was described fails the upload, and nothing is visible."""
        data = _bytes(10 if size == "small" else 2 * store.part_bytes + 7)
        source = _file(tmp_path, data)
        expected = digest_file(source)
        if change == "content":
            source.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        elif change == "longer":
            source.write_bytes(data + b"x")
        elif change == "shorter":
            source.write_bytes(data[:-1])
        else:
            source.unlink()
            if change == "directory":
                source.mkdir()
        with pytest.raises(SourceChangedError) as caught:
            backend.put_file(str(source), at("f"), expected=expected)
        assert str(source) in str(caught.value)
        assert store.raw.keys(at("")) == []

    def test_source_written_to_meanwhile_leaves_nothing(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """I10: a writer that is still at work while the file goes up fails the upload, without any description."""
        if not store.part_bytes:
            pytest.skip("this store takes a file in one piece")
        source = _file(tmp_path, _bytes(2 * store.part_bytes + 7))

        class Meddler(_Progress):
            def relative_update(self, inc: int = 1) -> None:
                if not self.total:
                    with open(source, "ab") as file:
                        file.write(b"more")
                super().relative_update(inc)

        with pytest.raises(SourceChangedError):
            backend.put_file(str(source), at("f"), callback=Meddler())
        assert store.raw.keys(at("")) == []

    def test_get_file_replaces_its_target_without_writing_through_it(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """A target that is a hard link to something else leaves that alone."""
        store.raw.put(at("f"), b"new")
        other = _file(tmp_path, b"precious")
        target = tmp_path / "target"
        os.link(other, target)
        backend.get_file(at("f"), str(target))
        assert target.read_bytes() == b"new"
        assert other.read_bytes() == b"precious"

    def test_cp_file(self, store: ContractStore, backend: Backend, at: At) -> None:
        """A copy has the bytes and is independent of the original; a missing source is named."""
        store.raw.put(at("a"), b"1234")
        store.raw.put(at("b"), b"old")
        backend.cp_file(at("a"), at("b"))
        backend.pipe_file(at("a"), b"changed")
        assert store.raw.get(at("b")) == b"1234"
        with pytest.raises(ObjectNotFoundError):
            backend.cp_file(at("none"), at("c"))
        assert store.raw.keys(at("")) == [at("a"), at("b")]

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
        data = _bytes(5000)
        backend.pipe_file(at("f"), data)
        _check_crc(backend, at("f"), digest_bytes(data))

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
        source = _file(tmp_path, _bytes(2 * store.part_bytes + 7))
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

        assert _race(work) == [None] * RACERS
        assert backend.find(at("t")) == [at(f"t/{number}") for number in range(RACERS)]


class _Progress:
    """Counts what it is told, as an fsspec callback does."""

    def __init__(self) -> None:
        self.total = 0

    def relative_update(self, inc: int = 1) -> None:
        self.total += inc


def _race(work: Callable[[int], None]) -> list[Exception | None]:
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


def _check_crc(backend: Backend, path: str, digests: Digests) -> None:
    stored = backend.stored_crc(path)
    if backend.capabilities.stored_crc is None:
        assert stored is None
        return
    assert stored is not None
    kind, crc = stored
    assert kind == backend.capabilities.stored_crc
    assert crc == getattr(digests, kind)


def _bytes(size: int) -> bytes:
    """Bytes that differ everywhere, so that parts in a wrong order show."""
    block = os.urandom(min(size, 1 << 16)) or b""
    return (block * (size // (1 << 16) + 1))[: max(0, size - 8)] + os.urandom(min(8, size)) if size else b""


def _file(directory: Path, data: bytes) -> Path:
    path = directory / f"source-{uuid.uuid4().hex[:8]}"
    path.write_bytes(data)
    return path


def _split(path: str) -> tuple[str, str]:
    bucket, _, key = path.partition("/")
    return bucket, key
