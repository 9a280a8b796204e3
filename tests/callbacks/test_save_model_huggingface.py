"""The saving callback in a host that writes its files itself, as Hugging Face's Trainer does: what is taken when, and what becomes of flags.

The host here follows the loop of transformers 5.24 in everything that matters to the callback; `tests/hosts` runs the real one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.callbacks import huggingface
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.policies import Best, EveryNEpochs, EveryNSteps, SavePolicy
from ckptmgr.training import ranks

Fake = Callable[..., Any]


@pytest.fixture
def saves(fake_manager: Fake, hf_trainer: Fake, out: Path) -> Callable[..., list[tuple[int, tuple[str, ...]]]]:
    """Trains and returns what was taken, as (step, reasons)."""

    def train(policy: SavePolicy | None, *, save_at_end: bool = False, **options: Any) -> list[Any]:
        manager = fake_manager(save_policy=policy)
        callback = SaveModelCallback(manager, save_at_end=save_at_end)
        hf_trainer(out, callback, **options).train()
        assert callback.failures == 0
        return [(save["step"], save["reasons"]) for save in manager.saves]

    return train


class Hosted:
    """Tests with a host: `self.host(out, callback, …)` makes a training."""

    @pytest.fixture(autouse=True)
    def _host(self, hf_trainer: Fake) -> None:
        self.host = hf_trainer


class TestTaking(Hosted):
    def test_the_policy_drives_saves(self, fake_manager: Fake, out: Path) -> None:
        """With save_strategy="no"; what was written is handed over with everything that is known, before the next rotation."""
        manager = fake_manager(save_policy=EveryNSteps(2) | Best("eval_loss"))
        trainer = self.host(
            out,
            SaveModelCallback(manager),
            losses={4: 0.5},
            eval_strategy="steps",
            eval_steps=4,
            save_total_limit=1,
        )
        trainer.train()
        assert [(save["step"], save["reasons"]) for save in manager.saves] == [
            (2, ("every_n_steps:2",)),
            (4, ("every_n_steps:2", "best:eval_loss")),
            (6, ("every_n_steps:2", "train_end")),
        ]
        assert [path.name for path in out.iterdir()] == ["checkpoint-6"]
        second = manager.saves[1]
        assert second["files"]["model.safetensors"] == b"weights 4"
        assert second["metrics"] == {"eval_loss": 0.5}
        assert second["epoch"] == pytest.approx(4 / 3)
        assert second["metric_modes"] == {"eval_loss": "min"}
        assert second["framework"]["framework"] == "transformers"
        assert second["final"] is True

    def test_what_the_trainer_saves_by_itself_is_taken_too(self, saves: Fake) -> None:
        """Its own save_steps, the end included."""
        assert saves(None, save_strategy="steps", save_steps=4) == [(4, ("requested",)), (6, ("requested",))]

    def test_the_last_step_is_saved(self, saves: Fake) -> None:
        """HF does that for save_strategy="steps" only."""
        assert saves(EveryNSteps(4), save_at_end=True) == [(4, ("every_n_steps:4",)), (6, ("train_end",))]

    def test_the_end_of_an_epoch_is_one_save(self, fake_manager: Fake, out: Path) -> None:
        """K096: asked for at the step's end, by the end of the epoch, of training, and by an evaluation: written once, with all reasons and the metrics."""
        manager = fake_manager(save_policy=EveryNSteps(3) | Best("eval_loss") | EveryNEpochs(1))
        trainer = self.host(
            out, SaveModelCallback(manager), steps=3, eval_strategy="epoch", save_strategy="steps", save_steps=3
        )
        trainer.train()
        assert trainer.written == [3]
        assert [(save["reasons"], save["metrics"]) for save in manager.saves] == [
            (("every_n_steps:3", "every_n_epochs:1", "train_end", "best:eval_loss"), {"eval_loss": 1.0})
        ]

    def test_the_trainers_own_save_at_the_end_of_an_epoch_is_not_lost(self, saves: Fake) -> None:
        """Its flag is put off until the end of the epoch, not taken away."""
        wanted = [(3, ("requested",)), (6, ("requested",))]
        assert saves(None, save_strategy="steps", save_steps=3) == wanted

    def test_an_evaluation_that_overwrites_the_flag(self, saves: Fake, caplog: pytest.LogCaptureFixture) -> None:
        """save_strategy="best": at a step with an evaluation the Trainer decides alone. That is said before, and when it has happened."""
        found = saves(
            EveryNSteps(2), steps=5, steps_per_epoch=5, save_strategy="best", eval_strategy="steps", eval_steps=2
        )
        # Step 2 is the first best one, step 4 is not better.
        assert found == [(2, ("every_n_steps:2",))]
        assert "save_strategy='best': at a step with an evaluation the Trainer alone decides" in caplog.text
        assert "step 4 was not saved although every_n_steps:2 asked for it" in caplog.text

    def test_a_stop_by_another_callback_is_saved(self, saves: Fake) -> None:
        """Early stopping decides in on_evaluate, after this callback."""

        class Stop:
            def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_training_stop = True

        found = saves(
            EveryNSteps(100),
            save_at_end=True,
            steps_per_epoch=100,
            eval_strategy="steps",
            eval_steps=2,
            others=(Stop(),),
        )
        assert found == [(2, ("train_end",))]

    def test_a_failed_take_does_not_end_the_training(
        self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """I9: HF has no isolation."""
        manager = fake_manager(save_policy=EveryNSteps(2), save_error=OSError("disk full"))
        callback = SaveModelCallback(manager)
        trainer = self.host(out, callback)
        trainer.train()
        assert (trainer.state.global_step, callback.failures) == (6, 3)
        assert "save of step 2 failed (failure 1), training goes on" in caplog.text

    def test_a_directory_that_is_not_there(
        self, fake_manager: Fake, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As with a hyperparameter search: the path is named."""
        monkeypatch.setattr(self.host, "write", lambda self: None)
        manager = fake_manager(save_policy=EveryNSteps(6))
        self.host(out, SaveModelCallback(manager)).train()
        assert manager.saves == []
        assert f"{out}/checkpoint-6/trainer_state.json is not there" in caplog.text


class TestRanks(Hosted):
    def test_only_the_main_process_takes_and_only_after_all_have_written(
        self, fake_manager: Fake, out: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each rank writes its random state and waits for nobody: the directory is complete when all ranks have come to on_save."""
        events: list[str] = []
        manager = fake_manager(save_policy=EveryNSteps(2))

        def keep(saved: Any) -> str:
            events.append("taken")
            return "id"

        def together(flag: bool) -> bool:
            events.append("together")
            return flag

        monkeypatch.setattr(manager, "_keep", keep)
        monkeypatch.setattr(ranks, "can_agree", lambda: True)
        monkeypatch.setattr(ranks, "any_rank", together)
        self.host(out, SaveModelCallback(manager, save_at_end=False), steps=2, steps_per_epoch=9).train()
        assert events == ["together", "taken"]
        events.clear()
        trainer = self.host(out, SaveModelCallback(manager, save_at_end=False), steps=2, steps_per_epoch=9)
        trainer.state.is_world_process_zero = False
        trainer.train()
        assert events == ["together"]

    def test_random_states_that_lie_on_other_machines(
        self, out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Without a shared disk the checkpoint lacks them, which HF would only mention at the resume."""
        host = huggingface.OutputDirectory(SimpleNamespace(output_dir=str(out)))
        directory = out / "checkpoint-1"
        directory.mkdir(parents=True)
        for name in ("trainer_state.json", "rng_state_0.pth", "rng_state_1.pth"):
            (directory / name).write_text("{}")
        monkeypatch.setattr(huggingface, "world_size", lambda: 2)
        host.complete(1)
        assert caplog.text == ""
        monkeypatch.setattr(huggingface, "world_size", lambda: 4)
        host.complete(1)
        assert "has the random states of 2 ranks out of 4" in caplog.text


class TestWrittenAgain(Hosted):
    def test_what_was_taken_survives_a_rewind(self, fake_manager: Fake, out: Path, tmp_path: Path) -> None:
        """The next attempt writes checkpoint-4 in place; the hard link of the first one's must not change with it."""
        self.host(out, None, save_strategy="steps", save_steps=4).train()
        taken = tmp_path / "taken"
        taken.mkdir()
        for path in (out / "checkpoint-4").iterdir():
            os.link(path, taken / path.name)
        before = {path.name: path.read_bytes() for path in taken.iterdir()}
        manager = fake_manager(save_policy=EveryNSteps(4))
        self.host(out, SaveModelCallback(manager), losses={4: 0.1}, eval_strategy="steps", eval_steps=4).train()
        assert {path.name: path.read_bytes() for path in taken.iterdir()} == before
        assert manager.saves[0]["files"]["trainer_state.json"] != before["trainer_state.json"]

    def test_a_training_that_begins_anew_in_the_process_is_refused(self, fake_manager: Fake, out: Path) -> None:
        """As with auto_find_batch_size: step 4 would be "saved already", and a resume would take what the first try has saved."""
        manager = fake_manager(save_policy=EveryNSteps(4))
        callback = SaveModelCallback(manager)
        self.host(out, callback).train()
        again = self.host(out, callback)
        with pytest.raises(
            ConflictError, match="step 6 was saved by a training of this process, and another one begins at step 0"
        ):
            again.train()
        assert (again.state.global_step, [save["step"] for save in manager.saves]) == (0, [4, 6])

    def test_also_when_the_trainer_decides_after_the_evaluation(
        self, out: Path, tmp_path: Path, fake_manager: Fake
    ) -> None:
        """save_strategy="best" sets the flag when no callback can see it any more."""
        self.host(out, None, save_strategy="steps", save_steps=4).train()
        linked = tmp_path / "linked"
        os.link(out / "checkpoint-4/trainer_state.json", linked)
        before = linked.read_bytes()
        options: dict[str, Any] = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 4}
        trainer = self.host(out, SaveModelCallback(fake_manager(), save_at_end=False), losses={4: 0.1}, **options)
        trainer.train()
        assert 4 in trainer.written
        assert linked.read_bytes() == before

    def test_a_sentinel_of_an_earlier_life_does_not_get_into_the_checkpoint(
        self, fake_manager: Fake, out: Path
    ) -> None:
        """enable_jit_checkpoint was killed while it wrote this step; now the step is complete."""
        (out / "checkpoint-4").mkdir(parents=True)
        (out / "checkpoint-4/checkpoint-is-incomplete.txt").write_text("…")
        manager = fake_manager(save_policy=EveryNSteps(4))
        self.host(out, SaveModelCallback(manager)).train()
        assert sorted(manager.saves[0]["files"]) == ["model.safetensors", "trainer_state.json"]


class Jit:
    """`enable_jit_checkpoint`: at one event of one step it writes without on_save, and ends the training."""

    def __init__(self, event: str, step: int, *, whole: bool = True) -> None:
        self.trainer: Any = None
        self.event, self.step, self.whole = event, step, whole

    def __getattr__(self, name: str) -> Any:
        if name == "event" or name != self.__dict__.get("event"):
            raise AttributeError(name)
        return self.act

    def act(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and self.trainer is not None:
            control.should_save, control.should_training_stop = False, True
            self.trainer.write()
            if not self.whole:
                (Path(args.output_dir) / f"checkpoint-{self.step}/checkpoint-is-incomplete.txt").write_text("…")


class TestWithoutEvent(Hosted):
    def train(self, out: Path, manager: Any, jit: Jit, **options: Any) -> None:
        callback = SaveModelCallback(manager, save_at_end=False)
        trainer = self.host(out, callback, others=(jit,), enable_jit_checkpoint=True, steps_per_epoch=9, **options)
        jit.trainer = trainer
        trainer.train()
        assert callback.failures == 0

    def test_it_is_found_at_the_end(self, fake_manager: Fake, out: Path) -> None:
        """With its epoch; nothing that was there before training counts."""
        self.host(out, None, save_strategy="steps", save_steps=1, steps=2).train()
        manager = fake_manager(save_policy=EveryNSteps(3))
        self.train(out, manager, Jit("on_step_end", 4))
        assert [(save["step"], save["reasons"]) for save in manager.saves] == [
            (3, ("every_n_steps:3",)),
            (4, ("jit_checkpoint",)),
        ]
        assert manager.saves[1]["epoch"] == pytest.approx(4 / 9)
        assert manager.saves[1]["files"]["model.safetensors"] == b"weights 4"

    def test_files_are_not_final_with_it(self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture) -> None:
        """It may write into a complete checkpoint: links would change with it. And the step that was saved is not taken again."""
        manager = fake_manager(save_policy=EveryNSteps(3))
        self.train(out, manager, Jit("on_step_begin", 3))
        assert [(save["step"], save["final"]) for save in manager.saves] == [(3, False)]
        assert "enable_jit_checkpoint: checkpoints are copied while training waits" in caplog.text

    def test_a_half_written_one_is_left_alone(self, fake_manager: Fake, out: Path) -> None:
        """Its sentinel says so."""
        manager = fake_manager()
        self.train(out, manager, Jit("on_step_end", 4, whole=False))
        assert manager.saves == []

    @pytest.mark.parametrize("state", ["", "{", "[]", '{"global_step": 5}', '{"global_step": NaN}'])
    def test_a_damaged_one_is_named(
        self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture, state: str
    ) -> None:
        """Torn, or another step's."""
        manager = fake_manager()

        class Writer:
            def on_step_end(self, args: Any, state_: Any, control: Any, **kwargs: Any) -> None:
                (out / "checkpoint-4").mkdir(parents=True, exist_ok=True)
                (out / "checkpoint-4/trainer_state.json").write_text(state)

        self.host(out, SaveModelCallback(manager, save_at_end=False), others=(Writer(),)).train()
        assert manager.saves == []
        if state.startswith('{"'):
            return
        assert f"{out}/checkpoint-4 is not a complete checkpoint" in caplog.text

    def test_one_that_somebody_else_wrote(self, fake_manager: Fake, out: Path) -> None:
        """Without enable_jit_checkpoint as well: a script that saves by itself."""
        manager = fake_manager()
        trainer = self.host(out, SaveModelCallback(manager, save_at_end=False), steps=2)
        trainer.callbacks.append(SimpleNamespace(on_train_end=None, on_step_end=lambda *a, **k: trainer.write()))
        del trainer.callbacks[-1].on_train_end
        trainer.train()
        assert [(save["step"], save["reasons"]) for save in manager.saves] == [(1, ("found",)), (2, ("found",))]


class TestMemory(Hosted):
    def test_a_resumed_run_decides_as_the_uninterrupted_one(self, fake_manager: Fake, out: Path) -> None:
        """K061: the policy's memory is in trainer_state.json, which the Trainer hands back; no callback state of HF's is needed."""
        losses = {1: 0.3, 2: float("nan"), 3: 0.2, 4: 0.2, 5: 0.25, 6: 0.1}
        options: dict[str, Any] = {"losses": losses, "eval_strategy": "steps", "eval_steps": 1}

        def run(folder: str, policy: SavePolicy, steps: int, resume_from: Path | None = None) -> list[int]:
            manager = fake_manager(save_policy=policy)
            trainer = self.host(out / folder, SaveModelCallback(manager, save_at_end=False), steps=steps, **options)
            if resume_from is None:
                trainer.train()
            else:
                trainer.state.max_steps = steps
                trainer.train(resume_from=resume_from)
            return [save["step"] for save in manager.saves]

        assert run("whole", Best("eval_loss"), 6) == [1, 3, 6]
        assert run("first", Best("eval_loss") | EveryNSteps(4), 4) == [1, 3, 4]
        path = out / "first/checkpoint-4/trainer_state.json"
        state = json.loads(path.read_bytes())
        assert state["stateful_callbacks"]["ckptmgr"]["attributes"]["memory"] == {
            "best:eval_loss:min": {"seen": 4, "ranked": [[0.2, 3]]}
        }
        path.write_text(json.dumps({**state, "max_steps": 6}))
        assert run("second", Best("eval_loss"), 6, out / "first/checkpoint-4") == [6]

    def test_a_memory_that_is_no_json_does_not_break_the_trainers_save(
        self, fake_manager: Fake, out: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """json.dumps in the middle of HF's save would end the training."""

        class Odd(EveryNSteps):
            def decide(self, moment: Any, memory: Any) -> Any:
                decision = super().decide(moment, memory)
                return type(decision)(memory={"odd": object()}, reasons=decision.reasons)

        manager = fake_manager(save_policy=Odd(2))
        self.host(out, SaveModelCallback(manager)).train()
        assert [save["step"] for save in manager.saves] == [2, 4, 6]
        assert "not JSON serializable" in caplog.text

    @pytest.mark.parametrize("state", [{}, {"ckptmgr": {}}, {"ckptmgr": {"attributes": {"memory": 3}}}, None])
    def test_a_state_without_a_memory(self, fake_manager: Fake, out: Path, state: Any) -> None:
        """Of a run that began without this callback, or of another Trainer: decided anew."""
        manager = fake_manager(save_policy=Best("eval_loss"))
        trainer = self.host(out, SaveModelCallback(manager), steps=1, eval_strategy="steps", eval_steps=1)
        trainer.state.stateful_callbacks = state
        trainer.train()
        assert [save["reasons"] for save in manager.saves] == [("best:eval_loss", "train_end")]
