"""Cases of uploads beside a training: a store that fails for a while, a bug in the uploads, overtaking, and a temporary folder that is too small."""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.layout import Stem
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.faults import ActiveFault, Fault
from ckptmgr.testing.stores import Store
from ckptmgr.testing.waits import Stopwatch
from ckptmgr.training.manager import CheckpointManager

MakeStore = Callable[[str], Store]

DEADLINE_S = 60.0
MIB = 1 << 20

# Modules that the transfer process imports, too.
STEADY = '''
"""Waits between tries that are always the same: between 55 % and 95 % of the longest that each may be."""
from ckptmgr.backends import retry

def steady(backend, seed):
    retry._JITTER.seed(seed)
    return backend
'''
BUGGY = '''
"""A backend with a bug: whatever is uploaded second fails by a TypeError."""
from ckptmgr.backends.wrap import WrappedBackend

class Buggy(WrappedBackend):
    def __init__(self, inner):
        super().__init__(inner)
        self.seen = []

    def _around(self, verb, path, call):
        if verb == "put_file":
            stem = path.split("/checkpoints/")[1].partition("/")[0]
            self.seen += [stem] if stem not in self.seen else []
            if len(self.seen) > 1 and stem == self.seen[1]:
                raise TypeError("unsupported operand")
        return call()
'''


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """Makes a module of this name, for this process and for those that it starts."""
    folder = tmp_path / "modules"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(name: str, text: str) -> Any:
        (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name)

    return make


def state_of(value: float, *, mib: float = 1) -> dict[str, Any]:
    return {"model": {"w": torch.full((int(mib * MIB) // 4,), float(value))}}


def steps_of(run: RunDirectory) -> list[int]:
    return [stem.step for stem in run.stems()]


# --- K021 -----------------------------------------------------------------------------------------------------------------


PACE_S = 0.06


class Training:
    """50 steps, and a save every 10.

    Attributes:
        longest_s: of the steps, each with what it did to save.
    """

    def __init__(self, manager: CheckpointManager, begun: Callable[[], None] = lambda: None) -> None:
        pace, self.longest_s = threading.Event(), 0.0
        with manager:
            manager.begin()
            manager.reserve(state_of(0))
            begun()
            for step in range(1, 51):
                if step == 20:
                    # Not part of any step: what comes next would overtake what is being tried again.
                    wait_for(lambda: manager.status().uploads.committed)
                watch = Stopwatch()
                pace.wait(PACE_S)
                if step % 10 == 0:
                    manager.save(step, state_of(step))
                self.longest_s = max(self.longest_s, watch.seconds)
        self.report = manager.close()


def test_k021_a_store_that_fails_for_a_while_is_not_noticed_by_the_training(
    make_store: MakeStore, tmp_path: Path, importable: Callable[[str, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """503 four times, a reset, and a listing that fails once: no step waits, all five saves commit, and the waits between the tries grow and vary."""
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "1")  # so that the waits are those of one file
    store = make_store("moto")
    steady = functools.partial(importable("steady", STEADY).steady, seed=1013)
    base_s, faults = 0.06, store.server.faults
    active: list[ActiveFault] = []

    def manager(name: str) -> CheckpointManager:
        return CheckpointManager(
            f"{store.url}/{name}",
            local_dir=tmp_path / name,
            wrap_backend=steady,
            retry=RetryPolicy(attempts=10, base_s=base_s, cap_s=30.0),
            keep=KeepLast(5),
            close_timeout_s=DEADLINE_S,
        )

    def fail() -> None:
        store.server.log.clear()
        active.extend(
            [
                faults.add(Fault(method="PUT", key="*/checkpoints/*", status=503, code="SlowDown", times=4)),
                faults.add(Fault(method="PUT", key="*/checkpoints/*", drop="before")),
                faults.add(Fault(method="GET", key="", status=500, code="InternalError")),
            ]
        )

    plain, failing = Training(manager("plain")), Training(manager("failing"), fail)
    assert [fault.hits for fault in active] == [4, 1, 1]
    assert (failing.report.committed, failing.report.pending, failing.report.upload_failures) == (5, (), 0)
    assert steps_of(RunDirectory.open(f"{store.url}/failing")) == [10, 20, 30, 40, 50]

    tries = [r for r in store.server.log if r.method == "PUT" and "/checkpoints/" in r.key][:6]
    assert len({r.key for r in tries}) == 1
    assert [r.status for r in tries] == [503, 503, 503, 503, None, 200]
    waits = [after.time_s - before.time_s for before, after in itertools.pairwise(tries)]
    assert waits[1:] == sorted(waits[1:])  # the first one has seen some imports, too
    assert waits[-1] > 3 * waits[0]
    assert all(wait >= 0.5 * base_s * 2**number for number, wait in enumerate(waits))
    assert len({round(wait / 2**number, 3) for number, wait in enumerate(waits)}) > 1
    # What is added is for the other processes of this machine; all the waits together are far more.
    assert sum(waits) > 1.2
    assert failing.longest_s <= 1.2 * plain.longest_s + 0.15


# --- K119 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["process", "thread"])
def test_k119_a_bug_in_the_uploads_stops_neither_them_nor_the_training(
    make_store: MakeStore, tmp_path: Path, importable: Callable[[str, str], Any], host: Any
) -> None:
    """The second upload raises a TypeError: it shows by the next look, three more saves commit, one is reported as failed."""
    url = f"{make_store('moto').url}/run"
    manager = CheckpointManager(
        url,
        local_dir=tmp_path / "disk",
        wrap_backend=importable("buggy", BUGGY).Buggy,
        retry_after_s=1000.0,
        close_timeout_s=DEADLINE_S,
        transfer=host,
    )
    saved = []
    with contextlib.closing(manager):
        for step in range(1, 6):
            saved.append(manager.save(step, state_of(step), wait=True))
            wait_for(functools.partial(has_settled, manager, step))
            if step == 2:
                (error,) = manager.poll_errors()
                assert f"the upload of {saved[1]} failed unexpectedly: TypeError('unsupported operand')" in str(error)
        status = manager.status()
        assert (status.saved, status.save_failures, status.uploads.committed) == (5, 0, 4)
        assert [str(stem) for stem in status.uploads.pending] == [saved[1]]
    assert steps_of(RunDirectory.open(url)) == [1, 3, 4, 5]
    report = manager.close()
    assert report.pending == (saved[1],)
    assert report.exit_code == 6
    (tier,) = ask_status(tmp_path / "disk")["tiers"]
    assert [(entry["id"], "TypeError" in entry["why"]) for entry in tier["entries"] if entry["state"] == "failed"] == [
        (saved[1], True)
    ]


def has_settled(manager: CheckpointManager, number: int) -> bool:
    """Whether that many saves are committed, or the one that never is has failed."""
    uploads = manager.status().uploads
    return uploads.committed + (uploads.failures > 0) >= number


def wait_for(what: Callable[[], object]) -> None:
    """Wait until that is so."""
    until = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < until
        os.sched_yield()


def ask_status(place: Path) -> Any:
    """What `ckptmgr status` says of a tier where something is pending."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptmgr.cli.main", "status", str(place), "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6, done.stderr
    return json.loads(done.stdout)


# --- K095 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["process", "thread"])
def test_k095_a_save_that_is_tried_again_and_again_is_overtaken(
    make_store: MakeStore, tmp_path: Path, host: Any
) -> None:
    """Step 100 waits for its next try when 200 comes, which is committed at once: newest is 200, and stays that when 100 follows."""
    store = make_store("moto")
    url = f"{store.url}/run"
    failing = store.server.faults.add(
        Fault(method="PUT", key="*-000000000100-*", status=503, code="SlowDown", times=None)
    )
    with CheckpointManager(
        url,
        local_dir=tmp_path / "disk",
        transfer=host,
        retry=RetryPolicy(attempts=1000, base_s=1.0, cap_s=1.0),
        retry_after_s=1000.0,
        close_timeout_s=DEADLINE_S,
    ) as manager:
        first = manager.save(100, state_of(100), wait=True)
        run, seen = RunDirectory.open(url), list[Stem | None]()

        def look() -> Stem | None:
            seen.append(run.history().newest())
            return seen[-1]

        assert failing.reached.wait(DEADLINE_S)
        assert look() is None
        second = manager.save(200, state_of(200), wait=True)
        wait_for(look)
        wait_for(lambda: [str(stem) for stem in manager.status().uploads.pending] == [first])
        store.server.faults.clear()
        while manager.status().uploads.pending:
            look()
        look()
    ids = [None if stem is None else str(stem) for stem in seen]
    assert ids == sorted(ids, key=lambda stem: stem is not None)
    assert set(ids) == {None, second}
    assert [str(stem) for stem in run.stems()] == [first, second]


# --- K075 -----------------------------------------------------------------------------------------------------------------


SAVES = """
import json, os, sys
from pathlib import Path
import torch
from ckptmgr import CheckpointManager

url, disk, mib = sys.argv[1:]
temporary, renamed, written = os.environ["TMPDIR"], [], []

def watch(event, arguments):
    if event == "os.rename":
        renamed.append([str(path) for path in arguments[:2]])
    elif event in ("os.mkdir", "os.link"):
        written.append(str(arguments[-3 if event == "os.mkdir" else 1]))
    elif event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        written.append(str(arguments[0]))

sys.addaudithook(watch)
weights = torch.arange(int(mib) * (1 << 18), dtype=torch.float32)
with CheckpointManager(url, local_dir=disk) as manager:
    manager.save(100, {"model": {"w": weights}}, wait=True)
print(json.dumps({"renamed": renamed, "written": written}))
"""


@pytest.fixture
def full_tmp(tmp_path: Path) -> Iterator[Path]:
    """A TMPDIR on a file system of its own, with room for a megabyte; or, where none can be mounted, one that is no folder at all."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, check=False) if os.geteuid() == 0 else None
    if made is not None and made.returncode == 0:
        yield folder
        subprocess.run(["umount", "-l", str(folder)], check=True)
        return
    folder.rmdir()
    folder.write_bytes(b"")
    yield folder


def left_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*")) if folder.is_dir() else []


@pytest.mark.parametrize("kind", ["local", "moto"])
def test_k075_nothing_is_staged_in_a_temporary_folder(
    make_store: MakeStore, tmp_path: Path, full_tmp: Path, kind: str
) -> None:
    """A checkpoint of 40 MiB, and a TMPDIR of one, on another file system: save and resume stage beside their targets, and end by a rename there."""
    store = make_store(kind)
    environment = {**os.environ, "TMPDIR": str(full_tmp)}
    disk, target = tmp_path / "disk", tmp_path / "here" / "checkpoint-100"
    saving = subprocess.run(
        [sys.executable, "-c", SAVES, f"{store.url}/run", str(disk), "40"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
        check=False,
    )
    assert saving.returncode == 0, saving.stderr
    told = json.loads(saving.stdout)
    assert [path for path in told["written"] if path.startswith(f"{full_tmp}/")] == []
    data = [(source, end) for source, end in told["renamed"] if "/checkpoints/" in end]
    ((source, end),) = data
    assert os.path.dirname(source) == os.path.dirname(end) == str(disk / "checkpoints")
    assert left_in(full_tmp) == []

    command = [sys.executable, "-m", "ckptmgr.cli.main", "resume", f"{store.url}/run", "--to", str(target)]
    renames = ["strace", "-f", "-e", "trace=rename,renameat,renameat2,mkdir,mkdirat", "-o", str(tmp_path / "trace")]
    traced = (
        subprocess.run([*renames, "true"], capture_output=True, check=False).returncode == 0 if has_strace() else False
    )
    resumed = subprocess.run(
        [*(renames if traced else []), *command],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
        check=False,
    )
    assert resumed.returncode == 0, resumed.stderr
    assert Path(resumed.stdout.strip()) == target
    weights = load_file(target / "model.safetensors")["w"]
    assert torch.equal(weights, torch.arange(40 << 18, dtype=torch.float32))
    assert left_in(full_tmp) == []
    assert sorted(path.name for path in target.parent.iterdir()) == ["checkpoint-100", "checkpoint-100.ckptmgr.json"]
    if traced:
        calls = [line for line in (tmp_path / "trace").read_text().splitlines() if f'"{target}"' in line]
        (last,) = [line for line in calls if "rename" in line]
        assert f'"{target}.partial' in last
        assert last.endswith("= 0")


def has_strace() -> bool:
    return any(os.access(os.path.join(folder, "strace"), os.X_OK) for folder in os.get_exec_path())
