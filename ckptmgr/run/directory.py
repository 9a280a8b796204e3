"""A run directory on any backend: what is in it, and the small writes besides commits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckptmgr.backends.atomic import is_temp
from ckptmgr.backends.base import Backend
from ckptmgr.core import layout
from ckptmgr.core.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    ConfigError,
    ConflictError,
    ManifestError,
    ObjectNotFoundError,
)
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord, Manifest
from ckptmgr.core.records import (
    AttemptRecord,
    RunRecord,
    TagRecord,
    decode_run,
    encode_tag,
)
from ckptmgr.run.creation import create, created_unseen, runs_among, store_text
from ckptmgr.run.history import attempts_of, judged, read_history, stems_in, tags_of
from ckptmgr.run.identity import new_uuid, utc_stamp
from ckptmgr.run.loose import LooseData, Names, loose_in, names_below, names_in

_T = TypeVar("_T")
_READERS = 16
# See `RunDirectory.is_made_here` and `RunDirectory.is_new`: their uuids.
_made: set[str] = set()
_made_unseen: set[str] = set()
_KINDS = {"checkpoints": "a run of checkpoints", "artifact": "an artifact"}


@dataclass(slots=True)
class RunDirectory:
    """One run on one backend. Keeps nothing but the run's identity: every call looks again.

    Attributes:
        fs: the backend.
        root: path of the run on it, without protocol or trailing slash.
        url: how the user names it, for messages and journals.
        record: run.json.
    """

    fs: Backend
    root: str
    url: str
    record: RunRecord = field(default_factory=lambda: RunRecord(uuid=""))

    # --- opening ----------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: str, *, fs: Backend | None = None, root: str | None = None) -> RunDirectory:
        """The run at `url`.

        Raises:
            CheckpointNotFoundError: the store says that there is no run.json there; `lost` is the number of checkpoints that lie there without, and
                `runs` names some that lie one level below.
            ConfigError: `url` is malformed, or names a file.
            ManifestError: run.json is damaged or from a newer version.
            BackendError: could not look (I7).
        """
        run = cls._at(url, fs, root)
        if not run._is_read():
            raise run._not_found()
        return run

    @classmethod
    def find(cls, url: str, *, fs: Backend | None = None, root: str | None = None) -> RunDirectory | None:
        """As `open`, for who has another use for `url`: None if the store says that there is no run.json there."""
        run = cls._at(url, fs, root)
        return run if run._is_read() else None

    def _is_read(self) -> bool:
        """Read run.json into `record`; whether there is one."""
        data = self.read(layout.RUN_FILE)
        if data is None:
            self.refuse_file()
            return False
        self.record = decode_run(data, where=f"{self.url}/{layout.RUN_FILE}")
        return True

    @classmethod
    def open_or_create(
        cls,
        url: str,
        *,
        uuid: str | None = None,
        kind: str = "checkpoints",
        fs: Backend | None = None,
        root: str | None = None,
    ) -> RunDirectory:
        """The run at `url`, created if there is none.

        Args:
            uuid: the identity that a new run gets; drawn if None.
            kind: `checkpoints` or `artifact`: what it is, or becomes.

        Raises:
            ConflictError: it is of the other kind, or something lies there that a new run would hide: other runs, or another run's manifests; or
                it would lie within another run, or beside other things at the root of a bucket. Nothing was changed.
        """
        run = cls._at(url, fs, root)
        try:
            if run._is_read():
                return run._of_kind(kind)
        except AccessDeniedError:
            record = created_unseen(run, uuid or new_uuid(), kind)
            if record is None:
                raise
            run.record = record
            _made.add(record.uuid)
            _made_unseen.add(record.uuid)
            return run
        create(run, uuid, kind)
        made = cls.open(url, fs=run.fs, root=run.root)._of_kind(kind)
        _made.add(made.uuid)
        return made

    @classmethod
    def absent(cls, url: str, record: RunRecord) -> RunDirectory:
        """A run that the store does not have, as if it had: nothing is in it, and nothing is created."""
        run = cls._at(url, None, None)
        run.record = record
        return run

    @classmethod
    def _at(cls, url: str, fs: Backend | None, root: str | None) -> RunDirectory:
        from ckptmgr.backends.registry import normalize_url, open_store

        if fs is None or root is None:
            fs, root = open_store(url)
        return cls(fs=fs, root=root, url=normalize_url(url))

    def _of_kind(self, kind: str) -> RunDirectory:
        """This run itself, unless it is of another kind: versions of an artifact and steps of training would be one lineage."""
        if self.record.kind != kind:
            wanted, found = (_KINDS.get(name, f"a run of kind {name!r}") for name in (kind, self.record.kind))
            raise ConflictError(
                f"{self.url} is {found}, not {wanted}",
                hint=f"use a name of its own, such as {self.url.rsplit('/', 1)[0]}/NEW; nothing was changed",
                url=self.url,
            )
        return self

    def _not_found(self) -> CheckpointNotFoundError:
        lost = len(self.stems())
        if not lost:
            # A refused look at what lies here is raised (I7): nobody may start from scratch because of it.
            names = names_below(self, "")
            # One of what lies below is not: that may be a run or not, and is something in any case.
            with contextlib.suppress(AccessDeniedError):
                if below := runs_among(self, names):
                    return CheckpointNotFoundError(
                        store_text(self.url, below),
                        hint=f"name one of them, such as {self.url}/{below[0]}; `ckptmgr ls` lists them",
                        url=self.url,
                        runs=tuple(below),
                        empty=False,
                    )
            return CheckpointNotFoundError(
                f"there is no run at {self.url}", hint="see what the store holds with `ckptmgr ls`", url=self.url
            )
        return CheckpointNotFoundError(
            f"{self.url} has lost its {layout.RUN_FILE}, while {lost} checkpoint{'' if lost == 1 else 's'} {'is' if lost == 1 else 'are'} there",
            hint="bring that file back; or start the training without `ckptmgr resume`, which makes it again from the manifests and goes on",
            url=self.url,
            lost=lost,
            empty=False,
        )

    def refuse_file(self) -> None:
        """Raise ConfigError if the run's path is a file, which no run can be."""
        try:
            info = self.fs.info(self.root)
        except ObjectNotFoundError:
            return
        if info["type"] == "file":
            raise ConfigError(
                f"{self.url} is a file of {info['size']} bytes, not a run",
                hint="give the URL of a run directory",
                url=self.url,
            )

    def refuse_replaced(self) -> None:
        """Raise ConflictError unless this very run is (still) here: a commit beside no run.json could never be found again.

        A disk that was unmounted looks like this, and so does a run that was removed or replaced while training went on.
        """
        data = self.read(layout.RUN_FILE)
        where = f"{self.url}/{layout.RUN_FILE}"
        if data is None or decode_run(data, where=where).uuid != self.uuid:
            raise ConflictError(
                f"{self.url} is gone" if data is None else f"{self.url} is another run by now",
                hint="check the disk or the bucket; what is saved stays in the local tier",
                key=layout.RUN_FILE,
            )

    # --- small pieces -----------------------------------------------------------------------------------------------------

    @property
    def uuid(self) -> str:
        return self.record.uuid

    @property
    def is_made_here(self) -> bool:
        """Whether this process has made the run: a store that lists late may not list even its run.json yet."""
        return self.uuid in _made

    @property
    def is_new(self) -> bool:
        """Whether this process, which may not list, has made the run, and has not begun an attempt yet: then nothing is in it."""
        return self.uuid in _made_unseen

    def begun(self) -> None:
        """An attempt was claimed: from now on there may be something in the run."""
        _made_unseen.discard(self.uuid)

    @property
    def name(self) -> str:
        return self.root.rsplit("/", 1)[-1]

    def path(self, key: str) -> str:
        """The backend's path of a key of this run."""
        return f"{self.root}/{key}"

    def read(self, key: str) -> bytes | None:
        """The bytes at `key`; None if the store says that nothing is there."""
        try:
            return self.fs.cat_file(self.path(key))
        except ObjectNotFoundError:
            return None

    def keys(self, prefix: str) -> list[str]:
        """Every key of this run below `prefix`, sorted."""
        found = self._find(prefix)
        return sorted(name[len(self.root) + 1 :] for name in found)

    def _find(self, prefix: str, **options: Any) -> Any:
        try:
            return self.fs.find(self.path(prefix), **options)
        except AccessDeniedError:
            if not self.is_new:
                raise
            return {}

    def remove_empty_folders(self, stem: Stem) -> None:
        """On a local disk, remove the folders that the removed files of `stem` lay in, and the temporary files that a killed upload left
        there; buckets have neither. A folder with anything else in it stays."""
        if not self.fs.capabilities.is_local:
            return
        top = self.path(layout.data_prefix(stem))
        for folder, _, names in os.walk(top, topdown=False):
            with contextlib.suppress(OSError):
                for name in filter(is_temp, names):
                    os.unlink(os.path.join(folder, name))
                os.rmdir(folder)

    # --- looking ----------------------------------------------------------------------------------------------------------

    def history(self, *, cached: bool = True) -> History:
        """Everything that decides what is newest: one listing each of manifests, attempts and tags, and their contents.

        Args:
            cached: what this machine has read before and the store lists unchanged is not read again. Without it every byte is the store's own.
        """
        return read_history(self, cached=cached)

    def records(self, folder: str) -> dict[str, dict[str, Any]]:
        """Every key of this run below `folder`, sorted, with its record as `Backend.find` gives it."""
        found = self._find(folder, detail=True)
        assert isinstance(found, dict)
        return {name[len(self.root) + 1 :]: record for name, record in found.items()}

    def stems(self) -> list[Stem]:
        """Every stem with something in the manifest's place (committed, closed or unreadable), in (attempt, step, seq) order."""
        return list(stems_in(dict.fromkeys(self.keys(layout.MANIFESTS))))

    def manifest(self, stem: Stem) -> Manifest | ClosingRecord:
        """What stands in the manifest's place of `stem`.

        Raises:
            CheckpointNotFoundError: nothing does.
            ManifestError: it cannot be read.
        """
        data = self.read(layout.manifest_key(stem))
        if data is None:
            raise CheckpointNotFoundError(f"no checkpoint {stem} in {self.url}", hint="see `ckptmgr ls --all`")
        outcome = judged(self, stem, data)
        if isinstance(outcome, ManifestError):
            raise outcome
        return outcome

    def attempts(self) -> dict[int, AttemptRecord]:
        """Every claimed attempt. A record that cannot be read still counts as claimed: numbers are never reused."""
        keys = [key for key in self.keys(layout.ATTEMPTS) if layout.attempt_number(key) is not None]
        return attempts_of(self, dict(zip(keys, self.map(self.read, keys), strict=True)))

    def tags(self) -> dict[str, Stem]:
        """Where each tag points. A tag that cannot be read is an error: prune must not take its checkpoint for untagged."""
        keys = [key for key in self.keys(layout.TAGS) if key.endswith(".json")]
        return tags_of(self, dict(zip(keys, self.map(self.read, keys), strict=True)))

    def names(self) -> Names:
        """What lies in the run, by name."""
        return names_in(self)

    def loose_data(self, known: Iterable[Stem], names: Names | None = None) -> list[LooseData]:
        """What lies in the run without being a checkpoint: data without a manifest, and files that are not ours.

        Args:
            known: stems that have a manifest or a closing record.
            names: what lies there, if that was asked for already.
        """
        return loose_in(self, known, names or names_in(self))

    # --- tags -------------------------------------------------------------------------------------------------------------

    def tag(self, name: str, stem: Stem) -> None:
        """Point `name` at `stem`, which must be committed. Moves an existing tag."""
        key = layout.tag_key(name)
        if isinstance(self.manifest(stem), ClosingRecord):
            raise ConflictError(f"{stem} was pruned and cannot be tagged", hint="choose one of `ckptmgr ls`")
        self.fs.pipe_file(self.path(key), encode_tag(TagRecord(tag=name, stem=stem, created_at=utc_stamp())))

    def untag(self, name: str) -> None:
        """Remove the tag `name`; already gone is success."""
        self.fs.rm_file(self.path(layout.tag_key(name)))

    def map(self, function: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
        """`function` over `items`, in order; on a remote store several at once, for each costs a round trip."""
        return side_by_side(self.fs, function, items)


def side_by_side(
    fs: Backend, function: Callable[[Any], _T], items: Sequence[Any], *, workers: int = _READERS
) -> list[_T]:
    """`function` over `items`, in order, as many at once as pays on `fs`. The first failure ends it."""
    if fs.capabilities.is_local or len(items) < 2:
        return [function(item) for item in items]
    from concurrent.futures import ThreadPoolExecutor

    pool = ThreadPoolExecutor(max_workers=min(workers, len(items)), thread_name_prefix="ckptmgr-read")
    wait = True
    try:
        return list(pool.map(function, items))
    except KeyboardInterrupt:
        wait = False  # whoever pressed Ctrl-C does not wait for requests that are under way, and tried again
        raise
    finally:
        pool.shutdown(wait=wait, cancel_futures=True)


def same_run(local: RunDirectory, remote: RunDirectory) -> None:
    """Raise ConflictError unless both are the same run."""
    if local.uuid != remote.uuid:
        raise ConflictError(
            f"{local.root} is the local tier of run {local.uuid}, but {remote.url} is run {remote.uuid}",
            hint="give another local directory, or another run name",
        )
