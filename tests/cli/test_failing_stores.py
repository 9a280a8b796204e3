"""Stores and disks that refuse or fail: exit 4, one line, nothing changed, and never taken for empty."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.outcomes import paths_in, refused
from ckptmgr.testing.stores import DirectoryStore, Store
from ckptmgr.testing.waits import Stopwatch

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
Commands = Callable[[str, Path], list[list[str]]]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


def as_whom(store: Store, key: str = "", secret: str = "") -> Mapping[str, str]:
    """The variables that hold a key and a secret for this kind of store."""
    names = (
        ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET")
        if store.name == "oss"
        else ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    )
    identity = store.server.identities[0]
    return dict(zip(names, (key or identity.access_key, secret or identity.secret_key), strict=True))


@pytest.mark.parametrize("kind", ["s3", "oss"])
@pytest.mark.parametrize("wrong", ["secret", "key", "none"])
def test_wrong_credentials(
    some_commands: Commands,
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    wrong: str,
) -> None:
    """Refused by the store (4), in one line that names the variables to check and not their values."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    values = as_whom(store, **({} if wrong == "none" else {wrong: "not-the-right-one"}))
    for name, value in values.items():
        monkeypatch.delenv(name) if wrong == "none" else monkeypatch.setenv(name, value)
    before, here = store.snapshot(), paths_in(tmp_path)
    for words in some_commands(f"{store.url}/run", make_checkpoint(100)):
        result = cli_here(*words)
        refused(result, 4, *values)
        assert "not-the-right-one" not in result.stderr
        assert store.server.identities[0].secret_key not in result.stderr
    assert store.snapshot() == before
    assert paths_in(tmp_path) == here


@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_no_such_bucket(
    some_commands: Commands,
    make_store: MakeStore,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    tmp_path: Path,
    kind: str,
) -> None:
    """A bucket that does not exist is not an empty one: 4, and no bucket is created."""
    store = make_store(kind)
    url = store.url.replace("bkt-", "nobkt-")
    for words in some_commands(f"{url}/run", make_checkpoint(100)):
        refused(cli_here(*words), 4, url, "NoSuchBucket", "create the bucket or correct the URL")
    assert not (tmp_path / "trained" / "STARTED").exists()


@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_no_permission_to_list(
    some_commands: Commands,
    every_command: Commands,
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Who may not list cannot know that there is nothing (I7): 4 and "no permission to list" for a run, for none, and for the store."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    before = store.snapshot()
    for name, value in store.server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    directory = make_checkpoint(100)
    for words in [
        ["ls", store.url],
        *every_command(f"{store.url}/run", directory),
        # The first push of a run goes on, see K014.
        *(words for words in some_commands(f"{store.url}/no", directory) if words[0] != "push"),
    ]:
        result = cli_here(*words)
        refused(result, 4, "no permission to list", store.url)
        assert "empty" not in result.stderr
    assert store.snapshot() == before
    assert not (directory.parent / "STARTED").exists()


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the waits in between."""
    monkeypatch.setattr("ckptmgr.backends.retry._JITTER", SimpleNamespace(uniform=lambda low, high: 0.0))


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_store_that_fails_for_ever(
    some_commands: Commands,
    every_command: Commands,
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    kind: str,
) -> None:
    """A store that answers 5xx to everything, or to listings only, is unavailable (4), never empty (I7), and COMMAND is not started."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    before, directory = store.snapshot(), make_checkpoint(100)
    faults = store.server.faults
    listings = Fault(status=500, times=None, key="", method="GET")
    for fault, commands in ((Fault(status=503, times=None), every_command), (listings, some_commands)):
        with faults.injected(fault):
            for words in [["ls", store.url], *commands(f"{store.url}/run", directory)]:
                result = cli_here(*words)
                refused(result, 4, store.url.split("/")[2], "gave up after")
                assert "empty" not in result.stderr
    assert store.snapshot() == before
    assert not (directory.parent / "STARTED").exists()


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_a_store_that_lists_nothing_of_a_run_it_has(
    every_command: Commands,
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """An empty listing beside a run.json is behind, or wrong: nothing starts from scratch, and nothing is written (I7)."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    monkeypatch.setattr("ckptmgr.run.directory._made", set())  # another process, later
    before, directory = store.snapshot(), make_checkpoint(200)
    nothing = b"<?xml version='1.0'?><ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    empty = Fault(
        status=200, times=None, key="", method="GET", match=lambda seen: "uploads" not in seen.query, document=nothing
    )
    with store.server.faults.injected(empty):
        for words in every_command(f"{store.url}/run", directory):
            refused(cli_here(*words), 4, f"{store.url}/run", "its listing is behind")
    assert store.snapshot() == before
    assert not (directory.parent / "STARTED").exists()


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_store_that_is_down(
    make_store: MakeStore,
    push_steps: PushSteps,
    cli_here: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
) -> None:
    """Nobody listens at the endpoint: 4 within seconds, with the endpoint in the line, and COMMAND is not started."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    monkeypatch.setenv("OSS_ENDPOINT" if kind == "oss" else "AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    watch = Stopwatch()
    refused(
        cli_here("resume", f"{store.url}/run", "--or-start", "--", "touch", tmp_path / "STARTED"),
        4,
        "http://127.0.0.1:9",
    )
    assert watch.seconds < 20
    assert not (tmp_path / "STARTED").exists()


@pytest.mark.usefixtures("_no_waiting")
def test_a_run_that_may_not_be_read_is_not_hidden_in_a_list(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli
) -> None:
    """`ls STORE` shows the runs it can read, null for the one that is refused, and ends with 4."""
    store = make_store("moto")
    push_steps(f"{store.url}/a", 100)
    push_steps(f"{store.url}/b", 200)
    with store.server.faults.injected(Fault(status=403, code="AccessDenied", times=None, key="*/b/*")):
        listed = cli_here("ls", store.url, "--json")
    assert listed.returncode == 4
    rows = json.loads(listed.stdout)["runs"]
    assert [(row["run"], row["checkpoints"], row["latest_step"]) for row in rows] == [("a", 1, 100), ("b", None, None)]
    assert "AccessDenied" in listed.stderr


def test_unwritable_target(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path) -> None:
    """A target below a file cannot be made: a mistake (2), named before anything is fetched."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    (tmp_path / "file").write_bytes(b"x")
    refused(cli_here("resume", f"{store.url}/run", "--to", tmp_path / "file" / "x"), 2, "file", " - ")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_fresh_start_over_an_existing_run(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path) -> None:
    """A script that starts from scratch over a run with commits is refused (7) before its first step; the run stays as it was (I12)."""
    from ckptmgr import CheckpointManager

    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    before = store.snapshot()
    manager = CheckpointManager(f"{store.url}/run", local_dir=tmp_path / "tier")
    with pytest.raises(CkptmgrError) as caught, manager:
        manager.begin()
    assert caught.value.exit_code == 7
    assert "step 100" in str(caught.value)
    assert caught.value.hint
    assert store.snapshot() == before
    assert isinstance(store, DirectoryStore)
