"""The soak: that it kills, resumes and compares, and that it fails when a resumed run is another one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from ckptmgr.testing.stores import DirectoryStore

STEM = "000001-000000000012-000004-0123abcd"
REPORT = {"losses": {"1:loss": "0x1p0", "2:loss": "0x1p1"}, "weights": "abcd"}


@pytest.mark.slow
def test_a_kill_of_a_short_run_ends_with_a_line_that_a_script_can_read(
    bench: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    """A kill has a line of its own; nothing is left of it, neither files nor processes."""
    script = str(bench("soak").__file__)
    options = ["--kills", "1", "--steps", "9", "--store", "local", "--dir", str(tmp_path)]
    done = subprocess.run([sys.executable, script, *options], capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    first, *lines, last = done.stdout.splitlines()
    assert first.startswith("seed ")
    assert sum(line.startswith("  kill ") for line in lines) == 1
    found = json.loads(last)
    assert found["ok"] is True
    assert found["kills"] == 1
    assert found["lives"] >= found["machine"] + found["job"] + found["trainer"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("report", "word"),
    [
        ({**REPORT, "losses": {**REPORT["losses"], "2:loss": "0x1.0000000000001p1"}}, "1 losses differ"),  # type: ignore[dict-item]
        ({**REPORT, "losses": {"1:loss": "0x1p0"}}, "1 losses differ"),
        ({**REPORT, "weights": "abce"}, "the weights differ"),
    ],
)
def test_a_run_that_differs_in_one_bit_is_wrong(
    bench: Callable[[str], ModuleType], tmp_path: Path, report: dict[str, object], word: str
) -> None:
    """A loss, a missing loss, the weights."""
    soak = bench("soak")
    job = soak.Job(DirectoryStore(tmp_path / "store"), "run-1", tmp_path, soak.Processes(), 12)
    job.report.write_text(json.dumps(report))
    with pytest.raises(soak.WrongError, match=word):
        job.check_end(REPORT)


def test_a_resume_from_an_older_checkpoint_is_wrong(bench: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """What survived the kill was step 12; an attempt that went on from step 9, or from nothing, has lost it."""
    soak = bench("soak")
    store = DirectoryStore(tmp_path / "store")
    job = soak.Job(store, "run-1", tmp_path, soak.Processes(), 12)
    player = soak.Soak(store, tmp_path, kills=1, seed=1, steps=12)
    store.put("run-1/attempts/000001.json", b'{"parent": null}')
    before = job.attempts()

    class Silent:
        def said(self) -> str:
            return ""

    for parent in (None, STEM.replace("12-", "09-")):
        store.put("run-1/attempts/000002.json", json.dumps({"parent": parent}).encode())
        with pytest.raises(soak.WrongError, match="attempt 2 went on from"):
            player._check_parent(job, before, STEM, Silent())
    store.put("run-1/attempts/000002.json", json.dumps({"parent": STEM}).encode())
    player._check_parent(job, before, STEM, Silent())
