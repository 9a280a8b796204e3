"""What lies in a run and is of no use to anybody: found by one look, judged by the store's own times. Nothing here changes anything.

What counts as abandoned, and what never does, is the business of this module; `ckptmgr.run.gc` removes it. Committed data, manifests that cannot be
read, attempts, tags and foreign files are never litter.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from ckptmgr.backends.atomic import find_temps
from ckptmgr.backends.base import Backend, PendingUpload
from ckptmgr.backends.claim import CLAIM_SUFFIX
from ckptmgr.core import layout
from ckptmgr.core.checksums import blake3_hex
from ckptmgr.core.errors import ObjectNotFoundError, PermanentBackendError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord
from ckptmgr.core.protocol import CLOSING_KEPT_S
from ckptmgr.run.directory import RunDirectory

Kind = Literal["uncommitted", "closed", "upload", "temporary", "folder", "record", "probe"]
Records = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Litter:
    """One thing that can go.

    Attributes:
        kind: `uncommitted` data (and partial manifests) of a save that was never committed; data that is left under a `closed` name, of a removal that
            was interrupted; an `upload` in parts that was begun and not ended; a `temporary` file of a write that was killed, or a bare `folder`
            (on a disk only); the closing `record` of a name that nobody can use any more; a `probe` of a killed doctor, or of a run's creation.
        id: the stem where there is one, else the key.
        age_s: since the last sign of life, by the store's clock; None if the store tells no time: such a thing stays.
        size_bytes: None if nobody knows.
        path: of an upload, a temporary file or a probe: where it lies, as its backend names it.
        parts: keys of partial manifests, of a sharded save.
        upload_id: of an upload.
        fingerprint: of uncommitted data: another one as soon as anything about it has changed.
    """

    kind: Kind
    id: str
    age_s: float | None
    size_bytes: int | None = None
    stem: Stem | None = None
    path: str = ""
    parts: tuple[str, ...] = ()
    upload_id: str = ""
    fingerprint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """One look at a run.

    Attributes:
        old: what can go, in the order in which it should: what others wait for first.
        young: what would be litter, were it older; an upload that is under way looks like this.
        unseen: why uploads in parts could not be looked for; "" if they could.
    """

    old: tuple[Litter, ...]
    young: tuple[Litter, ...]
    unseen: str = ""


def look(run: RunDirectory, *, now_s: float, grace_s: float, known: Iterable[tuple[str, str]] = ()) -> Findings:
    """What can go of `run`, and what is too young.

    The data is listed before the manifests, so that nothing that is committed meanwhile looks abandoned.

    Args:
        now_s: the store's time, seconds since 1970.
        grace_s: the age from which uncommitted data, uploads and leftovers count as abandoned.
        known: (path, upload id) of uploads in parts that somebody on this machine is going to take up again: they stay.

    Raises:
        BackendError: could not look (I7).
    """
    piles = _piles(run)
    loose = list(_loose(run, piles))
    uploads, unseen = _uploads(run)
    for stem, pending in uploads:
        piles.setdefault(stem, _Pile(stem=stem)).uploads.append(pending)
    history = run.history()
    found = [litter for pile in piles.values() for litter in _judged(run, pile, history, now_s, set(known))]
    found += [replace(litter, age_s=_age(now_s, since)) for litter, since in loose]
    found += list(_folders(run, piles, history, now_s))
    found += list(_records(run, piles, history, now_s))
    found += leftovers(run.fs, run.root, now_s)
    old = [litter for litter in found if _is_old(litter, grace_s)]
    young = [litter for litter in found if not _is_old(litter, grace_s) and litter.kind != "record"]
    return Findings(old=tuple(sorted(old, key=_order)), young=tuple(sorted(young, key=_order)), unseen=unseen)


def leftovers(fs: Backend, root: str, now_s: float) -> list[Litter]:
    """What a killed `ckptmgr doctor` has left below `root`, a store or a run."""
    found = []
    for path in _ls(fs, root):
        name = path.rsplit("/", 1)[-1]
        if layout.is_doctors(name):
            records = fs.find(path, detail=True)
            assert isinstance(records, dict)
            if not records and not fs.capabilities.is_local:
                continue  # some stores list a prefix when its keys are gone
            size = sum(record["size"] for record in records.values())
            since = _newest(fs, records) if records else _folder_s(fs, path)
            found.append(Litter(kind="probe", id=name, age_s=_age(now_s, since), size_bytes=size, path=path))
    return found


_FIRST: tuple[Kind, ...] = ("uncommitted", "closed", "upload", "temporary", "folder", "record", "probe")


def _order(litter: Litter) -> tuple[int, str]:
    return _FIRST.index(litter.kind), litter.id


def _is_old(litter: Litter, grace_s: float) -> bool:
    if litter.kind == "closed":
        return True  # nobody can commit under that name, and nobody reads it: it is only still there
    if litter.kind == "record":
        grace_s = CLOSING_KEPT_S
    return litter.age_s is not None and litter.age_s >= grace_s


# --- by save ----------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Pile:
    """What lies under one stem besides a manifest: files, partial manifests, uploads in parts; on a disk also temporary files."""

    stem: Stem
    data: Records = field(default_factory=dict)
    parts: Records = field(default_factory=dict)
    temps: list[str] = field(default_factory=list)
    uploads: list[PendingUpload] = field(default_factory=list)

    @property
    def has_files(self) -> bool:
        return bool(self.data or self.parts or self.temps)

    @property
    def fingerprint(self) -> str:
        seen = [(key, record["size"], str(record.get("etag"))) for key, record in (self.data | self.parts).items()]
        return blake3_hex(repr((sorted(seen), sorted(pending.upload_id for pending in self.uploads))).encode())


def _piles(run: RunDirectory) -> dict[Stem, _Pile]:
    piles: dict[Stem, _Pile] = {}
    by_name: dict[str, _Pile | None] = {}
    for folder in (layout.CHECKPOINTS, layout.PARTS):
        for key, record in run.records(folder).items():
            name, slash, _ = key[len(folder) + 1 :].partition("/")
            if not slash:
                continue
            if name not in by_name:
                stem = layout.parse_stem(name)
                by_name[name] = None if stem is None else piles.setdefault(stem, _Pile(stem=stem))
            pile = by_name[name]
            if pile is not None:
                (pile.data if folder == layout.CHECKPOINTS else pile.parts)[key] = record
    return piles


def _uploads(run: RunDirectory) -> tuple[list[tuple[Stem, PendingUpload]], str]:
    """The uploads in parts under way to files of ours, and why they cannot be listed: a right of its own, which many a policy does not grant."""
    try:
        pending = run.fs.list_uploads(run.path(layout.CHECKPOINTS))
    except PermanentBackendError as error:
        return [], error.message
    named = ((_stem_in(run, one.path), one) for one in pending)
    return [(stem, one) for stem, one in named if stem is not None], ""


def _stem_in(run: RunDirectory, path: str) -> Stem | None:
    """The save that a file at `path` belongs to; None if it is none of ours."""
    below = run.path(layout.CHECKPOINTS) + "/"
    name, slash, _ = path.removeprefix(below).partition("/")
    return layout.parse_stem(name) if slash and path.startswith(below) else None


def _judged(
    run: RunDirectory, pile: _Pile, history: History, now_s: float, known: set[tuple[str, str]]
) -> Iterator[Litter]:
    is_committed = pile.stem in history.manifests or pile.stem in history.broken
    for pending in pile.uploads:
        if (pending.path, pending.upload_id) not in known:
            yield Litter(
                kind="upload",
                id=pending.path[len(run.root) + 1 :],
                age_s=_age(now_s, pending.started_s),
                stem=pile.stem,
                path=pending.path,
                upload_id=pending.upload_id,
            )
    if is_committed:
        for temp in pile.temps:
            yield _temporary(run, temp, now_s)
    elif pile.has_files:
        files = pile.data | pile.parts
        # An upload in parts that was begun lately is a sign of life of the whole save.
        signs = [_newest(run.fs, {run.path(key): record for key, record in files.items()}) if files else 0.0]
        signs += [pending.started_s for pending in pile.uploads] + [_touched_s(temp) for temp in pile.temps]
        yield Litter(
            kind="closed" if pile.stem in history.closed else "uncommitted",
            id=str(pile.stem),
            age_s=None if None in signs else _age(now_s, max(sign for sign in signs if sign is not None)),
            size_bytes=sum(record["size"] for record in files.values()) + sum(_size(temp) for temp in pile.temps),
            stem=pile.stem,
            parts=tuple(pile.parts),
            fingerprint=pile.fingerprint,
        )


# --- the rest ---------------------------------------------------------------------------------------------------------------


def _loose(run: RunDirectory, piles: dict[Stem, _Pile]) -> Iterator[tuple[Litter, float | None]]:
    """Temporary files and probes, with the time of each; temporary files in a save's own folder go to its pile."""
    for key, record in run.records(layout.ATTEMPTS).items():
        if key.rsplit("/", 1)[-1].startswith(layout.PROBE_PREFIX):
            path = run.path(key)
            yield (
                Litter(kind="probe", id=key, age_s=None, size_bytes=record["size"], path=path),
                _newest(run.fs, {path: record}),
            )
    if not run.fs.capabilities.is_local:
        return
    for path in find_temps(run.root):
        if os.path.dirname(path).split("/")[-1].endswith(CLAIM_SUFFIX) or f"{CLAIM_SUFFIX}/" in path:
            continue  # the owner of a claim: without it nobody could ever take the claim over
        stem = _stem_in(run, path)
        if stem is None:
            yield _temporary(run, path, 0.0), _touched_s(path)
        else:
            piles.setdefault(stem, _Pile(stem=stem)).temps.append(path)


def _temporary(run: RunDirectory, path: str, now_s: float) -> Litter:
    return Litter(
        kind="temporary",
        id=path[len(run.root) + 1 :],
        age_s=_age(now_s, _touched_s(path)),
        size_bytes=_size(path),
        path=path,
    )


def _folders(run: RunDirectory, piles: Mapping[Stem, _Pile], history: History, now_s: float) -> Iterator[Litter]:
    """On a disk, folders of saves without any file: of a kill before the first byte, or before the last step of a removal."""
    if not run.fs.capabilities.is_local:
        return
    for path in _ls(run.fs, run.path(layout.CHECKPOINTS)):
        stem = layout.parse_stem(path.rsplit("/", 1)[-1])
        if stem is None or stem in history.manifests or stem in history.broken or not os.path.isdir(path):
            continue
        if stem not in piles or not piles[stem].has_files:
            yield Litter(
                kind="folder", id=str(stem), age_s=_age(now_s, _folder_s(run.fs, path)), size_bytes=0, stem=stem
            )


def _records(run: RunDirectory, piles: Mapping[Stem, _Pile], history: History, now_s: float) -> Iterator[Litter]:
    """Closing records without data. Their age is that of the younger of two times: the store's, and the one in the record."""
    closed = {stem: record for stem, record in history.closed.items() if stem not in piles or not piles[stem].has_files}
    listed = run.records(layout.MANIFESTS) if closed else {}
    for stem, record in closed.items():
        key = layout.manifest_key(stem)
        if key not in listed:
            continue
        times = [_newest(run.fs, {run.path(key): listed[key]}), _closed_s(record)]
        known = [time for time in times if time is not None]
        age = _age(now_s, max(known)) if known else None
        yield Litter(kind="record", id=str(stem), age_s=age, size_bytes=listed[key]["size"], stem=stem)


def _closed_s(record: ClosingRecord) -> float | None:
    try:
        closed = datetime.fromisoformat((record.closed_at or "").replace("Z", "+00:00"))
    except ValueError:
        return None
    return None if closed.tzinfo is None else closed.timestamp()


# --- times --------------------------------------------------------------------------------------------------------------------


def _age(now_s: float, since_s: float | None) -> float | None:
    return None if since_s is None else now_s - since_s


def _newest(fs: Backend, records: Records) -> float | None:
    """The latest time of `records`, by path; None if the store does not tell that of each.

    On a disk a copy may keep the times of its source (`cp -a`, rsync); when it came here, its inode tells.
    """
    times = [_touched_s(path) if fs.capabilities.is_local else record.get("mtime") for path, record in records.items()]
    return None if None in times else max((time for time in times if time is not None), default=0.0)


def _touched_s(path: str) -> float:
    """When the file at `path` was last written, or came to its name; 0 if it is gone."""
    try:
        stats = os.stat(path)
    except OSError:
        return 0.0
    return max(stats.st_mtime, stats.st_ctime)


def _folder_s(fs: Backend, path: str) -> float | None:
    """The latest time of a folder and those in it; None where folders are only prefixes of keys."""
    if not fs.capabilities.is_local:
        return None
    return max(_touched_s(folder) for folder, _, _ in [(path, [], []), *os.walk(path)])


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0


def _ls(fs: Backend, path: str) -> list[str]:
    try:
        return [str(name).rstrip("/") for name in fs.ls(path, detail=False)]
    except ObjectNotFoundError:
        return []
