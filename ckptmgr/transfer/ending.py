"""What happens when a program ends without saying so."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections.abc import Callable

logger = logging.getLogger(__name__)


def call_at_end(method: Callable[[], None]) -> None:
    """Call a bound `method` once the main thread is done, before Python takes thread pools away; not if its object is gone by then.

    `atexit` is too late: it runs after all threads have ended, and the pools that a large upload needs are closed even before that. Python 3.12.0
    and 3.12.1 start no thread at all then: what needs one stays pending.
    Source: https://github.com/python/cpython/issues/86128 (what concurrent.futures does for itself)
    """
    # Registered functions run in reverse: the pools' own must be there first. From Python 3.9 on, and private.
    import concurrent.futures.thread  # noqa: F401

    register = getattr(threading, "_register_atexit", None)
    if register is None:
        logger.warning(
            "this Python cannot wait for uploads at its end: call close(), or use the manager in a with block"
        )
        return
    known = weakref.WeakMethod(method)

    def end() -> None:
        found = known()
        if found is not None:
            found()

    with contextlib.suppress(RuntimeError):  # the program is ending already
        register(end)
