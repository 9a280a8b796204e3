"""The half of `CheckpointManager` that restores: which checkpoint, when `ckptmgr resume` has chosen it, and what is done with its directory."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckptmgr.core.conditions import Conditions, drift_names
from ckptmgr.core.manifest import Manifest, encode_metric
from ckptmgr.core.policies import Memory
from ckptmgr.run.resume import Resumed
from ckptmgr.training import state as training_state
from ckptmgr.training.agreeing import with_all_ranks
from ckptmgr.training.checking import PIECES_HINT, require
from ckptmgr.training.choosing import Chooser, Chosen
from ckptmgr.training.conditions import Described, compare, compare_all, compare_or_refuse, log_report, with_drift
from ckptmgr.training.deciding import MEMORY, Decisions
from ckptmgr.training.parent import Parent
from ckptmgr.training.ranks import is_main_process

logger = logging.getLogger(__name__)


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
        chooser: finds checkpoints. With several ranks all methods are collectives, as its are.
        local_dir: the local tier.
        refused: drifts that are an error.
        described: what training runs under.
        decisions: get back what the checkpoint's save policy remembered.
        refuse_late: called on each rank first; raises when it is too late to restore.

    Attributes:
        parent: what the next attempt descends from.
    """

    def __init__(
        self,
        chooser: Chooser,
        local_dir: Path,
        *,
        refused: frozenset[str],
        described: Described,
        decisions: Decisions,
        refuse_late: Callable[[], None],
    ) -> None:
        self.parent = Parent()
        self.refused = refused
        self._chooser = chooser
        self._local_dir = local_dir
        self._described = described
        self._decisions = decisions
        self._refuse_late = refuse_late

    def restore(
        self, state: Mapping[str, Any], selector: str, *, strict: bool, refuse_drift: Sequence[str]
    ) -> Restored | None:
        """See `CheckpointManager.restore`."""

        def ready() -> tuple[Conditions, frozenset[str]]:
            self._refuse_late()
            require("state", state, Mapping, PIECES_HINT)
            return self._described.now(state), self.refused | drift_names(refuse_drift)

        now, refused = with_all_ranks(ready)
        chosen = self._choose(selector, now, refused)
        if chosen is None:
            return None
        resumed = chosen.resumed
        drifts = compare_all(resumed.manifest, now, refused)
        report, memory = with_all_ranks(lambda: load(resumed.directory, state, strict=strict))
        if memory is not None:
            self._decisions.memory = memory
        self.parent = Parent.of(resumed)
        # Every rank has loaded it by now.
        if chosen.is_own and resumed.directory.is_relative_to(self._local_dir):
            shutil.rmtree(resumed.directory.parent, ignore_errors=True)
        logger.info(
            "restored step %d (%s) from %s", resumed.manifest.step, resumed.manifest.id, resumed.source or "disk"
        )
        restored = Restored.of(resumed, with_drift(report, drifts))
        if is_main_process():
            log_report(restored.report)
            _note(chosen, restored)
        return restored

    def path(self, selector: str) -> Path | None:
        """See `CheckpointManager.resume_path`."""
        return self._path(selector, with_all_ranks(self._ready))

    def newer_than(self, directory: Path) -> Path | None:
        """See `CheckpointManager.newer_than`."""
        now = with_all_ranks(self._ready)
        return self._path("latest", now) if self._chooser.is_behind(directory) else None

    def _ready(self) -> Conditions:
        self._refuse_late()
        return self._described.before_training()

    def _path(self, selector: str, now: Conditions) -> Path | None:
        chosen = self._choose(selector, now, self.refused)
        if chosen is None:
            return None
        resumed = chosen.resumed
        self.parent = Parent.of(resumed)
        if is_main_process():
            drifts = compare(resumed.manifest, now)
            for each in drifts:
                logger.warning("changed: %s", each)
            # What the trainer restores from there, only the trainer knows.
            _note(chosen, Restored.of(resumed, training_state.RestoreReport(restored=(), drift=drifts)))
        return resumed.path

    def _choose(self, selector: str, now: Conditions, refused: frozenset[str]) -> Chosen | None:
        # Until it has succeeded: a program that goes on after a failed restore starts from scratch (I12).
        self.parent = Parent()

        def check(manifest: Manifest) -> None:
            compare_or_refuse(manifest, now, refused)

        return self._chooser.choose(selector, check)


def _note(chosen: Chosen, restored: Restored) -> None:
    if chosen.tier is not None:
        chosen.tier.note_restored(restored.as_document())


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
