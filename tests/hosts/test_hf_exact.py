"""transformers' Trainer, interrupted and resumed with the saving callback: everything is as in the uninterrupted run, to the last bit.

In this process: an interruption is an exception from within the training, after which nothing of it is used any more. `test_hf_trainer.py` sends
signals to real processes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("offline", "one_thread"),
]

# To pytest, the folders of tests are packages.
hf: Any = importlib.import_module("tests.hosts.hf_trainings")


# Where the first process dies, and the step that the second one goes on from.
INTERRUPTIONS = {
    "epoch boundary": [(("on_step_begin", 4), 4)],
    "mid-epoch": [(("on_step_begin", 6), 6)],
    "twice in one epoch": [(("on_step_begin", 5), 5), (("on_step_begin", 7), 7)],
    "between micro-batches": [(("on_substep_end", 6), 6)],
    "during evaluation": [(("on_prediction_step", 6), 5)],
}


def interrupted(trainings: hf.Trainings, where: str) -> tuple[hf.Watched, int]:
    """Train with interruptions; what the last process computed, and the step that it went on from."""
    saved = 0
    for (event, step), to_save in INTERRUPTIONS[where]:
        trainings.run(hf.crash(event, step), save_every=to_save, resume=saved > 0)
        saved = to_save
    return trainings.run(save_every=hf.STEPS, resume=True), saved


@pytest.fixture(scope="module")
def whole() -> Callable[[str, hf.Trainings], hf.Watched]:
    """The uninterrupted training, without anything of ours, made once per name."""
    made: dict[str, hf.Watched] = {}

    def get(name: str, trainings: hf.Trainings) -> hf.Watched:
        if name not in made:
            made[name] = trainings.run(save_every=None, out="whole")
        return made[name]

    return get


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("where", INTERRUPTIONS)
def test_resumed_is_as_uninterrupted(
    tmp_path: Path, whole: Callable[[str, hf.Trainings], hf.Watched], where: str, precision: str
) -> None:
    """Losses, gradients' norms, learning rates, weights, optimizer state, batches and random states, of the rest of the epoch and the next ones."""
    trainings = hf.Trainings(tmp_path, {"bf16": precision == "bf16"})
    expected = whole(precision, trainings)
    last, saved = interrupted(trainings, where)
    hf.assert_exact(expected, last, saved + 1)
    assert trainings.callback.proof == (
        "none: the epoch ended with the checkpoint" if saved % hf.STEPS_PER_EPOCH == 0 else "equal"
    )
    assert trainings.callback.restored.drift == ()
    assert trainings.callback.restored.missing == ()


def test_what_was_used_is_not_loaded_again(tmp_path: Path) -> None:
    """A map-style dataset is asked only for what comes after the checkpoint; accelerate's loader is one batch ahead."""
    trainings = hf.Trainings(tmp_path, {"eval_strategy": "no"})
    trainings.run(save_every=None, out="whole")
    order = trainings.rows.asked
    trainings.run(hf.crash("on_step_begin", 6), save_every=6)
    trainings.run(save_every=hf.STEPS, resume=True)
    used = 6 * hf.ACCUMULATION * hf.BATCH
    assert trainings.rows.asked == order[used:]


def test_an_iterable_dataset_with_state_is_not_run_through(tmp_path: Path) -> None:
    """It is asked for what comes after the checkpoint only, whatever the Trainer believes that it drops."""
    trainings = hf.Trainings(tmp_path, {"eval_strategy": "no"}, make_rows=lambda: hf.make_stream(states=True))
    trainings.run(hf.crash("on_step_begin", 6), save_every=6)
    trainings.run(save_every=hf.STEPS, resume=True)
    used = 6 * hf.ACCUMULATION * hf.BATCH % hf.ROWS
    assert trainings.rows.asked[: hf.ROWS - used] == list(range(used, hf.ROWS))
    assert trainings.rows.asked[hf.ROWS - used :] == list(range(hf.ROWS))


def use_plain_shuffle(trainer: Any) -> None:
    """A loader whose order and augmentation come from the main generator."""
    from torch.utils.data import DataLoader

    def make() -> Any:
        return DataLoader(trainer.train_dataset, batch_size=hf.BATCH, shuffle=True, collate_fn=trainer.data_collator)

    trainer.get_train_dataloader = make


DATA: dict[str, dict[str, Any]] = {
    "augmentation in this process": {"make_rows": lambda: hf.Rows(noise=True)},
    "order from the main generator": {"options": {"accelerator_config": {"use_seedable_sampler": False}}},
    "grouped by length": {
        "make_rows": lambda: hf.Rows(lengths=True),
        "options": {"train_sampling_strategy": "group_by_length"},
    },
    "workers": {"options": {"dataloader_num_workers": 2}},
    "a loader of the user's": {"change": use_plain_shuffle},
    "iterable": {"make_rows": hf.make_stream},
    "iterable that draws its order": {"make_rows": lambda: hf.make_stream(seeded=True)},
    "iterable with state": {"make_rows": lambda: hf.make_stream(states=True)},
    "iterable with state and augmentation": {"make_rows": lambda: hf.make_stream(states=True, noise=True)},
    "iterable with state, without length": {"make_rows": lambda: hf.make_stream(states=True, noise=True, length=False)},
    "iterable without dispatch": {
        "make_rows": lambda: hf.make_stream(states=True, noise=True),
        "options": {"accelerator_config": {"dispatch_batches": False}},
    },
    "augmentation and a loader of the user's": {"change": use_plain_shuffle, "make_rows": lambda: hf.Rows(noise=True)},
}


@pytest.mark.parametrize("data", DATA)
@pytest.mark.parametrize("where", ["mid-epoch", "twice in one epoch", "epoch boundary"])
def test_resumed_with_other_data_is_as_uninterrupted(
    tmp_path: Path, whole: Callable[[str, hf.Trainings], hf.Watched], where: str, data: str
) -> None:
    """What the Trainer by itself does not come back to: see `huggingface_data`."""
    trainings = hf.Trainings(tmp_path, **DATA[data])
    expected = whole(data, trainings)
    last, saved = interrupted(trainings, where)
    hf.assert_exact(expected, last, saved + 1)


def test_saves_change_nothing(tmp_path: Path) -> None:
    """A run with saves computes what one without any does."""
    trainings = hf.Trainings(tmp_path, make_rows=lambda: hf.Rows(noise=True))
    whole = trainings.run(save_every=None, out="whole")
    assert trainings.run(save_every=2).facts == whole.facts
