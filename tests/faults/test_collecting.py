"""Gc that meets a writer which is only slow, is killed, or comes at the moment of a commit."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.gc import Collected, gc
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import Depth, verify_run
from ckptmgr.testing.faulty import FaultyBackend, StoreFault
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain

Cli = Callable[..., subprocess.CompletedProcess[str]]
Kill = Callable[..., bool]
Ask = Callable[..., Any]
NewTier = Callable[[RunDirectory], LocalTier]
LocalSave = Callable[..., Stem]

DEADLINE_S = 60.0


def behind_faults(store: Store) -> tuple[RunDirectory, FaultyBackend]:
    """The run of the store, made if need be, through a backend that fails on demand."""
    fs, root = open_store(f"{store.url}/run")
    faulty = FaultyBackend(fs)
    return RunDirectory.open_or_create(f"{store.url}/run", fs=faulty, root=root), faulty


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run `call`; what it returns, or raises, comes into the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except Exception as exc:  # noqa: BLE001 - handed to the test
            outcome.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.fixture
def slow(store: Store, new_tier: NewTier, local_save: LocalSave) -> tuple[RunDirectory, FaultyBackend, LocalTier, Stem]:
    """A run with a committed checkpoint, and the local tier of a save, 200, that is not uploaded yet."""
    run, faulty = behind_faults(store)
    tier = new_tier(run)
    local_save(tier, run, 100)
    assert drain(tier, run).pending == ()
    return run, faulty, tier, local_save(tier, run, 200)


@pytest.mark.parametrize("when", ["between two files", "before the manifest"])
def test_a_slow_writer_goes_on_under_a_new_name(
    store: Store,
    slow: tuple[RunDirectory, FaultyBackend, LocalTier, Stem],
    cli: Cli,
    cli_here: Cli,
    tmp_path: Path,
    when: str,
) -> None:
    """Row 38: gc on another host takes a writer for dead whose grace is over. Its data is gone, its commit is refused, and the same upload commits
    the save under a new id: one checkpoint, whole. What it had sent to the old name meanwhile goes with the next gc."""
    run, faulty, tier, stem = slow
    if when == "between two files":
        held = faulty.add(StoreFault(verb="put_file", path=f"*/{stem}/b.bin", hold=True))
    else:
        held = faulty.add(StoreFault(verb="pipe_file", path=f"*/manifests/{stem}.json", hold=True))
    thread, outcome = in_thread(lambda: drain(tier, run))
    try:
        assert held.reached.wait(DEADLINE_S)
        elsewhere = {"CKPTMGR_LOCK_DIR": str(tmp_path / "locks-of-another-host")}
        done = cli("gc", run.url, "--grace", "0s", "--yes", "--json", env=elsewhere)
        assert done.returncode == 0, done.stderr
        assert [(item["kind"], item["id"]) for item in json.loads(done.stdout)["collect"]] == [
            ("uncommitted", str(stem))
        ]
        assert store.keys(f"run/checkpoints/{stem}/") == []
    finally:
        held.release()
        thread.join(DEADLINE_S)
    (drained,) = outcome
    assert drained.pending == ()
    history = run.history()
    first, renamed = sorted(history.manifests)
    assert (first.step, renamed.position, renamed.attempt) == (100, stem.position, stem.attempt)
    assert renamed != stem
    assert {one: record.closed for one, record in history.closed.items()} == {stem: "aborted"}
    assert verify_run(run, history, history.manifests, Depth()) == []
    below = f"run/checkpoints/{renamed}"
    assert store.snapshot(f"{below}/") == {f"{below}/a.bin": b"a200", f"{below}/b.bin": b"b200"}
    late = [f"run/checkpoints/{stem}/b.bin"] if when == "between two files" else []
    assert store.keys(f"run/checkpoints/{stem}/") == late
    assert json.loads(cli_here("gc", run.url, "--yes", "--json").stdout)["freed_bytes"] == 4 * len(late)
    assert store.keys(f"run/checkpoints/{stem}/") == []


def test_a_commit_in_the_last_moment_wins(
    store: Store, slow: tuple[RunDirectory, FaultyBackend, LocalTier, Stem], tmp_path: Path
) -> None:
    """Between gc's look and its claim the writer commits: the claim is refused, and nothing of the checkpoint is touched."""
    run, faulty, tier, stem = slow
    halted = faulty.add(StoreFault(verb="pipe_file", path=f"*/manifests/{stem}.json", error=broken))
    assert [str(one) for one in drain(tier, run).pending] == [str(stem)]
    assert halted.hits == 1
    collecting, at_store = behind_faults(store)
    held = at_store.add(StoreFault(verb="pipe_file", path=f"*/manifests/{stem}.json", hold=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CKPTMGR_LOCK_DIR", str(tmp_path / "locks-of-another-host"))
        thread, outcome = in_thread(lambda: gc(collecting, grace_s=0.0))
        assert held.reached.wait(DEADLINE_S)
    try:
        assert drain(tier, run).pending == ()
    finally:
        held.release()
        thread.join(DEADLINE_S)
    (done,) = outcome
    assert isinstance(done, Collected)
    assert (done.removed, [(one.id, why) for one, why in done.spared]) == (
        (),
        [(str(stem), "it was committed meanwhile")],
    )
    history = run.history()
    assert sorted(one.step for one in history.manifests) == [100, 200]
    assert verify_run(run, history, history.manifests, Depth()) == []


def broken(verb: str, path: str) -> Any:
    from ckptmgr.core.errors import AccessDeniedError

    return AccessDeniedError(f"injected: {verb} {path}", operation=verb, key=path)


def test_a_gc_killed_at_each_change_is_finished_by_the_next(
    store: Store, new_tier: NewTier, local_save: LocalSave, kill: Kill, ask: Ask
) -> None:
    """It dies before its first, second, … change: what is listed is whole all the time, nothing that was half removed looks like a checkpoint, and the
    next gc removes the rest."""
    run, _ = behind_faults(store)
    tier = new_tier(run)
    local_save(tier, run, 100)
    assert drain(tier, run).pending == ()
    committed = store.snapshot("run/")
    deaths = 0
    for nth in range(1, 30):
        left = Stem(1, 200, nth + 1, f"{nth:08x}")
        store.put(f"run/checkpoints/{left}/a.bin", b"a")
        store.put(f"run/checkpoints/{left}/sub/b.bin", b"b")
        store.put(f"run/parts/{left}/rank-00000-of-00002.json", b"{}")
        store.put("run/.ckptmgr-doctor-00112233/x", b"x")
        if not kill("gc", url=run.url, kill={"nth": nth, "when": "before"}):
            break
        deaths += 1
        rows = ask("ls", run.url, "--all", "--check")["checkpoints"]
        assert [(row["step"], row["state"]) for row in rows if row["state"] != "uncommitted"] == [(100, "committed")]
        assert {row["id"] for row in rows if row["state"] == "uncommitted"} <= {str(left)}
        gc(run, grace_s=0.0)
        now = store.snapshot("run/")
        assert {key: data for key, data in now.items() if key in committed} == committed
        assert all(key.startswith("run/manifests/") for key in now.keys() - committed.keys()), nth
        assert set(run.history().closed) == {Stem(1, 200, n + 1, f"{n:08x}") for n in range(1, nth + 1)}
    # The probe of the store (written, on buckets twice, and removed), the claim, three files, what a doctor left.
    assert deaths >= 7
    assert store.snapshot("run/checkpoints/") == {key: d for key, d in committed.items() if "/checkpoints/" in key}
