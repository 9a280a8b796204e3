"""Callbacks: take part in a training, of the embedded Trainer or of another host. Imports no torch.

Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.builtin import BUILT_IN

if TYPE_CHECKING:
    from ckptmgr.callbacks.averages import SampledMeans, main_process_decides, mean_over_ranks
    from ckptmgr.callbacks.dpo_accuracy import DPOAccuracyCallback
    from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
    from ckptmgr.callbacks.gradient_clip import GradientClipCallback
    from ckptmgr.callbacks.log import LogCallback
    from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
    from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
    from ckptmgr.callbacks.manager import CallbackManager
    from ckptmgr.callbacks.memory import MemoryCallback
    from ckptmgr.callbacks.notify import NotifyCallback
    from ckptmgr.callbacks.profiler import PerformanceProfilerCallback
    from ckptmgr.callbacks.save_model import SaveModelCallback
    from ckptmgr.training.ranks import is_main_process

_HOMES = {
    **BUILT_IN,
    "CallbackManager": "ckptmgr.callbacks.manager",
    "SampledMeans": "ckptmgr.callbacks.averages",
    "main_process_decides": "ckptmgr.callbacks.averages",
    "mean_over_ranks": "ckptmgr.callbacks.averages",
    "is_main_process": "ckptmgr.training.ranks",
}

__all__ = [
    "Callback",
    "CallbackManager",
    "DPOAccuracyCallback",
    "EarlyStoppingCallback",
    "GradientClipCallback",
    "LRSchedulerCallback",
    "LogCallback",
    "LossMonitorCallback",
    "MemoryCallback",
    "NotifyCallback",
    "PerformanceProfilerCallback",
    "Priority",
    "SampledMeans",
    "SaveModelCallback",
    "TrainerControl",
    "TrainerState",
    "is_main_process",
    "main_process_decides",
    "mean_over_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
