"""Lightning's Trainer, interrupted and resumed: losses, weights, optimizer, learning rate, sample ids and metrics are those of the uninterrupted run."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.stores import Store

SCRIPT = Path(__file__).with_name("train_lightning.py")
# Each test is two to three trainings, and most of their time is imports.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """In place of that for the tests of the other hosts."""
    if find_spec("lightning") is None:
        pytest.skip("lightning is not installed; CI runs these tests in an environment of their own")


@dataclass(frozen=True, slots=True)
class Trained:
    code: int
    log: str
    facts: Mapping[tuple[int, str], Any]

    @property
    def steps(self) -> list[int]:
        return [step for step, name in self.facts if name == "weights"]


@pytest.fixture
def train(tmp_path: Path, run_script: Callable[..., tuple[int, str]]) -> Callable[..., Trained]:
    """Runs the script in a process."""
    number = [0]

    def start(*options: object) -> Trained:
        number[0] += 1
        folder = tmp_path / f"work-{number[0]}"
        folder.mkdir()
        return _trained(run_script, folder, *options)

    return start


def _trained(run_script: Callable[..., tuple[int, str]], folder: Path, *options: object) -> Trained:
    journal = folder / "journal"
    imports = ("lightning", "ckptmgr.callbacks.lightning", "ckptmgr.training.manager")
    code, log = run_script(SCRIPT, ("--journal", journal, *options), folder, imports)
    facts: dict[tuple[int, str], Any] = {}
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        step = entry.pop("step")
        facts.update({(step, name): value for name, value in entry.items()})
    return Trained(code, log, facts)


@pytest.fixture(scope="module")
def train_whole(
    run_script: Callable[..., tuple[int, str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Trained]:
    """The uninterrupted training with some options, without anything of ours in it."""
    known: dict[tuple[object, ...], Trained] = {}

    def start(*options: object) -> Trained:
        if options not in known:
            known[options] = _trained(run_script, tmp_path_factory.mktemp("whole"), *options)
            assert known[options].code == 0, known[options].log
        return known[options]

    return start


CASES = {
    "mid-epoch": ((), ("--send", "SIGKILL", "--when", 8), 6),
    "epoch boundary": (("--save-every", 0), ("--send", "SIGKILL", "--when", 9), 8),
    "epoch boundary, by steps": (("--save-every", 0, "--by-steps"), ("--send", "SIGKILL", "--when", 9), 8),
    "between micro-batches": ((), ("--send", "SIGTERM", "--where", "substep", "--when", 7), 7),
    "during evaluation": ((), ("--send", "SIGTERM", "--where", "validation", "--when", 6), 6),
    "ReduceLROnPlateau": (("--plateau", "--save-every", 0), ("--send", "SIGKILL", "--when", 9), 8),
    "bf16": (("--precision", "bf16-mixed"), ("--send", "SIGTERM", "--when", 7), 7),
    "fp16 with scaler": (("--precision", "16-mixed"), ("--send", "SIGKILL", "--when", 8), 6),
    "workers": (("--workers", 2), ("--send", "SIGTERM", "--when", 7), 7),
    "no length": (("--stream",), ("--send", "SIGTERM", "--when", 7), 7),
}


@pytest.mark.parametrize("case", CASES)
def test_interrupted_and_resumed_is_as_uninterrupted(
    make_store: Callable[[str], Store],
    tmp_path: Path,
    train: Callable[..., Trained],
    train_whole: Callable[..., Trained],
    case: str,
) -> None:
    """Compared with a run that has nothing of ours in it, to the last bit; the second process has another local disk."""
    options, interruption, last = CASES[case]
    url = f"{make_store('local').url}/run"
    whole = train_whole(*options)
    first = train("--url", url, "--local-dir", tmp_path / "disk-1", *options, *interruption)
    assert first.code == (-signal.SIGKILL if "SIGKILL" in interruption else 143), first.log
    second = train("--url", url, "--local-dir", tmp_path / "disk-2", "--resume", "manager", *options)
    assert second.code == 0, second.log
    assert second.steps == list(range(last + 1, 13)), second.log
    for each in (first, second):
        assert {key: value for key, value in each.facts.items() if whole.facts.get(key) != value} == {}
    assert "failures: 0" in second.log
    assert "proof: different" not in second.log


def test_interrupted_twice_in_one_epoch(
    make_store: Callable[[str], Store],
    tmp_path: Path,
    train: Callable[..., Trained],
    train_whole: Callable[..., Trained],
) -> None:
    """The second process is interrupted in the epoch that it had resumed in the middle."""
    url = f"{make_store('local').url}/run"
    both = ("--url", url, "--local-dir", tmp_path / "disk", "--resume", "manager")
    whole = train_whole()
    first = train(*both, "--send", "SIGTERM", "--when", 6)
    second = train(*both, "--send", "SIGTERM", "--when", 7)
    third = train(*both)
    assert (first.steps, second.steps, third.steps) == ([1, 2, 3, 4, 5, 6], [7], [8, 9, 10, 11, 12]), third.log
    for each in (first, second, third):
        assert {key: value for key, value in each.facts.items() if whole.facts.get(key) != value} == {}


def test_resume_prints_the_ckpt(
    make_store: Callable[[str], Store], tmp_path: Path, train: Callable[..., Trained]
) -> None:
    """`ckptmgr resume RUN` prints one file, which `trainer.fit(ckpt_path=…)` takes; the attempt descends from it."""
    url = f"{make_store('local').url}/run"
    first = train("--url", url, "--local-dir", tmp_path / "disk-1", "--send", "SIGTERM", "--when", 6)
    assert first.steps[-1] == 6, first.log
    command = [sys.executable, "-m", "ckptmgr.cli.main", "resume", url, "--to", str(tmp_path / "to")]
    path = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100).stdout.strip()
    assert path == str(tmp_path / "to" / "step-6.ckpt")
    second = train("--url", url, "--local-dir", tmp_path / "disk-2", "--resume", path)
    assert second.steps == list(range(7, 13)), second.log


def test_a_training_that_was_stopped_early_stays_stopped(
    make_store: Callable[[str], Store], tmp_path: Path, train: Callable[..., Trained]
) -> None:
    """K125: no step is run, and it is said."""
    url = f"{make_store('local').url}/run"
    both = ("--url", url, "--local-dir", tmp_path / "disk", "--stop", "--resume", "manager")
    assert train(*both).steps[-1] < 12
    again = train(*both)
    assert (again.code, again.steps) == (0, []), again.log
    assert "already stopped (EarlyStopping)" in again.log


def test_a_start_from_scratch_on_a_run_with_checkpoints_is_refused(
    make_store: Callable[[str], Store], tmp_path: Path, train: Callable[..., Trained]
) -> None:
    """I12: before the first step."""
    url = f"{make_store('local').url}/run"
    both = ("--url", url, "--local-dir", tmp_path / "disk")
    train(*both, "--send", "SIGTERM", "--when", 6)
    again = train(*both)
    assert again.code != 0
    assert again.steps == []
    assert "ConflictError" in again.log
