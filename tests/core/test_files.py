"""The files of a checkpoint in packed form: the same files, and nothing that was not there."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.files import FileEntry, PackedFiles, pack_files

WEIGHTS = FileEntry.of("model.safetensors", digest_bytes(b"weights"))
STATE = FileEntry(path="sub/ünï.pt", size=7, blake3="0" * 64, role="optimizer", rank=3, extra={"blake3_chunks": ["ab"]})
FILES = (WEIGHTS, STATE)

digits = st.text("0123456789abcdef", min_size=64, max_size=64)
crcs = st.none() | st.text("0123456789abcdef", min_size=16, max_size=16)
entries = st.builds(
    FileEntry,
    path=st.text(st.characters(exclude_categories=["Cs"]), min_size=1),
    size=st.integers(0, 2**64 - 1),
    blake3=digits,
    role=st.text(max_size=5),
    crc64xz=crcs,
    crc64nvme=crcs,
    rank=st.none() | st.integers(0, 9999),
    extra=st.dictionaries(
        st.text(max_size=3), st.none() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False), max_size=2
    ),
)


@given(files=st.lists(entries, max_size=4).map(tuple))
def test_files_come_back(files: tuple[FileEntry, ...]) -> None:
    """In their order, every field of each."""
    packed = pack_files(files)
    assert packed is not None
    assert tuple(packed) == files
    again = PackedFiles(packed.data, len(packed), packed.size_bytes)
    assert (tuple(again), len(again), again.size_bytes) == (files, len(files), sum(entry.size for entry in files))


def test_packed_files_are_a_sequence_like_a_tuple_of_them() -> None:
    """For whoever indexes, slices, iterates, compares, prints or pickles; both ways round."""
    packed = pack_files(FILES)
    assert packed is not None
    assert (packed[0], packed[-1], packed[:1], list(packed)) == (WEIGHTS, STATE, (WEIGHTS,), list(FILES))
    assert packed == FILES
    assert packed == FILES
    assert packed == pack_files(FILES)
    assert packed != FILES[:1]
    assert packed != pack_files(FILES[:1])
    assert packed != list(FILES)
    assert STATE in packed
    assert repr(packed) == repr(FILES)
    assert pickle.loads(pickle.dumps(packed)) == FILES
    with pytest.raises(IndexError):
        packed[2]


@pytest.mark.parametrize(
    "changes",
    [
        {"blake3": "A" * 64},
        {"blake3": "0" * 63},
        {"blake3": ""},
        {"crc64xz": "0123456789ABCDEF"},
        {"crc64xz": "01 23"},
        {"crc64nvme": ""},
        {"crc64nvme": "none"},
        {"size": 2**64},
        {"rank": 2**64},
        {"extra": {"n": 2**70}},
        {"path": "\udc80"},
    ],
    ids=str,
)
def test_what_would_come_back_as_something_else_is_not_packed(changes: dict[str, Any]) -> None:
    """A digest that is none, numbers beyond 64 bits, a name that is not UTF-8: such files stay a tuple."""
    fields = {"path": "a", "size": 1, "blake3": "0" * 64, **changes}
    assert pack_files((WEIGHTS, FileEntry(**fields))) is None
