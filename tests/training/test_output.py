"""Files that are digested while they are written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptmgr.backends.atomic import digest_file
from ckptmgr.core.errors import BucketNotFoundError
from ckptmgr.training import output
from ckptmgr.training.output import DigestingFile

SOME = os.urandom(1000)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in a millionth of the size."""
    monkeypatch.setattr(output, "BLOCK_BYTES", 32)
    monkeypatch.setattr(output, "_DIRECT_BYTES", 4)
    monkeypatch.setattr(output, "_COLLECTED_BYTES", 16)


@settings(deadline=None)
@given(cuts=st.lists(st.integers(0, 100), max_size=30))
@pytest.mark.usefixtures("small_blocks")
def test_the_digests_are_those_of_the_file(cuts: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    """However it comes, collected or in blocks: every byte once, in order."""
    path = tmp_path_factory.mktemp("out") / "x.bin"
    pieces = [SOME[start : start + size] for start, size in enumerate(cuts)]
    with DigestingFile(path) as file:
        for number, piece in enumerate(pieces):
            assert file.write((bytes, bytearray, memoryview)[number % 3](piece)) == len(piece)
        digests = file.finish()
    assert path.read_bytes() == b"".join(pieces)
    assert digests == digest_file(path)


def test_blocks_of_real_size(tmp_path: Path) -> None:
    """One below each threshold, one above."""
    sizes = [10, output._DIRECT_BYTES - 1, output._DIRECT_BYTES, output.BLOCK_BYTES + 5, *[3 << 20] * 6]
    data = os.urandom(1 << 20) * 40
    with DigestingFile(tmp_path / "x.bin") as file:
        for size in sizes:
            file.write(memoryview(data)[:size])
        digests = file.finish()
    assert digests.size == sum(sizes)
    assert digests == digest_file(tmp_path / "x.bin")


def test_memory_is_not_looked_at_after_the_write(tmp_path: Path) -> None:
    """torch's belongs to it again when `write` returns."""
    data = bytearray(SOME)
    with DigestingFile(tmp_path / "x.bin") as file:
        file.write(memoryview(data))
        data[:] = bytes(len(data))
        file.finish()
    assert (tmp_path / "x.bin").read_bytes() == SOME


def test_what_was_there_is_left_to_whom_it_belongs(tmp_path: Path) -> None:
    """A hard link to an older checkpoint's file is not written through."""
    path, link = tmp_path / "x.bin", tmp_path / "link"
    path.write_bytes(b"old")
    os.link(path, link)
    with DigestingFile(path) as file:
        file.write(b"new")
        file.finish()
    assert (path.read_bytes(), link.read_bytes()) == (b"new", b"old")


def test_a_directory_that_is_gone_is_an_error_of_ours(tmp_path: Path) -> None:
    """As everywhere."""
    with pytest.raises(BucketNotFoundError):
        DigestingFile(tmp_path / "gone" / "x.bin")
