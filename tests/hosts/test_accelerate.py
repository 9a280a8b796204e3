"""Accelerate's `save_state`, killed and resumed: as the uninterrupted run, to the last bit."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.stores import Store

SCRIPT = Path(__file__).with_name("train_accelerate.py")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="session", autouse=True)
def _needs_transformers() -> None:
    """In place of that for the tests of the other hosts."""
    if find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed; CI runs these tests in an environment of their own")


@pytest.fixture
def train(run_script: Callable[..., tuple[int, str]]) -> Callable[..., tuple[int, dict[int, Any], str]]:
    """Runs the script in a process: its exit code, its journal by step, and what it said."""

    def start(journal: Path, *options: object) -> tuple[int, dict[int, Any], str]:
        imports = ("accelerate", "ckptmgr.callbacks.accelerate", "ckptmgr.training.manager")
        code, log = run_script(SCRIPT, ("--journal", journal, *options), journal.parent, imports)
        lines = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
        return code, {line.pop("step"): line for line in lines}, log

    return start


@pytest.mark.parametrize("naming", [False, True], ids=["our directories", "automatic naming"])
def test_killed_and_resumed(
    make_store: Callable[[str], Store],
    tmp_path: Path,
    train: Callable[..., tuple[int, dict[int, Any], str]],
    naming: bool,
) -> None:
    """In the middle of an epoch; the resumed run saves again, also where Accelerate counts its directories."""
    url = f"{make_store('local').url}/run"
    both = (
        "--out",
        tmp_path / "out",
        "--url",
        url,
        "--local-dir",
        tmp_path / "disk",
        *(["--naming"] if naming else []),
    )
    code, whole, log = train(tmp_path / "whole", "--out", tmp_path / "other")
    assert code == 0, log
    code, first, log = train(tmp_path / "first", *both, "--kill-at", 8)
    assert code == -9, log
    assert first == {step: whole[step] for step in range(1, 8)}
    code, second, log = train(tmp_path / "second", *both)
    assert code == 0, log
    assert second == {step: whole[step] for step in range(7, 15)}
    manifests = RunDirectory.open(url).history().manifests
    assert sorted(stem.step for stem in manifests) == [3, 6, 9, 12]
    assert {file.path for file in manifests[max(manifests)].files} >= {"optimizer.bin", "model.safetensors"}


def test_nothing_is_saved_between_micro_batches(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What `accumulate` has added up is not in what Accelerate writes; said, and the next edge is saved."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found, unused-ignore]

    from ckptmgr.callbacks.accelerate import AccelerateCheckpoints
    from ckptmgr.training.manager import CheckpointManager

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with CheckpointManager(tmp_path / "store/run", local_dir=tmp_path / "disk", transfer="thread") as manager:
        checkpoints = AccelerateCheckpoints(accelerator, manager)
        saved = []
        for number in range(1, 5):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            saved.append(checkpoints.save(number) is not None)
    assert saved == [False, True, False, True]
    assert [record.getMessage()[:23] for record in caplog.records if record.levelno == logging.ERROR] == [
        "step 1 is not saved: it",
        "step 3 is not saved: it",
    ]
    assert sorted(stem.step for stem in RunDirectory.open(str(tmp_path / "store/run")).history().manifests) == [2, 4]
