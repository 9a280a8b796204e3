"""How long a server that was started from the command line lives."""

from __future__ import annotations

import contextlib
import os
import signal
import threading


def end_at_signals() -> threading.Event:
    """What SIGTERM and SIGINT set, from now on."""
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    return ended


def wait_for_the_end(ended: threading.Event) -> None:
    """Block until `ended` is set, standard input ends, or the parent process dies."""
    parent = os.getppid()

    def read_to_the_end() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        ended.set()

    # `server &` in a script gives /dev/null as standard input, which says nothing about anybody's end.
    with contextlib.suppress(OSError):
        if os.fstat(0).st_rdev != os.stat(os.devnull).st_rdev:
            threading.Thread(target=read_to_the_end, daemon=True).start()
    while not ended.wait(0.5):
        if os.getppid() != parent:
            return
