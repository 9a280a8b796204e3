"""The saving callback in transformers' Trainer, in this process: what is saved under each strategy, and that nothing of ours ends a training."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.policies import Best, EveryMinutes, EveryNEpochs, EveryNSteps
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.driver import file_problem
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import verify_directory
from ckptmgr.testing.events import EventRecorder, agree
from ckptmgr.training.manager import CheckpointManager

# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("offline")]


@pytest.fixture
def make_manager(tmp_path: Path) -> Iterator[Callable[..., CheckpointManager]]:
    """Managers of one run, one process life each; everything saved stays on the disk."""
    made: list[CheckpointManager] = []

    def make(**options: Any) -> CheckpointManager:
        settings = {"local_dir": tmp_path / "disk", "keep_local": KeepLast(100), "transfer": "thread", **options}
        made.append(CheckpointManager(tmp_path / "store/run", **settings))
        return made[-1]

    yield make
    for manager in made:
        manager.close()


@pytest.fixture
def make_trainer(make_hf_trainer: Callable[..., Any]) -> Callable[..., Any]:
    """Small trainings: 12 steps, 4 an epoch."""
    return partial(make_hf_trainer, max_steps=12, per_device_train_batch_size=4, logging_steps=4)


def saved(tmp_path: Path) -> list[Manifest]:
    """What the local tier has committed, oldest first; every byte is checked."""
    tier = LocalTier.open(tmp_path / "disk")
    manifests = [manifest for _, manifest in sorted(tier.run.history().manifests.items())]
    for manifest in manifests:
        folder = tier.data_dir(manifest.stem)
        assert {entry.path for entry in manifest.files} == {p.name for p in folder.iterdir()}
        state = json.loads((folder / "trainer_state.json").read_bytes())
        assert state["global_step"] == manifest.step
        for entry in manifest.files:
            assert file_problem(folder / entry.path, entry) is None
    return manifests


def steps(manifests: list[Manifest]) -> list[tuple[int, tuple[str, ...]]]:
    return [(manifest.step, manifest.reasons) for manifest in manifests]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, [(5, ("every_n_steps:5",)), (10, ("every_n_steps:5",)), (12, ("train_end",))]),
        (
            {"save_strategy": "steps", "save_steps": 4},
            [
                (4, ("requested",)),
                (5, ("every_n_steps:5",)),
                (8, ("requested",)),
                (10, ("every_n_steps:5",)),
                (12, ("train_end",)),
            ],
        ),
        (
            {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True},
            [
                (4, ("requested",)),
                (5, ("every_n_steps:5",)),
                (8, ("requested",)),
                (10, ("every_n_steps:5",)),
                (12, ("train_end",)),
            ],
        ),
        (
            # The weights get better all the time, so each evaluation is a best one, the last included; steps 5 and 10 have none.
            {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 4, "metric_for_best_model": "loss"},
            [
                (4, ("requested",)),
                (5, ("every_n_steps:5",)),
                (8, ("requested",)),
                (10, ("every_n_steps:5",)),
                (12, ("requested",)),
            ],
        ),
    ],
)
@pytest.mark.parametrize("limit", [None, 1])
def test_each_step_is_saved_once_under_every_strategy(
    make_manager: Callable[..., Any],
    make_trainer: Callable[..., Any],
    tmp_path: Path,
    options: dict[str, Any],
    wanted: list[Any],
    limit: int | None,
) -> None:
    """The policy's steps and HF's own, whole, whatever rotation removes meanwhile."""
    callback = SaveModelCallback(make_manager(save=EveryNSteps(5)))
    trainer = make_trainer(callback, save_total_limit=limit, learning_rate=1e-2, **options)
    trainer.train()
    assert steps(saved(tmp_path)) == wanted
    assert callback.failures == 0
    if options.get("load_best_model_at_end"):
        assert trainer.state.best_model_checkpoint is not None
        assert saved(tmp_path)[0].metrics["eval_loss"] > 0


def test_all_reasons_of_an_epochs_end_are_one_save(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """K096: the step's end, the end of the epoch and the evaluation there, with the metrics."""
    policy = EveryNSteps(4) | Best("eval_loss", mode="max") | EveryNEpochs(2)
    trainer = make_trainer(
        SaveModelCallback(make_manager(save=policy), save_at_end=False), eval_strategy="epoch", learning_rate=1e-2
    )
    trainer.train()
    first, second, _ = saved(tmp_path)
    assert steps([first, second]) == [
        (4, ("every_n_steps:4", "best:eval_loss")),
        (8, ("every_n_steps:4", "every_n_epochs:2")),
    ]
    assert first.metrics.keys() >= {"eval_loss", "eval_runtime"}
    assert first.metric_modes == {"eval_loss": "max"}
    assert first.epoch == 1.0


def test_early_stopping_ends_with_a_save_and_for_good(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """HF's own callback, whose state comes back as well when it is asked for, beside ours."""
    from transformers import EarlyStoppingCallback  # type: ignore[import-not-found, unused-ignore]

    def train(*, continue_stopped: bool = False, **options: Any) -> Any:
        manager = make_manager(save=EveryNSteps(100) | Best("eval_loss"))
        callback = SaveModelCallback(manager, continue_stopped=continue_stopped)
        trainer = make_trainer(
            EarlyStoppingCallback(early_stopping_patience=2),
            callback,
            eval_strategy="steps",
            eval_steps=2,
            metric_for_best_model="eval_loss",
            greater_is_better=True,  # it gets smaller: never better than the first
            restore_callback_states_from_checkpoint=True,
            learning_rate=1e-2,
            **options,
        )
        trainer.train(resume_from_checkpoint=manager.resume_path())
        assert callback.failures == 0
        return trainer

    assert train().state.global_step == 6
    found = saved(tmp_path)
    assert steps(found) == [(2, ("best:eval_loss",)), (4, ("best:eval_loss",)), (6, ("best:eval_loss", "train_end"))]
    # K125: no step is run of a training that was ended early, also when there would be more to do.
    assert train(max_steps=14).state.global_step == 6
    assert len(saved(tmp_path)) == 3
    # Resumed with HF's option on: its Trainer meets the state of a "ckptmgr" that is no callback, and goes on.
    assert train(max_steps=14, continue_stopped=True).state.global_step > 6


def test_a_rewound_run_does_not_touch_what_was_saved(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """The second attempt writes checkpoint-10 in place, over files whose bytes the first one's save shares."""
    make_trainer(SaveModelCallback(make_manager(save=EveryNSteps(5)), save_at_end=False)).train()
    first = saved(tmp_path)[1]
    taken = LocalTier.open(tmp_path / "disk").data_dir(first.stem)
    kept = tmp_path / "kept"
    kept.mkdir()
    for path in taken.iterdir():
        assert os.path.samefile(path, tmp_path / "out/checkpoint-10" / path.name)
        os.link(path, kept / path.name)
    manager = make_manager(save=EveryNSteps(5))
    trainer = make_trainer(SaveModelCallback(manager, save_at_end=False), data_seed=9)
    trainer.train(resume_from_checkpoint=str(manager.resume_path("5")))
    assert [
        file_problem(kept / entry.path, entry) for entry in first.files if file_problem(kept / entry.path, entry)
    ] == []
    second = saved(tmp_path)[-1]
    assert (second.stem.attempt, second.step) == (2, 10)
    assert {e.path for e in second.files if e.blake3 != next(f for f in first.files if f.path == e.path).blake3} >= {
        "model.safetensors",
        "optimizer.pt",
        "trainer_state.json",
    }


def test_what_resume_path_gives_is_what_hf_loads(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any]
) -> None:
    """A directory of its own, verified, not HF's; the attempt descends from it."""
    make_trainer(SaveModelCallback(make_manager(save=EveryNSteps(5)), save_at_end=False)).train()
    manager = make_manager(save=EveryNSteps(5))
    path = manager.resume_path()
    assert path is not None
    assert verify_directory(path)[1] == []
    trainer = make_trainer(SaveModelCallback(manager, save_at_end=False))
    seen: list[int] = []
    trainer.add_callback(_Watch(on_train_begin=lambda state: seen.append(state.global_step)))
    trainer.train(resume_from_checkpoint=path)
    assert seen == [10]


def test_a_start_from_scratch_over_a_run_is_refused(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """I12, before the first step; also when the path was asked for and forgotten."""
    make_trainer(SaveModelCallback(make_manager(save=EveryNSteps(5)))).train()
    before = saved(tmp_path)
    for asked in (False, True):
        manager = make_manager()
        if asked:
            manager.resume_path()
        trainer = make_trainer(SaveModelCallback(manager))
        with pytest.raises(ConflictError, match="resume_from_checkpoint="):
            trainer.train()
        assert trainer.state.global_step == 0
    assert saved(tmp_path) == before


class _Watch:
    """An HF callback made of functions of the state."""

    def __init__(self, **hooks: Callable[[Any], object]) -> None:
        self.hooks = hooks

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("on_"):
            raise AttributeError(name)
        hook = self.hooks.get(name, lambda state: None)

        def call(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            hook(state)

        return call


def test_no_failure_of_ours_ends_the_training(
    make_manager: Callable[..., Any],
    make_trainer: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """I9 in a host without isolation: the policy, the take, the background and the close all fail."""
    manager = make_manager(save=EveryMinutes(1e-6))

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("nothing works")

    for name in ("take", "poll_errors", "close"):
        monkeypatch.setattr(manager, name, fail)
    callback = SaveModelCallback(manager)
    trainer = make_trainer(callback)
    trainer.train()
    assert trainer.state.global_step == 12
    assert callback.failures > 12
    assert "nothing works" in caplog.text
    monkeypatch.undo()


def test_a_dispatcher_of_ours_is_one_callback_of_hfs(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """CallbackManager with the saving callback in it, handed over as a whole."""
    callbacks = CallbackManager([SaveModelCallback(make_manager(save=EveryNSteps(6)))])
    make_trainer(callbacks).train()
    assert [step for step, _ in steps(saved(tmp_path))] == [6, 12]
    assert callbacks.failures == {}


def test_an_epoch_policy_and_a_dataset_without_length(
    make_manager: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """An iterable dataset: HF counts all steps as one epoch."""
    import torch

    class Stream(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            generator = torch.Generator().manual_seed(3)
            while True:
                row = torch.randint(0, 32, (8,), generator=generator)
                yield {"input_ids": row, "labels": row}

    trainer = make_trainer(SaveModelCallback(make_manager(save=EveryNEpochs(1) | EveryNSteps(5))))
    trainer.train_dataset = Stream()
    trainer.train()
    assert steps(saved(tmp_path)) == [
        (5, ("every_n_steps:5",)),
        (10, ("every_n_steps:5",)),
        (12, ("every_n_epochs:1", "train_end")),
    ]


def test_the_page_of_events(make_trainer: Callable[..., Any]) -> None:
    """docs/events.md: which events come, in which order, with what."""
    recorder = EventRecorder()
    make_trainer(
        CallbackManager([recorder]),
        max_steps=-1,
        num_train_epochs=2,
        gradient_accumulation_steps=2,
        logging_steps=2,
        eval_strategy="epoch",
        save_strategy="epoch",
    ).train()
    agree("transformers", recorder.told(), Path(__file__).parents[2] / "docs" / "events.md")
