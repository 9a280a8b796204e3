"""Work side by side: what it moved is told, whenever its threads end."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from ckptmgr.run.together import Moved, together


def test_what_moved_is_told_although_all_had_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that end before anybody looks at them have moved bytes nevertheless."""
    told: list[int] = []
    moved = Moved(told.append)
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        start(thread)
        thread.join(20)

    monkeypatch.setattr(threading.Thread, "start", start_and_end)
    together([(1, partial(moved.relative_update, 5))] * 4, moved, most=4)
    assert sum(told) == 20
