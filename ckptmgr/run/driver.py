"""Performs the operations of `ckptmgr.core.protocol` on a real run directory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ckptmgr.backends.atomic import digest_file, link_or_copy
from ckptmgr.core.checksums import Digests
from ckptmgr.core.errors import (
    BackendError,
    ChecksumMismatchError,
    CkptmgrError,
    ObjectExistsError,
    ObjectNotFoundError,
    SizeMismatchError,
    SourceChangedError,
)
from ckptmgr.core.manifest import FileEntry
from ckptmgr.core.operations import (
    CopyFile,
    Create,
    Delete,
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
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.together import Moved, together

if TYPE_CHECKING:
    from ckptmgr.backends.parts import PartJournal

logger = logging.getLogger(__name__)
_T = TypeVar("_T")


def drive(protocol: Generator[Operation, Any, _T], perform: Callable[[Operation], Any]) -> _T:
    """Run `protocol` to its end, performing each operation it yields.

    Every error of `perform` is thrown into the protocol, which settles those that it knows and lets the others out.
    """
    reply: Any = None
    failure: CkptmgrError | None = None
    while True:
        try:
            operation = protocol.throw(failure) if failure is not None else protocol.send(reply)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        reply, failure = None, None
        try:
            reply = perform(operation)
        except CkptmgrError as exc:
            failure = exc


class StoreDriver:
    """Performs operations on one run directory, files of a remote one side by side. Made and used by one thread, which is the one that `moved` is called by;
    `record` and `parts` are called by others too.

    Args:
        run: where the operations act.
        source: the local directory that `PutFile` reads from.
        target: the local directory that `Fetch` fills; parent directories of the files in it are made as needed.
        link: `Fetch` makes hard links where it can. Only from a local tier: a trainer that writes a resumed file in place would otherwise
            reach through the link into the store.
        record: called for each `Record`, durably, before it returns.
        lasting: what `Fetch` brings will be synced by the caller.
        moved: called with the number of bytes transferred since the last call, several times a second, also with 0.
        parts: the journal of a file's upload in parts, by its path.
    """

    def __init__(
        self,
        run: RunDirectory,
        *,
        source: Path | None = None,
        target: Path | None = None,
        link: bool = False,
        lasting: bool = True,
        record: Callable[[Record], None] | None = None,
        moved: Callable[[int], None] | None = None,
        parts: Callable[[str], PartJournal] | None = None,
    ) -> None:
        self._run = run
        self._source = source
        self._target = target
        self._link = link
        self._lasting = lasting
        self._record = record
        self._moved = Moved(moved)
        self._parts = parts

    def __call__(self, operation: Operation) -> Any:
        match operation:
            case Read(key):
                return self._run.read(key)
            case Create(key, body):
                return self._create(key, body)
            case Replace(key, body):
                return self._run.fs.pipe_file(self._run.path(key), body)
            case ListKeys(prefix):
                return self._run.keys(prefix)
            case Delete(key):
                return self._run.fs.rm_file(self._run.path(key))
            case DeleteAll(keys):
                return self._run.fs.rm_files([self._run.path(key) for key in keys])
            case PutFile(key, entry):
                return self._put(key, entry)
            case CopyFile(source, key, entry):
                return self._copy(source, key, entry)
            case Together(parts, to_the_end):
                return self._together(parts, to_the_end)
            case IsStored(key, entry):
                return is_stored(self._run, key, entry)
            case Missing(prefix, entries):
                return self._missing(prefix, entries)
            case Fetch(key, entry):
                return self._fetch(key, entry)
            case Record():
                return self._record(operation) if self._record is not None else None

    def _together(self, parts: Sequence[tuple[int, Generator[Operation, Any, None]]], to_the_end: bool) -> None:
        work = [(size, partial(drive, part, self)) for size, part in parts]
        together(work, self._moved, most=self._run.fs.concurrency, to_the_end=to_the_end)

    def _create(self, key: str, body: bytes) -> None:
        """Create-only where the store decides it; elsewhere a look and a write, which the age rules of upload and gc make safe.

        That write is tried once: a retry without a further look could put a manifest over the closing record of a prune that came between.
        """
        path = self._run.path(key)
        if self._run.record.create_only:
            self._run.fs.pipe_file(path, body, mode="create")
        elif self._run.read(key) is not None:
            raise ObjectExistsError(f"{path} exists", key=key)
        else:
            self._run.fs.unretried.pipe_file(path, body)

    def _copy(self, source: str, key: str, entry: FileEntry) -> bool:
        """A copy that is not proven is none: the store's word for the source is from when that was written."""
        try:
            self._run.fs.cp_file(self._run.path(source), self._run.path(key))
            return check_stored(self._run, key, entry, need_proof=True) is None
        except BackendError as exc:
            logger.info("%s is sent, for the store did not copy it from %s: %s", key, source, exc)
            return False

    def _missing(self, prefix: str, entries: Sequence[FileEntry]) -> list[str]:
        """Where something is missing, the whole run may be: a commit beside no run.json could not be found."""
        listed = self._run.fs.find(self._run.path(prefix), detail=True)
        assert isinstance(listed, dict)
        sizes = {path: record["size"] for path, record in listed.items()}
        keys = {f"{prefix}/{entry.path}": entry for entry in entries}
        late = [key for key, entry in keys.items() if sizes.get(self._run.path(key)) != entry.size]
        problems = self._run.map(lambda key: check_stored(self._run, key, keys[key]), late)
        gone = [keys[key].path for key, problem in zip(late, problems, strict=True) if problem is not None]
        if gone:
            self._run.refuse_replaced()
        return gone

    def _put(self, key: str, entry: FileEntry) -> None:
        if self._source is None:
            raise SourceChangedError(f"there is no local copy of {entry.path} to upload", path=entry.path)
        self._run.fs.put_file(
            str(self._source / entry.path),
            self._run.path(key),
            callback=self._moved,
            expected=entry.digests,
            parts=None if self._parts is None else self._parts(entry.path),
        )

    def _fetch(self, key: str, entry: FileEntry) -> str | None:
        if self._target is None:
            return check_stored(self._run, key, entry)
        target = self._target / entry.path
        if target.is_symlink() or (target.exists() and file_problem(target, entry) is not None):
            target.unlink()  # of an interrupted download, or of another checkpoint: only bytes that verify are reused
        if target.exists():
            return None
        target.parent.mkdir(parents=True, exist_ok=True)
        problem: str | None = None
        for _ in range(2):  # damage on the way is gone at the second try, damage at rest is not
            try:
                problem = None if self._bring(key, target, entry) else file_problem(target, entry)
            except ObjectNotFoundError:
                return "is missing"
            except SizeMismatchError as exc:
                actual = exc.__dict__.get("actual")
                how = exc.__dict__.get("how", "other")
                problem = f"has {how} bytes than {entry.size}" if actual is None else size_problem(actual, entry)
            except ChecksumMismatchError as exc:
                problem = blake3_problem(exc.__dict__.get("actual", "another"), entry)
            if problem is None:
                return None
            target.unlink(missing_ok=True)
        return problem

    def _bring(self, key: str, target: Path, entry: FileEntry) -> bool:
        """Bring the file; whether its bytes were checked on the way."""
        source = self._run.path(key)
        if not self._link:
            digests = entry.digests
            return self._run.fs.get_file(
                source, str(target), callback=self._moved, expected=digests, lasting=self._lasting
            )
        if not os.path.isfile(source):
            raise ObjectNotFoundError(f"{source} is missing", key=key)
        link_or_copy(source, target, sync=False)
        return False


def is_stored(run: RunDirectory, key: str, entry: FileEntry) -> bool:
    """Whether the store vouches, without a download, that `key` holds the bytes of `entry`. False when it cannot tell.

    On a local run directory the file itself is read.
    """
    try:
        return check_stored(run, key, entry, need_proof=True) is None
    except BackendError as exc:
        logger.debug("cannot tell whether %s is stored: %s", key, exc)
        return False


def check_stored(run: RunDirectory, key: str, entry: FileEntry, *, need_proof: bool = False) -> str | None:
    """What is wrong with a stored file as far as the store itself reports it, without a download; None if nothing is.

    Presence, size, and the CRC that the store keeps, where it keeps one that the manifest also has. On a local run directory the file
    is only looked at, unless `need_proof`.

    Args:
        need_proof: also call it wrong when the store gives no checksum to compare.
    """
    path = run.path(key)
    try:
        problem = size_problem(run.fs.info(path)["size"], entry)
        if problem is not None:
            return problem
        if run.fs.capabilities.is_local:
            return file_problem(Path(path), entry) if need_proof else None
        stored = run.fs.stored_crc(path)
    except ObjectNotFoundError:
        return "is missing"
    expected = None if stored is None else getattr(entry, stored[0])
    if stored is None or expected is None:
        return "has no checksum that the store could be asked for" if need_proof else None
    return None if stored[1] == expected else f"has the {stored[0]} {stored[1]} instead of {expected}"


def file_problem(path: Path, entry: FileEntry) -> str | None:
    """How the local file at `path` differs from `entry`; None if it does not. Reads all of it."""
    try:
        return size_problem(path.stat().st_size, entry) or digest_problem(digest_file(path), entry)
    except (FileNotFoundError, SourceChangedError):
        return "is missing"


def digest_problem(digests: Digests, entry: FileEntry) -> str | None:
    """How bytes that amount to `digests` differ from `entry`; None if they do not."""
    return size_problem(digests.size, entry) or blake3_problem(digests.blake3, entry)


def size_problem(size: int, entry: FileEntry) -> str | None:
    """How a file of `size` bytes differs from `entry` by that alone."""
    return None if size == entry.size else f"has {size} bytes instead of {entry.size}"


def blake3_problem(blake3: str, entry: FileEntry) -> str | None:
    """How bytes of the right number differ from `entry`, by their BLAKE3."""
    return None if blake3 == entry.blake3 else f"has the blake3 {blake3[:16]}… instead of {entry.blake3[:16]}…"
