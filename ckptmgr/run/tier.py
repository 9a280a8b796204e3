"""The local tier: a run directory on local disk, same layout as remote, which is also the upload queue."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptmgr.backends.atomic import (
    TEMP_PREFIX,
    find_temps,
    fsync_dir,
    make_dirs_durable,
    write_atomic,
)
from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core import layout
from ckptmgr.core.errors import (
    BackendError,
    CheckpointNotFoundError,
    CkptmgrError,
    ConflictError,
    ManifestError,
    ManifestVersionError,
)
from ckptmgr.core.layout import PARTIAL, RESUMED, Stem
from ckptmgr.core.manifest import FORMAT, VERSION, Manifest, canonical_json, decode_record, encode_manifest
from ckptmgr.core.records import AttemptRecord, encode_attempt
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import utc_stamp
from ckptmgr.run.journal import Journal, UploadEntry

logger = logging.getLogger(__name__)
_HOLD_FILE = ".lock"


# Tiers that a process saves into: to tell a manager that was never closed from another process.
_HELD: set[tuple[int, Path]] = set()


class LocalTier:
    """A run directory on this machine's disk.

    A save is prepared in `checkpoints/<stem>.partial`, renamed, and committed by its manifest; each step is durable before the
    next, so that a kill at any moment leaves either no checkpoint or a whole one.
    """

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.root = Path(run.root)
        self.journal = Journal(self.root)
        self._held: int | None = None

    def hold(self) -> None:
        """Be the one process that saves into this tier, until `release` or death.

        Raises:
            ConflictError: another process is.
        """
        if self._held is not None:
            return
        fd = locks.open_lock(self.root / _HOLD_FILE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            locks.close_lock(fd)
            ours = (os.getpid(), self.root) in _HELD
            raise ConflictError(
                f"{'this process' if ours else 'another process'} is saving into {self.root}"
                + (" already" if ours else ""),
                hint="close the manager that does (manager.close()), or give this one another local directory"
                if ours
                else "stop it, or give this one another local directory",
            ) from exc
        self._held = fd
        _HELD.add((os.getpid(), self.root))

    def release(self) -> None:
        """Let another process save into this tier."""
        if self._held is not None:
            locks.close_lock(self._held)
            self._held = None
            _HELD.discard((os.getpid(), self.root))

    @staticmethod
    def is_at(directory: str | os.PathLike[str]) -> bool:
        """Whether a local tier is at `directory`, and not a run that somebody keeps on a disk: those look alike otherwise."""
        path = Path(directory)
        return (path / layout.RUN_FILE).is_file() and ((path / _HOLD_FILE).exists() or (path / layout.UPLOADS).is_dir())

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> LocalTier:
        """The tier at `directory`.

        Raises:
            CheckpointNotFoundError: there is none.
            ManifestError: its run.json cannot be read.
        """
        path = os.path.abspath(directory)
        try:
            return cls(RunDirectory.open(path, fs=LocalBackend(), root=path))
        except CheckpointNotFoundError as exc:
            if hasattr(exc, "lost"):
                raise
            raise CheckpointNotFoundError(
                f"there is no local tier at {path}",
                hint="name the directory that the training saves into (local_dir, or CKPTMGR_LOCAL_DIR)",
            ) from exc
        except ManifestVersionError:
            raise
        except ManifestError as exc:
            exc.message = f"the local tier {path} cannot be used: {exc.message}"
            exc.hint = f"move that {layout.RUN_FILE} away: the training's next start makes it again, and uploads what waits there"
            raise

    @classmethod
    def find(cls, directory: str | os.PathLike[str]) -> LocalTier | None:
        """The tier at `directory`; None if there is none (yet)."""
        try:
            return cls.open(directory)
        except CheckpointNotFoundError:
            return None

    @classmethod
    def find_readable(cls, directory: str | os.PathLike[str]) -> LocalTier | None:
        """As `find`, for who has the store as well: None, with a warning, also where its run.json cannot be read."""
        try:
            return cls.find(directory)
        except ManifestVersionError:
            raise
        except ManifestError as exc:
            logger.warning("%s; going on without it", exc)
            return None

    @classmethod
    def open_or_create(cls, directory: str | os.PathLike[str], *, uuid: str) -> LocalTier:
        """The tier at `directory`, made if there is none.

        Raises:
            ConflictError: it is the tier of another run; nothing was changed (K100).
        """
        path = os.path.abspath(directory)
        tier = cls(RunDirectory.open_or_create(path, uuid=uuid, fs=LocalBackend(), root=path))
        if tier.run.uuid != uuid:
            raise ConflictError(
                f"{path} holds run {tier.run.uuid}, not run {uuid}",
                hint="give another local directory, or another run name; nothing was changed",
            )
        return tier

    def holds(self, stem: Stem) -> bool:
        """Whether the checkpoint `stem` is committed here, readable or not."""
        return (self.root / layout.manifest_key(stem)).exists()

    def data_dir(self, stem: Stem) -> Path:
        return self.root / layout.data_prefix(stem)

    def prepare(self, stem: Stem) -> Path:
        """An empty directory to write the files of `stem` into; `commit` makes it a checkpoint.

        Raises:
            ConflictError: the tier is gone. Made anew, it would hide under its disk when that is mounted again.
            DiskFullError, AccessDeniedError, PermanentBackendError: it cannot be made.
        """
        if not (self.root / layout.RUN_FILE).exists():
            raise ConflictError(f"the local tier {self.root} is gone", hint="is its disk still mounted?")
        partial = self.data_dir(stem).with_name(f"{stem}{PARTIAL}")
        make_dirs_durable(partial.parent)
        with os_errors("mkdir", str(partial)):
            os.mkdir(partial)
        return partial

    def commit(self, manifest: Manifest, prepared: Path, *, target: str) -> UploadEntry:
        """Turn `prepared`, whose files are written and synced, into the committed checkpoint `manifest` and queue it for `target`.

        The journal's entry comes before the manifest: a checkpoint that exists is always queued. A failure leaves nothing of it but `prepared`.

        Raises:
            DiskFullError, AccessDeniedError, PermanentBackendError: it is not committed.
        """
        for folder in sorted({prepared, *(path.parent for path in prepared.rglob("*"))}):
            fsync_dir(folder)
        final = self.data_dir(manifest.stem)
        with os_errors("rename", str(final)):
            os.rename(prepared, final)
        try:
            fsync_dir(final.parent)
            entry = UploadEntry(stem=manifest.stem, remote=manifest.stem, target=target)
            self.journal.write(entry)
            path = self.root / layout.manifest_key(manifest.stem)
            make_dirs_durable(path.parent)
            write_atomic(path, encode_manifest(manifest), create=True)
        except BaseException:
            # On a full disk the room is needed now, not after the next start, which would clean this up as well.
            with contextlib.suppress(OSError, CkptmgrError):
                self._erase(manifest.stem)
            raise
        return entry

    def discard(self, prepared: Path) -> None:
        """Remove what a failed save left in `prepared`."""
        shutil.rmtree(prepared, ignore_errors=True)

    def clean(self) -> list[str]:
        """Remove what earlier processes left half written; call it when no save is under way. Returns the names removed."""
        removed = []
        for temp in [Path(temp) for temp in find_temps(self.root)]:
            # Another process may be draining the tier just now.
            if _is_gone(temp.name.removeprefix(TEMP_PREFIX).partition("-")[0]):
                temp.unlink(missing_ok=True)
                removed.append(temp.relative_to(self.root).as_posix())
        self.take_back()
        committed = {str(stem) for stem in self.run.stems()}
        with contextlib.suppress(FileNotFoundError):
            for path in sorted((self.root / layout.CHECKPOINTS).iterdir()):
                if path.name not in committed and layout.parse_stem(path.name.removesuffix(PARTIAL)) is not None:
                    shutil.rmtree(path)
                    removed.append(path.name)
        for entry in self.journal.entries():
            # An entry with a source is a push's, whose files lie elsewhere; one of an evicted save stays until somebody was told.
            if str(entry.stem) not in committed and entry.source is None and entry.state != "evicted":
                self.journal.forget(entry.stem)
        return removed

    def resume_folder(self) -> Path:
        """Where this process restores checkpoints to: a folder of its own, not made yet, for another one may be loading from its own.
        Those of dead processes are removed, never used again: what is in them need not survive a power cut."""
        folders = self.root / RESUMED
        with contextlib.suppress(FileNotFoundError):
            for path in folders.iterdir():
                if _is_gone(path.name):
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        return folders / str(os.getpid())

    def note_attempt(self, record: AttemptRecord) -> None:
        """Keep a copy of an attempt claimed in the store, so that the tier alone knows the lineage too."""
        path = self.root / layout.attempt_key(record.number)
        make_dirs_durable(path.parent)
        write_atomic(path, encode_attempt(record))

    def note_restored(self, document: Mapping[str, Any]) -> None:
        """Keep what a restore did, for `ckptmgr status`. Information only: a disk that cannot be written costs the note, nothing else."""
        stamped = {"format": FORMAT, "version": VERSION, "restored_at": utc_stamp(), **document}
        try:
            write_atomic(self.root / layout.RESTORED_FILE, canonical_json(stamped), durable=False)
        except BackendError as exc:
            logger.warning("what was restored cannot be noted in %s: %s", self.root, exc)

    def restored(self) -> dict[str, Any] | None:
        """What `note_restored` has kept last; None if there is nothing, or nothing that can be read."""
        with contextlib.suppress(OSError, ManifestError):
            return decode_record((self.root / layout.RESTORED_FILE).read_bytes(), where=layout.RESTORED_FILE)
        return None

    def pending(self, target: str | None = None) -> list[tuple[Manifest, UploadEntry]]:
        """Committed saves that the store has not confirmed, newest first: the queue.

        Args:
            target: only those that go to this run URL.
        """
        entries = {entry.stem: entry for entry in self.journal.entries()}
        found = []
        for stem, manifest in sorted(self.run.history().manifests.items(), reverse=True):
            # Without a journal nothing is known: counted as tried, so that the upload begins with a look at the store (I2).
            entry = entries.get(stem) or UploadEntry(stem=stem, remote=stem, target=target or "", tries=1)
            if entry.is_pending and (target is None or entry.target in ("", target)):
                found.append((manifest, entry))
        return found

    def targets(self) -> set[str]:
        """URLs of the runs that saves here went to, or will go to."""
        return {entry.target for entry in self.journal.entries() if entry.target}

    def uploaded(self) -> set[Stem]:
        """Saves whose commit in the store was confirmed and recorded, or that need none any more: only these may be removed locally (I6)."""
        return {entry.stem for entry in self.journal.entries() if entry.state in ("uploaded", "dropped")}

    def last_uploaded(self, target: str) -> Manifest | None:
        """The newest save that `target` holds and that is still here, under its name there; what it has unchanged need not be sent again."""
        for entry in reversed(self.journal.entries()):
            if entry.state == "uploaded" and entry.target in ("", target) and self.holds(entry.stem):
                with contextlib.suppress(CkptmgrError):
                    manifest = self.run.manifest(entry.stem)
                    return manifest.renamed(entry.remote) if isinstance(manifest, Manifest) else None
        return None

    def remove(self, stem: Stem) -> None:
        """Remove the local copy of an uploaded checkpoint: manifest first, then data, then its journal. Nothing, if it is gone already.

        Raises:
            ConflictError: the store has not confirmed it (I6).
        """
        entry = self.journal.read(stem)
        if entry is None and not self.holds(stem):
            return  # another process of this machine, which frees room as well, was faster
        if entry is None or entry.state not in ("uploaded", "dropped"):
            raise ConflictError(
                f"{stem} is not confirmed in the store and stays on disk", hint="drain the uploads first"
            )
        self._erase(stem)

    def evict(self, stem: Stem, *, size_bytes: int, why: str) -> None:
        """Give up a save that waits, by the queue's drop rule (I6). Its journal's entry stays, with `why`, until `forget_evicted`.

        The entry says so before anything is removed: a kill in between leaves a named drop, or the whole save, which `take_back` queues again.
        The caller holds the upload lock of the save.

        Raises:
            ConflictError: it does not wait (any more); nothing was changed.
            DiskFullError, PermanentBackendError: that it goes could not be noted, so it stays.
        """
        entry = self.journal.read(stem) or UploadEntry(stem=stem, remote=stem)
        if not entry.is_pending:
            raise ConflictError(f"{stem} does not wait for its upload: it is {entry.state}")
        self.journal.write(replace(entry, state="evicted", error=why, size_bytes=size_bytes))
        self._erase_data(stem)

    def evicted(self) -> list[UploadEntry]:
        """Saves that were given up by the queue's drop rule and not acknowledged yet, oldest first."""
        return [entry for entry in self.journal.entries() if entry.state == "evicted" and not self.holds(entry.stem)]

    def forget_evicted(self, stem: Stem) -> None:
        """Somebody was told that `stem` was given up: its entry goes."""
        self.journal.forget(stem)

    def take_back(self) -> list[Stem]:
        """Queue again what a process was killed over while it gave it up: with its manifest it is still whole. Returns those."""
        taken = []
        for entry in self.journal.entries():
            if entry.state != "evicted" or not self.holds(entry.stem):
                continue
            with locks.exclusive(self.run.uuid, entry.stem, "upload") as free:
                # Looked at again under the lock: the process that holds it may be about to end what it began.
                if free and self.holds(entry.stem):
                    self.journal.write(replace(entry, state="pending", error=""))
                    taken.append(entry.stem)
        return taken

    def _erase(self, stem: Stem) -> None:
        self._erase_data(stem)
        self.journal.forget(stem)

    def _erase_data(self, stem: Stem) -> None:
        """Manifest first: a kill, or a failure, in between leaves data without a checkpoint, never a checkpoint without data."""
        manifest = self.root / layout.manifest_key(stem)
        with os_errors("remove", str(manifest)):
            manifest.unlink(missing_ok=True)
        if manifest.parent.is_dir():
            fsync_dir(manifest.parent)
        shutil.rmtree(self.data_dir(stem), ignore_errors=True)


def _is_gone(pid: str) -> bool:
    """Whether the process that left something under its number is gone. Our own number is that of an earlier life, too: in a container
    each life has the same one."""
    if not pid.isdecimal() or int(pid) == os.getpid():
        return True
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def next_seq(stems: Iterable[Stem], attempt: int) -> int:
    """The save counter of the next save of `attempt` (K044: a restart never begins again at a number in use)."""
    return max((stem.seq for stem in stems if stem.attempt == attempt), default=0) + 1
