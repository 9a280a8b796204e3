"""A user's ms-swift plugin for tests: a journal of every step, and a signal to the trainer at one of them, or its end. As JOURNAL, SEND, WHEN and STOP say.

--external_plugins swift_journal.py --callbacks journal interrupt
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swift.callbacks import callbacks_map  # type: ignore[import-not-found, unused-ignore]

from ckptmgr.callbacks import Callback, CallbackManager
from ckptmgr.testing.events import EventRecorder

_spec = importlib.util.spec_from_file_location("ckptmgr_test_train_hf", Path(__file__).with_name("train_hf.py"))
assert _spec is not None
assert _spec.loader is not None
hf: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hf)


class Interrupt(hf.Interrupt):  # type: ignore[misc, unused-ignore]
    def __init__(self, trainer: Any) -> None:
        super().__init__(
            getattr(signal, os.environ.get("SEND", "SIGKILL")), "step_begin", int(os.environ.get("WHEN", "0")), None
        )
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Only now the trainer has its callbacks."""
        managers = (
            each.manager for each in self.trainer.callback_handler.callbacks if isinstance(each, CallbackManager)
        )
        self.manager = next(managers, None)


class Stop(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == int(os.environ.get("STOP", "0")):
            control.should_training_stop = True


class Events(EventRecorder):
    """Writes what it saw to EVENTS."""

    def note(self, event: str, arguments: Mapping[str, Any]) -> None:
        super().note(event, arguments)
        path = os.environ.get("EVENTS")
        if path and event == "on_train_end":
            told = self.told()
            Path(path).write_text(json.dumps({"order": told.order, "arguments": dict(told.arguments)}))


callbacks_map["events"] = lambda args, trainer: CallbackManager([Events()])
callbacks_map["journal"] = lambda args, trainer: hf.Journal(Path(os.environ["JOURNAL"]))
callbacks_map["interrupt"] = lambda args, trainer: Interrupt(trainer)
callbacks_map["stop"] = lambda args, trainer: Stop()
