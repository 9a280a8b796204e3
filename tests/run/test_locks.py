"""Locks of this machine: who excludes whom, and that neither a death nor a fork leaves one behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ckptmgr.core.errors import ConflictError
from ckptmgr.run import locks
from ckptmgr.run.tier import LocalTier


@pytest.fixture(autouse=True)
def _own_lock_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPTMGR_LOCK_DIR", str(tmp_path / "locks"))


def test_a_reader_keeps_clean_up_out_and_readers_share() -> None:
    """I8: what is being read is not removed; a second reader is welcome."""
    with locks.reading("run", "stem"), locks.reading("run", "stem"):
        with locks.exclusive("run", "stem", "read") as free:
            assert not free
        with locks.exclusive("run", "other", "read") as free:
            assert free
    with locks.exclusive("run", "stem", "read") as free:
        assert free


def test_two_uploads_of_one_save_exclude_each_other() -> None:
    """Only one of two processes that drain one tier has a save in hand."""
    with locks.exclusive("run", "stem", "upload") as first, locks.exclusive("run", "stem", "upload") as second:
        assert (first, second) == (True, False)


def test_processes_with_temporary_folders_of_their_own_see_each_others_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scheduler gives each job a TMPDIR; a job and the transfer process of the one before share a tier all the same. Without a common folder, the
    temporary one has to do."""
    monkeypatch.delenv("CKPTMGR_LOCK_DIR")
    run = f"test-{tmp_path.name}-{os.getpid()}"
    ask = "import sys; from ckptmgr.run import locks; print(locks.is_held(sys.argv[1], 'stem', 'upload'))"

    def is_held() -> str:
        done = subprocess.run(
            [sys.executable, "-c", ask, run],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    with locks.exclusive(run, "stem", "upload") as free:
        assert free
        assert is_held() == "True"
        assert list(tmp_path.iterdir()) == []
    assert is_held() == "False"
    locks._lock_dir(run).rmdir()
    monkeypatch.setattr(locks, "_COMMON", str(tmp_path / "nowhere"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with locks.exclusive(run, "stem", "upload"):
        assert (tmp_path / f"ckptmgr-locks-{os.getuid()}" / run / "stem.upload").exists()


def test_a_second_process_cannot_save_into_a_tier(tmp_path: Path) -> None:
    """Two processes on one tier would clean up each other's half-written saves."""
    first = LocalTier.open_or_create(tmp_path / "tier", uuid="u")
    second = LocalTier.open(tmp_path / "tier")
    first.hold()
    with pytest.raises(ConflictError, match="is saving into"):
        second.hold()
    first.release()
    second.hold()
    second.release()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_worker_does_not_keep_the_tier_of_its_dead_parent(tmp_path: Path) -> None:
    """A DataLoader worker that outlives a killed trainer must not keep the next start out."""
    tier = LocalTier.open_or_create(tmp_path / "tier", uuid="u")
    to_parent, from_child = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        tier.hold()
        worker = os.fork()
        if worker == 0:
            os.write(from_child, f"{os.getpid()}\n".encode())
            signal.pause()
        signal.pause()
    try:
        worker_pid = int(os.read(to_parent, 32))
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
        try:
            tier.hold()
        finally:
            os.kill(worker_pid, signal.SIGKILL)
        tier.release()
    finally:
        os.close(to_parent)
        os.close(from_child)
