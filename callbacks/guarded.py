"""A callback whose own failures never end a training, in hosts without isolation too."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from ckptmgr.callbacks.base import Callback
from ckptmgr.core.errors import CkptmgrError

_log = logging.getLogger(__name__)


class GuardedCallback(Callback):
    """Logs and counts what fails (I9).

    Attributes:
        failures: what failed in the training thread.
        background_failures: what failed in the background, of which `last_background_error` is the last.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.background_failures = 0
        self.last_background_error: Exception | None = None

    def _guard(self, what: str, action: Callable[[], object]) -> None:
        """Do `action`; a failure is logged and counted, and stays here: hosts without isolation would end the training on it."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - a manager, a policy and the state of a model are other people's code
            self.failures += 1
            # The message of our own errors is complete; of any other one the place matters.
            trace = None if isinstance(error, CkptmgrError) else error
            _log.error(
                "%s failed (failure %d), training goes on: %s",
                what,
                self.failures,
                str(error) if trace is None else repr(error),
                exc_info=trace,
            )

    def _note_background(self, errors: Sequence[Exception]) -> None:
        """Count what went wrong in the background. It was logged as an error where it happened; here it shows beside the training's own lines."""
        if errors:
            self.background_failures += len(errors)
            self.last_background_error = errors[-1]
            _log.info(
                "%d more failed in the background (%d in all), the last: %s",
                len(errors),
                self.background_failures,
                errors[-1],
            )
