"""The files of a checkpoint: what each is, and a packed form, for a history of thousands of checkpoints holds all of theirs.

Whoever lists a run asks how many files a checkpoint has and how large they are; only whoever moves or checks one asks which. So a manifest that was
read keeps its files packed, a tenth of the memory, and takes them out when they are asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, overload

import msgspec

from ckptmgr.core.checksums import Digests, blake3_hex

Role = Literal["weights", "optimizer", "scheduler", "rng", "trainer", "config", "tokenizer", "other"]

# What the files of the trainers people use are for; the first match wins. Source: shared survey of checkpoint trees (T1-T14).
_ROLES: tuple[tuple[Role, tuple[str, ...]], ...] = (
    ("rng", ("rng", "random_states")),
    ("optimizer", ("optim",)),
    ("scheduler", ("scheduler", "lr_scheduler", "scaler")),
    (
        "trainer",
        (
            "trainer_state",
            "trainer.",
            "training_args",
            "callbacks",
            "data.",
            "sampler",
            "dl_state",
            "latest",
            "state.json",
        ),
    ),
    ("tokenizer", ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template", "spiece")),
    ("config", ("config", "args.json", "generation_config")),
)
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".distcp", ".index.json", ".gguf")


def role_of(path: str) -> Role:
    """What the file at `path` holds, judged by its name; `other` when the name says nothing."""
    name = path.rsplit("/", 1)[-1].lower()
    for role, marks in _ROLES:
        if any(mark in name for mark in marks):
            return role
    return "weights" if name.endswith(_WEIGHT_SUFFIXES) else "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint: `path` relative to the checkpoint with `/`, `size` in bytes, digests in hexadecimal."""

    path: str
    size: int
    blake3: str
    role: str = "other"
    crc64xz: str | None = None
    crc64nvme: str | None = None
    rank: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str, digests: Digests, *, role: Role | None = None) -> FileEntry:
        """The entry of a file whose bytes amount to `digests`."""
        return cls(
            path=path,
            size=digests.size,
            blake3=digests.blake3,
            crc64xz=digests.crc64xz,
            crc64nvme=digests.crc64nvme,
            role=role or role_of(path),
        )

    @property
    def digests(self) -> Digests:
        return Digests(size=self.size, blake3=self.blake3, crc64xz=self.crc64xz, crc64nvme=self.crc64nvme)


def content_id(files: Iterable[FileEntry]) -> str:
    """BLAKE3 over path, size and digest of every file, in any order."""
    return blake3_hex(json.dumps(sorted((e.path, e.size, e.blake3) for e in files)).encode())


# --- the packed form ------------------------------------------------------------------------------------------------------


class _Described(Protocol):
    """What can be packed: a `FileEntry`, or what a manifest's bytes say of a file."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def blake3(self) -> str: ...
    @property
    def role(self) -> str: ...
    @property
    def crc64xz(self) -> str | None: ...
    @property
    def crc64nvme(self) -> str | None: ...
    @property
    def rank(self) -> int | None: ...


class _Packed(msgspec.Struct, array_like=True):
    """One file; digests as bytes, none of them as an empty one."""

    path: str
    size: int
    blake3: bytes
    role: str
    crc64xz: bytes
    crc64nvme: bytes
    rank: int | None
    extra: dict[str, Any] | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_Packed])


class PackedFiles(Sequence[FileEntry]):
    """The files of one checkpoint, in the order they were packed; equal to a tuple of the same entries. Safe from any thread.

    Attributes:
        data: their packed form, which `PackedFiles` itself takes.
        size_bytes: of all of them.
    """

    __slots__ = ("_count", "_entries", "data", "size_bytes")

    def __init__(self, data: bytes, count: int, size_bytes: int) -> None:
        self.data = data
        self.size_bytes = size_bytes
        self._count = count
        self._entries: tuple[FileEntry, ...] | None = None

    def _all(self) -> tuple[FileEntry, ...]:
        if self._entries is None:
            self._entries = tuple(map(_unpacked, _decoder.decode(self.data)))
        return self._entries

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> FileEntry: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[FileEntry, ...]: ...
    def __getitem__(self, at: int | slice) -> FileEntry | tuple[FileEntry, ...]:
        return self._all()[at]

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self._all())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedFiles):
            return self.data == other.data or self._all() == other._all()
        return self._all() == other if isinstance(other, tuple) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._all())

    def __repr__(self) -> str:
        return repr(self._all())


def pack_files(files: Sequence[_Described]) -> PackedFiles | None:
    """`files` in packed form; None if that would not give back the very same (a digest that is not one, numbers beyond 64 bits)."""
    try:
        packed = [
            _Packed(
                entry.path,
                entry.size,
                _digits(entry.blake3),
                entry.role,
                _digits(entry.crc64xz),
                _digits(entry.crc64nvme),
                entry.rank,
                getattr(entry, "extra", None) or None,
            )
            for entry in files
        ]
        return PackedFiles(_encoder.encode(packed), len(packed), sum(entry.size for entry in packed))
    except (ValueError, OverflowError, TypeError):  # a TypeError comes from what JSON has and msgpack does not
        return None


def _digits(text: str | None) -> bytes:
    if text is None:
        return b""
    digest = bytes.fromhex(text)
    if digest.hex() != text or not digest:
        raise ValueError(text)
    return digest


def _unpacked(packed: _Packed) -> FileEntry:
    return FileEntry(
        path=packed.path,
        size=packed.size,
        blake3=packed.blake3.hex(),
        role=packed.role,
        crc64xz=packed.crc64xz.hex() or None,
        crc64nvme=packed.crc64nvme.hex() or None,
        rank=packed.rank,
        extra=packed.extra or {},
    )
