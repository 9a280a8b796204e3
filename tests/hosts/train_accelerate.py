"""A training loop under Accelerate, with a journal of every step.

python train_accelerate.py --out DIR --journal FILE [--url URL --local-dir DIR] [--kill-at STEP]
"""

from __future__ import annotations

import os

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import argparse
import hashlib
import json
import signal
from pathlib import Path

import torch
from accelerate import Accelerator  # type: ignore[import-not-found, unused-ignore]
from accelerate.utils import ProjectConfiguration, set_seed  # type: ignore[import-not-found, unused-ignore]

from ckptmgr import CheckpointManager
from ckptmgr.callbacks.accelerate import AccelerateCheckpoints
from ckptmgr.training.loader import ResumableLoader

STEPS, EVERY = 14, 3


def main() -> None:
    options = parse()
    config = ProjectConfiguration(project_dir=str(options.out), automatic_checkpoint_naming=options.naming)
    accelerator = Accelerator(cpu=True, project_config=config)
    set_seed(7)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rows = torch.utils.data.TensorDataset(torch.arange(20), torch.linspace(0, 1, 160).view(20, 8))
    data = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    loader = ResumableLoader(data)
    manager = checkpoints = None
    step = 0
    if options.url:
        manager = CheckpointManager(options.url, local_dir=options.local_dir, transfer="thread", linger_s=5.0)
        checkpoints = AccelerateCheckpoints(accelerator, manager, loader)
        step = checkpoints.restore() or 0
    journal = options.journal.open("a", buffering=1)
    while step < STEPS:
        for ids, values in loader:
            if step + 1 == options.kill_at and manager is not None:
                manager.close(timeout_s=60)
                os.kill(os.getpid(), signal.SIGKILL)
            loss = model(values).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            step += 1
            sha = hashlib.sha256()
            for tensor in (
                *model.state_dict().values(),
                *(s["exp_avg"] for s in optimizer.state_dict()["state"].values()),
            ):
                sha.update(tensor.detach().contiguous().numpy().tobytes())
            facts = {
                "rows": ids.tolist(),
                "loss": loss.item().hex(),
                "weights": sha.hexdigest(),
                "lr": schedule.get_last_lr(),
            }
            journal.write(json.dumps({"step": step, **facts}) + "\n")
            if checkpoints is not None and step % EVERY == 0:
                checkpoints.save(step, reasons=["every"])
            if step == STEPS:
                break
    if manager is not None:
        manager.close()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--url")
    parser.add_argument("--local-dir", type=Path)
    parser.add_argument("--kill-at", type=int, default=0)
    parser.add_argument("--naming", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
