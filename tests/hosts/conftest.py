"""A real Hugging Face Trainer as a process: each test runs a user's script, interrupts it, and compares what it did with the uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train_hf.py")
DEADLINE_S = 150.0
# ms-swift brings an older transformers, which has an environment of its own; beside it, only what is about ms-swift runs.
if find_spec("swift") is not None:
    collect_ignore_glob = ["test_[!m]*.py"]


OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
}


@dataclass(frozen=True, slots=True)
class Trained:
    """What a training process left: exit code, stderr, and what its journal says by step."""

    code: int
    log: str
    facts: Mapping[str, str]

    @property
    def steps(self) -> list[int]:
        """The steps that it ran, in order."""
        return [int(name.split()[0]) for name in self.facts if name.endswith(" weights")]


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    if find_spec("transformers") is None or find_spec("accelerate") is None:
        pytest.skip("transformers and accelerate are not installed; CI runs these tests in environments of their own")


def read(journal: Path) -> dict[str, str]:
    facts: dict[str, str] = {}
    for line in journal.read_text().splitlines() if journal.exists() else ():
        entry = json.loads(line)
        step = entry.pop("step")
        facts.update({f"{step} {name}": value for name, value in entry.items()})
    return facts


def run(command: list[str], journal: Path, cwd: Path, env: Mapping[str, str] | None = None) -> Trained:
    done = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return Trained(done.returncode, done.stdout + done.stderr, read(journal))


@pytest.fixture(scope="session")
def whole(_no_real_cloud: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The uninterrupted training, without anything of ours in it."""
    work = tmp_path_factory.mktemp("whole")
    command = [sys.executable, str(SCRIPT), "--out", str(work / "out"), "--journal", str(work / "journal")]
    trained = run(command, work / "journal", work)
    assert trained.code == 0, trained.log
    assert trained.steps == list(range(1, 21))
    return trained


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., Trained]:
    """Runs a command in `tmp_path`: `launch(command, journal, env)`."""

    def start(command: list[str], journal: Path, env: Mapping[str, str] | None = None) -> Trained:
        return run(command, journal, tmp_path, env)

    return start


@pytest.fixture
def script() -> list[str]:
    """The beginning of the command line."""
    return [sys.executable, str(SCRIPT)]


@pytest.fixture
def train(tmp_path: Path, script: list[str]) -> Callable[..., Trained]:
    """Runs the script: `train("name", "--run", url, …)`. `before` is put in front of the command, such as `ckptmgr resume RUN --`."""
    number = [0]

    def start(*options: object, before: tuple[object, ...] = (), python: tuple[object, ...] = ()) -> Trained:
        number[0] += 1
        journal = tmp_path / f"journal-{number[0]}"
        command = [
            *before,
            *([script[0], *python] if python else [script[0]]),
            script[1],
            "--journal",
            journal,
            *options,
        ]
        return run([str(word) for word in command], journal, tmp_path)

    return start


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    """Before the first import: hub clients read their environment once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def one_thread(offline: None) -> Iterator[None]:
    """Sums depend on how many there are, and more than one only costs time here."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
