"""Cases of several ranks: what rank 0 does alone needs nobody else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptmgr.testing.stores import Store

RANK = """
from ckptmgr.training.manager import CheckpointManager

url, folder = sys.argv[1:]
join()
ids = []
with CheckpointManager(url, local_dir=f"{folder}/tier-{rank}") as manager:
    for step in (1, 2, 3):
        if rank == 0 or step == 3:
            ids.append(manager.save(step, {"model": {"w": torch.full((4,), float(rank))}}))
        dist.barrier()
dist.barrier()
found = [None if each is None else str(each) for each in ids]
"""


def test_k072_a_save_on_rank_0_alone_waits_for_nobody(
    make_store: Callable[[str], Store],
    ask: Callable[..., Any],
    in_two_ranks: Callable[..., list[Any]],
    tmp_path: Path,
) -> None:
    """Two ranks, a save under `if rank == 0`, then a barrier: nothing hangs, for the save uses no collective; and where both ranks call it, at step 3,
    it is one on rank 0 and nothing on the other."""
    url = f"{make_store('local').url}/run"
    first, second = in_two_ranks(RANK, url, tmp_path)
    rows = ask("ls", url)["checkpoints"]
    assert [row["id"] for row in rows] == first
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert second == [None]
    # Rank 1 has touched nothing: neither the run, nor a local tier of its own.
    assert not (tmp_path / "tier-1").exists()
