"""Two profiles of all threads of this process, by the processor time that each has used.

`sampled` looks every 2 ms. It costs calls nothing and counts what runs without the interpreter lock (digests, system calls) where it was called, but it
needs that lock itself: work in pure Python is found where its thread next lets go of it. `counted_calls` is cProfile, which has that right and makes
small functions look larger than they are. In both, time in which a thread waits counts for nothing.
"""

from __future__ import annotations

import contextlib
import cProfile
import io
import os
import pstats
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_INTERVAL_S = 0.002
_LINES = 30


@contextlib.contextmanager
def sampled(path: Path) -> Iterator[None]:
    """Write the profile of the block to `path` as text."""
    sampler = _Sampler()
    sampler.start()
    before = os.times()
    try:
        yield
    finally:
        after = os.times()
        sampler.over.set()
        sampler.join()
        path.write_text(
            f"user {after.user - before.user:.2f} s, system {after.system - before.system:.2f} s\n" + sampler.table()
        )


@contextlib.contextmanager
def counted_calls(path: Path) -> Iterator[None]:
    """Write the calls of the block, in all threads that it starts and ends, to `path` as text."""
    if sys.version_info >= (3, 12):
        path.write_text("cProfile takes one thread at a time since Python 3.12\n")
        yield
        return
    profiles, run = list[cProfile.Profile](), threading.Thread.run

    def profiled(thread: threading.Thread) -> None:
        with cProfile.Profile(time.thread_time) as profile:
            profiles.append(profile)
            run(thread)

    setattr(threading.Thread, "run", profiled)  # noqa: B010 - a type checker takes no method for an assignment
    try:
        with cProfile.Profile(time.thread_time) as profile:
            profiles.append(profile)
            yield
    finally:
        setattr(threading.Thread, "run", run)  # noqa: B010
        text = io.StringIO()
        pstats.Stats(*profiles, stream=text).sort_stats("tottime").print_stats(_LINES)
        path.write_text(text.getvalue())


class _Sampler(threading.Thread):
    def __init__(self) -> None:
        super().__init__(name="sampler", daemon=True)
        self.over = threading.Event()
        self._used: dict[int, int] = {}
        self._own: Counter[str] = Counter()
        self._below: Counter[str] = Counter()
        self._threads: Counter[str] = Counter()

    def run(self) -> None:
        while not self.over.wait(_INTERVAL_S):
            self._look()

    def _look(self) -> None:
        frames = sys._current_frames()
        for thread in threading.enumerate():
            if thread is self or thread.native_id is None or thread.ident not in frames:
                continue
            spent = self._spent_ns(thread.native_id)
            if spent:
                self._count(frames[thread.ident], spent)
                self._threads[thread.name] += spent
        # This very frame is in it: as a cycle it would keep all that the others hold, their buffers too.
        frames.clear()

    def _spent_ns(self, native_id: int) -> int:
        """Processor time of the thread since the last look; 0 at the first."""
        try:
            used = int(Path(f"/proc/self/task/{native_id}/schedstat").read_text().split()[0])
        except OSError:
            return 0
        before, self._used[native_id] = self._used.get(native_id, used), used
        return used - before

    def _count(self, frame: FrameType, spent: int) -> None:
        self._own[_place(frame, line=True)] += spent
        seen = set[str]()
        at: FrameType | None = frame
        while at is not None:
            seen.add(_place(at, line=False))
            at = at.f_back
        for place in seen:
            self._below[place] += spent

    def table(self) -> str:
        """Where the time went: by line, by function with all that it called, by thread."""
        parts = []
        for title, counts in (("own", self._own), ("with what it called", self._below), ("thread", self._threads)):
            rows = [f"{spent / 1e9:8.3f}  {name}" for name, spent in counts.most_common(_LINES)]
            parts.append("\n".join([f"\n     CPU s  {title}", *rows]))
        return "\n".join(parts) + "\n"


def _place(frame: FrameType, *, line: bool) -> str:
    code = frame.f_code
    file = "/".join(code.co_filename.split("/")[-2:])
    return f"{file}:{frame.f_lineno} {code.co_name}" if line else f"{file}:{code.co_firstlineno} {code.co_name}"
