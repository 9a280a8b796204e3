"""Times and memory of a GPU, told by itself. torch is imported in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def device_of(model: Any) -> Any:
    """The device of the model, if it has a clock of its own that this can read."""
    first = next(iter(model.parameters()), None) if hasattr(model, "parameters") else None
    return first.device if first is not None and first.device.type == "cuda" else None


def marks_on(device: Any) -> Callable[[], Any]:
    """A function that puts a mark into the device's queue, behind the work that is in it; see `spans.Spans`."""
    import torch

    def mark() -> Any:
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call, unused-ignore]
        event.record(torch.cuda.current_stream(device))
        return event

    return mark


def peak_bytes(device: Any) -> int:
    """The most bytes that tensors had on the device so far; waits for nothing."""
    import torch

    return int(torch.cuda.max_memory_allocated(device))
