"""Cases of checkpoints of many files: some that fail for good, more than a page of a listing, links and other things that are no files."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

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
