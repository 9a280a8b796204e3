"""Prune that is killed, raced by a reader, or stands before a damaged checkpoint."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.atomic import TEMP_PREFIX
from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import ConflictError, TransientBackendError
from ckptmgr.core.retention import KeepLast
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.prune import prune
from ckptmgr.run.push import push
from ckptmgr.run.resume import Resumed, resume
from ckptmgr.run.start import claim_attempt
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, transient
from ckptmgr.testing.stores import Store

Cli = Callable[..., subprocess.CompletedProcess[str]]
Kill = Callable[..., bool]
Ask = Callable[..., Any]

DEADLINE_S = 60.0


@pytest.fixture
def pushed(store: Store, tmp_path: Path) -> list[str]:
    """A run with three checkpoints, 100 to 300, of two files each: their ids, oldest first."""
    run = RunDirectory.open_or_create(f"{store.url}/run")
    ids = []
    for step in (100, 200, 300):
        source = tmp_path / f"checkpoint-{step}"
        (source / "sub").mkdir(parents=True)
        (source / "a.bin").write_bytes(b"a%d" % step)
        (source / "sub/b.bin").write_bytes(b"b%d" % step)
        ids.append(str(push(source, run).stem))
    return ids


def behind_faults(store: Store) -> tuple[RunDirectory, FaultyBackend]:
    """The run of the store, through a backend that fails on demand."""
    fs, root = open_store(f"{store.url}/run")
    faulty = FaultyBackend(fs)
    return RunDirectory.open(f"{store.url}/run", fs=faulty, root=root), faulty


def test_a_prune_killed_after_each_operation_is_finished_by_the_next(
    store: Store, pushed: list[str], kill: Kill, ask: Ask
) -> None:
    """Each prune dies after its first change; what is listed is whole all the time, and in the end only the newest is left."""
    url = f"{store.url}/run"
    newest = store.snapshot(f"run/checkpoints/{pushed[-1]}/")
    deaths = 0
    while kill("prune", url=url, keep_last=1, kill={"nth": 1, "when": "after"}):
        deaths += 1
        rows = ask("ls", url, "--all", "--check")["checkpoints"]
        assert {row["state"] for row in rows} == {"committed"}
        assert rows[-1]["id"] == pushed[-1]
        assert store.snapshot(f"run/checkpoints/{pushed[-1]}/") == newest
    # Two checkpoints: each its closing record and two files.
    assert deaths >= 6
    assert store.snapshot("run/checkpoints/") == newest
    assert [row["id"] for row in ask("ls", url, "--all")["checkpoints"]] == [pushed[-1]]
    closed = [json.loads(store.get(f"run/manifests/{stem}.json"))["closed"] for stem in pushed[:2]]
    assert closed == ["pruned", "pruned"]
    if store.name == "local":
        assert [path.name for path in (store.root / "run/checkpoints").iterdir()] == [pushed[-1]]  # type: ignore[attr-defined]


def test_a_prune_whose_deletions_fail_is_finished_by_the_next(store: Store, pushed: list[str], ask: Ask) -> None:
    """The store refuses to delete for a while: nothing damaged is listed, and the next prune completes the removal."""
    run, faulty = behind_faults(store)
    faulty.add(StoreFault(verb="rm_file", path="*/checkpoints/*", skip=1, error=transient))
    with pytest.raises(TransientBackendError):
        prune(run, KeepLast(1))
    assert [row["id"] for row in ask("ls", run.url, "--all", "--check")["checkpoints"]] == pushed[1:]
    done = prune(run, KeepLast(1))
    assert [str(stem) for stem in done.finished] == pushed[:1]
    assert [verdict.manifest.id for verdict in done.deleted] == pushed[1:2]
    assert {key.split("/")[2] for key in store.keys("run/checkpoints/")} == {pushed[-1]}


def test_what_a_killed_upload_left_in_a_local_store_goes_with_the_checkpoint(
    make_store: Callable[[str], Store], tmp_path: Path
) -> None:
    """A temporary file beside the data does not keep the folder of a pruned checkpoint for ever."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    ids = []
    for step in (100, 200):
        source = tmp_path / f"checkpoint-{step}"
        source.mkdir()
        (source / "a.bin").write_bytes(b"%d" % step)
        ids.append(str(push(source, run).stem))
    store.put(f"run/checkpoints/{ids[0]}/{TEMP_PREFIX}1-00ff", b"half a file")
    assert prune(run, KeepLast(1)).finished == ()
    assert store.keys("run/checkpoints/") == [f"run/checkpoints/{ids[1]}/a.bin"]
    assert [path.name for path in (Path(run.root) / "checkpoints").iterdir()] == [ids[1]]
    assert prune(run, KeepLast(1)).finished == ()


def damage_a_file(store: Store, stem: str) -> None:
    """Make one object of the checkpoint shorter than it was."""
    store.put(f"run/checkpoints/{stem}/a.bin", b"a")


def lose_a_file(store: Store, stem: str) -> None:
    store.delete(f"run/checkpoints/{stem}/sub/b.bin")


def garble_the_manifest(store: Store, stem: str) -> None:
    store.put(f"run/manifests/{stem}.json", store.get(f"run/manifests/{stem}.json")[:-40])


@pytest.mark.parametrize("damage", [damage_a_file, lose_a_file, garble_the_manifest])
def test_before_a_damaged_newest_nothing_is_deleted(
    store: Store, pushed: list[str], cli_here: Cli, damage: Callable[[Store, str], None]
) -> None:
    """I8: the newest is short, incomplete or unreadable: prune deletes nothing and ends with 5, naming it."""
    damage(store, pushed[-1])
    before = store.snapshot("run/")
    refused = cli_here("prune", f"{store.url}/run", "--keep-last", 1, "--yes")
    assert refused.returncode == 5
    assert pushed[-1] in refused.stderr
    assert "Traceback" not in refused.stderr
    assert store.snapshot("run/") == before


@pytest.mark.parametrize("kind", ["s3", "moto", "oss"])
def test_before_a_newest_of_other_bytes_nothing_is_deleted(
    kind: str, make_store: Callable[[str], Store], cli_here: Cli, tmp_path: Path
) -> None:
    """I8: the size is right, but the store's own checksum is not that of the manifest."""
    store = make_store(kind)
    run = RunDirectory.open_or_create(f"{store.url}/run")
    ids = []
    for step in (100, 200):
        source = tmp_path / f"checkpoint-{step}"
        source.mkdir()
        (source / "a.bin").write_bytes(b"%d" % step * 1000)
        ids.append(str(push(source, run).stem))
    (tmp_path / "other").write_bytes(b"201" * 1000)
    run.fs.put_file(str(tmp_path / "other"), run.path(f"checkpoints/{ids[-1]}/a.bin"))
    before = store.snapshot("run/")
    refused = cli_here("prune", run.url, "--keep-last", 1, "--yes")
    assert refused.returncode == 5
    assert ids[-1] in refused.stderr
    assert store.snapshot("run/") == before


def start_reading(run: RunDirectory, to: Path) -> tuple[threading.Thread, list[Resumed | Exception]]:
    """Resume the newest in a thread; its outcome comes into the list."""
    outcome: list[Resumed | Exception] = []

    def read() -> None:
        try:
            outcome.append(resume(run, parse_selector("latest"), to=to))
        except Exception as exc:  # noqa: BLE001 - handed to the test
            outcome.append(exc)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, outcome


def test_a_reader_whose_checkpoint_is_pruned_takes_the_next_older(
    store: Store, pushed: list[str], cli: Cli, ask: Ask, tmp_path: Path
) -> None:
    """While the newest is downloaded another host saves a newer one and prunes: the reader takes the next older, and says so."""
    run, faulty = behind_faults(store)
    ask("push", tmp_path / "checkpoint-200", run.url, "--step", 250, "--tag", "stays")
    ask("push", tmp_path / "checkpoint-300", run.url, "--step", 310)
    held = faulty.add(StoreFault(verb="get_file", path="*/sub/b.bin", hold=True))
    thread, outcome = start_reading(run, tmp_path / "target")
    try:
        assert held.reached.wait(DEADLINE_S)
        ask("push", tmp_path / "checkpoint-300", run.url, "--step", 400)
        # Another host has locks of its own: it does not see this reader.
        elsewhere = {"CKPTMGR_LOCK_DIR": str(tmp_path / "locks-of-another-host")}
        done = cli("prune", run.url, "--keep-last", 1, "--yes", "--json", env=elsewhere)
        assert done.returncode == 0, done.stderr
        assert [item["step"] for item in json.loads(done.stdout)["delete"]] == [100, 200, 300, 310]
    finally:
        held.release()
        thread.join(DEADLINE_S)
    (resumed,) = outcome
    assert isinstance(resumed, Resumed)
    assert resumed.manifest.step == 250
    assert [skipped.stem.step for skipped in resumed.skipped] == [310, 300]
    assert all("pruned" in skipped.why or "removed" in skipped.why for skipped in resumed.skipped)
    assert (tmp_path / "target/a.bin").read_bytes() == b"a200"
    assert (tmp_path / "target/sub/b.bin").read_bytes() == b"b200"
    assert sorted(path.name for path in (tmp_path / "target").rglob("*")) == ["a.bin", "b.bin", "sub"]


def test_a_checkpoint_that_is_read_on_this_machine_is_spared(
    store: Store, pushed: list[str], cli: Cli, ask: Ask, tmp_path: Path
) -> None:
    """I8: prune, in a process of its own, passes over what a reader holds, and takes it the next time."""
    run, faulty = behind_faults(store)
    held = faulty.add(StoreFault(verb="get_file", path="*/sub/b.bin", hold=True))
    thread, outcome = start_reading(run, tmp_path / "target")
    try:
        assert held.reached.wait(DEADLINE_S)
        newer = ask("push", tmp_path / "checkpoint-300", run.url, "--step", 400)["id"]
        done = cli("prune", run.url, "--keep-last", 1, "--yes")
        assert done.returncode == 0, done.stderr
        assert pushed[-1] in done.stderr
        assert {key.split("/")[2] for key in store.keys("run/checkpoints/")} == {pushed[-1], newer}
    finally:
        held.release()
        thread.join(DEADLINE_S)
    (resumed,) = outcome
    assert isinstance(resumed, Resumed)
    assert (resumed.manifest.id, resumed.skipped) == (pushed[-1], ())
    assert [item["id"] for item in ask("prune", run.url, "--keep-last", 1, "--yes")["delete"]] == [pushed[-1]]


def test_a_superseded_attempt_does_not_prune(store: Store, pushed: list[str]) -> None:
    """I12: a higher attempt was claimed; prune on behalf of the lower one deletes nothing."""
    run = RunDirectory.open(f"{store.url}/run")
    claim_attempt(run, how="auto", parent=run.history().newest())
    before = store.snapshot("run/")
    with pytest.raises(ConflictError, match="superseded"):
        prune(run, KeepLast(1), attempt=1)
    assert store.snapshot("run/") == before
    assert len(prune(run, KeepLast(1), attempt=2).deleted) == 2
    assert len(pushed) == 3
