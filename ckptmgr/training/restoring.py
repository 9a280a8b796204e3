"""The half of `CheckpointManager` that restores: which checkpoint, when `ckptmgr resume` has chosen it, and what is done with its directory."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptmgr.core.conditions import Conditions
from ckptmgr.core.errors import CheckpointNotFoundError, IntegrityError, NotCommittedError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest, encode_metric
from ckptmgr.core.policies import Memory
from ckptmgr.core.records import AttemptRecord
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.launch import ATTEMPT_ENV, RESUME_ENV
from ckptmgr.run.resume import Resumed, resume
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import verify_directory
from ckptmgr.training import state as training_state
from ckptmgr.training.conditions import compare, compare_or_refuse, log_report, unknown, with_drift
from ckptmgr.training.parent import Parent
from ckptmgr.training.ranks import is_main_process

logger = logging.getLogger(__name__)
MEMORY = "save_policy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """What `restore` put back.

    Attributes:
        id: the checkpoint.
        step: its step.
        epoch: its epoch, fractional; None if unknown.
        metrics: its metrics.
        source: where the bytes came from, `local` or `remote`; None when they were already there.
        report: each piece restored, missing or unexpected, and the plain values.
        skipped: newer checkpoints that could not be used, as (id, why).
    """

    id: str
    step: int
    epoch: float | None
    metrics: Mapping[str, float]
    source: str | None
    report: training_state.RestoreReport
    skipped: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, resumed: Resumed, report: training_state.RestoreReport) -> Restored:
        manifest = resumed.manifest
        return cls(
            id=manifest.id,
            step=manifest.step,
            epoch=manifest.epoch,
            metrics=manifest.metrics,
            source=resumed.source,
            report=report,
            skipped=tuple((str(skipped.stem), skipped.why) for skipped in resumed.skipped),
        )

    def as_document(self) -> dict[str, Any]:
        """JSON values; of the report, `values` are left out."""
        return {
            "id": self.id,
            "step": self.step,
            "epoch": self.epoch,
            "metrics": {name: encode_metric(value) for name, value in self.metrics.items()},
            "source": self.source,
            "skipped": [{"id": stem, "why": why} for stem, why in self.skipped],
            "report": self.report.as_document(),
        }


class Restoring:
    """How one manager gets at checkpoints, and what it has restored.

    Args:
        open_places: opens the run and the local tier, which is at `local_dir`.
        new_lineage: data without a commit is no reason to stop.
        refused: drifts that are an error.

    Attributes:
        parent: what the next attempt descends from.
        memory: what a plain loop's save policy remembers.
    """

    def __init__(
        self,
        open_places: Callable[[], tuple[RunDirectory, LocalTier]],
        local_dir: Path,
        *,
        new_lineage: bool,
        refused: frozenset[str],
    ) -> None:
        self.parent = Parent()
        self.memory: Memory = {}
        self.refused = refused
        self._open = open_places
        self._local_dir = local_dir
        self._new_lineage = new_lineage

    def restore(
        self, state: Mapping[str, Any], selector: str, *, strict: bool, now: Conditions, refused: frozenset[str]
    ) -> Restored | None:
        """See `CheckpointManager.restore`.

        Args:
            now: what training runs under, `state` included.
            refused: drifts that are an error besides those of the manager.
        """
        refused |= self.refused
        fetched = self._fetch(selector, lambda manifest: _refuse(manifest, now, refused))
        if fetched is None:
            return None
        resumed, tier = fetched
        for name in unknown(resumed.manifest, now, refused):
            logger.warning("%s: a drift of %s would be refused, but it cannot be compared", resumed.manifest.id, name)
        drifts = compare(resumed.manifest, now)
        report, memory = load(resumed.directory, state, strict=strict)
        self.memory = self.memory if memory is None else memory
        self.parent = Parent.of(resumed)
        if resumed.directory.is_relative_to(self._local_dir):
            shutil.rmtree(resumed.directory.parent, ignore_errors=True)
        logger.info(
            "restored step %d (%s) from %s", resumed.manifest.step, resumed.manifest.id, resumed.source or "disk"
        )
        restored = Restored.of(resumed, with_drift(report, drifts))
        if is_main_process():
            log_report(restored.report)
            tier.note_restored(restored.as_document())
        return restored

    def path(self, selector: str, *, now: Conditions) -> Path | None:
        """See `CheckpointManager.resume_path`."""
        fetched = self._fetch(selector, lambda manifest: _refuse(manifest, now, self.refused))
        if fetched is None:
            return None
        resumed, tier = fetched
        self.parent = Parent.of(resumed)
        if is_main_process():
            drifts = compare(resumed.manifest, now)
            for each in drifts:
                logger.warning("changed: %s", each)
            # What the trainer restores from there, only the trainer knows.
            report = training_state.RestoreReport(restored=(), drift=drifts)
            tier.note_restored(Restored.of(resumed, report).as_document())
        return resumed.path

    def newer_than(self, directory: Path, *, now: Conditions) -> Path | None:
        """See `CheckpointManager.newer_than`."""
        named = os.environ.get(RESUME_ENV)
        if not named or Path(os.path.abspath(named)) != Path(os.path.abspath(directory)):
            return None
        try:
            sidecar = read_sidecar(directory)
        except CheckpointNotFoundError:
            return None
        run, tier = self._open()
        stem = sidecar.manifest.stem
        if sidecar.manifest.run_uuid != run.uuid or (
            sidecar.how == "explicit" and not _has_begun(run.attempts(), stem)
        ):
            return None
        chain = merged(*look(run, tier)).chain()
        if stem not in chain[1:]:
            return None
        logger.warning(
            "this process was started again: it goes on from %s, not from %s, which was the one to resume from at first",
            chain[0],
            stem,
        )
        return self.path("latest", now=now)

    def _fetch(self, selector: str, check: Callable[[Manifest], None]) -> tuple[Resumed, LocalTier] | None:
        chosen = parse_selector(selector)
        # Until it has succeeded: a program that goes on after a failed restore starts from scratch (I12).
        self.parent = Parent()
        run, tier = self._open()
        if not chosen.is_explicit and (named := rewound_by_command(run)) is not None:
            check(named.manifest)
            return named, tier
        try:
            return resume(run, chosen, under=tier.resume_folder(), tier=tier, check=check), tier
        except CheckpointNotFoundError as exc:
            if not getattr(exc, "empty", False):
                raise
            logger.info("%s has no checkpoint yet: starting from scratch", run.url)
        except NotCommittedError as exc:
            if not self._new_lineage:
                raise
            logger.warning("%s: starting a new lineage", exc)
        return None


def _has_begun(attempts: Mapping[int, AttemptRecord], stem: Stem) -> bool:
    """Whether an attempt has begun from `stem` since `ckptmgr resume` has put it on disk for COMMAND by an explicit selector."""
    chosen_at = os.environ.get(ATTEMPT_ENV, "")
    if chosen_at.isdecimal():
        return max(attempts, default=0) > int(chosen_at)
    # Set by hand, or by an older version: the last rewind of the present lineage was this one.
    record = attempts.get(max(attempts, default=0))
    while record is not None and record.how == "auto" and record.parent is not None:
        record = attempts.get(record.parent.attempt)
    return record is not None and record.how == "explicit" and record.parent == stem


def _refuse(manifest: Manifest, now: Conditions, refused: frozenset[str]) -> None:
    compare_or_refuse(manifest, now, refused)


def load(
    directory: Path, state: Mapping[str, Any], *, strict: bool
) -> tuple[training_state.RestoreReport, Memory | None]:
    """Load the pieces of `state` in place; also returns what a plain loop's save policy remembered, if it did."""
    remembers = (directory / f"{MEMORY}.json").is_file() and MEMORY not in state
    report = training_state.restore(directory, {**state, MEMORY: {}} if remembers else state, strict=strict)
    if not remembers:
        return report, None
    values = dict(report.values)
    memory: Memory = values.pop(MEMORY)
    restored = tuple(name for name in report.restored if name != MEMORY)
    return replace(report, restored=restored, values=values), memory


def rewound_by_command(run: RunDirectory) -> Resumed | None:
    """The checkpoint that `ckptmgr resume RUN SELECTOR -- COMMAND` named and put on disk for this process; None if there is none.

    Only for an explicit selector: an automatic one meant the newest, and that is what a restart within COMMAND should get as well. For the same
    reason a rewind counts once: when an attempt has begun from it, the newest of that lineage is the one to go on from.

    Raises:
        IntegrityError: the directory is not what was put there.
    """
    named = os.environ.get(RESUME_ENV)
    if not named:
        return None
    path = Path(os.path.abspath(named))
    try:
        sidecar = read_sidecar(path)
    except CheckpointNotFoundError:
        return None
    manifest = sidecar.manifest
    if sidecar.how != "explicit" or manifest.run_uuid != run.uuid:
        return None
    if _has_begun(run.attempts(), manifest.stem):
        return None
    _, damage = verify_directory(path)
    if damage:
        raise IntegrityError(
            f"{path} is no longer checkpoint {manifest.id}: {damage[0].file} {damage[0].why}",
            hint="run `ckptmgr resume` again with --replace",
        )
    directory = path.parent if path.is_file() else path
    return Resumed(path=path, directory=directory, manifest=manifest, source=None, how="explicit")
