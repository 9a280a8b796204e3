"""Managers in trouble: superseded, cut off from the store, two on one tier; what stays on disk, and what they say."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.backends.base import Backend
from ckptmgr.core.errors import BackendError, ConflictError
from ckptmgr.core.layout import Stem
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faulty import ActiveStoreFault, FaultyBackend, StoreFault, denied, transient
from ckptmgr.testing.stores import Store
from ckptmgr.training.manager import CheckpointManager

Ask = Callable[..., Any]

DEADLINE_S = 60.0


def state_of(value: float) -> dict[str, Any]:
    """The state of a toy training."""
    return {"model": {"w": torch.full((8,), value)}}


class Faults:
    """One set of faults for all backends of a manager, and one log."""

    def __init__(self) -> None:
        self._backends: list[FaultyBackend] = []

    def __call__(self, inner: Backend) -> Backend:
        self._backends.append(FaultyBackend(inner))
        return self._backends[-1]

    def add(self, fault: StoreFault) -> ActiveStoreFault:
        """In force for the newest backend, which is that of `begin`."""
        return self._backends[-1].add(fault)

    def clear(self) -> None:
        for backend in self._backends:
            backend.clear()


@pytest.fixture
def faults() -> Iterator[Faults]:
    made = Faults()
    yield made
    made.clear()


def test_a_superseded_attempt_commits_and_prunes_nothing(
    store: Store, ask: Ask, tmp_path: Path, caplog: pytest.LogCaptureFixture, faults: Faults
) -> None:
    """I12: another process has resumed the run; this one's save is committed under its own number, it says so, and deletes nothing."""
    url = f"{store.url}/run"
    old = CheckpointManager(
        url, local_dir=tmp_path / "disk-1", keep=KeepLast(1), keep_local=KeepLast(1), wrap_backend=faults
    )
    old.begin()
    gate = faults.add(StoreFault(verb="put_file", hold=True))
    ids = [old.save(step, state_of(step)) for step in (100, 200)]
    assert gate.reached.wait(DEADLINE_S)
    assert not old.status().superseded
    with CheckpointManager(url, local_dir=tmp_path / "disk-2", on_existing="new-lineage") as new:
        new.begin()
    gate.release()
    ids.append(old.save(300, state_of(300)))
    report = old.close()

    assert (report.pending, report.errors) == ((), ())
    assert old.status().superseded
    assert "attempt 1 is superseded" in caplog.text
    assert [key.split("/")[2].removesuffix(".json") for key in store.keys("run/manifests/")] == ids
    assert {Stem.parse(str(stem)).attempt for stem in ids} == {1}
    assert {row["state"] for row in ask("ls", url, "--all", "--check")["checkpoints"]} == {"committed"}


def test_the_local_copy_stays_until_the_store_has_it(store: Store, tmp_path: Path, faults: Faults) -> None:
    """I6: while uploads are held, and after they failed, every save is on the disk; once committed, the older ones go."""
    url = f"{store.url}/run"
    manager = CheckpointManager(url, local_dir=tmp_path / "disk", keep_local=KeepLast(1), wrap_backend=faults)
    manager.begin()
    gate = faults.add(StoreFault(verb="put_file", hold=True, error=transient))
    after = faults.add(StoreFault(verb="put_file", times=None, error=denied))
    ids = [str(manager.save(step, state_of(step))) for step in (100, 200, 300)]
    assert manager.wait_saved(DEADLINE_S)
    assert gate.reached.wait(DEADLINE_S)

    def on_disk() -> list[str]:
        tier = LocalTier.open(tmp_path / "disk")
        whole = [str(stem) for stem in tier.run.stems() if (tier.data_dir(stem) / "model.safetensors").is_file()]
        assert whole == [str(stem) for stem in tier.run.stems()]
        return whole

    assert on_disk() == ids
    gate.release()
    report = manager.close()
    assert after.hits > 0
    assert sorted(report.pending) == ids
    assert report.errors
    assert store.keys("run/manifests/") == []
    assert on_disk() == ids

    with CheckpointManager(url, local_dir=tmp_path / "disk", keep_local=KeepLast(1)) as again:
        again.restore({"model": {}})
        again.begin()
    assert [key.split("/")[2].removesuffix(".json") for key in store.keys("run/manifests/")] == ids
    assert on_disk() == ids[-1:]


def test_what_is_pending_at_the_end_is_named_and_stays(store: Store, ask: Ask, tmp_path: Path, faults: Faults) -> None:
    """`close` runs out of time: no exception, the ids are named, the disk has them, `drain` brings them up."""
    url = f"{store.url}/run"
    manager = CheckpointManager(url, local_dir=tmp_path / "disk", wrap_backend=faults)
    manager.begin()
    gate = faults.add(StoreFault(verb="put_file", times=None, hold=True, error=transient))
    stem = manager.save(100, state_of(100))
    assert gate.reached.wait(DEADLINE_S)
    closing: list[Any] = []
    thread = threading.Thread(target=lambda: closing.append(manager.close(timeout_s=0.0)))
    thread.start()
    gate.release()
    thread.join(DEADLINE_S)
    (report,) = closing
    assert report.pending == (stem,)
    assert store.keys("run/manifests/") == []
    ask("drain", tmp_path / "disk")
    assert store.keys("run/manifests/") == [f"run/manifests/{stem}.json"]


def test_a_store_that_cannot_be_asked_is_not_an_empty_one(store: Store, tmp_path: Path) -> None:
    """I7: while listing is refused nothing starts from scratch, neither by restore nor by begin."""
    url = f"{store.url}/run"
    with CheckpointManager(url, local_dir=tmp_path / "disk-1") as first:
        first.save(100, state_of(100))
    before = store.snapshot("run/")

    def blind(inner: Backend) -> Backend:
        backend = FaultyBackend(inner)
        for verb in ("find", "ls"):
            backend.add(StoreFault(verb=verb, times=None, error=denied))
        return backend

    with CheckpointManager(url, local_dir=tmp_path / "disk-2", on_existing="new-lineage", wrap_backend=blind) as other:
        with pytest.raises(BackendError):
            other.restore({"model": {}})
        with pytest.raises(BackendError):
            other.begin()
    assert store.snapshot("run/") == before


def test_two_processes_save_into_one_tier(make_store: Callable[[str], Store], tmp_path: Path) -> None:
    """The second process is refused at its start, and nothing of the run has changed."""
    store = make_store("local")
    url = f"{store.url}/run"
    second = (
        "import sys\n"
        "from ckptmgr.core.errors import ConflictError\n"
        "from ckptmgr.run.tier import LocalTier\n"
        "try:\n"
        "    LocalTier.open(sys.argv[1]).hold()\n"
        "except ConflictError as refusal:\n"
        "    sys.exit(str(refusal))\n"
    )
    command = [sys.executable, "-c", second, str(tmp_path / "disk")]
    with CheckpointManager(url, local_dir=tmp_path / "disk") as manager:
        manager.begin()
        refused = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        assert refused.returncode == 1
        assert "another process is saving" in refused.stderr
        manager.save(100, state_of(100))
    assert len(store.keys("run/manifests/")) == 1
    assert subprocess.run(command, timeout=DEADLINE_S, check=False).returncode == 0


def test_a_newer_run_json_is_left_alone(make_store: Callable[[str], Store], tmp_path: Path) -> None:
    """A run of a future version: named, and nothing is written over it."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    store.put("run/run.json", store.get("run/run.json").replace(b'"version": 1', b'"version": 99'))
    before = store.snapshot("run/")
    with CheckpointManager(run.url, local_dir=tmp_path / "disk") as manager, pytest.raises(Exception, match="upgrade"):
        manager.begin()
    assert store.snapshot("run/") == before


def test_the_log_of_an_ordinary_life_has_no_warning(
    make_store: Callable[[str], Store], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Save, close, resume, save: whoever alerts on warnings is not woken by it."""
    store = make_store("local")
    caplog.set_level(logging.INFO, "ckptmgr")
    for step in (100, 200):
        with CheckpointManager(f"{store.url}/run", local_dir=tmp_path / "disk", keep=KeepLast(1)) as manager:
            manager.restore({"model": {}})
            manager.save(step, state_of(step))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert "pruned step 100" not in caplog.text  # resumed from: it stays


def test_an_attempt_that_two_start_at_once_is_claimed_by_one(store: Store, tmp_path: Path) -> None:
    """Two machines start the same run at the same time: each gets a number of its own."""
    url = f"{store.url}/run"
    RunDirectory.open_or_create(url)
    managers = [CheckpointManager(url, local_dir=tmp_path / f"disk-{n}") for n in range(3)]
    together = threading.Barrier(len(managers))
    failures: list[Exception] = []

    def start(manager: CheckpointManager) -> None:
        together.wait(DEADLINE_S)
        try:
            manager.begin()
        except ConflictError as exc:
            failures.append(exc)

    threads = [threading.Thread(target=start, args=(manager,)) for manager in managers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert failures == []
    assert sorted(manager.status().attempt or 0 for manager in managers) == [1, 2, 3]
    assert store.keys("run/attempts/") == [f"run/attempts/{n:06}.json" for n in (1, 2, 3)]
    for manager in managers:
        manager.close()
