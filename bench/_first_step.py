"""One way to the first step after an interruption, measured without its imports: `python _first_step.py ACTION SIZE_MIB WHERE [S5CMD ENDPOINT]`.

save   SIZE_MIB RUN       not measured: the first step, saved and uploaded by ours
write  SIZE_MIB FILE      not measured: the same state in one file by torch.save, as a loop without us would have it
ours   SIZE_MIB RUN       `manager.restore` (choose, download, verify every byte, load), and a step
s5cmd  SIZE_MIB OBJECT    `s5cmd cp`, `torch.load`, load, and a step; nothing is verified

The last two print what they took, and the loss of the step, which must be the same for both.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from _clock import measured

from ckptmgr.backends.registry import open_store
from ckptmgr.training.manager import CheckpointManager

WIDTH = 2048
LAYER_MIB = 16
TIER = Path("tier")


class Training:
    """Layers of 16 MiB with Adam, whose state is twice the weights: of `size_mib` altogether."""

    def __init__(self, size_mib: int) -> None:
        torch.manual_seed(1)
        torch.set_num_threads(2)
        layers = max(1, size_mib // (3 * LAYER_MIB))
        self.model = torch.nn.Sequential(
            *(torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(layers))
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.loss = float("nan")

    def initialise(self) -> None:
        """Weights of their own; a training that resumes does without."""
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=WIDTH**-0.5)

    def step(self) -> None:
        """One step on one sample, the same each time."""
        loss = self.model(torch.linspace(-1, 1, WIDTH).unsqueeze(0)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def save(training: Training, where: str) -> None:
    training.initialise()
    training.step()
    with CheckpointManager(where, local_dir=TIER, strict=True) as manager:
        manager.save(1, training.state, wait=True)


def write(training: Training, where: str) -> None:
    training.initialise()
    training.step()
    torch.save({name: piece.state_dict() for name, piece in training.state.items()}, where)


def ours(training: Training, where: str) -> None:
    manager = CheckpointManager(where, local_dir=TIER)
    if manager.restore(training.state) is None:
        sys.exit("error: there is nothing to restore")
    training.step()


def s5cmd(training: Training, where: str, program: str, endpoint: str) -> None:
    fetched = Path("fetched.pt")
    subprocess.run([program, "--log", "error", "--endpoint-url", endpoint, "cp", where, str(fetched)], check=True)
    state = torch.load(fetched, map_location="cpu", weights_only=True)
    training.model.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.step()


ACTIONS = {"save": save, "write": write, "ours": ours, "s5cmd": s5cmd}


def main() -> int:
    """Do it once."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("action", choices=ACTIONS)
    parser.add_argument("size_mib", type=int)
    parser.add_argument("where")
    parser.add_argument("more", nargs="*")
    options = parser.parse_args()
    training = Training(options.size_mib)
    action = ACTIONS[options.action]
    if options.action in ("save", "write"):
        action(training, options.where)
        return 0
    # Imports what a training has imported anyway, and the modules of the store; no request, no client.
    for name in ("ckptmgr.run.cache", "ckptmgr.run.resume", "safetensors"):
        importlib.import_module(name)
    open_store("s3://bench")
    measured(lambda: action(training, options.where, *options.more), lambda: {"loss": training.loss})
    return 0


if __name__ == "__main__":
    sys.exit(main())
