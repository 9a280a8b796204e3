"""The plugin for ms-swift, loaded by its path as ms-swift does it, beside a stand-in of that; `tests/hosts` runs the real one."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ckptmgr.callbacks import ms_swift
from ckptmgr.callbacks.builtin import BUILT_IN
from ckptmgr.callbacks.early_stopping import EarlyStoppingCallback
from ckptmgr.callbacks.loss_monitor import LossMonitorCallback
from ckptmgr.callbacks.manager import CallbackManager
from ckptmgr.callbacks.save_model import SaveModelCallback
from ckptmgr.core.policies import EveryNSteps

PLUGIN = Path(ms_swift.__file__)
ARGS = SimpleNamespace(output_dir="out", use_flash_ckpt=False)

Make = Callable[..., Any]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Make]:
    """Loads the plugin, and makes callbacks by name, before the trainer has anything."""
    known: dict[str, Any] = {"early_stop": None}
    callbacks: Any = ModuleType("swift.callbacks")
    callbacks.callbacks_map = known
    monkeypatch.setitem(sys.modules, "swift", ModuleType("swift"))
    monkeypatch.setitem(sys.modules, "swift.callbacks", callbacks)
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("_swift_external_0123", PLUGIN)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))

    def by_name(name: str, args: Any = ARGS, trainer: Any = None) -> Any:
        return known[name](args, trainer)

    by_name.known = known  # type: ignore[attr-defined]
    log = logging.getLogger("ckptmgr")
    handlers, level = log.handlers[:], log.level
    yield by_name
    log.handlers, log.propagate = handlers, True
    log.setLevel(level)


def test_importing_it_needs_no_ms_swift() -> None:
    code = "import sys, ckptmgr.callbacks.ms_swift; print('swift' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_it_prints_where_it_is() -> None:
    command = [sys.executable, "-m", "ckptmgr.callbacks.ms_swift"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert Path(done.stdout.removesuffix("\n")).samefile(PLUGIN)


def test_its_folder_hides_no_module() -> None:
    """ms-swift puts it first on sys.path, in workers of the loader too."""
    assert {path.name for path in PLUGIN.parent.glob("*") if path.name != "__pycache__"} == {
        "__init__.py",
        "__main__.py",
    }


def test_all_are_known(make: Any) -> None:
    assert make.known.keys() == {"early_stop", "ckptmgr", *BUILT_IN}
    assert isinstance(make("EarlyStoppingCallback"), EarlyStoppingCallback)


@pytest.mark.parametrize("named", [True, False])
def test_the_configuration(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    """Of the file that CKPTMGR_CONFIG names, or ckptmgr.yaml here."""
    file = tmp_path / ("other.yaml" if named else "ckptmgr.yaml")
    file.write_text(f"run: {tmp_path}/store/run\nsave: {{every_n_steps: 7}}\ncallbacks: [LossMonitorCallback]\n")
    if named:
        monkeypatch.setenv("CKPTMGR_CONFIG", str(file))
    made = make("ckptmgr")
    assert isinstance(made, CallbackManager)
    monitor, save = made.callbacks
    assert isinstance(save, SaveModelCallback)
    assert isinstance(monitor, LossMonitorCallback)
    assert made.manager.save_policy == EveryNSteps(7)


def test_a_run_is_enough(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTMGR_RUN", f"{tmp_path}/store/run")
    (save,) = make("ckptmgr").callbacks
    assert isinstance(save, SaveModelCallback)
    manager: Any = save.manager
    assert manager.url.endswith("/store/run")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "nothing says where to save"),
        ("run: ./runs/a\nsave: {every_n_step: 7}", "every_n_steps"),
        ("callbacks: [{type: LossMonitorCallback, params: {log_intervall: 5}}]", "log_interval"),
        ("callbacks: [SaveModelCallback]", "needs a run"),
    ],
)
def test_a_mistake_is_one_line(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, said: str
) -> None:
    """And ends the process with 2."""
    if text is not None:
        (tmp_path / "ckptmgr.yaml").write_text(text)
    with pytest.raises(SystemExit) as ended:
        make("ckptmgr")
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ckptmgr: error: ")
    assert said in line


def test_a_mistake_is_told_before_the_model_is_loaded(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the plugin is loaded, if the command line names it; and what was made then is what the trainer gets."""
    monkeypatch.setattr(sys, "argv", ["sft.py", "--callbacks", "ckptmgr"])
    (tmp_path / "ckptmgr.yaml").write_text("callbacks: [LossMonitor]")
    with pytest.raises(SystemExit) as ended:
        ms_swift.register()
    assert ended.value.code == 2
    assert "LossMonitorCallback" in capsys.readouterr().err
    (tmp_path / "ckptmgr.yaml").write_text("callbacks: [LossMonitorCallback]")
    ms_swift.register()
    (tmp_path / "ckptmgr.yaml").unlink()
    callbacks = sys.modules["swift.callbacks"].callbacks_map["ckptmgr"](ARGS, None)
    assert [type(callback) for callback in callbacks.callbacks] == [LossMonitorCallback]


def test_it_is_said_once(make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every rank."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        make("GradientClipCallback")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("second", ["ckptmgr", "SaveModelCallback"])
def test_the_configuration_is_named_once(
    make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], second: str
) -> None:
    """Else each of its callbacks would be there twice."""
    (tmp_path / "ckptmgr.yaml").write_text(f"run: {tmp_path}/store/run")
    trainer = SimpleNamespace()
    make("ckptmgr", trainer=trainer)
    with pytest.raises(SystemExit):
        make(second, trainer=trainer)
    assert "--callbacks names ckptmgr twice" in capsys.readouterr().err
    make(second, trainer=SimpleNamespace())


def test_saving_needs_a_run(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own name it would else do nothing."""
    (tmp_path / "ckptmgr.yaml").write_text("callbacks: [LossMonitorCallback]")
    with pytest.raises(SystemExit):
        make("SaveModelCallback")
    assert "SaveModelCallback needs a run to save to" in capsys.readouterr().err


def test_flash_checkpoints_are_refused(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their files may not be there, or not all, when ms-swift says that they are saved. Callbacks that only watch do as well with it."""
    args = SimpleNamespace(output_dir="out", use_flash_ckpt=True)
    (tmp_path / "ckptmgr.yaml").write_text("callbacks: [LossMonitorCallback]")
    assert len(make("ckptmgr", args).callbacks) == 1
    monkeypatch.setenv("CKPTMGR_RUN", f"{tmp_path}/store/run")
    with pytest.raises(SystemExit) as ended:
        make("ckptmgr", args)
    assert ended.value.code == 2
    assert "--use_flash_ckpt" in capsys.readouterr().err


def test_a_save_that_was_deleted_is_passed_over(
    fake_manager: Callable[..., Any], hf_trainer: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`on_save` without the directory: it is named, training goes on, and the next save is taken."""
    manager = fake_manager(save_policy=EveryNSteps(2))
    callback = SaveModelCallback(manager, save_at_end=False)
    trainer = hf_trainer(tmp_path / "out", callback)
    write = trainer.write

    def write_but_one() -> None:
        write()
        if trainer.state.global_step == 4:
            folder = tmp_path / "out/checkpoint-4"
            for file in folder.iterdir():
                file.unlink()
            folder.rmdir()

    trainer.write = write_but_one
    trainer.train()
    assert [save["step"] for save in manager.saves] == [2, 6]
    assert callback.failures == 1
    assert "the Trainer has saved step 4, but" in caplog.text
    assert "Traceback" not in caplog.text


def test_the_watched_parts_stay_in_the_loader(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ms-swift makes another loader to skip batches: it passes over those of the first one, which is watched since `on_train_begin`."""

    class Loader:
        def __init__(self, skip_batches: int = 0) -> None:
            own = object()
            self.batch_sampler: Any = SimpleNamespace(batch_sampler=own, skip=skip_batches) if skip_batches else own
            self.collate_fn = object()

    monkeypatch.setenv("CKPTMGR_RUN", f"{tmp_path}/store/run")
    trainer = SimpleNamespace(get_train_dataloader=Loader)
    assert isinstance(make("ckptmgr", ARGS, trainer), CallbackManager)
    first = trainer.get_train_dataloader()
    first.batch_sampler, first.collate_fn = object(), object()  # watched
    second = trainer.get_train_dataloader(skip_batches=3)
    assert second.batch_sampler.batch_sampler is first.batch_sampler
    assert second.collate_fn is first.collate_fn
    assert second.batch_sampler.skip == 3


def test_what_callbacks_say_is_shown(
    make: Make, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also what is no warning; ms-swift sets up its own logger only. A program that has set logging up is left alone."""
    log = logging.getLogger("ckptmgr")
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.NullHandler()])
    make("LossMonitorCallback")
    assert log.handlers == []
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    make("LossMonitorCallback")
    make("LossMonitorCallback")
    assert len(log.handlers) == 1
    logging.getLogger("ckptmgr.callbacks.x").info("at step 3")
    # The command line gives levels other names, in this process too.
    assert capsys.readouterr().err == f"[{logging.getLevelName(logging.INFO)}:ckptmgr.callbacks.x] at step 3\n"
