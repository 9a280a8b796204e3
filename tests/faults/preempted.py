"""Trainings of the embedded Trainer with everything around it, each in a process of its own that is signalled at an exact place.

Reads one job per line of standard input, as JSON, and forks for it, so that torch is imported once. The child leads a session of its own, writes to the
pipe `out` and the file `err`, and ends as any program does. Answers `{"pid": …}` at once, and `{"code": …}` or `{"signal": …}` at its end.

    {"url": …, "disk": …, "out": …, "err": …, "at": ["forward", 5], "send": [15]}

A training prints a line of JSON per step, `{"step": 3, "loss": "0x1.8p+0"}`, and `{"at": [place, nth]}` when it comes to the place `at`. There it
sends itself the signals `send`; with `stay` it then waits there for ever, with `until_workers_end` until the loaders' workers are dead. (Those end
without an error when it is their parent that signals them.)

Places: `sample` (a training sample is loaded), `worker_sample` (the same in a worker process), `forward`, `evaluation`, `optimizer` (in the middle of
its step), `copy` (a piece of the state is asked for its state), `write` (a file of a save is opened, in the writer's thread).
"""

from __future__ import annotations

import json
import logging
import multiprocessing.connection
import os
import random
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ckptmgr import CheckpointManager, EveryNSteps, Preemption, Trainer, TrainingArguments
from ckptmgr.callbacks import Callback, SaveModelCallback

JOB: dict[str, Any] = {}
_seen: dict[str, int] = {}


def say(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def here(place: str) -> None:
    _seen[place] = _seen.get(place, 0) + 1
    if [place, _seen[place]] != JOB.get("at"):
        return
    say(at=JOB["at"])
    for number in JOB.get("send", ()):
        os.kill(os.getpid(), number)
    if JOB.get("stay"):
        threading.Event().wait()
    if JOB.get("until_workers_end"):
        for worker in multiprocessing.active_children():
            multiprocessing.connection.wait([worker.sentinel], 60)


class Rows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows with random augmentation."""

    def __init__(self, size: int, place: str) -> None:
        rows = torch.Generator().manual_seed(3)
        self.x = torch.randn(size, 6, generator=rows)
        self.place = place

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.rand(6) + random.random()
        if self.place:
            here(self.place if get_worker_info() is None else f"worker_{self.place}")
        return self.x[index] + 0.01 * noise, self.x[index].sum(dim=0, keepdim=True)


class Torn(torch.optim.AdamW):
    """Can be interrupted where half of the parameters are changed."""

    def step(self, closure: Any = None) -> Any:
        groups = self.param_groups
        for group in groups:
            parameters = group["params"]
            for half in (parameters[:2], parameters[2:]):
                group["params"] = half
                super().step(closure)
                here("optimizer")
            group["params"] = parameters


class Ballast:
    """A piece of the state that is asked at each save, and makes it as large as wanted."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8)

    def state_dict(self) -> dict[str, Any]:
        here("copy")
        return {"bytes": self.bytes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bytes = state["bytes"]


class Says(Callback):
    priority = 0  # before the manager is closed

    def on_step_end(self, state: Any, outputs: Any, **kwargs: Any) -> None:
        say(step=state.global_step, loss=float(outputs["loss"]).hex())

    def on_evaluate(self, state: Any, metrics: Any, **kwargs: Any) -> None:
        say(evaluated=state.global_step, loss=float(metrics["eval_loss"]).hex())

    def on_exception(self, exception: Any, **kwargs: Any) -> None:
        say(exception=repr(exception))

    def on_train_end(self, **kwargs: Any) -> None:
        say(end=True)


def watch_writes(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or not isinstance(arguments[2], int) or not arguments[2] & (os.O_WRONLY | os.O_RDWR):
        return
    if str(arguments[0]).endswith("model.safetensors") and threading.current_thread() is not threading.main_thread():
        here("write")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    random.seed(0)
    torch.manual_seed(0)
    sys.addaudithook(watch_writes)
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1)
    )
    optimizer = Torn(model.parameters(), lr=0.01)

    def loss_fn(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        here("forward" if model.training else "evaluation")
        return (model(batch[0]) - batch[1]).square().mean()  # type: ignore[no-any-return]

    manager = CheckpointManager(
        JOB["url"],
        local_dir=JOB["disk"],
        save=EveryNSteps(JOB.get("every", 2)),
        preemption=Preemption(repeat_s=0.0, **JOB.get("preemption", {})),
        linger_s=JOB.get("linger_s", 0.0),
        **({"queue": JOB["queue"]} if "queue" in JOB else {}),
    )
    trainer = Trainer(
        model,
        TrainingArguments(
            max_steps=JOB.get("max_steps", 8), gradient_accumulation_steps=3, eval_steps=3, logging_steps=2
        ),
        train_dataloader=DataLoader(Rows(40, "sample"), batch_size=4, shuffle=True, num_workers=JOB.get("workers", 0)),
        eval_dataloader=DataLoader(Rows(12, ""), batch_size=4, num_workers=JOB.get("workers", 0)),
        optimizer=optimizer,
        loss_fn=loss_fn,
        callbacks=[SaveModelCallback(manager), Says()],
        pieces={"ballast": Ballast(JOB.get("ballast", 1000))},
    )
    path = manager.resume_path() if Path(JOB["disk"]).exists() else None
    trainer.train(path)
    say(done=True)


def next_job() -> dict[str, Any] | None:
    """In the child: what to do. In the parent: None, when there are no more."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            return json.loads(line)  # type: ignore[no-any-return]
        print(json.dumps({"pid": pid}), flush=True)
        status = os.waitpid(pid, 0)[1]
        code = os.waitstatus_to_exitcode(status)
        print(json.dumps({"signal": -code} if code < 0 else {"code": code}), flush=True)
    return None


def begin(job: dict[str, Any]) -> None:
    """As a program that was just started."""
    os.setsid()
    for number, path, flags in [
        (0, os.devnull, os.O_RDONLY),
        (1, job["out"], os.O_WRONLY),
        (2, job["err"], os.O_WRONLY | os.O_CREAT),
    ]:
        fd = os.open(path, flags)
        os.dup2(fd, number)
        os.close(fd)
    os.environ.update(job["env"])
    JOB.update(job)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # The first optimizer imports 800 modules more, which takes longer than a training.
    torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    if (found := next_job()) is not None:
        begin(found)
        main()
