"""The demo's training script, as a user would write one: `python -m ckptmgr.demo.train --report OUT.json [--run URL] [--resume DIR]`."""

from __future__ import annotations

import argparse
import json
import logging
from functools import partial
from pathlib import Path

import torch

from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.checksums import Digester
from ckptmgr.core.policies import Best, EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.demo.model import CharTransformer, Windows, standard_library_text
from ckptmgr.demo.paced import PacedBackend
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training.manager import CheckpointManager

_LOG_EVERY = 1


def main() -> None:
    options = _options()
    logging.basicConfig(level=logging.WARNING, format="    %(message)s")
    logging.getLogger("ckptmgr").setLevel(logging.INFO)
    logging.getLogger("ckptmgr.backends").setLevel(logging.WARNING)
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)

    text = standard_library_text()
    cut = len(text) * 9 // 10
    batches = torch.utils.data.DataLoader(Windows(text[:cut], stride=160), batch_size=8, shuffle=True, drop_last=True)
    held_out = torch.utils.data.DataLoader(Windows(text[cut:], stride=640), batch_size=32)
    model = CharTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=options.steps)
    callbacks = []
    if options.run:
        manager = CheckpointManager(
            options.run,
            local_dir=options.local_dir,
            save=EveryNSteps(options.save_every) | Best("eval_loss", mode="min"),
            keep=KeepLast(options.keep_last) if options.keep_last else None,
            wrap_backend=partial(PacedBackend, seconds=options.slow),
        )
        callbacks.append(SaveModelCallback(manager))
    trainer = Trainer(
        model,
        TrainingArguments(
            max_steps=options.steps,
            gradient_accumulation_steps=2,
            logging_steps=_LOG_EVERY,
            eval_steps=options.save_every,
        ),
        train_dataloader=batches,
        eval_dataloader=held_out,
        optimizer=optimizer,
        lr_scheduler=scheduler,
        callbacks=callbacks,
    )
    result = trainer.train(resume_from=options.resume)
    _report(options.report, trainer, result.steps_run)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ckptmgr.demo.train", description=__doc__)
    parser.add_argument(
        "--report", type=Path, required=True, help="where to write losses and the digest of the weights"
    )
    parser.add_argument("--run", help="the run to save to; without it, nothing is saved")
    parser.add_argument("--local-dir", type=Path, help="the local tier")
    parser.add_argument("--resume", type=Path, help="the checkpoint directory to go on from")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument(
        "--keep-last", type=int, metavar="N", help="prune the run to its newest N; without it, all stay"
    )
    parser.add_argument("--slow", type=float, default=0.0, help="seconds that each uploaded file takes longer")
    return parser.parse_args()


def _report(path: Path, trainer: Trainer, steps_run: int) -> None:
    """Losses as exact hexadecimal floats, and BLAKE3 over the bytes of all weights: equal only if equal to the last bit."""
    digester = Digester()
    for name, tensor in sorted(trainer.model.state_dict().items()):
        digester.update(name.encode())
        digester.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    losses = {
        f"{entry['step']}:{name}": float(entry[name]).hex()
        for entry in trainer.state.log_history
        for name in ("loss", "eval_loss")
        if name in entry
    }
    path.write_text(json.dumps({"losses": losses, "weights": digester.digests().blake3, "steps_run": steps_run}))


if __name__ == "__main__":
    main()
