"""The part of the contract suite about writing and about whole files; use it through `ckptmgr.testing.contract`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckptmgr.backends.atomic import digest_file
from ckptmgr.backends.base import Backend
from ckptmgr.core.checksums import Digests
from ckptmgr.core.errors import (
    ChecksumMismatchError,
    ObjectExistsError,
    ObjectNotFoundError,
    SizeMismatchError,
    SourceChangedError,
    TransientBackendError,
)
from ckptmgr.testing.contract_store import (
    ODD_NAMES,
    RACERS,
    At,
    ContractFixtures,
    ContractStore,
    Progress,
    check_crc,
    new_file,
    race,
    random_bytes,
)
from ckptmgr.testing.memory_parts import MemoryJournal


def _proof(backend: Backend, expected: Digests) -> str | None:
    """The CRC by which a download can be proven; None where the store keeps none."""
    kind = backend.capabilities.stored_crc
    return None if kind is None else getattr(expected, kind)


class WriteContract(ContractFixtures):
    """What is promised to those who write."""

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
            results = race(lambda number, path=path: racers[number].pipe_file(path, b"%d" % number, "create"))  # type: ignore[misc]
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
        backend.put_file(str(new_file(tmp_path, b"2")), at("d/two"))
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
        data = random_bytes(size)
        source = new_file(tmp_path, data)
        expected = digest_file(source)
        moved = Progress()
        backend.put_file(str(source), at("f"), callback=moved, expected=expected)
        assert store.raw.get(at("f")) == data
        assert moved.total == size
        assert backend.info(at("f"))["size"] == size
        target = tmp_path / "got"
        moved = Progress()
        backend.get_file(at("f"), str(target), callback=moved)
        assert target.read_bytes() == data
        assert moved.total == size
        check_crc(backend, at("f"), expected)
        moved = Progress()
        proven = backend.get_file(at("f"), str(target), callback=moved, expected=expected)
        assert target.read_bytes() == data
        assert moved.total == size
        assert proven == (_proof(backend, expected) is not None)

    @pytest.mark.parametrize("parts", ["small", "parts"])
    @pytest.mark.parametrize("wrong", ["bit", "shorter", "longer"])
    def test_what_arrives_is_compared_with_what_is_expected(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path, parts: str, wrong: str
    ) -> None:
        """I5: an object that is not what it should be is never called proven; where the CRC tells, it is an error, and nothing is left."""
        data = random_bytes({"small": 1000, "parts": 2 * (store.part_bytes or 1 << 20) + 7}[parts])
        stored = {"bit": data[:500] + bytes([data[500] ^ 1]) + data[501:], "shorter": data[:-1], "longer": data + b"x"}
        store.raw.put(at("f"), stored[wrong])
        expected, target = digest_file(new_file(tmp_path, data)), tmp_path / "got"
        if _proof(backend, expected) is None:
            assert backend.get_file(at("f"), str(target), expected=expected) is False
            return
        kind = ChecksumMismatchError if wrong == "bit" else SizeMismatchError
        with pytest.raises(kind) as caught:
            backend.get_file(at("f"), str(target), expected=expected)
        assert at("f") in str(caught.value)
        assert not isinstance(caught.value, TransientBackendError)
        assert not target.exists()

    def test_put_file_create_refuses_what_exists(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """A create-only upload, small or in parts, changes nothing that is there, even if it is the same."""
        for size in {1, 2 * store.part_bytes + 7}:
            source = new_file(tmp_path, random_bytes(size))
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
        data = random_bytes(10 if size == "small" else 2 * store.part_bytes + 7)
        source = new_file(tmp_path, data)
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
        source = new_file(tmp_path, random_bytes(2 * store.part_bytes + 7))

        class Meddler(Progress):
            def relative_update(self, inc: int = 1) -> None:
                if not self.total:
                    with open(source, "ab") as file:
                        file.write(b"more")
                super().relative_update(inc)

        with pytest.raises(SourceChangedError):
            backend.put_file(str(source), at("f"), callback=Meddler())
        assert store.raw.keys(at("")) == []

    def test_an_interrupted_upload_goes_on(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """What a callback raises ends an upload: nothing is visible; with the same journal a further call makes the object, and forgets the upload."""
        if not store.part_bytes:
            pytest.skip("this store takes a file in one piece")
        source = new_file(tmp_path, random_bytes(5 * store.part_bytes + 7))
        expected, journal = digest_file(source), MemoryJournal()

        class Interrupted(BaseException):
            pass

        class Interrupter(Progress):
            def relative_update(self, inc: int = 1) -> None:
                super().relative_update(inc)
                if self.total >= store.part_bytes:
                    raise Interrupted

        with pytest.raises(Interrupted):
            backend.put_file(str(source), at("f"), callback=Interrupter(), expected=expected, parts=journal)
        assert store.raw.keys(at("")) == []
        backend.put_file(str(source), at("f"), expected=expected, parts=journal)
        assert store.raw.get(at("f")) == source.read_bytes()
        assert journal.upload_id is None
        assert len(journal.begun) <= 1
        check_crc(backend, at("f"), expected)

    def test_abort_upload_of_an_unknown_one(self, store: ContractStore, backend: Backend, at: At) -> None:
        """An upload that nobody knows is as good as aborted; an object at the key is not touched."""
        store.raw.put(at("f"), b"1")
        backend.abort_upload(at("f"), "no-such-upload")
        assert store.raw.get(at("f")) == b"1"

    def test_get_file_replaces_its_target_without_writing_through_it(
        self, store: ContractStore, backend: Backend, at: At, tmp_path: Path
    ) -> None:
        """A target that is a hard link to something else leaves that alone."""
        store.raw.put(at("f"), b"new")
        other = new_file(tmp_path, b"precious")
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
