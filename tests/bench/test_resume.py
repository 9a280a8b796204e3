"""The bench of resumes: that it runs, that both ways come to the same step, and what its ratio is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Load = Callable[[str], ModuleType]

# Copies one object as s5cmd does; that program is none of a normal machine's.
COPIES = """#!{python}
import sys, boto3
endpoint, source, target = sys.argv[sys.argv.index("--endpoint-url") + 1], *sys.argv[-2:]
client = boto3.client("s3", endpoint_url=endpoint)
name = (source if "://" in source else target).split("/", 3)
if "://" in source:
    client.download_file(name[2], name[3], target)
else:
    client.upload_file(source, name[2], name[3])
"""


@pytest.mark.slow
def test_one_small_real_round_ends_with_the_ratio(bench: Load, tmp_path: Path) -> None:
    """Each way in a process of its own, from a real store; the last line is one JSON object, and nothing is left behind."""
    program = tmp_path / "peers" / "bin" / "s5cmd"
    program.parent.mkdir(parents=True)
    program.write_text(COPIES.format(python=sys.executable))
    program.chmod(0o755)
    page, work = tmp_path / "benchmarks.md", tmp_path / "work"
    work.mkdir()
    command = [sys.executable, str(bench("resume").__file__), "--size-mib", "48", "--rounds", "1", "--dir", str(work)]
    done = subprocess.run(
        [*command, "--peers", str(program.parent), "--record", str(page)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout.splitlines()[-1])) == ["resume_vs_s5cmd"]
    rows = [line.split(" | ")[0] for line in page.read_text().splitlines() if line.startswith("| ")][2:]
    assert rows == ["| `manager.restore` and a step", "| `s5cmd cp`, `torch.load`, and a step"]
    assert list(work.iterdir()) == []


def resumed(resume: ModuleType, wall_s: float, loss: float = 0.5) -> Any:
    return resume.Resumed(wall_s=wall_s, cpu_s=1.0, extra_mib=10.0, loss=loss)


def test_the_ratio_is_the_median_of_those_of_one_round(bench: Load) -> None:
    resume = bench("resume")
    found = {
        "ours": [resumed(resume, wall) for wall in (2, 3, 9)],
        "s5cmd": [resumed(resume, wall) for wall in (1, 2, 3)],
    }
    assert resume.ratios(found) == {"resume_vs_s5cmd": 2}


def test_ways_that_come_to_different_steps_are_no_measurement(bench: Load) -> None:
    """One of them would not have loaded what was saved."""
    resume = bench("resume")
    with pytest.raises(resume.Failed, match=r"0\.5.*0\.75"):
        resume.check({"ours": [resumed(resume, 1)], "s5cmd": [resumed(resume, 1, loss=0.75)]})
