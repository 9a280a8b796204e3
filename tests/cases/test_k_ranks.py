"""Cases of several ranks: what rank 0 does alone needs nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptmgr.testing.stores import Store

DEADLINE_S = 120.0

RANK = """
import json, os, sys
from datetime import timedelta
import torch
import torch.distributed as dist
from ckptmgr.training.manager import CheckpointManager

rank, file, url, local_dir = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=40))
torch.set_num_threads(1)
ids = []
with CheckpointManager(url, local_dir=local_dir) as manager:
    for step in (1, 2, 3):
        if rank == 0 or step == 3:
            ids.append(manager.save(step, {"model": {"w": torch.full((4,), float(rank))}}))
        dist.barrier()
dist.barrier()
print(json.dumps([None if each is None else str(each) for each in ids]), flush=True)
os._exit(0)  # gloo's threads may abort an interpreter that takes its time to end
"""


def test_k072_a_save_on_rank_0_alone_waits_for_nobody(
    make_store: Callable[[str], Store], ask: Callable[..., Any], tmp_path: Path
) -> None:
    """Two ranks, a save under `if rank == 0`, then a barrier: nothing hangs, for the save uses no collective; and where both ranks call it, at step 3,
    it is one on rank 0 and nothing on the other."""
    url = f"{make_store('local').url}/run"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "rendezvous"), url, str(tmp_path / f"tier-{rank}")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=DEADLINE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    first, second = (json.loads(out.splitlines()[-1]) for out, _ in said)
    rows = ask("ls", url)["checkpoints"]
    assert [row["id"] for row in rows] == first
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert second == [None]
    # Rank 1 has touched nothing: neither the run, nor a local tier of its own.
    assert not (tmp_path / "tier-1").exists()
