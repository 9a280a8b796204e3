"""A training script as a user of Hugging Face's Trainer would write one, with a journal of every step and ways to interrupt itself.

    python train_hf.py --out DIR --journal FILE [--url URL --local-dir DIR] [--resume PATH|auto|manager]

Offline, on the CPU, with a model of 20 thousand parameters and dropout, so that the random state matters.
"""

from __future__ import annotations

import os

# Before the imports: hub clients read their environment once. Float sums depend on the number of threads.
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    TOKENIZERS_PARALLELISM="false",
    CUDA_VISIBLE_DEVICES="",
    OMP_NUM_THREADS="1",
)

import argparse
import hashlib
import json
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (  # type: ignore[import-not-found, unused-ignore]
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from ckptmgr import Best, CheckpointManager, EveryNSteps
from ckptmgr.callbacks import SaveModelCallback

STEPS, EVALUATE_EVERY = 20, 5


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(0, 64, (size, 16), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def digest(model: torch.nn.Module) -> str:
    """Over the bytes of all weights: equal only if equal to the last bit."""
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


class Journal(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """One JSON line per step and per log, flushed at once: a SIGKILL loses none."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a", buffering=1)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.file.write(json.dumps({"step": state.global_step, "weights": digest(model)}) + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        for name in ("loss", "eval_loss"):
            if name in logs:
                self.file.write(json.dumps({"step": state.global_step, name: float(logs[name]).hex()}) + "\n")


class Interrupt(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Sends this process a signal at one event of one step; SIGKILL only once everything saved is in the store."""

    def __init__(self, number: int, where: str, step: int, manager: CheckpointManager | None) -> None:
        self.number, self.where, self.step, self.manager = number, where, step, manager
        self.sent = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act("step_begin", state.global_step + 1)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act("substep_end", state.global_step + 1)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.act("prediction_step", state.global_step)

    def act(self, where: str, step: int) -> None:
        # Of several ranks one hears it, and all must end.
        if self.sent or (where, step) != (self.where, self.step) or os.environ.get("RANK", "0") != "0":
            return
        self.sent = True
        deadline = time.monotonic() + 60
        while self.number == signal.SIGKILL and self.manager and self.manager.status().uploads.pending:
            if time.monotonic() > deadline:
                raise TimeoutError("uploads do not end")
            threading.Event().wait(0.05)
        os.kill(os.getpid(), self.number)


class Slow(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Makes each step last, so that what waits for a while has a step to meet."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        threading.Event().wait(self.seconds)


def main() -> None:
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("ckptmgr").setLevel(logging.INFO)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            attention_dropout=0.1,
        )
    )
    args = TrainingArguments(
        output_dir=str(options.out),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_strategy="no",
        save_total_limit=1,
        eval_strategy="steps",
        eval_steps=EVALUATE_EVERY,
        enable_jit_checkpoint=options.jit,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        seed=7,
    )
    callbacks: list[Any] = []
    manager = None
    if options.url:
        periodic = EveryNSteps(options.save_every)
        manager = CheckpointManager(
            options.url,
            local_dir=options.local_dir,
            save=periodic if options.jit else periodic | Best("eval_loss"),
            linger_s=5.0,
        )
        callbacks.append(
            SaveModelCallback(manager, save_at_end=not options.jit, preemption=False if options.jit else None)
        )
    callbacks.append(Journal(options.journal))
    if options.send:
        callbacks.append(Interrupt(getattr(signal, options.send), options.where, options.when, manager))
    if options.slow:
        callbacks.append(Slow(options.slow))
    trainer = Trainer(model=model, args=args, train_dataset=Rows(48), eval_dataset=Rows(16), callbacks=callbacks)
    resume: Any = options.resume or None
    if resume == "auto":
        resume = True
    elif resume == "manager" and manager is not None:
        resume = manager.resume_path()
    trainer.train(resume_from_checkpoint=resume)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # On a busy machine a native thread of torch's now and then aborts or holds up the end of the interpreter, when everything is done.
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--url", help="the run to save to")
    parser.add_argument("--local-dir", type=Path)
    parser.add_argument("--resume")
    parser.add_argument("--send", help="the name of the signal to send to itself")
    parser.add_argument("--where", default="step_begin", choices=("step_begin", "substep_end", "prediction_step"))
    parser.add_argument("--when", type=int, default=0, help="the step at which")
    parser.add_argument(
        "--jit", action="store_true", help="HF's own checkpoint at SIGTERM, in place of ours and of a last save"
    )
    parser.add_argument("--save-every", type=int, default=5)
    parser.add_argument("--slow", type=float, default=0.0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
