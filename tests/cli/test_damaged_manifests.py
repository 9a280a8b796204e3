"""Manifests that cannot be read: shown, named, passed over, never deleted."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.testing.outcomes import paths_in, refused
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
Commands = Callable[[str, Path], list[list[str]]]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]


def not_json(_: bytes) -> bytes:
    return b"<html>captive portal</html>"


def truncated(manifest: bytes) -> bytes:
    return manifest[: len(manifest) // 2]


def emptied(_: bytes) -> bytes:
    return b""


def edited(manifest: bytes) -> bytes:
    return manifest.replace(b'"size": 1', b'"size": 2', 1)


def of_the_future(manifest: bytes) -> bytes:
    return json.dumps({**json.loads(manifest), "version": 2}).encode()


DAMAGES = [
    pytest.param(not_json, "not JSON", id="not-json"),
    pytest.param(truncated, "not JSON", id="truncated"),
    pytest.param(emptied, "not JSON", id="empty"),
    pytest.param(edited, "own digest", id="edited"),
    pytest.param(of_the_future, "upgrade ckptmgr", id="future"),
]
Damage = Callable[[bytes], bytes]


def spoil(store: Store, checkpoint: str, damage: Damage) -> None:
    key = f"run/manifests/{checkpoint}.json"
    intact = store.get(key)
    store.put(key, damage(intact))
    assert store.get(key) != intact


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_unreadable_manifest_is_shown_and_named(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, damage: Damage, says: str
) -> None:
    """ls shows it as damaged with the reason; show, resume and verify of it say 5; nothing is changed by looking."""
    store = make_store("local")
    url = f"{store.url}/run"
    _, newest = push_steps(url, 100, 200)
    spoil(store, newest, damage)
    before = store.snapshot()

    listed = cli_here("ls", url)
    assert listed.returncode == 0
    assert any("damaged" in line and newest in line for line in listed.stdout.splitlines())
    assert newest in listed.stderr
    assert says in listed.stderr
    rows = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(100, "committed"), (200, "damaged")]

    for selector in ("200", f"id:{newest}"):
        refused(cli_here("show", url, selector), 5, newest, says)
        refused(cli_here("resume", url, selector), 5, newest, says)
    refused(cli_here("show", url), 5, newest, says)
    refused(cli_here("resume", url, "--strict"), 5, newest, says)

    verified = cli_here("verify", url, "--json")
    assert verified.returncode == 5
    document = json.loads(verified.stdout)
    assert document["checked"] == 2
    assert [(item["id"], item["file"]) for item in document["damaged"]] == [(newest, f"manifests/{newest}.json")]
    assert says in document["damaged"][0]["why"]
    assert cli_here("verify", url, "200").returncode == 5
    assert cli_here("verify", url, "100").returncode == 0
    assert store.snapshot() == before


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_resume_latest_passes_over_an_unreadable_manifest(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, damage: Damage, says: str
) -> None:
    """The next older one is taken, and the damaged one is named with the reason, on stderr and in the document."""
    store = make_store("local")
    url = f"{store.url}/run"
    _, newest = push_steps(url, 100, 200)
    spoil(store, newest, damage)
    resumed = cli_here("resume", url, "--json")
    assert resumed.returncode == 0, resumed.stderr
    document = json.loads(resumed.stdout)
    assert (document["step"], document["path"]) == (100, str(tmp_path / "run" / "checkpoint-100"))
    assert [(item["id"], item["step"]) for item in document["skipped"]] == [(newest, 200)]
    assert says in document["skipped"][0]["why"]
    assert newest in resumed.stderr
    assert says in resumed.stderr
    assert sorted(paths_in(tmp_path / "run")) == [
        "checkpoint-100",
        "checkpoint-100.ckptmgr.json",
        "checkpoint-100/model.bin",
        "checkpoint-100/sub",
        "checkpoint-100/sub/opt.bin",
    ]


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_prune_deletes_nothing_behind_an_unreadable_newest(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, damage: Damage, says: str
) -> None:
    """If the newest one turns out to be gone, the older ones are all there is (I8): exit 5, nothing deleted."""
    store = make_store("local")
    *_, newest = push_steps(f"{store.url}/run", 100, 200, 300)
    spoil(store, newest, damage)
    before = store.snapshot()
    refused(cli_here("prune", f"{store.url}/run", "--keep-last", "1", "--yes"), 5, newest, says)
    assert store.snapshot() == before
    planned = cli_here("prune", f"{store.url}/run", "--keep-last", "1")
    assert planned.returncode == 0
    assert newest in planned.stderr
    assert store.snapshot() == before


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_prune_never_deletes_an_unreadable_one(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, damage: Damage, says: str
) -> None:
    """An older unreadable manifest and its data stay; the rest is pruned as planned."""
    store = make_store("local")
    oldest, middle, newest = push_steps(f"{store.url}/run", 100, 200, 300)
    spoil(store, oldest, damage)
    kept = {key: data for key, data in store.snapshot().items() if oldest in key or newest in key}
    pruned = cli_here("prune", f"{store.url}/run", "--keep-last", "1", "--yes", "--json")
    assert pruned.returncode == 0, pruned.stderr
    assert [item["id"] for item in json.loads(pruned.stdout)["delete"]] == [middle]
    after = store.snapshot()
    assert {key: after[key] for key in kept} == kept
    assert not any(f"checkpoints/{middle}" in key for key in after)


@pytest.mark.parametrize(("damage", "says"), [DAMAGES[0], DAMAGES[-1]])
def test_unreadable_run_json(
    every_command: Commands,
    make_store: MakeStore,
    push_steps: PushSteps,
    cli_here: Cli,
    tmp_path: Path,
    damage: Damage,
    says: str,
) -> None:
    """A run whose own record cannot be read is damaged (5) for every command, and null in the list of a store."""
    store = make_store("local")
    push_steps(f"{store.url}/other", 100)
    push_steps(f"{store.url}/run", 100)
    store.put("run/run.json", damage(store.get("run/run.json")))
    before = store.snapshot()
    for words in every_command(f"{store.url}/run", tmp_path / "trained" / "checkpoint-100"):
        refused(cli_here(*words), 5, f"{store.url}/run/run.json", says)
    listed = cli_here("ls", store.url, "--json")
    assert listed.returncode == 0
    assert says in listed.stderr
    rows = json.loads(listed.stdout)["runs"]
    assert [(row["run"], row["checkpoints"], row["latest_step"]) for row in rows] == [
        ("other", 1, 100),
        ("run", None, None),
    ]
    assert store.snapshot() == before
    assert not (tmp_path / "trained" / "STARTED").exists()
