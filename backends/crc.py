"""The CRC-64 of two byte sequences together, out of the CRCs of each: how the parts of a file, which come in any order, prove the whole.

Appending n bytes to a message multiplies its CRC by x^(8n) modulo the CRC's polynomial, as polynomials over GF(2). Both kinds begin with, and end by, the
complement of all bits, and so the rest cancels out.

Source: https://github.com/madler/zlib/blob/v1.3.1/crc32.c (crc32_combine_gen64, multmodp)
"""

from __future__ import annotations

from functools import lru_cache

from ckptmgr.backends.base import CrcKind

# Reflected: the highest bit is the coefficient of x^0. The leading term x^64 is left out.
# Source: https://reveng.sourceforge.io/crc-catalogue/17plus.htm (CRC-64/XZ, CRC-64/NVME)
_POLYNOMIALS: dict[CrcKind, int] = {"crc64xz": 0xC96C5795D7870F42, "crc64nvme": 0x9A6C9329AC4BC9B5}
_ONE = 1 << 63


def combine(kind: CrcKind, first: int, second: int, second_bytes: int) -> int:
    """The CRC of a message out of those of its two pieces.

    Args:
        second_bytes: length of the second piece.
    """
    return _multiplied(_POLYNOMIALS[kind], _shift(kind, second_bytes), first) ^ second


@lru_cache(maxsize=64)
def _shift(kind: CrcKind, count: int) -> int:
    """x^(8 * count): what appending `count` bytes multiplies by. Kept, for all parts of a file but the last are of one length."""
    polynomial = _POLYNOMIALS[kind]
    result, power = _ONE, _ONE >> 8
    while count:
        if count & 1:
            result = _multiplied(polynomial, power, result)
        power = _multiplied(polynomial, power, power)
        count >>= 1
    return result


def _multiplied(polynomial: int, a: int, b: int) -> int:
    """a * b modulo the polynomial."""
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = (a << 1) & (2 * _ONE - 1)
        # b times x.
        b = (b >> 1) ^ polynomial if b & 1 else b >> 1
    return product
