"""How a store is to be used, as far as its user says so: sizes, limits, and what a store cannot tell by itself.

One record for every kind of store; what a kind does not know, it ignores. `from_env` reads it from `CKPTMGR_*` variables, which reach the
transfer process and every command alike; endpoints, regions and credentials are each ecosystem's own and not here.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.units import parse_size

Checksum = Literal["auto", "crc64nvme", "none"]
Addressing = Literal["auto", "path", "virtual"]
SignPayload = Literal["auto", "always", "never"]
CreateOnly = Literal["auto", "no"]
Engine = Literal["auto", "boto3"]
Sse = Literal["AES256", "aws:kms", "aws:kms:dsse", "KMS", "SM4"]

DEFAULT_CONCURRENCY = 16
#: OSS's smallest part; S3's is 5 MiB, which its profile checks.
_MIN_PART_BYTES = 100 << 10
_MAX_PART_BYTES = 5 << 30
_MAX_CONCURRENCY = 256
_MIN_BYTES_S = 64 << 10  # less is a forgotten unit


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What may be said about a store. Equal options share their limits within one process.

    Attributes:
        part_bytes: bytes per part of a large file, from 100 KiB to 5 GiB; None for the default. A larger file than 9,000 of them gets larger ones.
        concurrency: data requests of this process that are under way at a time, 1 to 256.
        max_bytes_s: most bytes per second, over all requests of this process, in both directions; None for no limit.
        checksum: `crc64nvme` sends it always, `none` never (S3 only); `auto`: as the store's profile says, and as the store is seen to take it.
        addressing: where the bucket's name goes; `auto`: as the profile says.
        sign_payload: whether the signature covers the SHA-256 of bodies; `auto`: not over TLS and to a loopback address, where a CRC goes along.
        create_only: `no` for a store that is known to accept the condition and to ignore it; `auto`: as the probe of the bucket finds.
        sse: encryption by the store: `AES256`, `aws:kms`, `aws:kms:dsse` on S3; `AES256`, `KMS`, `SM4` on OSS; None: as the bucket says.
        sse_key: the id of the key, for the KMS modes.
        storage_class: of new objects, in the store's own words (`STANDARD_IA`, `IA`); None: as the bucket says.
        profile: name of a profile of `ckptmgr.backends.profiles`, in place of the one found by the endpoint.
        engine: `boto3` sends the data calls of S3 through boto3 too.
    """

    part_bytes: int | None = None
    concurrency: int = DEFAULT_CONCURRENCY
    max_bytes_s: float | None = None
    checksum: Checksum = "auto"
    addressing: Addressing = "auto"
    sign_payload: SignPayload = "auto"
    create_only: CreateOnly = "auto"
    sse: Sse | None = None
    sse_key: str | None = None
    storage_class: str | None = None
    profile: str | None = None
    engine: Engine = "auto"

    def __post_init__(self) -> None:
        _check(self.part_bytes is None or self.part_bytes > 0, f"part_bytes must be positive, not {self.part_bytes}")
        _check(
            1 <= self.concurrency <= _MAX_CONCURRENCY,
            f"concurrency must be from 1 to {_MAX_CONCURRENCY}, not {self.concurrency}",
        )
        _check(
            self.max_bytes_s is None or self.max_bytes_s > 0, f"max_bytes_s must be positive, not {self.max_bytes_s}"
        )
        _check(
            self.storage_class is None or self.storage_class.lower() not in _ARCHIVES,
            f"storage_class must not be {self.storage_class}: what is in an archive cannot be resumed from",
        )
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            _check(value in allowed or value is None, f"{name} must be one of {', '.join(allowed)}, not {value!r}")
        _check(
            self.sse_key is None or self.sse in _KMS,
            f"sse_key needs sse to be one of {', '.join(_KMS)}, not {self.sse!r}",
        )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> StoreOptions:
        """What the `CKPTMGR_*` variables say; an empty one counts as unset.

        Args:
            environ: in place of the process's own.

        Raises:
            ConfigError: names the variable, its value, and what is allowed; or one that is almost named like one of these, which would be passed over.
        """
        given = _Variables(os.environ if environ is None else environ)
        options = cls(
            part_bytes=given.size("CKPTMGR_PART_SIZE", _MIN_PART_BYTES, _MAX_PART_BYTES),
            concurrency=given.number("CKPTMGR_CONCURRENCY", DEFAULT_CONCURRENCY, _MAX_CONCURRENCY),
            max_bytes_s=given.rate("CKPTMGR_BANDWIDTH"),
            checksum=cast("Checksum", given.choice("CKPTMGR_CHECKSUM", "checksum") or "auto"),
            addressing=cast("Addressing", given.choice("CKPTMGR_ADDRESSING", "addressing") or "auto"),
            sign_payload=cast("SignPayload", given.choice("CKPTMGR_SIGN_PAYLOAD", "sign_payload") or "auto"),
            create_only=cast("CreateOnly", given.choice("CKPTMGR_CREATE_ONLY", "create_only") or "auto"),
            sse=cast("Sse | None", given.choice("CKPTMGR_SSE", "sse")),
            storage_class=given.storage_class("CKPTMGR_STORAGE_CLASS"),
            profile=given.text("CKPTMGR_STORE_PROFILE"),
            engine=cast("Engine", given.choice("CKPTMGR_S3_ENGINE", "engine") or "auto"),
        )
        key = given.text("CKPTMGR_SSE_KEY")
        given.refuse_misspelt()
        if key is None:
            return options
        if options.sse not in _KMS:
            raise ConfigError(
                f"CKPTMGR_SSE_KEY names a key, but CKPTMGR_SSE is {options.sse or 'not set'}",
                hint=f"set CKPTMGR_SSE to one of {', '.join(_KMS)}",
            )
        return replace(options, sse_key=key)


_CHOICES: dict[str, tuple[str, ...]] = {
    "checksum": get_args(Checksum),
    "addressing": get_args(Addressing),
    "sign_payload": get_args(SignPayload),
    "create_only": get_args(CreateOnly),
    "sse": get_args(Sse),
    "engine": get_args(Engine),
}
# Of S3 (GLACIER_IR can be read at once) and of OSS.
_ARCHIVES = {"glacier", "deep_archive", "archive", "coldarchive", "deepcoldarchive"}
_READABLE = (
    "give a class that is read at once, such as STANDARD, STANDARD_IA or GLACIER_IR on S3, Standard or IA on OSS"
)
_KMS = ("aws:kms", "aws:kms:dsse", "KMS")


def _check(holds: bool, text: str) -> None:
    if not holds:
        raise ConfigError(text)


class _Variables:
    """Variables of the environment as values."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        self._known: list[str] = []

    def refuse_misspelt(self) -> None:
        """Raise ConfigError if a variable is almost named like one that was asked for: what it says, encryption say, would not be done."""
        for name in sorted(name for name in self._environ if name.startswith("CKPTMGR_") and name not in self._known):
            for close in difflib.get_close_matches(name, self._known, n=1, cutoff=0.88):
                raise ConfigError(f"{name} is not known", hint=f"did you mean {close}?", variable=name)

    def text(self, name: str) -> str | None:
        self._known.append(name)
        return self._environ.get(name, "").strip() or None

    def choice(self, name: str, option: str) -> str | None:
        text = self.text(name)
        if text is None:
            return None
        allowed = {value.lower(): value for value in _CHOICES[option]}
        if text.lower() not in allowed:
            close = difflib.get_close_matches(text.lower(), allowed, n=1)
            meant = f"did you mean {allowed[close[0]]}? " if close else ""
            raise _wrong(name, text, "is not known", f"{meant}allowed are {', '.join(allowed.values())}")
        return allowed[text.lower()]

    def storage_class(self, name: str) -> str | None:
        text = self.text(name)
        if text is not None and text.lower() in _ARCHIVES:
            raise _wrong(name, text, "is an archive, which cannot be resumed from", _READABLE)
        return text

    def size(self, name: str, least: int, most: int) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        number = parse_size(text)
        if number is None or not least <= number <= most:
            allowed = f"give {least >> 10} KiB to {most >> 30} GiB, such as 64MiB"
            raise _wrong(name, text, "is not a size" if number is None else "is out of range", allowed)
        return number

    def rate(self, name: str) -> float | None:
        text = self.text(name)
        if text is None:
            return None
        number = parse_size(text.removesuffix("/s").removesuffix("ps"))
        allowed = f"give {_MIN_BYTES_S >> 10} KiB per second or more, such as 50MB or 200MiB/s"
        if number is None or number < _MIN_BYTES_S:
            raise _wrong(name, text, "is not a rate" if not number else "is out of range", allowed)
        return float(number)

    def number(self, name: str, default: int, most: int) -> int:
        text = self.text(name)
        if text is None:
            return default
        if not text.isdecimal() or not 1 <= int(text) <= most:
            raise _wrong(name, text, "is not such a number", f"give a whole number from 1 to {most}")
        return int(text)


def _wrong(name: str, text: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{name}={text!r} {what}", hint=hint, variable=name)
