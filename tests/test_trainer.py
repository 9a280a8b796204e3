"""The embedded Trainer: order of events, what they bring, when it saves, and how it ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from ckptmgr.callbacks.base import EVENTS, Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.errors import ConfigError, ConflictError, IncompatibleStateError
from ckptmgr.core.policies import Best, EveryNEpochs, EveryNSteps, SavePolicy
from ckptmgr.trainer import Trainer, TrainingArguments
from ckptmgr.training import state as training_state


class Manager:
    """Keeps the reasons of each save, and writes it if it has a place."""

    def __init__(self, save_policy: SavePolicy | None = None, root: Path | None = None) -> None:
        self.save_policy = save_policy
        self.root = root
        self.saves: list[tuple[int, tuple[str, ...]]] = []
        self.calls: list[str] = []
        self.preemption: Any = None
        self.strict = False
        self.should_stop: str | None = None

    def begin(self, *, resume_from: Path | None = None, **facts: Any) -> None:
        self.calls.append(f"begin {resume_from and resume_from.name}")

    def reserve(self, state: Mapping[str, Any]) -> None:
        pass

    def hurry(self, deadline_s: float) -> None:
        pass

    def save(self, step: int, state: Mapping[str, Any], *, reasons: Sequence[str] = (), **facts: Any) -> str:
        self.saves.append((step, tuple(reasons)))
        if self.root is not None:
            training_state.write(training_state.capture(state), self.root / str(step))
        return str(step)

    def poll_errors(self) -> Sequence[Exception]:
        return []

    def close(self, timeout_s: float | None = None, **limits: Any) -> Any:
        self.calls.append("close")
        return type("Report", (), {"pending": (), "errors": (), "exit_code": 0})


class Recorder:
    """Not a Callback: any object with hooks. Notes each event with the step and what it brings."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.brings: dict[str, set[str]] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in EVENTS:
            raise AttributeError(name)

        def hook(**kwargs: Any) -> None:
            self.events.append(f"{name[3:]}@{kwargs['state'].global_step}")
            self.brings.setdefault(name[3:], set()).update(k for k, v in kwargs.items() if v is not None)

        return hook

    def __dir__(self) -> Sequence[str]:
        return EVENTS


def build(
    batches: Any,
    args: TrainingArguments,
    callbacks: Sequence[Any] = (),
    *,
    model: torch.nn.Module | None = None,
    **options: Any,
) -> Trainer:
    """A trainer of one linear layer on a list of batches of shape [n, 2]."""
    torch.manual_seed(0)
    model = model or torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options.setdefault("loss_fn", lambda model, batch: model(batch).square().mean())
    return Trainer(model, args, train_dataloader=batches, optimizer=optimizer, callbacks=callbacks, **options)


def ones(count: int) -> list[torch.Tensor]:
    return [torch.ones(1, 2)] * count


def test_events_come_in_the_order_of_hugging_face() -> None:
    """Two epochs of three micro-batches in two steps; evaluation and saves at both step and epoch edges."""
    recorder = Recorder()
    manager = Manager(EveryNSteps(2) | EveryNEpochs(1))
    args = TrainingArguments(
        num_train_epochs=2, gradient_accumulation_steps=2, logging_steps=2, eval_steps=1, eval_epochs=1
    )
    build(ones(3), args, [recorder, SaveModelCallback(manager)], eval_dataloader=ones(2)).train()
    step_of_two = "step_begin substep_end pre_optimizer_step optimizer_step step_end"
    step_of_one = "step_begin pre_optimizer_step optimizer_step step_end"
    evaluation = "evaluate_begin prediction_step prediction_step log evaluate"
    expected = f"""init_end train_begin
        epoch_begin {step_of_two} {evaluation} {step_of_one} log {evaluation} epoch_end save
        epoch_begin {step_of_two} {evaluation} {step_of_one} log {evaluation} epoch_end save
        train_end"""
    assert [event.partition("@")[0] for event in recorder.events] == expected.split()
    steps = [event for event in recorder.events if event.startswith(("step_", "epoch_"))]
    assert " ".join(steps) == (
        "epoch_begin@0 step_begin@0 step_end@1 step_begin@1 step_end@2 epoch_end@2 "
        "epoch_begin@2 step_begin@2 step_end@3 step_begin@3 step_end@4 epoch_end@4"
    )
    assert manager.calls == ["begin None", "close"]


def test_events_bring_what_their_hooks_document() -> None:
    """Every event has the common arguments; some have more."""
    recorder = Recorder()
    model = torch.nn.Linear(2, 1)
    args = TrainingArguments(gradient_accumulation_steps=2, logging_steps=1, eval_steps=1)
    trainer = build(ones(2), args, [recorder], model=model, eval_dataloader=ones(1), processing_class="tokens")
    trainer.control.should_save = True
    trainer.train()
    trainer.predict(ones(1))
    common = {
        "args",
        "state",
        "control",
        "model",
        "optimizer",
        "train_dataloader",
        "eval_dataloader",
        "processing_class",
        "tokenizer",
    }
    more = {
        "step_begin": {"batch"},
        "substep_end": {"batch", "outputs"},
        "step_end": {"batch", "outputs", "checkpoint"},
        "prediction_step": {"batch", "outputs"},
        "evaluate": {"metrics"},
        "predict": {"metrics"},
        "log": {"logs"},
    }
    assert recorder.brings == {event: common | more.get(event, set()) for event in recorder.brings}
    assert recorder.brings.keys() == {name[3:] for name in EVENTS} - {"save", "exception"}


def test_one_save_has_all_reasons_of_its_step() -> None:
    """K096: every 100 steps, the best metric and the end of the epoch, all at step 100; the end of training is one more."""
    manager = Manager(EveryNSteps(100) | Best("eval_loss") | EveryNEpochs(1))
    args = TrainingArguments(eval_steps=100, logging_steps=None)
    build(ones(100), args, [SaveModelCallback(manager)], eval_dataloader=ones(1)).train()
    assert manager.saves == [(100, ("every_n_steps:100", "best:eval_loss", "every_n_epochs:1", "train_end"))]


def test_every_n_steps_longer_than_an_epoch_saves() -> None:
    """K038: 110 steps an epoch, every 120 steps, 3 epochs: 120, 240, and the end of training."""
    manager = Manager(EveryNSteps(120))
    args = TrainingArguments(num_train_epochs=3, logging_steps=None)
    build(ones(110), args, [SaveModelCallback(manager)]).train()
    assert manager.saves == [(120, ("every_n_steps:120",)), (240, ("every_n_steps:120",)), (330, ("train_end",))]


class StopsAt(Callback):
    """Ends the training, or the epoch, after a step."""

    def __init__(self, step: int, flag: str) -> None:
        self.step = step
        self.flag = flag

    def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.step:
            setattr(control, self.flag, True)


def test_a_stopped_training_ends_at_the_step_edge_and_is_saved() -> None:
    """The epoch was cut short, so only the end of training is a reason."""
    manager = Manager(EveryNEpochs(1))
    result = build(
        ones(10), TrainingArguments(), [SaveModelCallback(manager), StopsAt(4, "should_training_stop")]
    ).train()
    assert (result.global_step, result.steps_run, result.epoch) == (4, 4, 0.4)
    assert manager.saves == [(4, ("train_end",))]


def test_a_stopped_epoch_goes_on_with_the_next_one() -> None:
    """The rest of the epoch is skipped; the next is whole."""
    seen: list[float] = []

    class Epochs(Callback):
        def on_epoch_end(self, state: TrainerState, **kwargs: Any) -> None:
            seen.append(state.epoch)

    args = TrainingArguments(max_steps=14)
    result = build(ones(10), args, [Epochs(), StopsAt(4, "should_epoch_stop")]).train()
    assert result.global_step == 14
    assert seen == [0.4, 2.0]


def test_a_stop_asked_for_before_the_first_step_is_honoured(caplog: pytest.LogCaptureFixture) -> None:
    """A callback that knows that the run had ended runs no step, and it is said."""

    class Ended(Callback):
        def on_train_begin(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_training_stop = True

    assert build(ones(3), TrainingArguments(), [Ended()]).train().steps_run == 0
    assert "ended the training at step 0" in caplog.text


@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()], ids=["exception", "interruption"])
def test_the_end_is_called_after_an_error_too(error: BaseException) -> None:
    """on_exception, then on_train_end, which closes the manager; then the error goes on."""
    recorder = Recorder()
    manager = Manager()
    calls = iter(range(100))

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if next(calls) == 2:
            raise error
        return model(batch).sum()  # type: ignore[no-any-return]

    trainer = build(ones(5), TrainingArguments(), [recorder, SaveModelCallback(manager)], loss_fn=loss_fn)
    with pytest.raises(type(error)):
        trainer.train()
    assert recorder.events[-3:] == ["step_begin@2", "exception@2", "train_end@2"]
    assert "exception" in recorder.brings["exception"]
    assert manager.calls == ["begin None", "close"]
    assert manager.saves == []


def test_training_can_go_on_after_an_interruption_in_the_same_process() -> None:
    """A notebook's Ctrl-C: the torn step is repeated from its first micro-batch, in the same order, each sample once."""
    used: list[int] = []

    def loss_fn(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        used.append(int(batch))
        if len(used) == 6:
            raise KeyboardInterrupt
        return model(torch.ones(1, 2)).sum()  # type: ignore[no-any-return]

    sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(1))
    loader: DataLoader[Any] = DataLoader(range(8), sampler=sampler)  # type: ignore[arg-type]
    trainer = build(loader, TrainingArguments(gradient_accumulation_steps=2), loss_fn=loss_fn)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.train().global_step == 4
    assert used[6:8] == used[4:6]
    assert sorted(used[:4] + used[6:]) == list(range(8))


def test_a_refused_begin_runs_no_step() -> None:
    """I12: the refusal ends the training before it began."""

    class Refuses(Manager):
        def begin(self, *, resume_from: Path | None = None, **facts: Any) -> None:
            raise ConflictError("the run has checkpoints")

    trainer = build(ones(3), TrainingArguments(), [SaveModelCallback(Refuses())])
    with pytest.raises(ConflictError):
        trainer.train()
    assert trainer.state.global_step == 0


def test_the_manager_is_told_what_is_resumed_from(tmp_path: Path) -> None:
    """The path goes to `begin`, whose business the manifest beside it is."""
    build(ones(3), TrainingArguments(), [SaveModelCallback(Manager(EveryNSteps(2), tmp_path))]).train()
    manager = Manager()
    build(ones(3), TrainingArguments(), [SaveModelCallback(manager)]).train(str(tmp_path / "2"))
    assert manager.calls == ["begin 2", "close"]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    """The piece and the reason are named; no step is run."""
    build(ones(3), TrainingArguments(), [SaveModelCallback(Manager(EveryNSteps(2), tmp_path))]).train()
    other = build(ones(3), TrainingArguments(), model=torch.nn.Linear(3, 1))
    with pytest.raises(IncompatibleStateError, match=r"'model' does not fit.*size mismatch for weight"):
        other.train(tmp_path / "2")


def test_another_length_of_the_data_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A drift that keeps the run going; one that makes the position impossible ends it."""
    build(ones(6), TrainingArguments(), [SaveModelCallback(Manager(EveryNSteps(4), tmp_path))]).train()
    assert build(ones(9), TrainingArguments()).train(tmp_path / "4").global_step == 9
    assert "the loader has 9 batches per epoch, the checkpoint was made with 6" in caplog.text
    with pytest.raises(IncompatibleStateError, match="ended after 3 batches"):
        build(ones(3), TrainingArguments(max_steps=9)).train(tmp_path / "4")


def test_accumulated_gradients_are_those_of_the_whole_batch() -> None:
    """Three micro-batches of one sample each step like one batch of three, the short last window too."""
    samples = torch.arange(10.0).reshape(5, 1, 2)
    whole = build([samples[:3].reshape(3, 2), samples[3:].reshape(2, 2)], TrainingArguments())
    parts = build(list(samples), TrainingArguments(gradient_accumulation_steps=3))
    assert whole.train().global_step == parts.train().global_step == 2
    torch.testing.assert_close(parts.model.state_dict(), whole.model.state_dict())


def test_the_logged_loss_is_the_mean_since_the_last_log() -> None:
    """In `log_history` with epoch and step."""
    trainer = build(
        ones(4), TrainingArguments(logging_steps=2), loss_fn=lambda model, batch: model(batch).sum() * 0 + 3
    )
    trainer.train()
    assert [(entry["step"], entry["loss"], entry["epoch"]) for entry in trainer.state.log_history] == [
        (2, 3.0, 0.5),
        (4, 3.0, 1.0),
    ]


def test_epoch_schedulers_step_once_an_epoch() -> None:
    """K028: the rate of the next epoch is set before the epoch's end is saved."""
    rates: list[float] = []

    class Rates(Callback):
        def on_epoch_end(self, optimizer: Any, **kwargs: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = Trainer(
        model,
        TrainingArguments(num_train_epochs=3, lr_scheduler_interval="epoch"),
        train_dataloader=ones(2),
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        loss_fn=lambda model, batch: model(batch).sum(),
        callbacks=[Rates()],
    )
    trainer.train()
    assert rates == [0.5, 0.25, 0.125]


def test_gradients_are_clipped_after_unscaling() -> None:
    """K003: the norm that `on_pre_optimizer_step` sees is that of the true gradient, clipped to the limit, once a step."""
    norms: list[float] = []

    class Norms(Callback):
        def on_pre_optimizer_step(self, model: torch.nn.Module, **kwargs: Any) -> None:
            norms.append(math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None)))

    for limit in (None, 0.5):
        args = TrainingArguments(gradient_accumulation_steps=2, grad_scaler=True, max_grad_norm=limit)
        # d/dw of w·(1, 1) + b, doubled: the gradient is (2, 2, 2).
        build(ones(4), args, [Norms()], loss_fn=lambda model, batch: 2 * model(batch).sum()).train()
    assert norms == pytest.approx([math.sqrt(12)] * 2 + [0.5] * 2, rel=1e-5)


def test_evaluation_is_without_gradient_and_dropout_and_gives_prefixed_metrics() -> None:
    """`eval_fn` replaces the mean loss; the model is in training mode again afterwards."""
    modes: list[tuple[bool, bool]] = []

    def eval_fn(model: torch.nn.Module, loader: Any) -> Mapping[str, Any]:
        modes.append((model.training, torch.is_grad_enabled()))
        return {"accuracy": torch.tensor(0.5), "eval_loss": 1}

    trainer = build(
        ones(2), TrainingArguments(eval_steps=2, logging_steps=None), eval_dataloader=ones(1), eval_fn=eval_fn
    )
    trainer.train()
    assert modes == [(False, False)]
    assert trainer.model.training
    assert trainer.state.log_history == [{"eval_accuracy": 0.5, "eval_loss": 1.0, "epoch": 1.0, "step": 2}]


def test_the_model_may_give_the_loss_itself() -> None:
    """Without `loss_fn`: mappings by keyword, and the loss by name."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.layer(x)
            return {"loss": (out - y).square().mean(), "logits": out}

    seen: list[Mapping[str, torch.Tensor]] = []

    class Outputs(Callback):
        def on_step_end(self, outputs: Mapping[str, torch.Tensor]) -> None:
            seen.append(outputs)

    build(
        [{"x": torch.ones(3, 2), "y": torch.ones(3, 1)}], TrainingArguments(), [Outputs()], model=Own(), loss_fn=None
    ).train()
    (outputs,) = seen
    assert outputs.keys() == {"loss", "logits"}
    assert not any(tensor.requires_grad for tensor in outputs.values())


def test_predictions_need_no_loss() -> None:
    """The model's results in order, in eval mode."""
    trainer = build(ones(1), TrainingArguments())
    results = trainer.predict([torch.zeros(1, 2), torch.ones(2, 2)])
    assert [tuple(result.shape) for result in results] == [(1, 1), (2, 1)]


class Endless(IterableDataset[torch.Tensor]):
    """A stream without a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(self.size, 2))


def test_a_stream_without_a_length_ends_its_epochs() -> None:
    """Its epochs end when it does, a full last window or not; the end is saved once."""
    for size, steps in [(4, 4), (5, 6)]:
        manager = Manager(EveryNEpochs(1))
        args = TrainingArguments(num_train_epochs=2, gradient_accumulation_steps=2)
        result = build(DataLoader(Endless(size)), args, [SaveModelCallback(manager)]).train()
        assert (result.global_step, result.epoch) == (steps, 2.0)
        assert manager.saves == [(steps // 2, ("every_n_epochs:1",)), (steps, ("every_n_epochs:1", "train_end"))]


@pytest.mark.parametrize("batches", [[], DataLoader(Endless(0))], ids=["list", "stream"])
def test_an_empty_loader_is_an_error(batches: Any) -> None:
    """Never a training that ends well without a step."""
    with pytest.raises(ConfigError, match="gave no batch"):
        build(batches, TrainingArguments()).train()


@pytest.mark.parametrize(
    "options",
    [
        {"num_train_epochs": 0},
        {"max_steps": -1},
        {"gradient_accumulation_steps": None},
        {"logging_steps": 0},
        {"max_grad_norm": 0.0},
        {"amp": "fp8"},
        {"lr_scheduler_interval": "never"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    """When they are made, by name."""
    with pytest.raises(ConfigError, match=next(iter(options))):
        TrainingArguments(**options)


def test_evaluation_needs_data() -> None:
    """Said when the trainer is built, not at the first evaluation."""
    with pytest.raises(ConfigError, match="no eval_dataloader"):
        build(ones(1), TrainingArguments(eval_steps=1))


def test_a_loss_that_is_no_scalar_is_named() -> None:
    """With its shape."""
    with pytest.raises(ConfigError, match=r"the loss is \(3,\)"):
        build(ones(1), TrainingArguments(), loss_fn=lambda model, batch: torch.ones(3)).train()


def test_a_failing_callback_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    """I9."""
    caplog.set_level(logging.ERROR)

    class Fails(Callback):
        def on_step_end(self, **kwargs: Any) -> None:
            raise RuntimeError("not today")

    trainer = build(ones(3), TrainingArguments(), [Fails()])
    assert trainer.train().steps_run == 3
    assert trainer.callbacks.failures == {"Fails": 3}
