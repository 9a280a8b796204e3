"""CheckpointManager: the composition root. It joins state, local tier, uploader, retention and resume; each of them does its own work."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from ckptmgr.backends.base import Backend
from ckptmgr.backends.registry import normalize_url
from ckptmgr.backends.retry import PATIENT, RetryPolicy
from ckptmgr.core.conditions import Conditions, drift_names
from ckptmgr.core.errors import CkptmgrError, ConflictError
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.policies import Moment, SavePolicy, StepEnded
from ckptmgr.core.retention import KeepLast, RetentionRule
from ckptmgr.run.conditions import refused_by_environment
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.training.beginning import begin_session, lost_bests
from ckptmgr.training.checking import PIECES_HINT, require, require_arguments
from ckptmgr.training.choosing import Chooser
from ckptmgr.training.conditions import Described
from ckptmgr.training.deciding import Decisions, urgent_reasons
from ckptmgr.training.ending import leave, say_what_is_left
from ckptmgr.training.parent import parent_of
from ckptmgr.training.places import local_dir_of, open_places
from ckptmgr.training.preemption import Preemption
from ckptmgr.training.ranks import is_main_process
from ckptmgr.training.report import CloseReport, ManagerStatus
from ckptmgr.training.restoring import Restored, Restoring
from ckptmgr.training.saving import Facts, Saver
from ckptmgr.training.session import Session
from ckptmgr.training.settings import Settings
from ckptmgr.transfer.alarm import FailureBudget
from ckptmgr.transfer.ending import LeftS, no_limit
from ckptmgr.transfer.queue import QueueRules

_log = logging.getLogger(__name__)

TRANSFER_ENV = "CKPTMGR_TRANSFER"


class CheckpointManager:
    """Saves the training state of one run locally, uploads it in the background, and restores it.

    Nothing is touched before the first call that needs it. `save` and `begin` do nothing on ranks other than 0, and use no
    collective (I11). `restore`, `resume_path` and `newer_than` are collectives once torch.distributed is set up: call them on all ranks. Rank 0
    chooses, all have the same checkpoint, and an error of one rank is raised on all. Use it as a context manager, or call `close`: it waits for the uploads.

    A save costs the training thread one copy into host memory; a thread writes and commits it locally, and a process of its own uploads it. That
    process outlives the trainer, however it dies, for `linger_s`.

    Args:
        url: the run, `s3://bucket/exp/run`, `oss://…`, or a directory.
        local_dir: the local tier; by default CKPTMGR_LOCAL_DIR, else `.ckptmgr/<run>` in the working directory. It must be on a
            local disk with room for two checkpoints.
        save: when to save, for `SaveModelCallback` and `should_save`.
        keep: what retention keeps in the store, applied after each commit; None keeps everything.
        keep_local: what to keep of uploaded checkpoints in the local tier.
        on_existing: what a start without restore does on a run that has commits: `refuse` (ConflictError), or `new-lineage`.
        on_save_error: what a save that fails does: `log` it, count it in `status()` and let training go on (I9), or `raise`: it, or the next save
            after one that failed in the background.
        queue: how much may wait for the store, and what a full disk, queue or writer means; see `QueueRules`.
        failures: when uploads have failed for so long that it must be said again, or training should stop; see `FailureBudget`.
        preemption: what tells that this machine is about to go. A plain loop gives one and looks at `should_save` and `should_stop` at each step;
            `SaveModelCallback` makes its own if there is none.
        strict: a program whose saves are not all in the store in the end exits with 6.
        transfer: where uploads run: in a `process` of their own, or in a `thread` of this one; by default CKPTMGR_TRANSFER, else `process`.
        linger_s: how long the transfer process goes on when this one is gone; 0: not at all.
        close_timeout_s: how long `close` waits for uploads; so does the end of a program that does not call it, and with ranks on several machines
            a restore, for what waits in their local tiers.
        retry: how patient an upload is with the store.
        retry_after_s: how long an upload that was given up waits for another try, unless something new is saved.
        wrap_backend: puts a backend of yours around the store's, for throttling or for tests with faults. A lambda, or a class of the main module,
            keeps uploads in this process.
        prometheus: a file to keep current for Prometheus' textfile collector, besides `metrics.jsonl` in the local tier.
        refuse_drift: what must be as it was when a checkpoint is restored, besides what CKPTMGR_REFUSE_DRIFT names: `world_size`, `batch_size`,
            `dataset_fingerprint`, `versions`, `versions.torch`, `pieces.optimizer`, …, by the fields of `ckptmgr.Conditions`.
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
        queue: QueueRules = QueueRules(),  # noqa: B008 - frozen value
        failures: FailureBudget = FailureBudget(),  # noqa: B008 - frozen value
        preemption: Preemption | None = None,
        strict: bool = False,
        transfer: Literal["process", "thread"] | None = None,
        linger_s: float = 300.0,
        close_timeout_s: float = 600.0,
        retry: RetryPolicy = PATIENT,
        retry_after_s: float = 30.0,
        wrap_backend: Callable[[Backend], Backend] | None = None,
        prometheus: str | os.PathLike[str] | None = None,
        refuse_drift: Sequence[str] = (),
    ) -> None:
        require_arguments(url=url, local_dir=local_dir or ".", save=save, preemption=preemption)
        self._settings = Settings(
            keep=keep,
            keep_local=keep_local,
            on_existing=on_existing,
            on_save_error=on_save_error,
            queue=queue,
            failures=failures,
            strict=strict,
            transfer=transfer or os.environ.get(TRANSFER_ENV) or "process",
            linger_s=linger_s,
            close_timeout_s=close_timeout_s,
            retry=retry,
            retry_after_s=retry_after_s,
            wrap_backend=wrap_backend,
            prometheus=None if prometheus is None else Path(os.path.abspath(prometheus)),
        )
        self.url = normalize_url(url)
        self.local_dir = local_dir_of(self.url, local_dir)
        self.save_policy = save
        self.preemption = preemption
        self.strict = strict
        self._stop = threading.Event()
        self._described = Described()
        self._decisions = Decisions()
        self._restoring = Restoring(
            Chooser(
                self._open,
                self.local_dir,
                url=self.url,
                new_lineage=self._settings.new_lineage,
                drain_s=close_timeout_s,
            ),
            self.local_dir,
            refused=drift_names(refuse_drift) | refused_by_environment(),
            described=self._described,
            decisions=self._decisions,
            refuse_late=self._refuse_late,
        )
        self._session: Session | None = None

    # --- restoring --------------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[str, Any],
        selector: str = "latest",
        *,
        strict: bool = True,
        refuse_drift: Sequence[str] = (),
    ) -> Restored | None:
        """Load a checkpoint into `state` in place, the random states included; None on a run without any data.

        Every byte is verified before anything is loaded (I5). The attempt that this process claims then descends from it. What came back, what
        did not, and what training runs under now that was not so before, is in the report, and logged.

        Args:
            state: name -> object with `load_state_dict`, or a plain value (found in `report.values`), as given to `save`.
            selector: `latest`, a step, `best:METRIC`, `tag:NAME`, `id:ID`. `latest` means the checkpoint that `ckptmgr resume RUN SELECTOR --
                COMMAND` has named and put on disk for this process, if there is one.
            strict: refuse a checkpoint that lacks a piece of `state`.
            refuse_drift: what must be as it was, besides what the manager refuses.

        Raises:
            ConflictError: an attempt is already claimed: restore before the first save.
            CkptmgrError: as `ckptmgr.run.resume.resume`; nothing was loaded.
            DriftError: something that was to be refused is not as it was; nothing was loaded.
            IncompatibleStateError: the checkpoint does not fit; `state` may be partly loaded.
        """
        return self._restoring.restore(state, selector, strict=strict, refuse_drift=refuse_drift)

    def resume_path(self, selector: str = "latest") -> Path | None:
        """Put a checkpoint into a directory of its own, verified, for a trainer to load; None on a run without any data.

        The directory stays until this process asks again, or another one does after its end. What `describe` was told before is compared with
        the checkpoint's conditions: differences are logged, or refused. So is the number of ranks, if a process group is set up or a launcher has set
        WORLD_SIZE: else the trainer may start them later, and the callback for Hugging Face's or Lightning's Trainer compares when training begins.

        Raises:
            ConflictError, CkptmgrError, DriftError: as `restore`.
        """
        return self._restoring.path(selector)

    def newer_than(self, directory: str | os.PathLike[str]) -> Path | None:
        """What to resume from instead of `directory`, put on disk as by `resume_path`; None if rank 0's `directory` is right.

        Within `ckptmgr resume RUN -- COMMAND`, CKPTMGR_RESUME_FROM is what was the newest, or was asked for, when COMMAND began. A process that COMMAND
        starts again (`torchrun --max-restarts`) finds the same path there: what was saved since then is the one to go on from.
        """
        return self._restoring.newer_than(Path(os.path.abspath(directory)))

    # --- saving -----------------------------------------------------------------------------------------------------------

    def begin(self, *, resume_from: Path | None = None, expected_bytes: int | None = None) -> None:
        """Claim an attempt of the run, and start draining what earlier processes left. Called by the first `should_save` of a step, or save, if not
        before.

        Args:
            resume_from: the directory that training resumed from, made by `ckptmgr resume` or `resume_path`; or a trainer's own, which counts if a
                checkpoint of the run holds the same bytes.
            expected_bytes: about what one checkpoint will take; a disk or a memory that is too small for it is warned about.

        Raises:
            ConflictError: the run has commits and nothing of it was restored (I12), another process uses the local tier, or that is another
                run's; or this manager is closed. Nothing was changed.
            BackendError: the store could not be asked: a start that cannot look does not begin from scratch (I7).
        """
        if self._session is not None and self._session.is_closed:
            raise ConflictError(
                f"the manager of {self.url} is closed", hint="make a new one to save again: it is of one training"
            )
        if self._session is not None or not is_main_process():
            return
        run, tier = self._open()
        if resume_from is not None:
            self._restoring.parent = parent_of(resume_from, run, tier)
        self._session = begin_session(
            run,
            tier,
            self._restoring.parent,
            settings=self._settings,
            stop=self._stop,
            expected_bytes=expected_bytes,
        )
        for warning in self.warnings:
            _log.warning("%s", warning)

    @property
    def warnings(self) -> Sequence[str]:
        """What is allowed in what this manager was told to do, and hardly meant; `begin` logs it."""
        return lost_bests(self.save_policy, self._settings.keep)

    @property
    def is_restored(self) -> bool:
        """Whether `restore` or `resume_path` of this manager has brought a checkpoint."""
        return self._restoring.parent.restored

    @property
    def restored_manifest(self) -> Manifest | None:
        """Of the checkpoint that this process goes on from: known after `restore` or `resume_path`, or after a `begin` that was told a directory."""
        return self._restoring.parent.manifest

    @property
    def refused_drift(self) -> frozenset[str]:
        """What must be as it was when a checkpoint is restored."""
        return self._restoring.refused

    def should_save(self, moment: Moment) -> tuple[str, ...]:
        """Why to save now, by the save policy, or because this machine is about to go; empty if not. For a plain loop; trainers use
        `SaveModelCallback`.

        What the policy remembers is saved and restored with the state, so that a resumed loop decides as an uninterrupted one. With a `preemption`
        and several ranks, call it on all of them: they agree here.

        Args:
            moment: `StepEnded(step=…)`, `Evaluated(step=…, metrics=…)` or `EpochEnded(step=…, epoch=…)`.

        Raises:
            ConflictError, BackendError: see `begin`.
        """
        if self._session is None and isinstance(moment, StepEnded):
            # Training has begun. If it dies before its first save, the next start must know that a rewind was meant, and a start that would be
            # refused is refused now.
            self.begin()
        urgent = urgent_reasons(self.preemption) if isinstance(moment, StepEnded) else ()
        return (*self._decisions.ask(self.save_policy, moment), *urgent)

    @property
    def should_stop(self) -> str | None:
        """Why training should end after this step: this machine is about to go, or uploads have failed for too long (`failures`); None if it
        should not."""
        notice = None if self.preemption is None else self.preemption.notice
        if notice is not None:
            return notice.source
        return None if self._session is None else self._session.why_stop()

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
        metric_modes: Mapping[str, str] | None = None,
        wait: bool = False,
    ) -> str | None:
        """Save `state`: copied before this returns, committed to the local tier and uploaded in the background.

        Blocks for the copy, and, when the save before it is still being written, for that (`QueueRules.when_busy`). A save that fails later (a full
        disk, say) leaves nothing behind but the error, logged and counted; earlier checkpoints are untouched, and training goes on.

        Args:
            step: the optimizer step.
            state: name -> object with `state_dict`, or a plain tree of tensors and values; one file each. The random states are added.
            reasons: why; `requested` if none. One of a preemption (`sigterm`, …) makes it an emergency: it is waited for, and uploaded first.
            wait: return after the local commit.

        Returns:
            The id that the checkpoint has or will have; None if nothing is saved: on ranks other than 0, when it was skipped, and after a failure
            that was logged.

        Raises:
            ConflictError: see `begin`; the manager is closed.
            BackendError: `begin` could not ask the store.
            ConfigError: `state` holds something that cannot be saved: a mistake in the program.
            CkptmgrError: with `on_save_error="raise"`, this save failed, or one before it did in the background.
        """
        require("state", state, Mapping, PIECES_HINT)
        pieces = self._decisions.with_memory(state)
        facts = Facts.checked(
            step, epoch=epoch, metrics=metrics, reasons=reasons, metric_modes=self._modes(metric_modes)
        )
        return self._save(
            facts, lambda saver, whole, urgent: saver.save(pieces, whole, urgent=urgent), pieces=pieces, wait=wait
        )

    def take(
        self,
        step: int,
        directory: str | os.PathLike[str],
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
        metric_modes: Mapping[str, str] | None = None,
        framework: Mapping[str, str] | None = None,
        final: bool = True,
        wait: bool = False,
    ) -> str | None:
        """As `save`, for files that a framework has written to `directory`: linked before this returns, so that they may be removed at once.

        Args:
            final: the framework never writes to these files again; False: they are copied.
            framework: what wrote them, for the manifest: `{"framework": "transformers", "transformers": "5.24.0"}`.
        """
        facts = Facts.checked(
            step,
            epoch=epoch,
            metrics=metrics,
            reasons=reasons,
            metric_modes=self._modes(metric_modes),
            framework=framework,
        )
        path = Path(os.path.abspath(directory))
        return self._save(
            facts, lambda saver, whole, urgent: saver.take(path, whole, final=final, urgent=urgent), wait=wait
        )

    def _save(
        self,
        facts: Facts,
        begin_to: Callable[[Saver, Facts, bool], str | None],
        *,
        pieces: Mapping[str, Any] | None = None,
        wait: bool,
    ) -> str | None:
        if not is_main_process():
            return None
        self.begin()
        assert self._session is not None
        return self._session.save(replace(facts, conditions=self._described.now(pieces)), begin_to, wait=wait)

    def reserve(self, state: Mapping[str, Any]) -> None:
        """Get the buffers for saves of `state` ready in the background, so that the first save, too, costs no more than a copy; warns when the
        memory or the disk is too small. Call it once the optimizer has its state."""
        if self._session is not None:
            self._session.reserve(state)

    def wait_saved(self, timeout_s: float | None = None) -> bool:
        """Wait until everything saved so far is committed locally, or has failed; False if that takes longer than `timeout_s`."""
        return True if self._session is None else self._session.saver.wait(timeout_s)

    def hurry(self, deadline_s: float | None = None) -> None:
        """This machine is about to go: uploads take the newest save first, an older one under way gives way, and nothing is cleaned up.

        Args:
            deadline_s: seconds left; for the log.
        """
        if self._session is not None:
            self._session.hurry(deadline_s)

    @property
    def conditions(self) -> Conditions:
        """What training runs under, as far as it is known: world size, versions of libraries, git commit, and what `describe` was told."""
        return self._described.now()

    def describe(self, conditions: Conditions) -> None:
        """Say what training runs under, such as its batch size. Each manifest carries it, and a resume compares it with what it runs under itself.

        May be called again; what is None in `conditions` stays as it is known already. What a piece of the state says about itself
        (`ResumableLoader`), and the classes of the pieces, need not be told.
        """
        require("conditions", conditions, Conditions, "give Conditions(batch_size=…)")
        self._described.add(conditions)

    # --- looking and ending -----------------------------------------------------------------------------------------------

    def list(self) -> list[Manifest]:
        """The committed checkpoints of the present lineage in the store, oldest first."""
        run, _ = self._open()
        return run.history().readable_chain()[::-1]

    def status(self) -> ManagerStatus:
        """What is pending, what failed, and whether a newer attempt has taken over. Reads the local tier only, never the store."""
        if self._session is None:
            return ManagerStatus(run=self.url, local_dir=str(self.local_dir))
        return self._session.status()

    def poll_errors(self) -> Sequence[CkptmgrError]:
        """What went wrong in the background since this was last called; it is logged already."""
        return [] if self._session is None else self._session.uploader.poll_errors()

    def close(self, timeout_s: float | None = None, *, left_s: LeftS = no_limit) -> CloseReport:
        """Finish the save under way and the uploads, then stop. Safe to call twice.

        Out of time, what is left is named in the report, stays in the local tier, and is gone on with by the transfer process for `linger_s`.
        KeyboardInterrupt ends the waiting, and the transfer process.

        Args:
            timeout_s: seconds to wait; None for `close_timeout_s`.
            left_s: asked while waiting, such as `Preemption.remaining_s`: how many seconds are left; the smaller of the two counts.

        Raises:
            CkptmgrError: with `on_save_error="raise"`, a save failed in the background; everything is closed.
        """
        return CloseReport() if self._session is None else self._session.close(timeout_s, left_s=left_s)

    def __enter__(self) -> CheckpointManager:  # noqa: PYI034 - typing.Self needs Python 3.11
        if self.preemption is not None:
            self.preemption.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        report, exit_code = leave(lambda left_s: self.close(left_s=left_s), self.preemption)
        say_what_is_left(self.url, self.local_dir, report.pending)
        exit_code = exit_code or (report.exit_code if self.strict else 0)
        if kind is None and exit_code:
            raise SystemExit(exit_code)

    # --- pieces -----------------------------------------------------------------------------------------------------------

    def _open(self, stop: threading.Event | None = None) -> tuple[RunDirectory, LocalTier]:
        settings = self._settings
        return open_places(
            self.url, self.local_dir, retry=settings.retry, stop=stop or self._stop, wrap_backend=settings.wrap_backend
        )

    def _modes(self, given: Mapping[str, str] | None) -> Mapping[str, str]:
        if given is not None:
            return given
        return {} if self.save_policy is None else self.save_policy.modes()

    def _refuse_late(self) -> None:
        if self._session is not None:
            raise ConflictError(
                "this process has already begun to save, so it cannot restore",
                hint="restore before the first save or train()",
            )
