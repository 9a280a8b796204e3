"""What a host says of a training, as numbers: the loss, metrics, values that are still on a device. Imports no torch.

The loss of a step is that of `outputs` in `on_step_end`. A host that brings none there, as Hugging Face's Trainer, says it in `on_log`: the `loss` of
the logs, its mean since the last log. Where both come, the steps count, and that of the logs is not looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from ckptmgr.callbacks import facts
from ckptmgr.core.metrics import metric_name


def loss_of(outputs: Any) -> Any:
    """The loss in what a forward pass gave, as it is: a number, or a detached scalar tensor on its device. None if there is none.

    `outputs` is a mapping or an object that has it under `loss`, a list or tuple that begins with it, or the loss itself. Waits for no device.
    """
    if isinstance(outputs, Mapping):
        found = outputs.get("loss")
    elif isinstance(outputs, (list, tuple)):
        found = outputs[0] if outputs else None
    else:
        found = getattr(outputs, "loss", outputs)
    return _scalar(found)


def logged_loss(logs: Mapping[str, Any] | None) -> float | None:
    """The training loss in `logs`, maybe not finite; None if there is none. `train_loss` of a closing summary is none, nor is `eval_loss`."""
    return None if logs is None else facts.numbers({name: logs[name] for name in ("loss",) if name in logs}).get("loss")


def numbers_of(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """What is a number in logs or metrics, without `epoch`; see `facts.numbers`."""
    return facts.numbers(logs or {})


def metric_of(metrics: Mapping[str, Any] | None, name: str) -> float | None:
    """The metric `name`, or `eval_` and that name, as evaluations call it; maybe not finite. None if there is none, or it is no number."""
    found = metric_name(name, metrics or {})
    return None if metrics is None or found is None else numbers_of({found: metrics[found]}).get(found)


class LossSource:
    """Which of the two ways a host tells its losses: by steps where it brings them, else by logs."""

    def __init__(self) -> None:
        self._by_steps = False

    def at_step(self, outputs: Any) -> Any:
        """In `on_step_end`: the loss as `loss_of` gives it; None if it has to come by the logs."""
        loss = loss_of(outputs)
        self._by_steps = self._by_steps or loss is not None
        return loss

    def at_log(self, logs: Mapping[str, Any] | None) -> float | None:
        """In `on_log`: the mean loss since the last log; None if there is none, or the steps have told it."""
        return None if self._by_steps else logged_loss(logs)


class Pending:
    """Values by step that wait to be read.

    A tensor on a device is copied there, and read with all others that wait in one transfer: the step that made it is not waited for. Any other value is
    read at once.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, Any]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, step: int, value: Any) -> None:
        """Keep the value of `step`: a number or a scalar tensor."""
        if hasattr(value, "detach"):
            value = value.detach()
        on_device = getattr(getattr(value, "device", None), "type", "cpu") != "cpu"
        # A copy: a running sum, say, is changed in place before it is read.
        self._entries.append((step, value.clone() if on_device else float(value)))

    def read(self) -> list[tuple[int, float]]:
        """All values since the last call, oldest first. Waits for the devices that have some of them."""
        entries = self.peek()
        self._entries = []
        return entries

    def peek(self) -> list[tuple[int, float]]:
        """As `read`, but they stay, read. Waits for the devices that have some of them."""
        entries = self._entries
        waiting = [value for _, value in entries if not isinstance(value, float)]
        there = iter(_transferred(waiting))
        read = [(step, value if isinstance(value, float) else next(there)) for step, value in entries]
        self._entries = list(read)
        return read


def _transferred(tensors: list[Any]) -> list[float]:
    if not tensors:
        return []
    import torch

    if len({tensor.device for tensor in tensors}) > 1:
        return [float(tensor) for tensor in tensors]
    return [float(value) for value in torch.stack([tensor.float().reshape(()) for tensor in tensors]).tolist()]


def _scalar(value: Any) -> Any:
    if isinstance(value, bool):
        return None
    if isinstance(value, Real):
        return float(value)
    count = getattr(value, "numel", None)
    if callable(count):
        return value.detach().reshape(()) if count() == 1 else None
    return float(value) if getattr(value, "ndim", None) == 0 and getattr(value, "size", 0) == 1 else None
