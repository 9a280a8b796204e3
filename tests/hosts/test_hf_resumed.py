"""transformers' Trainer, resumed with the saving callback: what is said, refused and left alone when not all is as it was."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.errors import DriftError, IncompatibleStateError
from ckptmgr.training.manager import CheckpointManager

# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("offline", "one_thread"),
]

# To pytest, the folders of tests are packages.
hf: Any = importlib.import_module("tests.hosts.hf_trainings")


class TestFirstBatch:
    def test_another_dataset(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Same length, same order, other content: training goes on, and it is said."""
        trainings = hf.Trainings(tmp_path)
        trainings.run(hf.crash("on_step_begin", 6), save_every=6)
        trainings.make_rows = lambda: hf.Rows(noise=True)
        trainings.run(save_every=hf.STEPS, resume=True)
        assert trainings.callback.proof == "different"
        assert "the first batch is not the one that the checkpoint expected" in caplog.text
        assert "first batch: different" in trainings.callback.restored.notes

    def test_refused(self, tmp_path: Path) -> None:
        """Before any of it was trained on."""
        trainings = hf.Trainings(tmp_path, callback_options={"on_mismatch": "raise"})
        trainings.run(hf.crash("on_step_begin", 6), save_every=6)
        trainings.make_rows = lambda: hf.Rows(noise=True)
        with pytest.raises(IncompatibleStateError, match="first batch"):
            trainings.run(save_every=hf.STEPS, resume=True)

    def test_other_accumulation(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """K001: the Trainer computes its place from the arguments of now, and so leaves samples out; it is said, with both places."""
        trainings = hf.Trainings(tmp_path)
        trainings.run(hf.crash("on_step_begin", 5), save_every=5)
        trainings.options = {"gradient_accumulation_steps": 1}
        trainings.run(save_every=hf.STEPS, resume=True)
        assert (
            "made after micro-batch 2 of epoch 1, and the Trainer goes on after micro-batch 5 of epoch 0" in caplog.text
        )
        assert "accumulation: 2 in the checkpoint, 1 now" in caplog.text
        assert trainings.callback.proof == "different"


def test_the_manifest_and_the_checkpoint_say_what_is_needed(tmp_path: Path) -> None:
    """The conditions in the manifest; the entry in trainer_state.json is JSON that any reader can skip."""
    trainings = hf.Trainings(tmp_path)
    trainings.run(hf.crash("on_step_begin", 6), save_every=6)
    manager = CheckpointManager(tmp_path / "store/run", local_dir=tmp_path / "disk")
    manifest = manager.list()[-1]
    assert manifest.conditions["batch_size"] == hf.BATCH
    assert manifest.conditions["accumulation"] == hf.ACCUMULATION
    assert manifest.conditions["dataset_length"] == hf.ROWS
    assert manifest.conditions["world_size"] == 1
    assert manifest.conditions["versions"].keys() >= {"torch", "transformers", "accelerate"}
    state = json.loads((tmp_path / "out/checkpoint-6/trainer_state.json").read_bytes())
    data = state["stateful_callbacks"]["ckptmgr"]["attributes"]["data"]
    assert (data["step"], data["epoch"], data["batches"]) == (6, 1, 4)
    assert data["next"].keys() == {"samples", "content"}


class TestStopped:
    """K125: a training that a callback had ended stays ended."""

    @pytest.fixture
    def trainings(self, tmp_path: Path) -> hf.Trainings:
        return hf.Trainings(
            tmp_path,
            {"metric_for_best_model": "eval_loss", "eval_steps": 2},
        )

    def stop(self, trainings: hf.Trainings) -> None:
        from transformers import EarlyStoppingCallback  # type: ignore[import-not-found, unused-ignore]

        # No loss gets better by that much.
        watched = trainings.run(also=(EarlyStoppingCallback(early_stopping_patience=1, early_stopping_threshold=9.0),))
        assert max(int(name.split()[0]) for name in watched.facts) == 4

    def test_no_step_is_run(self, trainings: hf.Trainings, caplog: pytest.LogCaptureFixture) -> None:
        self.stop(trainings)
        watched = trainings.run(resume=True)
        assert watched.facts == {}
        assert watched.batches == []
        assert trainings.rows.asked == []
        assert "already stopped (EarlyStoppingCallback): step 4 was the last, and no further one is run" in caplog.text

    @pytest.mark.parametrize("how", ["argument", "environment"])
    def test_unless_told_to_go_on(self, trainings: hf.Trainings, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        self.stop(trainings)
        if how == "argument":
            trainings.callback_options = {"continue_stopped": True}
        else:
            monkeypatch.setenv("CKPTMGR_CONTINUE_STOPPED", "1")
        assert max(int(name.split()[0]) for name in trainings.run(resume=True).facts) == hf.STEPS

    def test_an_iterable_dataset_that_is_dispatched(
        self, trainings: hf.Trainings, caplog: pytest.LogCaptureFixture
    ) -> None:
        """accelerate's dispatcher cannot be had to yield nothing: the process ends, with 0."""
        trainings.make_rows = hf.make_stream
        self.stop(trainings)
        with pytest.raises(SystemExit) as ended:
            trainings.run(resume=True)
        assert ended.value.code in (0, None)
        assert "already stopped (EarlyStoppingCallback)" in caplog.text

    def test_a_run_that_was_complete_goes_on_with_more_steps(self, trainings: hf.Trainings) -> None:
        trainings.options = {"max_steps": 4}
        trainings.run()
        trainings.options = {}
        assert max(int(name.split()[0]) for name in trainings.run(resume=True).facts) == hf.STEPS


class TestDrift:
    def test_is_said_line_by_line(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """What the Trainer itself does not look at."""
        trainings = hf.Trainings(tmp_path)
        trainings.run(hf.crash("on_step_begin", 4), save_every=4)
        trainings.options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}
        trainings.run(save_every=hf.STEPS, resume=True)
        found = {each.what: (each.saved, each.now) for each in trainings.callback.restored.drift}
        assert found == {"batch_size": ("2", "4"), "accumulation": ("2", "1")}
        assert "changed: batch_size: 2 in the checkpoint, 4 now" in caplog.text

    def test_is_refused_before_a_step(self, tmp_path: Path) -> None:
        trainings = hf.Trainings(tmp_path)
        trainings.run(hf.crash("on_step_begin", 4), save_every=4)
        trainings.options = {"per_device_train_batch_size": 4}
        trainings.manager_options = {"refuse_drift": ["batch_size"]}
        with pytest.raises(DriftError, match="batch_size: 2 in the checkpoint, 4 now"):
            trainings.run(save_every=hf.STEPS, resume=True)
        assert trainings.rows.asked == []

    def test_a_checkpoint_without_an_optimizer(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """The Trainer starts a new one, and says nothing."""
        trainings = hf.Trainings(tmp_path, {"save_only_model": True})
        trainings.run(hf.crash("on_step_begin", 4), save_every=4)
        trainings.run(save_every=hf.STEPS, resume=True)
        assert trainings.callback.restored.missing == ("optimizer", "lr_scheduler", "random states")
        assert "not in the checkpoint, and not restored: optimizer, lr_scheduler, random states" in caplog.text

    def test_fp16_on_a_cpu(self, tmp_path: Path) -> None:
        """There is no scaler, and so none that is missing."""
        trainings = hf.Trainings(tmp_path, {"fp16": True, "max_steps": 4, "eval_strategy": "no"})
        trainings.run(hf.crash("on_step_begin", 2), save_every=2)
        trainings.run(save_every=hf.STEPS, resume=True)
        assert "scaler" not in (*trainings.callback.restored.restored, *trainings.callback.restored.missing)
        assert trainings.callback.restored.missing == ()
