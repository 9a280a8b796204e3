"""`artifact …`: what scripts read, what people see, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.faults import Fault
from ckptmgr.testing.outcomes import refused
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]

OPTIONS = {
    "push": ["--version", "--tag", "--from", "--metric", "--meta", "--follow-links", "--json"],
    "pull": ["--to", "--only", "--replace", "--json"],
    "ls": ["--check", "--json"],
    "show": ["--json"],
    "tag": ["--json"],
    "untag": ["--json"],
}


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """A directory to push."""
    (tmp_path / "final" / "tokenizer").mkdir(parents=True)
    (tmp_path / "final" / "model.bin").write_bytes(b"weights")
    (tmp_path / "final" / "tokenizer" / "vocab.json").write_bytes(b"{}")
    return tmp_path / "final"


@pytest.fixture
def ask(cli_here: Cli) -> Callable[..., Any]:
    """Runs `artifact …` that must succeed without a word on stderr, and returns its JSON document."""

    def run(*words: object) -> Any:
        done = cli_here("artifact", *words, "--json")
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)

    return run


@pytest.mark.parametrize("command", OPTIONS)
def test_help_of_a_command(cli_here: Cli, command: str) -> None:
    """Every option with a text, and the exit codes, within 80 columns but for examples that must stay in one piece."""
    told = cli_here("artifact", command, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    found = re.findall(r"^  (--[a-z-]+)(?: \S+)*  +\S|^  (--[a-z-]+)(?: \S+)*$", told.stdout, re.MULTILINE)
    assert sorted({option for pair in found for option in pair if option}) == sorted(OPTIONS[command])
    assert re.search("^  .*Exit codes:", told.stdout, re.MULTILINE)
    assert max(len(line) for line in told.stdout.splitlines() if not line.startswith("    ")) <= 80
    assert cli_here("artifact", command, "-h").stdout == told.stdout


def test_help_of_the_group(cli_here: Cli) -> None:
    """Every command with a line of its own; without a command, the help is what is told (2)."""
    told = cli_here("artifact", "--help")
    listed = dict(re.findall(r"^  ([a-z]+) +(\S.*)$", told.stdout.split("Commands:")[1].split("\n\n")[0], re.MULTILINE))
    assert listed.keys() == OPTIONS.keys()
    bare = cli_here("artifact")
    assert (bare.returncode, bare.stdout) == (2, "")
    assert "Commands:" in bare.stderr


# --- for programs ---------------------------------------------------------------------------------------------------------------


def test_push_and_pull_as_json(
    make_store: MakeStore, ask: Callable[..., Any], push_steps: PushSteps, final: Path, tmp_path: Path
) -> None:
    """Which version it is, what is recorded of it, and where it was put."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 500)
    pushed = ask(
        *("push", final, f"{store.url}/model/", "--from", f"{store.url}/run@500", "--tag", "rc", "--tag", "best"),
        *("--metric", "acc=nan", "--meta", "dataset=v2=final"),
    )
    created = pushed.pop("created_at")
    source = pushed.pop("source")
    assert {name: source[name] for name in ("run", "id", "step", "location")} == {
        "run": "run",
        "id": stem,
        "step": 500,
        "location": "../run",
    }
    version = {
        "artifact": f"{store.url}/model",
        "name": "model",
        "version": 1,
        "id": pushed["id"],
        "latest": True,
        "size_bytes": 9,
        "files": 2,
        "tags": ["best", "rc"],
        "metrics": {"acc": "NaN"},
        "metadata": {"dataset": "v2=final"},
    }
    assert pushed == {**version, "existed": False, "repaired": []}
    assert created.endswith("Z")
    assert ask("push", final, f"{store.url}/model")["existed"] is True
    pulled = ask("pull", f"{store.url}/model@rc", "--to", "got")
    assert pulled == {
        **version,
        "path": str(tmp_path / "got"),
        "fetched_bytes": 9,
        "partial": False,
        "pulled": ["model.bin", "tokenizer/vocab.json"],
        "source": source,
        "created_at": created,
    }
    assert (tmp_path / "got" / "tokenizer" / "vocab.json").read_bytes() == b"{}"
    assert ask("pull", f"{store.url}/model@rc", "--to", "got")["fetched_bytes"] == 0
    some = ask("pull", f"{store.url}/model", "--only", "tokenizer", "--to", "some")
    assert (some["partial"], some["pulled"], some["files"]) == (True, ["tokenizer/vocab.json"], 2)
    assert [path.name for path in (tmp_path / "some").rglob("*.*")] == ["vocab.json"]


def test_ls_as_json(make_store: MakeStore, ask: Callable[..., Any], push_steps: PushSteps, final: Path) -> None:
    """Versions lowest first; of a store, its artifacts and not its runs, which `ls` tells apart by their kind."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 500)
    first = ask("push", final, f"{store.url}/model")
    (final / "model.bin").write_bytes(b"better weights")
    second = ask("push", final, f"{store.url}/model", "--tag", "rc")
    listed = ask("ls", f"{store.url}/model")
    assert (listed["artifact"], listed["name"]) == (f"{store.url}/model", "model")
    for pushed, row, latest in zip((first, second), listed["versions"], (False, True), strict=True):
        wanted = {key: value for key, value in pushed.items() if key not in ("artifact", "name", "existed", "repaired")}
        assert row == {**wanted, "latest": latest, "state": "committed"}
    assert ask("ls", store.url) == {
        "store": store.url,
        "artifacts": [
            {"name": "model", "versions": 2, "latest_version": 2, "latest_id": second["id"], "size_bytes": 25}
        ],
    }
    assert ask("show", f"{store.url}/model@v1")["id"] == first["id"]
    assert ask("tag", f"{store.url}/model", "v1", "prod") == {
        "artifact": f"{store.url}/model",
        "tag": "prod",
        "version": 1,
        "id": first["id"],
    }
    assert ask("untag", f"{store.url}/model", "prod")["version"] == 1


def test_commands_of_runs_take_artifacts(
    make_store: MakeStore, ask: Callable[..., Any], cli_here: Cli, push_steps: PushSteps, final: Path
) -> None:
    """ls shows the kind, verify finds damage, prune guards what is tagged and the latest."""
    store = make_store("local")
    url = f"{store.url}/model"
    push_steps(f"{store.url}/run", 500)
    for content in (b"1", b"2", b"3", b"4"):
        (final / "model.bin").write_bytes(content)
        ask("push", final, url)
    ask("tag", url, "2", "production")
    runs = json.loads(cli_here("ls", store.url, "--json").stdout)["runs"]
    assert {run["run"]: run["kind"] for run in runs} == {"model": "artifact", "run": "checkpoints"}
    pruned = json.loads(cli_here("prune", url, "--keep-last", "1", "--yes", "--json").stdout)
    assert [row["step"] for row in pruned["delete"]] == [1, 3]
    assert [row["version"] for row in ask("ls", url)["versions"]] == [2, 4]
    (key,) = [key for key in store.keys("model/checkpoints/000002-") if key.endswith("model.bin")]
    store.put(key, b"x")
    verified = cli_here("verify", url, "--json")
    assert (verified.returncode, [row["step"] for row in json.loads(verified.stdout)["damaged"]]) == (5, [2])
    assert verified.stderr.endswith(" - pushed again, the files of a version are sent anew\n")
    refused(cli_here("artifact", "pull", f"{url}@production", "--to", "got"), 5, "damaged", "model.bin")


# --- for people -----------------------------------------------------------------------------------------------------------------


def test_push_for_people(make_store: MakeStore, cli_here: Cli, final: Path) -> None:
    """stdout is what pull takes; what happened is on stderr."""
    url = f"{make_store('local').url}/model"
    pushed = cli_here("artifact", "push", final, url)
    assert (pushed.stdout, pushed.stderr) == (f"{url}@v1\n", f"v1, 2 files, 9 B: committed in {url}\n")
    again = cli_here("artifact", "push", final, url)
    assert again.stdout == pushed.stdout
    assert again.stderr == f"v1, 2 files, 9 B: was there already, with the same bytes in {url}\n"
    (final / "model.bin").write_bytes(b"other")
    assert cli_here("artifact", "push", final, url, "--version", "7").returncode == 0
    (final / "model.bin").write_bytes(b"older")
    older = cli_here("artifact", "push", final, url, "--version", "6")
    assert older.stderr.endswith("; it is not the latest version\n")


def test_ls_and_show_for_people(make_store: MakeStore, cli_here: Cli, push_steps: PushSteps, final: Path) -> None:
    """A line for each version, and what one is made of."""
    store = make_store("local")
    url = f"{store.url}/model"
    push_steps(f"{store.url}/run", 500)
    source = ["--from", f"{store.url}/run", "--tag", "rc", "--metric", "acc=0.5", "--meta", "dataset=v2"]
    assert cli_here("artifact", "push", final, url, *source).returncode == 0
    head, _, _, row = cli_here("artifact", "ls", url).stdout.splitlines()
    assert head == f"{url}: 1 version, 9 B, latest: v1"
    for cell in ("v1", "9 B", "rc", "run step 500", "acc=0.5", "committed"):
        assert f" {cell} " in f" {row} "
    assert cli_here("artifact", "ls", store.url).stdout.splitlines()[-1].split() == ["model", "1", "v1", "9", "B"]
    shown = cli_here("artifact", "show", url).stdout
    for line in (f"{url}@v1", "1 (latest)", f"of {store.url}/run", "rc", "acc=0.5", "v2", "tokenizer/vocab.json"):
        assert line in shown


def test_a_version_under_way_is_shown_as_such(make_store: MakeStore, cli_here: Cli, final: Path) -> None:
    """Data without a manifest is no version; it is neither hidden nor the latest."""
    store = make_store("oss")
    url = f"{store.url}/model"
    denied = Fault(method="PUT", key="*/manifests/*", status=403, code="AccessDenied", times=None)
    with store.server.faults.injected(denied):
        refused(cli_here("artifact", "push", final, url), 4, "manifests")
    (row,) = json.loads(cli_here("artifact", "ls", url, "--json").stdout)["versions"]
    assert (row["version"], row["state"], row["latest"]) == (1, "uncommitted", False)
    refused(cli_here("artifact", "pull", url), 3, "has no version yet")


# --- refused ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["push", "final", "{}/a b"], "'a b' is not the name of an artifact"),
        (["push", "final", "{}/model@v1"], "'model@v1' is not the name"),
        (["push", "final", "s3://bucket"], "names no artifact"),
        (["push", "final", "s3://key:secret@bucket"], "must not carry credentials"),
        (["push", "final", "{}/model", "--version", "0"], "0 is not a version"),
        (["push", "final", "{}/model", "--version", "-3"], "-3 is not a version"),
        (["push", "final", "{}/model", "--version", "x"], "--version"),
        (["push", "final", "{}/model", "--tag", "v3"], "is a version, and cannot be a tag"),
        (["push", "final", "{}/model", "--tag", "latest"], "always the highest version"),
        (["push", "final", "{}/model", "--tag", "a/b"], "not a tag"),
        (["push", "final", "{}/model", "--metric", "acc"], "not NAME=NUMBER"),
        (["push", "final", "{}/model", "--meta", "acc"], "not NAME=VALUE"),
        (["push", "empty", "{}/model"], "holds no file"),
        (["push", "nothing", "{}/model"], "does not exist"),
        (["push", "s3://b/final", "{}/model"], "not a directory of this machine"),
        (["pull", "{}/model:v3"], "as in model@v3"),
        (["pull", "{}/model@"], "nothing behind the '@'"),
        (["pull", "{}/model@v0"], "versions are whole numbers from 1"),
        (["pull", "{}/model@a b"], "not a tag"),
        (["ls", "{}/model@v1"], "names one version"),
        (["push", ".", "{}/model"], "lies in"),
        (["tag", "{}/model", "1", "2"], "is a version"),
        (["untag", "{}/model", "a b"], "not a tag"),
        (["show"], "STORE/NAME"),
        (["frobnicate"], "frobnicate"),
    ],
)
def test_bad_input(make_store: MakeStore, cli_here: Cli, final: Path, words: list[str], says: str) -> None:
    """Exit 2, one line, nothing made."""
    store = make_store("local")
    (final.parent / "empty").mkdir()
    refused(cli_here("artifact", *[word.format(store.url) for word in words]), 2, says)
    assert store.keys() == []


def test_nothing_found(
    make_store: MakeStore, cli_here: Cli, push_steps: PushSteps, final: Path, tmp_path: Path
) -> None:
    """Exit 3, and the nearest there is."""
    store = make_store("local")
    refused(cli_here("artifact", "ls", store.url), 3, "nothing is stored")
    push_steps(f"{store.url}/run", 500)
    refused(cli_here("artifact", "ls", store.url), 3, "no artifact at")
    refused(cli_here("artifact", "ls", f"{store.url}/run"), 3, "a run of checkpoints", "ckptmgr ls")
    assert cli_here("artifact", "push", final, f"{store.url}/model", "--tag", "production").returncode == 0
    before = store.snapshot()
    refused(cli_here("artifact", "pull", f"{store.url}/mode1"), 3, "no artifact at")
    refused(cli_here("artifact", "pull", f"{store.url}/model@9"), 3, "has no version 9: there is v1")
    refused(cli_here("artifact", "pull", f"{store.url}/model@prodution"), 3, "did you mean production?")
    refused(cli_here("artifact", "show", f"{store.url}/model@rc"), 3, "its tags are production")
    refused(cli_here("artifact", "pull", f"{store.url}/model", "--only", "optimizer"), 3, "--only optimizer", "weights")
    refused(cli_here("artifact", "tag", f"{store.url}/model", "2", "rc"), 3, "has no version 2")
    refused(cli_here("artifact", "untag", f"{store.url}/model", "prod-uction"), 3, "did you mean production?")
    refused(cli_here("artifact", "push", final, f"{store.url}/model2", "--from", f"{store.url}/run@7"), 3, "steps")
    assert store.snapshot() == before
    assert not list(tmp_path.glob("model*"))


def test_conflicts(make_store: MakeStore, cli_here: Cli, push_steps: PushSteps, final: Path) -> None:
    """Exit 7, and nothing is changed."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 500)
    assert cli_here("artifact", "push", final, f"{store.url}/model").returncode == 0
    before = store.snapshot()
    (final / "model.bin").write_bytes(b"other")
    refused(cli_here("artifact", "push", final, f"{store.url}/run"), 7, "is a run of checkpoints, not an artifact")
    refused(cli_here("push", final, f"{store.url}/model", "--step", "1"), 7, "is an artifact, not a run")
    refused(cli_here("artifact", "push", final, f"{store.url}/run/model"), 7, "name it beside the run")
    refused(cli_here("artifact", "push", final, f"{store.url}/model", "--version", "1"), 7, "never overwritten")
    refused(cli_here("artifact", "pull", f"{store.url}/model", "--to", final), 7, "holds something else")
    assert store.snapshot() == before
