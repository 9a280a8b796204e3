"""Cases of what a resume chooses: local and remote compared, incomplete ones named and passed over, never wrong in silence."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptmgr.core.errors import ConflictError
from ckptmgr.core.manifest import Manifest, decode_manifest, encode_manifest
from ckptmgr.core.retention import KeepLast
from ckptmgr.testing.faults import Fault, Seen
from ckptmgr.testing.stores import Store
from ckptmgr.training.manager import CheckpointManager

Cli = Callable[..., subprocess.CompletedProcess[str]]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
# What was resumed: the step, where it came from, and the value that `state_of` was given.
Found = tuple[int, str, float]


def state_of(value: float) -> dict[str, Any]:
    """The state of a toy training, recognisable by `value`."""
    return {"model": {"w": torch.full((8,), value)}, "sampler": {"epoch": 1, "batches": int(value)}}


class Place:
    """A run with the saves 600 and 900 in a store and in a local tier, from which either can be taken away."""

    def __init__(self, store: Store, disk: Path) -> None:
        self.store, self.disk, self.url = store, disk, f"{store.url}/run"
        with CheckpointManager(self.url, local_dir=disk, keep_local=KeepLast(9), transfer="thread") as manager:
            for step in (600, 900):
                manager.save(step, state_of(step))

    def stem(self, step: int) -> str:
        places = [*self.store.keys("run/manifests/"), *(path.name for path in (self.disk / "manifests").iterdir())]
        return next(name.rsplit("/", 1)[-1][:-5] for name in places if f"-{step:012d}-" in name)

    def forget_remote(self, step: int) -> None:
        stem = self.stem(step)
        for key in [key for key in self.store.keys("run/") if stem in key]:
            self.store.delete(key)

    def forget_local(self, step: int) -> None:
        stem = self.stem(step)
        (self.disk / "manifests" / f"{stem}.json").unlink()
        shutil.rmtree(self.disk / "checkpoints" / stem)


@pytest.fixture(params=["oss", "s3"])
def place(request: pytest.FixtureRequest, make_store: MakeStore, tmp_path: Path) -> Place:
    return Place(make_store(request.param), tmp_path / "disk")


def by_command(place: Place, cli_here: Cli, tmp_path: Path) -> tuple[Found, str]:
    """`ckptmgr resume`; what it found, and stderr."""
    done = cli_here("resume", place.url, "--local-dir", place.disk, "--to", tmp_path / "to", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    value = float(load_file(Path(found["path"]) / "model.safetensors")["w"][0])
    return (found["step"], found["source"], value), done.stderr


def by_manager(place: Place) -> Found:
    """`manager.restore` in a new process life."""
    with CheckpointManager(place.url, local_dir=place.disk) as manager:
        restored = manager.restore(state_of(0))
    assert restored is not None
    assert restored.report.values["sampler"]["batches"] == restored.step
    return restored.step, str(restored.source), float(restored.report.values["model"]["w"][0])


def test_k068_local_900_and_remote_600(place: Place, cli_here: Cli, tmp_path: Path) -> None:
    """(a) The newer local one wins, without a download; the source is printed."""
    place.forget_remote(900)
    if place.store.name == "oss":
        place.store.server.log.clear()
    found, told = by_command(place, cli_here, tmp_path)
    assert found == by_manager(place) == (900, "local", 900.0)
    assert "from the local tier" in told
    if place.store.name == "oss":
        log = place.store.server.log
        assert [entry.key for entry in log if "/checkpoints/" in entry.key and entry.method == "GET"] == []


def test_k068_local_600_and_remote_900(place: Place, cli_here: Cli, tmp_path: Path) -> None:
    """(b) The newer remote one wins over a local one that is at hand."""
    place.forget_local(900)
    found, told = by_command(place, cli_here, tmp_path)
    assert found == by_manager(place) == (900, "remote", 900.0)
    assert f"from {place.url}" in told


def test_k068_one_byte_of_the_local_900_is_wrong(place: Place, cli_here: Cli, tmp_path: Path) -> None:
    """(c) The same checkpoint, from the store; the damaged file is named, with its place."""
    file = place.disk / "checkpoints" / place.stem(900) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    found, told = by_command(place, cli_here, tmp_path)
    assert found == by_manager(place) == (900, "remote", 900.0)
    assert "model.safetensors" in told
    assert str(place.disk) in told


def test_k068_two_contents_of_900(place: Place, cli_here: Cli, tmp_path: Path) -> None:
    """(d) Nothing is chosen: exit 7, both are named, nothing is changed."""
    path = place.disk / "manifests" / f"{place.stem(900)}.json"
    known = decode_manifest(path.read_bytes(), where="")
    assert isinstance(known, Manifest)
    path.write_bytes(encode_manifest(replace(known, files=known.files[1:])))
    before = place.store.snapshot()
    done = cli_here("resume", place.url, "--local-dir", place.disk, "--to", tmp_path / "to")
    assert (done.returncode, done.stdout) == (7, "")
    for text in (place.url, str(place.disk), place.stem(900)):
        assert text in done.stderr
    with CheckpointManager(place.url, local_dir=place.disk) as manager, pytest.raises(ConflictError, match="differs"):
        manager.restore(state_of(0))
    assert not (tmp_path / "to").exists()
    assert place.store.snapshot() == before


def test_k120_what_a_kill_left_half_written_is_named(place: Place, cli_here: Cli, tmp_path: Path) -> None:
    """900 was being written when everything died, here and in the store: 600 is restored, 900 is named as incomplete, and nobody cleans up."""
    stem = place.stem(900)
    place.store.delete(f"run/manifests/{stem}.json")
    place.store.delete(f"run/checkpoints/{stem}/model.safetensors")
    (place.disk / "manifests" / f"{stem}.json").unlink()
    (place.disk / "checkpoints" / stem).rename(place.disk / "checkpoints" / f"{stem}.partial")
    before = place.store.snapshot()
    done = cli_here("resume", place.url, "--local-dir", place.disk, "--to", tmp_path / "to", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["step"] == 600
    ((skipped),) = found["skipped"]
    assert (skipped["id"], skipped["step"]) == (stem, 900)
    assert skipped["why"].startswith("incomplete: it was never committed in ")
    assert f"step 900 ({stem}) is passed over: incomplete" in done.stderr
    with CheckpointManager(place.url, local_dir=place.disk) as manager:
        restored = manager.restore(state_of(0))
    assert restored is not None
    assert (restored.step, [stem for stem, _ in restored.skipped]) == (600, [stem])
    assert place.store.snapshot() == before


def test_k120_older_leftovers_and_named_ones_are_nobodys_business(place: Place, cli_here: Cli, tmp_path: Path) -> None:
    """Only what is newer than what is resumed may be missed, and only by who wants the newest."""
    place.store.delete(f"run/manifests/{place.stem(600)}.json")
    newest, rest = place.stem(900), ["--to", tmp_path / "to", "--json"]
    done = cli_here("resume", place.url, *rest)
    assert (json.loads(done.stdout)["id"], json.loads(done.stdout)["skipped"]) == (newest, [])
    place.store.delete(f"run/manifests/{newest}.json")
    local = cli_here("resume", place.url, "600", "--local-dir", place.disk, "--replace", *rest)
    assert json.loads(local.stdout)["skipped"] == []


def test_k120_a_look_that_fails_stops_no_resume(make_store: MakeStore, cli_here: Cli, tmp_path: Path) -> None:
    """Who may read the run's records and not list its data resumes, and is told that something may be missed."""
    place = Place(make_store("oss"), tmp_path / "disk")
    store = place.store
    stem = place.stem(900)
    store.delete(f"run/manifests/{stem}.json")

    def lists_data(seen: Seen) -> bool:
        return "/checkpoints/" in seen.query.get("prefix", "")

    store.server.faults.add(Fault(method="GET", match=lists_data, status=403, code="AccessDenied", times=None))
    done = cli_here("resume", place.url, "--to", tmp_path / "to", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 600
    assert "anything newer, uncommitted, is not known" in done.stderr


@pytest.mark.parametrize("gone", ["sampler.json", "rng.pt"])
def test_k045_a_missing_sampler_state_is_a_missing_file(place: Place, cli_here: Cli, tmp_path: Path, gone: str) -> None:
    """300 without its data position or its random states is refused as incomplete; 200 comes back whole, never 300 with the stream at zero."""
    key = f"run/checkpoints/{place.stem(900)}/{gone}"
    assert place.store.get(key)
    place.store.delete(key)
    shutil.rmtree(place.disk)
    done = cli_here("resume", place.url, "--to", tmp_path / "to", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["step"], [each["step"] for each in found["skipped"]]) == (600, [900])
    assert found["skipped"][0]["why"] == f"{gone} is missing"
    assert by_manager(place) == (600, "remote", 600.0)
    verified = cli_here("verify", place.url, "--json")
    assert verified.returncode == 5
    assert [(each["step"], each["file"]) for each in json.loads(verified.stdout)["damaged"]] == [(900, gone)]


def test_k045_what_was_found_is_not_downloaded_again(make_store: MakeStore, cli_here: Cli, tmp_path: Path) -> None:
    """The next starts, by command or by manager, ask for nothing of the incomplete one but the file that was missing."""
    place = Place(make_store("oss"), tmp_path / "disk")
    stem, store = place.stem(900), place.store
    store.delete(f"run/checkpoints/{stem}/sampler.json")
    shutil.rmtree(place.disk)
    assert cli_here("resume", place.url, "--to", tmp_path / "to").returncode == 0
    for again in (lambda: by_manager(place), lambda: cli_here("resume", place.url, "--to", tmp_path / "again")):
        store.server.log.clear()
        again()
        asked = {entry.key.rsplit("/", 1)[-1] for entry in store.server.log if f"/checkpoints/{stem}/" in entry.key}
        assert asked <= {"sampler.json", ""}
        assert any("/checkpoints/" in entry.key and entry.method == "GET" for entry in store.server.log)


def test_k050_the_same_name_again_without_a_restore(store: Store, cli_here: Cli, tmp_path: Path) -> None:
    """exp saved 100 to 300 and ended; started again from scratch its 100 is refused, or is of a lineage of its own, and theirs keep their bytes."""
    url = f"{store.url}/exp"
    with CheckpointManager(url, local_dir=tmp_path / "disk", transfer="thread") as first:
        old = [first.save(step, state_of(step)) for step in (100, 200, 300)]
    before = store.snapshot("exp/")
    with CheckpointManager(url, local_dir=tmp_path / "disk") as again, pytest.raises(ConflictError, match="step 300"):
        again.save(100, state_of(0.5))
    assert store.snapshot("exp/") == before
    with CheckpointManager(url, local_dir=tmp_path / "disk", on_existing="new-lineage", transfer="thread") as apart:
        new = apart.save(100, state_of(0.5))
    after = store.snapshot("exp/")
    assert {key: after[key] for key in before} == before
    rows = json.loads(cli_here("ls", url, "--all", "--json").stdout)["checkpoints"]
    assert [(row["id"], row["attempt"], row["lineage"]) for row in rows] == [
        *((stem, 1, "abandoned") for stem in old),
        (new, 2, "current"),
    ]
