"""What `ckptmgr resume` does to its target: filled, refused, replaced, interrupted, without room."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmgr.core.errors import DiskFullError
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.resume import resume
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.outcomes import files_in, refused
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


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


class Syncs:
    """Names of what is synced, files and folders."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        fsync = os.fsync

        def noted(fd: int) -> None:
            self.names.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", noted)


# --- the target ---------------------------------------------------------------------------------------------------------


def test_default_target(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """stdout is ./<run>/checkpoint-<step> in full and a newline, which holds the files; its manifest lies beside it."""
    resumed = cli_here("resume", run_url)
    assert resumed.returncode == 0
    target = tmp_path / "run" / "checkpoint-300"
    assert resumed.stdout == f"{target}\n"
    assert files_in(target) == files_in(tmp_path / "trained" / "checkpoint-300")
    assert names(tmp_path / "run") == ["checkpoint-300", "checkpoint-300.ckptmgr.json"]
    sidecar = read_sidecar(target)
    assert (sidecar.manifest.step, sidecar.how) == (300, "auto")


@pytest.mark.parametrize("state", ["absent", "empty", "parents absent"])
def test_target_is_filled(run_url: str, cli_here: Cli, tmp_path: Path, state: str) -> None:
    """--to DIR is the checkpoint directory itself: absent or empty, it is filled."""
    target = tmp_path / "a" / "b" / "c" if state == "parents absent" else tmp_path / "here"
    if state == "empty":
        target.mkdir()
    resumed = cli_here("resume", run_url, "200", "--to", target)
    assert resumed.stdout == f"{target}\n"
    assert files_in(target) == files_in(tmp_path / "trained" / "checkpoint-200")
    assert names(target.parent).count(f"{target.name}.ckptmgr.json") == 1
    assert not any(name.endswith(".partial") for name in names(target.parent))
    assert read_sidecar(target).how == "explicit"


def test_target_that_holds_it_already_is_not_transferred_again(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path
) -> None:
    """Exactly this checkpoint is there: exit 0, source null, the files untouched, and no data object is asked for."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    target = tmp_path / "here"
    assert cli_here("resume", f"{store.url}/run", "--to", target).returncode == 0
    before = {path: path.stat().st_mtime_ns for path in [target, *target.rglob("*")]}
    store.server.log.clear()
    again = cli_here("resume", f"{store.url}/run", "--to", target, "--json")
    assert again.returncode == 0
    assert json.loads(again.stdout) == {
        "path": str(target),
        "id": read_sidecar(target).manifest.id,
        "step": 100,
        "source": None,
        "skipped": [],
        "drift": [],
        "conditions": {},
    }
    assert {path: path.stat().st_mtime_ns for path in [target, *target.rglob("*")]} == before
    assert [entry.key for entry in store.server.log if "/checkpoints/" in entry.key and entry.method == "GET"] == []


@pytest.mark.parametrize("kind", ["local", "moto"])
@pytest.mark.parametrize("lasting", [True, False])
def test_what_ends_with_this_process_is_not_synced(
    make_store: MakeStore,
    push_steps: PushSteps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    lasting: bool,
) -> None:
    """What `resume` leaves behind survives a power cut, every file and name of it; a manager's own copy has no need to. Both are whole, and verified."""
    url = f"{make_store(kind).url}/run"
    push_steps(url, 100)
    syncs = Syncs(monkeypatch)
    began: list[int] = []
    monkeypatch.setattr("ckptmgr.backends.parts.start_writeback", lambda fd, offset, length: began.append(offset))
    target = tmp_path / "into" / "checkpoint"
    resumed = resume(RunDirectory.open(url), parse_selector("latest"), to=target, lasting=lasting)
    assert resumed.source == "remote"
    assert files_in(target) == files_in(tmp_path / "trained" / "checkpoint-100")
    assert read_sidecar(target).manifest.step == 100
    if lasting:
        assert {*(path.name for path in target.rglob("*")), "into", "checkpoint.partial"} <= set(syncs.names)
    else:
        assert syncs.names == []
    assert bool(began) is (lasting and kind == "moto")


def test_same_bytes_without_a_sidecar_are_this_checkpoint(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """A directory that holds the bytes is this checkpoint wherever they came from; it gets its sidecar."""
    original = tmp_path / "trained" / "checkpoint-300"
    before = {path: path.stat().st_mtime_ns for path in original.rglob("*")}
    resumed = cli_here("resume", run_url, "--to", original, "--json")
    assert json.loads(resumed.stdout)["source"] is None
    assert {path: path.stat().st_mtime_ns for path in original.rglob("*")} == before
    assert read_sidecar(original).manifest.step == 300


def test_how_it_was_chosen_is_kept_up_to_date(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """Naming the checkpoint that is already there is a decision, which the next attempt must learn of."""
    cli_here("resume", run_url)
    target = tmp_path / "run" / "checkpoint-300"
    assert read_sidecar(target).how == "auto"
    cli_here("resume", run_url, "300")
    assert read_sidecar(target).how == "explicit"


def _something_else(kind: str, target: Path, tmp_path: Path) -> None:
    """Put at `target` what is not the checkpoint of step 300."""
    original = tmp_path / "trained" / "checkpoint-300"
    if kind == "a file":
        target.write_bytes(b"x")
        return
    if kind == "a link":
        target.symlink_to(original)
        return
    target.mkdir()
    for name, data in files_in(original).items():
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_bytes(data)
    if kind == "one file more":
        (target / "notes.txt").write_bytes(b"mine")
    elif kind == "one file less":
        (target / "model.bin").unlink()
    elif kind == "one bit off":
        flip_bit(target / "model.bin")
    elif kind == "one byte more":
        with (target / "model.bin").open("ab") as file:
            file.write(b"x")
    elif kind == "a linked file":
        (target / "model.bin").unlink()
        (target / "model.bin").symlink_to(original / "model.bin")


SOMETHING_ELSE = ["a file", "a link", "one file more", "one file less", "one bit off", "one byte more", "a linked file"]


@pytest.mark.parametrize("kind", SOMETHING_ELSE)
def test_target_that_holds_something_else_is_refused(run_url: str, cli_here: Cli, tmp_path: Path, kind: str) -> None:
    """Exit 7, and nothing is changed."""
    target = tmp_path / "here"
    _something_else(kind, target, tmp_path)
    before = files_in(tmp_path)
    what = {
        "one file less": "is missing",
        "one bit off": "has the blake3",
        "one byte more": "bytes instead of",
        "a linked file": "model.bin is a link",
        "one file more": "is not part of",
    }.get(kind, "")
    refused(cli_here("resume", run_url, "--to", target), 7, str(target), "--replace", what)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("kind", SOMETHING_ELSE)
def test_replace(run_url: str, cli_here: Cli, tmp_path: Path, kind: str) -> None:
    """--replace puts the checkpoint in the place of whatever was there, and what a link pointed to stays."""
    target = tmp_path / "here"
    _something_else(kind, target, tmp_path)
    original = files_in(tmp_path / "trained" / "checkpoint-300")
    assert cli_here("resume", run_url, "--to", target, "--replace").returncode == 0
    assert files_in(target) == original
    assert not target.is_symlink()
    assert not any(path.is_symlink() for path in target.rglob("*"))
    assert files_in(tmp_path / "trained" / "checkpoint-300") == original
    assert names(tmp_path) == ["here", "here.ckptmgr.json", "store", "trained"]


def test_replace_with_a_damaged_checkpoint_replaces_nothing(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """What was there goes only when its successor is complete and right."""
    target = tmp_path / "here"
    target.mkdir()
    (target / "mine").write_bytes(b"mine")
    flip_bit(data_dir(run_url, 300) / "model.bin")
    refused(cli_here("resume", run_url, "300", "--to", target, "--replace"), 5, "model.bin")
    assert files_in(target) == {"mine": b"mine"}
    assert names(tmp_path) == ["here", "store", "trained"]


@pytest.mark.parametrize("where", ["working directory", "above it", "home", "the run", "in the run", "the store"])
def test_targets_that_are_never_replaced(
    run_url: str, cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """--replace on the working or home directory, or on the run itself, can only be a mistake: exit 2, nothing changed."""
    run = Path(run_url.removeprefix("file://"))
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_bytes(b"x")
    monkeypatch.setenv("HOME", str(home))
    target = {
        "working directory": tmp_path,
        "above it": tmp_path.parent,
        "home": home,
        "the run": run,
        "in the run": run / "checkpoint-300",
        "the store": run.parent,
    }[where]
    before = files_in(tmp_path)
    refused(cli_here("resume", run_url, "--to", target, "--replace"), 2, str(target))
    assert files_in(tmp_path) == before


def test_default_target_beside_a_run_in_the_working_directory(
    run_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Called from within a local store, ./<run>/checkpoint-<step> would lie among the run's own files; twice, as every restart of a job does."""
    run = RunDirectory.open(run_url)
    before = files_in(tmp_path / "store" / "run")
    monkeypatch.chdir(tmp_path / "store")
    for _ in range(2):
        assert resume(run, parse_selector("latest")).directory == tmp_path / "store" / "run-resumed" / "checkpoint-300"
    assert files_in(tmp_path / "store" / "run") == before


def test_one_file_tree_prints_the_file(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path
) -> None:
    """A checkpoint of one file (a `.ckpt`) is that file for the trainer, and `verify` takes it by that name."""
    store = make_store("local")
    assert cli_here("push", make_checkpoint(7, {"deep/epoch=1.ckpt": b"lightning"}), f"{store.url}/run").returncode == 0
    resumed = cli_here("resume", f"{store.url}/run")
    assert resumed.stdout == f"{tmp_path}/run/checkpoint-7/deep/epoch=1.ckpt\n"
    assert Path(resumed.stdout.strip()).read_bytes() == b"lightning"
    assert cli_here("verify", tmp_path / "run" / "checkpoint-7").returncode == 0
    assert cli_here("resume", f"{store.url}/run", "--json").returncode == 0


# --- leftovers ----------------------------------------------------------------------------------------------------------


def test_interrupted_download_is_taken_up(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store failed in the middle: the final name does not exist, what arrived stays, and a repeat fetches only the rest."""
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "1")
    store = make_store("oss")
    (stem,) = push_steps(f"{store.url}/run", 100)
    target = tmp_path / "here"
    with store.server.faults.injected(
        Fault(status=403, code="AccessDenied", times=None, key="*/sub/opt.bin", method="GET")
    ):
        refused(cli_here("resume", f"{store.url}/run", "--to", target), 4, "sub/opt.bin")
    assert names(tmp_path) == ["here.partial", "trained"]
    assert (tmp_path / "here.partial" / "model.bin").read_bytes() == files_in(tmp_path / "trained" / "checkpoint-100")[
        "model.bin"
    ]
    store.server.log.clear()
    assert cli_here("resume", f"{store.url}/run", "--to", target).returncode == 0
    assert files_in(target) == files_in(tmp_path / "trained" / "checkpoint-100")
    assert names(tmp_path) == ["here", "here.ckptmgr.json", "trained"]
    fetched = [
        entry.key for entry in store.server.log if f"/checkpoints/{stem}/" in entry.key and entry.method == "GET"
    ]
    assert fetched == [f"exp/run/checkpoints/{stem}/sub/opt.bin"]


def test_leftover_of_another_checkpoint_never_ends_in_the_result(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """Of a .partial only bytes that verify are used: other files, folders in the place of files, files in the place of folders and links go."""
    partial = tmp_path / "here.partial"
    (partial / "model.bin").mkdir(parents=True)
    (partial / "model.bin" / "shard").write_bytes(b"old")
    (partial / "sub").write_bytes(b"a file where a folder must go")
    (partial / "stale.bin").write_bytes(b"old")
    (partial / "deep" / "er").mkdir(parents=True)
    (partial / "link").symlink_to(tmp_path / "trained")
    resumed = cli_here("resume", run_url, "--to", tmp_path / "here")
    assert resumed.returncode == 0, resumed.stderr
    original = tmp_path / "trained" / "checkpoint-300"
    assert files_in(tmp_path / "here") == files_in(original)
    assert sorted(p.name for p in (tmp_path / "here").rglob("*")) == sorted(p.name for p in original.rglob("*"))
    assert not partial.exists()
    assert (tmp_path / "trained").is_dir()


def test_leftover_with_the_right_size_and_wrong_bytes_is_fetched_again(
    run_url: str, cli_here: Cli, tmp_path: Path
) -> None:
    """Size is no proof."""
    partial = tmp_path / "here.partial"
    partial.mkdir()
    (partial / "model.bin").write_bytes(bytes(len(files_in(tmp_path / "trained" / "checkpoint-300")["model.bin"])))
    assert cli_here("resume", run_url, "--to", tmp_path / "here").returncode == 0
    assert files_in(tmp_path / "here") == files_in(tmp_path / "trained" / "checkpoint-300")


def test_leftover_through_a_link_does_not_reach_the_file_behind_it(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """A link in a .partial is removed, not written through."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"mine")
    (tmp_path / "here.partial").mkdir()
    (tmp_path / "here.partial" / "model.bin").symlink_to(outside)
    assert cli_here("resume", run_url, "--to", tmp_path / "here").returncode == 0
    assert outside.read_bytes() == b"mine"
    assert not (tmp_path / "here" / "model.bin").is_symlink()


def test_two_at_once_share_one_target(run_url: str, tmp_path: Path) -> None:
    """Two processes of a node may resume into the same directory: one fetches, the other finds it there; neither calls it damaged."""
    results = []
    started = threading.Barrier(2)

    def one() -> None:
        started.wait(60)
        results.append(resume(RunDirectory.open(run_url), parse_selector("latest"), to=tmp_path / "here"))

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(str(result.source) for result in results) == ["None", "remote"]
    assert files_in(tmp_path / "here") == files_in(tmp_path / "trained" / "checkpoint-300")
    assert names(tmp_path) == ["here", "here.ckptmgr.json", "store", "trained"]


# --- disks --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 40 MB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(mount)], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"cannot mount a tmpfs (needs root): {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_full_disk_is_noticed_before_the_first_byte(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, small_disk: Path
) -> None:
    """A checkpoint that does not fit is refused (4) with both numbers, and nothing is fetched (K069)."""
    store = make_store("oss")
    size = 41 << 20
    assert cli_here("push", make_checkpoint(1, {"model.bin": bytes(size)}), f"{store.url}/run").returncode == 0
    store.server.log.clear()
    refused(cli_here("resume", f"{store.url}/run", "--to", small_disk / "here"), 4, str(size), "bytes free", "--to")
    assert names(small_disk) == []
    assert not any("/checkpoints/" in entry.key for entry in store.server.log)


def test_disk_that_fills_up_during_the_transfer(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, small_disk: Path
) -> None:
    """No half-restored directory; what arrived stays, and a repeat with room goes on from there."""
    store = make_store("local")
    directory = make_checkpoint(1, {"a.bin": b"a" * 1000, "b.bin": b"b" * (20 << 20)})
    assert cli_here("push", directory, f"{store.url}/run").returncode == 0

    class FillsUp:
        def started(self, manifest: Manifest, source: str) -> None:
            (small_disk / "other").write_bytes(bytes(30 << 20))

        def moved(self, count: int) -> None:
            pass

    run = RunDirectory.open(f"{store.url}/run")
    with pytest.raises(DiskFullError):
        resume(run, parse_selector("latest"), to=small_disk / "here", progress=FillsUp())
    assert names(small_disk) == ["here.partial", "other"]
    (small_disk / "other").unlink()
    assert cli_here("resume", f"{store.url}/run", "--to", small_disk / "here").returncode == 0
    assert files_in(small_disk / "here") == files_in(directory)


def test_mount_point_as_target_is_refused(run_url: str, cli_here: Cli, small_disk: Path) -> None:
    """It cannot be given its content in one step: exit 2, with a directory to use instead."""
    refused(cli_here("resume", run_url, "--to", small_disk), 2, "mount point", f"--to {small_disk / 'checkpoint'}")
    assert names(small_disk) == []


def test_store_on_a_full_disk(make_checkpoint: MakeCheckpoint, cli_here: Cli, small_disk: Path) -> None:
    """A push that does not fit is refused by the disk (4), commits nothing, and leaves no half-written file under a final name."""
    result = cli_here("push", make_checkpoint(1, {"model.bin": bytes(41 << 20)}), small_disk / "store" / "run")
    refused(result, 4, "No space left", "free some space")
    assert list((small_disk / "store").rglob("manifests/*")) == []
    assert list((small_disk / "store").rglob("model.bin")) == []
