"""A real Hugging Face Trainer as a process: each test runs a user's script, interrupts it, and compares what it did with the uninterrupted run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("train_hf.py")
IMPORTS = ("transformers.trainer", "transformers.models.llama.modeling_llama", "ckptmgr.training.manager")
DEADLINE_S = 150.0
# ms-swift brings an older transformers, which has an environment of its own; beside it, only what is about ms-swift runs.
if find_spec("swift") is not None:
    collect_ignore_glob = ["test_[!m]*.py"]
# It is the same accelerate in all of the environments: once is enough.
if find_spec("lightning") is None:
    collect_ignore = ["test_accelerate.py"]


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


def run_command(
    command: list[str], cwd: Path, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def run(command: list[str], journal: Path, cwd: Path, env: Mapping[str, str] | None = None) -> Trained:
    done = run_command(command, cwd, env)
    return Trained(done.returncode, done.stdout + done.stderr, read(journal))


@pytest.fixture(scope="session")
def run_script(
    make_forks: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[int, str]]:
    """Runs a script as a process that is forked where `imports` were made, which take five times as long as such a training.

    `run_script(script, arguments, cwd, imports)` returns the exit code, negative for a signal, and what was said.
    """

    def run(script: Path, arguments: Sequence[object], cwd: Path, imports: Sequence[str]) -> tuple[int, str]:
        forks = make_forks(*imports, env=OFFLINE)
        said = tmp_path_factory.mktemp("said")
        ((code, out, err),) = forks.run(
            [arguments], said, deadline_s=DEADLINE_S, cwd=cwd, script=str(script), env=OFFLINE
        )
        return code, out + err

    return run


@pytest.fixture(scope="session")
def whole(run_script: Callable[..., tuple[int, str]], tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """The uninterrupted training, without anything of ours in it."""
    work = tmp_path_factory.mktemp("whole")
    code, log = run_script(SCRIPT, ("--out", work / "out", "--journal", work / "journal"), work, IMPORTS)
    trained = Trained(code, log, read(work / "journal"))
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
def train(tmp_path: Path, run_script: Callable[..., tuple[int, str]]) -> Callable[..., Trained]:
    """Runs the script: `train("--url", url, …)`.

    It is a process of its own from the start if `before` is put in front of the command, such as `ckptmgr resume RUN --`, or `python` in front of the script.
    """
    number = [0]

    def start(*options: object, before: tuple[object, ...] = (), python: tuple[object, ...] = ()) -> Trained:
        number[0] += 1
        journal = tmp_path / f"journal-{number[0]}"
        arguments = ("--journal", journal, *options)
        if before or python:
            command = (*before, sys.executable, *python, SCRIPT, *arguments)
            return run([str(word) for word in command], journal, tmp_path)
        code, log = run_script(SCRIPT, arguments, tmp_path, IMPORTS)
        return Trained(code, log, read(journal))

    return start


@pytest.fixture(scope="module")
def offline() -> Iterator[None]:
    """Before the first import: hub clients read their environment once."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in OFFLINE.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def make_hf_trainer(tmp_path: Path) -> Callable[..., Any]:
    """A Trainer with a tiny Llama and 16 samples: `make_hf_trainer(*callbacks, **options)`, which are TrainingArguments."""

    def make(*callbacks: Any, **options: Any) -> Any:
        import torch
        from transformers import (  # type: ignore[import-not-found, unused-ignore]
            LlamaConfig,
            LlamaForCausalLM,
            Trainer,
            TrainingArguments,
        )

        tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1
        )
        settings = {
            "output_dir": str(tmp_path / "out"),
            "save_strategy": "no",
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            **options,
        }
        return Trainer(
            model=LlamaForCausalLM(config),
            args=TrainingArguments(**settings),
            train_dataset=rows,
            eval_dataset=rows[:4],
            callbacks=list(callbacks),
        )

    return make
