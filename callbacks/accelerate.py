"""Accelerate as a host, for training loops of one's own: what `accelerator.save_state` writes is taken as it is, and gone on with exactly.

    loader = ResumableLoader(DataLoader(…, shuffle=True))
    checkpoints = AccelerateCheckpoints(accelerator, manager, loader)
    step = checkpoints.restore() or 0
    for epoch in range(loader.epoch, epochs):
        for batch in loader:
            …
            if accelerator.sync_gradients and (reasons := manager.should_save(StepEnded(step=step))):
                checkpoints.save(step, reasons=reasons)

Imports no Accelerate.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmgr.core.errors import CheckpointError
from ckptmgr.training.agreeing import with_all_ranks
from ckptmgr.training.loader import ResumableLoader
from ckptmgr.training.rank_rng import restore_ranks
from ckptmgr.training.rng import capture_rng

_log = logging.getLogger(__name__)


class AccelerateCheckpoints:
    """Saves and restores a loop under an `Accelerator`, with everything that was prepared by it or registered with it.

    What Accelerate leaves out is added: the place in the data (`loader`), the step, and the number of the next `checkpoint_<n>` directory, without which
    the first save after a resume finds its directory taken. The random states are Accelerate's own file, a pickle of each rank; they are kept for others
    to read and, like everything of `save_state`, loaded by Accelerate itself. After that this rank's own are set from a copy of ours that needs no pickle.

    The loader must not be prepared by Accelerate, whose own fetch a batch ahead of the one in use: give it a DistributedSampler where there are several
    ranks, and move batches to `accelerator.device`.

    Args:
        accelerator: after `prepare`.
        manager: a `CheckpointManager`.
        loader: the training data.
    """

    def __init__(self, accelerator: Any, manager: Any, loader: ResumableLoader | None = None) -> None:
        self.accelerator = accelerator
        self.manager = manager
        self._place = _Place(loader)
        accelerator.register_for_checkpointing(self._place)

    def save(
        self,
        step: int,
        *,
        epoch: float | None = None,
        metrics: Mapping[str, float] | None = None,
        reasons: Sequence[str] = (),
    ) -> str | None:
        """Have Accelerate write its state, and take it: uploaded in the background. Every rank must call it.

        Within a step, where `accelerator.accumulate` has added up a part of its micro-batches, nothing is saved: gradients are not in what Accelerate
        writes. An error is logged then, and training goes on.

        Returns:
            The id that the checkpoint will have; None on ranks other than 0 and where nothing was saved.
        """
        if not self.accelerator.sync_gradients:
            _log.error(
                "step %d is not saved: it is between two micro-batches of a step, whose gradients would be lost - ask the policy and save only "
                "where accelerator.sync_gradients is true",
                step,
            )
            return None
        self._place.step = step
        naming = self.accelerator.project_configuration.automatic_checkpoint_naming
        own = None if naming else str(Path(self.manager.local_dir, "accelerate", str(step)))
        directory = Path(self.accelerator.save_state(own))
        # Each rank writes a part.
        self.accelerator.wait_for_everyone()
        if not self.accelerator.is_main_process:
            return None
        try:
            taken: str | None = self.manager.take(
                step, directory, epoch=epoch, metrics=metrics, reasons=reasons, framework=framework()
            )
        finally:
            if own is not None:
                shutil.rmtree(own, ignore_errors=True)
        return taken

    def restore(self, selector: str = "latest") -> int | None:
        """Load a checkpoint into everything that was prepared or registered; the step that it is of. None on a run without any data.

        Every rank must call it: all load the checkpoint that rank 0 chooses, and an error of one is raised on all.
        """
        directory = self.manager.resume_path(selector)
        if directory is None:
            return None
        with_all_ranks(lambda: self.load(directory))
        return self._place.step

    def load(self, directory: Path) -> None:
        """As `restore`, from a directory that `ckptmgr resume` has made.

        Raises:
            CheckpointError: it was not saved with this class.
        """
        self._place.loaded = False
        self.accelerator.load_state(str(directory))
        if not self._place.loaded:
            raise CheckpointError(
                f"{directory} does not say where in the data training was",
                hint="resume from a checkpoint that AccelerateCheckpoints saved",
            )
        self.accelerator.project_configuration.iteration = self._next_number()
        for note in restore_ranks(self._place.rng):
            _log.warning("%s", note)

    def _next_number(self) -> int:
        project = self.accelerator.project_configuration.project_dir
        if project is None:
            return 0
        found = Path(project, "checkpoints").glob("checkpoint_*")
        numbers = [int(match[1]) for path in found if (match := re.fullmatch(r"checkpoint_(\d+)", path.name))]
        return max(numbers, default=-1) + 1


class _Place:
    """What Accelerate writes beside its own as `custom_checkpoint_<n>.pkl`."""

    def __init__(self, loader: ResumableLoader | None) -> None:
        self.loader = loader
        self.step = 0
        self.rng: Mapping[str, Any] = {}
        self.loaded = False

    def state_dict(self) -> dict[str, Any]:
        data = None if self.loader is None else self.loader.state_dict()
        return {"step": self.step, "data": data, "rng": capture_rng()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.rng = state["step"], state["rng"]
        if self.loader is not None:
            self.loader.load_state_dict(state["data"])
        self.loaded = True


def framework() -> dict[str, str]:
    """What writes the files, for the manifest."""
    version = getattr(sys.modules.get("accelerate"), "__version__", None)
    return {"framework": "accelerate"} | ({"accelerate": str(version)} if version else {})
