"""Where the time of a training goes, on a clock that only the parts of the training move: each of them has its own seconds."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.breakdown import Breakdown
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.profiler import PerformanceProfilerCallback
from ckptmgr.callbacks.spans import Spans
from ckptmgr.core.errors import ConfigError
from ckptmgr.trainer import Trainer, TrainingArguments

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    """Stands still, but for what `spend` says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


class Slow:
    """The parts of a training, and how long each takes."""

    def __init__(self, **seconds: float) -> None:
        self.clock = Clock()
        self.seconds = seconds

    def spend(self, part: str) -> None:
        self.clock.spend(self.seconds.get(part, 0.0))


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slow: Slow) -> torch.Tensor:
        ctx.slow = slow
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.slow.spend("backward")
        return grad, None


class Model(torch.nn.Module):
    def __init__(self, slow: Slow) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self.slow = slow

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.slow.spend("forward" if self.training else "evaluation")
        loss = self.linear(batch).square().mean()
        result: torch.Tensor = _Backward.apply(loss, self.slow)  # type: ignore[no-untyped-call]
        return result


class Optimizer(torch.optim.SGD):
    slow: Slow

    def step(self, closure: Any = None) -> Any:
        self.slow.spend("optimizer")
        return super().step(closure)


class Loader:
    """Batches of three samples."""

    def __init__(self, slow: Slow, batches: int) -> None:
        self.slow = slow
        self.batches = batches

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index in range(self.batches):
            self.slow.spend("data")
            yield torch.full((3, 4), float(index))


class Busy(Callback):
    """Takes its time after each step, and in saves."""

    priority = 60

    def __init__(self, slow: Slow) -> None:
        self.slow = slow

    def on_step_end(self, control: Any, state: Any, **kwargs: Any) -> None:
        self.slow.spend("callbacks")
        control.should_save = self.slow.seconds.get("save", 0.0) > 0 and state.global_step % 5 == 0

    def on_save(self, **kwargs: Any) -> None:
        self.slow.spend("save")


def train(slow: Slow, profiler: PerformanceProfilerCallback, *, steps: int = 20, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = Model(slow)
    optimizer = Optimizer(model.parameters(), lr=0.01)
    optimizer.slow = slow
    per_step = arguments.get("gradient_accumulation_steps", 1)
    trainer = Trainer(
        model,
        TrainingArguments(**{"max_steps": steps, "logging_steps": None, **arguments}),
        train_dataloader=Loader(slow, steps * per_step),
        eval_dataloader=[torch.ones(3, 4)] * 2,
        optimizer=optimizer,
        callbacks=[],
    )
    # Its times on the same clock as everything else.
    trainer.callbacks = CallbackManager([profiler, Busy(slow)], clock=slow.clock)
    trainer.train()
    return trainer


def profiler_of(slow: Slow, **options: Any) -> PerformanceProfilerCallback:
    return PerformanceProfilerCallback(**{"log_interval": 10, "clock": slow.clock, **options})


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer", "callbacks"])
@pytest.mark.parametrize("sample_interval", [1, 7])
def test_the_bottleneck_is_named_with_its_seconds(
    part: str, sample_interval: int, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = {"data": 0.01, "forward": 0.02, "backward": 0.03, "optimizer": 0.01, "callbacks": 0.02, part: 0.5}
    slow = Slow(**seconds)
    profiler = profiler_of(slow, sample_interval=sample_interval)
    train(slow, profiler)
    total = profiler.total
    assert total is not None
    assert (total.first_step, total.last_step, total.steps) == (2, 20, 19)
    # Steps are alike here, so a few of them stand for all.
    # Those of the callbacks after the first step are in it as well.
    assert {name: each / 19 for name, each in total.seconds.items()} == pytest.approx(seconds, rel=0.06)
    assert total.bottleneck == part
    assert total.samples == 19 * 3
    assert total.samples_per_s == pytest.approx(19 * 3 / total.wall_s)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("profiler")]
    assert len(said) == 3
    assert all(f"; bottleneck: {part} (" in message for message in said)
    assert said[0].startswith("steps 2 to 10: ")
    assert said[2].startswith("in all, steps 2 to 20: ")


def test_micro_batches_are_told_apart_and_counted() -> None:
    slow = Slow(data=0.01, forward=0.03, backward=0.05, optimizer=0.02)
    profiler = profiler_of(slow, sample_interval=3)
    train(slow, profiler, steps=11, gradient_accumulation_steps=4)
    total = profiler.total
    assert total is not None
    per_step = {name: each / 10 for name, each in total.seconds.items()}
    assert per_step == pytest.approx({"data": 0.04, "forward": 0.12, "backward": 0.2, "optimizer": 0.02})
    assert total.samples == 10 * 4 * 3


def test_evaluations_and_saves_have_their_own_time() -> None:
    slow = Slow(data=0.01, forward=0.02, evaluation=1.0, save=3.0, callbacks=0.005)
    profiler = profiler_of(slow, sample_interval=1)
    train(slow, profiler, steps=20, eval_steps=10)
    assert profiler.total is not None
    found = profiler.total.seconds
    assert found["evaluation"] == pytest.approx(4.0)  # two of two batches
    assert found["save"] == pytest.approx(12.0)  # four of them
    assert found["data"] == pytest.approx(19 * 0.01)
    assert found["callbacks"] == pytest.approx(20 * 0.005)  # that of the first step is after it
    assert profiler.total.bottleneck == "save"


def test_nothing_stays_on_the_model_and_training_is_the_same_to_the_last_bit() -> None:
    def weights(sample_interval: int) -> list[torch.Tensor]:
        slow = Slow(forward=0.1)
        trainer = train(slow, profiler_of(slow, sample_interval=sample_interval), steps=7)
        assert not trainer.model._forward_hooks
        assert not trainer.model._forward_pre_hooks
        return [parameter.detach() for parameter in trainer.model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(weights(1), weights(1000), strict=True))


def test_hooks_are_removed_after_an_exception_and_what_was_measured_is_told(caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow(forward=0.1)
    profiler = profiler_of(slow, sample_interval=1)

    class Broken(Model):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            if batch[0, 0] == 4:
                raise RuntimeError("out of memory")
            return super().forward(batch)

    model = Broken(slow)
    optimizer = Optimizer(model.parameters(), lr=0.01)
    optimizer.slow = slow
    trainer = Trainer(
        model,
        TrainingArguments(max_steps=9, logging_steps=None),
        train_dataloader=Loader(slow, 9),
        optimizer=optimizer,
        callbacks=[profiler],
    )
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert not model._forward_hooks
    assert profiler.total is not None
    assert profiler.total.steps == 3
    assert "in all, steps 2 to 4" in caplog.text


@pytest.mark.parametrize("is_compiled", [True, False])
def test_forward_and_backward_are_one_where_nobody_calls_the_model_or_nobody_may_look(is_compiled: bool) -> None:
    """Compiled in place it gets no hooks, and in Lightning they are not called."""
    slow = Slow(forward=0.3, backward=0.2, data=0.1)
    profiler = profiler_of(slow, sample_interval=1)
    state, control = TrainerState(), TrainerControl()
    model = Model(slow)
    if is_compiled:
        model._compiled_call_impl = lambda *args: None
    manager = CallbackManager([profiler], clock=slow.clock)

    def call(event: str) -> None:
        manager.call(event, args=None, state=state, control=control, model=model)

    call("on_train_begin")
    for _ in range(3):
        slow.spend("data")
        call("on_step_begin")
        assert bool(model._forward_hooks) is (not is_compiled and state.global_step > 0)
        slow.spend("forward")
        slow.spend("backward")
        call("on_pre_optimizer_step")
        state.global_step += 1
        call("on_step_end")
    call("on_train_end")
    assert profiler.total is not None
    assert profiler.total.seconds == pytest.approx({"data": 0.2, "compute": 1.0})
    assert profiler.total.bottleneck == "compute"


def test_by_position_as_transformers_calls_it_without_a_manager() -> None:
    """Neither batch nor on_evaluate_begin; the flags say what comes next, and the arguments how many samples."""
    slow = Slow()
    profiler = profiler_of(slow, sample_interval=1)
    args = SimpleNamespace(train_batch_size=8, gradient_accumulation_steps=2, output_dir="out")
    state = SimpleNamespace(global_step=0, is_world_process_zero=True, num_input_tokens_seen=0)
    control, model = TrainerControl(), torch.nn.Linear(1, 1)

    def call(event: str, **arguments: Any) -> None:
        getattr(profiler, event)(args, state, control, model=model, **arguments)

    call("on_train_begin")
    for step in range(1, 5):
        slow.clock.spend(0.1)  # data
        call("on_step_begin")
        for _ in range(2):
            model(torch.ones(1, 1))
            slow.clock.spend(0.2)  # backward: the forward itself takes nothing
            call("on_substep_end")
        call("on_pre_optimizer_step")
        slow.clock.spend(0.3)
        call("on_optimizer_step")
        state.global_step, state.num_input_tokens_seen = step, 1000 * step
        control.should_evaluate = control.should_save = step == 3
        call("on_step_end")
        if step == 3:
            call("on_log", logs={})
            slow.clock.spend(0.7)  # the first batch of the evaluation
            call("on_prediction_step")
            slow.clock.spend(0.7)
            control.should_evaluate = False
            call("on_evaluate", metrics={})
            slow.clock.spend(0.9)  # the host writes its files
            control.should_save = False
            call("on_save")
    call("on_train_end")
    total = profiler.total
    assert total is not None
    assert total.seconds == pytest.approx(
        {"data": 0.3, "backward": 1.2, "optimizer": 0.9, "evaluation": 1.4, "save": 0.9}
    )
    assert (total.samples, total.tokens) == (3 * 16, 3000)


def test_reports_are_a_file_to_plot(tmp_path: Path) -> None:
    slow = Slow(data=0.5, forward=0.1)
    train(slow, profiler_of(slow, sample_interval=1, path=tmp_path / "p" / "profile.jsonl"))
    found = [json.loads(line) for line in (tmp_path / "p" / "profile.jsonl").read_text().splitlines()]
    assert [(each["first_step"], each["step"], each["bottleneck"]) for each in found] == [
        (2, 10, "data"),
        (11, 20, "data"),
    ]
    assert found[1]["data_s"] == pytest.approx(5.0)
    assert found[1]["wall_s"] == pytest.approx(6.0)
    assert found[0]["host_bytes"] > 0
    assert list(found[0])[:5] == ["at", "host", "rank", "kind", "step"]


def test_a_trace_of_a_few_steps_is_written_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    slow = Slow()
    train(slow, profiler_of(slow, trace_dir=tmp_path / "traces", trace_step=3, trace_steps=2), steps=9)
    (path,) = (tmp_path / "traces").iterdir()
    assert path.name == "trace-step3-rank0.json.gz"
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [each.get("name") for each in events]
    assert sum(name == "aten::linear" for name in names) == 2
    assert f"wrote the trace {path}" in caplog.text


def test_a_trace_that_fails_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    slow = Slow()
    trainer = train(slow, profiler_of(slow, trace_dir=tmp_path / "file", trace_step=1, trace_steps=1), steps=4)
    assert trainer.state.global_step == 4
    assert trainer.callbacks.failures == {}
    assert sum(record.getMessage().startswith("no trace: ") for record in caplog.records) == 1


def test_other_ranks_measure_and_say_nothing(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    slow = Slow()
    profiler = profiler_of(slow, log_interval=1, path=tmp_path / "file")
    state, control = TrainerState(is_world_process_zero=False), TrainerControl()
    profiler.on_train_begin(None, state, control)
    for step in (1, 2):
        profiler.on_step_begin(None, state, control)
        slow.clock.spend(1.0)
        state.global_step = step
        profiler.on_step_end(None, state, control)
    profiler.on_train_end(None, state, control)
    assert profiler.total is not None
    assert profiler.total.seconds == {"compute": 1.0}
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []
    assert not (tmp_path / "file").exists()


# --- a device with a clock of its own -----------------------------------------------------------------------------------------


class Queue:
    """A device: works behind the host, and notes when it comes to a mark."""

    def __init__(self) -> None:
        self.now = 0.0
        self.done = True

    def mark(self) -> Any:
        at = self.now
        return SimpleNamespace(query=lambda: self.done, elapsed_time=lambda later: (later.at - at) * 1000, at=at)


def test_on_a_device_its_own_clock_says_what_takes_the_time() -> None:
    """The host hands over its work at once, and then waits for all of it in the optimizer."""
    clock, queue = Clock(), Queue()
    spans = Spans(clock, queue.mark)

    def step(*, sampled: bool, aside_s: float = 0.0) -> None:
        spans.enter("data")
        spans.sample(sampled)
        clock.spend(0.1 + aside_s)
        queue.now += 0.1 + aside_s  # the device waits for data, and for callbacks
        spans.enter("compute", aside={"callbacks": aside_s})
        queue.now += 0.03
        spans.enter("forward")
        queue.now += 0.27
        spans.enter("backward")
        queue.now += 0.6
        spans.enter("optimizer")
        clock.spend(0.9)
        spans.enter("data")
        spans.sample(False)

    for number in range(10):
        step(sampled=number == 4, aside_s=0.2)
    spans.enter(None)
    assert spans.take() == pytest.approx(
        {"data": 1.0, "forward": 9 * 27 / 87, "backward": 9 * 60 / 87, "callbacks": 2.0}
    )
    assert spans.take() == {}


@pytest.mark.parametrize("logging_steps", [None, 1])
def test_in_a_training_on_a_device_its_sampled_steps_stand_for_all(
    logging_steps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host only waits, in the optimizer; the device says for what. It works in forward and backward, and waits for data."""
    queue = Queue()
    monkeypatch.setattr("ckptmgr.callbacks.profiler.device_of", lambda model: "device")
    monkeypatch.setattr("ckptmgr.callbacks.profiler.marks_on", lambda device: queue.mark)
    monkeypatch.setattr("ckptmgr.callbacks.profiler.peak_bytes", lambda device: 77)
    on_device = {"data": 0.1, "forward": 0.3, "backward": 0.6}

    class Behind(Slow):
        def spend(self, part: str) -> None:
            super().spend(part)
            queue.now += on_device.get(part, 0.0)

    slow = Behind(data=0.1, optimizer=0.9)
    profiler = profiler_of(slow, sample_interval=4)
    train(slow, profiler, logging_steps=logging_steps, eval_steps=5)
    total = profiler.total
    assert total is not None
    assert {name: each / 19 for name, each in total.seconds.items()} == pytest.approx(on_device)
    assert total.bottleneck == "backward"
    assert total.device_bytes == 77


def test_marks_that_the_device_has_not_come_to_are_not_waited_for() -> None:
    clock, queue = Clock(), Queue()
    spans = Spans(clock, queue.mark)
    queue.done = False
    spans.enter("compute")
    spans.sample(True)
    queue.now += 3.0
    clock.spend(1.0)
    spans.enter("optimizer")
    queue.now += 1.0
    spans.enter("data")
    spans.sample(False)
    assert spans.take() == {"compute": 1.0}
    queue.done = True
    clock.spend(2.0)
    spans.enter("data")
    assert spans.take() == pytest.approx({"compute": 1.5, "optimizer": 0.5})


# --- what a report says ---------------------------------------------------------------------------------------------------------


def test_a_report_is_one_line() -> None:
    found = Breakdown(
        first_step=11,
        last_step=20,
        steps=10,
        seconds={"data": 3.0, "forward": 0.99, "callbacks": 0.01},
        samples=80,
        tokens=40_000,
        world_size=4,
        host_bytes=1_234_000_000,
        device_bytes=20_000_000_000,
    )
    assert str(found) == (
        "steps 11 to 20: 400 ms a step: data 75 %, forward 25 %; 80 samples/s; 40,000 tokens/s; 1.23 GB of memory; "
        "at most 20 GB on the device"
    )
    assert found.shares == pytest.approx({"data": 0.75, "forward": 0.2475, "callbacks": 0.0025})
    # Of equal ones the first in a step.
    assert Breakdown(first_step=1, last_step=1, steps=1, seconds={"data": 1.0, "save": 1.0}).bottleneck == "data"
    assert Breakdown(first_step=1, last_step=1, steps=0, seconds={}).bottleneck == ""


@pytest.mark.parametrize(
    "arguments", [{"log_interval": 0}, {"sample_interval": 0}, {"trace_step": 0}, {"trace_steps": True}], ids=str
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"PerformanceProfilerCallback: {next(iter(arguments))} is .* - "):
        PerformanceProfilerCallback(**arguments)
