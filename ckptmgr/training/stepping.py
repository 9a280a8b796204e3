"""One optimizer step of the reference Trainer: its micro-batches, its backward passes, the optimizer and the scheduler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckptmgr.training.evaluating import Evaluating
from ckptmgr.training.forward import Outputs, optimizer_step, to_device
from ckptmgr.training.scheduling import Schedule


class Stepping(Evaluating):
    """Steps; see `Trainer`, which is the only one."""

    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    _schedule: Schedule

    def _step_over(self, window: list[Any], between: Callable[[], None]) -> dict[str, Any]:
        """Forward and backward passes over the micro-batches of `window`, whose gradients add up to those of their mean loss.

        Args:
            between: called between two micro-batches; what it raises leaves gradients behind, and nothing else.

        Returns:
            The last micro-batch as `batch`, and its `outputs`, whose loss is the mean of all.
        """
        total = torch.zeros((), device=self.device)
        for index, given in enumerate(window):
            batch = to_device(given, self.device)
            loss, outputs = self._forward(batch)
            self._backward(loss / len(window))
            total += outputs["loss"] / len(window)
            if index + 1 < len(window):
                self._call("on_substep_end", batch=batch, outputs=outputs)
                between()
        return {"batch": batch, "outputs": Outputs(outputs, loss=total)}

    def _optimize(self, micro_batches: int, *, exhausted: bool) -> None:
        """The step itself, and the scheduler's; `exhausted`: it is known to be the epoch's last."""
        stepped = optimizer_step(
            self.optimizer,
            self.model,
            self.scaler,
            max_grad_norm=self.args.max_grad_norm,
            before=lambda norm: self._call("on_pre_optimizer_step", grad_norm=norm),
        )
        self._call("on_optimizer_step")
        self._schedule.optimizer_stepped(micro_batches=micro_batches, skipped=not stepped, exhausted=exhausted)
        self.optimizer.zero_grad()

    def _backward(self, loss: torch.Tensor) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        scaled.backward()  # type: ignore[no-untyped-call]
