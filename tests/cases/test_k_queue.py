"""Cases of the local queue: room for the next checkpoint, and what is newest while uploads overtake each other."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptmgr.backends.base import Backend
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, transient
from ckptmgr.testing.stores import Store
from ckptmgr.training import saving
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.transfer.queue import QueueRules, Room

pytestmark = pytest.mark.usefixtures("uploads_in_a_thread")

Ask = Callable[..., Any]
MakeStore = Callable[[str], Store]

DEADLINE_S = 60.0
MIB = 1 << 20


@pytest.fixture
def disk_of_100_mib(disk_of: Callable[..., Path]) -> Path:
    return disk_of(100 * 1024, "disk")


def state_of(value: float, *, mib: int = 60) -> dict[str, Any]:
    return {"model": {"w": torch.full((mib * MIB // 4,), float(value))}}


def assert_100_is_all_there_is(url: str, tier: Path, ask: Ask) -> None:
    """The run has step 100 and nothing else; the tier's copy of it is whole, and a restart gets it."""
    assert [row["step"] for row in ask("ls", url)["checkpoints"]] == [100]
    assert ask("verify", url) == {"checked": 1, "damaged": []}
    assert ask("verify", tier) == {"checked": 1, "damaged": []}
    (row,) = ask("ls", url)["checkpoints"]
    resumed = ask("resume", url, "--local-dir", tier)
    assert (resumed["id"], resumed["step"]) == (row["id"], 100)
    # Half of a save that was killed may lie in the tier: it is named, and never one that was committed.
    assert all("never committed" in skipped["why"] for skipped in resumed["skipped"])
    weights = load_file(Path(resumed["path"]) / "model.safetensors")["w"]
    assert weights.shape == (60 * MIB // 4,)
    assert bool((weights == 100.0).all())


@pytest.mark.parametrize("keep", [1, 2])
def test_k062_the_old_one_stays_until_the_new_one_is_whole(
    make_store: MakeStore,
    disk_of_100_mib: Path,
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keep: int,
) -> None:
    """60 MiB of 100 are taken: 200 is not saved, said with both numbers; the same when another job takes the room half-way. 100 is untouched."""
    url, tier = f"{make_store('local').url}/run", disk_of_100_mib / "tier"
    with CheckpointManager(url, local_dir=tier, keep=KeepLast(keep), keep_local=KeepLast(keep)) as manager:
        manager.save(100, state_of(100))
    manager = CheckpointManager(url, local_dir=tier, keep=KeepLast(keep), keep_local=KeepLast(keep))
    manager.resume_path()
    with caplog.at_level(logging.WARNING, "ckptmgr"):
        manager.begin()
        manager.save(200, state_of(200))
        assert manager.wait_saved(DEADLINE_S)
        # The check passes, and then the disk turns out to have room for half of it.
        monkeypatch.setattr(saving, "make_room", lambda *args, **kwargs: Room(admitted=True))
        manager.save(300, state_of(300))
        assert manager.wait_saved(DEADLINE_S)
    (warned,) = [line for line in caplog.messages if "saves may fail" in line]
    assert "a checkpoint takes 62.9 MB, and the disk of" in warned
    (refused,) = [line for line in caplog.messages if line.startswith("step 200 ")]
    assert "MB free and must keep 1.05 MB, and the save takes 62.9 MB" in refused
    (failed,) = [line for line in caplog.messages if line.startswith("step 300 ")]
    assert "No space left on device" in failed
    manager.close()
    assert_100_is_all_there_is(url, tier, ask)


def test_k062_killed_half_way(make_store: MakeStore, tmp_path: Path, ask: Ask) -> None:
    """SIGKILL with half of 200 on the disk: not listed, not resumed, tidied away by the next start."""
    url, tier = f"{make_store('local').url}/run", tmp_path / "tier"
    with CheckpointManager(url, local_dir=tier) as manager:
        manager.save(100, state_of(100))
    script = (
        "import os, signal, sys\n"
        "from ckptmgr.core.layout import Stem\n"
        "from ckptmgr.run.tier import LocalTier\n"
        "prepared = LocalTier.open(sys.argv[1]).prepare(Stem(1, 200, 2, '0123abcd'))\n"
        f"(prepared / 'model.pt').write_bytes(bytes({30 * MIB}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(tier)], check=False, timeout=DEADLINE_S)
    assert killed.returncode == -signal.SIGKILL
    assert len(list((tier / "checkpoints").iterdir())) == 2
    assert_100_is_all_there_is(url, tier, ask)
    manager = CheckpointManager(url, local_dir=tier)
    manager.resume_path()
    manager.begin()
    manager.close()
    assert [path.name for path in (tier / "checkpoints").iterdir()] == [
        str(s) for s in LocalTier.open(tier).run.stems()
    ]


def test_k069_too_little_disk_is_said_at_the_start(
    make_store: MakeStore, disk_of_100_mib: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The size is known from the checkpoint before: below one of them both numbers are said, before the first step."""
    url, tier = f"{make_store('local').url}/run", disk_of_100_mib / "tier"
    with CheckpointManager(url, local_dir=tier) as manager:
        manager.save(100, state_of(100, mib=20))
    (disk_of_100_mib / "of-another-job").write_bytes(bytes(65 * MIB))
    manager = CheckpointManager(url, local_dir=tier)
    manager.resume_path()
    with caplog.at_level(logging.WARNING, "ckptmgr"):
        manager.begin()
    manager.close()
    (line,) = [line for line in caplog.messages if "saves may fail" in line]
    assert "a checkpoint takes 21 MB, and the disk of" in line
    assert " MB free, 1.05 MB of which must stay free" in line


class Slow:
    """A store that sends the answer of step 100's upload back late."""

    def __init__(self) -> None:
        self.gate: Any = None

    def __call__(self, inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        self.gate = backend.add(
            StoreFault(verb="put_file", path="*/checkpoints/*-000000000100-*", hold=True, error=transient)
        )
        return backend


def test_k095_what_is_newest_never_goes_back(make_store: MakeStore, tmp_path: Path) -> None:
    """100 is held and tried again while 200 is committed by another process of this machine: newest is 200 from then on, both are committed, and
    the queue never held more than its budget."""
    url, slow = f"{make_store('local').url}/run", Slow()
    one = 4 * MIB
    manager = CheckpointManager(
        url, local_dir=tmp_path / "tier", wrap_backend=slow, retry_after_s=0.0, queue=QueueRules(max_bytes=3 * one)
    )
    manager.begin()
    run = RunDirectory.open(url)
    seen = [run.history().newest()]
    first = manager.save(100, state_of(100, mib=4))
    assert slow.gate.reached.wait(DEADLINE_S)
    second = manager.save(200, state_of(200, mib=4))
    assert manager.wait_saved(DEADLINE_S)
    assert manager.status().uploads.pending_bytes < 3 * one
    command = [sys.executable, "-m", "ckptmgr.cli.main", "--verbose", "drain", str(tmp_path / "tier")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as other:
        assert other.stderr is not None
        assert any("waiting for it" in line for line in other.stderr)  # for 100; 200 is done
        seen.append(run.history().newest())
        slow.gate.release()
        other.communicate(timeout=DEADLINE_S)
        assert other.returncode == 0
    assert manager.close().pending == ()
    seen.append(run.history().newest())
    assert [None if stem is None else str(stem) for stem in seen] == [None, second, second]
    assert [str(stem) for stem in run.stems()] == [first, second]
