"""Commit, prune, gc, read and claim, as operations yielded to a driver; the shipped code is what the tests explore.

Each function here is a generator. It yields one `Operation` at a time, is sent the operation's result, and returns an outcome. A driver
performs operations on real stores (`ckptmgr.run.driver`), an explorer on a simulated one, in every order and with every fault. Nothing in this module
does I/O, reads a clock, or draws a random number.

An operation that fails is answered by throwing the error in. Two errors carry meaning for the protocol; all others end it:
`ObjectExistsError` - a create was refused, or our own earlier try of it arrived; `TransientBackendError` - unanswered: applied, not applied,
or to be applied later.

Invariants (must: data is lost otherwise; they are numbered in the project's design and cited by tests):
I1  A checkpoint exists if and only if its manifest does. Restoring finds checkpoints through manifests only.
I2  Data is written before the manifest, under a stem no other save uses. Nothing is ever overwritten, except a manifest by its closing
    record, and data that is missing or damaged by the very bytes that its manifest names (`repair`). Tags are mutable pointers, outside
    this rule.
I3  The manifest is one small create-only write, never multipart. A refused or unanswered create is settled by reading it back.
I4  Newest is decided by lineage (`ckptmgr.core.lineage`), never by time or by unpadded names.
I6  A local copy is removed only after its remote commit was confirmed and recorded, or that retention would remove it there at once.
I8  Retention never removes what `ckptmgr.core.retention` protects, nor anything without a manifest (that is gc's, by its own rules).
I10 A manifest never describes bytes other than those stored: a source that changed fails the upload.
I12 An attempt that sees a higher claim is superseded: it may still commit under its own number, and never prunes.

Why a closing record replaces the manifest instead of standing beside it: create applied but unanswered, prune, retried create would
leave a commit without data. In the manifest's place the record makes the retry lose, whenever it arrives. For the same reason gc claims
the manifest's key (create-only, `aborted`) before it deletes data.

Should (repairable otherwise): data is deleted after its record is closed; a closing record goes `CLOSING_KEPT_S` later; an upload that began
longer ago than half of gc's grace goes on under a new stem (`is_stale`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckptmgr.core.errors import (
    AccessDeniedError,
    CkptmgrError,
    ConflictError,
    IntegrityError,
    ManifestError,
    ObjectExistsError,
    TransientBackendError,
)
from ckptmgr.core.layout import (
    Stem,
    data_key,
    data_prefix,
    manifest_key,
)
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest, decode_manifest, encode_closing, encode_manifest
from ckptmgr.core.operations import (
    CopyFile,
    Create,
    DeleteAll,
    Fetch,
    IsStored,
    ListKeys,
    Missing,
    Operation,
    PutFile,
    Read,
    Record,
    Replace,
    Together,
)

GC_GRACE_S = 7 * 24 * 3600.0
CLOSING_KEPT_S = 30 * 24 * 3600.0
SETTLE_TRIES = 5
# How often an upload begins to send what it finds missing before its commit; the next try of the upload begins anew.
_ROUNDS = 3


# --- commit ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Committed:
    """The manifest is in the store, under `stem`."""

    stem: Stem


@dataclass(frozen=True, slots=True)
class Dropped:
    """The checkpoint was committed earlier and has been pruned since; there is nothing left to do."""

    stem: Stem


def replicate(
    manifest: Manifest,
    *,
    new_nonce: Callable[[], str],
    confirmed: Iterable[str] = (),
    resumed: bool = False,
    stale_at: str | None = None,
    copies: Mapping[str, str] | None = None,
) -> Generator[Operation, Any, Committed | Dropped]:
    """Make a locally complete checkpoint durable in the store: data, then the create-only manifest, then the local record.

    A failure leaves data without a manifest, which does not exist (I1) and is taken up again by the next call.

    Args:
        manifest: what to commit; its stem is used by no other save (I2).
        new_nonce: draws the nonce of a new stem, needed when gc has closed this one.
        confirmed: paths of `manifest` that the journal says are in the store under its stem. Whatever is not there before the commit is sent again.
        resumed: an earlier try may have got further than the journal knows: look before sending.
        stale_at: the present time, ISO 8601, if the earlier try began so long ago (`is_stale`) that gc may be about to take its name. The
            name is then closed as gc would do, unless it proves to be committed, or pruned since, and the upload goes on under a new one.
        copies: path -> key of an object of another checkpoint that should hold the same bytes. They are copied within the store, so that each
            checkpoint stays whole by itself; where that fails, or cannot be proven, the file is sent.

    Raises:
        ConflictError: another checkpoint is committed under this stem.
        IntegrityError: a source is not what `manifest` describes (I10).
        TransientBackendError: the store did not answer; call again with the journal's state and `resumed`.
            One error names all files that failed; what could be sent beside them is there.
    """
    done = set(confirmed)
    while True:
        key = manifest_key(manifest.stem)
        body = encode_manifest(manifest)

        def judge(found: bytes | None, manifest: Manifest = manifest, key: str = key) -> _Verdict:
            return _judge(found, manifest, key)

        verdict: _Verdict = "absent"
        if stale_at is not None:
            closing = ClosingRecord(stem=manifest.stem, closed="aborted", closed_at=stale_at)
            verdict = yield from create_settled(key, encode_closing(closing), judge, won="aborted")
        elif resumed:
            # Who may not list is refused when a key is absent. Whatever is there, the create below settles it.
            with contextlib.suppress(AccessDeniedError):
                verdict = judge((yield Read(key)))
        if verdict == "absent":
            verdict = yield from _bring(manifest, done, judge, look=resumed, copies=copies or {})
        if verdict == "absent":
            verdict = yield from create_settled(key, body, judge, won="own")
        if verdict == "own":
            yield Record("uploaded", manifest.stem)
            return Committed(manifest.stem)
        if verdict == "pruned":
            yield Record("dropped", manifest.stem)
            return Dropped(manifest.stem)
        # gc took the name (aborted), or we gave it up: everything goes again under a new one, which nobody has claimed and nothing was
        # sent to.
        manifest = manifest.renamed(manifest.stem.renamed(new_nonce()))
        done, resumed, stale_at = set(), False, None
        yield Record("renamed", manifest.stem)


def _bring(
    manifest: Manifest,
    done: Collection[str],
    judge: Callable[[bytes | None], _Verdict],
    *,
    look: bool,
    copies: Mapping[str, str],
) -> Generator[Operation, Any, _Verdict]:
    """Bring all files but those that are `done` to their places, and then look for every one: somebody may have cleaned up since it was
    confirmed, or put an empty store in this one's place.

    That guards against accidents only. Against gc, which may come between the look and the commit, stands its claim.

    Returns:
        "absent": all is there, and the manifest may be written; else what stands in the manifest's place by now.
    """
    stem = manifest.stem
    waiting = [entry for entry in manifest.files if entry.path not in done]
    for _ in range(_ROUNDS):
        yield _stored(stem, waiting, look=look, copies=copies)
        try:
            gone = set((yield Missing(data_prefix(stem), manifest.files)))
        except AccessDeniedError:
            # Who may not list has the store's answer for what was sent just now; the rest is looked at one by one.
            yield _stored(stem, [entry for entry in manifest.files if entry.path in done], look=True, copies=copies)
            return "absent"
        if not gone:
            return "absent"
        # Was it gc, the name is lost: nothing more is sent under it.
        verdict = judge((yield Read(manifest_key(stem))))
        if verdict != "absent":
            return verdict
        waiting, look = [entry for entry in manifest.files if entry.path in gone], False
    raise TransientBackendError(
        f"{data_prefix(stem)}: {', '.join(sorted(gone)[:3])} vanished from the store each time after it was sent",
        hint="something deletes what is being uploaded: a rule of the bucket, or another program",
        key=data_prefix(stem),
    )


def _stored(stem: Stem, entries: Iterable[FileEntry], *, look: bool, copies: Mapping[str, str]) -> Together:
    return Together(
        tuple((entry.size, _store(stem, entry, look=look, copy_of=copies.get(entry.path))) for entry in entries),
        to_the_end=True,
    )


def _store(stem: Stem, entry: FileEntry, *, look: bool, copy_of: str | None) -> Generator[Operation, Any, None]:
    """Bring one file to its place under `stem`."""
    key = data_key(stem, entry.path)
    there = look and (yield IsStored(key, entry))
    if not there and copy_of is not None:
        there = yield CopyFile(copy_of, key, entry)
    if not there:
        yield PutFile(key, entry)
    yield Record("confirmed", stem, entry.path)


def is_stale(began_at_s: float, now_s: float, grace_s: float = GC_GRACE_S) -> bool:
    """Whether an upload that began at `began_at_s` must go on under a new stem, because gc may soon take the old one for abandoned.

    Both times are seconds of one clock. A clock that jumped back counts as stale: the cost is a repeated upload.
    """
    return not 0 <= now_s - began_at_s <= grace_s / 2


_Verdict = Literal["absent", "own", "pruned", "aborted"]


def _judge(found: bytes | None, manifest: Manifest, key: str) -> _Verdict:
    """What the bytes in the manifest's place mean for the writer of `manifest`."""
    if found is None:
        return "absent"
    there = decode_manifest(found, where=key)
    if isinstance(there, ClosingRecord):
        return there.closed
    if there.run_uuid == manifest.run_uuid and there.same_content(manifest):
        return "own"
    raise ConflictError(
        f"another checkpoint is already committed as {key}",
        hint="two processes drew the same id, or the run was copied over; nothing was changed",
        key=key,
    )


def create_settled(
    key: str, body: bytes, judge: Callable[[bytes | None], str], *, won: str
) -> Generator[Operation, Any, Any]:
    """Create `key`; on a refusal or silence read it back and judge what is there (I3). Returns `won` or the judge's verdict."""
    last: TransientBackendError | None = None
    for _ in range(SETTLE_TRIES):
        try:
            yield Create(key, body)
        except ObjectExistsError:
            pass
        except TransientBackendError as exc:
            last = exc
        else:
            return won
        verdict = judge((yield Read(key)))
        # Absent after a refusal: the holder was removed in between; after silence: not applied (yet). Its late arrival changes nothing, for
        # a further create of the same bytes is then refused and found to be our own.
        if verdict != "absent":
            return verdict
    raise last or TransientBackendError(
        f"{key}: the store refuses to create it, yet nothing is there", hint="try again later", key=key
    )


def repair(manifest: Manifest, paths: Collection[str]) -> Generator[Operation, Any, bool]:
    """Put the files `paths` of a committed checkpoint, which are missing or damaged in the store, there again, by the bytes that it names.

    A prune that comes between may have listed the data already: what was sent after that is removed again.

    Returns:
        False if it is not committed (any more): of what was removed nothing is left.

    Raises:
        ConflictError: another checkpoint is committed under this stem.
        IntegrityError: a source is not what `manifest` describes (I10).
        TransientBackendError: the store did not answer; repeat later.
    """
    key = manifest_key(manifest.stem)
    if _judge((yield Read(key)), manifest, key) != "own":
        return False
    yield Together(tuple((e.size, _put(manifest.stem, e)) for e in manifest.files if e.path in paths), to_the_end=True)
    now = _judge((yield Read(key)), manifest, key)
    if now in ("pruned", "aborted"):
        yield from _delete_data(manifest.stem)
    return now == "own"


def _put(stem: Stem, entry: FileEntry) -> Generator[Operation, Any, None]:
    yield PutFile(data_key(stem, entry.path), entry)


# --- prune and gc ---------------------------------------------------------------------------------------------------------


def prune(stem: Stem, *, closed_at: str | None) -> Generator[Operation, Any, bool]:
    """Remove one committed checkpoint: close its manifest, then delete its data. Finishes an interrupted prune or gc as well.

    Returns:
        False if there is no manifest: not a checkpoint, nothing was touched.

    Raises:
        ManifestError: the manifest cannot be read; nothing was touched.
        TransientBackendError: the store did not answer; repeat later. Data is only deleted once the closing record was confirmed.
    """
    key = manifest_key(stem)
    found = yield Read(key)
    if found is None:
        return False
    if isinstance(decode_manifest(found, where=key), Manifest):
        yield Replace(key, encode_closing(ClosingRecord(stem=stem, closed="pruned", closed_at=closed_at)))
    yield from _delete_data(stem)
    return True


def collect(stem: Stem, *, closed_at: str | None) -> Generator[Operation, Any, bool]:
    """Remove abandoned data (gc): claim the manifest's key, so that its writer can no longer commit, then delete.

    The caller has judged by age that the data is abandoned; being wrong costs the writer a repeated upload, never a checkpoint.

    Returns:
        False if it turned out to be committed: nothing was touched.
    """
    key = manifest_key(stem)
    claim = encode_closing(ClosingRecord(stem=stem, closed="aborted", closed_at=closed_at))

    def judge(found: bytes | None) -> str:
        if found is None:
            return "absent"
        return "own" if isinstance(decode_manifest(found, where=key), ClosingRecord) else "committed"

    if (yield from create_settled(key, claim, judge, won="own")) != "own":
        return False
    yield from _delete_data(stem)
    return True


def _delete_data(stem: Stem) -> Generator[Operation, Any, None]:
    yield DeleteAll(tuple((yield ListKeys(data_prefix(stem)))))


# --- read -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetched:
    """Every file of `manifest` is in place and right."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Unusable:
    """This checkpoint cannot be restored. `removed`: it is pruned, or gone; else it is damaged, and `file` says where."""

    stem: Stem
    why: str
    file: str = ""
    removed: bool = False


def fetch(
    stem: Stem, run_uuid: str, *, first: str = "", only: Collection[str] | None = None
) -> Generator[Operation, Any, Fetched | Unusable]:
    """Read one committed checkpoint: its manifest, then each file. Nothing of it may be used before this returns `Fetched` (I5).

    The opposite order of a commit: a file that is missing sends the reader back to the manifest, to tell a checkpoint that was pruned
    meanwhile from a damaged one.

    Args:
        first: the path of a file to begin with: one that was damaged when it was last looked at.
        only: the paths that are wanted; None for all. `Fetched` then says nothing of the others.
    """
    key = manifest_key(stem)
    try:
        manifest = _open(stem, run_uuid, (yield Read(key)))
    except (ManifestError, IntegrityError) as exc:
        return Unusable(stem, str(exc), key)
    if isinstance(manifest, Unusable):
        return manifest
    try:
        for is_first in (True, False):
            wanted = [
                entry
                for entry in manifest.files
                if (entry.path == first) is is_first and (only is None or entry.path in only)
            ]
            yield Together(tuple((entry.size, _fetch(stem, entry)) for entry in wanted))
    except _FileProblem as problem:
        found = yield Read(key)
        try:
            still_there = found is not None and isinstance(decode_manifest(found, where=key), Manifest)
        except ManifestError:
            still_there = True
        if not still_there:
            return Unusable(stem, "was removed during download", problem.file, removed=True)
        return Unusable(stem, problem.message, problem.file)
    return Fetched(manifest)


class _FileProblem(CkptmgrError):
    """One file of a checkpoint cannot be used; ends the fetch of the others."""

    file: str


def _fetch(stem: Stem, entry: FileEntry) -> Generator[Operation, Any, None]:
    problem = yield Fetch(data_key(stem, entry.path), entry)
    if problem is not None:
        raise _FileProblem(problem, file=entry.path)


def _open(stem: Stem, run_uuid: str, found: bytes | None) -> Manifest | Unusable:
    key = manifest_key(stem)
    if found is None:
        return Unusable(stem, "is no longer there", key, removed=True)
    there = decode_manifest(found, where=key)
    if isinstance(there, ClosingRecord):
        return Unusable(stem, f"was {there.closed}", key, removed=True)
    if there.stem != stem or there.run_uuid != run_uuid:
        raise ManifestError(
            f"{key} belongs to {there.id} of run {there.run_uuid}", hint="it was copied here by hand", key=key
        )
    return there
