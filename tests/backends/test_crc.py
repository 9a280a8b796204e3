"""The CRCs of parts, joined to that of the whole."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import pytest

from ckptmgr.backends.base import CrcKind
from ckptmgr.backends.crc import combine
from ckptmgr.core.checksums import crc_function

KINDS: list[CrcKind] = ["crc64xz", "crc64nvme"]


def joined(kind: CrcKind, pieces: Iterable[tuple[int, int]]) -> int:
    """The CRC of a message out of those of its pieces, in order: (CRC, length in bytes)."""
    value = 0
    for crc, length in pieces:
        value = combine(kind, value, crc, length)
    return value


@pytest.mark.parametrize("kind", KINDS)
def test_parts_amount_to_the_whole(kind: CrcKind) -> None:
    """Whatever the splits, empty pieces included, the joined CRC is that of the store's own function over all bytes."""
    crc = crc_function(kind)
    assert crc is not None
    seed = random.randrange(1 << 32)
    numbers = random.Random(seed)
    for _ in range(50):
        data = os.urandom(numbers.choice([0, 1, 7, 1000, 70_000]))
        cuts = sorted(numbers.randint(0, len(data)) for _ in range(numbers.randint(0, 6)))
        pieces = [data[first:last] for first, last in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert joined(kind, ((crc(piece, 0), len(piece)) for piece in pieces)) == crc(data, 0), f"seed {seed}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_swap_is_noticed(kind: CrcKind) -> None:
    """Two parts in the wrong order, or one bit in one of them, make another CRC."""
    crc = crc_function(kind)
    assert crc is not None
    a, b = os.urandom(1000), os.urandom(1000)
    whole = crc(a + b, 0)
    assert combine(kind, crc(b, 0), crc(a, 0), 1000) != whole
    assert combine(kind, crc(a, 0) ^ 1, crc(b, 0), 1000) != whole


def test_lengths_beyond_any_buffer() -> None:
    """The CRC of 48 TiB of zeros out of two halves is that out of 1,024 pieces: no length overflows, none takes long."""
    crc = crc_function("crc64xz")
    assert crc is not None
    value, length = crc(b"\0" * 4096, 0), 4096
    while length < 48 << 40:
        value, length = combine("crc64xz", value, value, length), 2 * length
    piece, piece_length = crc(b"\0" * 4096, 0), 4096
    while piece_length < length // 1024:
        piece, piece_length = combine("crc64xz", piece, piece, piece_length), 2 * piece_length
    assert joined("crc64xz", [(piece, piece_length)] * 1024) == value
