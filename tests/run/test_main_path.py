"""Push, list, resume and prune through the command line, on every store, judged by the bytes in the store."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from ckptmgr.testing.stores import Store

Cli = Callable[..., subprocess.CompletedProcess[str]]


def test_a_pushed_directory_comes_back_byte_for_byte(store: Store, cli: Cli, tmp_path: Path) -> None:
    """What `resume` prints is a directory with the very bytes that were pushed, and the store holds plain copies of them."""
    source = tmp_path / "checkpoint-100"
    (source / "sub").mkdir(parents=True)
    files = {"model.safetensors": b"w" * 100_001, "sub/empty": b"", "optimizer.pt": bytes(range(256)) * 64}
    for name, data in files.items():
        (source / name).write_bytes(data)

    pushed = cli("push", source, f"{store.url}/run", "--metric", "eval_loss=0.5", "--json")
    assert pushed.returncode == 0, pushed.stderr
    stem = json.loads(pushed.stdout)["id"]
    stored = store.snapshot("run/checkpoints/")
    assert stored == {f"run/checkpoints/{stem}/{name}": data for name, data in files.items()}

    resumed = cli("resume", f"{store.url}/run", "--json")
    assert resumed.returncode == 0, resumed.stderr
    path = Path(json.loads(resumed.stdout)["path"])
    assert path == tmp_path / "run" / "checkpoint-100"
    assert {p.relative_to(path).as_posix(): p.read_bytes() for p in path.rglob("*") if p.is_file()} == files
