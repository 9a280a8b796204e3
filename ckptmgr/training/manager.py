"""CheckpointManager: the composition root. It joins state, local tier, uploader, retention and resume; each of them does its own work."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ckptmgr.backends.base import Backend
from ckptmgr.backends.registry import normalize_url, open_store
from ckptmgr.backends.retry import PATIENT, RetryPolicy
from ckptmgr.core.errors import (
    CheckpointNotFoundError,
    CkptmgrError,
    ConfigError,
    ConflictError,
    NotCommittedError,
)
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.policies import Memory, Moment, SavePolicy
from ckptmgr.core.retention import KeepLast, RetentionRule
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.resume import Resumed, resume
from ckptmgr.run.tier import LocalTier
from ckptmgr.training.ranks import is_main_process
from ckptmgr.training.restoring import MEMORY, Restored, load, rewound_by_command
from ckptmgr.training.session import Parent, Retention, Session, begin_session, parent_of
from ckptmgr.transfer.uploader import UploadStatus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStatus:
    """One look at a manager: the run, the attempt, saves that failed with the last reason, and the uploads."""

    run: str
    local_dir: str
    attempt: int | None
    superseded: bool
    save_failures: int
    last_save_error: str
    uploads: UploadStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseReport:
    """What `close` left behind: `pending` ids stay in the local tier and are uploaded by the next start; `errors` say why."""

    pending: tuple[str, ...] = ()
    errors: tuple[CkptmgrError, ...] = ()


class CheckpointManager:
    """Saves the training state of one run locally, uploads it in the background, and restores it.

    Nothing is touched before the first call that needs it. `save` and `begin` do nothing on ranks other than 0, and use no
    collective (I11). Use it as a context manager, or call `close`: it waits for the uploads.

    Args:
        url: the run, `s3://bucket/exp/run`, `oss://…`, or a directory.
        local_dir: the local tier; by default CKPTMGR_LOCAL_DIR, else `.ckptmgr/<run>` in the working directory. It must be on a
            local disk with room for two checkpoints.
        save: when to save, for `SaveModelCallback` and `should_save`.
        keep: what retention keeps in the store, applied after each commit; None keeps everything.
        keep_local: what to keep of uploaded checkpoints in the local tier.
        on_existing: what a start without restore does on a run that has commits: `refuse` (ConflictError), or `new-lineage`.
        on_save_error: what a save that fails does: `log` it, count it in `status()` and let training go on (I9), or `raise`.
        close_timeout_s: how long `close` waits for uploads; so does the end of a program that does not call it.
        retry: how patient an upload is with the store.
        wrap_backend: puts a backend of yours around the store's, for throttling or for tests with faults.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        local_dir: str | os.PathLike[str] | None = None,
        save: SavePolicy | None = None,
        keep: RetentionRule | None = None,
        keep_local: RetentionRule = KeepLast(1),  # noqa: B008 - frozen value
        on_existing: Literal["refuse", "new-lineage"] = "refuse",
        on_save_error: Literal["log", "raise"] = "log",
        close_timeout_s: float = 600.0,
        retry: RetryPolicy = PATIENT,
        wrap_backend: Callable[[Backend], Backend] = lambda backend: backend,
    ) -> None:
        if on_existing not in ("refuse", "new-lineage"):
            raise ConfigError(f"on_existing={on_existing!r} is not known", hint="use 'refuse' or 'new-lineage'")
        if on_save_error not in ("log", "raise"):
            raise ConfigError(f"on_save_error={on_save_error!r} is not known", hint="use 'log' or 'raise'")
        self.url = normalize_url(url)
        name = self.url.rsplit("/", 1)[-1]
        self.local_dir = Path(os.path.abspath(local_dir or os.environ.get("CKPTMGR_LOCAL_DIR") or f".ckptmgr/{name}"))
        self._refuse_one_place()
        self.save_policy = save
        self._retention = Retention(store=keep, local=keep_local)
        self._on_existing = on_existing
        self._on_save_error = on_save_error
        self._save_failures = 0
        self._last_save_error = ""
        self._close_timeout_s = close_timeout_s
        self._retry = retry
        self._wrap_backend = wrap_backend
        self._stop = threading.Event()
        self._parent = Parent()
        self._session: Session | None = None
        self._closed = False
        self._memory: Memory = {}

    # --- restoring --------------------------------------------------------------------------------------------------------

    def restore(self, state: Mapping[str, Any], selector: str = "latest", *, strict: bool = True) -> Restored | None:
        """Load a checkpoint into `state` in place, the random states included; None on a run without any data.

        Every byte is verified before anything is loaded (I5). The attempt that this process claims then descends from it.

        Args:
            state: name -> object with `load_state_dict`, or a plain value (found in `report.values`), as given to `save`.
            selector: `latest`, a step, `best:METRIC`, `tag:NAME`, `id:ID`. `latest` means the checkpoint that `ckptmgr resume RUN SELECTOR --
                COMMAND` has named and put on disk for this process, if there is one.
            strict: refuse a checkpoint that lacks a piece of `state`.

        Raises:
            ConflictError: an attempt is already claimed: restore before the first save.
            CkptmgrError: as `ckptmgr.run.resume.resume`; nothing was loaded.
            IncompatibleStateError: the checkpoint does not fit; `state` may be partly loaded.
        """
        resumed = self._fetch(selector)
        if resumed is None:
            return None
        report, memory = load(resumed.directory, state, strict=strict)
        self._memory = self._memory if memory is None else memory
        self._parent = _parent(resumed)
        if resumed.directory.is_relative_to(self.local_dir):
            shutil.rmtree(resumed.directory.parent, ignore_errors=True)
        logger.info(
            "restored step %d (%s) from %s", resumed.manifest.step, resumed.manifest.id, resumed.source or "disk"
        )
        return Restored.of(resumed, report)

    def resume_path(self, selector: str = "latest") -> Path | None:
        """Put a checkpoint into a directory of its own, verified, for a trainer to load; None on a run without any data.

        The directory stays until this process asks again, or another one does after its end.
        """
        resumed = self._fetch(selector)
        if resumed is None:
            return None
        self._parent = _parent(resumed)
        return resumed.path

    def _fetch(self, selector: str) -> Resumed | None:
        if self._session is not None:
            raise ConflictError(
                "this process has already begun to save, so it cannot restore",
                hint="restore before the first save or train()",
            )
        chosen = parse_selector(selector)
        # Until it has succeeded: a program that goes on after a failed restore starts from scratch (I12).
        self._parent = Parent()
        run, tier = self._open()
        if not chosen.is_explicit and (named := rewound_by_command(run)) is not None:
            return named
        try:
            resumed = resume(run, chosen, under=tier.resume_folder(), tier=tier)
        except CheckpointNotFoundError as exc:
            if not getattr(exc, "empty", False):
                raise
            logger.info("%s has no checkpoint yet: starting from scratch", self.url)
            return None
        except NotCommittedError as exc:
            if self._on_existing != "new-lineage":
                raise
            logger.warning("%s: starting a new lineage", exc)
            return None
        return resumed

    # --- saving -----------------------------------------------------------------------------------------------------------

    def begin(self, *, resume_from: Path | None = None) -> None:
        """Claim an attempt of the run, and start draining what earlier processes left. Called by the first save if not before.

        Args:
            resume_from: the directory that training resumed from, made by `ckptmgr resume` or `resume_path`.

        Raises:
            ConflictError: the run has commits and nothing of it was restored (I12), another process uses the local tier, or that is another
                run's; nothing was changed.
            BackendError: the store could not be asked: a start that cannot look does not begin from scratch (I7).
        """
        if self._session is not None or not is_main_process():
            return
        run, tier = self._open()
        if resume_from is not None:
            self._parent = parent_of(resume_from, run, tier)
        self._session = begin_session(
            run,
            tier,
            self._parent,
            new_lineage=self._on_existing == "new-lineage",
            retention=self._retention,
            stop=self._stop,
            exit_timeout_s=self._close_timeout_s,
        )

    def should_save(self, moment: Moment) -> tuple[str, ...]:
        """Why to save now, by the save policy; empty if not. For a plain loop; trainers use `SaveModelCallback`.

        What the policy remembers is saved and restored with the state, so that a resumed loop decides as an uninterrupted one.

        Args:
            moment: `StepEnded(step=…)`, `Evaluated(step=…, metrics=…)` or `EpochEnded(step=…, epoch=…)`.
        """
        if self.save_policy is None:
            return ()
        decision = self.save_policy.decide(moment, self._memory)
        self._memory = decision.memory
        for notice in decision.notices:
            logger.warning("%s", notice)
        return decision.reasons

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
        metric_modes: Mapping[str, str] | None = None,
    ) -> str | None:
        """Commit `state` to the local tier and queue its upload.

        Blocks for the copy, the write and the fsync. A failure (a full disk, say) leaves nothing behind but the error; earlier checkpoints
        are untouched, and training goes on unless `on_save_error="raise"`.

        Args:
            step: the optimizer step.
            state: name -> object with `state_dict`, or a plain tree of tensors and values; one file each. The random states are added.
            reasons: why; `requested` if none.

        Returns:
            The id; None if nothing was saved: on ranks other than 0, and after a failure that was logged.

        Raises:
            ConflictError: see `begin`; the manager is closed.
            BackendError: `begin` could not ask the store.
            ConfigError: `state` holds something that cannot be saved: a mistake in the program.
            CkptmgrError: with `on_save_error="raise"`, nothing was saved.
        """
        if not is_main_process():
            return None
        self.begin()
        if self._session is None or self._closed:
            raise ConflictError(f"the manager of {self.url} is closed", hint="make a new one to save again")
        try:
            return self._session.save(
                step,
                {**state, MEMORY: dict(self._memory)} if self._memory else state,
                epoch=epoch,
                metrics=metrics or {},
                reasons=reasons or ("requested",),
                metric_modes=self._modes() if metric_modes is None else metric_modes,
            )
        except CkptmgrError as exc:
            self._save_failures += 1
            self._last_save_error = str(exc)
            if self._on_save_error == "raise" or isinstance(exc, ConfigError):
                raise
            logger.error("step %d was not saved (failure %d), training goes on: %s", step, self._save_failures, exc)
            return None

    # --- looking and ending -----------------------------------------------------------------------------------------------

    def list(self) -> list[Manifest]:
        """The committed checkpoints of the present lineage in the store, oldest first."""
        run, _ = self._open()
        return run.history().readable_chain()[::-1]

    def status(self) -> ManagerStatus:
        """What is pending, what failed, and whether a newer attempt has taken over. Reads the local tier only, never the store."""
        session = self._session
        return ManagerStatus(
            run=self.url,
            local_dir=str(self.local_dir),
            attempt=None if session is None else session.attempt,
            superseded=session is not None and session.superseded,
            save_failures=self._save_failures,
            last_save_error=self._last_save_error,
            uploads=UploadStatus() if session is None else session.uploader.status(),
        )

    def poll_errors(self) -> Sequence[CkptmgrError]:
        """What went wrong in the background since this was last called."""
        return [] if self._session is None else self._session.uploader.poll_errors()

    def close(self, timeout_s: float | None = None) -> CloseReport:
        """Wait for pending uploads, then stop. Safe to call twice; logs nothing: the caller says what is left.

        Args:
            timeout_s: seconds to wait; None for `close_timeout_s`.
        """
        if self._session is None or self._closed:
            return CloseReport()
        self._closed = True
        pending = self._session.close(self._close_timeout_s if timeout_s is None else timeout_s)
        errors = tuple(self._session.uploader.poll_errors())
        return CloseReport(pending=tuple(str(stem) for stem in pending), errors=errors)

    def __enter__(self) -> CheckpointManager:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report = self.close()
        for problem in report.errors:
            logger.error("%s", problem)
        if report.pending:
            left = ", ".join(report.pending)
            logger.warning("not in %s yet: %s - run `ckptmgr drain %s`", self.url, left, self.local_dir)

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _open(self) -> tuple[RunDirectory, LocalTier]:
        """The run in the store and the local tier, both made if need be, and sure to be the same run.

        Raises:
            ConflictError: the local directory is another run's; nothing was made (K100).
        """
        fs, root = open_store(self.url, policy=self._retry, stop=self._stop)
        fs = self._wrap_backend(fs)
        known = LocalTier.find(self.local_dir)
        if known is None:
            run = RunDirectory.open_or_create(self.url, fs=fs, root=root)
        elif self.url in known.targets():
            # Saves in the tier are meant for this very place: where the store lost the run, it is made again as the same one.
            run = RunDirectory.open_or_create(self.url, uuid=known.run.uuid, fs=fs, root=root)
        else:
            run = self._run_of(known, fs, root)
        return run, LocalTier.open_or_create(self.local_dir, uuid=run.uuid)

    def _run_of(self, tier: LocalTier, fs: Backend, root: str) -> RunDirectory:
        """The run in the store; a new one would take over what another run left in `tier`."""
        try:
            return RunDirectory.open(self.url, fs=fs, root=root)
        except CheckpointNotFoundError as exc:
            raise ConflictError(
                f"{tier.root} is the local tier of run {tier.run.uuid}, and there is no such run at {self.url}",
                hint="give another local directory, or the URL of that run; nothing was changed",
            ) from exc

    def _refuse_one_place(self) -> None:
        """Raise ConfigError if the run lies in the local directory, or around it: what retention removes from one would be gone from both."""
        if not self.url.startswith("file://"):
            return
        store, local = (Path(os.path.realpath(path)) for path in (self.url.removeprefix("file://"), self.local_dir))
        if store == local or store in local.parents or local in store.parents:
            raise ConfigError(
                f"the local directory {local} and the run {store} are not apart",
                hint="give local_dir another place, on a local disk",
            )

    def _modes(self) -> Mapping[str, str]:
        return {} if self.save_policy is None else self.save_policy.modes()


def _parent(resumed: Resumed) -> Parent:
    return Parent(stem=resumed.manifest.stem, how=resumed.how, restored=True)
