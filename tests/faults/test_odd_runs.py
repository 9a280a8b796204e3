"""Rows 28, 33 and 36: manifests that cannot be read, stores that ignore the condition of a create-only write, processes that were replaced and go on."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptmgr.core.layout import Stem
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store
from ckptmgr.training.manager import CheckpointManager

Cli = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[..., Any]
MakeStore = Callable[[str], Store]

UNREADABLE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "torn": (lambda whole: whole[: len(whole) // 2], "not JSON"),
    "garbage": (lambda whole: bytes(byte ^ 0x5A for byte in whole), "not JSON"),
    "of the future": (lambda whole: b'{"format": "ckptmgr", "version": 9, "files": "all new"}', "upgrade ckptmgr"),
}


@pytest.mark.parametrize("how", UNREADABLE)
@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_a_manifest_that_cannot_be_read(
    make_store: MakeStore,
    push_steps: Callable[..., list[str]],
    ask: Ask,
    cli_here: Cli,
    tmp_path: Path,
    kind: str,
    how: str,
) -> None:
    """Row 28: the newest is listed as damaged and passed over with its reason, or with what to do about it; nothing is removed for it, and `verify` says 5."""
    store = make_store(kind)
    url = f"{store.url}/run"
    *older, second = push_steps(url, 100, 200, 300)
    damage, says = UNREADABLE[how]
    key = f"run/manifests/{second}.json"
    store.put(key, damage(store.get(key)))
    before = store.snapshot()

    rows = ask("ls", url)["checkpoints"]
    assert [(row["id"], row["state"]) for row in rows] == [
        *((stem, "committed") for stem in older),
        (second, "damaged"),
    ]
    resumed = cli_here("resume", url, "--to", tmp_path / "to")
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "to/model.bin").read_bytes().endswith(b"200")
    assert second in resumed.stderr
    assert says in resumed.stderr
    assert cli_here("verify", url).returncode == 5
    assert cli_here("prune", url, "--keep-last", "1", "--yes").returncode == 5
    assert store.snapshot() == before


def test_a_store_that_ignores_the_condition(
    make_store: MakeStore, push_steps: Callable[..., list[str]], ask: Ask, cli_here: Cli, tmp_path: Path
) -> None:
    """Row 33: the run that is made there finds it out and says so; commits stay whole and apart, and gc is in no haste."""
    store = make_store("moto")
    url = f"{store.url}/run"
    store.server.faults.add(Fault(method="PUT", ignore_headers=("if-none-match",), times=None))
    logger = logging.getLogger("ckptmgr")
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        run = RunDirectory.open_or_create(url)
    finally:
        logger.removeHandler(handler)
    assert not run.record.create_only
    assert f"{url} ignores create-only writes: commits stay safe, clean-up waits longer (see docs)" in said

    ids = push_steps(url, 100, 200, 200, options=[])
    assert ids[1] == ids[2]
    rows = ask("ls", url, "--check")["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(100, "committed"), (200, "committed")]
    refused = cli_here("gc", url, "--grace", "1d", "--yes")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert ask("resume", url, "--to", tmp_path / "to")["id"] == ids[1]


def test_a_process_that_was_replaced_and_goes_on(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Row 36: attempt 2 has gone on from 300 and saved 400; attempt 1, taken for dead, saves 400 and 900. Both saves of 400 are kept, each with its own
    bytes, and resume takes that of the higher attempt, not the higher step."""
    url = f"{store.url}/run"

    def manager(disk: str, **options: Any) -> CheckpointManager:
        return CheckpointManager(url, local_dir=tmp_path / disk, transfer="thread", **options)

    def state_of(value: float) -> dict[str, Any]:
        return {"model": {"w": torch.full((4,), value)}}

    with manager("disk-1", keep=KeepLast(1)) as dead:
        ids = [dead.save(300, state_of(300))]
        assert dead.wait_saved(60)
        while not store.keys("run/manifests/"):  # its upload is under way
            dead.poll_errors()
        with manager("disk-2") as alive:
            restored = alive.restore(state_of(0))
            assert restored is not None
            assert restored.step == 300
            ids.append(alive.save(400, state_of(400.5)))
        ids += [dead.save(step, state_of(step)) for step in (400, 900)]
    assert [Stem.parse(str(stem)).attempt for stem in ids] == [1, 2, 1, 1]
    rows = ask("ls", url, "--all", "--check")["checkpoints"]
    assert {(row["id"], row["state"]) for row in rows} == {(stem, "committed") for stem in ids}
    with manager("disk-3") as next_one:
        restored = next_one.restore(state_of(0))
        assert restored is not None
        assert (restored.step, restored.id) == (400, ids[1])
    assert ask("resume", url, "--to", tmp_path / "to")["id"] == ids[1]
    older = ask("resume", url, f"id:{ids[2]}", "--to", tmp_path / "older")
    assert older["step"] == 400
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("to", "older")]
    assert weights[0] != weights[1]
