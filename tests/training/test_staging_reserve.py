"""Memory made ready before the first save, and given back after the last."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from ckptmgr.training import buffers
from ckptmgr.training.staging import Stager, state_bytes

DEADLINE_S = 60.0
PAGES = 1 << 16  # bytes of a storage that is worth a buffer


def floats(count: int = PAGES // 4) -> torch.Tensor:
    return torch.randn(count)


def reserved(stager: Stager, state: dict[str, Any]) -> int:
    """`reserve`, and wait for its thread."""
    needed = stager.reserve(state)
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-reserve":
            thread.join(DEADLINE_S)
    return needed


def test_reserved_memory_is_what_the_first_save_takes() -> None:
    """Nothing is copied beforehand; asking again makes no more of it."""
    state: dict[str, Any] = {"t": {i: floats() for i in range(8)}, "small": torch.nn.Linear(2, 2)}
    stager = Stager()
    for _ in range(2):
        assert reserved(stager, state) == state_bytes(state) == 8 * PAGES + 6 * 4
        assert stager.free_bytes == 8 * PAGES
    snapshot = stager.capture(state, rng=False)
    assert (stager.reused_bytes, stager.allocated_bytes) == (8 * PAGES, 6 * 4)
    assert reserved(stager, state) == state_bytes(state)
    assert stager.free_bytes == 0  # it is in use
    assert all(torch.equal(snapshot.pieces["t"][i], state["t"][i]) for i in range(len(state["t"])))
    snapshot.release()
    assert stager.free_bytes == 8 * PAGES


def test_a_save_does_not_wait_for_all_of_a_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes what is ready, after the piece at hand, and makes the rest itself."""
    reached, go_on = threading.Event(), threading.Event()
    real = buffers.Buffer.touch

    def touch(self: buffers.Buffer) -> None:
        reached.set()
        assert go_on.wait(DEADLINE_S)
        real(self)

    monkeypatch.setattr(buffers.Buffer, "touch", touch)
    state = {"t": [floats() for _ in range(8)]}
    stager = Stager()
    stager.reserve(state)
    assert reached.wait(DEADLINE_S)
    threading.Timer(0, go_on.set).start()
    stager.capture(state, rng=False)
    assert stager.reused_bytes > 0
    assert stager.reused_bytes + stager.allocated_bytes == 8 * PAGES
    assert not [thread for thread in threading.enumerate() if thread.name == "ckptmgr-reserve"]


def test_a_cleared_stager_holds_nothing_and_works_on() -> None:
    """What is in use is not touched, and goes when it is released."""
    state = {"t": [floats() for _ in range(4)]}
    stager = Stager()
    stager.capture(state).release()
    snapshot = stager.capture(state, rng=False)
    reserved(stager, {"t": [floats() for _ in range(8)]})
    assert stager.free_bytes == 4 * PAGES
    stager.clear()
    assert stager.free_bytes == 0
    assert all(torch.equal(snapshot.pieces["t"][i], state["t"][i]) for i in range(len(state["t"])))
    snapshot.release()
    assert stager.free_bytes == 0
    stager.capture(state, rng=False).release()
    assert (stager.reused_bytes, stager.free_bytes) == (0, 4 * PAGES)


def test_a_program_that_ends_does_not_wait_for_a_reservation() -> None:
    """There will be no save: the piece at hand is finished, no other begun."""
    script = """
import threading, torch
from ckptmgr.training import buffers
from ckptmgr.training.staging import Stager
touched = []
def touch(buffer):
    threading.main_thread().join()
    touched.append(buffer)
    print(len(touched), flush=True)
buffers.Buffer.touch = touch
stager = Stager()
stager.reserve({"t": [torch.zeros(1 << 16) for _ in range(8)]})
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_nothing_is_reserved_where_the_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would only have the process killed now instead of at the save."""
    monkeypatch.setattr("ckptmgr.training.staging.available_memory_bytes", lambda: PAGES - 1)
    stager = Stager()
    assert reserved(stager, {"t": [floats()]}) == PAGES
    assert stager.free_bytes == 0
