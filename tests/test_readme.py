"""The README's training loop, run as it stands but for the URL and the number of steps."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def _loop(url: str, steps: int) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code: str = next(block for block in blocks if "CheckpointManager(" in block)
    assert "s3://my-bucket/exp/run-7" in code
    assert "10_001" in code
    return (
        code.replace("s3://my-bucket/exp/run-7", url)
        .replace("10_001", str(steps + 1))
        .replace("(500)", "(5)")
        .replace("1000", "10")
    )


@pytest.mark.skipif(not (ROOT / "README.md").is_file(), reason="the tests run without the project's README beside them")
def test_the_loop_of_the_readme_saves_and_goes_on(tmp_path: Path) -> None:
    """The first run saves every 5 steps; the second goes on where it ended, and retention keeps what the loop says."""
    for steps in (12, 25):
        done = subprocess.run(
            [sys.executable, "-c", _loop(str(tmp_path / "run-7"), steps)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    manifests = sorted(path.name for path in (tmp_path / "run-7" / "manifests").iterdir())
    attempts = {name[:6]: name[7:19].lstrip("0") for name in manifests}
    assert attempts == {"000001": "10", "000002": "25"}
    assert (tmp_path / ".ckptmgr" / "run-7" / "run.json").is_file()
