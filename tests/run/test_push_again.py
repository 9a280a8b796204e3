"""`push` where the store has lost something, before it or meanwhile; and where no run may be."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.run.doctor import Question, examine
from ckptmgr.run.driver import StoreDriver
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
MakeCheckpoint = Callable[..., Path]

FILES = {"model.bin": b"w" * 2000, "config.json": b"{}", "sub/more.bin": b"m" * 10}


@pytest.mark.parametrize("kind", ["local", "s3", "oss"])
def test_files_that_the_store_has_lost_are_sent_again(
    kind: str, make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """The same id, whole again; only what was missing or of another size is sent, and it is said which."""
    store = make_store(kind)
    url = f"{store.url}/run"
    stem = cli_here("push", make_checkpoint(100, FILES), url).stdout.strip()
    cli_here("push", make_checkpoint(200, FILES), url)
    whole = store.snapshot()
    store.delete(f"run/checkpoints/{stem}/model.bin")
    store.put(f"run/checkpoints/{stem}/sub/more.bin", b"m" * 9)
    if kind == "oss":
        store.server.log.clear()
    again = cli_here("push", make_checkpoint(100, FILES, under="elsewhere"), url, "--tag", "good")
    assert (again.returncode, again.stdout) == (0, f"{stem}\n")
    assert f"model.bin is missing in {url}: it was sent again" in again.stderr
    assert "sub/more.bin has 9 bytes instead of 10" in again.stderr
    assert f"was there already, 2 files of it sent again in {url}" in again.stderr
    store.delete("run/tags/good.json")
    assert store.snapshot() == whole
    if kind == "oss":
        sent = {entry.key.split("/checkpoints/")[-1] for entry in store.server.log if entry.method == "PUT"}
        assert {key for key in sent if key.startswith(stem)} == {f"{stem}/model.bin", f"{stem}/sub/more.bin"}
    assert cli_here("verify", url).returncode == 0
    document = json.loads(cli_here("push", make_checkpoint(100, FILES), url, "--json").stdout)
    assert (document["existed"], document["repaired"]) == (True, [])


def test_all_files_of_a_checkpoint_are_gone(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """The newest one, with nothing left of it but its manifest."""
    store = make_store("s3")
    url = f"{store.url}/run"
    cli_here("push", make_checkpoint(100, FILES), url)
    for key in store.keys("run/checkpoints/"):
        store.delete(key)
    assert cli_here("verify", url, "--quick").returncode == 5
    document = json.loads(cli_here("push", make_checkpoint(100, FILES), url, "--json").stdout)
    assert document["repaired"] == sorted(FILES)
    assert cli_here("verify", url).returncode == 0
    listed = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [row["state"] for row in listed] == ["committed"]


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_damage_that_was_seen_here_is_repaired(
    kind: str, make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """Bytes of the right number: the store's checksum may be of the wrong ones, and a disk has none. What `verify` has noted is read, all of it."""
    store = make_store(kind)
    url = f"{store.url}/run"
    stem = cli_here("push", make_checkpoint(100, FILES), url).stdout.strip()
    whole = store.snapshot()
    store.put(f"run/checkpoints/{stem}/model.bin", b"x" * 2000)
    store.put(f"run/checkpoints/{stem}/sub/more.bin", b"x" * 10)
    assert cli_here("verify", url).returncode == 5
    document = json.loads(cli_here("push", make_checkpoint(100, FILES), url, "--json").stdout)
    assert document["repaired"] == ["model.bin", "sub/more.bin"]
    assert store.snapshot() == whole
    rows = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [row["state"] for row in rows] == ["committed"]


def test_a_version_of_an_artifact_is_repaired(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """The latest, and the one that is asked for; a directory and a single file."""
    store = make_store("s3")
    directory = make_checkpoint(100, FILES)
    for url, what, lost in (
        (f"{store.url}/model", directory, "config.json"),
        (f"{store.url}/report", directory / "model.bin", "model.bin"),
    ):
        words = ("artifact", "push", what, url)
        first = cli_here(*words)
        whole = store.snapshot()
        (key,) = (key for key in store.keys(f"{url.rsplit('/', 1)[-1]}/") if key.endswith(lost))
        for more in ((), ("--version", "1")):
            store.delete(key)
            again = cli_here(*words, *more)
            assert (again.returncode, again.stdout) == (0, first.stdout)
            assert f"{lost} is missing in {url}: it was sent again" in again.stderr
            assert "1 file of it sent again" in again.stderr
            assert store.snapshot() == whole
        assert json.loads(cli_here(*words, "--json").stdout)["repaired"] == []


def test_a_store_that_cannot_take_the_repair(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """Exit 4, as for any push; nothing claims to be whole."""
    store = make_store("oss")
    url = f"{store.url}/run"
    stem = cli_here("push", make_checkpoint(100, FILES), url).stdout.strip()
    store.delete(f"run/checkpoints/{stem}/model.bin")
    refuse = Fault(method="PUT", key="*/model.bin", status=403, code="AccessDenied", times=None)
    with store.server.faults.injected(refuse):
        failed = cli_here("push", make_checkpoint(100, FILES), url)
    assert (failed.returncode, failed.stdout) == (4, "")
    assert cli_here("verify", url, "--quick").returncode == 5
    assert cli_here("push", make_checkpoint(100, FILES), url).returncode == 0


def test_objects_that_vanish_during_a_push_are_sent_again(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the manifest is written, one listing says that all is there."""
    store = make_store("oss")
    url = f"{store.url}/run"
    look, looks = StoreDriver._missing, list[list[str]]()

    def after_a_wipe(self: StoreDriver, prefix: str, entries: Any) -> list[str]:
        if not looks:
            store.delete(f"run/{prefix}/model.bin")
            store.server.log.clear()
        looks.append(look(self, prefix, entries))
        return looks[-1]

    monkeypatch.setattr(StoreDriver, "_missing", after_a_wipe)
    pushed = cli_here("push", make_checkpoint(100, FILES), url)
    assert (pushed.returncode, looks) == (0, [["model.bin"], []])
    stem = pushed.stdout.strip()
    assert store.get(f"run/checkpoints/{stem}/model.bin") == FILES["model.bin"]
    listings = [entry for entry in store.server.log if entry.query.get("prefix", "").endswith(f"/checkpoints/{stem}/")]
    assert len(listings) == 2  # one a look


def test_a_run_that_vanishes_during_a_push(
    make_store: MakeStore, cli_here: Cli, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is committed into the place where it was (7); the repeat makes it anew."""
    store = make_store("s3")
    url = f"{store.url}/run"
    look = StoreDriver._missing

    def after_a_wipe(self: StoreDriver, prefix: str, entries: Any) -> list[str]:
        for key in store.keys("run/"):
            store.delete(key)
        return look(self, prefix, entries)

    with monkeypatch.context() as patch:
        patch.setattr(StoreDriver, "_missing", after_a_wipe)
        pushed = cli_here("push", make_checkpoint(100, FILES), url)
    assert pushed.returncode == 7
    assert f"{url} is gone" in pushed.stderr
    assert store.keys("run/") == []
    assert cli_here("push", make_checkpoint(100, FILES), url).returncode == 0
    assert cli_here("verify", url).returncode == 0


@pytest.mark.parametrize("place", [".", "run", "a/b", "../link/run"])
def test_a_run_inside_the_pushed_directory_is_refused(
    place: str, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
    """Each push would hold all earlier ones: exit 2, and nothing is made."""
    directory = make_checkpoint(100, FILES)
    (directory.parent / "link").symlink_to(directory)
    before = sorted(directory.rglob("*"))
    refused = cli_here("push", directory, directory / place)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "which is to be pushed" in refused.stderr
    assert sorted(directory.rglob("*")) == before


def test_a_local_tier_is_no_run_to_push_to(tmp_path: Path, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """What lies there is the queue of uploads of a training."""
    tier = LocalTier.open_or_create(tmp_path / "tier", uuid="u")
    tier.hold()
    tier.release()
    before = sorted(tier.root.rglob("*"))
    for name in (tier.root, f"file://{tier.root}"):
        refused = cli_here("push", make_checkpoint(100, FILES), name)
        assert refused.returncode == 2
        assert "is a local tier" in refused.stderr
    assert sorted(tier.root.rglob("*")) == before


def test_a_store_that_ends_with_the_process(tmp_path: Path, make_checkpoint: MakeCheckpoint) -> None:
    """A commit there is told with one line of warning, which is no error; and the doctor knows as well."""
    url = f"memory://{tmp_path.name}/x"
    for words in (("push", make_checkpoint(100, FILES)), ("artifact", "push", make_checkpoint(100, FILES))):
        pushed = subprocess.run(
            [sys.executable, "-m", "ckptmgr.cli.main", *map(str, words), url],
            check=False,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert pushed.returncode == 0, pushed.stderr
        (line,) = [line for line in pushed.stderr.splitlines() if "warning" in line]
        assert line.endswith(f"{url} is kept in the memory of this process, and is gone when it ends")
    (verdict,) = [one for one in examine(Question(url=url)) if one.check == "lasting"]
    assert verdict.level == "warning"
    assert [one for one in examine(Question(url=str(tmp_path))) if one.check == "lasting"] == []
