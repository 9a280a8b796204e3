"""What happens when a program ends without saying so."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeAlias

logger = logging.getLogger(__name__)
THREAD_PREFIX = "ckptmgr-"
_LAST_S = 1.0
INTERRUPTED = 130
_SLICE_S = 0.5

LeftS: TypeAlias = Callable[[], float]
"""How many seconds are left, asked again and again: a notice of preemption may come while something is waited for."""


def no_limit() -> float:
    """A `LeftS` that never ends a wait."""
    return math.inf


def slices(timeout_s: float | None, left_s: LeftS, clock: Callable[[], float] = time.monotonic) -> Iterator[float]:
    """How long to wait before looking again, for as long as waiting makes sense: `timeout_s` in all, and no longer than `left_s` says."""
    until = math.inf if timeout_s is None else clock() + timeout_s
    while (left := min(until - clock(), left_s())) > 0:
        yield min(left, _SLICE_S)


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


def is_interrupted() -> bool:
    """Whether the program is ending by Ctrl-C: it is being handled here, or has ended the main module."""
    return isinstance(sys.exc_info()[1], KeyboardInterrupt) or getattr(sys, "last_type", None) is KeyboardInterrupt


def end_soon() -> None:
    """The user will not wait any longer: when the main program is over, give the threads of ours that run now one second, then end with 130.

    A write to a dead disk, or a fsync that takes minutes, cannot be interrupted, and Python would wait for its thread. A program that has handled the
    Ctrl-C, and ends much later, is not cut off for that.
    """
    ours = [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)]
    over = threading.Event()

    def end() -> None:
        over.wait()
        until = time.monotonic() + _LAST_S
        for thread in ours:
            thread.join(max(0.0, until - time.monotonic()))
        if any(thread.is_alive() for thread in ours):
            os._exit(INTERRUPTED)

    try:
        # Not `main_thread().join()`: the main thread counts as alive while Python waits for the pools of a large upload.
        threading._register_atexit(over.set)  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):  # the latter: the main module is over already
        over.set()
    with contextlib.suppress(RuntimeError):  # some Pythons start no thread at their end
        threading.Thread(target=end, name="ckptmgr-end", daemon=True).start()


def exit_with(code: int) -> None:
    """Make `code` the exit status of a program whose main module is over. Whatever else is registered for the end still runs, before."""
    _codes.append(code)


def _exit() -> None:
    if not _codes:
        return
    logging.shutdown()  # it was registered earlier, and would come later
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    # The status is settled already; nothing gentler changes it any more.
    os._exit(max(_codes))


_codes: list[int] = []
# Registered with the import, and so called after what the program registers later.
atexit.register(_exit)
