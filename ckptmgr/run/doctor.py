"""Does this store, from this machine and with these credentials, do what checkpoints need? One verdict per question.

Most questions are answered by trying. Everything is written under `<store>/.ckptmgr-doctor-<random>/` and removed at the end, however that comes
about. A question that fails stops no other, except where nobody answers at all. Nothing here decides anything: a run makes its own probe when it is
created.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckptmgr.backends import probes
from ckptmgr.backends.base import Backend, Connection, PendingUpload
from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.registry import normalize_url, open_store
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core import layout
from ckptmgr.core.errors import (
    BackendError,
    BucketNotFoundError,
    CheckpointNotFoundError,
    ConfigError,
    ManifestError,
    ObjectNotFoundError,
    TransientBackendError,
)
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.units import duration_text
from ckptmgr.run import surroundings
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce, wall_s
from ckptmgr.run.trials import RATE_PART_BYTES, Trials
from ckptmgr.run.verdicts import Verdict, judged

# One more try: a blip is not a verdict, and a store that is down should not take minutes to be called so.
_POLICY = RetryPolicy(attempts=2, deadline_s=20.0)
_STALE_S = 24 * 3600.0
# Of a doctor that was killed; a younger one may still be at work.
_LEFT_OVER_S = 3600.0
_RUNS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the doctor is to judge by.

    Attributes:
        url: a store, a run, or where one is to be.
        size_bytes: of a checkpoint; None for that of the newest one below `url`, if there is one.
        grace_s: between the notice that a machine is taken and its end.
        saving_s: p95 of the time from a save's beginning until this machine's disk has it; None if none was made here.
        local_dir: where checkpoints are saved before they go up; None if there is no such place.
    """

    url: str
    size_bytes: int | None = None
    grace_s: float = 120.0
    saving_s: float | None = None
    local_dir: Path | None = None


def examine(question: Question) -> Iterator[Verdict]:
    """The verdicts, each as soon as it is known.

    Closing the iterator, or an exception in it, still removes what was written.

    Raises:
        ConfigError: the URL, a variable or the provider's configuration is wrong.
        MissingExtraError: a package is not installed.
    """
    options = StoreOptions.from_env()
    fs, root = open_store(question.url, policy=_POLICY, options=options)
    yield surroundings.versions(fs.kind)
    connection = yield from surroundings.connected(fs)
    if connection is None:
        return
    yield from surroundings.lasting(fs)
    yield from surroundings.greeted(fs.kind, connection)
    doctor = _Doctor(question, fs, root, options, connection)
    try:
        if connection.endpoint is None or connection.credentials is not None:
            yield from doctor.asked()
    finally:
        left = doctor.cleaned_up()
    if left is not None:
        yield left
    if question.local_dir is not None:
        yield surroundings.local_disk(question.local_dir, doctor.size_bytes)


class _Doctor:
    """The questions to one store, in an order in which each may build on those before.

    Attributes:
        size_bytes: of a checkpoint, as far as known by now.
    """

    def __init__(
        self, question: Question, fs: Backend, root: str, options: StoreOptions, connection: Connection
    ) -> None:
        self.size_bytes = question.size_bytes
        self._question = question
        self._fs = fs
        self._root = root
        self._connection = connection
        self._url = normalize_url(question.url)
        self._missing = _missing_folders(fs, root)
        self._scratch = tempfile.TemporaryDirectory(prefix="ckptmgr-doctor-")
        self._recorded: bool | None = None
        in_parts = replace(options, part_bytes=RATE_PART_BYTES)
        name = f"{layout.DOCTOR_PREFIX}{new_nonce()}"
        self._trials = Trials(
            fs=fs,
            wide=lambda: open_store(question.url, policy=_POLICY, options=in_parts)[0],
            place=f"{root}/{name}",
            scratch=Path(self._scratch.name),
        )
        self._is_tried = False

    def asked(self) -> Iterator[Verdict]:
        """All verdicts about the store."""
        trials, names = self._trials, list[str]()
        listed, is_over = self._listing(names)
        yield listed
        if is_over:
            return
        self._look_at_runs(names)
        self._is_tried = True
        yield judged("put", trials.put)
        if trials.written:
            yield from self._tried(trials)
        else:
            yield from self._read_only([name for name in names if not name.endswith("/")])
        store = trials.objects
        if store is not None:
            yield judged("stale_uploads", self._stale_uploads, refused="unknown")
            yield from self._bucket()
        left = self._left_overs(names)
        if left is not None:
            yield left

    def _tried(self, trials: Trials) -> Iterator[Verdict]:
        yield judged("get", trials.get)
        yield judged("head", trials.head)
        yield judged("create_only", lambda: trials.create_only(recorded=self._recorded))
        store = trials.objects
        if store is not None:
            profile = self._connection.profile
            least = profile.min_part_bytes if profile is not None else 5 << 20
            yield judged("multipart", lambda: trials.multipart(store, least))
            yield judged("abort", lambda: trials.abort(store), refused="warning")
            yield judged("checksum", lambda: trials.checksum(store), refused="warning")
        yield judged("copy", trials.copy, refused="warning")
        yield judged("round_trip", lambda: trials.round_trip(trials.small))
        rate = (self.size_bytes, self._question.grace_s, self._question.saving_s)
        yield judged("upload_rate", lambda: trials.upload_rate(*rate))
        yield judged("delete", trials.delete, refused="warning")

    def _read_only(self, names: list[str]) -> Iterator[Verdict]:
        """What is left to find out where nothing can be written."""
        if names:
            yield judged("get", lambda: self._read(names[0]))
            yield judged("round_trip", lambda: self._trials.round_trip(names[0]))

    def _read(self, path: str) -> Verdict:
        size = len(self._fs.cat_file(path, 0, 4096))
        return Verdict(check="get", level="ok", text=f"{size} bytes read of {path}: what is there can be restored")

    def _listing(self, names: list[str]) -> tuple[Verdict, bool]:
        """The verdict, and whether it is no use to go on."""
        over: list[bool] = []

        def look() -> Verdict:
            try:
                names.extend(probes.some_names(self._fs, self._root))
            except ObjectNotFoundError:
                return Verdict(check="list", level="ok", text="nothing is stored there yet", facts={"entries": 0})
            except BackendError as error:
                # Without a status, nobody has answered: no connection, or a certificate that is not trusted.
                unanswered = self._connection.endpoint is not None and not getattr(error, "status", 0)
                if unanswered or isinstance(error, BucketNotFoundError | TransientBackendError):
                    over.append(True)
                raise
            return Verdict(
                check="list", level="ok", text=f"{len(names)} entries or more", facts={"entries": len(names)}
            )

        verdict = judged("list", look)
        return verdict, bool(over)

    def _look_at_runs(self, names: list[str]) -> None:
        """How large a checkpoint is here, and what a run here knows of the store; as far as can be seen, in a few runs."""
        for run in self._runs(names):
            with contextlib.suppress(BackendError, ManifestError, CheckpointNotFoundError):
                if self._recorded is None:
                    self._recorded = run.record.create_only
                stems = run.stems()
                newest = run.manifest(stems[-1]) if stems else None
                if self._question.size_bytes is None and isinstance(newest, Manifest):
                    self.size_bytes = max(self.size_bytes or 0, newest.size_bytes)

    def _runs(self, names: list[str]) -> Iterator[RunDirectory]:
        """The run here, or those one level below."""
        below = [name.rstrip("/") for name in names if name.endswith("/")][:_RUNS]
        places = [(self._url, self._root), *((f"{self._url}/{name.rsplit('/', 1)[-1]}", name) for name in below)]
        for url, root in places:
            with contextlib.suppress(BackendError, ManifestError, CheckpointNotFoundError, ConfigError):
                run = RunDirectory.open(url, fs=self._fs, root=root)
                yield run
                if root == self._root:
                    return

    def _stale_uploads(self) -> Verdict:
        uploads = [upload for upload in self._fs.list_uploads(self._root) if not self._is_dropped(upload)]
        ages = [wall_s() - upload.started_s for upload in uploads if upload.started_s is not None]
        stale = [age for age in ages if age > _STALE_S]
        facts = {"uploads": len(uploads), "stale": len(stale), "oldest_s": max(ages, default=None)}
        if not stale:
            text = f"{len(uploads)} under way, none older than a day" if uploads else "no unfinished uploads"
            return Verdict(check="stale_uploads", level="ok", text=text, facts=facts)
        return Verdict(
            check="stale_uploads",
            level="warning",
            text=f"{len(stale)} unfinished uploads are older than a day, the oldest {duration_text(max(stale))}: their parts are paid for",
            advice="`ckptmgr gc RUN` shows those of a run, and with --yes removes them",
            facts=facts,
        )

    def _is_dropped(self, upload: PendingUpload) -> bool:
        """Abort an upload that a doctor that was killed has left; whether it was one."""
        folder = upload.path[len(self._root) :].strip("/").partition("/")[0]
        age_s = 0.0 if upload.started_s is None else wall_s() - upload.started_s
        if not layout.is_doctors(folder) or age_s < _LEFT_OVER_S:
            return False
        with contextlib.suppress(BackendError):
            self._fs.abort_upload(upload.path, upload.upload_id)
        return True

    def _bucket(self) -> Iterator[Verdict]:
        try:
            known = self._fs.bucket_facts(self._root)
        except BackendError as error:
            yield Verdict(check="versioning", level="unknown", text=error.message, advice=error.hint)
            return
        yield surroundings.versioning(known, self._fs.kind)
        yield surroundings.lifecycle(known)

    def _left_overs(self, names: list[str]) -> Verdict | None:
        """Remove what a doctor that was killed has left; None if there was nothing."""
        tails = (name.rstrip("/") for name in names)
        old = [name for name in tails if layout.is_doctors(name.rsplit("/", 1)[-1]) and self._is_old(name)]
        if not old:
            return None

        def remove() -> Verdict:
            for name in old:
                self._fs.rm(name, recursive=True)
            text = f"removed what {len(old)} examinations that were killed have left"
            return Verdict(check="left_overs", level="ok", text=text)

        return judged("left_overs", remove, refused="warning")

    def _is_old(self, path: str) -> bool:
        found = self._fs.find(path, detail=True)
        assert isinstance(found, dict)
        times = [record.get("mtime") for record in found.values()]
        return all(seconds is not None and wall_s() - seconds > _LEFT_OVER_S for seconds in times)

    def cleaned_up(self) -> Verdict | None:
        """Remove all that was written, here and there; what could not be is said."""
        self._scratch.cleanup()
        if not self._is_tried:
            return None
        try:
            self._trials.clean_up()
        except BackendError as error:
            if not self._trials.written:
                return None
            where = f"{self._url}/{self._trials.place.rsplit('/', 1)[-1]}"
            text = f"what was written for this is still at {where}: {error.message}"
            return Verdict(check="clean_up", level="warning", text=text, advice=error.hint or "remove it by hand")
        for folder in self._missing:
            with contextlib.suppress(OSError):
                folder.rmdir()
        return None


def _missing_folders(fs: Backend, root: str) -> list[Path]:
    """The folders of a local disk that are only made for the examination, deepest first."""
    if not fs.capabilities.is_local:
        return []
    path = Path(root)
    return [folder for folder in (path, *path.parents) if not folder.exists()]
