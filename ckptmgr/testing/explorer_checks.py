"""What must hold in every state of a world that `ckptmgr.testing.explorer` explores (numbers: `ckptmgr.core.protocol`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from ckptmgr.core.layout import (
    ATTEMPTS,
    CHECKPOINTS,
    MANIFESTS,
    Stem,
    attempt_number,
    data_key,
    manifest_key,
    parse_stem,
)
from ckptmgr.core.manifest import ClosingRecord, Manifest, decode_manifest
from ckptmgr.core.operations import CopyFile, Operation, PutFile, Record
from ckptmgr.core.protocol import Committed, Dropped, Unusable
from ckptmgr.core.records import AttemptRecord, decode_attempt

Store: TypeAlias = Mapping[str, bytes]


class Broken(AssertionError):
    """An invariant does not hold; the message says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Journal:
    """The local journal of one save, durable and never unanswered.

    Attributes:
        stem: the name that the upload goes under.
        confirmed: paths that are in the store under `stem`.
    """

    stem: Stem
    state: Literal["pending", "uploaded", "dropped"] = "pending"
    confirmed: frozenset[str] = frozenset()

    def after(self, record: Record) -> Journal:
        """The journal once `record` is in it.

        What an incarnation reports about another name than the present one is not about this upload: a zombie must not make its
        successor skip a file that was never sent under the new name.
        """
        if record.event in ("uploaded", "dropped"):
            return replace(self, stem=record.stem, state="uploaded" if record.event == "uploaded" else "dropped")
        if self.state != "pending":
            return self
        if record.event == "renamed":
            return Journal(stem=record.stem)
        return replace(self, confirmed=self.confirmed | {record.path}) if record.stem == self.stem else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a reader of the newest checkpoint came back with.

    Attributes:
        stem: the checkpoint it accepted; None if it found nothing.
        files: path -> BLAKE3 of what it fetched and found right.
        damaged: the first one that it takes for damaged (not: removed).
    """

    stem: Stem | None
    files: Mapping[str, str]
    damaged: Unusable | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """The invariants of one scenario.

    Attributes:
        saves: what was really saved, under the name that each save had first.
        duplicates, is_pruned: as in `Scenario`.
    """

    saves: Sequence[Manifest]
    duplicates: int = 1
    is_pruned: Callable[[Store, Stem], bool] | None = None

    def transition(self, before: Store, after: Store, operation: Operation | None) -> None:
        """I2: data lies below a name of its own save, and nothing is overwritten but a manifest, once, by its closing record.

        Raises:
            Broken: it is not so.
        """
        if before is after or operation is None:
            return
        if isinstance(operation, PutFile | CopyFile):
            stem = _stem_of(operation.key)
            saved = self._content(stem) if stem else None
            if stem is None or saved is None or operation.key != data_key(stem, operation.entry.path):
                raise Broken(f"I2: data was written outside the checkpoint it belongs to: {operation.key}")
            if saved.get(operation.entry.path) != operation.entry.blake3:
                raise Broken(f"I10: other bytes than those saved were written to {operation.key}")
        for key in before.keys() & after.keys():
            old, new = before[key], after[key]
            if old == new:
                continue
            if not key.startswith(MANIFESTS):
                raise Broken(f"I2: {key} was overwritten by other bytes")
            was, now = _decoded(old), _decoded(new)
            if isinstance(was, ClosingRecord):
                raise Broken(f"I2: {key} was closed ({was.closed}) and its closing record was overwritten")
            if isinstance(now, Manifest):
                raise Broken(f"I2: the manifest {key} was overwritten by another manifest")

    def state(self, store: Store, journal: Journal | None) -> None:
        """I1: a checkpoint that can be seen is whole. I6: what the journal says is so.

        Raises:
            Broken: it is not so.
        """
        for key, body in store.items():
            if key.startswith(MANIFESTS):
                there = _decoded(body)
                if isinstance(there, Manifest):
                    self._check_whole(store, there)
        if journal is None:
            return
        there = _decoded(store.get(manifest_key(journal.stem)))
        is_removed = isinstance(there, ClosingRecord) and there.closed == "pruned"
        is_removed = is_removed or bool(self.is_pruned and self.is_pruned(store, journal.stem))
        if journal.state == "uploaded" and not (isinstance(there, Manifest) or is_removed):
            raise Broken(f"I6: the journal says uploaded, but {journal.stem} cannot be restored and was not pruned")
        if journal.state == "dropped" and not is_removed:
            raise Broken(f"I6: the journal says dropped, but {journal.stem} was not pruned")

    def outcome(self, outcome: Any, others: Sequence[Any], store: Store, seen: Journal | None) -> None:
        """What one actor returned is true.

        Args:
            outcome: what it returned.
            others: what the others have returned so far.
            seen: the journal at its first move.

        Raises:
            Broken: it is not.
        """
        if isinstance(outcome, Reading):
            self._check_reading(outcome, store, seen)
        if isinstance(outcome, AttemptRecord):
            if any(isinstance(other, AttemptRecord) and other.number == outcome.number for other in others):
                raise Broken(f"two processes both claimed attempt {outcome.number}")
            claims = [body for key, body in store.items() if _claims(key, outcome.number)]
            if outcome.claim_id not in [decode_attempt(body, where="").claim_id for body in claims]:
                raise Broken(f"attempt {outcome.number} was claimed, but its record is not there")

    def end(self, store: Store, journal: Journal | None, outcomes: Sequence[Any]) -> None:
        """All have ended: a save is committed as often as it should be, and the journal knows.

        Raises:
            Broken: it is not so.
        """
        if journal is None:
            return
        here = [there for key in store if (there := _decoded(store[key] if key.startswith(MANIFESTS) else None))]
        mine = [there for there in here if _same_save(there.stem, journal.stem)]
        committed = [there for there in mine if isinstance(there, Manifest)]
        if len(committed) > self.duplicates:
            raise Broken(f"the one save is committed {len(committed)} times")
        if any(isinstance(outcome, Committed | Dropped) for outcome in outcomes) and journal.state == "pending":
            raise Broken("a writer is done, but the journal still says pending")
        was_pruned = any(isinstance(there, ClosingRecord) and there.closed == "pruned" for there in mine)
        was_pruned = was_pruned or bool(self.is_pruned and self.is_pruned(store, journal.stem))
        if journal.state != "pending" and not committed and not was_pruned:
            raise Broken("a writer is done, but its save is not committed")

    def _content(self, stem: Stem) -> dict[str, str] | None:
        for save in self.saves:
            if _same_save(save.stem, stem):
                return {entry.path: entry.blake3 for entry in save.files}
        return None

    def _check_whole(self, store: Store, manifest: Manifest) -> None:
        named = {entry.path: entry.blake3 for entry in manifest.files}
        if named != self._content(manifest.stem):
            raise Broken(f"I10: the manifest {manifest.stem} does not name what was saved")
        for path, digest in named.items():
            if store.get(data_key(manifest.stem, path)) != digest.encode():
                raise Broken(f"I1: {manifest.stem} is committed, but its file {path!r} is missing or wrong")

    def _check_reading(self, reading: Reading, store: Store, seen: Journal | None) -> None:
        if reading.damaged is not None:
            raise Broken(
                f"I1: a reader calls {reading.damaged.stem} damaged: {reading.damaged.file} {reading.damaged.why}"
            )
        if reading.stem is not None and reading.files != self._content(reading.stem):
            raise Broken(f"I5: a reader accepted {reading.stem} with the files {sorted(reading.files)}")
        certain = [save.stem for save in self.saves if seen is None or not _same_save(save.stem, seen.stem)]
        if seen is not None and seen.state == "uploaded":
            certain.append(seen.stem)
        for stem in certain:
            still_there = isinstance(_decoded(store.get(manifest_key(stem))), Manifest)
            if still_there and (reading.stem is None or reading.stem.position < stem.position):
                raise Broken(
                    f"I6: {stem} was committed before the reader began, but it found {reading.stem or 'nothing'}"
                )


def _claims(key: str, number: int) -> bool:
    return key.startswith(ATTEMPTS) and attempt_number(key) == number


def _same_save(one: Stem, other: Stem) -> bool:
    return (one.attempt, one.step, one.seq) == (other.attempt, other.step, other.seq)


def _stem_of(key: str) -> Stem | None:
    head, _, rest = key.partition("/")
    return parse_stem(rest.split("/", 1)[0]) if head == CHECKPOINTS else None


@lru_cache(maxsize=4096)
def _decoded(body: bytes | None) -> Manifest | ClosingRecord | None:
    return None if body is None else decode_manifest(body, where="a manifest in the simulated store")
