"""The main job: train, be killed with SIGKILL in the middle of an upload, resume on another machine, be equal to the last bit."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.stores import Store
from ckptmgr.transfer.status import TransferFile

Cli = Callable[..., subprocess.CompletedProcess[str]]

STEPS, SAVE_EVERY = 6, 2
DEADLINE_S = 90.0


def training(report: Path, *options: object) -> list[str]:
    """The command line of the training script."""
    fixed = ["--report", report, "--steps", STEPS, "--save-every", SAVE_EVERY]
    return [sys.executable, "-m", "ckptmgr.demo.train", *map(str, [*fixed, *options])]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of a run that nothing happened to, and that saved nothing."""
    report = tmp_path_factory.mktemp("uninterrupted") / "report.json"
    subprocess.run(training(report), check=True, timeout=DEADLINE_S)
    found: dict[str, Any] = json.loads(report.read_text())
    assert found["steps_run"] == STEPS
    assert len(found["losses"]) == STEPS + STEPS // SAVE_EVERY
    return found


def half_uploaded(store: Store) -> str | None:
    """A save with some files in the store that lacks at least two more and its manifest, once another one is committed; its id."""
    files = Counter(key.split("/")[2] for key in store.keys("run/checkpoints/"))
    committed = {key.split("/")[2].removesuffix(".json") for key in store.keys("run/manifests/")}
    whole = max((files[stem] for stem in committed), default=0)
    return next((stem for stem, count in files.items() if stem not in committed and count <= whole - 2), None)


def everybody(process: subprocess.Popen[bytes], machine: Path, number: signal.Signals) -> None:
    """Send a signal to the training, and to its transfer process, which is in a session of its own."""
    transfer = TransferFile(machine).read()
    for pid in (process.pid, None if transfer is None else transfer.pid):
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, number)


def kill_in_the_middle_of_an_upload(store: Store, command: list[str], machine: Path) -> str:
    """Train, and kill all of it, as when a machine is lost; returns the save whose upload that cut off."""
    process = subprocess.Popen(command, start_new_session=True)
    pause, deadline = threading.Event(), time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if half_uploaded(store) is not None:
                # Stopped, it cannot finish the upload between this look and the kill.
                everybody(process, machine, signal.SIGSTOP)
                stem = half_uploaded(store)
                if stem is not None:
                    return stem
                everybody(process, machine, signal.SIGCONT)
            pause.wait(0.02)
        raise AssertionError(f"no upload was seen half done; the training ended with {process.poll()}")
    finally:
        everybody(process, machine, signal.SIGKILL)
        process.wait(DEADLINE_S)
        while (transfer := TransferFile(machine).read()) is not None and transfer.alive:
            assert time.monotonic() < deadline + DEADLINE_S
            pause.wait(0.02)


@pytest.mark.parametrize(
    "store",
    ["s3", pytest.param("local", marks=pytest.mark.slow), pytest.param("oss", marks=pytest.mark.slow)],
    indirect=True,
)
def test_train_be_killed_resume_and_be_equal(
    store: Store, cli: Cli, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    """Losses and weights of the killed and resumed run are those of the uninterrupted one, to the last bit."""
    url, machine = f"{store.url}/run", tmp_path / "machine-1"
    command = training(tmp_path / "killed.json", "--run", url, "--local-dir", machine, "--slow", 0.1)
    stem = kill_in_the_middle_of_an_upload(store, command, machine)
    assert f"run/manifests/{stem}.json" not in store.keys("run/manifests/")
    committed = store.keys("run/manifests/")
    assert committed
    assert not (tmp_path / "killed.json").exists()
    shutil.rmtree(machine)

    script = training(tmp_path / "resumed.json", "--run", url, "--local-dir", tmp_path / "machine-2", "--resume", "{}")
    resumed = cli("resume", url, "--to", tmp_path / "checkpoint", "--", *script, timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout == ""
    report = json.loads((tmp_path / "resumed.json").read_text())
    assert 0 < report["steps_run"] < STEPS
    assert report["losses"] == uninterrupted["losses"]
    assert report["weights"] == uninterrupted["weights"]

    listed = cli("ls", url, "--check", "--json")
    assert listed.returncode == 0, listed.stderr
    rows = json.loads(listed.stdout)["checkpoints"]
    assert [row["id"] for row in rows if row["state"] == "uncommitted"] == [stem]
    assert {row["state"] for row in rows} == {"committed", "uncommitted"}
    # Nothing that was committed before the kill is gone or changed its place; the rest is the second attempt's, to the end.
    assert {f"run/manifests/{row['id']}.json" for row in rows if row["attempt"] == 1} - {
        f"run/manifests/{stem}.json"
    } == set(committed)
    first = STEPS - report["steps_run"]
    assert [row["step"] for row in rows if row["attempt"] == 2] == list(
        range(first + SAVE_EVERY, STEPS + 1, SAVE_EVERY)
    )


def test_a_restart_on_the_same_machine_goes_on_from_the_local_copy(
    make_store: Callable[[str], Store], cli: Cli, tmp_path: Path, uninterrupted: dict[str, Any]
) -> None:
    """The disk survived the kill: what was saved is resumed from it and its upload is finished, whatever the store had got."""
    store = make_store("oss")
    url, machine = f"{store.url}/run", tmp_path / "machine"
    command = training(tmp_path / "killed.json", "--run", url, "--local-dir", machine, "--slow", 0.1)
    stem = kill_in_the_middle_of_an_upload(store, command, machine)
    there = store.keys(f"run/checkpoints/{stem}/")
    store.server.log.clear()

    script = training(tmp_path / "resumed.json", "--run", url, "--local-dir", machine, "--resume", "{}")
    resumed = cli(
        "resume", url, "--local-dir", machine, "--to", tmp_path / "checkpoint", "--", *script, timeout_s=DEADLINE_S
    )
    assert resumed.returncode == 0, resumed.stderr
    report = json.loads((tmp_path / "resumed.json").read_text())
    assert report["losses"] == uninterrupted["losses"]
    assert report["weights"] == uninterrupted["weights"]
    assert f"run/manifests/{stem}.json" in store.keys("run/manifests/")
    sent = [request.key.removeprefix("exp/") for request in store.server.log if request.method == "PUT"]
    assert not set(there) & set(sent)
    listed = cli("ls", url, "--check", "--json")
    assert {row["state"] for row in json.loads(listed.stdout)["checkpoints"]} == {"committed"}
