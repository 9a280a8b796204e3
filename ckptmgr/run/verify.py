"""Verify: does the store (or a directory) still hold the bytes that the manifests describe?

Presence and size come from one listing of the data; what else the store knows, its checksum, and the bytes themselves are asked for several files at a time.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.checksums import Digester, Digests
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    CheckpointNotFoundError,
    ManifestError,
    ObjectNotFoundError,
)
from ckptmgr.core.history import History
from ckptmgr.core.layout import CHECKPOINTS, Stem, data_key, data_prefix, manifest_key
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest
from ckptmgr.run import notes
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import check_stored, digest_problem, file_problem
from ckptmgr.run.sidecar import read_sidecar

# Large files are read in blocks; so many are in memory, or under way, over all files together.
_BLOCK_BYTES = 4 << 20
_BLOCKS = 8
# Files at a time that are asked about, or read in one request because they are small: each costs a round trip, and hardly any bytes.
_AT_ONCE = 16
_SMALL_BYTES = 1 << 20
# Results may wait for an earlier one, so many: a run may have a million files.
_AHEAD = 256

Job = tuple[Stem, FileEntry]


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One thing that is wrong with one checkpoint: `file`, relative to it (or its manifest's key), `why`.

    Attributes:
        is_suspected: only a reading of the file tells whether it is damaged.
    """

    stem: Stem
    file: str
    why: str
    is_suspected: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Depth:
    """How much to read: `quick` asks the store (presence, size, its checksum) and downloads nothing; `sample` reads
    that share (0 to 1) of the files in full and asks about the rest; by default everything is read."""

    quick: bool = False
    sample: float | None = None

    @property
    def is_full(self) -> bool:
        return not self.quick and self.sample is None

    def reads(self) -> bool:
        """Whether the next file is read. Which ones are sampled is a matter of chance on purpose: repeated runs get round to all of them."""
        return not self.quick and (self.sample is None or random.random() < self.sample)


def verify_run(
    run: RunDirectory,
    history: History,
    stems: Iterable[Stem],
    depth: Depth,
    *,
    moved: Callable[[int], object] = lambda count: None,
    beside: Callable[[Stem, list[str]], object] = lambda stem, files: None,
    sized: Callable[[Stem, str], object] = lambda stem, path: None,
    suspects: bool = False,
) -> list[Damage]:
    """Check each of `stems`; returns everything that is wrong, in their order. One that is pruned meanwhile is passed over.

    Args:
        moved: called with the number of bytes checked since the last call, from any thread.
        beside: called with the files that lie under a checkpoint and are not named by its manifest: a note, not damage.
        sized: called, from any thread, with each file that is there in its size and of which no more was compared: it was not to be read, and the
            store keeps no checksum of it.
        suspects: name those of them whose checkpoint has files of which the store does keep one: something else may have written them. Not for who
            acts on the answer without a person: a tool that copies a bucket may lose the checksums of large objects alone.

    Raises:
        BackendError: the store could not be asked; nothing is called damaged because of that (I7). What was found before is in `damage`.
    """
    ordered = list(stems)
    readable = [stem for stem in ordered if stem in history.manifests]
    found: list[Damage] = []
    try:
        stored = _stored_sizes(run, readable)
        checks = _Checks(run, depth, stored, moved, sized)
        outcomes = checks.outcomes((stem, entry) for stem in readable for entry in history.manifests[stem].files)
        for stem in ordered:
            if stem in history.broken:
                found.append(Damage(stem=stem, file=manifest_key(stem), why=str(history.broken[stem])))
                continue
            files = history.manifests[stem].files
            problems = [
                Damage(stem=stem, file=entry.path, why=why)
                for entry, why in ((entry, next(outcomes)) for entry in files)
                if why is not None
            ]
            more = sorted(stored.get(str(stem), {}).keys() - {entry.path for entry in files})
            if more:
                beside(stem, more)
            if problems and _is_still_committed(run, stem):
                notes.remember(run.url, stem, problems[0].file, problems[0].why)
                found.extend(problems)
            elif not problems and depth.is_full:
                notes.forget(run.url, stem)
            if suspects:
                found.extend(checks.suspected(stem))
    except BackendError as error:
        error.__dict__.update(damage=tuple(found))
        raise
    return found


def stored_damage(run: RunDirectory, history: History, stems: Iterable[Stem]) -> dict[Stem, list[Damage]]:
    """What the store itself reports as wrong with each of `stems`, without a download; those that are whole are left out."""
    found: dict[Stem, list[Damage]] = {}
    for damage in verify_run(run, history, stems, Depth(quick=True)):
        found.setdefault(damage.stem, []).append(damage)
    return found


def damage_of(run: RunDirectory, manifest: Manifest) -> list[Damage]:
    """What the store itself reports as wrong with one checkpoint, without a download; what prune asks before it deletes (I8)."""
    history = History(run_uuid=run.uuid, manifests={manifest.stem: manifest})
    return verify_run(run, history, [manifest.stem], Depth(quick=True))


def damage_now(run: RunDirectory, manifest: Manifest) -> list[Damage]:
    """As `damage_of`; one that this machine has seen to be damaged is read in full instead, for a checksum or a size need not tell."""
    depth = Depth(quick=not notes.noted(run.url, [manifest.stem]))
    return verify_run(run, History(run_uuid=run.uuid, manifests={manifest.stem: manifest}), [manifest.stem], depth)


def noted_damage(run: RunDirectory, manifest: Manifest) -> list[Damage]:
    """What this machine has seen to be wrong with one checkpoint and finds wrong again, by reading that one file."""
    note = notes.noted(run.url, [manifest.stem]).get(manifest.stem)
    entries = [entry for entry in manifest.files if note is not None and entry.path == note.file]
    checks = _Checks(run, Depth(), {}, lambda count: None)
    problems = zip(entries, checks.outcomes((manifest.stem, entry) for entry in entries), strict=True)
    return [Damage(stem=manifest.stem, file=entry.path, why=why) for entry, why in problems if why is not None]


def verify_directory(directory: Path) -> tuple[Manifest, list[Damage]]:
    """Check a directory that `resume` or `pull` made against the manifest beside it: every file that was brought there, and that there is no other.

    Of a part of a checkpoint the manifest that is returned names only what is there.

    Raises:
        CheckpointNotFoundError: no manifest lies beside it.
        ManifestError: that one is damaged.
    """
    manifest = read_sidecar(directory, parts=True).manifest
    root = directory.parent if directory.is_file() else directory
    found = [
        Damage(stem=manifest.stem, file=entry.path, why=why)
        for entry in manifest.files
        if (why := file_problem(root / entry.path, entry)) is not None
    ]
    wanted = {entry.path for entry in manifest.files}
    for path in sorted(root.rglob("*")):
        name = path.relative_to(root).as_posix()
        if path.is_symlink() and name in wanted:
            # Right today: by the time a trainer reads it, it may lead to something else.
            found.append(Damage(stem=manifest.stem, file=name, why="is a link"))
        elif (path.is_symlink() or not path.is_dir()) and name not in wanted:
            found.append(Damage(stem=manifest.stem, file=name, why="is not part of the checkpoint"))
    return manifest, found


def _stored_sizes(run: RunDirectory, stems: list[Stem]) -> dict[str, dict[str, int]]:
    """The size of every stored file, by checkpoint and path: one listing, of the one checkpoint or of all data. None, if that is not permitted."""
    if not stems:
        return {}
    below = run.path(CHECKPOINTS if len(stems) > 1 else data_prefix(stems[0]))
    try:
        listed = run.fs.find(below, detail=True)
    except AccessDeniedError:
        return {}  # each file is asked about by itself
    assert isinstance(listed, dict)
    wanted = {str(stem) for stem in stems}
    sizes: dict[str, dict[str, int]] = {}
    for name, record in listed.items():
        stem, slash, path = name[len(run.path(CHECKPOINTS)) + 1 :].partition("/")
        if slash and stem in wanted:
            sizes.setdefault(stem, {})[path] = record["size"]
    return sizes


class _Checks:
    """The checks of many files, in order; on a remote store several at once.

    Args:
        sizes: of what is stored, by checkpoint and path. What it lacks is looked for again before it counts as missing.
        moved, sized: as for `verify_run`.
    """

    def __init__(
        self,
        run: RunDirectory,
        depth: Depth,
        sizes: dict[str, dict[str, int]],
        moved: Callable[[int], object],
        sized: Callable[[Stem, str], object] = lambda stem, path: None,
    ) -> None:
        self._run = run
        self._depth = depth
        self._sizes = sizes
        self._moved = moved
        self._sized = sized
        self._blocks = ThreadPoolExecutor(max_workers=_BLOCKS, thread_name_prefix="ckptmgr-block")
        self._room = threading.Semaphore(_BLOCKS)
        self._ended = threading.Event()
        self._summed: set[Stem] = set()
        self._unsummed: dict[Stem, list[str]] = {}

    def suspected(self, stem: Stem) -> list[Damage]:
        """Files of `stem`, all of which were checked, without a checksum in the store that keeps one of others."""
        kind = self._run.fs.capabilities.stored_crc
        why = f"has no {kind} in the store, which keeps one of other files of this checkpoint"
        files = self._unsummed.pop(stem, []) if stem in self._summed else []
        return [Damage(stem=stem, file=path, why=why, is_suspected=True) for path in sorted(files)]

    def outcomes(self, jobs: Iterable[Job]) -> Iterator[str | None]:
        """What is wrong with the file of each job, None if nothing is. The first failure of the store ends it."""
        if self._run.fs.capabilities.is_local:
            yield from map(self._check, jobs)
            return
        pool = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="ckptmgr-verify")
        pending: deque[Future[str | None]] = deque()
        wait = True
        try:
            for job in jobs:
                pending.append(pool.submit(self._check, job))
                if len(pending) == _AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except KeyboardInterrupt:
            wait = False  # whoever pressed Ctrl-C does not wait for what is under way
            raise
        finally:
            self._ended.set()
            for each in (pool, self._blocks):
                each.shutdown(wait=wait, cancel_futures=True)

    def _check(self, job: Job) -> str | None:
        stem, entry = job
        key = data_key(stem, entry.path)
        problem = None
        if self._sizes.get(str(stem), {}).get(entry.path) != entry.size:
            # Some stores list late. Only what a look at the very object confirms is damage.
            problem = check_stored(self._run, key, entry)
        if problem is None:
            problem = self._content_problem(stem, key, entry)
        return problem

    def _content_problem(self, stem: Stem, key: str, entry: FileEntry) -> str | None:
        """What is wrong with a file of the right size."""
        is_local = self._run.fs.capabilities.is_local
        if not self._depth.reads():
            return self._crc_problem(stem, key, entry)
        if not is_local:
            return self._read_problem(key, entry)
        problem = file_problem(Path(self._run.path(key)), entry)
        self._moved(entry.size)
        return problem

    def _crc_problem(self, stem: Stem, key: str, entry: FileEntry) -> str | None:
        """What the store's own checksum says against the bytes at `key`; None if nothing, or if there is none to compare."""
        kind = self._run.fs.capabilities.stored_crc
        expected = None if kind is None else getattr(entry, kind)
        try:
            stored = None if expected is None else self._run.fs.stored_crc(self._run.path(key))
        except ObjectNotFoundError:
            return "is missing"
        if stored is None:
            self._sized(stem, entry.path)
            if expected is not None:
                self._unsummed.setdefault(stem, []).append(entry.path)
            return None
        self._summed.add(stem)
        return None if stored == (kind, expected) else f"has the {kind} {stored[1]} instead of {expected}"

    def _read_problem(self, key: str, entry: FileEntry) -> str | None:
        problem: str | None = None
        moved = self._moved
        for _ in range(2):  # damage on the way is gone at the second try, damage at rest is not
            try:
                problem = digest_problem(self._read_through(key, entry.size, moved), entry)
            except ObjectNotFoundError:
                return "is missing"
            if problem is None:
                break
            moved = lambda count: None
        return problem

    def _read_through(self, key: str, size: int, moved: Callable[[int], object]) -> Digests:
        """The digests of a stored object of `size` bytes, block by block and in order: a shard need not fit on this machine's disk.

        Later blocks are fetched meanwhile, as far as there is room; one at least, whatever other files have in memory.
        """
        path = self._run.path(key)
        digester = Digester()
        if size <= min(_SMALL_BYTES, _BLOCK_BYTES):
            digester.update(self._run.fs.cat_file(path) if size else b"")
            moved(size)
            return digester.digests()
        starts = deque(range(0, size, _BLOCK_BYTES))
        ahead: deque[Future[bytes]] = deque()
        try:
            while (starts or ahead) and not self._ended.is_set():
                while starts and self._room.acquire(blocking=not ahead):
                    start = starts.popleft()
                    ahead.append(
                        self._blocks.submit(self._run.fs.cat_file, path, start, min(start + _BLOCK_BYTES, size))
                    )
                block = ahead[0].result()
                digester.update(block)
                moved(len(block))
                ahead.popleft()
                self._room.release()
        finally:
            for future in ahead:
                future.cancel()
                self._room.release()
        return digester.digests()


def _is_still_committed(run: RunDirectory, stem: Stem) -> bool:
    try:
        return not isinstance(run.manifest(stem), ClosingRecord)
    except CheckpointNotFoundError:
        return False
    except ManifestError:
        return True
