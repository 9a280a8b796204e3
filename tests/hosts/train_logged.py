"""A training in transformers' Trainer that writes to all sinks of LogCallback. No test by itself.

    python train_logged.py OUT [--resume CHECKPOINT] [--kill-after STEP]

Losses of step 6 that are logged are not finite.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
from typing import Any

import torch
from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found, unused-ignore]

from ckptmgr.callbacks.base import Callback, Priority
from ckptmgr.callbacks.log import LogCallback
from ckptmgr.callbacks.log_sinks import TensorBoardSink

STEPS = 8


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guess = self.line(x).squeeze(-1)
        return {"loss": (guess - labels).square().mean(), "logits": guess}


class Spoil(Callback):
    """Makes what is logged of step 6 what no JSON has a number for."""

    priority = Priority.FIRST

    def on_log(self, state: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        if state.global_step == 6 and "loss" in logs:
            logs.update({"loss": math.nan, "high": math.inf, "low": -math.inf})


class Kill(Callback):
    """The machine goes after a step has been logged, and TensorBoard's thread has written it."""

    def __init__(self, step: int, log: LogCallback) -> None:
        self.step = step
        self.log = log

    def on_step_begin(self, state: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            for sink in self.log.sinks:
                if isinstance(sink, TensorBoardSink):
                    sink._writer.flush()
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--resume")
    parser.add_argument("--kill-after", type=int, default=-1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    points = torch.randn(32, 4)
    rows = [{"x": point, "labels": point.sum()} for point in points]
    log = LogCallback(
        options.out,
        sinks=[
            "jsonl",
            "tensorboard",
            {"wandb": {"project": "tests", "dir": options.out, "id": "one", "resume": "allow"}},
        ],
        log_interval=2,
        histogram_interval=3,
    )
    trainer = Trainer(
        Model(),
        TrainingArguments(
            f"{options.out}/trainer",
            max_steps=STEPS,
            per_device_train_batch_size=4,
            logging_steps=2,
            eval_strategy="steps",
            eval_steps=4,
            save_steps=4,
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[Spoil(), log, Kill(options.kill_after, log)],
    )
    trainer.train(resume_from_checkpoint=options.resume)
    assert log.lost == log.failures == 0


if __name__ == "__main__":
    main()
