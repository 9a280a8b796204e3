"""How a process ends, and what a forked child of it may do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.core.layout import RESUMED, Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

LocalSave = Callable[..., Stem]

DEADLINE_S = 60.0

PRELUDE = """
import os, sys, threading
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.prune import prune
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.uploader import Uploader
tier, run = LocalTier.open(sys.argv[1]), RunDirectory.open(sys.argv[2])
uploader = Uploader(tier, run, stop=threading.Event(), committed=lambda stem: prune(run, KeepLast(1)), exit_timeout_s=60)
uploader.notify()
"""


@pytest.mark.skipif((3, 12) <= sys.version_info < (3, 12, 2), reason="this Python starts no thread at its end")
def test_a_program_that_ends_without_close_has_its_queue_drained(
    make_store: Callable[[str], Store],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: LocalSave,
) -> None:
    """Also what needs thread pools, which Python closes at its end: a file in several parts, and retention's parallel reads."""
    store = make_store("moto")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = new_tier(run)
    stems = [local_save(tier, run, step, {"a.bin": os.urandom((33 << 20) if step == 1 else 10)}) for step in (1, 2, 3)]
    held = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before"))
    script = PRELUDE + "print('the end', flush=True)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tier.root), run.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "the end\n"
    assert held.reached.wait(DEADLINE_S)
    held.release()
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0
    assert errors == ""
    assert tier.uploaded() == set(stems)
    assert [key.split("/")[2] for key in store.keys("run/checkpoints/")] == [str(stems[-1])]


def test_a_forked_child_uploads_nothing(
    make_store: Callable[[str], Store],
    new_tier: Callable[[RunDirectory], LocalTier],
    local_save: LocalSave,
) -> None:
    """I11: in a child, notify starts no thread, close returns what is pending at once, and its end waits for nothing."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    tier = new_tier(run)
    child = """
pid = os.fork()
if pid == 0:
    import json
    from ckptmgr.core.layout import Stem
    from ckptmgr.core.manifest import Manifest
    from ckptmgr.run.contents import describe
    prepared = tier.prepare(Stem(1, 7, 1, "0123abcd"))
    (prepared / "a.bin").write_bytes(b"a")
    tier.commit(Manifest(stem=Stem(1, 7, 1, "0123abcd"), run_uuid=run.uuid, files=describe(prepared)), prepared, target=run.url)
    uploader.notify()
    left = uploader.close(60)
    assert [str(stem) for stem in left] == ["000001-000000000007-000001-0123abcd"], left
    assert [t.name for t in threading.enumerate()] == [threading.main_thread().name], threading.enumerate()
    sys.exit(42)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
assert run.stems() == []
uploader.notify()
assert uploader.close(60) == []
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + child, str(tier.root), run.url],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert [stem.step for stem in run.stems()] == [7]


def test_a_second_process_that_restores_does_not_take_the_first_ones_directory(
    make_store: Callable[[str], Store], tmp_path: Path
) -> None:
    """An evaluation on the same machine asks for a checkpoint while a training loads from its own; what dead processes left goes."""
    import torch

    from ckptmgr.training.manager import CheckpointManager

    store = make_store("local")
    url, disk = f"{store.url}/run", tmp_path / "disk"
    with CheckpointManager(url, local_dir=disk) as manager:
        manager.save(100, {"model": {"w": torch.ones(3)}})
    living, dead = (
        disk / RESUMED / name / "checkpoint-100" / "model.safetensors" for name in (str(os.getppid()), "not-a-pid")
    )
    for path in (living, dead):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"x")
    with CheckpointManager(url, local_dir=disk) as second:
        assert second.restore({"model": {}}) is not None
        path = second.resume_path() or tmp_path
    assert living.read_bytes() == b"x"
    assert not dead.exists()
    assert path.parent == disk / RESUMED / str(os.getpid())
