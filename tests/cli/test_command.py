"""`ckptmgr resume … -- COMMAND`: what the command is given, and when it is not started."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.run.launch import fill_in
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]

# Writes down what it was given, as JSON, and ends as told.
_REPORT = """
import json, os, sys
out, code, *words = sys.argv[1:]
names = ("CKPTMGR_RESUME_FROM", "CKPTMGR_RESUME_ATTEMPT", "CKPTMGR_LOCAL_DIR")
document = {"words": words, "environment": {name: os.environ.get(name) for name in names}}
open(out, "w").write(json.dumps(document))
print("the command's own words")
sys.exit(int(code))
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Where the command writes down what it was given."""
    return tmp_path / "report.json"


def reporting(report: Path, *words: str, code: int = 0) -> list[str]:
    """A COMMAND that reports its `words` and ends with `code`."""
    return ["--", sys.executable, "-c", _REPORT, str(report), str(code), *words]


def refused(result: Result, code: int, *says: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("ckptmgr: error: ")
    for text in says:
        assert text in result.stderr.splitlines()[-1]


# --- what the command is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "with_path", "without"),
    [
        ("train --resume {}", "train --resume /p", "train"),
        ("train --resume={} --lr 1", "train --resume=/p --lr 1", "train --lr 1"),
        ("train {} --lr 1", "train /p --lr 1", "train --lr 1"),
        ("train -r {} data", "train -r /p data", "train data"),
        ("train data {}", "train data /p", "train data"),
        ("{} data", "/p data", "data"),
        ("train --a --b {}", "train --a --b /p", "train --a"),
        ("train resume={} --from {}", "train resume=/p --from /p", "train"),
        ("train", "train", "train"),
    ],
)
def test_placeholder(command: str, with_path: str, without: str) -> None:
    """{} becomes the path; without one it goes, and so does an option right before it, or the word it is a part of."""
    assert fill_in(command.split(), "/p") == with_path.split()
    assert fill_in(command.split(), None) == without.split()


def test_command_is_given_the_path(
    make_store: MakeStore, push_steps: PushSteps, cli: Cli, report: Path, tmp_path: Path
) -> None:
    """By {} and by CKPTMGR_RESUME_FROM; on stdout there is nothing but what the command itself prints."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    result = cli(
        "resume", f"{store.url}/run", "--to", tmp_path / "with space", *reporting(report, "--from", "{}", "x={}")
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the command's own words\n"
    path = str(tmp_path / "with space")
    assert json.loads(report.read_text()) == {
        "words": ["--from", path, f"x={path}"],
        "environment": {"CKPTMGR_RESUME_FROM": path, "CKPTMGR_RESUME_ATTEMPT": "1", "CKPTMGR_LOCAL_DIR": None},
    }


def test_command_is_told_the_local_dir(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, tmp_path: Path
) -> None:
    """--local-dir is passed on, as an absolute path: the command may run elsewhere."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", "--local-dir", "tier", *reporting(report)).returncode == 0
    assert json.loads(report.read_text())["environment"]["CKPTMGR_LOCAL_DIR"] == str(tmp_path / "tier")


def test_options_of_the_command_are_its_own(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path
) -> None:
    """What stands after the first -- is not ckptmgr's, not even -v, --json or a second --."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    result = cli_here("resume", f"{store.url}/run", *reporting(report, "-v", "--json", "--", "--or-start"))
    assert result.returncode == 0
    assert json.loads(report.read_text())["words"] == ["-v", "--json", "--", "--or-start"]


# --- starting from scratch ----------------------------------------------------------------------------------------------


def test_or_start_where_nothing_is(store: Store, cli_here: Cli, report: Path) -> None:
    """No run at all: the command starts with an empty variable and without {}; looking creates nothing."""
    result = cli_here("resume", f"{store.url}/run", "--or-start", *reporting(report, "--from", "{}", "--lr", "1"))
    assert result.returncode == 0, result.stderr
    document = json.loads(report.read_text())
    assert document["words"] == ["--lr", "1"]
    assert document["environment"]["CKPTMGR_RESUME_FROM"] == ""
    assert store.keys() == []


@pytest.mark.parametrize("selector", ["latest", "500", "best:eval_loss", "tag:best"])
def test_or_start_on_a_run_without_data(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, selector: str
) -> None:
    """A run that was created, and claimed, and never saved anything has no data: the command starts, whatever was selected."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    for key in store.keys("run/"):
        if stem in key:
            store.delete(key)
    result = cli_here("resume", f"{store.url}/run", selector, "--or-start", *reporting(report))
    assert result.returncode == 0, result.stderr
    assert (f"and so no {selector}: from scratch" in result.stderr) is (selector != "latest")
    assert json.loads(report.read_text())["environment"]["CKPTMGR_RESUME_FROM"] == ""


def test_or_start_without_command(make_store: MakeStore, cli_here: Cli) -> None:
    """Without COMMAND: exit 0, path null, and no line on stdout that a script could take for a path."""
    store = make_store("local")
    plain = cli_here("resume", f"{store.url}/run", "--or-start")
    assert (plain.returncode, plain.stdout) == (0, "")
    assert f"{store.url}/run" in plain.stderr
    document = cli_here("resume", f"{store.url}/run", "--or-start", "--json")
    assert json.loads(document.stdout) == {
        "path": None,
        "id": None,
        "step": None,
        "source": None,
        "skipped": [],
        "drift": [],
        "conditions": {},
    }


def test_or_start_does_not_start_where_there_is_something_to_resume(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, tmp_path: Path
) -> None:
    """It is "or": with a checkpoint the command gets its path."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", "--or-start", *reporting(report, "{}")).returncode == 0
    assert json.loads(report.read_text())["words"] == [str(tmp_path / "run" / "checkpoint-100")]


@pytest.mark.parametrize(
    "what", ["uncommitted", "foreign checkpoint", "foreign file", "no run at all", "pruned", "other lineage"]
)
@pytest.mark.parametrize("kind", ["local", "oss"])
def test_or_start_is_refused_where_there_is_data(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, kind: str, what: str
) -> None:
    """Data that cannot be resumed is not "no data": exit 3, the command is not started, nothing is changed."""
    store = make_store(kind)
    url = f"{store.url}/run"
    (stem,) = push_steps(url, 100)
    manifest = f"run/manifests/{stem}.json"
    data = {key: value for key, value in store.snapshot("run/").items() if "/checkpoints/" in key}
    if what == "uncommitted":
        store.delete(manifest)
    elif what == "pruned":
        closing = {
            "format": "ckptmgr",
            "version": 1,
            "id": stem,
            "closed": "pruned",
            "closed_at": "2026-01-01T00:00:00Z",
        }
        store.put(manifest, json.dumps(closing).encode())
        for key in data:
            store.delete(key)
    elif what == "other lineage":
        fresh = {"format": "ckptmgr", "version": 1, "attempt": 2, "how": "fresh"}
        store.put("run/attempts/000002.json", json.dumps(fresh).encode())
    else:
        for key in store.snapshot("run/"):
            if stem in key or what == "no run at all":
                store.delete(key)
        name = "checkpoint-500/model.bin" if what == "no run at all" else "checkpoints/checkpoint-500/model.bin"
        store.put(f"run/{'notes.txt' if what == 'foreign file' else name}", b"copied by hand")
    before = store.snapshot()
    for selector in ("latest", "500"):
        result = cli_here("resume", url, selector, "--or-start", "--", "touch", tmp_path / "STARTED")
        refused(result, 3, url)
    assert store.snapshot() == before
    assert not (tmp_path / "STARTED").exists()


def test_or_start_is_refused_when_the_store_cannot_be_asked(
    make_store: MakeStore, cli_here: Cli, tmp_path: Path
) -> None:
    """ "Could not look" is never "nothing there" (I7): each of the look-ups may fail, none lets the command start."""
    store = make_store("oss")
    for skip in range(20):
        fault = Fault(status=403, code="AccessDenied", times=1, skip=skip)
        with store.server.faults.injected(fault) as active:
            result = cli_here("resume", f"{store.url}/run", "--or-start", "--", "touch", tmp_path / "STARTED")
        if not active.hits:
            break
        refused(result, 4, store.url)
        assert not (tmp_path / "STARTED").exists()
    assert skip > 1
    assert result.returncode == 0
    assert (tmp_path / "STARTED").exists()
