"""A built-in callback that is added to Hugging Face's Trainer without a `CallbackManager`, and wants its state in the checkpoints all the same."""

from __future__ import annotations

from typing import Any

from ckptmgr.callbacks.base import Callback, name_of
from ckptmgr.core.errors import IncompatibleStateError

# Not the name of a callback class: transformers would make a new object of it when asked to restore callbacks.
_PREFIX = "ckptmgr.callbacks/"
_CLAIMS = "_ckptmgr_claims"


class AloneCallback(Callback):
    """Keeps its state in `trainer_state.json` itself, where no manager does; in any other host it does nothing for it.

    A subclass calls `_take_up` in `on_train_begin`, and `_keep` at the end of every hook that has changed its state, all of which run before the save of
    that step. The second of a name is `name#2`, in the order in which they were added.

    Attributes:
        is_managed: a `CallbackManager` keeps the state.
    """

    # What the manager's debug mode lets it change.
    changes_state = frozenset({"stateful_callbacks"})
    is_managed = False
    _key = ""

    def _take_up(self, state: Any) -> None:
        """Take up the state of a resumed training.

        Raises:
            IncompatibleStateError: it does not fit.
        """
        kept = getattr(state, "stateful_callbacks", None)
        if self.is_managed or not isinstance(kept, dict):
            return
        # Once per training: its state object is a new one.
        claims = vars(state).setdefault(_CLAIMS, [])
        claims.append(name_of(self))
        number = claims.count(name_of(self))
        self._key = _PREFIX + name_of(self) + (f"#{number}" if number > 1 else "")
        if self._key in kept:
            try:
                self.load_state_dict(kept[self._key]["attributes"])
            except Exception as error:
                raise IncompatibleStateError(
                    f"callback {name_of(self)} refused its saved state: {error!r}",
                    hint="resume with the version of the callback that saved it, or without it",
                    piece=name_of(self),
                ) from error

    def _keep(self, state: Any) -> None:
        """Have the next save of the Trainer write the state as it is now."""
        if self._key and not self.is_managed:
            state.stateful_callbacks[self._key] = {"args": {}, "attributes": self.state_dict()}
