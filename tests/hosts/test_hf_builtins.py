"""The built-in callbacks in transformers' Trainer, each added alone and through a manager; in this process."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.callbacks.base import Callback, Priority
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.gradient_clip import GradientClipCallback
from ckptmgr.callbacks.log import LogCallback
from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.memory import MemoryCallback
from ckptmgr.callbacks.notify import NotifyCallback
from ckptmgr.callbacks.profiler import PerformanceProfilerCallback
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.training.manager import CheckpointManager

# Not ours: what transformers and its libraries have to say about each other.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("offline", "one_thread")]

STEPS, ACCUMULATION = 8, 2

Make = Callable[..., Any]


class Watch(Callback):
    """What the optimizer steps with, and what is logged."""

    priority = Priority.LOG

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.norms: list[float] = []
        self.logs: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        model, optimizer = kwargs["model"], kwargs["optimizer"]
        self.rates.append(optimizer.param_groups[0]["lr"])
        self.norms.append(
            math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters() if p.grad is not None))
        )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


@pytest.fixture
def make_trainer(make_hf_trainer: Make) -> Make:
    """Small trainings: 8 steps of two micro-batches, 4 an epoch."""
    return partial(
        make_hf_trainer,
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATION,
        logging_steps=1,
        lr_scheduler_type="constant",
        learning_rate=1e-2,
    )


@pytest.fixture(params=["alone", "managed"])
def wrap(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Both ways to hand a callback to the Trainer."""
    return (lambda callback: callback) if request.param == "alone" else (lambda callback: CallbackManager([callback]))


def said(caplog: pytest.LogCaptureFixture, module: str) -> list[str]:
    names = f"ckptmgr.callbacks.{module}"
    return [r.getMessage() for r in caplog.records if r.name == names and r.levelno >= logging.WARNING]


def test_early_stopping(make_trainer: Make, wrap: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The loss stays the same: ended by the third evaluation, and resumed after the second one as well."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "learning_rate": 0.0}
    callback = EarlyStoppingCallback(patience=2)
    trainer = make_trainer(wrap(callback), save_strategy="steps", save_steps=2, **options)
    trainer.train()
    assert trainer.state.global_step == callback.stopped_step == 6
    assert callback.best_step == 2
    assert len(said(caplog, "early_stopping")) == 1
    resumed = EarlyStoppingCallback(patience=2)
    trainer = make_trainer(wrap(resumed), **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-4"))
    assert trainer.state.global_step == 6
    assert resumed.state_dict() == callback.state_dict()


@pytest.mark.parametrize("saving", [False, True])
def test_a_stopped_training_stays_stopped(
    make_trainer: Make,
    wrap: Any,
    tmp_path: Path,
    saving: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A `SaveModelCallback` names who ended it and lets no step run; without it, one step more is run. When it is wanted, training goes on."""
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 3, "learning_rate": 0.0}
    # With accumulation the Trainer looks between two micro-batches, and no further step would be run at all.
    options |= {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1}

    def train(resume: str | None) -> Any:
        manager = CheckpointManager(tmp_path / "store/run", local_dir=tmp_path / "disk", transfer="thread")
        callbacks = [wrap(EarlyStoppingCallback(patience=1)), *([SaveModelCallback(manager)] if saving else [])]
        trainer = make_trainer(*callbacks, **options, **({} if saving else {"save_strategy": "steps", "save_steps": 3}))
        path = resume and (manager.resume_path() if saving else tmp_path / "out" / resume)
        trainer.train(resume_from_checkpoint=path and str(path))
        return trainer.state.global_step

    assert train(None) == 6
    assert train("checkpoint-6") == (6 if saving else 7)
    assert caplog.text.count("already stopped (EarlyStoppingCallback)") == 1
    monkeypatch.setenv("CKPTMGR_CONTINUE_STOPPED", "1")
    assert train("checkpoint-6") == STEPS


def test_early_stopping_restores_the_best(make_trainer: Make) -> None:
    """The loss only rises (a negative rate): the weights of the first evaluation come back."""
    import torch

    kept: dict[int, Any] = {}

    class Keep(Callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kept[state.global_step] = {k: v.clone() for k, v in kwargs["model"].state_dict().items()}

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for parameter in kwargs["model"].parameters():
                parameter.grad.neg_()

    trainer = make_trainer(
        Keep(), EarlyStoppingCallback("loss", 2, restore_best=True), eval_strategy="steps", eval_steps=1
    )
    trainer.train()
    assert trainer.state.global_step == 3
    ended = trainer.model.state_dict()
    assert all(torch.equal(ended[name], value) for name, value in kept[1].items())
    assert not all(torch.equal(ended[name], value) for name, value in kept[3].items())


def test_the_loss_monitor_goes_by_the_logs(make_trainer: Make, wrap: Any, tmp_path: Path) -> None:
    """A loss and a norm per log, NaN in both; its save and its stop are done at that step."""

    class Poison(Callback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                next(kwargs["model"].parameters()).data.fill_(math.nan)

    callback = LossMonitorCallback(1, on_nonfinite=["save", "stop"])
    trainer = make_trainer(Poison(), wrap(callback), logging_nan_inf_filter=False)
    trainer.train()
    assert trainer.state.global_step == 5
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [(anomaly.kind, anomaly.step) for anomaly in callback.anomalies] == [("nonfinite", 5), ("explosion", 5)]
    assert callback.mean == pytest.approx(sum(entry["loss"] for entry in logged[:4]) / 4)
    assert callback.grad_norm == pytest.approx(logged[3]["grad_norm"])
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-5"]


def test_the_loss_monitor_resumes(make_trainer: Make, wrap: Any, tmp_path: Path) -> None:
    """The window after a resume is that of the whole run, as far as its losses are the same."""
    whole = LossMonitorCallback(window=3)
    make_trainer(wrap(whole), save_strategy="steps", save_steps=5).train()
    resumed = LossMonitorCallback(window=5)
    trainer = make_trainer(wrap(resumed))
    trainer.train(resume_from_checkpoint=str(tmp_path / "out/checkpoint-5"))
    # Three before the resume, three after it, of which one has gone.
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == STEPS
    assert resumed.mean == pytest.approx(sum(losses[3:]) / 5)
    assert resumed.last == whole.last


def test_the_trainers_own_clipping_stands(make_trainer: Make, wrap: Any, caplog: pytest.LogCaptureFixture) -> None:
    callback, watch = GradientClipCallback(0.01), Watch()
    make_trainer(wrap(callback), watch, max_grad_norm=0.25).train()
    assert watch.norms == pytest.approx([0.25] * STEPS, rel=1e-4)
    assert callback.steps == 0
    assert ["max_grad_norm=0.25" in line for line in said(caplog, "gradient_clip")] == [True]


@pytest.mark.parametrize("options", [{"max_grad_norm": 0.0}, {}], ids=["off", "replaced"])
def test_clipping_once_per_step(make_trainer: Make, wrap: Any, options: dict[str, Any]) -> None:
    """Also in place of the Trainer's own, which is on by default; the logs say the true norm."""
    callback, watch = GradientClipCallback(0.125, replace_host=not options), Watch()
    trainer = make_trainer(wrap(callback), watch, **options)
    before = trainer.args.max_grad_norm
    trainer.train()
    assert watch.norms == pytest.approx([0.125] * STEPS, rel=1e-4)
    assert (callback.steps, callback.clipped, callback.nonfinite) == (STEPS, STEPS, 0)
    logged = [entry["grad_norm"] for entry in watch.logs if "grad_norm" in entry]
    assert callback.last_norm == pytest.approx(logged[-1])
    assert min(logged) > 0.125
    assert trainer.args.max_grad_norm == before


def test_schedules_are_those_of_transformers(make_trainer: Make, wrap: Any) -> None:
    """The same rates as its own schedulers make, used and logged."""
    import torch
    from transformers import get_scheduler  # type: ignore[import-not-found, unused-ignore]

    for name, ours, kwargs in (
        ("linear", {"schedule": "linear"}, {}),
        ("cosine", {"schedule": "cosine"}, {}),
        ("constant_with_warmup", {"schedule": "constant"}, {}),
        ("cosine_with_restarts", {"schedule": "cosine", "cycles": 2}, {"num_cycles": 2}),
        ("cosine_with_min_lr", {"schedule": "cosine", "min_lr": 1e-3}, {"min_lr": 1e-3}),
    ):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-2)
        reference = get_scheduler(
            name, optimizer, num_warmup_steps=3, num_training_steps=STEPS, scheduler_specific_kwargs=kwargs
        )
        wanted = []
        for _ in range(STEPS):
            wanted.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            reference.step()
        watch = Watch()
        make_trainer(wrap(LRSchedulerCallback(warmup_steps=3, **ours)), watch).train()
        assert watch.rates == pytest.approx(wanted), name
        assert [entry["learning_rate"] for entry in watch.logs if "loss" in entry] == pytest.approx(wanted), name


@pytest.mark.parametrize(("kind", "lines"), [("linear", 1), ("constant", 0)])
def test_the_trainers_own_schedule_is_overruled(
    make_trainer: Make, wrap: Any, kind: str, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    watch = Watch()
    make_trainer(wrap(LRSchedulerCallback("cosine", warmup_ratio=0.25)), watch, lr_scheduler_type=kind).train()
    assert watch.rates[:3] == pytest.approx([0.0, 0.005, 0.01])
    assert len(said(caplog, "lr_schedule")) == lines


def test_plateau_survives_a_resume(make_trainer: Make, wrap: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-12}

    def train(**more: Any) -> list[float]:
        watch, path = Watch(), more.pop("resume", None)
        # Nothing is better by 1 %: reduced at every third evaluation after the first.
        ours = LRSchedulerCallback("plateau", factor=0.5, patience=2, min_delta=0.01)
        make_trainer(wrap(ours), watch, **options, **more).train(resume_from_checkpoint=path)
        return watch.rates

    whole = train(save_strategy="steps", save_steps=5)
    assert whole == pytest.approx([1e-12] * 4 + [0.5e-12] * 3 + [0.25e-12], rel=1e-9, abs=0)
    assert train(resume=str(tmp_path / "out/checkpoint-5")) == pytest.approx(whole[5:], rel=1e-9, abs=0)


def test_memory(make_trainer: Make, wrap: Any) -> None:
    callback = MemoryCallback(1, warmup_steps=2)
    make_trainer(wrap(callback)).train()
    assert callback.last["host"] > 1 << 20
    assert callback.leaks == 0


@pytest.mark.parametrize(("step", "proof"), [(3, "equal"), (4, "none: the epoch ended with the checkpoint")])
def test_what_a_monitor_has_saved_is_exact(make_trainer: Make, tmp_path: Path, step: int, proof: str) -> None:
    """Asked for in `on_log`, within an epoch and at its end: one save, with all that a resume needs, and the monitor's state."""

    class Spike(LossMonitorCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            there = "loss" in logs and state.global_step == step
            super().on_log(args, state, control, logs={**logs, "loss": math.nan} if there else logs, **kwargs)

    def train(*, resume: bool) -> tuple[SaveModelCallback, Spike, Watch]:
        manager = CheckpointManager(tmp_path / "store/run", local_dir=tmp_path / "disk", transfer="thread")
        save, monitor, watch = SaveModelCallback(manager), Spike(1, window=STEPS, on_nonfinite="save"), Watch()
        trainer = make_trainer(CallbackManager([save, monitor, watch]))
        trainer.train(resume_from_checkpoint=manager.resume_path(f"{step}") if resume else None)
        assert save.failures == 0
        return save, monitor, watch

    _, whole, _ = train(resume=False)
    again, monitor, _ = train(resume=True)
    assert again.proof == proof
    assert monitor.mean == whole.mean
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.startswith("checkpoint")]


def test_logs_are_records(make_trainer: Make, wrap: Any, tmp_path: Path) -> None:
    """What the Trainer logs, once; the learning rate and the norm that its optimizer stepped with."""
    watch, callback = Watch(), LogCallback(tmp_path / "logs", log_interval=2, histogram_interval=4)
    trainer = make_trainer(wrap(callback), wrap(watch), eval_strategy="steps", eval_steps=4, lr_scheduler_type="linear")
    trainer.train()
    found = [json.loads(line) for line in (tmp_path / "logs" / "log.jsonl").read_text().splitlines()]
    steps = [record for record in found if record["kind"] == "step"]
    assert [record["step"] for record in steps] == [2, 4, 6, 8]
    assert [record["learning_rate"] for record in steps] == watch.rates[1::2]
    assert [record["grad_norm"] for record in steps] == pytest.approx(watch.norms[1::2], rel=1e-5)
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    counted = [sum(record["grad_log10"]["counts"]) for record in steps if "grad_log10" in record]
    assert len(counted) == 2
    assert all(0 < count <= parameters for count in counted)
    logs = [record for record in found if record["kind"] == "log"]
    assert [record["loss"] for record in logs if "loss" in record] == [e["loss"] for e in watch.logs if "loss" in e]
    assert [record["step"] for record in logs if "eval_loss" in record] == [4, 8]
    assert callback.failures == callback.lost == 0


def test_the_profiler_finds_all_phases(make_trainer: Make, wrap: Any, tmp_path: Path) -> None:
    """Its hooks are gone afterwards, and weights are those of a training without it."""
    import torch

    profiler = PerformanceProfilerCallback(
        log_interval=4, sample_interval=2, trace_dir=tmp_path / "traces", trace_step=2
    )
    options: dict[str, Any] = {
        "eval_strategy": "steps",
        "eval_steps": 4,
        "save_strategy": "steps",
        "save_steps": 4,
        "include_num_input_tokens_seen": "all",
    }
    trainer = make_trainer(wrap(profiler), **options)
    trainer.train()
    total = profiler.total
    assert total is not None
    assert (total.first_step, total.last_step, total.steps) == (2, 8, 7)
    assert {"data", "forward", "backward", "optimizer", "evaluation", "save"} <= total.seconds.keys()
    assert all(seconds > 0 for seconds in total.seconds.values())
    assert (total.samples, total.tokens) == (7 * 4, 7 * 4 * 8)
    assert not trainer.model._forward_hooks
    assert not trainer.model._forward_pre_hooks
    assert len(list((tmp_path / "traces").iterdir())) == 1
    plain = make_trainer(**options)
    plain.train()
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), plain.model.parameters(), strict=True))


def test_the_end_is_posted_and_so_is_a_failure(make_trainer: Make, wrap: Any) -> None:
    """The Trainer says nothing of an exception: the end of the process does."""
    posted: list[dict[str, Any]] = []

    def post(url: str, body: bytes, headers: Any, timeout_s: float) -> bytes:
        posted.append(json.loads(body))
        return b""

    def callback() -> NotifyCallback:
        return NotifyCallback("https://hooks.example.com/x", post=post)

    make_trainer(wrap(callback())).train()
    assert [(each["event"], each["step"]) for each in posted] == [("end", STEPS)]
    assert "loss" in posted[0]["metrics"]
    failing = callback()
    trainer = make_trainer(wrap(failing))
    trainer.add_callback(_Fails)
    with pytest.raises(RuntimeError, match="no more"):
        trainer.train()
    assert len(posted) == 1
    failing._process_ends()  # as atexit would
    assert [(each["event"], each["step"]) for each in posted[1:]] == [("failure", 3)]


class _Fails(Callback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise RuntimeError("no more")
