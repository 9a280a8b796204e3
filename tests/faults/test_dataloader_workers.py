"""DataLoader workers beside an active uploader (row 47): they neither hang nor upload, and training draws the numbers that it would draw without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

SCRIPT = str(Path(__file__).with_name("loading.py"))
BATCHES = 10
DEADLINE_S = 150.0


def run(*arguments: object) -> dict[str, Any]:
    """The script in a process of its own, which must end by itself, and silently."""
    environment = {**os.environ, "LOADING_TEST": uuid.uuid4().hex}
    # Python 3.12 warns of any fork beside a thread; that they go well together is what is tested here.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("method", "epochs", "host"),
    [
        ("fork", 20, "process"),
        pytest.param("fork", 20, "thread", marks=pytest.mark.slow),
        pytest.param("spawn", 2, "process", marks=pytest.mark.slow),
    ],
)
def test_workers_live_beside_the_uploader(
    make_store: Callable[[str], Store], tmp_path: Path, method: str, epochs: int, host: str
) -> None:
    """200 iterations from 40 forked workers (20 from 4 spawned ones), a save in each epoch, a store that is never quite done with the last."""
    store = make_store("moto")
    slow = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", latency_s=0.1, times=None))
    found = run(method, epochs, f"{store.url}/run", tmp_path / "disk", host)
    alone = run(method, epochs)
    assert len(found["batches"]) == epochs * BATCHES
    assert found["batches"] == alone["batches"]
    assert found["numbers"] == alone["numbers"]

    seen = found["transfer_processes"]
    assert len(seen) == epochs
    assert {len(pids) for pids in seen[1:]} <= {1 if host == "process" else 0}
    assert len({pid for pids in seen for pid in pids}) == (1 if host == "process" else 0)
    assert slow.hits >= epochs
    committed = [int(key.split("-")[1]) for key in store.keys("run/manifests/")]
    assert committed == list(range(epochs))
    assert len(store.keys("run/attempts/")) == 1
