"""The saves of one training: what the host hands over is saved, what it has written is taken, and the final model is pushed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from ckptmgr.callbacks.final_model import push_final
from ckptmgr.callbacks.huggingface import OutputDirectory, framework
from ckptmgr.callbacks.seams import SavingManager, TakingManager
from ckptmgr.core.errors import ConfigError, ConflictError


class Saves:
    """Hands the states of one training to its manager; on the main process.

    Attributes:
        last_id: of the checkpoint that the last `save` made; None if it made none.
        newest_step: the highest step of them all; 0 before the first.
    """

    def __init__(self, manager: SavingManager) -> None:
        self.last_id: str | None = None
        self.newest_step = 0
        self._manager = manager
        self._taken: set[int] = set()

    @property
    def taking_manager(self) -> TakingManager:
        """The manager in a host that writes its files itself; a fake one for other hosts need not have all of it."""
        return cast(TakingManager, self._manager)

    def refuse_rewind(self, step: int) -> None:
        """Refuse a training that begins at `step`, below what was saved with the same manager: a resume would take the newest step of both.

        Raises:
            ConflictError: it does.
        """
        if step < self.newest_step:
            raise ConflictError(
                f"step {self.newest_step} was saved by a training of this process, and another one begins at step {step} with the same manager",
                hint="to go on, resume from resume_path() of a new CheckpointManager; to begin anew, give it a run of its own "
                "(with auto_find_batch_size: set the batch size that fits)",
            )

    def save(
        self,
        step: int,
        checkpoint: Callable[[], Mapping[str, Any]] | None,
        output: OutputDirectory | None,
        *,
        epoch: float | None,
        metrics: Mapping[str, float],
        reasons: Sequence[str],
        metric_modes: Mapping[str, str],
    ) -> str | None:
        """Save `step`; the id, or None if the manager has saved nothing, for a reason that it has logged.

        Args:
            checkpoint: gives the pieces of the state; None where the host writes its files itself.
            output: where it has written them.

        Raises:
            ConfigError: neither is there.
        """
        self.last_id = None
        facts: dict[str, Any] = {"epoch": epoch, "metrics": metrics, "reasons": reasons, "metric_modes": metric_modes}
        if checkpoint is not None:
            self.last_id = self._manager.save(step, checkpoint(), **facts)
        elif output is not None:
            self._taken.add(step)
            self.last_id = self.taking_manager.take(
                step, output.complete(step), framework=framework(), final=not output.saves_without_event, **facts
            )
        else:
            raise ConfigError(
                "this host does not hand over its state (on_save without `checkpoint`), and has no output_dir",
                hint="use the Trainer of ckptmgr or Hugging Face's, or the adapter for your host",
            )
        if self.last_id is not None:
            self.newest_step = max(self.newest_step, step)
        return self.last_id

    def take_found(self, output: OutputDirectory, metric_modes: Mapping[str, str]) -> None:
        """Take what the host wrote without telling, `enable_jit_checkpoint` above all. A step that was saved stays as it was saved: such a
        checkpoint may have been written in the middle of the next step."""
        for found in output.found():
            if found.step not in self._taken:
                self._taken.add(found.step)
                self.taking_manager.take(
                    found.step,
                    found.directory,
                    epoch=found.epoch,
                    reasons=("jit_checkpoint" if output.saves_without_event else "found",),
                    metric_modes=metric_modes,
                    framework=framework(),
                )

    def push_final(
        self,
        name: str | bool,
        model: Any,
        processing_class: Any,
        *,
        metrics: Mapping[str, float],
        metadata: Mapping[str, Any],
        is_saved: bool,
    ) -> None:
        """Push the final model; see `ckptmgr.callbacks.final_model.push_final`.

        Args:
            is_saved: the last save is of the step at which training ends.
        """
        push_final(
            self.taking_manager,
            name,
            model,
            processing_class,
            checkpoint_id=self.last_id if is_saved else None,
            metrics=metrics,
            metadata=metadata,
        )
