"""The shapes in which people write hooks, in the embedded Trainer and through the manager: each gets what it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr import Trainer, TrainingArguments
from ckptmgr.callbacks import Callback, CallbackManager, LossMonitorCallback, is_main_process

Make = Callable[..., Trainer]
STEPS = 6


class Tokenizer:
    """Stands for a tokenizer."""


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer()


@pytest.fixture(params=["alone", "managed"])
def make(request: pytest.FixtureRequest, tokenizer: Tokenizer) -> Make:
    """A trainer of six steps, two epochs, logged at each second step and evaluated at each third; the callback alone, or in a manager of its own."""

    def trainer(callback: Any, **options: Any) -> Trainer:
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 1)
        made = Trainer(
            model,
            TrainingArguments(**{"num_train_epochs": 2, "logging_steps": 2, "eval_steps": 3, **options}),
            train_dataloader=[torch.ones(2, 4)] * 3,
            eval_dataloader=[torch.ones(2, 4)],
            optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
            loss_fn=lambda module, batch: module(batch).square().mean(),
            processing_class=tokenizer,
        )
        made.add_callback(callback if request.param == "alone" else CallbackManager([callback]))
        return made

    return trainer


def test_the_loss_from_the_log_history(make: Make) -> None:
    """`on_step_end(self, args, state, control, **kwargs)`, reading `state.log_history[-1].get("loss")`."""
    seen: list[Any] = []

    class Watch(Callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.log_history:
                seen.append((state.global_step, args.logging_steps, state.log_history[-1].get("loss")))

    trainer = make(Watch(), eval_steps=None)
    trainer.train()
    logged = {entry["step"]: entry["loss"] for entry in trainer.state.log_history}
    # Logs come at the edge, after the step's hook: a step sees those of the steps before it.
    assert seen == [(step, 2, logged[(step - 1) // 2 * 2]) for step in range(3, STEPS + 1)]


def test_the_loss_from_the_outputs(make: Make) -> None:
    """`on_step_end(self, state, control, outputs, **kwargs)` with `outputs.loss`, and stopping by `control`."""
    seen: list[tuple[int, float]] = []

    class Watch(Callback):
        def on_step_end(self, state: Any, control: Any, outputs: Any, **kwargs: Any) -> None:
            assert float(outputs.loss) == float(outputs["loss"])
            seen.append((state.global_step, float(outputs.loss)))
            if state.global_step == 4:
                control.should_training_stop = True

    result = make(Watch()).train()
    assert (result.global_step, result.stopped) == (4, "Watch")
    assert [step for step, _ in seen] == [1, 2, 3, 4]
    losses = [loss for _, loss in seen]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > losses[-1] > 0


def test_model_batch_and_outputs(make: Make) -> None:
    """`on_step_end(self, model, batch, outputs, state, **kwargs)`: the loss can be computed again."""
    seen: list[tuple[float, float]] = []

    class Watch(Callback):
        def on_step_end(self, model: Any, batch: Any, outputs: Any, state: Any, **kwargs: Any) -> None:
            with torch.no_grad():
                seen.append((float(model(batch).square().mean()), float(outputs.loss)))

    make(Watch()).train()
    assert len(seen) == STEPS
    assert all(after < before for after, before in seen)


def test_an_epoch_that_is_saved_on_the_main_process(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """`on_epoch_end(self, args, state, control, model, tokenizer, **kwargs)`."""

    class SaveEpoch(Callback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, model: Any, tokenizer: Any, **kwargs: Any) -> None:
            if is_main_process():
                assert state.is_world_process_zero
                self.tokenizer = tokenizer
                torch.save(model.state_dict(), tmp_path / f"epoch-{state.epoch:g}.pt")

    callback = SaveEpoch()
    trainer = make(callback)
    trainer.train()
    assert callback.tokenizer is tokenizer
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-1.pt", "epoch-2.pt"]
    saved = torch.load(tmp_path / "epoch-2.pt", weights_only=True)
    assert all(torch.equal(saved[name], value) for name, value in trainer.model.state_dict().items())


def test_evaluations(make: Make) -> None:
    """`on_evaluate_end(self, metrics, **kwargs)`."""
    seen: list[dict[str, float]] = []

    class Watch(Callback):
        def on_evaluate_end(self, metrics: Any, **kwargs: Any) -> None:
            seen.append(dict(metrics))

    make(Watch()).train()
    assert [list(each) for each in seen] == [["eval_loss"]] * 2


class Ends(Callback):
    """Notes the beginning and the end, and fails in between if it is told to."""

    critical = True

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.seen: list[str] = []

    def on_train_begin(self, **kwargs: Any) -> None:
        self.seen.append("begin")

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        if self.error is not None and state.global_step == 2:
            raise self.error

    def on_train_end(self, **kwargs: Any) -> None:
        self.seen.append("end")


@pytest.mark.parametrize("error", [None, RuntimeError("bad node"), KeyboardInterrupt(), SystemExit(143)])
def test_the_end_comes_after_a_normal_end_an_exception_and_an_interruption(
    make: Make, error: BaseException | None
) -> None:
    """`on_train_begin(self, **kwargs)` and `on_train_end`, once each."""
    ends = Ends(error)
    trainer = make(ends)
    if error is None:
        trainer.train()
    else:
        with pytest.raises(type(error)):
            trainer.train()
    assert ends.seen == ["begin", "end"]


def test_a_monitor_from_python_and_from_a_file(make: Make, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """`trainer.add_callback(LossMonitorCallback(log_interval=50))`, and the same in YAML."""
    caplog.set_level("INFO")
    make(LossMonitorCallback(log_interval=2)).train()
    told = [record.getMessage() for record in caplog.records if record.name.endswith("loss_monitor")]
    assert len(told) >= STEPS // 2
    caplog.clear()
    path = tmp_path / "ckptmgr.yaml"
    path.write_text("callbacks:\n  - type: LossMonitorCallback\n    params: {log_interval: 2}\n")
    make(CallbackManager.from_config(path)).train()
    assert [record.getMessage() for record in caplog.records if record.name.endswith("loss_monitor")] == told
