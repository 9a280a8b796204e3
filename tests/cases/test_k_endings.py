"""Cases of how a program ends: by itself with uploads to do, and by Ctrl-C in the middle of one. Each is a real process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import ActiveFault, Fault
from ckptmgr.testing.stores import Store
from ckptmgr.testing.waits import Stopwatch

Cli = Callable[..., subprocess.CompletedProcess[str]]

DEADLINE_S = 120.0
INTERRUPTED = (-signal.SIGINT, 130)  # what Python does about it, and what a shell makes of that
# More than one part, so that the pools of a large upload are in use.
WEIGHTS = 9 << 20

PRELUDE = f"""
import logging, sys, threading
import torch
from ckptmgr import CheckpointManager
from ckptmgr.core.policies import StepEnded
from ckptmgr.training.preemption import Preemption

logging.basicConfig(level=logging.INFO, format="%(message)s")
url, disk, host, ending, limit_s = sys.argv[1:6]
never = threading.Event()
options = dict(local_dir=disk, transfer=host, close_timeout_s=float(limit_s), linger_s=0)

def state(number):
    return {{"model": {{"w": torch.full(({WEIGHTS},), float(number))}}}}
"""

ENDS = (
    PRELUDE
    + """
manager = CheckpointManager(url, strict=True, **options)
for step in (1, 2, 3):
    manager.save(step, state(step))
print("the end", flush=True)
if ending == "raise":
    raise RuntimeError("the training has failed")
if ending == "exit":
    sys.exit(0)
"""
)

TRAINS = (
    PRELUDE
    + """
preemption = Preemption(grace_s=60) if ending == "preempted" else None
with CheckpointManager(url, preemption=preemption, **options) as manager:
    manager.save(1, state(1), wait=True)
    while manager.status().uploads.pending:
        never.wait(0.02)
    manager.save(2, state(2), wait=True)
    print("training", flush=True)
    for step in range(3, 10**9):
        reasons = manager.should_save(StepEnded(step=step))
        if reasons:
            manager.save(step, state(step), reasons=reasons)
        if manager.should_stop:
            break
        never.wait(0.02)
"""
)


@dataclass
class Program:
    """One of the programs above, running; what it says on standard error is read line by line."""

    process: subprocess.Popen[str]
    mark: str
    errors: str = ""

    def wait_for(self, words: str) -> None:
        """Read on until a line has `words`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line
            if words in line:
                return
        raise AssertionError(f"it never said {words!r}:\n{self.errors}")

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit status; in time, as far as this machine had time for it."""
        watch = Stopwatch()
        while True:
            try:
                self.errors += self.process.communicate(timeout=0.05)[1]
            except subprocess.TimeoutExpired:
                if watch.seconds < timeout_s:
                    continue
                self.process.send_signal(signal.SIGABRT)
                self.errors += self.process.communicate()[1]
                raise AssertionError(f"it still ran after {timeout_s:g} s:\n{self.errors}") from None
            return self.process.returncode

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def processes(self) -> list[int]:
        """It, and all that it has started."""
        found = []
        for pid in filter(str.isdecimal, os.listdir("/proc")):
            try:
                if self.mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                    found.append(int(pid))
            except OSError:
                continue
        return found


@pytest.fixture
def store(make_store: Callable[[str], Store]) -> Store:
    """S3 whose requests can be held back."""
    return make_store("moto")


@pytest.fixture
def start(store: Store, tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a program on the run `run` of the store; what is left of it at the end is killed."""
    started: list[Program] = []

    def run(script: str, *, host: str, ending: str, limit_s: float = 60.0) -> Program:
        mark = f"ENDING_TEST={uuid.uuid4().hex}"
        arguments = [f"{store.url}/run", str(tmp_path / "disk"), host, ending, str(limit_s)]
        name, _, value = mark.partition("=")
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", script, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, name: value},
        )
        started.append(Program(process, mark))
        return started[-1]

    yield run
    for program in started:
        for pid in program.processes():
            os.kill(pid, signal.SIGKILL)
        program.process.communicate()


def committed(store: Store) -> list[int]:
    """The steps that have a manifest in the store."""
    return [int(key.split("-")[1]) for key in store.keys("run/manifests/")]


def pending(tmp_path: Path) -> list[int]:
    """The steps that wait in the local tier, newest first."""
    return [manifest.step for manifest, _ in LocalTier.open(tmp_path / "disk").pending()]


HOSTS = pytest.mark.parametrize("host", ["process", pytest.param("thread", marks=pytest.mark.slow)])
NO_THREADS_AT_END = pytest.mark.skipif(
    (3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no thread at its end"
)


# --- K053 -----------------------------------------------------------------------------------------------------------------


@NO_THREADS_AT_END
@pytest.mark.parametrize(
    ("ending", "code", "host"),
    [
        ("raise", 1, "process"),
        ("exit", 0, "thread"),
        *(
            pytest.param(ending, code, host, marks=pytest.mark.slow)
            for ending, code, host in (
                ("return", 0, "process"),
                ("return", 0, "thread"),
                ("raise", 1, "thread"),
                ("exit", 0, "process"),
            )
        ),
    ],
)
def test_k053_a_program_that_ends_by_itself_has_all_its_saves_committed(
    store: Store, start: Callable[..., Program], tmp_path: Path, host: str, ending: str, code: int
) -> None:
    """100 MiB are in the queue of a slow store when the main function returns, raises, or calls sys.exit(0) (a, b, c)."""
    slow = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", latency_s=0.5, times=None))
    program = start(ENDS, host=host, ending=ending)
    assert program.wait() == code
    assert slow.hits >= 3 * 2
    assert committed(store) == [1, 2, 3]
    assert pending(tmp_path) == []
    assert "cannot schedule new futures" not in program.errors
    assert ("RuntimeError: the training has failed" in program.errors) == (ending == "raise")


@NO_THREADS_AT_END
@pytest.mark.parametrize("ending", ["return", pytest.param("raise", marks=pytest.mark.slow)])
def test_k053_what_a_stated_limit_leaves_is_named_and_the_exit_status_says_so(
    store: Store, start: Callable[..., Program], cli_here: Cli, tmp_path: Path, ending: str
) -> None:
    """A store that does not answer, and a limit of one second: a status that is not 0, every save named; a drain commits them later."""
    held = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before", times=None))
    program = start(ENDS, host="process", ending=ending, limit_s=1.0)
    assert program.wait() == 6
    assert held.hits
    left = LocalTier.open(tmp_path / "disk").pending()
    assert [manifest.step for manifest, _ in left] == [3, 2, 1]
    assert committed(store) == []
    assert all(manifest.id in program.errors for manifest, _ in left)
    assert "ckptmgr drain" in program.errors
    assert "cannot schedule new futures" not in program.errors
    held.release()
    for pid in program.processes():
        os.kill(pid, signal.SIGKILL)
    drained = cli_here("drain", tmp_path / "disk")
    assert drained.returncode == 0, drained.stderr
    assert committed(store) == [1, 2, 3]


# --- K116 -----------------------------------------------------------------------------------------------------------------


def training(store: Store, start: Callable[..., Program], *, host: str, **options: Any) -> tuple[Program, ActiveFault]:
    """A program that trains on while the upload of its second save stands still, and the fault that holds it; the first is committed."""
    held = store.server.faults.add(Fault(method="PUT", key="*-000000000002-*", hold="before", times=None))
    program = start(TRAINS, host=host, **{"ending": "interrupted", **options})
    assert held.reached.wait(DEADLINE_S), program.process.poll()
    assert committed(store) == [1]
    return program, held


def assert_first_is_whole(store: Store, cli_here: Cli) -> None:
    verified = cli_here("verify", f"{store.url}/run", "1")
    assert verified.returncode == 0, verified.stderr


@HOSTS
def test_k116_ctrl_c_once_finishes_the_upload(
    store: Store, start: Callable[..., Program], cli_here: Cli, tmp_path: Path, host: str
) -> None:
    """An orderly end, with a line that says what a second one does."""
    program, held = training(store, start, host=host)
    program.interrupt()
    program.wait_for("Ctrl-C ends at once")
    held.release()
    assert program.wait() in INTERRUPTED
    assert committed(store) == [1, 2]
    assert pending(tmp_path) == []
    assert_first_is_whole(store, cli_here)


def test_k116_ctrl_c_once_is_bounded(
    store: Store, start: Callable[..., Program], cli_here: Cli, tmp_path: Path
) -> None:
    """A store that does not answer any more holds the program for its `close_timeout_s` and little more, and what is left is named."""
    program, held = training(store, start, host="process", limit_s=1.0)
    program.interrupt()
    assert program.wait(20) in INTERRUPTED
    assert pending(tmp_path) == [2]
    assert LocalTier.open(tmp_path / "disk").pending()[0][0].id in program.errors
    assert committed(store) == [1]
    assert_first_is_whole(store, cli_here)
    held.release()


@pytest.mark.parametrize(
    ("host", "pause_s"),
    [
        ("process", None),
        ("thread", 0.1),
        pytest.param("process", 0.1, marks=pytest.mark.slow),
        pytest.param("thread", None, marks=pytest.mark.slow),
    ],
)
def test_k116_ctrl_c_twice_is_gone_in_three_seconds(
    store: Store, start: Callable[..., Program], cli_here: Cli, tmp_path: Path, host: str, pause_s: float | None
) -> None:
    """At whatever moment of the orderly end the second one comes: no process is left, nothing is committed, and a drain goes on."""
    program, held = training(store, start, host=host)
    program.interrupt()
    if pause_s is None:
        program.wait_for("Ctrl-C ends at once")
    else:
        threading.Event().wait(pause_s)
    program.interrupt()
    assert program.wait(3) in INTERRUPTED
    gone_in_the_end(store, program, held, cli_here, tmp_path)


@HOSTS
def test_k116_ctrl_c_after_sigterm_is_gone_in_three_seconds(
    store: Store, start: Callable[..., Program], cli_here: Cli, tmp_path: Path, host: str
) -> None:
    """The preemption's save is committed locally and its upload under way, behind the one that stands still."""
    newest = store.server.faults.add(
        Fault(method="PUT", match=lambda seen: is_urgent(seen.key), hold="before", times=None)
    )
    program, held = training(store, start, host=host, ending="preempted")
    program.process.send_signal(signal.SIGTERM)
    program.wait_for("Ctrl-C ends at once")
    program.interrupt()
    assert program.wait(3) in (*INTERRUPTED, 143)
    newest.release()
    gone_in_the_end(store, program, held, cli_here, tmp_path)


def is_urgent(key: str) -> bool:
    """Whether it belongs to a save after the second."""
    return "/checkpoints/" in key and int(key.split("/checkpoints/")[1].split("-")[1]) > 2


def gone_in_the_end(store: Store, program: Program, held: ActiveFault, cli_here: Cli, tmp_path: Path) -> None:
    """No process of it goes on, no manifest appears, the save is pending, the earlier one is whole, and a drain commits it."""
    assert program.processes() == []
    held.release()
    assert committed(store) == [1]
    left = pending(tmp_path)
    assert left[-1] == 2
    assert_first_is_whole(store, cli_here)
    drained = cli_here("drain", tmp_path / "disk")
    assert drained.returncode == 0, drained.stderr
    assert committed(store) == [1, *sorted(left)]
