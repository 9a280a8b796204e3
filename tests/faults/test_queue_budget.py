"""The local tier as a queue with limits: a store that is down for longer than it holds, a disk that runs full, is read-only, is another one."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.backends.base import Backend
from ckptmgr.core.errors import AccessDeniedError, CkptmgrError, DiskFullError
from ckptmgr.core.layout import Stem
from ckptmgr.core.retention import KeepLast
from ckptmgr.run import locks
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import file_problem
from ckptmgr.run.intake import take
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faulty import Call, FaultyBackend, StoreFault, transient
from ckptmgr.testing.stores import Store
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.metrics import read_metrics
from ckptmgr.transfer.queue import QueueRules, make_room

Cli = Callable[..., subprocess.CompletedProcess[str]]
MakeStore = Callable[[str], Store]
LocalSave = Callable[..., Stem]
NewTier = Callable[[RunDirectory], LocalTier]

DEADLINE_S = 60.0
WEIGHTS = 40_000  # float32: 160 kB a save, besides the random states
ONE = WEIGHTS * 4 + 20_000


def state_of(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((WEIGHTS,), float(value))}}


def whole(tier: LocalTier) -> list[int]:
    """The steps of the tier's checkpoints, oldest first; each has every byte, and no other data is there."""
    manifests = tier.run.history().manifests
    for stem, manifest in manifests.items():
        assert [file_problem(tier.data_dir(stem) / e.path, e) for e in manifest.files] == [None] * len(manifest.files)
    assert {path.name for path in (tier.root / "checkpoints").iterdir()} == {str(stem) for stem in manifests}
    return [stem.step for stem in sorted(manifests)]


class Down:
    """A store whose uploads are held, and then fail, until it is up."""

    def __init__(self) -> None:
        self._backend: FaultyBackend | None = None

    def __call__(self, inner: Backend) -> Backend:
        self._backend = FaultyBackend(inner)
        self.gate = self._backend.add(StoreFault(verb="put_file", times=None, hold=True, error=transient))
        return self._backend

    def calls(self) -> list[Call]:
        """The uploads of files that were asked for."""
        assert self._backend is not None
        return self._backend.calls("put_file")

    def up(self) -> None:
        assert self._backend is not None
        self._backend.clear()


# --- row 10: over budget --------------------------------------------------------------------------------------------------


def test_an_outage_longer_than_the_queue(
    make_store: MakeStore, tmp_path: Path, cli_here: Cli, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 10: room for five saves and seven come. The one being uploaded, the best, the emergency and the newest stay; two are given up: counted in
    the status, named in the log, in the figures and by `ckptmgr status`, and nowhere mistaken for saved."""
    store = make_store("local")
    url, disk, down = f"{store.url}/run", tmp_path / "disk", Down()
    manager = CheckpointManager(
        url, local_dir=disk, wrap_backend=down, queue=QueueRules(max_bytes=int(5.5 * ONE), min_free_bytes=0)
    )
    manager.begin()
    saves: dict[int, str | None] = {}

    def save(step: int, loss: float, *reasons: str) -> None:
        modes, metrics = {"eval_loss": "min"}, {"eval_loss": loss}
        saves[step] = manager.save(step, state_of(step), metrics=metrics, metric_modes=modes, reasons=reasons)
        assert manager.wait_saved(DEADLINE_S)

    with caplog.at_level(logging.WARNING, "ckptmgr"):
        save(100, 0.9)
        assert down.gate.reached.wait(DEADLINE_S)
        save(200, 0.1)
        save(300, 0.8, "sigterm")
        for step in (400, 500, 600, 700):
            save(step, 0.7)
    tier = LocalTier.open(disk)
    assert whole(tier) == [100, 200, 300, 600, 700]
    status = manager.status()
    assert (status.save_failures, status.uploads.dropped) == (0, 2)
    assert [stem.step for stem in status.uploads.pending] == [700, 600, 300, 200, 100]
    assert status.uploads.lag is not None
    assert status.uploads.lag.step == 700
    given_up = [line for line in caplog.messages if "was given up before it was uploaded" in line]
    assert [line.split(",")[0] for line in given_up] == [f"step {step} ({saves[step]}" for step in (400, 500)]
    assert [record["step"] for record in read_metrics(disk) if record["kind"] == "drop"] == [400, 500]

    told = cli_here("status", disk, "--json")
    assert told.returncode == 6
    entries = json.loads(told.stdout)["tiers"][0]["entries"]
    assert [entry["step"] for entry in entries if entry["state"] == "dropped"] == [500, 400]

    down.up()
    assert manager.close().pending == ()
    assert [stem.step for stem in RunDirectory.open(url).stems()] == [100, 200, 300, 600, 700]
    assert cli_here("status", disk).returncode == 6


def test_what_retention_would_remove_at_once_is_not_sent(make_store: MakeStore, tmp_path: Path, cli_here: Cli) -> None:
    """Six wait while the store is down, and two may stay: when it is up two are sent, the others are neither pending nor lost, for anybody who asks."""
    url, disk, down = f"{make_store('local').url}/run", tmp_path / "disk", Down()
    manager = CheckpointManager(
        url, local_dir=disk, wrap_backend=down, keep=KeepLast(2), keep_local=KeepLast(3), transfer="thread"
    )
    manager.begin()
    manager.save(100, state_of(1))
    assert manager.wait_saved(DEADLINE_S)
    assert down.gate.reached.wait(DEADLINE_S)
    for step in (200, 300, 400, 500, 600):
        manager.save(step, state_of(step))
        assert manager.wait_saved(DEADLINE_S)
    assert len(manager.status().uploads.pending) == 6
    before = len(down.calls())
    down.up()
    report = manager.close()
    assert (report.pending, report.dropped, report.exit_code) == ((), 0, 0)
    status = manager.status().uploads
    assert (status.pending, status.dropped, status.lag, status.committed) == ((), 0, None, 2)

    sent = down.calls()[before:]
    assert 2 * WEIGHTS * 4 <= sum(call.size for call in sent) < 3 * WEIGHTS * 4
    assert [stem.step for stem in RunDirectory.open(url).stems()] == [500, 600]
    assert whole(LocalTier.open(disk)) == [400, 500, 600]
    told = cli_here("status", disk, "--json")
    (tier,) = json.loads(told.stdout)["tiers"]
    assert (told.returncode, tier["pending"], tier["dropped"], tier["durable"]) == (0, 0, 0, True)
    assert [(entry["step"], entry["state"]) for entry in tier["entries"]] == [
        (600, "uploaded"),
        (500, "uploaded"),
        (400, "pruned"),
    ]
    assert "step 400 pruned: not sent: keep=KeepLast(n=2) would remove it at once" in cli_here("status", disk).stdout
    drained = cli_here("drain", disk, "--json")
    assert (drained.returncode, json.loads(drained.stdout)["pending"]) == (0, [])
    assert [stem.step for stem in RunDirectory.open(url).stems()] == [500, 600]


def test_drops_are_in_the_exit_code_of_one_drain(
    make_store: MakeStore, new_tier: NewTier, local_save: LocalSave, cli_here: Cli
) -> None:
    """I6: named once, exit 6, although everything else was uploaded; the next one has nothing to say."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    first, second = (local_save(tier, run, step, {"a.bin": b"x" * 1000}) for step in (100, 200))
    make_room(tier, run.url, 1000, QueueRules(max_bytes=2000, min_free_bytes=0))
    done = cli_here("drain", tier.root)
    assert done.returncode == 6
    assert f"step 100 ({first}, 1 kB) was given up before it was uploaded: saves of 2 kB wait" in done.stderr
    assert run.stems() == [second]
    done = cli_here("drain", tier.root)
    assert (done.returncode, done.stderr) == (0, "")
    assert str(first) not in done.stdout
    assert cli_here("status", tier.root).returncode == 0


# --- rows 6 and 9: a full, a read-only, a missing disk --------------------------------------------------------------------


def test_the_queue_keeps_clear_of_the_end_of_the_disk(
    make_store: MakeStore, disk_of: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Row 6: with the store down, saves of 160 kB on a disk of 1 MiB never meet its end: older ones give way first, by name, and the newest is
    always whole."""
    small = disk_of(1024)
    down = Down()
    manager = CheckpointManager(f"{make_store('local').url}/run", local_dir=small / "tier", wrap_backend=down)
    manager.begin()
    manager.save(100, state_of(100))
    assert manager.wait_saved(DEADLINE_S)
    assert down.gate.reached.wait(DEADLINE_S)
    with caplog.at_level(logging.WARNING, "ckptmgr"):
        for step in range(200, 1300, 100):
            manager.save(step, state_of(step))
            assert manager.wait_saved(DEADLINE_S)
            assert whole(LocalTier.open(small / "tier"))[-1] == step
    assert manager.status().save_failures == 0
    assert manager.status().uploads.dropped == sum("was given up" in line for line in caplog.messages) >= 6
    assert "No space left" not in caplog.text
    down.up()
    assert manager.close().pending == ()


def test_a_disk_that_others_fill_costs_the_new_save_and_no_old_one(
    make_store: MakeStore, disk_of: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Row 6: nothing that could give way helps: not saved, with both numbers, training goes on, the older ones are kept; with room again it works."""
    small = disk_of(1024)
    down = Down()
    url = f"{make_store('local').url}/run"
    manager = CheckpointManager(url, local_dir=small / "tier", wrap_backend=down)
    manager.begin()
    manager.save(100, state_of(100))
    assert down.gate.reached.wait(DEADLINE_S)
    manager.save(200, state_of(200))
    assert manager.wait_saved(DEADLINE_S)
    room = os.statvfs(small)
    filler = small / "of-another-job"
    filler.write_bytes(b"x" * (room.f_bavail * room.f_frsize - 100_000))
    with caplog.at_level(logging.WARNING, "ckptmgr"):
        manager.save(300, state_of(300))
        assert manager.wait_saved(DEADLINE_S)
    (line,) = [line for line in caplog.messages if "step 300" in line]
    assert "free and must keep 10.5 kB, and the save takes 1" in line
    assert whole(LocalTier.open(small / "tier")) == [100, 200]
    assert manager.status().uploads.dropped == 0
    filler.unlink()
    manager.save(400, state_of(400))
    assert manager.wait_saved(DEADLINE_S)
    assert whole(LocalTier.open(small / "tier")) == [100, 200, 400]
    down.up()
    assert manager.close().pending == ()
    assert [stem.step for stem in RunDirectory.open(url).stems()] == [100, 200, 400]


def read_only(directory: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(directory)], check=True)


@pytest.mark.parametrize("known", [False, True], ids=["new", "used"])
def test_a_read_only_tier_is_an_error_before_step_1(
    make_store: MakeStore, disk_of: Callable[[int], Path], known: bool
) -> None:
    """Row 9: at the start, in one line that names it and says what to look at."""
    url = f"{make_store('local').url}/run"
    disk = disk_of(1024)
    if known:
        with CheckpointManager(url, local_dir=disk / "tier") as manager:
            manager.save(100, state_of(100))
    read_only(disk)
    manager = CheckpointManager(url, local_dir=disk / "tier", on_existing="new-lineage")
    with pytest.raises(AccessDeniedError, match=str(disk)) as caught:
        manager.begin()
    assert "mounted read-only" in str(caught.value)
    assert "\n" not in str(caught.value)
    if known:
        with pytest.raises(CkptmgrError, match="tier is not writable"):
            manager.restore({"model": {}})


def test_a_full_tier_is_an_error_before_step_1(make_store: MakeStore, disk_of: Callable[[int], Path]) -> None:
    """Row 9."""
    disk = disk_of(1024)
    room = os.statvfs(disk)
    (disk / "of-another-job").write_bytes(b"x" * (room.f_bavail * room.f_frsize))
    manager = CheckpointManager(f"{make_store('local').url}/run", local_dir=disk / "tier")
    with pytest.raises(DiskFullError, match=str(disk)):
        manager.begin()


@pytest.mark.parametrize("what", ["file", "below a file", "dangling link"])
def test_a_tier_that_cannot_be_made_is_an_error_before_step_1(make_store: MakeStore, tmp_path: Path, what: str) -> None:
    """Row 9: something else is in its place; nothing of the run has begun."""
    store = make_store("local")
    if what == "dangling link":
        (tmp_path / "scratch").symlink_to(tmp_path / "unmounted" / "scratch")
        local = tmp_path / "scratch"
    else:
        (tmp_path / "scratch").write_text("a file")
        local = tmp_path / "scratch" / ("tier" if what == "below a file" else "")
    manager = CheckpointManager(f"{store.url}/run", local_dir=local)
    with pytest.raises(CkptmgrError, match="scratch") as caught:
        manager.begin()
    assert not isinstance(caught.value, AssertionError)
    assert "\n" not in str(caught.value)
    assert [key for key in store.keys("run/") if "attempts/" in key] == []


def test_a_tier_that_is_missing_is_made(make_store: MakeStore, tmp_path: Path) -> None:
    """Row 9: with its parents."""
    url = f"{make_store('local').url}/run"
    with CheckpointManager(url, local_dir=tmp_path / "a" / "b" / "tier") as manager:
        manager.save(100, state_of(100))
    assert [stem.step for stem in RunDirectory.open(url).stems()] == [100]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An empty directory to mount something on; unmounted at the end, however often it was mounted."""
    directory = tmp_path / "mounted"
    directory.mkdir()
    yield directory
    while os.path.ismount(directory):
        subprocess.run(["umount", "-l", str(directory)], check=True)


def test_a_tier_that_vanishes_stops_no_training(
    make_store: MakeStore, disk_of: Callable[[int], Path], place: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is unmounted: saves fail loudly instead of filling the disk below, training goes on, and with the disk back so do the saves."""
    # By a second path to it, for a tmpfs whose last mount is gone loses what it holds.
    disk, down = disk_of(1024), Down()
    bind = ["mount", "--bind", str(disk), str(place)]
    subprocess.run(bind, check=True)
    manager = CheckpointManager(f"{make_store('local').url}/run", local_dir=place / "tier", wrap_backend=down)
    manager.begin()
    manager.save(100, state_of(100))
    assert down.gate.reached.wait(DEADLINE_S)
    subprocess.run(["umount", "-l", str(place)], check=True)
    with caplog.at_level(logging.ERROR, "ckptmgr"):
        manager.save(200, state_of(200))
        assert manager.wait_saved(DEADLINE_S)
    assert manager.status().save_failures == 1
    assert any("step 200" in line and "training goes on" in line for line in caplog.messages)
    assert list(place.iterdir()) == []
    subprocess.run(bind, check=True)
    manager.save(300, state_of(300))
    down.up()
    assert manager.close().pending == ()
    assert whole(LocalTier.open(place / "tier"))[-1] == 300


# --- row 8: another file system -----------------------------------------------------------------------------------------------


def test_what_lies_on_another_disk_is_copied_and_synced(
    make_store: MakeStore, disk_of: Callable[[int], Path], new_tier: NewTier
) -> None:
    """Row 8: no link reaches there (EXDEV). What the trainer does to its files afterwards is nothing to the tier."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    source = disk_of(1024) / "checkpoint-100"
    source.mkdir()
    data = os.urandom(100_000)
    (source / "model.bin").write_bytes(data)
    stem = Stem(1, 100, 1, "0123abcd")
    prepared = take(tier, source, stem)
    assert (prepared / "model.bin").stat().st_nlink == 1
    (source / "model.bin").write_bytes(b"rewritten in place")
    from ckptmgr.core.manifest import Manifest

    tier.commit(Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared)), prepared, target=run.url)
    assert (tier.data_dir(stem) / "model.bin").read_bytes() == data
    assert drain(tier, run).committed == (stem,)


# --- row 11: two processes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_two_processes_drain_one_tier(
    make_store: MakeStore, new_tier: NewTier, local_save: LocalSave, kind: str
) -> None:
    """Row 11: together they upload everything, each file and each manifest once, and both say what they have seen."""
    store = make_store(kind)
    server: Any = store.server
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = new_tier(run)
    stems = [local_save(tier, run, step) for step in range(100, 900, 100)]
    server.log.clear()
    # They start at the same moment, each with the interpreter up and everything imported.
    script = (
        "import sys\nfrom ckptmgr.backends.registry import open_store\nfrom ckptmgr.cli.main import run\n"
        "open_store(sys.argv[2])\nprint('up', flush=True)\nsys.stdin.readline()\nsys.exit(run(['drain', sys.argv[1]]))"
    )
    command = [sys.executable, "-c", script, str(tier.root), run.url]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]
    for process in both:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
    said = []
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in both:
        said.append(process.communicate(timeout=DEADLINE_S)[1])
    assert sorted(run.stems()) == stems
    assert tier.uploaded() == set(stems)
    puts = [request.key for request in server.log if request.method == "PUT" and "/attempts/" not in request.key]
    assert len(puts) == len(set(puts)) == 3 * len(stems)
    committed = [
        stem for lines in said for line in lines.splitlines() if line.startswith("committed") and (stem := line)
    ]
    assert len(committed) == len(stems)
    # Each waits for what the other has in hand.
    assert {process.returncode for process in both} == {0}


def test_a_drain_waits_for_what_another_process_has(
    make_store: MakeStore, new_tier: NewTier, local_save: LocalSave
) -> None:
    """Row 11: the lock of one save: the others go up, it says once who is waited for, and takes that one up when the other process has left it."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    held, free = (local_save(tier, run, step) for step in (100, 200))
    command = [sys.executable, "-m", "ckptmgr.cli.main", "drain", str(tier.root)]
    with locks.exclusive(run.uuid, held, "upload"):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stderr is not None
        said = process.stderr.readline()
        assert f"step 100 ({held}) is being uploaded by another process: waiting for it" in said
        assert run.stems() == [free]
    _, rest = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert "another process" not in rest
    assert run.stems() == [held, free]


def test_a_drain_does_not_wait_for_ever(
    make_store: MakeStore, new_tier: NewTier, local_save: LocalSave, cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 11: the other process goes on and on: exit 6 names what is left in its hands."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    held, free = (local_save(tier, run, step) for step in (100, 200))
    monkeypatch.setattr("ckptmgr.cli.draining._OTHERS_S", 0.0)
    with locks.exclusive(run.uuid, held, "upload"):
        done = cli_here("drain", tier.root)
    assert done.returncode == 6
    assert f"1 save still in the hands of another process: {held}" in done.stderr
    assert run.stems() == [free]
    assert cli_here("drain", tier.root).returncode == 0
    assert run.stems() == [held, free]


def test_what_another_process_finished_and_removed_is_not_tried_again(
    make_store: MakeStore, new_tier: NewTier, local_save: LocalSave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 11: between the look at the queue and the lock, the other one committed it and freed the disk of it."""
    run = RunDirectory.open_or_create(f"{make_store('local').url}/run")
    tier = new_tier(run)
    stem = local_save(tier, run, 100)
    late = LocalTier.open(tier.root)
    looks = iter([late.pending()])
    assert drain(tier, run).committed == (stem,)
    tier.remove(stem)
    monkeypatch.setattr(late, "pending", lambda target=None: next(looks, []))
    done = drain(late, run)
    assert (done.committed, done.pending, done.errors) == ((), (), {})
    assert late.journal.entries() == []
