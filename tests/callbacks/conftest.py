"""A manager and a preemption that keep what they are told, and a host like Hugging Face's Trainer, for callbacks that save."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.callbacks.base import Callback, Priority
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.conditions import Conditions
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.policies import SavePolicy


@dataclass
class Closed:
    """A close report."""

    pending: Sequence[str] = ()
    errors: Sequence[Exception] = ()

    @property
    def exit_code(self) -> int:
        return 6 if self.pending else 0


@dataclass
class Notice:
    source: str = "sigterm"
    deadline: float = 25.0


@dataclass
class FakePreemption:
    """A preemption on a clock of its own: set `notice` and `left_s`."""

    notice: Notice | None = None
    left_s: float = 20.0
    save_wanted: bool = True
    exit_code: int = 143
    calls: list[str] = field(default_factory=list)

    def install(self) -> None:
        self.calls.append("install")

    def uninstall(self) -> None:
        self.calls.append("uninstall")

    def agreed(self) -> Notice | None:
        return self.notice

    def remaining_s(self) -> float:
        return float("inf") if self.notice is None else self.left_s


@dataclass
class FakeManager:
    """A manager that keeps what it is given; a directory that it takes with the bytes that it has at that moment."""

    save_policy: SavePolicy | None = None
    preemption: FakePreemption | None = field(default_factory=FakePreemption)
    url: str = "s3://bucket/exp/run"
    local_dir: Path = Path("disk")
    is_restored: bool = False
    restored_manifest: Manifest | None = None
    refused_drift: frozenset[str] = frozenset()
    conditions: Conditions = field(default_factory=Conditions)
    strict: bool = False
    should_stop: str | None = None
    begin_error: Exception | None = None
    save_error: Exception | None = None
    closed: Closed = field(default_factory=Closed)
    background: list[Exception] = field(default_factory=list)
    began: list[Path | None] = field(default_factory=list)
    expected_bytes: int | None = None
    saves: list[dict[str, Any]] = field(default_factory=list)
    reserved: list[Mapping[str, Any]] = field(default_factory=list)
    hurried: list[float | None] = field(default_factory=list)
    close_calls: list[float | None] = field(default_factory=list)

    def begin(self, *, resume_from: Path | None = None, expected_bytes: int | None = None) -> None:
        self.began.append(resume_from)
        self.expected_bytes = expected_bytes
        if self.begin_error is not None:
            raise self.begin_error

    def describe(self, conditions: Conditions) -> None:
        self.conditions = conditions

    def save(self, step: int, state: Mapping[str, Any], **facts: Any) -> str | None:
        return self._keep({"step": step, "state": dict(state), **facts})

    def take(self, step: int, directory: Path, **facts: Any) -> str | None:
        files = {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        return self._keep({"step": step, "files": files, **facts})

    def _keep(self, saved: dict[str, Any]) -> str:
        if self.save_error is not None:
            raise self.save_error
        self.saves.append(saved)
        return f"000001-{saved['step']:012}"

    def reserve(self, state: Mapping[str, Any]) -> None:
        self.reserved.append(state)

    def hurry(self, deadline_s: float | None = None) -> None:
        self.hurried.append(deadline_s)

    def poll_errors(self) -> Sequence[Exception]:
        errors, self.background = self.background, []
        return errors

    def close(self, timeout_s: float | None = None, *, left_s: Callable[[], float] = lambda: float("inf")) -> Closed:
        """Notes what it would wait at most, as things are; None without a limit."""
        limit_s = min(float("inf") if timeout_s is None else timeout_s, left_s())
        self.close_calls.append(None if limit_s == float("inf") else limit_s)
        return self.closed


@dataclass
class HfState:
    global_step: int = 0
    epoch: float = 0.0
    max_steps: int = 0
    is_world_process_zero: bool = True
    best_metric: float | None = None
    stateful_callbacks: dict[str, Any] = field(default_factory=dict)


@dataclass
class HfControl:
    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False


class HfTrainer:
    """A training of `steps` steps with the flags, files and events of Hugging Face's Trainer, in their order."""

    def __init__(
        self,
        out: Path,
        callback: SaveModelCallback | None,
        *,
        steps: int = 6,
        steps_per_epoch: int = 3,
        others: tuple[Any, ...] = (),
        losses: Mapping[int, float] | None = None,
        **args: Any,
    ) -> None:
        self.args = SimpleNamespace(
            output_dir=str(out),
            save_strategy="no",
            save_steps=0,
            save_total_limit=None,
            eval_strategy="no",
            eval_steps=0,
        )
        self.args.__dict__.update(args)
        self.callbacks = [*([] if callback is None else [callback]), *others]
        self.steps_per_epoch = steps_per_epoch
        self.losses = losses or {}
        self.state, self.control = HfState(max_steps=steps), HfControl()
        self.written: list[int] = []

    def train(self, *, resume_from: Path | None = None) -> None:
        if resume_from is not None:
            self.state = HfState(**json.loads((resume_from / "trainer_state.json").read_bytes()))
        self._call("on_train_begin")
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            self._epoch()
        self._call("on_train_end")

    def _epoch(self) -> None:
        self.control.should_epoch_stop = False
        while not (self.control.should_training_stop or self.control.should_epoch_stop):
            self.control.should_save = self.control.should_evaluate = False
            self._call("on_step_begin")
            self.state.global_step += 1
            self.state.epoch = self.state.global_step / self.steps_per_epoch
            self._own_flags()
            self._call("on_step_end")
            self._evaluate_and_save()
            if self.state.global_step % self.steps_per_epoch == 0:
                break
        self.control.should_save |= self.args.save_strategy == "epoch"
        self.control.should_evaluate |= self.args.eval_strategy == "epoch"
        self._call("on_epoch_end")
        self._evaluate_and_save()

    def _own_flags(self) -> None:
        step = self.state.global_step
        last = step >= self.state.max_steps
        if self.args.save_strategy == "steps" and (last or step % self.args.save_steps == 0):
            self.control.should_save = True
        if self.args.eval_strategy == "steps" and (last or step % self.args.eval_steps == 0):
            self.control.should_evaluate = True
        if last:
            self.control.should_training_stop = True

    def _evaluate_and_save(self) -> None:
        if self.control.should_evaluate:
            metrics = {"eval_loss": self.losses.get(self.state.global_step, 1.0)}
            self.control.should_evaluate = False
            self._call("on_evaluate", metrics=metrics)
            better = self.state.best_metric is None or metrics["eval_loss"] < self.state.best_metric
            if better:
                self.state.best_metric = metrics["eval_loss"]
            if self.args.save_strategy == "best":
                self.control.should_save = better
        if self.control.should_save:
            self.write()
            self.control.should_save = False
            self._call("on_save")

    def write(self) -> None:
        """In place, as torch.save and open(…, "w") do; then rotation."""
        step = self.state.global_step
        self.written.append(step)
        folder = Path(self.args.output_dir) / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        files = {"model.safetensors": f"weights {step}", "trainer_state.json": json.dumps(vars(self.state))}
        for name, text in files.items():
            with (folder / name).open("w") as file:
                file.write(text)
        there = sorted(Path(self.args.output_dir).glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
        for old in there[: -self.args.save_total_limit] if self.args.save_total_limit else ():
            shutil.rmtree(old)

    def _call(self, event: str, **arguments: Any) -> None:
        for callback in self.callbacks:
            hook = getattr(callback, event, None)
            if hook is not None:
                hook(self.args, self.state, self.control, model=None, optimizer=None, **arguments)


@pytest.fixture
def fake_manager() -> Callable[..., FakeManager]:
    """Makes managers; see `FakeManager` for what can be given."""
    return FakeManager


@pytest.fixture
def preemption() -> FakePreemption:
    return FakePreemption()


@pytest.fixture
def notice() -> Callable[..., Notice]:
    return Notice


@pytest.fixture
def closed() -> Callable[..., Closed]:
    return Closed


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)


@pytest.fixture
def hf_trainer() -> type[HfTrainer]:
    """Makes trainings; see `HfTrainer`."""
    return HfTrainer


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The output directory of a training."""
    return tmp_path / "out"


@dataclass
class Decided:
    """What a callback had a host do: the step that training ended at, None if it went on to the last one, and the steps that were saved."""

    stopped: int | None = None
    saves: list[int] = field(default_factory=list)


def replay(
    shape: str,
    callback: Any,
    *,
    losses: Sequence[float] = (),
    metrics: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
) -> Decided:
    """One loss, or one evaluation, per step, through a host of the given shape.

    Args:
        shape: "embedded": our Trainer. "huggingface": hooks called by position, the loss by logs only. "plain": through a manager's `call`.
        first: steps that were done before.
    """
    steps = max(len(losses), len(metrics))
    if shape == "embedded":
        return _in_trainer(callback, losses, metrics, first)
    decided, state, control = Decided(), HfState(max_steps=first + steps), HfControl()

    def call(event: str, *, by_logs: bool = False, **arguments: Any) -> None:
        if shape == "huggingface":
            hook = getattr(callback, event)
            hook(SimpleNamespace(output_dir="out"), state, control, model=None, optimizer=None, **arguments)
        elif not by_logs:
            CallbackManager([callback]).call(event, args=None, state=state, control=control, **arguments)

    state.global_step = first
    call("on_train_begin")
    for index in range(steps):
        call("on_step_begin")
        state.global_step += 1
        outputs: dict[str, Any] = {"outputs": {"loss": losses[index]}} if losses and shape == "plain" else {}
        call("on_step_end", **outputs)
        if losses:
            call("on_log", by_logs=True, logs={"loss": losses[index], "epoch": 0.5})
        if metrics:
            call("on_evaluate", metrics=metrics[index])
        if control.should_save:
            decided.saves.append(state.global_step)
            control.should_save = False
        if control.should_training_stop:
            decided.stopped = state.global_step
            break
    call("on_train_end")
    return decided


def _in_trainer(callback: Any, losses: Sequence[float], metrics: Sequence[Mapping[str, Any]], first: int) -> Decided:
    import torch

    from ckptmgr.trainer import Trainer, TrainingArguments

    decided, steps = Decided(), max(len(losses), len(metrics))

    class Watch(Callback):
        priority = Priority.LOG

        def on_save(self, state: Any, **kwargs: Any) -> None:
            decided.saves.append(state.global_step)

        def on_epoch_end(self, state: Any, control: Any, **kwargs: Any) -> None:
            # Each step is an epoch. The last one has not ended the training yet: it may be the callback that does.
            control.should_training_stop = control.should_training_stop or state.global_step == first + steps

    model = torch.nn.Linear(1, 1)
    trainer = Trainer(
        model,
        TrainingArguments(
            max_steps=first + steps + 1,
            logging_steps=1,
            eval_steps=1 if metrics else None,
        ),
        train_dataloader=[torch.zeros(1)],
        eval_dataloader=[torch.zeros(1)] if metrics else None,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=lambda model, batch: (
            sum(p.sum() * 0 for p in model.parameters())
            + (losses[trainer.state.global_step - first] if losses else 0.0)
        ),
        eval_fn=lambda model, loader: metrics[trainer.state.global_step - first - 1],
        callbacks=[callback, Watch()],
    )
    trainer.state.global_step = first
    result = trainer.train()
    decided.stopped = result.global_step if result.stopped != "Watch" else None
    assert trainer.callbacks.failures == {}
    return decided


@pytest.fixture(params=["embedded", "huggingface", "plain"])
def shape(request: pytest.FixtureRequest) -> str:
    """Each shape of a host; see `replay`."""
    return str(request.param)


@pytest.fixture(name="replay", scope="session")
def _replay() -> Callable[..., Decided]:
    """Plays losses or evaluations to a callback; see there."""
    return replay
