"""Resume is exact after a real SIGKILL, in each host: a process of its own dies in the middle of a step, another one goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

DEADLINE_S = 120.0
MATRIX = Path(__file__).with_name("test_matrix.py")

PROCESS = """
import importlib.util, json, os, signal, sys, time
from pathlib import Path
import torch

path, host, seed, root, die = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]), json.loads(sys.argv[5])
spec = importlib.util.spec_from_file_location("matrix", path)
matrix = importlib.util.module_from_spec(spec)
sys.modules["matrix"] = matrix
spec.loader.exec_module(matrix)
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)

class Trace(matrix.Trace):
    def here(self, place):
        self.counts[place] = self.counts.get(place, 0) + 1
        if [place, self.counts[place]] == die:
            # Step 6 is saved in the background: without it, an earlier one would be gone on from.
            until = time.monotonic() + 60
            while not list((root / "local").rglob("manifests/*-000000000006-*.json")):
                assert time.monotonic() < until, "step 6 was not saved"
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
    def stepped(self, step, loss, optimizer):
        super().stepped(step, loss, optimizer)
        print(json.dumps([step, self.steps[step]]), flush=True)

trace = Trace()
matrix.HOSTS[host](trace, "fp32", seed, root)
model = trace.end["model"]
print(json.dumps({name: tensor[2].hex() for name, tensor in model.items()}), flush=True)
"""


def run(host: str, seed: int, root: Path, die: list[Any] | None = None) -> tuple[int, dict[int, Any], Any]:
    """How a process ended, its steps, and the weights that it ended with."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(MATRIX), host, str(seed), str(root), json.dumps(die)],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    ended = lines.pop() if lines and isinstance(lines[-1], dict) else None
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, dict(lines), ended


@pytest.mark.slow
@pytest.mark.parametrize("host", ["embedded", "plain loop"])
def test_killed_and_resumed_equals_uninterrupted(host: str, tmp_path: Path) -> None:
    """Between two micro-batches of step 8; what was saved last in the local tier is step 6."""
    code, whole, weights = run(host, 0, tmp_path / "whole")
    assert (code, sorted(whole)) == (0, list(range(1, 16)))
    code, first, ended = run(host, 0, tmp_path / "killed", ["forward", 15])
    assert (code, sorted(first), ended) == (-signal.SIGKILL, list(range(1, 8)), None)
    code, second, resumed_weights = run(host, 99, tmp_path / "killed")
    assert (code, sorted(second)) == (0, list(range(7, 16)))
    assert first | second == whole
    assert all(first[step] == whole[step] for step in first)
    assert resumed_weights == weights
