"""A training loop that draws its batches from DataLoader workers, beside an active uploader: `loading.py METHOD EPOCHS [URL DISK HOST]`.

Each epoch starts new workers by METHOD (`fork`, `spawn`), saves in its middle, and looks at the processes. Prints a line of JSON: every batch, the
random numbers of this process afterwards, and the transfer processes that were seen while workers ran. Without URL nothing is saved.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ckptmgr.training.manager import CheckpointManager

BATCHES, BATCH, WORKERS = 10, 4, 2
MARK = "LOADING_TEST"
manager: CheckpointManager | None = None


class Numbers(Dataset[torch.Tensor]):
    """Items that depend on the random numbers of the worker that makes them, which follow from those of the trainer."""

    def __len__(self) -> int:
        return BATCHES * BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [float(index), random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor(drawn, dtype=torch.float64)


def in_worker(number: int) -> None:
    """What no worker may have: a thread of the uploader's, a lock that stays locked, or a say in what is uploaded."""
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("ckptmgr")]
    if threads:
        raise AssertionError(f"a worker has {threads}")
    if manager is not None:  # by fork, a copy of the trainer's
        manager.status()
        manager.poll_errors()
        manager.hurry()
        manager.close(30)


def transfer_processes() -> list[int]:
    """Those that belong to this test, whoever started them."""
    found = []
    mark = f"{MARK}={os.environ[MARK]}".encode()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if mark in environment and b"ckptmgr.transfer.worker" in command:
            found.append(int(pid))
    return found


def train(method: str, epochs: int) -> dict[str, object]:
    torch.manual_seed(1)
    random.seed(2)
    np.random.seed(3)
    batches: list[list[list[float]]] = []
    seen: list[list[int]] = []
    for epoch in range(epochs):
        loader = DataLoader(
            Numbers(),
            batch_size=BATCH,
            shuffle=True,
            num_workers=WORKERS,
            multiprocessing_context=method,
            worker_init_fn=in_worker,
        )
        for number, batch in enumerate(loader):
            batches.append(batch.tolist())
            if number == BATCHES // 2:
                if manager is not None:
                    manager.save(epoch, {"weights": {"w": torch.full((1000,), float(epoch))}})
                seen.append(transfer_processes())
    numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return {"batches": batches, "numbers": numbers, "transfer_processes": seen}


def main() -> None:
    global manager
    method, epochs, *places = sys.argv[1:]
    if not places:
        print(json.dumps(train(method, int(epochs))))
        return
    url, disk, host = places
    manager = CheckpointManager(url, local_dir=disk, transfer="thread" if host == "thread" else "process", linger_s=0)
    with manager:
        manager.begin()
        found = train(method, int(epochs))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
