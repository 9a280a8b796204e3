"""Digests against published vectors, in one piece and in many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core import checksums
from ckptmgr.core.checksums import Digester, Digests, blake3_hex, crc64xz_hex, digest_bytes

CHECK = b"123456789"
BLAKE3_OF_NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


def test_the_check_values_of_both_crcs() -> None:
    """The catalogued check values: CRC-64/XZ is what OSS keeps, CRC-64/NVME what S3 keeps."""
    pytest.importorskip("awscrt")
    digests = digest_bytes(CHECK)
    assert (digests.crc64xz, digests.crc64nvme) == ("995dc9bbdf1939fa", "ae8b14860a799888")
    assert crc64xz_hex(CHECK) == "995dc9bbdf1939fa"
    assert digests.size == 9


def test_nothing_has_digests_too() -> None:
    """A zero-byte file is a file."""
    digests = digest_bytes(b"")
    assert (digests.size, digests.blake3, digests.crc64xz) == (0, BLAKE3_OF_NOTHING, "0" * 16)
    assert blake3_hex(b"") == BLAKE3_OF_NOTHING


def test_without_awscrt_that_field_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra [s3] is not needed to digest."""
    monkeypatch.setattr(checksums, "_crc64nvme", lambda: None)
    digests = digest_bytes(CHECK)
    assert digests.crc64nvme is None
    assert digests.crc64xz == "995dc9bbdf1939fa"


@given(blocks=st.lists(st.binary(max_size=200), max_size=8))
def test_blocks_amount_to_the_same_as_the_whole(blocks: list[bytes]) -> None:
    """However a file is cut, and in whatever kind of buffer it comes."""
    whole = digest_bytes(b"".join(blocks))
    for kind in (bytes, bytearray, memoryview):
        digester = Digester()
        for block in blocks:
            digester.update(kind(block))
        assert digester.digests() == whole


def test_digests_may_be_asked_for_in_between() -> None:
    """Asking does not end the stream."""
    digester = Digester()
    digester.update(CHECK[:4])
    assert digester.digests() == digest_bytes(CHECK[:4])
    digester.update(CHECK[4:])
    assert digester.digests() == digest_bytes(CHECK)


@given(data=st.binary(min_size=1, max_size=300), place=st.integers(0, 10**6))
def test_one_flipped_bit_changes_every_digest(data: bytes, place: int) -> None:
    """Damage of a single bit is seen by each digest on its own."""
    bit = place % (len(data) * 8)
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    before, after = digest_bytes(data), digest_bytes(bytes(damaged))
    assert before.size == after.size
    assert before.blake3 != after.blake3
    assert before.crc64xz != after.crc64xz
    assert before.crc64nvme is None or before.crc64nvme != after.crc64nvme
    assert isinstance(before, Digests)
