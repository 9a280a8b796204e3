"""Cases of uploading, naming and listing: what lies in the store under which key, and what comes back."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import SourceChangedError, TransientBackendError
from ckptmgr.core.manifest import Manifest, decode_manifest
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, transient
from ckptmgr.testing.outcomes import files_in
from ckptmgr.testing.stores import Store

Cli = Callable[..., subprocess.CompletedProcess[str]]
Tree = Callable[[str, Mapping[str, bytes]], Path]
Ask = Callable[..., Any]


def data_keys(run: str, stem: str, files: Mapping[str, bytes]) -> dict[str, bytes]:
    """What the store must hold for one checkpoint."""
    return {f"{run}/checkpoints/{stem}/{name}": data for name, data in files.items()}


def faulty_run(store: Store) -> tuple[RunDirectory, FaultyBackend]:
    """The run `run` of the store, made if need be, behind a backend that fails on demand and logs."""
    fs, root = open_store(f"{store.url}/run")
    faulty = FaultyBackend(fs)
    return RunDirectory.open_or_create(f"{store.url}/run", fs=faulty, root=root), faulty


def test_k098_equal_base_names_stay_apart(store: Store, ask: Ask, tree: Tree, tmp_path: Path) -> None:
    """Files of one name in several step and rank folders are as many objects, each equal to its source."""
    sources = {
        step: {
            "pytorch.bin": b"weights %d" % step,
            "rank-0/pytorch.bin": b"rank 0 of %d" % step,
            "rank-1/pytorch.bin": b"rank 1 of %d" % step,
        }
        for step in (4000, 8000)
    }
    ids = {
        step: ask("push", tree(f"iteration_{step}", files), f"{store.url}/run")["id"] for step, files in sources.items()
    }

    wanted = {key: data for step, files in sources.items() for key, data in data_keys("run", ids[step], files).items()}
    assert store.snapshot("run/checkpoints/") == wanted
    assert len(set(wanted.values())) == 6
    for step, files in sources.items():
        shown = ask("show", f"{store.url}/run", step)
        assert len({file["blake3"] for file in shown["files"]}) == 3
        assert files_in(Path(ask("resume", f"{store.url}/run", step, "--to", tmp_path / f"r{step}")["path"])) == files


def test_k012_slashes_at_the_end_change_nothing(store: Store, ask: Ask, tree: Tree, tmp_path: Path) -> None:
    """A run and a directory are the same with none, one or two slashes at the end; no key has a double slash."""
    files = {"model.safetensors": b"w" * 1000, "sub/state.json": b"{}"}
    source = tree("checkpoint-500", files)
    pushed = [ask("push", f"{source}{slashes}", f"{store.url}/checkpoint-500{slashes}") for slashes in ("//", "", "/")]
    assert [item["existed"] for item in pushed] == [False, True, True]
    assert len({item["id"] for item in pushed}) == 1

    listed = [ask("ls", f"{store.url}/checkpoint-500{slashes}") for slashes in ("", "/", "//")]
    assert listed[0] == listed[1] == listed[2]
    assert [row["id"] for row in listed[0]["checkpoints"]] == [pushed[0]["id"]]
    assert ask("ls", store.url) == ask("ls", f"{store.url}//")

    for slashes, source_of in (("//", "remote"), ("", None), ("/", None)):
        resumed = ask("resume", f"{store.url}/checkpoint-500{slashes}")
        assert resumed["path"] == str(tmp_path / "checkpoint-500" / "checkpoint-500")
        assert resumed["source"] == source_of
    assert ask("resume", f"{store.url}/checkpoint-500/", "--to", f"{tmp_path}/r//")["path"] == str(tmp_path / "r")
    assert files_in(tmp_path / "r") == files_in(tmp_path / "checkpoint-500" / "checkpoint-500") == files
    assert store.snapshot("checkpoint-500/checkpoints/") == data_keys("checkpoint-500", pushed[0]["id"], files)
    assert [key for key in store.keys("") if "//" in key or key.endswith("/")] == []
    if store.name == "oss":
        asked = {request.key for request in store.server.log} | {
            request.query.get("prefix", "") for request in store.server.log
        }
        assert asked
        assert not any("//" in key for key in asked)


@pytest.mark.parametrize("slash", ["", "/"])
def test_k077_a_repeated_upload_does_not_nest(
    store: Store, ask: Ask, tree: Tree, slash: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a push that ended behind its first file, the repeat puts every file where it belongs, once."""
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "1")
    files = {f"part-{number}/shard.bin": b"%d" % number * 100 for number in range(4)} | {"config.json": b"{}"}
    source = tree("checkpoint-100", files)
    run, faulty = faulty_run(store)
    faulty.add(StoreFault(verb="put_file", skip=1, error=transient))
    with pytest.raises(TransientBackendError):
        push(source, run)
    (first,) = store.keys("run/checkpoints/")
    assert store.keys("run/manifests/") == []

    stem = ask("push", f"{source}{slash}", f"{store.url}/run")["id"]
    assert store.snapshot("run/checkpoints/") == data_keys("run", stem, files)
    assert first in store.keys("run/")
    assert store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]
    assert not any("checkpoint-100" in key.removeprefix("run/") for key in store.keys("run/"))


@pytest.mark.parametrize("victim", [2, 5])
def test_k117_a_vanished_file_blocks_the_manifest_and_not_the_repair(
    store: Store, ask: Ask, tree: Tree, victim: int
) -> None:
    """A push whose manifest names a file that is gone commits nothing; the repeat sends what is missing, then the manifest."""
    files = {f"shard-{number}.bin": b"%d" % number * 1000 for number in range(6)}
    source = tree("checkpoint-100", files)
    gone = source / f"shard-{victim}.bin"
    run, faulty = faulty_run(store)

    def vanish(manifest: Manifest) -> None:
        assert len(manifest.files) == 6
        gone.unlink()

    with pytest.raises(SourceChangedError, match=gone.name):
        push(source, run, described=vanish)
    assert store.keys("run/manifests/") == []
    assert {row["state"] for row in ask("ls", f"{store.url}/run")["checkpoints"]} <= {"uncommitted"}
    sent = {key.rsplit("/", 1)[-1] for key in store.keys("run/checkpoints/")}
    assert gone.name not in sent
    assert sent < files.keys()

    gone.write_bytes(files[gone.name])
    faulty.log.clear()
    pushed = push(source, run)
    assert not pushed.existed
    assert {call.path.rsplit("/", 1)[-1] for call in faulty.calls("put_file")} == files.keys() - sent
    writes = [call.path for call in faulty.log if call.verb in ("put_file", "pipe_file")]
    assert writes[-1].endswith(f"/manifests/{pushed.stem}.json")
    assert store.snapshot("run/checkpoints/") == data_keys("run", str(pushed.stem), files)
    assert ask("verify", f"{store.url}/run") == {"checked": 1, "damaged": []}


def test_k122_a_second_save_of_a_step_leaves_no_old_shard(
    store: Store, ask: Ask, cli_here: Cli, tree: Tree, tmp_path: Path
) -> None:
    """Two shards saved over four: manifest, store and download hold the two and their index, and nothing of the four."""

    def shards(count: int, value: bytes) -> dict[str, bytes]:
        names = [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        index = json.dumps({"weight_map": {f"w{n}": name for n, name in enumerate(names)}}).encode()
        return {**{name: value + name.encode() for name in names}, "model.safetensors.index.json": index}

    old, new = shards(4, b"old "), shards(2, b"new ")
    run = f"{store.url}/run"
    first = ask("push", tree("checkpoint-100", old), run)["id"]
    downloaded = ask("resume", run, "--to", tmp_path / "target")
    assert files_in(tmp_path / "target") == old
    second = ask("push", tree("checkpoint-100", new), run)["id"]
    assert second != first

    manifest = decode_manifest(store.get(f"run/manifests/{second}.json"), where="store")
    assert isinstance(manifest, Manifest)
    assert {entry.path for entry in manifest.files} == new.keys()
    assert store.snapshot(f"run/checkpoints/{second}/") == data_keys("run", second, new)
    assert store.snapshot(f"run/checkpoints/{first}/") == data_keys("run", first, old)

    # A download that was cut off left files of the first save; a finished one left all of them.
    (tmp_path / "fresh.partial").mkdir()
    (tmp_path / "fresh.partial" / "model-00003-of-00004.safetensors").write_bytes(b"old")
    assert ask("resume", run, "--to", tmp_path / "fresh")["id"] == second
    assert files_in(tmp_path / "fresh") == new
    assert cli_here("resume", run, "--to", tmp_path / "target").returncode == 7
    assert files_in(Path(downloaded["path"])) == old
    assert ask("resume", run, "--to", tmp_path / "target", "--replace")["id"] == second
    assert files_in(tmp_path / "target") == new
    # The first save stays what it was.
    assert ask("resume", run, f"id:{first}", "--to", tmp_path / "first")["id"] == first
    assert files_in(tmp_path / "first") == old


def test_k004_a_filtered_listing_is_not_taken_for_the_whole(store: Store, ask: Ask, tree: Tree) -> None:
    """In one process: names that begin with checkpoint-1, then all, then the newest; and what others add meanwhile is seen."""
    for step in (100, 1000, 200, 900):
        ask("push", tree(f"checkpoint-{step}", {"model.bin": b"%d" % step}), f"{store.url}/run")
        store.put(f"plain/checkpoint-{step}/model.bin", b"x")
    fs, root = open_store(store.url)

    def names(found: list[Any]) -> list[str]:
        return sorted(str(name).rsplit("/", 1)[-1] for name in found)

    assert names(fs.glob(f"{root}/plain/checkpoint-1*")) == ["checkpoint-100", "checkpoint-1000"]
    everything = ["checkpoint-100", "checkpoint-1000", "checkpoint-200", "checkpoint-900"]
    assert names(fs.ls(f"{root}/plain", detail=False)) == everything
    store.put("plain/checkpoint-1100/model.bin", b"x")
    assert names(fs.ls(f"{root}/plain", detail=False)) == sorted([*everything, "checkpoint-1100"])

    run = RunDirectory.open(f"{store.url}/run", fs=fs, root=f"{root}/run")
    assert len(fs.glob(f"{root}/run/manifests/000001-0000000001*")) == 1
    assert [stem.step for stem in run.stems()] == [100, 200, 900, 1000]
    newest = run.history().newest()
    assert newest is not None
    assert newest.step == 1000
    assert [row["step"] for row in ask("ls", f"{store.url}/run")["checkpoints"]] == [100, 200, 900, 1000]
    assert ask("resume", f"{store.url}/run")["step"] == 1000
