"""ckptmgr: checkpoints and artifacts of PyTorch training, saved locally, uploaded on the side, resumed by one command.

    from ckptmgr import CheckpointManager, EveryNSteps, Best

Names are loaded when they are first used: `import ckptmgr` imports neither torch nor a cloud library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckptmgr.core.conditions import Conditions
    from ckptmgr.core.errors import CkptmgrError
    from ckptmgr.core.policies import (
        AnyOf,
        Best,
        EpochEnded,
        Evaluated,
        EveryMinutes,
        EveryNEpochs,
        EveryNSteps,
        StepEnded,
        Worst,
    )
    from ckptmgr.core.retention import KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, KeepWorst
    from ckptmgr.run.artifact_links import Origin
    from ckptmgr.run.artifact_push import push_artifact
    from ckptmgr.run.artifacts import Artifact, artifacts, pull_artifact, show_artifact
    from ckptmgr.trainer import Trainer, TrainingArguments
    from ckptmgr.training.loader import ResumableLoader
    from ckptmgr.training.manager import CheckpointManager
    from ckptmgr.training.preemption import Preemption
    from ckptmgr.training.rank_rng import gather_rng
    from ckptmgr.transfer.alarm import FailureBudget
    from ckptmgr.transfer.queue import QueueRules

__version__ = "0.1.0"

_HOMES = {
    "ckptmgr.core.conditions": ("Conditions",),
    "ckptmgr.core.errors": ("CkptmgrError",),
    "ckptmgr.core.policies": (
        "AnyOf",
        "Best",
        "EpochEnded",
        "Evaluated",
        "EveryMinutes",
        "EveryNEpochs",
        "EveryNSteps",
        "StepEnded",
        "Worst",
    ),
    "ckptmgr.core.retention": ("KeepBest", "KeepEveryNSteps", "KeepLast", "KeepWithin", "KeepWorst"),
    "ckptmgr.run.artifact_links": ("Origin",),
    "ckptmgr.run.artifact_push": ("push_artifact",),
    "ckptmgr.run.artifacts": ("Artifact", "artifacts", "pull_artifact", "show_artifact"),
    "ckptmgr.trainer": ("Trainer", "TrainingArguments"),
    "ckptmgr.training.loader": ("ResumableLoader",),
    "ckptmgr.training.manager": ("CheckpointManager",),
    "ckptmgr.training.preemption": ("Preemption",),
    "ckptmgr.training.rank_rng": ("gather_rng",),
    "ckptmgr.transfer.alarm": ("FailureBudget",),
    "ckptmgr.transfer.queue": ("QueueRules",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "AnyOf",
    "Artifact",
    "Best",
    "CheckpointManager",
    "CkptmgrError",
    "Conditions",
    "EpochEnded",
    "Evaluated",
    "EveryMinutes",
    "EveryNEpochs",
    "EveryNSteps",
    "FailureBudget",
    "KeepBest",
    "KeepEveryNSteps",
    "KeepLast",
    "KeepWithin",
    "KeepWorst",
    "Origin",
    "Preemption",
    "QueueRules",
    "ResumableLoader",
    "StepEnded",
    "Trainer",
    "TrainingArguments",
    "Worst",
    "__version__",
    "artifacts",
    "gather_rng",
    "pull_artifact",
    "push_artifact",
    "show_artifact",
]


def __getattr__(name: str) -> Any:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'ckptmgr' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from ckptmgr.core.errors import MissingExtraError

        raise MissingExtraError(
            f"ckptmgr.{name} needs PyTorch, which is not installed", hint="pip install 'ckptmgr[torch]'", extra="torch"
        ) from error


def __dir__() -> list[str]:
    return sorted(__all__)
