"""Small trainings in transformers' Trainer, in this process, that can be interrupted, resumed and compared. No test by itself."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.training.manager import CheckpointManager

# Three epochs of 8 micro-batches, two per step.
ROWS, BATCH, ACCUMULATION, STEPS, STEPS_PER_EPOCH, EVALUATE_EVERY = 16, 2, 2, 12, 4, 3


class Crash(Exception):
    """The machine is gone."""


@dataclass
class Watched:
    """What one training computed, by step."""

    facts: dict[str, Any] = field(default_factory=dict)
    batches: list[str] = field(default_factory=list)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **_: Any
    ) -> None:
        step = state.global_step
        self.facts[f"{step} weights"] = digest(model.state_dict())
        self.facts[f"{step} optimizer"] = digest(optimizer.state_dict())
        self.facts[f"{step} random"] = random_states()
        self.facts[f"{step} batches"], self.batches = self.batches, []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        for name in ("loss", "eval_loss", "learning_rate", "grad_norm"):
            if name in logs:
                self.facts[f"{state.global_step} {name}"] = float(logs[name]).hex()

    def saw(self, module: Any, args: Any, inputs: Mapping[str, Any]) -> None:
        """A hook before the model's forward: which samples, with what in them."""
        if module.training:
            self.batches.append(digest(dict(inputs)))

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None


def digest(tree: Any) -> str:
    import torch

    sha = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            sha.update(f"{value.dtype}{tuple(value.shape)}".encode())
            sha.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, Mapping):
            for key, item in value.items():
                sha.update(str(key).encode())
                add(item)
        elif isinstance(value, (list, tuple)):
            for item in value:
                add(item)
        else:
            sha.update(repr(value).encode())

    add(tree)
    return sha.hexdigest()


def random_states() -> str:
    import numpy as np
    import torch

    numpy_state: Any = np.random.get_state()
    return digest(
        [random.getstate(), [str(each) for each in numpy_state], numpy_state[1].tolist(), torch.get_rng_state()]
    )


def crash(event: str, step: int, *, after: int = 1) -> Any:
    """A callback that raises at the `after`-th `event` once `step` steps are finished."""

    class Interrupter:
        def __init__(self) -> None:
            self.count = 0

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("on_"):
                raise AttributeError(name)

            def hook(args: Any, state: Any, control: Any, **_: Any) -> None:
                if name == event and state.global_step == step:
                    self.count += 1
                    if self.count == after:
                        raise Crash

            return hook

    return Interrupter()


class Rows:
    """A map-style dataset that counts what it is asked for; with `noise`, one that draws from the main generators."""

    def __init__(self, *, rows: int = ROWS, noise: bool = False, lengths: bool = False) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 32, (rows, 8), generator=generator)
        self.lengths = [4 + row % 5 for row in range(rows)] if lengths else [8] * rows
        self.noise = noise
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, Any]:
        self.asked.append(row)
        return {name: self.sample(row) for name in ("input_ids", "labels")} | {"row": row}

    def sample(self, row: int) -> Any:
        import numpy as np
        import torch

        tokens = self.tokens[row].clone()
        if self.noise:
            tokens[random.randrange(8)] = int(torch.randint(0, 32, ()))
            tokens[np.random.randint(8)] = 3
        return tokens


@dataclass
class Trainings:
    """Makes trainings that all do the same, on the run in `folder`.

    Attributes:
        trainer: makes another Trainer than transformers', of its settings and what that is given besides.
    """

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    make_rows: Callable[[], Any] = Rows
    change: Callable[[Any], None] = lambda trainer: None
    trainer: Callable[..., Any] | None = None
    callback_options: dict[str, Any] = field(default_factory=dict)
    manager_options: dict[str, Any] = field(default_factory=dict)
    rows: Any = None
    callback: Any = None

    def run(
        self,
        *callbacks: Any,
        also: tuple[Any, ...] = (),
        save_every: int | None = 1,
        resume: bool | int = False,
        out: str = "out",
    ) -> Watched:
        """Train until the end, or with `callbacks` until a Crash; without `save_every`, without anything of ours.

        Args:
            resume: from the newest checkpoint, or from that of a step.
        """
        import torch
        from transformers import (  # type: ignore[import-not-found, unused-ignore]
            LlamaConfig,
            LlamaForCausalLM,
            Trainer,
            TrainingArguments,
        )

        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            attention_dropout=0.2,
        )
        settings = {
            "output_dir": str(self.folder / out),
            "max_steps": STEPS,
            "per_device_train_batch_size": BATCH,
            "gradient_accumulation_steps": ACCUMULATION,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "save_strategy": "no",
            "eval_strategy": "steps",
            "eval_steps": EVALUATE_EVERY,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "seed": 7,
            **self.options,
        }
        watched, model = Watched(), LlamaForCausalLM(config)
        model.register_forward_pre_hook(watched.saw, with_kwargs=True)
        manager = None
        ours: list[Any] = []
        if save_every is not None:
            manager = CheckpointManager(
                self.folder / "store/run",
                local_dir=self.folder / "disk",
                save=EveryNSteps(save_every),
                keep_local=KeepLast(100),
                transfer="thread",
                **self.manager_options,
            )
            self.callback = SaveModelCallback(manager, save_at_end=False, **self.callback_options)
            ours = [self.callback]
        self.rows = self.make_rows()
        make = self.trainer or (lambda settings, **how: Trainer(args=TrainingArguments(**settings), **how))
        trainer = make(
            settings,
            model=model,
            train_dataset=self.rows,
            eval_dataset=[self.rows_for_evaluation(row) for row in range(4)],
            callbacks=[*ours, watched, *also, *callbacks],
        )
        self.change(trainer)
        path = None
        if manager is not None and resume is not False:
            path = manager.resume_path("latest" if resume is True else str(resume))
        try:
            trainer.train(resume_from_checkpoint=path)
        except Crash:
            # What is on the disk is what a dead process would have left: the save is committed before the next step.
            assert manager is not None
            manager.close()
        else:
            assert not callbacks, "the training was to crash"
        assert not ours or self.callback.failures == 0
        return watched

    @staticmethod
    def rows_for_evaluation(row: int) -> dict[str, Any]:
        return {name: Rows().tokens[row] for name in ("input_ids", "labels")}


def assert_exact(whole: Watched, resumed: Watched, first: int, last: int = STEPS) -> None:
    """`resumed` began with step `first`, and all it computed until the end is what the uninterrupted run computed."""
    steps = sorted({int(name.split()[0]) for name in resumed.facts if name.endswith("weights")})
    assert steps == list(range(first, last + 1))
    differing = {name: value for name, value in resumed.facts.items() if whole.facts.get(name) != value}
    assert differing == {}
    later = {name for name in whole.facts if int(name.split()[0]) >= first}
    assert later <= resumed.facts.keys()


def make_stream(
    *, rows: int = ROWS, noise: bool = False, states: bool = False, length: bool = True, seeded: bool = False
) -> Any:
    """An iterable dataset of the samples of `Rows`, which counts what it yields.

    Args:
        states: it has `state_dict` and `load_state_dict`.
        seeded: it draws its order from the main generator at the start of each iteration.
    """
    import torch

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.rows = Rows(rows=rows, noise=noise)
            self.start = self.at = 0

        @property
        def asked(self) -> list[int]:
            return self.rows.asked

        def __iter__(self) -> Iterator[Any]:
            self.at, self.start = self.start, 0
            order = torch.randperm(rows).tolist() if seeded else list(range(rows))
            while self.at < rows:
                self.at += 1
                yield self.rows[order[self.at - 1]]

    class Sized(Stream):
        def __len__(self) -> int:
            return rows

    kind: Any = Sized if length else Stream
    if states:
        kind.state_dict = lambda self: {"at": self.at % rows}
        kind.load_state_dict = lambda self, state: setattr(self, "start", state["at"])
    return kind()
