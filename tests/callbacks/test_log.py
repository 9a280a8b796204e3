"""What a training says, written down: records, sinks, steps, ranks, failures."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ckptmgr.callbacks import log_sinks
from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.log import LogCallback
from ckptmgr.callbacks.log_sinks import Histogram, JsonlSink
from ckptmgr.core.errors import ConfigError, MissingExtraError
from ckptmgr.trainer import Trainer, TrainingArguments

pytestmark = pytest.mark.usefixtures("one_thread")


class Kept:
    """A sink that keeps what it gets, or fails."""

    def __init__(self) -> None:
        self.began: list[int] = []
        self.records: list[Mapping[str, Any]] = []
        self.closed = 0
        self.error: Exception | None = None

    def begin(self, step: int) -> None:
        self.began.append(step)

    def write(self, record: Mapping[str, Any]) -> None:
        if self.error is not None:
            raise self.error
        self.records.append(record)

    def close(self) -> None:
        self.closed += 1

    def of(self, kind: str) -> list[Mapping[str, Any]]:
        return [record for record in self.records if record["kind"] == kind]


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trainer_of(*callbacks: Any, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    return Trainer(
        model,
        TrainingArguments(**{"max_steps": 6, "logging_steps": 2, "eval_steps": 3, **arguments}),
        train_dataloader=[torch.full((2, 4), float(n + 1)) for n in range(12)],
        eval_dataloader=[torch.ones(2, 4)],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loss_fn=lambda model, batch: model(batch).square().mean(),
        callbacks=callbacks,
    )


class Gradients(Callback):
    """Notes the norm of the gradients of each step, computed by hand."""

    def __init__(self) -> None:
        self.norms: dict[int, float] = {}

    def on_pre_optimizer_step(self, state: Any, model: Any, **kwargs: Any) -> None:
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in model.parameters()])
        self.norms[state.global_step + 1] = float(flat.norm())


def test_a_training_in_the_embedded_trainer_is_a_file_of_records(tmp_path: Path) -> None:
    gradients = Gradients()
    callback = LogCallback(tmp_path / "logs", log_interval=2, histogram_interval=4)
    trainer = trainer_of(callback, gradients, gradient_accumulation_steps=2)
    trainer.train()
    found = records(tmp_path / "logs" / "log.jsonl")
    assert [(each["kind"], each["step"]) for each in found] == [
        *(("begin", 0), ("step", 2), ("log", 2), ("log", 3)),
        *(("step", 4), ("log", 4), ("step", 6), ("log", 6), ("log", 6), ("end", 6)),
    ]
    for each in found:
        assert list(each)[:5] == ["at", "host", "rank", "kind", "step"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each["at"])
        assert each["rank"] == 0
    steps = [each for each in found if each["kind"] == "step"]
    assert [each["grad_norm"] for each in steps] == pytest.approx([gradients.norms[step] for step in (2, 4, 6)])
    assert [each["learning_rate"] for each in steps] == [0.01] * 3
    assert [sum(each["grad_log10"]["counts"]) for each in steps if "grad_log10" in each] == [5]
    told = [each for each in found if each["kind"] == "log"]
    assert {"loss", "learning_rate"} <= told[0].keys()
    # The evaluation is in it once, though it comes with on_log and with on_evaluate.
    assert [each["step"] for each in told if "eval_loss" in each] == [3, 6]
    history = [{**entry} for entry in trainer.state.log_history]
    assert [each["loss"] for each in told if "loss" in each] == [e["loss"] for e in history if "loss" in e]
    assert callback.failures == callback.lost == 0


def test_training_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    logged = trainer_of(LogCallback(tmp_path, log_interval=1, histogram_interval=1))
    plain = trainer_of()
    logged.train()
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(logged.model.parameters(), plain.model.parameters(), strict=True))


def test_a_histogram_counts_powers_of_ten_and_leaves_out_what_is_none() -> None:
    sink = Kept()
    callback = LogCallback(sinks=[sink], log_interval=None, histogram_interval=1)
    callback.on_train_begin(None, TrainerState(), TrainerControl())
    model = torch.nn.Linear(7, 1, bias=False)
    model.weight.grad = torch.tensor([[0.0, 1e-3, -1e-3, 100.0, math.nan, math.inf, 1e-20]])
    state, control = TrainerState(), TrainerControl()
    callback.on_pre_optimizer_step(None, state, control, model=model)
    state.global_step = 1
    callback.on_step_end(None, state, control)
    (record,) = sink.of("step")
    histogram = record["grad_log10"]
    assert isinstance(histogram, Histogram)
    assert len(histogram.edges) == len(histogram.counts) + 1
    where = {edge: count for edge, count in zip(histogram.edges, histogram.counts, strict=False) if count}
    assert sum(where.values()) == 3
    assert sorted(where.values()) == [1, 2]
    assert [-3.25 <= edge <= -2.75 or 1.75 <= edge <= 2.0 for edge in where] == [True, True]


def test_by_position_as_transformers_calls_it_and_evaluations_that_are_not_logged() -> None:
    sink = Kept()
    callback = LogCallback(sinks=[sink], log_interval=1)
    model = torch.nn.Linear(2, 1)
    model(torch.ones(1, 2)).sum().backward()
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    args = SimpleNamespace(output_dir="out")
    state, control = TrainerState(), TrainerControl()
    callback.on_train_begin(args, state, control, model=model, optimizer=optimizer)
    callback.on_pre_optimizer_step(args, state, control, model=model, optimizer=optimizer)
    state.global_step = 1
    callback.on_step_end(args, state, control, model=model)
    callback.on_log(args, state, control, logs={"loss": torch.tensor(2.0), "grad_norm": math.nan, "note": "text"})
    callback.on_log(args, state, control, logs={"eval_loss": 1.0})
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 1.0, "eval_extra": 3, "epoch": 0.5})
    state.global_step = 2
    callback.on_evaluate(args, state, control, metrics={"eval_loss": 0.5})
    callback.on_train_end(args, state, control)
    (step,) = sink.of("step")
    assert step["learning_rate/0"] == 0.1
    assert step["learning_rate/1"] == 0.5
    assert step["grad_norm"] == pytest.approx(math.sqrt(3))
    values = [{name: value for name, value in each.items() if name not in log_sinks.LABELS} for each in sink.of("log")]
    assert values[0]["loss"] == 2.0
    assert math.isnan(values[0]["grad_norm"])
    assert "note" not in values[0]
    assert values[1:] == [{"eval_loss": 1.0}, {"eval_extra": 3.0}, {"eval_loss": 0.5}]
    assert (sink.began, sink.closed) == ([0], 1)


def test_a_file_is_gone_on_with_after_half_a_line_and_says_what_is_not_finite(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    sink = JsonlSink(path)
    sink.begin(0)
    sink.write({"step": 1, "loss": 2.0})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    JsonlSink(path).write({"step": 2, "loss": math.nan, "high": math.inf})
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert [json.loads(lines[0]), json.loads(lines[2])] == [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": "NaN", "high": "Infinity"},
    ]


def test_a_sink_that_fails_says_so_once_and_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    broken, good = Kept(), Kept()
    broken.error = OSError("no space left on device")
    callback = LogCallback(sinks=[broken, good], log_interval=1)
    trainer_of(callback).train()
    assert len(good.of("step")) == 6
    said = [record.getMessage() for record in caplog.records if "Kept" in record.getMessage()]
    assert said == ["Kept does not take records, training goes on: no space left on device"]
    assert callback.lost == len(good.records)
    broken.error = None
    callback.on_log(None, TrainerState(global_step=7), TrainerControl(), logs={"loss": 1.0})
    assert "Kept takes records again" in caplog.records[-1].getMessage()


def test_gradients_that_cannot_be_looked_at_are_said_once_and_training_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no deterministic histogram")

    monkeypatch.setattr(torch, "histc", refuse)
    callback = LogCallback(sinks=[Kept()], log_interval=1, histogram_interval=1)
    assert trainer_of(callback).train().global_step == 6
    assert callback.failures == 1
    assert sum("look at the gradients" in record.getMessage() for record in caplog.records) == 1


def test_other_ranks_write_nothing_or_files_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    quiet = LogCallback(tmp_path / "a")
    own = LogCallback(tmp_path / "b", sinks=["jsonl", {"jsonl": {"path": str(tmp_path / "c.jsonl")}}], all_ranks=True)
    for callback in (quiet, own):
        state = TrainerState(global_step=1, is_world_process_zero=False)
        callback.on_log(None, state, TrainerControl(), logs={"loss": 1.0})
    assert quiet.sinks == ()
    assert not (tmp_path / "a").exists()
    assert [record["rank"] for record in records(tmp_path / "b" / "log-rank3.jsonl")] == [3]
    assert not (tmp_path / "c.jsonl").exists()


# --- what may not be installed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sink", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_what_is_not_installed_is_an_error_at_once(
    sink: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtraError, match=f"{sink} is not installed.* - pip install {sink}"):
        LogCallback(tmp_path, sinks=sink)


class FakeWandb:
    """The module wandb, as far as it is used."""

    def __init__(self, run: Any = None) -> None:
        self.run = run
        self.made: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.metrics: list[Any] = []
        self.finished = 0

    def init(self, **options: Any) -> Any:
        self.made.append(options)
        return self

    def define_metric(self, name: str, **options: Any) -> None:
        self.metrics.append((name, options))

    def log(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1

    def Histogram(self, np_histogram: Any) -> Any:
        return ("histogram", np_histogram)


@pytest.mark.parametrize("active", [False, True])
def test_wandb_gets_a_run_of_ours_or_the_active_one(active: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = FakeWandb()
    wandb.run = wandb if active else None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    trainer_of(LogCallback(sinks={"wandb": {"project": "p"}}, log_interval=3, histogram_interval=6)).train()
    assert wandb.made == ([] if active else [{"project": "p"}])
    assert wandb.finished == (0 if active else 1)
    assert ("*", {"step_metric": "global_step"}) in wandb.metrics
    steps = [row for row in wandb.rows if "step/grad_norm" in row]
    assert [row["global_step"] for row in steps] == [3, 6]
    kind, (counts, edges) = steps[1]["step/grad_log10"]
    assert (kind, sum(counts), len(edges)) == ("histogram", 5, len(counts) + 1)
    assert [row["global_step"] for row in wandb.rows if "eval/loss" in row] == [3, 6]


@pytest.mark.parametrize(
    "arguments",
    [
        {"log_interval": 0},
        {"histogram_interval": -1},
        {"all_ranks": 1.5},
        {"sinks": []},
        {"sinks": ["json"]},
        {"sinks": {"jsonl": {"pth": "x"}}},
        {"sinks": [{"jsonl": {}, "wandb": {}}]},
        {"sinks": [3]},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"LogCallback: .* - "):
        LogCallback(**arguments)
