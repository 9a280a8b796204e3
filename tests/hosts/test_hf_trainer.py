"""transformers' Trainer, killed and resumed: every loss and all weights are those of the uninterrupted run, to the last bit."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.history import History
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.stores import Store

# Each test is two to four trainings, and most of their time is imports.
pytestmark = pytest.mark.timeout(600)

Train = Callable[..., Any]
CKPTMGR = (sys.executable, "-m", "ckptmgr.cli.main")


def history(url: str) -> History:
    return RunDirectory.open(url).history()


def saved(url: str) -> dict[int, tuple[str, ...]]:
    """The committed steps with their reasons, in the order of attempts."""
    return {manifest.step: manifest.reasons for _, manifest in sorted(history(url).manifests.items())}


def assert_equal_from(whole: Any, resumed: Any, first: int) -> None:
    """`resumed` ran from step `first` to the end, and everything it computed is what the uninterrupted run computed."""
    assert resumed.code == 0, resumed.log
    assert resumed.steps == list(range(first, 21))
    differing = {name: value for name, value in resumed.facts.items() if whole.facts.get(name) != value}
    assert differing == {}


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_killed_and_resumed_on_another_machine(
    make_store: Callable[[str], Store], tmp_path: Path, train: Train, whole: Any, kind: str
) -> None:
    """One command line for the first start and every other one. Rotation keeps one directory of HF's; nothing but the store is left."""
    url = f"{make_store(kind).url}/run"
    resume = (*CKPTMGR, "resume", url, "--or-start", "--")
    first = train(
        *("--url", url, "--local-dir", tmp_path / "disk-1", "--out", tmp_path / "out-1", "--resume", "{}"),
        *("--send", "SIGKILL", "--when", 14),
        before=resume,
    )
    assert (first.code, first.steps[-1]) == (137, 13), first.log
    assert [path.name for path in (tmp_path / "out-1").iterdir()] == ["checkpoint-10"]
    assert saved(url) == {5: ("every_n_steps:5", "best:eval_loss"), 10: ("every_n_steps:5", "best:eval_loss")}
    second = train(
        *("--url", url, "--local-dir", tmp_path / "disk-2", "--out", tmp_path / "out-2", "--resume", "{}"),
        before=resume,
    )
    assert_equal_from(whole, second, 11)
    found = history(url)
    assert {stem.attempt: stem.step for stem in sorted(found.manifests)} == {1: 10, 2: 20}
    parent = found.attempts[2].parent
    assert parent is not None
    assert (parent.attempt, parent.step, found.attempts[2].how) == (1, 10, "auto")
    # The best loss of the first process was remembered, so step 15 was judged as in one run.
    assert saved(url)[15] == ("every_n_steps:5", "best:eval_loss")
    assert saved(url)[20] == ("every_n_steps:5", "best:eval_loss", "train_end")


@pytest.mark.parametrize("where", ["step_begin", "substep_end", "prediction_step"])
def test_sigterm_saves_and_the_resumed_run_is_exact(
    make_store: Callable[[str], Store], tmp_path: Path, train: Train, whole: Any, where: str
) -> None:
    """Wherever it comes: the step (or the evaluation) is finished, saved, committed; the process ends with 143, also under `ckptmgr resume`."""
    url = f"{make_store('local').url}/run"
    last = 15 if where == "prediction_step" else 13
    both = ("--url", url, "--local-dir", tmp_path / "disk", "--out", tmp_path / "out")
    before = (*CKPTMGR, "resume", url, "--or-start", "--") if where == "step_begin" else ()
    first = train(*both, "--send", "SIGTERM", "--where", where, "--when", last, before=before)
    assert (first.code, first.steps[-1]) == (143, last), first.log
    emergency = saved(url)[last]
    assert "sigterm" in emergency
    assert f"sigterm: training ends at step {last}" in first.log
    second = train(*both, "--resume", "manager")
    assert_equal_from(whole, second, last + 1)


def test_hf_resumes_by_itself_from_its_own_directory(
    make_store: Callable[[str], Store], tmp_path: Path, train: Train, whole: Any
) -> None:
    """resume_from_checkpoint=True: what it came from is told by the content, and recorded as the parent."""
    url = f"{make_store('local').url}/run"
    both = ("--url", url, "--local-dir", tmp_path / "disk", "--out", tmp_path / "out")
    assert train(*both, "--send", "SIGKILL", "--when", 14).code == -9
    refused = train(*both)
    assert refused.code == 1
    assert refused.steps == []
    assert "trainer.train(resume_from_checkpoint=manager.resume_path())" in refused.log
    second = train(*both, "--resume", "auto")
    assert_equal_from(whole, second, 11)
    parent = history(url).attempts[2].parent
    assert parent is not None
    assert (parent.attempt, parent.step) == (1, 10)


def test_hf_jit_checkpoint_is_taken(make_store: Callable[[str], Store], tmp_path: Path, train: Train) -> None:
    """HF's own SIGTERM checkpoint fires no on_save: it is found when training ends, committed, and can be resumed from."""
    url = f"{make_store('local').url}/run"
    both = ("--url", url, "--local-dir", tmp_path / "disk", "--out", tmp_path / "out", "--jit", "--save-every", 100)
    first = train(*both, "--send", "SIGTERM", "--when", 2, "--slow", 0.7)
    assert first.code == 0, first.log
    reasons = saved(url)
    step = max(reasons)
    assert 2 <= step < 20
    assert reasons[step] == ("jit_checkpoint",)
    second = train(*both, "--resume", "manager")
    assert (second.code, second.steps) == (0, list(range(step + 1, 21))), second.log


def test_two_ranks(make_store: Callable[[str], Store], tmp_path: Path, train: Train) -> None:
    """Under torchrun: only rank 0 saves, after both have written; SIGTERM on one of them ends both; the resumed run is exact."""
    url = f"{make_store('local').url}/run"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    whole = train("--out", tmp_path / "whole", python=torchrun)
    assert whole.code == 0, whole.log
    both = ("--url", url, "--local-dir", tmp_path / "disk", "--out", tmp_path / "out")
    first = train(*both, "--send", "SIGTERM", "--when", 13, python=torchrun)
    assert first.code != 0
    assert max(first.steps) == 13
    found = history(url)
    assert set(found.attempts) == {1}
    files = {entry.path for entry in found.manifests[max(found.manifests)].files}
    assert {"rng_state_0.pth", "rng_state_1.pth"} <= files
    assert saved(url)[13] == ("sigterm",)
    assert found.manifests[max(found.manifests)].world_size == 2
    resumed = train(*both, "--resume", "manager", python=torchrun)
    assert_equal_from(whole, resumed, 14)
    assert "the first batch after the resume: equal" in resumed.log
    # Rank 1 has batches of its own, which the checkpoint does not tell.
    assert "expected" not in resumed.log


def test_the_manifest_names_its_producer(make_store: Callable[[str], Store], tmp_path: Path, train: Train) -> None:
    """Which version wrote the files."""
    from importlib.metadata import version

    url = f"{make_store('local').url}/run"
    done = train("--url", url, "--local-dir", tmp_path / "disk", "--out", tmp_path / "out")
    assert done.code == 0, done.log
    newest = history(url).manifests[max(history(url).manifests)]
    assert newest.producer["framework"] == "transformers"
    assert newest.producer["transformers"] == version("transformers")
    assert json.loads((tmp_path / "out/checkpoint-20/trainer_state.json").read_bytes())["global_step"] == 20
