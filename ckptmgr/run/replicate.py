"""Copy a committed checkpoint from a local directory to a run directory: uploading, `drain` and `push` are this one operation."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmgr.core import protocol
from ckptmgr.core.errors import BackendError, CkptmgrError
from ckptmgr.core.layout import data_key
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.operations import Record
from ckptmgr.core.protocol import Committed, Dropped
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.identity import new_nonce, utc_stamp, wall_s
from ckptmgr.run.journal import Journal, UploadEntry

if TYPE_CHECKING:
    from ckptmgr.backends.parts import PartJournal

logger = logging.getLogger(__name__)
# A smaller file is sent as fast as it is copied and looked at.
_COPIED_BYTES = 1 << 20
# What the journal may not know yet of files that the store holds: it costs a look at each when the upload is taken up again.
_NOTED_S = 1.0
_SMALL_BYTES = 8 << 20


def replicate(
    manifest: Manifest,
    source: Path,
    target: RunDirectory,
    journal: Journal,
    entry: UploadEntry,
    *,
    earlier: Iterable[Manifest] = (),
    moved: Callable[[int], None] | None = None,
    now_s: Callable[[], float] = wall_s,
) -> Committed | Dropped:
    """Make `manifest`'s checkpoint durable in `target`; returns when it is committed there and that is recorded in the journal.

    A repeat after a failure, a kill or a lost answer sends no object that was confirmed, and none that the store vouches for; of a large file that was
    under way it sends the parts that are missing. The caller holds the upload lock of this save.

    Args:
        manifest: what to commit, under its local stem.
        source: directory of its files.
        entry: how far earlier tries came.
        earlier: committed in `target`, under these stems, as far as is known: files that one of them has unchanged are copied within the store.
        moved: called with the number of bytes sent since the last call, several times a second, also with 0; what it raises ends the upload.

    Raises:
        CkptmgrError: it is not committed, as far as is known; the journal keeps what was confirmed, and the state `failed` with the reason.
    """
    resumed = entry.tries > 0
    stale = entry.began_at_s is not None and protocol.is_stale(entry.began_at_s, now_s())
    if stale:
        logger.info("%s: its upload began long ago; unless it was committed it goes on under a new name", entry.stem)
    progress = _Progress(manifest, entry, journal, target, now_s)
    began_at_s = entry.began_at_s or now_s()
    progress.note(state="uploading", tries=entry.tries + 1, began_at_s=began_at_s, target=target.url)
    steps = protocol.replicate(
        manifest.renamed(entry.remote),
        new_nonce=new_nonce,
        confirmed=entry.confirmed,
        resumed=resumed,
        stale_at=utc_stamp() if stale else None,
        copies=_copies(manifest, earlier, target),
    )
    perform = StoreDriver(target, source=source, record=progress.record, moved=moved, parts=progress.parts)
    try:
        target.refuse_replaced()
        return drive(steps, perform)
    except CkptmgrError as exc:
        progress.note(state="failed", error=str(exc))
        raise


def _copies(manifest: Manifest, earlier: Iterable[Manifest], target: RunDirectory) -> dict[str, str]:
    """For each file worth it, the key of the same bytes in an earlier checkpoint. Only where the store can prove a copy without a download."""
    if target.fs.capabilities.is_local or target.fs.capabilities.stored_crc is None:
        return {}
    there = {
        (entry.blake3, entry.size): data_key(one.stem, entry.path)
        for one in earlier
        for entry in one.files
        if entry.size >= _COPIED_BYTES
    }
    known = ((entry.path, there.get((entry.blake3, entry.size))) for entry in manifest.files)
    return {path: key for path, key in known if key is not None}


def abort_multiparts(entry: UploadEntry, run: RunDirectory) -> dict[str, str]:
    """Throw away the parts that `entry` has in `run`: for whoever removes it, or gives it up. Best effort, each request made once.

    Returns:
        What is left of `entry.multiparts`, logged: the store was not reached, or refused. Who forgets these leaves them to the bucket's rule for
        incomplete uploads.
    """
    left: dict[str, str] = {}
    for path, upload_id in entry.multiparts.items():
        key = run.path(data_key(entry.remote, path))
        try:
            run.fs.unretried.abort_upload(key, upload_id)
        except BackendError as exc:
            logger.warning("abandoned parts stay in the store (%s, upload %s): %s", key, upload_id, exc)
            left[path] = upload_id
    return left


class _Progress:
    """The journal's entry of one upload, kept up to date while it goes on. Safe from any thread."""

    def __init__(
        self,
        manifest: Manifest,
        entry: UploadEntry,
        journal: Journal,
        target: RunDirectory,
        now_s: Callable[[], float],
    ) -> None:
        self.entry = entry
        self._small = {one.path for one in manifest.files if one.size <= _SMALL_BYTES}
        self._journal = journal
        self._target = target
        self._now_s = now_s
        self._lock = threading.Lock()
        self._written_at = 0.0
        # Confirmed, and to be noted with the next write.
        self._waiting: set[str] = set()

    def note(self, **changes: Any) -> None:
        """Keep the entry with these changes, durably."""
        with self._lock:
            self._write(replace(self.entry, **changes))

    def record(self, event: Record) -> None:
        """Keep what has happened, durably; a confirmed small file perhaps only with one of the next."""
        if event.event != "confirmed":
            # Whatever comes now, nothing more is sent under this name.
            abort_multiparts(self.entry, self._target)
        with self._lock:
            if event.event == "confirmed" and self._may_wait(event.path):
                self._waiting.add(event.path)
                return
            entry = self.entry.after(event)
            if event.event == "renamed":
                self._waiting.clear()
                entry = replace(entry, began_at_s=self._now_s())
            self._write(entry)

    def parts(self, path: str) -> PartJournal:
        return _FileParts(self, path)

    def set_multipart(self, path: str, upload_id: str | None) -> None:
        with self._lock:
            entry = self.entry.in_parts(path, upload_id)
            if upload_id is not None:
                # Before a part is sent. The end of an upload is written with what follows from it.
                self._write(entry)
            self.entry = entry

    def _may_wait(self, path: str) -> bool:
        """Whether it is enough to note later that the store holds `path`: lost, that costs a look, where the store can vouch for what it holds."""
        fresh = time.monotonic() - self._written_at < _NOTED_S
        return fresh and path in self._small and self._target.fs.capabilities.stored_crc is not None

    def _write(self, entry: UploadEntry) -> None:
        if self._waiting:
            entry = replace(entry, confirmed=entry.confirmed | self._waiting)
            self._waiting.clear()
        self.entry = entry
        self._journal.write(entry)
        self._written_at = time.monotonic()


class _FileParts:
    """The `PartJournal` of one file."""

    def __init__(self, progress: _Progress, path: str) -> None:
        self._progress = progress
        self._path = path

    @property
    def upload_id(self) -> str | None:
        return self._progress.entry.multiparts.get(self._path)

    def began(self, upload_id: str) -> None:
        self._progress.set_multipart(self._path, upload_id)

    def ended(self) -> None:
        self._progress.set_multipart(self._path, None)
