"""What kind of process the transfer process is."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.transfer.messages import Committed

Scene = Any
DEADLINE_S = 60.0


def test_what_kind_of_process_it_is(scene: Scene, tmp_path: Path) -> None:
    """No PyTorch in it; low priority, a session of its own, none of the trainer's files, and an environment that is just the trainer's."""
    held = scene.hold()
    scene.save(100)
    # A file in the working directory is not imported in the place of a module of ours.
    (tmp_path / "elsewhere").mkdir()
    for name in ("msgspec", "queue", "tenacity"):
        (tmp_path / "elsewhere" / f"{name}.py").write_text("raise RuntimeError('imported')")
    trainer = scene.trainer(cwd=tmp_path / "elsewhere")
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    assert trainer("status")["host"] == "process"
    pid = scene.host()
    proc = Path(f"/proc/{pid}")
    loaded = proc.joinpath("maps").read_text()
    assert "/torch/" not in loaded
    assert "/numpy/" not in loaded
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(pid) == pid
    log = str(scene.tier.root / "transfer.log")
    assert [os.readlink(proc / f"fd/{fd}") for fd in (0, 1, 2)] == [os.devnull, log, log]
    theirs = {os.readlink(path) for path in Path(f"/proc/{trainer.process.pid}/fd").iterdir()}
    ours = {os.readlink(path) for path in (proc / "fd").iterdir()}
    assert not {name for name in theirs & ours if name.startswith(("pipe:", "socket:"))}
    environment = proc.joinpath("environ").read_bytes().split(b"\0")
    assert environment == Path(f"/proc/{trainer.process.pid}/environ").read_bytes().split(b"\0")
    assert os.readlink(proc / "cwd") == str(tmp_path / "elsewhere")
    held.release()
    assert trainer("close", timeout_s=60)["left"] == []


@pytest.mark.parametrize("place", ["the working directory", "an archive"])
def test_what_the_trainer_can_import_the_process_can(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A backend of the user's, from wherever the trainer has it: `''` in the search path, a zip file; what is not there does not matter."""
    code = "from ckptmgr.testing.faulty import FaultyBackend\n\ndef wrap(backend):\n    return FaultyBackend(backend)\n"
    name = f"users_backend_{place.split()[1]}"
    folder = tmp_path / "modules"
    folder.mkdir()
    if place == "an archive":
        with zipfile.ZipFile(folder / "users.zip", "w") as archive:
            archive.writestr(f"{name}.py", code)
    else:
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    first = "" if place == "the working directory" else str(folder / "users.zip")
    monkeypatch.setattr(sys, "path", [first, "/nowhere", Path("/no-text"), *sys.path])
    importlib.invalidate_caches()
    (stem,) = scene.save(100)
    uploader = scene.uploader(wrap_backend=importlib.import_module(name).wrap)
    uploader.notify()
    scene.wait_for(Committed)
    assert uploader.status().host == "process"
    assert uploader.close(DEADLINE_S) == []
    assert scene.manifests() == [str(stem)]


@pytest.mark.parametrize("children", ["are ignored", "are reaped by somebody else"])
def test_a_program_that_sees_to_children_itself(scene: Scene, children: str) -> None:
    """Its exit status is lost to us; it is not taken for a death, or a death for an end."""
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("mind_children", ignore=children == "are ignored")
    held = scene.hold(times=1)
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    os.kill(scene.host(), signal.SIGKILL)
    held.release()
    assert trainer("close", timeout_s=60)["left"] == []
    assert scene.manifests() == [str(stem)]
    assert trainer.kill().count(" died (") == 1


def test_a_forked_child_has_no_part_in_it(scene: Scene) -> None:
    """Forked while other threads hold every lock: nothing waits, nothing is sent, no line stays open, and nothing is uploaded twice."""
    held = scene.hold()
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    said = trainer("fork_while_locked")["child"]
    assert said == {"left": [str(stem)], "host": "", "threads": [], "sockets": 0}
    held.release()
    assert trainer("close", timeout_s=60)["left"] == []
    assert scene.were_sent_once([stem])


def test_the_log_level_of_the_trainer_holds(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """What the process logs comes out of the trainer's loggers."""
    with caplog.at_level(logging.INFO, logger="ckptmgr"):
        (stem,) = scene.save(100)
        uploader = scene.uploader()
        uploader.notify()
        assert uploader.close(DEADLINE_S) == []
    names = {record.name for record in caplog.records if f"committed as {stem}" in record.getMessage()}
    assert names == {"ckptmgr.transfer.upload"}
