"""Cases of checkpoints of many files: some that fail for good, more than a page of a listing, links and other things that are no files."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.run.identity import new_uuid
from ckptmgr.run.intake import take
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing import oss_translation, s3_dialect
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Cli = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[..., Any]
Tree = Callable[..., Path]
MakeStore = Callable[[str], Store]


# --- K031 -----------------------------------------------------------------------------------------------------------------

FIFTY = {f"shard-{number:02}.bin": b"%d" % number * 20 for number in range(50)}
# The first, so that nothing has gone well before it, the last, and one between.
BAD = ["shard-00.bin", "shard-17.bin", "shard-49.bin"]
FOR_GOOD: dict[str, dict[str, Any]] = {
    "refused": {"status": 400, "code": "InvalidRequest"},
    "forbidden": {"status": 403, "code": "AccessDenied"},
    "failing": {"status": 500, "code": "InternalError"},
}


@pytest.mark.parametrize("how", FOR_GOOD)
@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_k031_some_files_that_fail_for_good(
    make_store: MakeStore, tree: Tree, cli_here: Cli, ask: Ask, monkeypatch: pytest.MonkeyPatch, kind: str, how: str
) -> None:
    """3 of 50 files: not committed, exit 4, all three are named, the others are there; and a repeat sends these three and no other."""
    monkeypatch.setattr("ckptmgr.backends.retry._JITTER", SimpleNamespace(uniform=lambda low, high: 0.0))
    store = make_store(kind)
    run, directory = f"{store.url}/run", tree("checkpoint-100", FIFTY)
    for name in BAD:
        store.server.faults.add(Fault(method="PUT", key=f"*/{name}", times=None, **FOR_GOOD[how]))
    failed = cli_here("push", directory, run)
    assert (failed.returncode, failed.stdout) == (4, "")
    (line,) = [line for line in failed.stderr.splitlines() if "error" in line]
    assert [name for name in FIFTY if name in line] == BAD
    assert store.keys("run/manifests/") == []
    assert [row["state"] for row in ask("ls", run)["checkpoints"]] == ["uncommitted"]
    assert len(store.keys("run/checkpoints/")) == 47

    store.server.faults.clear()
    store.server.log.clear()
    stem = ask("push", directory, run)["id"]
    sent = [entry.key.rsplit("/", 1)[-1] for entry in store.server.log if entry.method == "PUT"]
    assert sorted(sent[:-1]) == BAD
    assert sent[-1] == f"{stem}.json"
    assert store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{stem}/{name}": data for name, data in FIFTY.items()
    }


# --- K065 -----------------------------------------------------------------------------------------------------------------


def check_pages(store: Store, ask: Ask, tree: Tree, to: Path, *, top: int, below: int) -> None:
    """`top` files beside each other and `below` in a folder are pushed, listed with a delimiter and without, verified and fetched."""
    files = {f"shard-{number:04}.bin": b"%d" % number for number in range(top)}
    files |= {f"sub/part-{number:03}.bin": b"%d" % number for number in range(below)}
    run = f"{store.url}/run"
    stem = ask("push", tree("checkpoint-100", files), run)["id"]
    prefix = f"run/checkpoints/{stem}/"
    # The test double first, past our own code.
    assert len(store.keys(prefix)) == top + below
    fs, _ = open_store(run)
    listed = fs.ls(store.at(prefix), detail=True)
    assert [entry["type"] for entry in listed].count("file") == top
    assert [entry["name"].rstrip("/").rsplit("/", 1)[-1] for entry in listed if entry["type"] == "directory"] == ["sub"]
    assert len(fs.ls(store.at(f"{prefix}sub"), detail=False)) == below
    assert len(fs.find(store.at(prefix))) == top + below
    (row,) = ask("ls", run, "--check")["checkpoints"]
    assert (row["files"], row["state"]) == (top + below, "committed")
    assert ask("verify", run, "--quick")["damaged"] == []
    got = Path(ask("resume", run, "--to", to)["path"])  # verifies each
    found = {path.relative_to(got).as_posix(): path.read_bytes() for path in got.rglob("*") if path.is_file()}
    assert found == files


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_k065_more_files_than_a_page_of_a_listing(
    make_store: MakeStore, ask: Ask, tree: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """65 of them each time, where a page has 50 entries, the folder among them."""
    monkeypatch.setattr({"moto": s3_dialect, "oss": oss_translation}[kind], "MAX_KEYS", 50)
    store = make_store(kind)
    store.server.log.clear()
    check_pages(store, ask, tree, tmp_path / "got", top=60, below=5)
    assert len([entry for entry in store.server.log if "checkpoints/" in entry.query.get("prefix", "")]) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_k065_more_files_than_a_thousand(
    make_store: MakeStore, ask: Ask, tree: Tree, tmp_path: Path, kind: str
) -> None:
    """1,300 of them each time, with pages of the size that stores have."""
    check_pages(make_store(kind), ask, tree, tmp_path / "got", top=1200, below=100)


# --- K066 -----------------------------------------------------------------------------------------------------------------

# What cannot be stored, and what the refusal says of it.
ODD: dict[str, tuple[Callable[[Path], object], str]] = {
    "loop": (lambda path: path.symlink_to("."), "a link to a folder"),
    "up": (lambda path: path.symlink_to(".."), "a link to a folder"),
    "broken": (lambda path: path.symlink_to("nowhere"), "a broken link"),
    "itself": (lambda path: path.symlink_to("itself"), "a broken link"),
    "pipe": (os.mkfifo, "neither a file nor a folder"),
    "secret": (lambda path: path.symlink_to("/etc/hostname"), "leads out of the run's folder, to /etc/hostname"),
}


@pytest.fixture
def linked(tree: Tree, tmp_path: Path) -> Path:
    """A checkpoint whose weights are a link into a cache beside it, in the folder of a run."""
    directory = tree("run/checkpoint-100", {"optimizer.pt": b"optimizer", "sub/notes.txt": b"notes"})
    (directory.parent / "blobs").mkdir()
    (directory.parent / "blobs/abc").write_bytes(b"the weights")
    (directory / "model.safetensors").symlink_to("../blobs/abc")
    return directory


LINKED = {"model.safetensors": b"the weights", "optimizer.pt": b"optimizer", "sub/notes.txt": b"notes"}


@pytest.mark.parametrize("what", ODD)
def test_k066_what_is_no_file_is_named_before_anything_is_sent(
    make_store: MakeStore, linked: Path, cli_here: Cli, what: str
) -> None:
    """A link that loops or leads up, a broken one, a pipe, and one that leads out of the run's folder: refused with its name and not followed, at once,
    as a checkpoint and as an artifact; no run is made."""
    store = make_store("oss")
    make, says = ODD[what]
    make(linked / "sub" / what)
    for words in (["push", linked, f"{store.url}/run"], ["artifact", "push", linked, f"{store.url}/final"]):
        refused = cli_here(*words)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert f"{linked}/sub/{what} is " in refused.stderr
        assert says in refused.stderr
    assert store.keys() == []


def test_k066_a_trainers_folder_is_taken_as_a_push_takes_it(linked: Path, tmp_path: Path) -> None:
    """By hard link into the local tier: the weights are there, a link that leads out is refused, and nothing is left of the try."""
    tier = LocalTier.open_or_create(tmp_path / "disk", uuid=new_uuid())
    stem = Stem(1, 100, 1, "00000001")
    assert (take(tier, linked, stem) / "model.safetensors").read_bytes() == b"the weights"
    (linked / "secret").symlink_to("/etc/hostname")
    with pytest.raises(ConfigError, match="leads out"):
        take(tier, linked, Stem(1, 100, 2, "00000002"))
    assert [path.name for path in (tmp_path / "disk/checkpoints").iterdir()] == [f"{stem}.partial"]


@pytest.mark.parametrize("kind", ["local", "oss"])
def test_k066_linked_weights_are_stored(
    make_store: MakeStore, linked: Path, ask: Ask, tmp_path: Path, kind: str
) -> None:
    """What they lead to is in the store and comes down as a file, beside the run or elsewhere; so do the files of a hub cache's snapshot, and with
    `--follow-links` everything."""
    store = make_store(kind)
    run = f"{store.url}/run"

    def push(directory: Path, *options: str) -> dict[str, bytes]:
        stem = ask("push", directory, run, "--step", "100", *options)["id"]
        to = Path(ask("resume", run, f"id:{stem}", "--to", tmp_path / stem)["path"])
        assert not any(path.is_symlink() for path in to.rglob("*"))
        return {path.relative_to(to).as_posix(): path.read_bytes() for path in to.rglob("*") if path.is_file()}

    assert push(linked) == LINKED
    (tmp_path / "elsewhere").write_bytes(b"other weights")
    (linked / "base.safetensors").symlink_to(tmp_path / "elsewhere")
    assert push(linked) == LINKED | {"base.safetensors": b"other weights"}
    (linked / "secret").symlink_to("/etc/hostname")
    assert push(linked, "--follow-links")["secret"] == Path("/etc/hostname").read_bytes()

    snapshot = tmp_path / "models--tiny/snapshots/1234"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--tiny/blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "models--tiny/blobs" / name[:4]).write_bytes(name.encode())
        (snapshot / name).symlink_to(f"../../blobs/{name[:4]}")
    assert push(snapshot) == {name: name.encode() for name in ("config.json", "model.safetensors")}
