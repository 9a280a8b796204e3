"""The upload journal of one save: local, durable, never in the store. It says what is pending and what the store has confirmed.

It lives in the local tier as `uploads/<stem>.json`. Losing it costs a repeated look at the store, never a checkpoint: the commit is in the store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ckptmgr.backends.atomic import make_dirs_durable, write_atomic
from ckptmgr.core import layout
from ckptmgr.core.errors import BackendError, ManifestError, PermanentBackendError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import FORMAT, VERSION, canonical_json, convert_record, decode_record
from ckptmgr.core.operations import Record

UploadState = Literal["pending", "uploading", "uploaded", "failed", "dropped", "evicted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadEntry:
    """How far the upload of one save has come.

    Attributes:
        stem: the save's name in the local tier.
        remote: its name in the store; another one after gc had closed the first.
        state: `pending` (not begun), `uploading` (begun, maybe interrupted), `uploaded` (the manifest is in the store), `failed` (gave up for
            now: `error` says why; tried again by the next start or drain), `dropped` (pruned in the store meanwhile, or not
            sent, for retention would prune it right after its commit: `error` says which), `evicted` (given up unsent
            when the queue was full: `error` says why; this entry is all that is left of the save).
        target: URL of the run it goes to.
        source: absolute directory of the files when they are not in the local tier (`ckptmgr push`).
        content: `content_id` of what is being sent: a stem is only taken up again for the same bytes (I2).
        began_at_s: seconds since 1970 when the first byte was sent under `remote`.
        confirmed: paths that the store holds under `remote`.
        multiparts: path -> id of the upload in parts that is under way under `remote`, or was when the last try ended. Whoever removes the entry
            aborts them (`ckptmgr.run.replicate.abort_multiparts`), or the store keeps parts that nobody sees.
        tries: uploads begun.
        error: the last failure, one line.
        size_bytes: of the save, noted when it is evicted.
    """

    stem: Stem
    remote: Stem
    state: UploadState = "pending"
    target: str = ""
    source: str | None = None
    content: str = ""
    began_at_s: float | None = None
    confirmed: frozenset[str] = frozenset()
    multiparts: Mapping[str, str] = field(default_factory=dict)
    tries: int = 0
    error: str = ""
    size_bytes: int = 0

    @property
    def is_pending(self) -> bool:
        return self.state in ("pending", "uploading", "failed")

    def after(self, event: Record) -> UploadEntry:
        """The entry once `event` has happened."""
        match event.event:
            case "confirmed":
                return replace(self.in_parts(event.path, None), confirmed=self.confirmed | {event.path})
            case "renamed":
                return replace(self, remote=event.stem, confirmed=frozenset(), multiparts={}, began_at_s=None)
            case "uploaded":
                return replace(self, state="uploaded", remote=event.stem, multiparts={}, error="")
            case "dropped":
                error = "it was pruned in the store before this upload ended"
                return replace(self, state="dropped", multiparts={}, error=error)

    def in_parts(self, path: str, upload_id: str | None) -> UploadEntry:
        """The entry once the upload of `path` in parts has this id; None: there is none (any more)."""
        others = {name: known for name, known in self.multiparts.items() if name != path}
        return replace(self, multiparts=others if upload_id is None else {**others, path: upload_id})


class _EntryDoc(msgspec.Struct, kw_only=True):
    id: str
    remote: str
    state: UploadState
    target: str = ""
    source: str | None = None
    content: str = ""
    began_at_s: float | None = None
    confirmed: list[str] = []
    multiparts: dict[str, str] = {}
    tries: int = 0
    error: str = ""
    size_bytes: int = 0


class Journal:
    """The journals of one local tier. Writes are atomic and durable; one process writes an entry at a time (see `locks`).

    Args:
        makes_root: `write` makes `tier_root` where it is missing. Else it refuses: an upload that outlives the removal of its tier must not
            make a new one.
    """

    def __init__(self, tier_root: Path, *, makes_root: bool = False) -> None:
        self._root = tier_root
        self._makes_root = makes_root

    def entries(self) -> list[UploadEntry]:
        """Every entry that can be read, oldest first. A torn one cannot exist; a foreign file is passed over."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for path in sorted((self._root / layout.UPLOADS).iterdir()):
                stem = layout.parse_stem(path.name.removesuffix(".json"))
                entry = self.read(stem) if stem is not None and path.suffix == ".json" else None
                if entry is not None:
                    found.append(entry)
        return sorted(found, key=lambda entry: entry.stem)

    def read(self, stem: Stem) -> UploadEntry | None:
        """The entry of `stem`; None if there is none, or it cannot be read (then the upload starts by looking at the store)."""
        path = self._root / layout.upload_key(stem)
        try:
            document = decode_record(path.read_bytes(), where=str(path))
            parsed = convert_record(document, _EntryDoc, str(path))
            remote = Stem.parse(parsed.remote)
        except (FileNotFoundError, ManifestError, ValueError):
            return None
        return UploadEntry(
            stem=stem,
            remote=remote,
            state=parsed.state,
            target=parsed.target,
            source=parsed.source,
            content=parsed.content,
            began_at_s=parsed.began_at_s,
            confirmed=frozenset(parsed.confirmed),
            multiparts=parsed.multiparts,
            tries=parsed.tries,
            error=parsed.error,
            size_bytes=parsed.size_bytes,
        )

    def write(self, entry: UploadEntry) -> None:
        """Keep `entry`, durably.

        Raises:
            DiskFullError, PermanentBackendError: it is not kept; the tier may be gone.
        """
        if not self._makes_root and not self._root.is_dir():
            raise PermanentBackendError(f"the local tier {self._root} is gone", backend="local", operation="write")
        document: Mapping[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "id": str(entry.stem),
            "remote": str(entry.remote),
            "state": entry.state,
            "target": entry.target,
            "source": entry.source,
            "content": entry.content,
            "began_at_s": entry.began_at_s,
            "confirmed": sorted(entry.confirmed),
            "multiparts": dict(entry.multiparts),
            "tries": entry.tries,
            "error": entry.error,
            "size_bytes": entry.size_bytes,
        }
        path = self._root / layout.upload_key(entry.stem)
        try:
            make_dirs_durable(path.parent)
            write_atomic(path, canonical_json(document))
        except BackendError as error:
            if self._makes_root:  # it is the user's state directory, which whoever pushes has not named
                error.hint = (
                    "the journal of a push is kept there; set XDG_STATE_HOME to a directory that can be written"
                )
            raise

    def forget(self, stem: Stem) -> None:
        """Remove the entry of a save whose local copy is gone."""
        (self._root / layout.upload_key(stem)).unlink(missing_ok=True)
