"""Digests of a file's bytes: BLAKE3 proves, a CRC-64 is what the store itself keeps.

S3 stores a full-object CRC64NVME and OSS a CRC-64/XZ (its `x-oss-hash-crc64ecma`), so a stored object can be compared with its
manifest without a download. CRC64NVME comes from awscrt, which the `[s3]` extra brings; without it that field stays None.

Source: https://docs.aws.amazon.com/AmazonS3/latest/userguide/checking-object-integrity.html
Source: https://www.alibabacloud.com/help/en/oss/developer-reference/check-data-transmission-integrity-by-using-crc-64
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import fastcrc
from blake3 import blake3

# Takes bytes and the CRC of what came before them (0: nothing did); gives the CRC of both.
CrcFunction: TypeAlias = Callable[[bytes | bytearray | memoryview, int], int]
_crc64xz: CrcFunction = fastcrc.crc64.xz


@cache
def _crc64nvme() -> CrcFunction | None:
    """awscrt's CRC64NVME; None without awscrt. Imported at the first use: it costs as much start-up time as fsspec does."""
    try:
        from awscrt.checksums import crc64nvme
    except ImportError:
        return None
    return crc64nvme  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """What a sequence of bytes amounts to.

    Attributes:
        size: length in bytes.
        blake3: 64 hexadecimal digits.
        crc64xz: 16 hexadecimal digits, the CRC that OSS keeps.
        crc64nvme: 16 hexadecimal digits, the CRC that S3 keeps; None without awscrt.
    """

    size: int
    blake3: str
    crc64xz: str | None = None
    crc64nvme: str | None = None


class Digester:
    """Accumulates all digests of a byte stream in one pass. Not thread-safe; the C code releases the GIL for large blocks.

    BLAKE3 is what it costs, 0.2 s per GiB on one core; the two CRCs add 0.04 s each.
    """

    def __init__(self) -> None:
        self._blake3 = blake3()
        self._crc64xz = 0
        self._crc64nvme = 0
        self._nvme = _crc64nvme()
        self._size = 0

    def update(self, block: bytes | bytearray | memoryview) -> None:
        """Append `block`, which is not copied; a memoryview must be one of bytes.

        Some MiB are enough alone. Beside a thread that runs Python, each block may wait for it three times, 5 ms each: there, 32 MiB are better.
        """
        self._blake3.update(block)
        self._crc64xz = _crc64xz(block, self._crc64xz)
        if self._nvme is not None:
            self._crc64nvme = self._nvme(block, self._crc64nvme)
        self._size += len(block)

    def digests(self) -> Digests:
        """The digests of everything so far; more may be appended afterwards."""
        return Digests(
            size=self._size,
            blake3=self._blake3.hexdigest(),
            crc64xz=f"{self._crc64xz:016x}",
            crc64nvme=None if self._nvme is None else f"{self._crc64nvme:016x}",
        )


def crc_function(kind: str) -> CrcFunction | None:
    """The function of a CRC by its name in `Digests`; None if this machine cannot compute it. Releases the GIL for large blocks."""
    return _crc64xz if kind == "crc64xz" else _crc64nvme()


def digest_bytes(data: bytes) -> Digests:
    """All digests of `data`."""
    digester = Digester()
    digester.update(data)
    return digester.digests()


def blake3_hasher() -> Any:
    """BLAKE3 of what its `update` is given: `hexdigest()`. Releases the GIL for large blocks."""
    return blake3()


def blake3_hex(data: bytes) -> str:
    """BLAKE3 of `data`, 64 hexadecimal digits."""
    return str(blake3(data).hexdigest())


def crc64xz_hex(data: bytes) -> str:
    """The CRC that OSS keeps, of `data`: 16 hexadecimal digits."""
    return f"{_crc64xz(data, 0):016x}"
