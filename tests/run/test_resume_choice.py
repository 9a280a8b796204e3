"""What `ckptmgr resume` chooses and where it takes it from: the local tier, fall-back, selectors."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckptmgr.core.manifest import Manifest, decode_manifest, encode_manifest
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.outcomes import files_in, refused
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def flip_bit(path: Path) -> None:
    """Damage a file without a trace in its size; a new inode, so that what is linked to the old one stays as it is."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.unlink()
    path.write_bytes(data)


@pytest.fixture
def run_url(make_store: MakeStore, push_steps: PushSteps) -> str:
    """A local run with the steps 100, 200 and 300."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100, 200, 300)
    return f"{store.url}/run"


def data_dir(run_url: str, step: int) -> Path:
    """Where a local run keeps the files of its only checkpoint of `step`."""
    (found,) = Path(run_url.removeprefix("file://"), "checkpoints").glob(f"*-{step:012d}-*")
    return found


# --- the local tier -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tiered(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path) -> tuple[Store, Path]:
    """A run with the steps 100 and 200 on OSS, and a local tier that holds both."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100, 200)
    tier = tmp_path / "tier"
    for key, data in store.snapshot("run/").items():
        path = tier / key.removeprefix("run/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return store, tier


def downloads(store: Store) -> list[str]:
    return [entry.key for entry in store.server.log if "/checkpoints/" in entry.key and entry.method == "GET"]


@pytest.mark.parametrize("given", ["option", "variable"])
def test_local_tier_is_preferred(
    tiered: tuple[Store, Path], cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """What is on this disk and right is linked, not downloaded."""
    store, tier = tiered
    store.server.log.clear()
    if given == "variable":
        monkeypatch.setenv("CKPTMGR_LOCAL_DIR", str(tier))
    options = ["--local-dir", tier] if given == "option" else []
    document = json.loads(cli_here("resume", f"{store.url}/run", "--json", *options).stdout)
    assert (document["source"], document["step"]) == ("local", 200)
    assert files_in(Path(document["path"])) == files_in(tmp_path / "trained" / "checkpoint-200")
    assert downloads(store) == []
    (data,) = (tier / "checkpoints").glob("*-000000000200-*")
    assert os.path.samefile(data / "model.bin", Path(document["path"]) / "model.bin")


def test_damaged_local_copy_is_taken_from_the_store(tiered: tuple[Store, Path], cli_here: Cli, tmp_path: Path) -> None:
    """The same checkpoint, not an older one; the damaged file of the tier is named."""
    store, tier = tiered
    (data,) = (tier / "checkpoints").glob("*-000000000200-*")
    flip_bit(data / "model.bin")
    resumed = cli_here("resume", f"{store.url}/run", "--json", "--local-dir", tier)
    document = json.loads(resumed.stdout)
    assert (document["source"], document["step"], document["skipped"]) == ("remote", 200, [])
    assert "model.bin" in resumed.stderr
    assert str(tier) in resumed.stderr
    assert files_in(Path(document["path"])) == files_in(tmp_path / "trained" / "checkpoint-200")
    assert json.loads(cli_here("ls", f"{store.url}/run", "--json").stdout)["checkpoints"][1]["state"] == "committed"


def test_what_only_the_tier_has_is_newest(tiered: tuple[Store, Path], cli_here: Cli, tmp_path: Path) -> None:
    """A commit that was not uploaded in time is still the newest of the lineage."""
    store, tier = tiered
    (data,) = (tier / "checkpoints").glob("*-000000000200-*")
    store.delete(f"run/manifests/{data.name}.json")
    document = json.loads(cli_here("resume", f"{store.url}/run", "--json", "--local-dir", tier).stdout)
    assert (document["source"], document["step"]) == ("local", 200)
    document = json.loads(cli_here("resume", f"{store.url}/run", "--json").stdout)
    assert (document["source"], document["step"]) == ("remote", 100)


def test_run_that_only_the_tier_has(tiered: tuple[Store, Path], cli_here: Cli, tmp_path: Path) -> None:
    """The store lost the run, or never got it: what is on this disk is resumed rather than training begun anew, and nothing is created."""
    store, tier = tiered
    for key in store.snapshot():
        store.delete(key)
    started = tmp_path / "STARTED"
    words = ["sh", "-c", 'test -n "$CKPTMGR_RESUME_FROM" && touch "$0"', str(started)]
    result = cli_here("resume", f"{store.url}/run", "--local-dir", tier, "--or-start", "--", *words)
    assert started.exists(), result.stderr
    assert result.returncode == 6  # the tier's saves are pending: nothing says that the store has them
    assert store.keys() == []


def test_one_id_with_two_contents_is_a_conflict(
    tiered: tuple[Store, Path], cli_here: Cli, tmp_path: Path, push_steps: PushSteps
) -> None:
    """Neither is chosen: exit 7, both places named, nothing changed."""
    store, tier = tiered
    (data,) = (tier / "checkpoints").glob("*-000000000200-*")
    manifest = tier / "manifests" / f"{data.name}.json"
    known = decode_manifest(manifest.read_bytes(), where="")
    assert isinstance(known, Manifest)
    manifest.write_bytes(encode_manifest(replace(known, files=known.files[:1])))
    before = store.snapshot(), files_in(tmp_path)
    for selector in ([], ["100"], ["200"]):
        refused(
            cli_here("resume", f"{store.url}/run", *selector, "--local-dir", tier),
            7,
            str(tier),
            f"{store.url}/run",
            data.name,
        )
    assert (store.snapshot(), files_in(tmp_path)) == before


def test_tier_of_another_run_is_a_conflict(tiered: tuple[Store, Path], push_steps: PushSteps, cli_here: Cli) -> None:
    """A local directory that belongs to another run is not looked into: exit 7."""
    store, tier = tiered
    push_steps(f"{store.url}/other", 100)
    refused(cli_here("resume", f"{store.url}/other", "--local-dir", tier), 7, str(tier), f"{store.url}/other")


def test_local_dir_that_is_not_there_yet(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """The first start on a machine finds no tier, and none is made by looking."""
    assert cli_here("resume", run_url, "--local-dir", tmp_path / "tier").returncode == 0
    assert not (tmp_path / "tier").exists()


# --- damage and fall-back -----------------------------------------------------------------------------------------------


def test_damaged_newest_is_passed_over_and_remembered(
    run_url: str, cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next older is taken; the damaged one is named in both outputs, and `ls` knows it from then on, until it is repaired."""
    whole = (data_dir(run_url, 300) / "sub" / "opt.bin").read_bytes()
    stem = data_dir(run_url, 300).name
    flip_bit(data_dir(run_url, 300) / "sub" / "opt.bin")
    resumed = cli_here("resume", run_url, "--json")
    document = json.loads(resumed.stdout)
    assert (document["step"], document["source"]) == (200, "remote")
    assert [(item["id"], item["step"]) for item in document["skipped"]] == [(stem, 300)]
    assert "sub/opt.bin has the blake3" in document["skipped"][0]["why"]
    assert stem in resumed.stderr
    assert "sub/opt.bin" in resumed.stderr
    assert names(tmp_path / "run") == ["checkpoint-200", "checkpoint-200.ckptmgr.json"]

    def states() -> list[str]:
        rows = json.loads(cli_here("ls", run_url, "--json").stdout)["checkpoints"]
        return [row["state"] for row in rows]

    assert states() == ["committed", "committed", "damaged"]
    assert "sub/opt.bin" in cli_here("ls", run_url).stderr
    refused(cli_here("prune", run_url, "--keep-last", "1", "--yes"), 5, stem, "sub/opt.bin")
    (data_dir(run_url, 300) / "sub" / "opt.bin").write_bytes(whole)
    assert json.loads(cli_here("resume", run_url, "--json").stdout)["step"] == 300
    assert states() == ["committed", "committed", "committed"]


def test_remembered_damage_costs_one_file(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path
) -> None:
    """The second resume looks at the damaged file first, and does not download the rest of a checkpoint that it cannot use."""
    store = make_store("oss")
    *_, newest = push_steps(f"{store.url}/run", 100, 200)
    store.server.raw_flip_bit(store.url.split("/")[2], f"exp/run/checkpoints/{newest}/sub/opt.bin")
    assert cli_here("resume", f"{store.url}/run").returncode == 0
    assert f"exp/run/checkpoints/{newest}/model.bin" in downloads(store)
    store.server.log.clear()
    assert cli_here("resume", f"{store.url}/run").returncode == 0
    assert set(downloads(store)) == {f"exp/run/checkpoints/{newest}/sub/opt.bin"}


@pytest.mark.parametrize("selector", ["300", "id"])
@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damaged_explicit_selection(run_url: str, cli_here: Cli, tmp_path: Path, selector: str, damage: str) -> None:
    """What was named is what is meant: exit 5, nothing older instead, nothing left behind."""
    path = data_dir(run_url, 300) / "model.bin"
    flip_bit(path) if damage == "flipped" else path.unlink()
    chosen = f"id:{data_dir(run_url, 300).name}" if selector == "id" else selector
    refused(cli_here("resume", run_url, chosen), 5, "model.bin", "blake3" if damage == "flipped" else "missing")
    assert names(tmp_path) == ["store", "trained"]


def test_strict(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """--strict turns a damaged newest into exit 5."""
    flip_bit(data_dir(run_url, 300) / "model.bin")
    refused(cli_here("resume", run_url, "--strict"), 5, data_dir(run_url, 300).name, "model.bin")
    assert names(tmp_path) == ["store", "trained"]


def test_all_damaged(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """Nothing is left to resume: exit 5, each one named, nothing left behind, and --or-start does not start."""
    for step in (100, 200, 300):
        flip_bit(data_dir(run_url, step) / "model.bin")
    for options in ([], ["--or-start", "--", "touch", str(tmp_path / "STARTED")]):
        result = cli_here("resume", run_url, *options)
        assert result.returncode == 5
        assert result.stdout == ""
        *warnings, error = result.stderr.splitlines()
        assert [line.startswith("ckptmgr: warning: step ") for line in warnings] == [True] * 3
        assert error.startswith("ckptmgr: error: none of the 3 checkpoints")
        assert names(tmp_path) == ["store", "trained"]


def in_background(cli: Cli, *words: str) -> tuple[threading.Thread, list[Result]]:
    """Start a command in a thread; its result is in the list once the thread has ended."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(cli(*words)))
    thread.start()
    return thread, results


def test_pruned_while_it_is_downloaded(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path
) -> None:
    """`latest` takes the next older; what was named is not found any more (3). Neither is called damage."""
    store = make_store("oss")
    url = f"{store.url}/run"
    _, newest = push_steps(url, 100, 200)
    closing = json.dumps({"format": "ckptmgr", "version": 1, "id": newest, "closed": "pruned", "closed_at": None})

    for selector, code in (("200", 3), ("latest", 0)):
        manifest = store.get(f"run/manifests/{newest}.json")
        held = store.server.faults.add(Fault(method="GET", key=f"*/checkpoints/{newest}/*", hold="before", times=1))
        thread, results = in_background(cli_here, "resume", url, selector, "--json")
        assert held.reached.wait(60)
        data = store.snapshot(f"run/checkpoints/{newest}/")
        store.put(f"run/manifests/{newest}.json", closing.encode())
        for key in data:
            store.delete(key)
        held.release()
        thread.join(60)
        (result,) = results
        assert result.returncode == code, result.stderr
        assert "damaged" not in result.stderr
        if code == 0:
            document = json.loads(result.stdout)
            assert (document["step"], [item["id"] for item in document["skipped"]]) == (100, [newest])
            assert "removed" in document["skipped"][0]["why"]
        for key, value in {**data, f"run/manifests/{newest}.json": manifest}.items():
            store.put(key, value)


# --- selectors ----------------------------------------------------------------------------------------------------------


def test_selectors_choose(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path) -> None:
    """latest, step, best, worst, tag and id each mean what they say."""
    store = make_store("local")
    url = f"{store.url}/run"
    ids = {}
    for step, loss, options in ((100, "0.5", ["--tag", "good"]), (200, "0.1", []), (300, "nan", []), (400, "0.9", [])):
        (ids[step],) = push_steps(url, step, options=["--metric", f"eval_loss={loss}", *options])
    meant = {
        "latest": 400,
        "200": 200,
        "best:eval_loss": 200,
        "best:eval_loss:max": 400,
        "worst:eval_loss": 400,
        "worst:eval_loss:max": 200,
        "tag:good": 100,
        f"id:{ids[300]}": 300,
    }
    for selector, step in meant.items():
        document = json.loads(cli_here("resume", url, selector, "--json").stdout)
        assert (selector, document["step"], document["id"]) == (selector, step, ids[step])
        assert json.loads(cli_here("show", url, selector, "--json").stdout)["id"] == ids[step]
