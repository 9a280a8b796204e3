"""Callbacks of ckptmgr in Lightning's Trainer: each event once, in its order, with its arguments; and what they decide is done."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.callbacks.base import EVENTS, Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import EveryNSteps
from ckptmgr.testing.events import EventRecorder, agree
from ckptmgr.training.manager import CheckpointManager

Fit = Callable[..., Any]
# What Lightning does is not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::FutureWarning", "ignore::UserWarning")


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """In place of that for the tests of the other hosts."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed; CI runs these tests in an environment of their own")


class Records(Callback):
    """Notes each event with the step, and which arguments came."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.got: dict[str, dict[str, Any]] = {}
        self.epochs: list[float] = []

    def note(self, event: str, **arguments: Any) -> None:
        state = arguments["state"]
        self.events.append(f"{event.removeprefix('on_')} {state.global_step}")
        self.got[event] = {name: value for name, value in arguments.items() if value is not None}
        if event == "on_epoch_end":
            self.epochs.append(state.epoch)


def _noting(event: str) -> Any:
    def hook(self: Records, **arguments: Any) -> None:
        self.note(event, **arguments)

    return hook


for _event in EVENTS:
    setattr(Records, _event, _noting(_event))


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fit:
    """Trains a small module: 4 batches an epoch, 2 of them a step, evaluated at the end of each epoch."""
    import lightning  # type: ignore[import-not-found, unused-ignore]

    from ckptmgr.callbacks.lightning_events import LightningCallbacks

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.net(batch).square().mean())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)

    def run(*callbacks: Any, others: Any = (), ckpt_path: Any = None, **options: Any) -> Any:
        lightning.seed_everything(1, verbose=False)
        rows = torch.linspace(-1, 1, 16).reshape(8, 2)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=2)  # type: ignore[arg-type]
        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=bool(others),
            default_root_dir=tmp_path,
            accumulate_grad_batches=2,
            log_every_n_steps=2,
            callbacks=[*([LightningCallbacks(callbacks)] if callbacks else []), *others],
            **{"max_epochs": 2, **options},
        )
        trainer.fit(Module(), loader, loader, ckpt_path=ckpt_path)
        return trainer

    return run


STEP = "step_begin {0}", "substep_end {0}", "pre_optimizer_step {0}", "optimizer_step {1}", "step_end {1}"


def steps(first: int, last: int) -> list[str]:
    """What comes in the steps from `first` to `last`."""
    found = []
    for step in range(first, last + 1):
        found += [line.format(step - 1, step) for line in STEP]
        found += [f"log {step}"] if step % 2 == 0 else []
    return found


def evaluation(step: int) -> list[str]:
    return [f"evaluate_begin {step}", *[f"prediction_step {step}"] * 4, f"evaluate {step}"]


def test_the_order_of_events(fit: Fit) -> None:
    """The sanity check is no evaluation; a step is one of the optimizer; an epoch is whole in its last hook."""
    records = Records()
    fit(records)
    expected = ["init_end 0", "train_begin 0"]
    for epoch in range(2):
        first = 2 * epoch
        expected += [
            f"epoch_begin {first}",
            *steps(first + 1, first + 2),
            *evaluation(first + 2),
            f"epoch_end {first + 2}",
        ]
    assert records.events == [*expected, "train_end 4"]
    assert records.epochs == [1.0, 2.0]


def test_what_events_bring(fit: Fit) -> None:
    """Model, optimizer and loaders always; batch, outputs, metrics and logs where they belong."""
    records = Records()
    trainer = fit(records)
    always = {"args", "state", "control", "model", "optimizer", "train_dataloader", "eval_dataloader"}
    assert always <= records.got["on_step_end"].keys()
    assert records.got["on_step_end"]["model"] is trainer.lightning_module
    assert float(records.got["on_step_end"]["outputs"]["loss"]) > 0
    assert records.got["on_step_end"]["batch"].shape == (2, 2)
    assert records.got["on_substep_end"]["batch"].shape == (2, 2)
    assert records.got["on_evaluate"]["metrics"].keys() == {"loss", "val_loss"}
    assert records.got["on_log"]["logs"].keys() == {"loss", "epoch"}
    assert [entry["step"] for entry in records.got["on_train_end"]["state"].log_history] == [2, 4]


class StopAt(Callback):
    """Ends the training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


def test_a_callback_ends_the_training(fit: Fit) -> None:
    """After the step under way, with the evaluation that Lightning makes then."""
    records = Records()
    trainer = fit(StopAt(3), records, max_epochs=9)
    assert trainer.global_step == 3
    assert records.events[-1] == "train_end 3"


def test_the_end_comes_once_after_an_exception(fit: Fit) -> None:
    """`on_exception`, then `on_train_end`."""

    class Fails(Callback):
        critical = True

        def on_step_end(self, state: TrainerState, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise RuntimeError("bad node")

    records = Records()
    records.priority = 1
    with pytest.raises(RuntimeError, match="bad node"):
        fit(records, Fails())
    assert records.events[-3:] == ["step_end 2", "exception 2", "train_end 2"]


def test_what_lightning_decides_itself_is_said_once(fit: Fit, caplog: pytest.LogCaptureFixture) -> None:
    """Flags without an effect must not be set in silence."""

    class Asks(Callback):
        def on_step_end(self, control: TrainerControl, **kwargs: Any) -> None:
            control.should_evaluate = control.should_save = True

    fit(Asks())
    said = [record.getMessage() for record in caplog.records if "has no effect" in record.getMessage()]
    assert said == [
        "a callback set should_save, which has no effect: there is no LightningCallback that could",
        "a callback set should_evaluate, which has no effect: Lightning decides that by itself",
    ]


def test_a_callback_has_a_step_saved_and_its_state_comes_back(fit: Fit, tmp_path: Path) -> None:
    """By the LightningCallback beside it, for no reason of the policy's; a resumed run goes on with the callback's state."""
    from ckptmgr.callbacks.lightning import LightningCallback

    class Counts(Callback):
        def __init__(self) -> None:
            self.steps = 0

        def on_step_end(self, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
            self.steps += 1
            control.should_save = state.global_step == 3

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps}

        def load_state_dict(self, state: Any) -> None:
            self.steps = state["steps"]

    def manager() -> CheckpointManager:
        return CheckpointManager(str(tmp_path / "run"), local_dir=tmp_path / "local", transfer="thread")

    saving = LightningCallback(manager(), EveryNSteps(100), save_at_end=False, preemption=False)
    fit(Counts(), others=[saving])
    found = manager()
    assert [(each.step, each.reasons) for each in found.list()] == [(3, ("requested",))]
    path = found.resume_path()
    assert path is not None
    counts = Counts()
    fit(counts, ckpt_path=path)
    assert counts.steps == 4


def test_the_training_that_a_callback_ended_stays_ended(fit: Fit, tmp_path: Path) -> None:
    """Resumed, it runs no step, and the log says which callback it was."""
    from ckptmgr.callbacks.lightning import LightningCallback

    def saving() -> Any:
        manager = CheckpointManager(str(tmp_path / "run"), local_dir=tmp_path / "local", transfer="thread")
        return LightningCallback(manager, EveryNSteps(1), preemption=False)

    fit(StopAt(3), others=[saving()], max_epochs=9)
    again = saving()
    records = Records()
    trainer = fit(records, others=[again], ckpt_path=again.manager.resume_path(), max_epochs=9)
    assert trainer.global_step == 3
    assert not [event for event in records.events if event.startswith("step_end")]


@pytest.mark.parametrize("why", ["limit of time", "failure budget", "callback"])
def test_what_a_restart_gets_over_does_not_end_a_training_for_good(fit: Fit, tmp_path: Path, why: str) -> None:
    """Lightning's `max_time`, a budget of failures, and `stop_is_final = False`: resumed where that is over, training goes on."""
    from ckptmgr.callbacks.lightning import LightningCallback

    def saving() -> Any:
        manager = CheckpointManager(str(tmp_path / "run"), local_dir=tmp_path / "local", transfer="thread")
        return LightningCallback(manager, EveryNSteps(1), preemption=False)

    class TimeIsUp(Callback):
        """For Lightning's timer, which looks at the end of each batch."""

        def on_pre_optimizer_step(self, args: Any, state: TrainerState, **kwargs: Any) -> None:
            if state.global_step == 3:
                (timer,) = (each for each in args.callbacks if type(each).__name__ == "Timer")
                timer._duration = 0

    class StoreIsGone(Callback):
        """Before the end of step 4, the last of its epoch, which is saved when all is decided."""

        def on_pre_optimizer_step(self, state: TrainerState, **kwargs: Any) -> None:
            if state.global_step == 3:
                patch.setattr(CheckpointManager, "should_stop", "nothing becomes durable")

    stop = {"limit of time": TimeIsUp, "failure budget": StoreIsGone}.get(why, lambda: StopAt(4))()
    stop.stop_is_final = False
    options = {"max_time": {"days": 1}} if why == "limit of time" else {}
    with pytest.MonkeyPatch.context() as patch:
        assert fit(stop, others=[saving()], max_epochs=3, **options).global_step == 4
    again = saving()
    assert fit(others=[again], ckpt_path=again.manager.resume_path(), max_epochs=3).global_step == 6


def test_several_in_one_trainer(fit: Fit, tmp_path: Path) -> None:
    """A file's callbacks and one's own: each gets its own state back, which is not that of its namesake in the other."""
    from ckptmgr.callbacks.lightning import LightningCallback
    from ckptmgr.callbacks.lightning_events import LightningCallbacks

    class Counts(Callback):
        steps = 0

        def __init__(self, by: int) -> None:
            self.by = by

        def on_step_end(self, **kwargs: Any) -> None:
            self.steps += self.by

        def state_dict(self) -> dict[str, Any]:
            return {"steps": self.steps} if self.steps else {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            self.steps = state["steps"]

    def train(epochs: int) -> tuple[int, int]:
        manager = CheckpointManager(str(tmp_path / "run"), local_dir=tmp_path / "local", transfer="thread")
        saving = LightningCallback(manager, EveryNSteps(1), preemption=False)
        first, second = Counts(1), Counts(10)
        others = [LightningCallbacks([first]), LightningCallbacks([second]), saving]
        fit(others=others, ckpt_path=manager.resume_path(), max_epochs=epochs)
        return first.steps, second.steps

    assert train(1) == (2, 20)
    assert train(2) == (4, 40)


def test_the_epoch_is_whole_when_its_last_batch_is_over(fit: Fit) -> None:
    """As in other hosts: in what is logged at its last step, too."""
    records = Records()
    trainer = fit(records)
    assert [entry["epoch"] for entry in records.got["on_train_end"]["state"].log_history] == [1.0, 2.0]
    assert trainer.global_step == 4


def test_the_profiler_counts_saves_as_saves(fit: Fit, tmp_path: Path) -> None:
    """They fire no event; in `data`, more workers would be advised."""
    from ckptmgr.callbacks.lightning import LightningCallback
    from ckptmgr.callbacks.profiler import PerformanceProfilerCallback

    profiler = PerformanceProfilerCallback(2)
    manager = CheckpointManager(str(tmp_path / "run"), local_dir=tmp_path / "local", transfer="thread")
    saving = LightningCallback(manager, EveryNSteps(1), preemption=False)
    fit(profiler, others=[saving], max_epochs=3)
    assert profiler.total is not None
    assert profiler.total.seconds["save"] == pytest.approx(saving.saving_s)


def test_a_ready_manager_of_callbacks_may_be_given(fit: Fit) -> None:
    """As `from_config` makes one."""
    from ckptmgr.callbacks.lightning_events import LightningCallbacks

    manager = CallbackManager([Records()])
    assert LightningCallbacks(manager).callbacks is manager


def test_built_in_callbacks(fit: Fit) -> None:
    """Each as it is: what they set and see is that of optimizer steps; the Trainer's own clipping is replaced."""
    from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
    from ckptmgr.callbacks.gradient_clip import GradientClipCallback
    from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
    from ckptmgr.callbacks.lr_schedule import LRSchedulerCallback
    from ckptmgr.callbacks.memory import MemoryCallback

    norms, rates = [], []

    class Watch(Callback):
        def on_optimizer_step(self, model: Any, optimizer: Any, **kwargs: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])

        def on_pre_optimizer_step(self, model: Any, **kwargs: Any) -> None:
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    clip, monitor = GradientClipCallback(0.01, replace_host=True), LossMonitorCallback(1)
    stop = EarlyStoppingCallback("val_loss", 1, threshold=1e9)
    trainer = fit(
        LRSchedulerCallback("linear"), clip, Watch(), monitor, stop, MemoryCallback(1), gradient_clip_val=0.001
    )
    # Stopped by the first evaluation, after 2 of 4 steps.
    assert trainer.global_step == stop.stopped_step == 2
    assert rates == pytest.approx([0.1, 0.075])
    assert norms == pytest.approx([0.01] * 2, rel=1e-3)
    assert (clip.steps, clip.clipped, trainer.gradient_clip_val) == (2, 2, 0.001)
    assert monitor.mean is not None
    assert monitor.anomalies == type(monitor.anomalies)()


def test_the_page_of_events(fit: Fit) -> None:
    """docs/events.md: which events come, in which order, with what."""
    recorder = EventRecorder()
    fit(recorder, limit_val_batches=1)
    agree("Lightning", recorder.told(), Path(__file__).parents[2] / "docs" / "events.md")


def test_a_file_configures_it_and_saving(fit: Fit, tmp_path: Path) -> None:
    """The callbacks of `ckptmgr.yaml`, and checkpoints of Lightning by its policy."""
    from ckptmgr.callbacks.lightning_events import LightningCallbacks, lightning_callbacks

    path = tmp_path / "ckptmgr.yaml"
    path.write_text(
        f"run: {tmp_path}/run\nlocal_dir: {tmp_path}/local\nsave: {{every_n_steps: 3}}\n"
        "callbacks: [{type: EarlyStoppingCallback, params: {monitor: val_loss, threshold: 1e3}}]\n"
    )
    events, saving = lightning_callbacks(path)
    assert [type(each).__name__ for each in events.callbacks.callbacks] == ["EarlyStoppingCallback"]
    trainer = fit(others=[events, saving])
    assert trainer.global_step == 2
    assert [each.step for each in saving.manager.list()] == [2]
    with pytest.raises(ConfigError, match="SaveModelCallback saves nothing in Lightning's Trainer"):
        LightningCallbacks(CallbackManager.from_config(path))


def test_what_the_file_says_of_saving_holds_here(tmp_path: Path) -> None:
    """The arguments of its SaveModelCallback that mean something in Lightning."""
    from ckptmgr.callbacks.lightning_events import lightning_callbacks

    said = {"save_at_end": False, "close_timeout_s": 5.0, "preemption": False, "continue_stopped": True}
    for params in (said, {}):
        source = {"run": str(tmp_path / "run"), "callbacks": [{"type": "SaveModelCallback", "params": params}]}
        _, saving = lightning_callbacks(source)
        engine = saving._engine
        assert (engine.save_at_end, engine.close_timeout_s) == ((False, 5.0) if params else (True, None))
        assert (engine.preemption is None) is bool(params)
        assert saving._continuation.continue_stopped is bool(params)


@pytest.mark.parametrize("bare", [Records, CallbackManager])
def test_a_bare_callback_says_where_it_belongs(fit: Fit, bare: type) -> None:
    """Lightning asks its callbacks for what these do not have."""
    expected = f"{bare.__name__} is no callback of Lightning's: give its Trainer LightningCallbacks"
    with pytest.raises(TypeError, match=expected):
        fit(others=[bare()])
