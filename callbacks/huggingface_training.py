"""One training of Hugging Face's Trainer: what it goes on from, what is not as it was, and what a resume of it will need. Imports no transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ckptmgr.callbacks import huggingface
from ckptmgr.callbacks.huggingface_data import TrainingData, of_all_ranks, of_this_rank
from ckptmgr.callbacks.seams import TakingManager
from ckptmgr.core.conditions import Conditions
from ckptmgr.core.errors import IncompatibleStateError
from ckptmgr.core.policies import Memory
from ckptmgr.training.agreeing import on_all_ranks
from ckptmgr.training.arguments import continues_stopped
from ckptmgr.training.conditions import compare_all, log_report, with_drift
from ckptmgr.training.dataset_facts import DatasetFacts, dataset_facts
from ckptmgr.training.restore_report import RestoreReport

_log = logging.getLogger(__name__)


class Training:
    """What `SaveModelCallback` knows of the Trainer that calls it, from one `on_train_begin` to the end.

    Args:
        args: its TrainingArguments.
        state: its TrainerState; of a resumed training, that of the checkpoint.
        loader: its train_dataloader; None if the host does not bring it.
        optimizer: its optimizer, as accelerate has wrapped it.

    Attributes:
        output: where it writes.
        data: where in its data it is; None if there is no loader to look at.
        stopped: who had ended the training early, as the checkpoint tells; None if nobody had.
        restored: what came back of the checkpoint, as far as its files tell; None if it begins from scratch.
    """

    def __init__(self, args: Any, state: Any, loader: Any, optimizer: Any) -> None:
        self.output = huggingface.OutputDirectory(args)
        self._args = args
        self._saved = huggingface.entry_in(state)
        self._loader = loader
        self._optimizer = optimizer
        self._data_document: dict[str, Any] | None = None
        step = state.global_step
        self.data = None if loader is None else self._watched(step)
        self.stopped = huggingface.stopped_by(state) if step else None
        self.restored: RestoreReport | None = None

    @property
    def memory(self) -> Memory | None:
        """What the save policy remembered; None if the checkpoint has nothing of the kind."""
        memory = self._saved.get("memory")
        return memory if isinstance(memory, Mapping) else None

    def _watched(self, step: int) -> TrainingData | None:
        saved = self._saved.get("data")
        try:
            known = of_this_rank(saved) if isinstance(saved, Mapping) else None
            return TrainingData(self._loader, self._args, step=step, saved=known)
        except Exception as error:  # noqa: BLE001 - a loader is the user's code, and not knowing it ends no training (I9)
            _log.exception("where in its data the training is will not be saved: %r", error)
            return None

    # --- the beginning ----------------------------------------------------------------------------------------------------

    def begin(self, manager: TakingManager, state: Any, resume_from: Path | None, expected_bytes: int | None) -> None:
        """Claim an attempt, and compare what the training runs under with what the checkpoint was made under.

        Raises:
            ConflictError: it would abandon checkpoints of the run (I12).
            DriftError: something that was to be refused is not as it was. No step was run; the Trainer has loaded the checkpoint.
        """
        manager.describe(self.conditions())
        huggingface.begin(
            manager, self.output, state.global_step, resume_from=resume_from, expected_bytes=expected_bytes
        )
        manifest = manager.restored_manifest if state.global_step else None
        if manifest is None:
            return
        found = compare_all(manifest, manager.conditions, manager.refused_drift)
        parts = huggingface.parts_of([entry.path for entry in manifest.files], self._optimizer)
        report = RestoreReport(
            restored=tuple(name for name, there in parts.items() if there),
            missing=tuple(name for name, there in parts.items() if not there),
            notes=() if self.data is None else tuple(self.data.notes),
        )
        self.restored = with_drift(report, found)
        log_report(self.restored)

    def conditions(self) -> Conditions:
        """What the arguments and the loader say of what this training runs under."""
        args = self._args
        # Not what `state` says: that of a resumed training is the checkpoint's.
        facts = DatasetFacts() if self._loader is None else dataset_facts(self._loader)
        return Conditions(
            world_size=_number(getattr(args, "world_size", None)),
            batch_size=facts.batch_size or _number(getattr(args, "train_batch_size", None)),
            accumulation=_number(getattr(args, "gradient_accumulation_steps", None)),
            dataset_length=facts.dataset_length,
            dataset_fingerprint=facts.dataset_fingerprint,
        )

    def stays_ended(self, state: Any, *, continued: bool) -> bool:
        """Whether no step is to be run, because a callback had ended the training; says so.

        Args:
            continued: the program wants to go on with such a one.
        """
        if self.stopped is None:
            return False
        step, by = state.global_step, self.stopped
        if continues_stopped(continued):
            _log.warning("going on from step %d, where %s had ended the training", step, by)
            return False
        _log.warning(
            "already stopped (%s): step %d was the last, and no further one is run - to go on, give SaveModelCallback "
            "continue_stopped=True, or set CKPTMGR_CONTINUE_STOPPED=1",
            by,
            step,
        )
        return True

    def end_early(self) -> bool:
        """Have the Trainer find no data, so that it runs no step; False if it cannot be had to."""
        return self.data is not None and self.data.end_early()

    # --- while it goes on -------------------------------------------------------------------------------------------------

    def step_begins(self) -> list[IncompatibleStateError]:
        """At the first step after a resume, look whether its first batch is the expected one; why not, if it is not."""
        if self.data is None:
            return []
        before = self.data.proof
        self.data.step_begins()
        if self.data.proof == before:
            return []
        if self.restored is not None:
            self.restored = replace(self.restored, notes=(*self.restored.notes, f"first batch: {self.data.proof}"))
        if self.data.proof == "different":
            return [
                IncompatibleStateError(
                    "the first batch is not the one that the checkpoint expected: the resumed run does not equal an uninterrupted one",
                    hint="resume with the dataset, batch size, accumulation and preprocessing of the checkpoint",
                    piece="data",
                )
            ]
        _log.info("the first batch after the resume: %s", self.data.proof)
        return []

    def keep(self, state: Any, memory: Memory, *, interrupted: bool, at_edge: bool) -> None:
        """Have the Trainer's next save write what a resume needs. A collective with several ranks if `at_edge`.

        Args:
            interrupted: training ends for a reason that the next start gets over.
            at_edge: a save may be made at this moment.

        Raises:
            TypeError, ValueError: the memory is not JSON, which would end the training in the Trainer's save.
        """
        if self.data is not None and (at_edge or self._data_document is None):
            data, step = self.data, state.global_step
            told = partial(data.as_document, step, at_edge=at_edge)
            self._data_document = of_all_ranks(on_all_ranks(told)) if at_edge else told()
        entry: dict[str, Any] = {
            "memory": json.loads(json.dumps(dict(memory))),
            "ending": {"step": state.global_step, "max_steps": state.max_steps, "interrupted": interrupted},
        }
        if self._data_document is not None:
            entry["data"] = self._data_document
        huggingface.keep_entry(state, entry)

    def epoch_begins(self) -> None:
        """Before the Trainer makes the iterator of an epoch."""
        if self.data is not None:
            self.data.epoch_begins()
            self._data_document = None


def _number(value: Any) -> int | None:
    return value if type(value) is int else None
