"""The other small records of a run: run.json, an attempt's claim, a tag.

Like a manifest each carries the digest of itself: one flipped bit in an attempt's parent or in a tag means another checkpoint. Earlier versions wrote them
without; so may whoever edits one by hand.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec

from ckptmgr.core.errors import ManifestError
from ckptmgr.core.layout import Stem, parse_stem
from ckptmgr.core.manifest import FORMAT, VERSION, How, canonical_json, convert_record, decode_record, own_digest

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """run.json: which run this directory is.

    Attributes:
        uuid: drawn when the run was created; a manifest, a local tier and a store belong together only if it is the same.
        kind: `checkpoints` or `artifact`.
        create_only: what the probe found when the run was created: whether the store itself decides create-only writes.
        created_at: ISO 8601 in UTC, information only.
    """

    uuid: str
    kind: str = "checkpoints"
    create_only: bool = True
    created_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """attempts/<n>.json: one process life of a run, claimed before its first step.

    Attributes:
        number: counts the (re)starts of a run from 1.
        how: `auto` (resumed the newest, or found nothing and began), `explicit` (rewound to a named checkpoint), `fresh` (a lineage
            of its own, asked for).
        parent: the checkpoint it resumed from; None if it began from scratch.
        previous: the highest attempt claimed before it; None for the first.
        claim_id: drawn by the claimer, so that an unanswered claim can be recognised as its own.
        host: where it ran, information only.
    """

    number: int
    how: How
    parent: Stem | None = None
    previous: int | None = None
    claim_id: str = ""
    host: str | None = None
    created_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TagRecord:
    """tags/<tag>.json: a user's name for a checkpoint; a mutable pointer."""

    tag: str
    stem: Stem
    created_at: str | None = None


class _RunDoc(msgspec.Struct, kw_only=True):
    uuid: str
    kind: str = "checkpoints"
    create_only: bool = True
    created_at: str | None = None


class _AttemptDoc(msgspec.Struct, kw_only=True):
    attempt: int
    how: Literal["auto", "explicit", "fresh"]
    parent: str | None = None
    previous: int | None = None
    claim_id: str = ""
    host: str | None = None
    created_at: str | None = None


class _TagDoc(msgspec.Struct, kw_only=True):
    tag: str
    id: str
    created_at: str | None = None


def _encode(**fields: object) -> bytes:
    document = {"format": FORMAT, "version": VERSION, **fields}
    return canonical_json({**document, "digest": own_digest(document)})


def _decode(data: bytes, kind: type[_T], where: str) -> _T:
    document = decode_record(data, where=where)
    try:
        is_intact = "digest" not in document or document["digest"] == own_digest(document)
    except RecursionError:  # nested deeper than we can write, so it was not we who wrote it
        is_intact = False
    if not is_intact:
        raise ManifestError(
            f"{where} does not match its own digest: it was damaged or edited",
            hint="bring it back from a copy; one that is edited by hand must have no digest",
            key=where,
        )
    found: _T = convert_record(document, kind, where)
    return found


def encode_run(record: RunRecord) -> bytes:
    return _encode(uuid=record.uuid, kind=record.kind, create_only=record.create_only, created_at=record.created_at)


def decode_run(data: bytes, *, where: str) -> RunRecord:
    """Raises ManifestError when `data` is not a run.json."""
    doc = _decode(data, _RunDoc, where)
    return RunRecord(uuid=doc.uuid, kind=doc.kind, create_only=doc.create_only, created_at=doc.created_at)


def encode_attempt(record: AttemptRecord) -> bytes:
    return _encode(
        attempt=record.number,
        how=record.how,
        parent=None if record.parent is None else str(record.parent),
        previous=record.previous,
        claim_id=record.claim_id,
        host=record.host,
        created_at=record.created_at,
    )


def decode_attempt(data: bytes, *, where: str) -> AttemptRecord:
    """Raises ManifestError when `data` is not an attempt's record."""
    doc = _decode(data, _AttemptDoc, where)
    parent = None if doc.parent is None else parse_stem(doc.parent)
    if doc.parent is not None and parent is None:
        raise ManifestError(f"{where} has the parent {doc.parent!r}, which is not a checkpoint id", key=where)
    return AttemptRecord(
        number=doc.attempt,
        how=doc.how,
        parent=parent,
        previous=doc.previous,
        claim_id=doc.claim_id,
        host=doc.host,
        created_at=doc.created_at,
    )


def encode_tag(record: TagRecord) -> bytes:
    return _encode(tag=record.tag, id=str(record.stem), created_at=record.created_at)


def decode_tag(data: bytes, *, where: str) -> TagRecord:
    """Raises ManifestError when `data` is not a tag."""
    doc = _decode(data, _TagDoc, where)
    stem = parse_stem(doc.id)
    if stem is None:
        raise ManifestError(f"{where} points to {doc.id!r}, which is not a checkpoint id", key=where)
    return TagRecord(tag=doc.tag, stem=stem, created_at=doc.created_at)
