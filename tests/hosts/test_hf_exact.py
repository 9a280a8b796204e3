"""transformers' Trainer, interrupted and resumed with the saving callback: everything is as in the uninterrupted run, to the last bit.

In this process: an interruption is an exception from within the training, after which nothing of it is used any more. `test_hf_trainer.py` sends
signals to real processes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.training.manager import CheckpointManager

# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(300)]

OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}
# Three epochs of 8 micro-batches, two per step.
ROWS, BATCH, ACCUMULATION, STEPS, STEPS_PER_EPOCH, EVALUATE_EVERY = 16, 2, 2, 12, 4, 3


@pytest.fixture(scope="module", autouse=True)
def _offline() -> Iterator[None]:
    """Before the first import: hub clients read their environment once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        import torch

        # Sums depend on how many there are, and more than one only costs time here.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)


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

    def __init__(self, *, noise: bool = False, lengths: bool = False) -> None:
        import torch

        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, 32, (ROWS, 8), generator=generator)
        self.lengths = [4 + row % 5 for row in range(ROWS)] if lengths else [8] * ROWS
        self.noise = noise
        self.asked: list[int] = []

    def __len__(self) -> int:
        return ROWS

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
    """Makes trainings that all do the same, on the run in `folder`."""

    folder: Path
    options: dict[str, Any] = field(default_factory=dict)
    make_rows: Callable[[], Any] = Rows
    change: Callable[[Any], None] = lambda trainer: None
    callback_options: dict[str, Any] = field(default_factory=dict)
    rows: Any = None
    callback: Any = None

    def run(self, *callbacks: Any, save_every: int | None = 1, resume: bool = False, out: str = "out") -> Watched:
        """Train until the end, or until a Crash; without `save_every`, without anything of ours."""
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
            )
            self.callback = SaveModelCallback(manager, save_at_end=False, **self.callback_options)
            ours = [self.callback]
        self.rows = self.make_rows()
        trainer = Trainer(
            model=model,
            args=TrainingArguments(**settings),
            train_dataset=self.rows,
            eval_dataset=[self.rows_for_evaluation(row) for row in range(4)],
            callbacks=[*ours, watched, *callbacks],
        )
        self.change(trainer)
        try:
            trainer.train(resume_from_checkpoint=manager.resume_path() if manager is not None and resume else None)
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


def assert_exact(whole: Watched, resumed: Watched, first: int) -> None:
    """`resumed` began with step `first`, and all it computed until the end is what the uninterrupted run computed."""
    steps = sorted({int(name.split()[0]) for name in resumed.facts if name.endswith("weights")})
    assert steps == list(range(first, STEPS + 1))
    differing = {name: value for name, value in resumed.facts.items() if whole.facts.get(name) != value}
    assert differing == {}
    later = {name for name in whole.facts if int(name.split()[0]) >= first}
    assert later <= resumed.facts.keys()


# Where the first process dies, and the step that the second one goes on from.
INTERRUPTIONS = {
    "epoch boundary": [(("on_step_begin", 4), 4)],
    "mid-epoch": [(("on_step_begin", 6), 6)],
    "twice in one epoch": [(("on_step_begin", 5), 5), (("on_step_begin", 7), 7)],
    "between micro-batches": [(("on_substep_end", 6), 6)],
    "during evaluation": [(("on_prediction_step", 6), 5)],
}


def interrupted(trainings: Trainings, where: str) -> tuple[Watched, int]:
    """Train with interruptions; what the last process computed, and the step that it went on from."""
    saved = 0
    for (event, step), to_save in INTERRUPTIONS[where]:
        trainings.run(crash(event, step), save_every=to_save, resume=saved > 0)
        saved = to_save
    return trainings.run(save_every=STEPS, resume=True), saved


@pytest.fixture(scope="module")
def whole() -> Callable[[str, Trainings], Watched]:
    """The uninterrupted training, without anything of ours, made once per name."""
    made: dict[str, Watched] = {}

    def get(name: str, trainings: Trainings) -> Watched:
        if name not in made:
            made[name] = trainings.run(save_every=None, out="whole")
        return made[name]

    return get


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", INTERRUPTIONS)
def test_resumed_is_as_uninterrupted(
    tmp_path: Path, whole: Callable[[str, Trainings], Watched], where: str, precision: str
) -> None:
    """Losses, gradients' norms, learning rates, weights, optimizer state, batches and random states, of the rest of the epoch and the next ones."""
    trainings = Trainings(tmp_path, {"bf16": precision == "bf16"})
    expected = whole(precision, trainings)
    last, saved = interrupted(trainings, where)
    assert_exact(expected, last, saved + 1)
    assert trainings.callback.proof == (
        "none: the epoch ended with the checkpoint" if saved % STEPS_PER_EPOCH == 0 else "equal"
    )
    assert trainings.callback.restored.drift == ()
    assert trainings.callback.restored.missing == ()


def test_what_was_used_is_not_loaded_again(tmp_path: Path) -> None:
    """A map-style dataset is asked only for what comes after the checkpoint; accelerate's loader is one batch ahead."""
    trainings = Trainings(tmp_path, {"eval_strategy": "no"})
    trainings.run(save_every=None, out="whole")
    order = trainings.rows.asked
    trainings.run(crash("on_step_begin", 6), save_every=6)
    trainings.run(save_every=STEPS, resume=True)
    used = 6 * ACCUMULATION * BATCH
    assert trainings.rows.asked == order[used:]


def make_stream(*, noise: bool = False, states: bool = False, length: bool = True, seeded: bool = False) -> Any:
    """An iterable dataset of the samples of `Rows`, which counts what it yields.

    Args:
        states: it has `state_dict` and `load_state_dict`.
        seeded: it draws its order from the main generator at the start of each iteration.
    """
    import torch

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __init__(self) -> None:
            self.rows = Rows(noise=noise)
            self.start = self.at = 0

        @property
        def asked(self) -> list[int]:
            return self.rows.asked

        def __iter__(self) -> Iterator[Any]:
            self.at, self.start = self.start, 0
            order = torch.randperm(ROWS).tolist() if seeded else list(range(ROWS))
            while self.at < ROWS:
                self.at += 1
                yield self.rows[order[self.at - 1]]

    class Sized(Stream):
        def __len__(self) -> int:
            return ROWS

    kind: Any = Sized if length else Stream
    if states:
        kind.state_dict = lambda self: {"at": self.at % ROWS}
        kind.load_state_dict = lambda self, state: setattr(self, "start", state["at"])
    return kind()


def test_an_iterable_dataset_with_state_is_not_run_through(tmp_path: Path) -> None:
    """It is asked for what comes after the checkpoint only, whatever the Trainer believes that it drops."""
    trainings = Trainings(tmp_path, {"eval_strategy": "no"}, make_rows=lambda: make_stream(states=True))
    trainings.run(crash("on_step_begin", 6), save_every=6)
    trainings.run(save_every=STEPS, resume=True)
    used = 6 * ACCUMULATION * BATCH % ROWS
    assert trainings.rows.asked[: ROWS - used] == list(range(used, ROWS))
    assert trainings.rows.asked[ROWS - used :] == list(range(ROWS))


def use_plain_shuffle(trainer: Any) -> None:
    """A loader whose order and augmentation come from the main generator."""
    from torch.utils.data import DataLoader

    def make() -> Any:
        return DataLoader(trainer.train_dataset, batch_size=BATCH, shuffle=True, collate_fn=trainer.data_collator)

    trainer.get_train_dataloader = make


DATA: dict[str, dict[str, Any]] = {
    "augmentation in this process": {"make_rows": lambda: Rows(noise=True)},
    "order from the main generator": {"options": {"accelerator_config": {"use_seedable_sampler": False}}},
    "grouped by length": {
        "make_rows": lambda: Rows(lengths=True),
        "options": {"train_sampling_strategy": "group_by_length"},
    },
    "workers": {"options": {"dataloader_num_workers": 2}},
    "a loader of the user's": {"change": use_plain_shuffle},
    "iterable": {"make_rows": make_stream},
    "iterable that draws its order": {"make_rows": lambda: make_stream(seeded=True)},
    "iterable with state": {"make_rows": lambda: make_stream(states=True)},
    "iterable with state and augmentation": {"make_rows": lambda: make_stream(states=True, noise=True)},
    "iterable with state, without length": {"make_rows": lambda: make_stream(states=True, noise=True, length=False)},
    "iterable without dispatch": {
        "make_rows": lambda: make_stream(states=True, noise=True),
        "options": {"accelerator_config": {"dispatch_batches": False}},
    },
    "augmentation and a loader of the user's": {"change": use_plain_shuffle, "make_rows": lambda: Rows(noise=True)},
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("where", ["mid-epoch", "twice in one epoch", "epoch boundary"])
def test_resumed_with_other_data_is_as_uninterrupted(
    tmp_path: Path, whole: Callable[[str, Trainings], Watched], where: str, data: str
) -> None:
    """What the Trainer by itself does not come back to: see `huggingface_data`."""
    trainings = Trainings(tmp_path, **DATA[data])
    expected = whole(data, trainings)
    last, saved = interrupted(trainings, where)
    assert_exact(expected, last, saved + 1)


def test_saves_change_nothing(tmp_path: Path) -> None:
    """A run with saves computes what one without any does."""
    trainings = Trainings(tmp_path, make_rows=lambda: Rows(noise=True))
    whole = trainings.run(save_every=None, out="whole")
    assert trainings.run(save_every=2).facts == whole.facts


class TestFirstBatch:
    def test_another_dataset(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Same length, same order, other content: training goes on, and it is said."""
        trainings = Trainings(tmp_path)
        trainings.run(crash("on_step_begin", 6), save_every=6)
        trainings.make_rows = lambda: Rows(noise=True)
        trainings.run(save_every=STEPS, resume=True)
        assert trainings.callback.proof == "different"
        assert "the first batch is not the one that the checkpoint expected" in caplog.text
        assert "first batch: different" in trainings.callback.restored.notes

    def test_refused(self, tmp_path: Path) -> None:
        """Before any of it was trained on."""
        from ckptmgr.core.errors import IncompatibleStateError

        trainings = Trainings(tmp_path, callback_options={"on_mismatch": "raise"})
        trainings.run(crash("on_step_begin", 6), save_every=6)
        trainings.make_rows = lambda: Rows(noise=True)
        with pytest.raises(IncompatibleStateError, match="first batch"):
            trainings.run(save_every=STEPS, resume=True)

    def test_other_accumulation(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """K001: the Trainer computes its place from the arguments of now, and so leaves samples out; it is said, with both places."""
        trainings = Trainings(tmp_path)
        trainings.run(crash("on_step_begin", 5), save_every=5)
        trainings.options = {"gradient_accumulation_steps": 1}
        trainings.run(save_every=STEPS, resume=True)
        assert (
            "made after micro-batch 2 of epoch 1, and the Trainer goes on after micro-batch 5 of epoch 0" in caplog.text
        )
        assert "accumulation: 2 in the checkpoint, 1 now" in caplog.text
        assert trainings.callback.proof == "different"


def test_the_manifest_and_the_checkpoint_say_what_is_needed(tmp_path: Path) -> None:
    """The conditions in the manifest; the entry in trainer_state.json is JSON that any reader can skip."""
    trainings = Trainings(tmp_path)
    trainings.run(crash("on_step_begin", 6), save_every=6)
    manager = CheckpointManager(tmp_path / "store/run", local_dir=tmp_path / "disk")
    manifest = manager.list()[-1]
    assert manifest.conditions["batch_size"] == BATCH
    assert manifest.conditions["accumulation"] == ACCUMULATION
    assert manifest.conditions["dataset_length"] == ROWS
    assert manifest.conditions["world_size"] == 1
    assert manifest.conditions["versions"].keys() >= {"torch", "transformers", "accelerate"}
    state = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_bytes())
    data = state["stateful_callbacks"]["ckptmgr"]["attributes"]["data"]
    assert (data["step"], data["epoch"], data["batches"]) == (6, 1, 4)
    assert data["next"].keys() == {"samples", "content"}
