"""Callbacks: take part in a training, of the embedded Trainer or of another host. Imports no torch."""

from __future__ import annotations

from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback

__all__ = ["Callback", "CallbackManager", "Priority", "SaveModelCallback", "TrainerControl", "TrainerState"]
