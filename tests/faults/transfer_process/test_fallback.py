"""Where there can be no transfer process, uploads run in the trainer, and that is said once."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.transfer.messages import Committed
from ckptmgr.transfer.status import TransferFile
from ckptmgr.transfer.uploader import Uploader

Scene = Any
DEADLINE_S = 60.0


def in_the_thread(scene: Scene, uploader: Uploader, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Assert that uploads run in this process, and that it is said once, with the reason."""
    (first,) = scene.save(100)
    uploader.notify()
    scene.wait_for(Committed, lambda event: event.stem == first)
    assert uploader.status().host == "thread"
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert (view.alive, view.host, view.pid) == (True, "thread", os.getpid())
    (second,) = scene.save(200)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == sorted([str(first), str(second)])
    said = [record.getMessage() for record in caplog.records if "not in a process of their own" in record.getMessage()]
    assert len(said) == 1, said
    assert why in said[0]


def test_a_lambda_keeps_uploads_in_the_trainer(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    in_the_thread(scene, scene.uploader(wrap_backend=lambda backend: backend), caplog, "lambda")


def test_a_module_that_fails_in_the_process_keeps_uploads_in_the_trainer(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is made at run time, and lies on no disk."""

    def wrap(backend: Backend) -> Backend:
        return backend

    module = types.ModuleType("made_at_run_time")
    wrap.__module__, wrap.__qualname__ = module.__name__, "wrap"
    module.wrap = wrap  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    in_the_thread(scene, scene.uploader(wrap_backend=wrap), caplog, "No module named 'made_at_run_time'")


def test_a_class_of_the_main_module_keeps_uploads_in_the_trainer(scene: Scene) -> None:
    """It must not be imported elsewhere: that would run the user's program again."""
    (stem,) = scene.save(100)
    trainer = scene.trainer(own_rule=True)
    trainer("notify")
    assert trainer("close", timeout_s=60)["left"] == []
    assert scene.manifests() == [str(stem)]
    assert trainer.kill().count("not in a process of their own: it uses something of the program's main module") == 1


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("executable", "", "embeds Python"),
        ("executable", None, "embeds Python"),
        ("executable", "/nowhere/python", "cannot be started"),
        ("executable", "/bin/false", "does not start (exit code 1; see transfer.log in the local tier)"),
        ("frozen", True, "frozen"),
    ],
)
def test_a_program_without_an_interpreter_uploads_by_itself(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    in_the_thread(scene, scene.uploader(), caplog, why)


def test_an_interpreter_that_never_answers_is_given_up(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that embeds Python, and takes our command line for a call of its own."""
    other = tmp_path / "some-program"
    other.write_text("#!/bin/sh\nexec sleep 600\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    monkeypatch.setattr("ckptmgr.transfer.supervisor._READY_S", 0.5)
    in_the_thread(scene, scene.uploader(), caplog, "did not answer for 0.5 s")
