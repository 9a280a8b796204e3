"""`resume` says what is not as it was, as far as that can be known without PyTorch, and refuses what it is told to."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr.core.conditions import Conditions
from ckptmgr.core.manifest import Manifest, decode_manifest, encode_manifest
from ckptmgr.testing.stores import Store

Cli = Callable[..., subprocess.CompletedProcess[str]]
SAVED = Conditions(
    world_size=8, batch_size=4, dataset_length=1000, git_commit="0" * 40, versions={"torch": "1.0.0", "python": "3.1"}
)


@pytest.fixture
def run_url(make_store: Callable[[str], Store], push_steps: Callable[..., list[str]]) -> str:
    """A run whose only checkpoint, step 100, was made under SAVED."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    key = f"run/manifests/{stem}.json"
    known = decode_manifest(store.get(key), where="")
    assert isinstance(known, Manifest)
    store.put(key, encode_manifest(replace(known, conditions=SAVED.as_document())))
    return f"{store.url}/run"


def test_what_has_changed_is_told(run_url: str, cli_here: Cli) -> None:
    """On stderr by line and in the document, with the checkpoint's conditions; what is not known here is not compared."""
    done = cli_here("resume", run_url, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    python = sys.version.split()[0]
    assert document["conditions"] == SAVED.as_document()
    assert {"what": "versions.python", "saved": "3.1", "now": python} in document["drift"]
    assert not {"world_size", "batch_size", "dataset_length"} & {each["what"] for each in document["drift"]}
    assert f"ckptmgr: warning: changed: versions.python: 3.1 in the checkpoint, {python} now" in done.stderr


@pytest.mark.parametrize("way", ["option", "environment"])
def test_a_drift_that_is_refused(
    run_url: str, cli_here: Cli, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 7 with both values, nothing fetched, COMMAND not started."""
    if way == "environment":
        monkeypatch.setenv("CKPTMGR_REFUSE_DRIFT", "git_commit versions")
    options = ["--refuse-drift", "versions", "--refuse-drift", "git_commit"] if way == "option" else []
    done = cli_here("resume", run_url, "--to", tmp_path / "to", *options, "--", "touch", str(tmp_path / "STARTED"))
    assert (done.returncode, done.stdout) == (7, "")
    assert "versions.torch: 1.0.0 in the checkpoint" in done.stderr
    assert not (tmp_path / "to").exists()
    assert not (tmp_path / "to.partial").exists()
    assert not (tmp_path / "STARTED").exists()


def test_command_is_told_what_to_refuse(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """What only the training itself can know, such as the world size, its manager refuses."""
    told = tmp_path / "told"
    words = ["sh", "-c", 'printf %s "$CKPTMGR_REFUSE_DRIFT" > "$0"', str(told)]
    done = cli_here("resume", run_url, "--refuse-drift", "world_size,batch_size", "--", *words)
    assert done.returncode == 0, done.stderr
    assert told.read_text() == "batch_size,world_size"


REFUSES = """
import os, sys
from ckptmgr.core.conditions import Conditions, drift
from ckptmgr.run.conditions import refuse_drift

found = drift(Conditions(batch_size=4), Conditions(batch_size=8))
try:
    refuse_drift(found, frozenset({"batch_size"}), where="step 3")
except Exception:
    if len(sys.argv) > 1:
        sys.exit(int(sys.argv[1]))
    raise
"""


@pytest.mark.parametrize(("ends_with", "code"), [("", 7), ("1", 7), ("9", 9)])
def test_what_command_refuses_is_a_conflict_too(
    run_url: str, cli_here: Cli, tmp_path: Path, ends_with: str, code: int
) -> None:
    """A traceback's 1, and torchrun's, is no failure that another try gets over; a code of COMMAND's own choice passes through."""
    script = tmp_path / "train.py"
    script.write_text(REFUSES)
    words = [sys.executable, str(script), *([ends_with] if ends_with else [])]
    done = cli_here("resume", run_url, "--", *words)
    assert done.returncode == code
    told = (
        "COMMAND refused to go on: step 3 was made under other conditions: batch_size: 4 in the checkpoint, 8 now"
        in done.stderr
    )
    assert told == (code == 7)


def test_a_misspelled_name_is_wrong_usage(run_url: str, cli_here: Cli) -> None:
    done = cli_here("resume", run_url, "--refuse-drift", "worldsize")
    assert (done.returncode, done.stdout) == (2, "")
    assert "'worldsize' is no drift that could be refused" in done.stderr


def test_the_commit_of_the_script_counts(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """The tree of the script that COMMAND runs, not that of the working directory."""
    tree = tmp_path / "code"
    tree.mkdir()
    (tree / "train.py").write_text("")
    who = ["git", "-c", "user.name=n", "-c", "user.email=e@x", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "train.py"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*who, *words], cwd=tree, check=True, capture_output=True)
    done = cli_here("resume", run_url, "--refuse-drift", "git_commit", "--", sys.executable, str(tree / "train.py"))
    assert done.returncode == 7
    assert f"git_commit: {'0' * 40} in the checkpoint" in done.stderr


def test_show_tells_the_conditions(run_url: str, cli_here: Cli) -> None:
    shown = cli_here("show", run_url).stdout
    for line in (
        "batch:      of 4",
        "dataset:    samples 1000",
        f"code:       {'0' * 40}",
        "versions:   python 3.1, torch 1.0.0",
    ):
        assert line in shown
    assert json.loads(cli_here("show", run_url, "--json").stdout)["conditions"] == SAVED.as_document()
