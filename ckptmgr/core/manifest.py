"""The manifest of a checkpoint: its model, its bytes, and the other small records of a run.

A manifest is canonical JSON (sorted keys, no spaces to choose) that carries the BLAKE3 of itself without the `digest` field, so that a
truncated or edited one is noticed. Unknown fields survive a round trip in `extra`; an unknown major version is refused with
"upgrade ckptmgr". Never a credential, a URL, or an absolute local path.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from ckptmgr.core.checksums import blake3_hex
from ckptmgr.core.errors import ManifestError, ManifestVersionError
from ckptmgr.core.files import FileEntry, PackedFiles, content_id, pack_files, role_of
from ckptmgr.core.layout import Stem, check_paths, parse_stem

# What a manifest says of its files has a module of its own, and is known by its names here.
__all__ = [
    "FORMAT",
    "VERSION",
    "ClosingRecord",
    "FileEntry",
    "How",
    "Manifest",
    "canonical_json",
    "content_id",
    "convert_record",
    "decode_manifest",
    "decode_metric",
    "decode_record",
    "encode_closing",
    "encode_manifest",
    "encode_metric",
    "own_digest",
    "role_of",
]

FORMAT = "ckptmgr"
VERSION = 1

How = Literal["auto", "explicit", "fresh"]
_SPECIAL_FLOATS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What one committed checkpoint is.

    Attributes:
        stem: the name of the save; attempt, step and seq are in it.
        run_uuid: the run it belongs to.
        files: every file, sorted by path; a tuple, or `PackedFiles` where the manifest was read.
        kind: `checkpoint`, or `artifact` with the version in place of the step.
        epoch: epochs done when it was saved, fractional.
        parent: id of the checkpoint that its attempt resumed from.
        created_at: ISO 8601 in UTC with `Z`; information only, nothing is ordered by it (I4).
        reasons: why it was saved (`every_n_steps:500`, `best:eval_loss`, `sigterm`, …).
        metrics: the newest evaluation when it was saved; may hold NaN and infinities.
        metric_modes: for the metrics a policy watches, which direction is better (`min` or `max`).
        world_size: ranks that trained.
        producer: framework, versions and host that wrote it.
        conditions: what training ran under, as `ckptmgr.core.conditions` has it; JSON values, read by those who compare.
        extra: fields of a newer minor version, kept as they are.
    """

    stem: Stem
    run_uuid: str
    files: Sequence[FileEntry]
    kind: str = "checkpoint"
    epoch: float | None = None
    parent: str | None = None
    created_at: str | None = None
    reasons: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    metric_modes: Mapping[str, str] = field(default_factory=dict)
    world_size: int = 1
    producer: Mapping[str, str] = field(default_factory=dict)
    conditions: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return str(self.stem)

    @property
    def step(self) -> int:
        return self.stem.step

    @property
    def size_bytes(self) -> int:
        return self.files.size_bytes if isinstance(self.files, PackedFiles) else sum(entry.size for entry in self.files)

    def renamed(self, stem: Stem) -> Manifest:
        return replace(self, stem=stem)

    @property
    def content_id(self) -> str:
        """BLAKE3 over path, size and digest of every file: equal if and only if two checkpoints hold the same bytes."""
        return content_id(self.files)

    def same_content(self, other: Manifest) -> bool:
        """Whether both name the same files with the same bytes (whatever store-specific CRCs either carries)."""
        return self.content_id == other.content_id


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosingRecord:
    """What stands in a manifest's place once its checkpoint must never (again) be read.

    `pruned`: it was a checkpoint and retention removed it. `aborted`: its upload was given up and gc claimed the name; the
    writer, refused by the create-only commit, goes on under a new stem.
    """

    stem: Stem
    closed: Literal["pruned", "aborted"]
    closed_at: str | None = None


# --- bytes ----------------------------------------------------------------------------------------------------------------


class _FileDoc(msgspec.Struct, kw_only=True):
    path: str
    size: int
    blake3: str
    role: str = "other"
    crc64xz: str | None = None
    crc64nvme: str | None = None
    rank: int | None = None


class _ManifestDoc(msgspec.Struct, kw_only=True):
    format: str
    version: int
    id: str
    run_uuid: str
    kind: str
    attempt: int
    step: int
    files: list[_FileDoc]
    size_bytes: int
    epoch: float | None = None
    parent: str | None = None
    created_at: str | None = None
    reasons: list[str] = []
    metrics: dict[str, float | str] = {}
    metric_modes: dict[str, str] = {}
    world_size: int = 1
    producer: dict[str, str] = {}
    conditions: dict[str, Any] = {}


class _KnownFile(_FileDoc, kw_only=True, forbid_unknown_fields=True):
    """A file of which everything is known."""


class _KnownManifest(_ManifestDoc, kw_only=True, forbid_unknown_fields=True):
    """A manifest in which everything is known: as this very version writes it."""

    digest: str
    files: list[_KnownFile]  # type: ignore[assignment]


_FILE_FIELDS = frozenset(_FileDoc.__struct_fields__)
_MANIFEST_FIELDS = frozenset(_ManifestDoc.__struct_fields__) | {"digest"}
_HEX64 = re.compile("[0-9a-f]{64}")
_DIGEST_LINE = re.compile(rb'\n "digest": "(blake3:[0-9a-f]{64})",(?=\n)')
_known_manifest = msgspec.json.Decoder(_KnownManifest)


def canonical_json(document: Mapping[str, Any]) -> bytes:
    """The one way to write `document`: sorted keys, an indent of one space, UTF-8, a newline at the end. NaN is refused."""
    options: dict[str, Any] = {"sort_keys": True, "ensure_ascii": False, "allow_nan": False}
    try:
        # Python indents in Python, at five times the cost: this is written, and its digest checked, thousands of times.
        return msgspec.json.format(json.dumps(document, **options).encode(), indent=1) + b"\n"
    except (UnicodeEncodeError, msgspec.DecodeError):  # a file name that is not UTF-8
        return json.dumps(document, indent=1, **options).encode("utf-8", "surrogatepass") + b"\n"


def encode_metric(value: float) -> float | str:
    """A metric as JSON has it: non-finite values are the strings "NaN", "Infinity" and "-Infinity"."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def decode_metric(value: float | str) -> float:
    """The inverse of `encode_metric`."""
    return _SPECIAL_FLOATS[value] if isinstance(value, str) else float(value)


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of `manifest`, its own digest included.

    Raises:
        ManifestError: a file name that no reader would accept.
    """
    check_paths(entry.path for entry in manifest.files)
    document: dict[str, Any] = {
        **manifest.extra,
        "format": FORMAT,
        "version": VERSION,
        "id": manifest.id,
        "run_uuid": manifest.run_uuid,
        "kind": manifest.kind,
        "attempt": manifest.stem.attempt,
        "step": manifest.stem.step,
        "epoch": manifest.epoch,
        "parent": manifest.parent,
        "created_at": manifest.created_at,
        "reasons": list(manifest.reasons),
        "metrics": {name: encode_metric(value) for name, value in manifest.metrics.items()},
        "metric_modes": dict(manifest.metric_modes),
        "world_size": manifest.world_size,
        "producer": dict(manifest.producer),
        "files": [_encode_file(entry) for entry in sorted(manifest.files, key=lambda entry: entry.path)],
        "size_bytes": manifest.size_bytes,
    }
    if manifest.conditions:
        document["conditions"] = dict(manifest.conditions)
    document["digest"] = own_digest(document)
    return canonical_json(document)


def _encode_file(entry: FileEntry) -> dict[str, Any]:
    document: dict[str, Any] = {
        **entry.extra,
        "path": entry.path,
        "size": entry.size,
        "blake3": entry.blake3,
        "role": entry.role,
    }
    for name in ("crc64xz", "crc64nvme", "rank"):
        value = getattr(entry, name)
        if value is not None:
            document[name] = value
    return document


def own_digest(document: Mapping[str, Any]) -> str:
    """What a record carries as its `digest`: that of all its other fields."""
    return "blake3:" + blake3_hex(canonical_json({key: value for key, value in document.items() if key != "digest"}))


def encode_closing(record: ClosingRecord) -> bytes:
    """The bytes of a closing record, written in the manifest's place."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "id": str(record.stem),
        "closed": record.closed,
        "closed_at": record.closed_at,
    }
    return canonical_json(document)


def decode_manifest(data: bytes, *, where: str) -> Manifest | ClosingRecord:
    """What the bytes under `manifests/` say.

    Args:
        where: the key (or file) they came from, for messages.

    Raises:
        ManifestVersionError: written by a newer ckptmgr.
        ManifestError: not JSON, truncated, edited (own digest), fields of the wrong kind, or unsafe file names.
    """
    known = _decode_known(data)
    if known is not None:
        return known
    document = decode_record(data, where=where)
    if "closed" in document:
        closed = document["closed"]
        if closed not in ("pruned", "aborted"):
            raise ManifestError(
                f"{where} is closed as {closed!r}, which this version does not know", hint="upgrade ckptmgr", key=where
            )
        return ClosingRecord(stem=_stem_of(document, where), closed=closed, closed_at=document.get("closed_at"))
    try:
        is_intact = document.get("digest") == own_digest(document)
    except RecursionError:  # nested deeper than we can write, so it was not we who wrote it
        is_intact = False
    if not is_intact:
        raise ManifestError(
            f"{where} does not match its own digest: it was truncated or edited",
            hint="verify the store's copy; resume falls back to an older checkpoint",
            key=where,
        )
    parsed = convert_record(document, _ManifestDoc, where)
    if any(isinstance(value, str) and value not in _SPECIAL_FLOATS for value in parsed.metrics.values()):
        raise ManifestError(f"{where} holds a metric that is not a number", key=where)
    check_paths(entry.path for entry in parsed.files)
    stem = _stem_of(document, where)
    if (stem.attempt, stem.step) != (parsed.attempt, parsed.step):
        raise ManifestError(
            f"{where} contradicts itself: id {stem} against attempt {parsed.attempt}, step {parsed.step}", key=where
        )
    files = []
    for entry, raw in zip(parsed.files, document["files"], strict=True):
        if entry.size < 0 or not _HEX64.fullmatch(entry.blake3):
            raise ManifestError(f"{where} has a size or digest that makes no sense for {entry.path!r}", key=where)
        files.append(
            FileEntry(
                path=entry.path,
                size=entry.size,
                blake3=entry.blake3,
                role=entry.role,
                crc64xz=entry.crc64xz,
                crc64nvme=entry.crc64nvme,
                rank=entry.rank,
                extra={key: value for key, value in raw.items() if key not in _FILE_FIELDS},
            )
        )
    extra = {key: value for key, value in document.items() if key not in _MANIFEST_FIELDS}
    return _manifest_of(parsed, stem, pack_files(files) or tuple(files), extra)


def _decode_known(data: bytes) -> Manifest | None:
    """The manifest, if `data` is to the byte what this version writes; None if it is anything else, good or bad.

    As strict as the way for everything else, in a fifth of its time: those of 10,000 checkpoints are read for one listing. The text without its digest
    is what was digested when it was written, so nothing has to be written again to compare.
    """
    line = _DIGEST_LINE.search(data)
    if line is None or b"blake3:" + blake3_hex(data[: line.start()] + data[line.end() :]).encode() != line[1]:
        return None
    try:
        parsed = _known_manifest.decode(data)
        check_paths([entry.path for entry in parsed.files])
    except (msgspec.DecodeError, RecursionError, ManifestError):
        return None
    stem, files = parse_stem(parsed.id), pack_files(parsed.files)
    if stem is None or files is None or parsed.digest.encode() != line[1]:
        return None
    is_right = (
        (parsed.format, parsed.version, parsed.attempt, parsed.step) == (FORMAT, VERSION, stem.attempt, stem.step)
        and all(entry.size >= 0 and len(entry.blake3) == 64 for entry in parsed.files)
        and not any(isinstance(value, str) and value not in _SPECIAL_FLOATS for value in parsed.metrics.values())
    )
    return _manifest_of(parsed, stem, files, {}) if is_right else None


def _manifest_of(parsed: _ManifestDoc, stem: Stem, files: Sequence[FileEntry], extra: Mapping[str, Any]) -> Manifest:
    return Manifest(
        stem=stem,
        run_uuid=parsed.run_uuid,
        kind=parsed.kind,
        epoch=parsed.epoch,
        parent=parsed.parent,
        created_at=parsed.created_at,
        reasons=tuple(parsed.reasons),
        metrics={name: decode_metric(value) for name, value in parsed.metrics.items()},
        metric_modes=parsed.metric_modes,
        world_size=parsed.world_size,
        producer=parsed.producer,
        conditions=parsed.conditions,
        files=files,
        extra=extra,
    )


def decode_record(data: bytes, *, where: str) -> dict[str, Any]:
    """Any JSON record of a run, checked for format and version only.

    Raises:
        ManifestVersionError: written by a newer ckptmgr.
        ManifestError: not such a record.
    """
    try:
        document = json.loads(data, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError) as exc:
        raise ManifestError(
            f"{where} is not JSON ({len(data)} bytes: {exc})",
            hint="it was truncated or written by something else",
            key=where,
        ) from exc
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ManifestError(
            f"{where} is not a ckptmgr record",
            hint="it was written by something else; ckptmgr leaves it alone",
            key=where,
        )
    version = document.get("version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ManifestError(f"{where} has the version {version!r}", key=where)
    if version > VERSION:
        raise ManifestVersionError(
            f"{where} has format version {version}, this ckptmgr reads up to {VERSION}",
            hint="upgrade ckptmgr",
            key=where,
            version=version,
        )
    return document


def _finite(text: str) -> float:
    """A number of JSON proper; Python would also read NaN, Infinity and 1e999, and then not write them again."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not a number in JSON")
    return value


def convert_record(document: Mapping[str, Any], shape: type[Any], where: str) -> Any:
    """`document` as an instance of the msgspec struct `shape`.

    Raises:
        ManifestError: a field is missing or of the wrong kind; the message names it.
    """
    try:
        return msgspec.convert(document, shape)
    except msgspec.ValidationError as exc:
        raise ManifestError(f"{where}: {exc}", key=where) from exc


def _stem_of(document: Mapping[str, Any], where: str) -> Stem:
    try:
        return Stem.parse(str(document.get("id")))
    except ValueError as exc:
        raise ManifestError(f"{where} has the id {document.get('id')!r}, which is not one", key=where) from exc
