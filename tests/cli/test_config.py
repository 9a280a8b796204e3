"""`ckptmgr config`: mistakes are found before a training, with their lines; the schema is one that editors read."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.callbacks.builtin import BUILT_IN

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]

GOOD = """\
run: ./runs/llama
save: {every_n_steps: 500}
callbacks:
  - {type: my_callbacks:Watch, priority: FIRST}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a configuration and a callback of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    # For commands in this process, which may have imported that of another test.
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_callbacks", raising=False)
    code = "class Watch:\n    def on_step_end(self, **kwargs):\n        pass\n"
    (tmp_path / "my_callbacks.py").write_text(code)
    (tmp_path / "ckptmgr.yaml").write_text(GOOD)
    return tmp_path


def test_a_good_one(cli: Cli, here: Path) -> None:
    """What it comes to, in the order in which callbacks run; nothing is written."""
    told = cli("config", "check")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.splitlines() == [
        "ckptmgr.yaml: nothing is wrong with it",
        "  run        ./runs/llama",
        "  callbacks  Watch, SaveModelCallback",
    ]
    assert json.loads(cli("config", "check", "--json").stdout) == {
        "file": "ckptmgr.yaml",
        "run": "./runs/llama",
        "callbacks": ["Watch", "SaveModelCallback"],
        "warnings": [],
        "mistakes": [],
    }
    assert not (here / "runs").exists()
    assert not (here / ".ckptmgr").exists()


def test_a_callback_beside_the_training(cli: Cli, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python train.py` finds it there, without PYTHONPATH; so does an installed command, which Python gives no path to it."""
    monkeypatch.delenv("PYTHONPATH")
    told = cli("config", "check", env={"PYTHONSAFEPATH": "1"})
    assert (told.returncode, told.stderr) == (0, "")
    assert "Watch" in told.stdout


def test_what_is_hardly_meant_is_said(cli_here: Cli, here: Path) -> None:
    """A best that is saved, and removed as any other checkpoint."""
    (here / "ckptmgr.yaml").write_text(GOOD.replace("}", ", best: eval_loss}\nkeep: {last: 3}", 1))
    told = cli_here("config", "check")
    assert told.returncode == 0
    (line,) = (line for line in told.stdout.splitlines() if line.startswith("  warning"))
    assert "none is kept for it" in line
    (said,) = json.loads(cli_here("config", "check", "--json").stdout)["warnings"]
    assert line.endswith(said)


def test_a_mistake_and_no_file(cli_here: Cli, here: Path) -> None:
    """One line, exit 2."""
    (here / "ckptmgr.yaml").write_text(GOOD.replace("every_n_steps", "every_n_step"))
    told = cli_here("config", "check")
    assert (told.returncode, told.stdout) == (2, "")
    (line,) = told.stderr.splitlines()
    assert line.startswith("ckptmgr: error: ckptmgr.yaml:2: save.every_n_step: this key is not known - ")
    assert "did you mean every_n_steps? (there is best, every_minutes," in line
    told = cli_here("config", "check", "other.yaml")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("ckptmgr: error: other.yaml cannot be read: No such file or directory")


def test_every_mistake_is_a_line_and_an_entry_of_the_document(cli: Cli, here: Path) -> None:
    """On stderr for people, on stdout for programs; what a callback prints while it is made is in neither's way."""
    (here / "my_callbacks.py").write_text("class Watch:\n    on_step_end = print\nprint('imported')\n")
    (here / "ckptmgr.yaml").write_text(GOOD.replace("run: ./runs/llama", "run: ${NO_JOB}").replace("FIRST", "FIRSTT"))
    told = cli("config", "check", "--json")
    assert told.returncode == 2
    assert json.loads(told.stdout) == {
        "file": "ckptmgr.yaml",
        "run": None,
        "callbacks": [],
        "warnings": [],
        "mistakes": [
            {
                "line": 1,
                "key": "run",
                "what": "the variable NO_JOB is not set",
                "hint": "set it, or write ${NO_JOB:-default}",
            },
            {
                "line": 4,
                "key": "callbacks[0].priority",
                "what": "'FIRSTT' does not fit",
                "hint": "did you mean FIRST? (give a whole number or one of FIRST, SAVE, NORMAL, STOP, LOG or null)",
            },
        ],
    }
    run, priority = [line for line in told.stderr.splitlines() if line != "imported"]
    assert run.startswith("ckptmgr: error: ckptmgr.yaml:1: run: the variable NO_JOB is not set - set it, or write ")
    assert priority.startswith(
        "ckptmgr: error: ckptmgr.yaml:4: callbacks[0].priority: 'FIRSTT' does not fit - did you mean "
    )


def test_no_torch_is_imported_that_no_callback_needs(cli: Cli, here: Path) -> None:
    """It takes seconds; only a run needs it, for its manager."""
    (here / "my_callbacks.py").write_text(
        "import sys\nclass Watch:\n    def __init__(self, rate: float = 0.1):\n        assert 'torch' not in sys.modules\n"
        "    def on_step_end(self, **kwargs):\n        pass\n"
    )
    needs_more = ("GradientClipCallback", "NotifyCallback", "SaveModelCallback")
    built_in = "".join(f"  - {name}\n" for name in BUILT_IN if name not in needs_more)
    (here / "ckptmgr.yaml").write_text(f"callbacks:\n{built_in}  - {{type: my_callbacks:Watch, params: {{rate: 1}}}}\n")
    told = cli("config", "check")
    assert (told.returncode, told.stderr) == (0, "")


def test_the_schema(cli_here: Cli, here: Path) -> None:
    """A JSON schema with the keys that a file may have."""
    told = cli_here("config", "schema")
    assert (told.returncode, told.stderr) == (0, "")
    made = json.loads(told.stdout)
    assert made["title"] == "ckptmgr.yaml"
    assert {"store", "run", "save", "keep", "upload", "callbacks"} <= made["$defs"]["Config"]["properties"].keys()
