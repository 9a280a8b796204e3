"""A training script as a user of Lightning would write one, with a journal of every step and ways to interrupt itself.

python train_lightning.py --journal FILE [--url URL --local-dir DIR] [--resume PATH|manager]
"""

from __future__ import annotations

import os

os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import argparse
import hashlib
import json
import logging
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import lightning as L  # type: ignore[import-not-found, unused-ignore]
import torch

from ckptmgr import Best, CheckpointManager, EveryNEpochs, EveryNSteps
from ckptmgr.callbacks import EarlyStoppingCallback, LogCallback, LossMonitorCallback
from ckptmgr.callbacks.lightning import LightningCallback
from ckptmgr.callbacks.lightning_events import LightningCallbacks

BATCHES = 8


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with noise, so that the random state matters when a sample is loaded, too."""

    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((8,), index / 32) + 0.1 * torch.randn(8), torch.tensor(index)


class Stream(torch.utils.data.IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Without a length: Lightning fetches ahead."""

    def __iter__(self) -> Any:
        rows = Rows()
        for index in torch.randperm(len(rows)).tolist():
            yield rows[index]


def digest(value: Any) -> str:
    sha = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.Tensor):
            sha.update(part.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(part, dict):
            for key in part:
                sha.update(str(key).encode())
                add(part[key])
        elif isinstance(part, (list, tuple)):
            for each in part:
                add(each)
        else:
            sha.update(repr(part).encode())

    add(value)
    return sha.hexdigest()


class Module(L.LightningModule):  # type: ignore[misc, unused-ignore]
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        self.rows: list[int] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.rows += batch[1].tolist()
        loss: torch.Tensor = (self.net(batch[0]).squeeze(-1) - batch[1] / 32).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", (self.net(batch[0]).squeeze(-1) - batch[1] / 32).square().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.options.plateau:
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, factor=0.5, threshold=0.9
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def train_dataloader(self) -> Any:
        if self.options.stream:
            return torch.utils.data.DataLoader(Stream(), batch_size=4 // self.options.devices)
        return torch.utils.data.DataLoader(
            Rows(), batch_size=4 // self.options.devices, shuffle=True, num_workers=self.options.workers
        )

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(Rows(), batch_size=16)


class Journal(L.Callback):  # type: ignore[misc, unused-ignore]
    """One JSON line per optimizer step, flushed at once. Of each rank in a file of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.step = -1

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.file = self.path.with_name(f"{self.path.name}{trainer.global_rank or ''}").open("a", buffering=1)
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        optimizer = trainer.optimizers[0]
        facts = {
            "weights": digest(module.state_dict()),
            "optimizer": digest(optimizer.state_dict()),
            "lr": float(optimizer.param_groups[0]["lr"]).hex(),
            "rows": module.rows,
            "loss": float(outputs["loss"]).hex(),
            "random": digest(torch.get_rng_state()),
        }
        module.rows = []
        self.file.write(json.dumps({"step": self.step, **facts}) + "\n")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            value = float(trainer.callback_metrics["val_loss"]).hex()
            self.file.write(json.dumps({"step": trainer.global_step, "val_loss": value}) + "\n")


class Interrupt(L.Callback):  # type: ignore[misc, unused-ignore]
    """Sends a signal to this process, on one rank; number 0 raises."""

    def __init__(self, number: int, where: str, step: int, rank: int, manager: CheckpointManager | None) -> None:
        self.number, self.where, self.step, self.rank, self.manager = number, where, step, rank, manager
        self.sent = False

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if trainer.global_rank == self.rank:
            self.act("substep" if index % 2 else "step", trainer.global_step + 1)

    def on_validation_batch_start(self, trainer: Any, module: Any, batch: Any, index: int, *rest: Any) -> None:
        if not trainer.sanity_checking and trainer.global_rank == self.rank:
            self.act("validation", trainer.global_step)

    def act(self, where: str, step: int) -> None:
        if self.sent or (where, step) != (self.where, self.step):
            return
        self.sent = True
        deadline = time.monotonic() + 60
        if self.number == signal.SIGKILL and self.manager:
            self.manager.wait_saved(60)
        while self.number == signal.SIGKILL and self.manager and self.manager.status().uploads.pending:
            if time.monotonic() > deadline:
                raise TimeoutError("uploads do not end")
            threading.Event().wait(0.05)
        if not self.number:
            raise RuntimeError("as asked for")
        os.kill(os.getpid(), self.number)


def main() -> None:
    options = parse()
    warnings.simplefilter("ignore")
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ckptmgr").setLevel(logging.INFO)
    # Each rank draws numbers of its own.
    L.seed_everything(7 + int(os.environ.get("LOCAL_RANK", "0")), verbose=False)
    manager = None
    callbacks: list[Any] = [Journal(options.journal)]
    if options.stop:
        from lightning.pytorch.callbacks import EarlyStopping  # type: ignore[import-not-found, unused-ignore]

        callbacks.append(EarlyStopping("val_loss", patience=0, min_delta=10.0))
    if options.url:
        policy: Any = EveryNEpochs(1) if options.save_every == 0 else EveryNSteps(options.save_every)
        manager = CheckpointManager(
            options.url, local_dir=options.local_dir, save=policy | Best("val_loss"), linger_s=5.0, transfer="thread"
        )
        callbacks.append(LightningCallback(manager))
    if options.ours:
        callbacks.append(
            LightningCallbacks(
                [
                    LossMonitorCallback(log_interval=2),
                    EarlyStoppingCallback("val_loss", patience=1, min_delta=0.01),
                    LogCallback(directory=options.journal.parent / "logs"),
                ]
            )
        )
    if options.send:
        callbacks.append(
            Interrupt(getattr(signal, options.send, 0), options.where, options.when, options.rank, manager)
        )
    limits = {"max_steps": options.steps} if options.by_steps else {"max_epochs": 3}
    plugins: list[Any] = []
    precision: Any = options.precision
    if precision == "16-mixed":
        from lightning.pytorch.plugins import MixedPrecision  # type: ignore[import-not-found, unused-ignore]

        plugins, precision = [MixedPrecision("16-mixed", "cpu")], None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(options.url),
        default_root_dir=options.journal.parent,
        callbacks=callbacks,
        accumulate_grad_batches=options.accumulate,
        val_check_interval=None if options.stream else options.val_every,
        precision=precision,
        plugins=plugins,
        **limits,
    )
    resume: Any = options.resume or None
    if resume == "manager" and manager is not None:
        resume = manager.resume_path()
    trainer.fit(Module(options), ckpt_path=resume)
    for each in callbacks:
        if isinstance(each, LightningCallback):
            print("proof:", each.proof, "failures:", each.failures, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--url")
    parser.add_argument("--local-dir", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--send")
    parser.add_argument("--where", default="step", choices=("step", "substep", "validation"))
    parser.add_argument("--when", type=int, default=0)
    parser.add_argument("--rank", type=int, default=0, help="the one that gets the signal")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--ours", action="store_true", help="callbacks of ours, too")
    parser.add_argument("--save-every", type=int, default=3, help="steps; 0: each epoch")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--by-steps", action="store_true")
    parser.add_argument("--accumulate", type=int, default=2)
    parser.add_argument("--val-every", type=int, default=4)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--precision", default="32-true")
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--plateau", action="store_true")
    parser.add_argument("--stop", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
