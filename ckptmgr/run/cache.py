"""What this machine has read of a run's small records, kept on disk, so that a listing of 10,000 checkpoints reads only the new ones.

Nothing is believed without a listing of now: a kept record counts only if the store lists its very key with the very ETag, size and time that it had when
it was read (K112, K126). What another process wrote, closed or removed is seen at the next call, as without a cache; losing one, or having none because
the disk is full or read-only, costs time and nothing else.

One file per run, of mode 0600, in the user's cache directory: a mark, a BLAKE3, and what it covers. It is replaced as a whole and not synced: whichever
process is last wins, and one that is torn, another run's, or of another version is as good as none. Store URLs carry no credentials, and neither does it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import md5, sha256
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from ckptmgr.backends.localfile import write_all
from ckptmgr.core import layout
from ckptmgr.core.checksums import blake3_hex
from ckptmgr.core.files import PackedFiles
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord, Manifest
from ckptmgr.run.identity import cache_dir, new_nonce, wall_s

logger = logging.getLogger(__name__)

# Its number goes up with any change of the records below.
_MARK = b"ckptmgr cache 1\n"
_HEAD_BYTES = len(_MARK) + 32
# A run of 10,000 checkpoints of a dozen files takes 14 MB. What does not fit is read each time, the oldest checkpoints first.
_MOST_BYTES = 128 << 20
# Of all runs together; beyond it those go that were not used for longest.
_MOST_BYTES_OF_ALL = 1 << 30
# What an entry takes besides its parts, about.
_ENTRY_BYTES = 200
# So many in a hundred may be missing before the file is written again: a run that is saved to all the time would write megabytes for each checkpoint.
_MISSING_PERCENT = 1
_FORGOTTEN_S = 24 * 3600.0
_MD5_DIGITS = frozenset("0123456789abcdef")


@dataclass(frozen=True, slots=True)
class Seen:
    """What a listing says of one object: when all of it is as it was, so are the bytes.

    Attributes:
        etag: changes with the content; empty where there is none to rely on.
        time_ms: of its last change, by the store's clock; -1 if the store does not say. It guards against ETags that are less than they should be.
    """

    etag: str
    size: int
    time_ms: int

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Seen:
        """From a record of `Backend.find`; one without an ETag, or with a weak one, is never kept."""
        mtime = record.get("mtime")
        etag = str(record.get("etag") or "")
        return cls("" if etag.startswith("W/") else etag, record["size"], -1 if mtime is None else round(mtime * 1000))


_NOTHING = Seen("", 0, 0)


class _Kept(msgspec.Struct, array_like=True):
    """What was seen of an object when it was read. Below, only what it said."""

    etag: str
    size: int
    time_ms: int

    def is_still(self, seen: Seen) -> bool:
        return self.etag == seen.etag and self.size == seen.size and self.time_ms == seen.time_ms


_K = TypeVar("_K", bound=_Kept)


class _KeptBytes(_Kept, array_like=True):
    data: bytes


class _KeptClosing(_Kept, array_like=True):
    closed: Literal["pruned", "aborted"]
    closed_at: str | None


class _Common(msgspec.Struct, array_like=True, frozen=True):
    """What the checkpoints of a run mostly have in common."""

    kind: str
    reasons: tuple[str, ...]
    metric_modes: dict[str, str]
    world_size: int
    producer: dict[str, str]


class _KeptManifest(_Kept, array_like=True):
    common: int
    epoch: float | None
    parent: str | None
    created_at: str | None
    metrics: dict[str, float]
    files: bytes
    file_count: int
    size_bytes: int
    extra: dict[str, Any] | None


class _Body(msgspec.Struct, array_like=True):
    """A cache file; the records by their keys."""

    url: str
    uuid: str
    common: list[_Common]
    manifests: dict[str, _KeptManifest]
    closed: dict[str, _KeptClosing]
    others: dict[str, _KeptBytes]


# What JSON has and msgpack has not: numbers beyond 64 bits, halves of surrogate pairs, any depth.
_NOT_KEPT = (ValueError, OverflowError, TypeError, RecursionError)
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


class RunCache:
    """The records of one run that were read before, and still are what the store lists, for the length of one look at the run.

    Made, it has read its file; then it must `compare` that with what the store lists. `record_of` and `data_of` tell what is known, `keep` and
    `keep_data` take what was read, from any thread; `save`, at the end, writes nothing when there is nothing new.

    Args:
        url: the run, as the user names it; normalised.
        uuid: its identity: one of the same name that was made anew is another run.
    """

    def __init__(self, url: str, uuid: str) -> None:
        name = sha256(f"{url}\n{uuid}".encode("utf-8", "surrogateescape")).hexdigest()[:32]
        self._path = cache_dir() / "runs" / f"{name}.cache"
        self._body = _Body(url, uuid, [], {}, {}, {})
        self._listed: Mapping[str, Seen] = {}
        self._common: dict[bytes, int] = {}
        self._changes = 0
        self._there = self._load()

    def compare(self, listed: Mapping[str, Seen]) -> None:
        """Take, of what is on disk, what the store still has as it was.

        Args:
            listed: what it lists now, by key.
        """
        self._listed = listed
        ours, there, self._there = self._body, self._there, None
        if there is None:
            return
        ours.common = there.common
        self._common = {_encoder.encode(common): at for at, common in enumerate(there.common)}
        ours.manifests = self._unchanged(there.manifests)
        ours.closed = self._unchanged(there.closed)
        ours.others = self._unchanged(there.others)

    def _unchanged(self, records: dict[str, _K]) -> dict[str, _K]:
        found = {key: kept for key, kept in records.items() if kept.is_still(self._listed.get(key, _NOTHING))}
        self._changes += len(records) - len(found)
        return found

    # --- what is known ----------------------------------------------------------------------------------------------------

    def record_of(self, stem: Stem, key: str) -> Manifest | ClosingRecord | None:
        """What stands at `key`, the manifest's place of `stem`; None if it must be read."""
        kept = self._body.manifests.get(key)
        if kept is None:
            closing = self._body.closed.get(key)
            if closing is None:
                return None
            return ClosingRecord(stem=stem, closed=closing.closed, closed_at=closing.closed_at)
        common = self._body.common[kept.common]
        return Manifest(
            stem=stem,
            run_uuid=self._body.uuid,
            files=PackedFiles(kept.files, kept.file_count, kept.size_bytes),
            kind=common.kind,
            epoch=kept.epoch,
            parent=kept.parent,
            created_at=kept.created_at,
            reasons=common.reasons,
            metrics=kept.metrics,
            metric_modes=common.metric_modes,
            world_size=common.world_size,
            producer=common.producer,
            extra=kept.extra or {},
        )

    def data_of(self, key: str) -> bytes | None:
        """The bytes of a record that is none of a checkpoint; None if it must be read."""
        kept = self._body.others.get(key)
        return None if kept is None else kept.data

    # --- what was read ----------------------------------------------------------------------------------------------------

    def keep(self, key: str, data: bytes, record: Manifest | ClosingRecord) -> None:
        """Keep what was read of a checkpoint's record, if it is what was listed: the two are a moment apart."""
        seen = self._listed[key]
        # A manifest is only ever replaced by a closing record, which is shorter than any: where an ETag is no digest of the bytes, the size tells.
        if not seen.etag or len(data) != seen.size:
            return
        mark = seen.etag, seen.size, seen.time_ms
        if isinstance(record, ClosingRecord):
            self._body.closed[key] = _KeptClosing(*mark, record.closed, record.closed_at)
            self._changes += 1
        elif isinstance(record.files, PackedFiles) and record.run_uuid == self._body.uuid:
            with contextlib.suppress(*_NOT_KEPT):
                self._body.manifests[key] = self._kept(mark, record, record.files)
                self._changes += 1

    def _kept(self, mark: tuple[str, int, int], record: Manifest, files: PackedFiles) -> _KeptManifest:
        kept = _KeptManifest(
            *mark,
            self._common_of(record),
            record.epoch,
            record.parent,
            record.created_at,
            dict(record.metrics),
            files.data,
            len(files),
            files.size_bytes,
            dict(record.extra) or None,
        )
        _encoder.encode(kept)  # now, or one record would keep all others from being written
        return kept

    def keep_data(self, key: str, data: bytes) -> None:
        """Keep the bytes of any other record, if they are what was listed."""
        seen = self._listed[key]
        # A tag that is moved keeps its length, so only an ETag that is the digest of these bytes will do for it.
        is_mutable = key.startswith(f"{layout.TAGS}/")
        if seen.etag and len(data) == seen.size and (not is_mutable or _is_md5_of(seen.etag, data)):
            self._body.others[key] = _KeptBytes(seen.etag, seen.size, seen.time_ms, data)
            self._changes += 1

    def _common_of(self, record: Manifest) -> int:
        common = _Common(
            record.kind, tuple(record.reasons), dict(record.metric_modes), record.world_size, dict(record.producer)
        )
        word = _encoder.encode(common)
        at = self._common.get(word)
        if at is None:
            # Two threads may both append theirs: one is never used again and goes with the next `save`.
            self._body.common.append(common)
            at = self._common[word] = self._body.common.index(common)
        return at

    # --- the file ---------------------------------------------------------------------------------------------------------

    def _load(self) -> _Body | None:
        """What is on disk; None if there is nothing to be believed."""
        if not self._path.is_absolute():  # no home directory: it would be a folder of wherever we are
            return None
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return None
        with open(fd, "rb") as file:
            stats = os.fstat(fd)
            # Somebody else's word on what is in the store counts nothing, and one too large was not written here.
            if stats.st_uid != os.geteuid() or stats.st_size > 2 * _MOST_BYTES:
                return None
            try:
                text = file.read()
            except OSError:
                return None
            if wall_s() - stats.st_mtime > _FORGOTTEN_S:
                with contextlib.suppress(OSError):
                    os.utime(fd)  # in use: not the first to go
        digest, data = text[len(_MARK) : _HEAD_BYTES], text[_HEAD_BYTES:]
        if not text.startswith(_MARK) or digest.hex() != blake3_hex(data):
            return None
        try:
            body = _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return None
        return body if (body.url, body.uuid) == (self._body.url, self._body.uuid) else None

    def save(self) -> None:
        """Write what is known now, if enough of it is new. A disk that cannot be written costs the cache, nothing else."""
        body = self._body
        # Copies: after a Ctrl-C, reads that were under way may still come in. What checkpoints have in common last, for it only grows.
        manifests, closed, others = dict(body.manifests), dict(body.closed), dict(body.others)
        body = _Body(body.url, body.uuid, list(body.common), manifests, closed, others)
        count = len(manifests) + len(closed) + len(others)
        if self._changes == 0 or self._changes * 100 < count * _MISSING_PERCENT or not self._path.is_absolute():
            return
        try:
            data = _encoder.encode(_trimmed(body))
            self._write(_MARK + bytes.fromhex(blake3_hex(data)) + data)
        except (OSError, *_NOT_KEPT) as exc:
            logger.info("cannot cache the manifests of %s: %s", body.url, exc)
        else:
            self._changes = 0

    def _write(self, text: bytes) -> None:
        folder = self._path.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(folder, self._path, len(text))
        temp = folder / f"{self._path.stem}.{new_nonce()}.tmp"
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                write_all(fd, text)
            finally:
                os.close(fd)
            os.replace(temp, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise


def _trimmed(body: _Body) -> _Body:
    """`body` without what no checkpoint has in common any more, and within `_MOST_BYTES`."""
    manifests, left = body.manifests, _MOST_BYTES
    if sum(len(kept.files) + kept.size + _ENTRY_BYTES for kept in manifests.values()) > left:
        manifests = {}
        for name in sorted(body.manifests, reverse=True):
            left -= len(body.manifests[name].files) + _ENTRY_BYTES
            if left < 0:
                break
            manifests[name] = body.manifests[name]
    used = sorted({kept.common for kept in manifests.values()})
    if used != list(range(len(body.common))):
        new = {old: at for at, old in enumerate(used)}
        manifests = {name: _renumbered(kept, new[kept.common]) for name, kept in manifests.items()}
    return _Body(body.url, body.uuid, [body.common[at] for at in used], manifests, body.closed, body.others)


def _renumbered(kept: _KeptManifest, common: int) -> _KeptManifest:
    return msgspec.structs.replace(kept, common=common)


def _make_room(folder: Path, path: Path, size: int) -> None:
    """Remove what was not used for longest until `size` bytes at `path` fit in, and what killed processes left."""
    found: list[tuple[float, int, str]] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                stats = entry.stat(follow_symlinks=False)
                if entry.name.endswith(".tmp") and wall_s() - stats.st_mtime > _FORGOTTEN_S:
                    os.unlink(entry.path)
                elif entry.path != str(path):
                    found.append((stats.st_mtime, stats.st_size, entry.path))
    total = size + sum(taken for _, taken, _ in found)
    for _, taken, name in sorted(found):
        if total <= _MOST_BYTES_OF_ALL:
            return
        with contextlib.suppress(OSError):
            os.unlink(name)
            total -= taken


def _is_md5_of(etag: str, data: bytes) -> bool:
    text = etag.lower()
    if len(text) != 32 or not _MD5_DIGITS.issuperset(text):
        return False
    try:
        return md5(data, usedforsecurity=False).hexdigest() == text
    except ValueError:  # a machine that forbids MD5 altogether
        return False
