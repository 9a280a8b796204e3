"""The states of callbacks in a checkpoint of Hugging Face's Trainer: in `trainer_state.json`, beside those that it keeps of its own."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from ckptmgr.callbacks import huggingface
from ckptmgr.callbacks.huggingface import STATES_KEY

_log = logging.getLogger(__name__)


def may_save(state: Any, control: Any) -> bool:
    """Whether this is that host, and it may save before the next event that could keep the states."""
    if not isinstance(getattr(state, "stateful_callbacks", None), dict):
        return False
    return bool(
        getattr(control, "should_save", False)
        # An evaluation decides on a save with save_strategy="best"; the end of an epoch or of training may ask for one.
        or getattr(control, "should_evaluate", False)
        or getattr(control, "should_epoch_stop", False)
        or getattr(control, "should_training_stop", False)
        or float(getattr(state, "epoch", None) or 0.0).is_integer()
    )


def keep(state: Any, states: Mapping[str, Any]) -> None:
    """Have the Trainer's next save write `states`; what is no JSON value is left out and named, for the save would fail on it."""
    kept: dict[str, Any] = {}
    for name, value in states.items():
        try:
            kept[name] = json.loads(json.dumps(value))
        except (TypeError, ValueError) as error:
            _log.error("the state of callback %s is not kept in trainer_state.json: %s", name, error)
    # An entry of an earlier step is not left there.
    state.stateful_callbacks.pop(STATES_KEY, None)
    if kept:
        huggingface.keep_entry(state, kept, STATES_KEY)


def kept(state: Any) -> Mapping[str, Any]:
    """What `keep` has put into the state that a resumed training begins with; empty if there is nothing of the kind."""
    return huggingface.entry_in(state, STATES_KEY)
