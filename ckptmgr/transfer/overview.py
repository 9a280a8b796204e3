"""What `ckptmgr status` shows: what a local tier holds and waits for, and who uploads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import locks
from ckptmgr.run.identity import utc_now
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.status import Durable, HostView, Lag, TransferFile, lag_of, newest_durable

State = Literal["waiting", "uploading", "failed", "uploaded", "pruned", "dropped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryView:
    """One save that a local tier knows of.

    Attributes:
        state: `waiting` for its upload (begun or not), `uploading` by a process that lives, `failed` for now, `uploaded`, `pruned` in the store
            before its upload ended or not sent because it would be at once, or `dropped` by the rules of the queue.
        size_bytes: 0 if that is not known any more.
        tries: uploads begun.
        why: for a failed, pruned or dropped one.
        target: URL of the run it goes to; "" if that was lost.
    """

    stem: Stem
    state: State
    size_bytes: int
    tries: int
    why: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TierView:
    """One local tier.

    Attributes:
        entries: newest first.
        host: the process that uploads, or did the last time; None if none ever said so.
        lag: how far the store is behind; None if the newest save is in it.
    """

    root: str
    entries: tuple[EntryView, ...]
    host: HostView | None
    lag: Lag | None

    def of(self, *states: State) -> list[EntryView]:
        return [entry for entry in self.entries if entry.state in states]

    @property
    def pending(self) -> list[EntryView]:
        """Saves that are only on this disk."""
        return self.of("waiting", "uploading", "failed")

    @property
    def is_durable(self) -> bool:
        """Whether everything that was saved here is, or was, in the store, or would have been pruned there at once."""
        return not self.pending and not self.of("dropped")


def tier_view(tier: LocalTier, durable: Durable | None = None) -> TierView:
    """One look at a tier. Changes nothing, and asks no store.

    Args:
        durable: the newest that the store has, if it was asked.
    """
    manifests = tier.run.history().manifests
    journal = {entry.stem: entry for entry in tier.journal.entries()}
    pending = {manifest.stem: entry for manifest, entry in tier.pending()}
    host = TransferFile(tier.root).read()
    told = durable or (None if host is None else host.durable)
    known = newest_durable((manifests[stem] for stem in tier.uploaded() & manifests.keys()), told)
    return TierView(
        root=str(tier.root),
        entries=tuple(
            _entry(tier, entry, manifests, host) for _, entry in sorted({**journal, **pending}.items(), reverse=True)
        ),
        host=host,
        lag=lag_of((manifests[stem] for stem in pending if stem in manifests), known, utc_now()),
    )


def _entry(tier: LocalTier, entry: UploadEntry, manifests: Mapping[Stem, Manifest], host: HostView | None) -> EntryView:
    manifest = manifests.get(entry.stem)
    return EntryView(
        stem=entry.stem,
        state=_state(tier, entry, manifest is not None, host),
        size_bytes=entry.size_bytes if manifest is None else manifest.size_bytes,
        tries=entry.tries,
        why=entry.error,
        target=entry.target,
    )


def _state(tier: LocalTier, entry: UploadEntry, is_here: bool, host: HostView | None) -> State:
    match entry.state:
        case "uploaded":
            return "uploaded"
        case "dropped":
            return "pruned"
        case "evicted":
            # With its manifest it is whole: a process was killed over the drop, or is at it.
            return "waiting" if is_here else "dropped"
        case "failed" | "pending" | "uploading" as state:
            told = host is not None and host.alive and host.uploading == entry.stem
            if told or locks.is_held(tier.run.uuid, entry.stem, "upload"):
                return "uploading"
            return "failed" if state == "failed" else "waiting"
