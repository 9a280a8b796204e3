"""`push`: committed when it returns, the same bytes only once, and what a failure leaves for the repeat."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.journal import Journal
from ckptmgr.run.push import journal_root
from ckptmgr.run.start import claim_attempt
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


def test_push_as_json(store: Store, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """It creates the run and attempt 1; the store holds plain copies and the manifest."""
    files = {"model.bin": b"w" * 2000, "sub/empty": b"", "深/ü.bin": b"name"}
    pushed = cli_here("push", make_checkpoint(100, files), f"{store.url}/run", "--metric", "eval_loss=0.5", "--json")
    assert (pushed.returncode, pushed.stderr) == (0, "")
    document = json.loads(pushed.stdout)
    stem = document.pop("id")
    assert document == {"step": 100, "existed": False, "repaired": [], "files": 3, "size_bytes": 2004}
    assert stem.startswith("000001-000000000100-000001-")
    assert store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{stem}/{name}": data for name, data in files.items()
    }
    manifest = json.loads(store.get(f"run/manifests/{stem}.json"))
    assert (manifest["metrics"], manifest["reasons"], manifest["attempt"]) == ({"eval_loss": 0.5}, ["push"], 1)
    others = {key for key in store.snapshot() if stem not in key}
    assert others == {"run/run.json", "run/attempts/000001.json"}
    assert list(Journal(journal_root(f"{store.url}/run")).entries()) == []


def test_push_for_people(make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """stdout is the id and a newline; what happened is on stderr."""
    url = f"{make_store('local').url}/run"
    pushed = cli_here("push", make_checkpoint(100), url)
    stem = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"][0]["id"]
    assert pushed.stdout == f"{stem}\n"
    assert pushed.stderr == f"step 100, 2 files, 1.1 kB: committed in {url}\n"


def test_same_bytes_are_the_existing_checkpoint(store: Store, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """Repeating a push changes nothing, sends no data, and answers with the same id."""
    url = f"{store.url}/run"
    first = cli_here("push", make_checkpoint(100), url).stdout
    before = store.snapshot()
    if store.name == "oss":
        store.server.log.clear()
    again = cli_here("push", make_checkpoint(100, under="elsewhere"), url)
    assert (again.returncode, again.stdout) == (0, first)
    assert "was there already" in again.stderr
    assert store.snapshot() == before
    if store.name == "oss":
        assert [entry.key for entry in store.server.log if entry.method not in ("GET", "HEAD")] == []
    assert json.loads(cli_here("push", make_checkpoint(100), url, "--json").stdout)["existed"] is True


def test_metrics_for_what_is_there_already(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """A manifest is written once: other metrics than it has are not recorded, and that is said."""
    store = make_store("local")
    words = ("push", make_checkpoint(100), f"{store.url}/run", "--metric")
    cli_here(*words, "loss=0.5")
    before = store.snapshot()
    assert "warning" not in cli_here(*words, "loss=0.5").stderr
    again = cli_here(*words, "zz=5")
    (line,) = [line for line in again.stderr.splitlines() if "warning" in line]
    assert "not recorded" in line
    assert "loss=0.5" in line
    assert again.returncode == 0
    assert store.snapshot() == before


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no place where nobody can make a directory")
def test_no_place_for_the_journal(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state directory is one that the user has not named: the message says how to name one."""
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nobody")
    done = cli_here("push", make_checkpoint(100), f"{make_store('local').url}/run")
    assert done.returncode == 4
    assert "set XDG_STATE_HOME" in done.stderr


def test_other_bytes_are_a_further_save(store: Store, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """The same step with other bytes: both are there, and the second is the newest save of the step."""
    url = f"{store.url}/run"
    first = cli_here("push", make_checkpoint(100, {"model.bin": b"one"}), url).stdout.strip()
    data = store.snapshot(f"run/checkpoints/{first}/")
    second = cli_here("push", make_checkpoint(100, {"model.bin": b"two"}), url).stdout.strip()
    assert second > first
    assert second.startswith("000001-000000000100-000002-")
    assert store.snapshot(f"run/checkpoints/{first}/") == data
    assert json.loads(cli_here("show", url, "100", "--json").stdout)["id"] == second
    resumed = Path(cli_here("resume", url, "100").stdout.strip())
    assert resumed.read_bytes() == b"two"


def test_step_of_a_directory(make_store: MakeStore, cli_here: Cli, tmp_path: Path) -> None:
    """--step, else the number that the name ends in, else trainer_state.json, whatever form the path has."""
    url = f"{make_store('local').url}/run"

    def step(name: str, *options: str) -> int:
        (tmp_path / name.rstrip("/")).mkdir(parents=True, exist_ok=True)
        (tmp_path / name.rstrip("/") / "model.bin").write_bytes(name.encode())
        pushed = cli_here("push", name, url, *options, "--json")
        assert pushed.returncode == 0, pushed.stderr
        return int(json.loads(pushed.stdout)["step"])

    assert step("checkpoint-500") == 500
    assert step("checkpoint-500/") == 500
    assert step("checkpoint-500", "--step", "7") == 7
    assert step("global_step0042") == 42
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "trainer_state.json").write_text(json.dumps({"global_step": 900}))
    assert step("final") == 900
    assert step("final", "--step", "0") == 0


@pytest.mark.parametrize("state", [b"{}", b"not json", b'{"global_step": "9"}', b'{"global_step": -1}', b"[]"])
def test_step_that_trainer_state_does_not_say(
    make_store: MakeStore, cli_here: Cli, tmp_path: Path, state: bytes
) -> None:
    """A trainer_state.json without a usable step is no answer: exit 2, --step."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "trainer_state.json").write_bytes(state)
    result = cli_here("push", "final", f"{make_store('local').url}/run")
    assert result.returncode == 2
    assert "--step" in result.stderr


def test_tag(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """The tag is set after the commit, moves with the next push, and is set on an existing one as well."""
    url = f"{store.url}/run"
    (first,) = push_steps(url, 100, options=["--tag", "best"])
    assert json.loads(store.get("run/tags/best.json"))["id"] == first
    (second,) = push_steps(url, 200, options=["--tag", "best"])
    assert json.loads(store.get("run/tags/best.json"))["id"] == second
    assert push_steps(url, 100, options=["--tag", "best"]) == [first]
    assert json.loads(cli_here("show", url, "tag:best", "--json").stdout)["id"] == first


def test_attempts(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """push joins the highest attempt; --new-attempt begins a further one that goes on from the newest."""
    store = make_store("local")
    url = f"{store.url}/run"
    (first,) = push_steps(url, 100)
    push_steps(url, 200)
    (third,) = push_steps(url, 150, options=["--new-attempt"])
    assert third.startswith("000002-000000000150-000001-")
    record = json.loads(store.get("run/attempts/000002.json"))
    assert (record["attempt"], record["how"], record["parent"][:19]) == (2, "auto", "000001-000000000200")
    (fourth,) = push_steps(url, 160)
    assert fourth.startswith("000002-000000000160-000002-")
    # The same bytes of the same step are the checkpoint there is, whichever attempt of the lineage made it.
    (fifth,) = push_steps(url, 100)
    assert fifth == first
    rows = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [row["attempt"] for row in rows] == [1, 1, 2, 2]
    assert rows[0]["id"] == first


def test_links_are_pushed_as_what_they_point_to(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """Hugging Face caches hold links: the store gets the bytes."""
    store = make_store("local")
    directory = make_checkpoint(100, {"real.bin": b"bytes"})
    (directory / "link.bin").symlink_to("real.bin")
    stem = cli_here("push", directory, f"{store.url}/run").stdout.strip()
    assert store.get(f"run/checkpoints/{stem}/link.bin") == b"bytes"


def test_unreadable_folder_is_not_left_out(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that may not be read fails the push (4) before the run is created; os.walk alone would pass over it."""
    store = make_store("local")
    directory = make_checkpoint(100)
    real = os.scandir

    def scandir(path: str) -> object:
        if os.fspath(path) == str(directory / "sub"):  # chmod does not keep root out
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scandir)
        result = cli_here("push", directory, f"{store.url}/run")
    assert result.returncode == 4
    assert str(directory / "sub") in result.stderr
    assert store.keys() == []


# --- failures -----------------------------------------------------------------------------------------------------------


def test_refused_in_the_middle_stays_pending(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """Exit 4, no commit, the journal's entry stays; the repeat commits under the same id and sends only what is missing."""
    store = make_store("oss")
    url = f"{store.url}/run"
    directory = make_checkpoint(100, {"a.bin": b"a" * 100, "b.bin": b"b" * 100, "c.bin": b"c" * 100})
    refuse = Fault(method="PUT", key="*/b.bin", status=403, code="AccessDenied", times=None)
    with store.server.faults.injected(refuse):
        failed = cli_here("push", directory, url)
    assert (failed.returncode, failed.stdout) == (4, "")
    assert "b.bin" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    assert store.keys("run/manifests/") == []
    (entry,) = Journal(journal_root(url)).entries()
    assert (entry.state, entry.is_pending, "b.bin" in entry.confirmed) == ("failed", True, False)
    stored = {key.rsplit("/", 1)[-1] for key in store.keys("run/checkpoints/")}
    assert stored >= entry.confirmed
    listed = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [(row["id"], row["state"]) for row in listed] == [(str(entry.remote), "uncommitted")]

    store.server.log.clear()
    pushed = cli_here("push", directory, url)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == str(entry.remote)
    sent = [
        log.key.rsplit("/", 1)[-1] for log in store.server.log if log.method == "PUT" and "/checkpoints/" in log.key
    ]
    assert sorted(sent) == sorted({"a.bin", "b.bin", "c.bin"} - stored)
    assert list(Journal(journal_root(url)).entries()) == []


def test_refused_manifest_is_no_commit(make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """All data sent, and the manifest refused: exit 4, and nothing is resumed from it."""
    store = make_store("oss")
    url = f"{store.url}/run"
    with store.server.faults.injected(
        Fault(method="PUT", key="*/manifests/*", status=403, code="AccessDenied", times=None)
    ):
        assert cli_here("push", make_checkpoint(100), url).returncode == 4
    assert cli_here("resume", url).returncode == 3
    store.server.log.clear()
    assert cli_here("push", make_checkpoint(100), url).returncode == 0
    assert [log.key for log in store.server.log if log.method == "PUT" and "/checkpoints/" in log.key] == []
    assert cli_here("resume", url).returncode == 0


def test_lost_answer_to_the_commit_is_the_same_checkpoint(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """The manifest arrived and the answer did not: settled by reading it back, one checkpoint, exit 0."""
    store = make_store("oss")
    url = f"{store.url}/run"
    with store.server.faults.injected(Fault(method="PUT", key="*/manifests/*", drop="after", times=1)) as fault:
        pushed = cli_here("push", make_checkpoint(100), url)
    assert fault.hits == 1
    assert pushed.returncode == 0, pushed.stderr
    assert store.keys("run/manifests/") == [f"run/manifests/{pushed.stdout.strip()}.json"]


def test_file_that_changes_while_it_is_pushed(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit 5, nothing is committed (I10); the repeat commits what is there now."""
    store = make_store("oss")
    url = f"{store.url}/run"
    directory = make_checkpoint(100, {"model.bin": b"before"})
    described = describe

    def then_changed(path: Path, **options: Any) -> object:
        entries = described(path, **options)
        (path / "model.bin").write_bytes(b"after!")
        return entries

    with monkeypatch.context() as patch:
        patch.setattr("ckptmgr.run.push.describe", then_changed)
        result = cli_here("push", directory, url)
    assert result.returncode == 5
    assert "model.bin" in result.stderr
    assert store.keys("run/manifests/") == []
    stem = cli_here("push", directory, url).stdout.strip()
    assert store.get(f"run/checkpoints/{stem}/model.bin") == b"after!"


def test_a_repeat_after_a_new_attempt_does_not_turn_the_run_back(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """The same bytes are the checkpoint of an earlier attempt; saved again in the new one, the old step would be the newest."""
    store = make_store("local")
    first, second = push_steps(f"{store.url}/run", 100, 200)
    claim_attempt(RunDirectory.open(f"{store.url}/run"), how="auto", parent=Stem.parse(second))
    again = cli_here("push", make_checkpoint(100), f"{store.url}/run", "--json")
    assert json.loads(again.stdout)["id"] == first
    rows = json.loads(cli_here("ls", f"{store.url}/run", "--json").stdout)["checkpoints"]
    assert [row["id"] for row in rows] == [first, second]
