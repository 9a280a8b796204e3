"""Cases of restarts: numbers go on, a rewind begins a lineage of its own, another run's checkpoints are not ours."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckptmgr.backends.base import Backend
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.testing.faulty import FaultyBackend
from ckptmgr.testing.stores import Store
from ckptmgr.training.manager import CheckpointManager

pytestmark = pytest.mark.usefixtures("uploads_in_a_thread")

Cli = Callable[..., subprocess.CompletedProcess[str]]
Tree = Callable[[str, Mapping[str, bytes]], Path]
Ask = Callable[..., Any]


def state_of(value: float) -> dict[str, Any]:
    """The state of a toy training, recognisable by `value`."""
    return {"model": {"w": torch.full((8,), value)}}


def saved_value(directory: Path) -> float:
    """What `state_of` was given, from a checkpoint's directory."""
    return float(load_file(directory / "model.safetensors")["w"][0])


def save_steps(url: str, local_dir: Path, *steps: int, **options: Any) -> list[str]:
    """One process life without a restore, and the ids it committed."""
    with CheckpointManager(url, local_dir=local_dir, **options) as manager:
        ids = [manager.save(step, state_of(step)) for step in steps]
    return [str(stem) for stem in ids]


@pytest.mark.parametrize("same_disk", [True, False])
def test_k044_a_resumed_process_goes_on_counting(store: Store, ask: Ask, tmp_path: Path, same_disk: bool) -> None:
    """Saves 0 to 5, then a new process: its save is 6, nothing of 0 to 5 changes, and no number is in the way."""
    url = f"{store.url}/run"
    save_steps(url, tmp_path / "disk-1", *range(6))
    before = store.snapshot("run/")
    with CheckpointManager(url, local_dir=tmp_path / ("disk-1" if same_disk else "disk-2")) as manager:
        restored = manager.restore({"model": {}})
        assert restored is not None
        assert restored.step == 5
        sixth = manager.save(restored.step + 1, state_of(6.5))
        # A trainer that forgot its counter: it must not reach what is there either.
        again = manager.save(0, state_of(0.5))
    after = store.snapshot("run/")
    assert {key: after[key] for key in before} == before
    assert {key for key in after if key.startswith("run/manifests/")} - before.keys() == {
        f"run/manifests/{sixth}.json",
        f"run/manifests/{again}.json",
    }
    assert [row["step"] for row in ask("ls", url)["checkpoints"]] == [*range(6), 0, 6]


def test_k044_a_push_by_a_new_process_goes_on_counting(store: Store, cli: Cli, tree: Tree) -> None:
    """Auto-numbered folders: each process's push gets the next save number, whatever was pushed before."""
    run = RunDirectory.open_or_create(f"{store.url}/run")
    for number in range(2):
        push(tree(f"checkpoint_{number}", {"model.bin": b"%d" % number}), run)
    before = store.snapshot("run/")
    pushed = cli("push", tree("checkpoint_2", {"model.bin": b"two"}), f"{store.url}/run")
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.startswith("000001-000000000002-000003-")
    after = store.snapshot("run/")
    assert {key: after[key] for key in before} == before


def test_k124_after_a_rewind_the_newer_lineage_goes_on(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Resumed from 100 of 100/200/300 by hand, saved 200 again, died at 250: the new 200 goes on, the old 300 never."""
    url = f"{store.url}/run"
    old = save_steps(url, tmp_path / "disk-1", 100, 200, 300)
    before = store.snapshot("run/")
    chosen = ask("resume", url, 100, "--to", tmp_path / "from-100")
    assert chosen["id"] == old[0]

    behind: list[FaultyBackend] = []

    def watched(backend: Backend) -> Backend:
        behind.append(FaultyBackend(backend))
        return behind[-1]

    manager = CheckpointManager(url, local_dir=tmp_path / "disk-2", wrap_backend=watched, keep=KeepLast(1))
    manager.begin(resume_from=Path(chosen["path"]))
    again = manager.save(200, state_of(200.5))
    assert manager.close().errors == ()  # the crash at 250 finds nothing under way

    after = store.snapshot("run/")
    assert {key: after[key] for key in before} == before
    calls = [call for backend in behind for call in backend.log if call.verb in ("rm_file", "pipe_file", "put_file")]
    assert not any(stem in call.path for call in calls for stem in old)
    assert after[f"run/checkpoints/{again}/model.safetensors"] != before[f"run/checkpoints/{old[1]}/model.safetensors"]
    manifests = [json.loads(after[f"run/manifests/{stem}.json"]) for stem in (old[1], again)]
    digests = [{f["path"]: f["blake3"] for f in manifest["files"]} for manifest in manifests]
    assert digests[0]["model.safetensors"] != digests[1]["model.safetensors"]
    assert manifests[1]["parent"] == old[0]

    resumed = ask("resume", url, "--to", tmp_path / "auto")
    assert (resumed["id"], resumed["step"]) == (again, 200)
    assert saved_value(tmp_path / "auto") == 200.5
    assert [(row["id"], row["lineage"]) for row in ask("ls", url)["checkpoints"]] == [
        (old[0], "current"),
        (again, "current"),
    ]
    assert [(row["id"], row["state"], row["lineage"]) for row in ask("ls", url, "--all")["checkpoints"]] == [
        (old[0], "committed", "current"),
        (old[1], "committed", "abandoned"),
        (old[2], "committed", "abandoned"),
        (again, "committed", "current"),
    ]


def test_k124_the_rewind_holds_over_crashes_before_the_first_save(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Rewound to 100, died before a save, resumed automatically, died again: 300 does not come back."""
    url = f"{store.url}/run"
    old = save_steps(url, tmp_path / "disk", 100, 200, 300)
    with CheckpointManager(url, local_dir=tmp_path / "disk") as rewound:
        assert rewound.resume_path("100") is not None
        rewound.begin()
    for _ in range(2):
        with CheckpointManager(url, local_dir=tmp_path / "disk") as automatic:
            found = automatic.restore({"model": {}})
            assert found is not None
            assert found.id == old[0]
            automatic.begin()
    assert ask("resume", url, "--to", tmp_path / "auto")["id"] == old[0]
    with CheckpointManager(url, local_dir=tmp_path / "disk") as last:
        last.restore({"model": {}})
        new = last.save(150, state_of(150))
    assert [row["id"] for row in ask("ls", url)["checkpoints"]] == [old[0], new]


def test_k100_an_earlier_run_in_the_same_place_is_refused_or_left_alone(store: Store, ask: Ask, tmp_path: Path) -> None:
    """500/600/700 are there; a start from scratch is refused; as a lineage of its own it keeps its 100 and resumes at it."""
    url = f"{store.url}/run"
    old = save_steps(url, tmp_path / "disk-1", 500, 600, 700)
    before = store.snapshot("run/")
    with (
        CheckpointManager(url, local_dir=tmp_path / "disk-2", keep=KeepLast(3)) as refused,
        pytest.raises(ConflictError, match="step 700"),
    ):
        refused.save(100, state_of(100))
    assert store.snapshot("run/") == before

    (new,) = save_steps(url, tmp_path / "disk-2", 100, keep=KeepLast(3), on_existing="new-lineage")
    after = store.snapshot("run/")
    assert {key: after[key] for key in before} == before
    resumed = ask("resume", url, "--local-dir", tmp_path / "disk-2", "--to", tmp_path / "auto")
    assert (resumed["id"], saved_value(tmp_path / "auto")) == (new, 100)
    assert ask("prune", url, "--keep-last", 1, "--yes")["delete"] == []
    assert [(row["id"], row["lineage"]) for row in ask("ls", url, "--all")["checkpoints"]] == [
        *((stem, "abandoned") for stem in old),
        (new, "current"),
    ]


def test_k100_a_local_directory_of_another_run_is_refused(store: Store, ask: Ask, tmp_path: Path) -> None:
    """500/600/700 of another run lie in the local directory: the start names both runs and changes nothing."""
    save_steps(f"{store.url}/old", tmp_path / "disk", 500, 600, 700)
    before = {path: path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file()}
    url, old = f"{store.url}/new", RunDirectory.open(f"{store.url}/old").uuid

    def refusal() -> str:
        with CheckpointManager(url, local_dir=tmp_path / "disk") as manager, pytest.raises(ConflictError) as refused:
            manager.save(100, state_of(100))
        with CheckpointManager(url, local_dir=tmp_path / "disk") as manager, pytest.raises(ConflictError):
            manager.restore({"model": {}})
        return str(refused.value)

    why = refusal()
    assert old in why
    assert f"{store.url}/new" in why
    assert store.keys("new/") == []
    (new,) = save_steps(url, tmp_path / "disk-2", 100, keep=KeepLast(3))
    there = store.snapshot("new/")
    why = refusal()
    assert old in why
    assert RunDirectory.open(url).uuid in why
    assert store.snapshot("new/") == there
    assert {path: path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file()} == before
    assert ask("resume", url, "--to", tmp_path / "auto")["id"] == new


def test_k100_another_runs_files_in_the_run_neither_count_nor_go(store: Store, ask: Ask, tmp_path: Path) -> None:
    """Another run's folders and manifests, copied into this run by hand: 100 stays, they stay, 700 is never resumed."""
    save_steps(f"{store.url}/old", tmp_path / "disk-1", 500, 600, 700)
    url = f"{store.url}/run"
    with CheckpointManager(url, local_dir=tmp_path / "disk-2", keep=KeepLast(3)) as manager:
        manager.begin()
        for key, data in store.snapshot("old/").items():
            if key.startswith(("old/manifests/", "old/checkpoints/")):
                store.put("run" + key.removeprefix("old"), data)
        store.put("run/checkpoint-800/model.safetensors", b"of another tool")
        foreign = {key: data for key, data in store.snapshot("run/").items() if key != "run/run.json"}
        new = manager.save(100, state_of(100))
    after = store.snapshot("run/")
    assert {key: after[key] for key in foreign} == foreign
    assert f"run/manifests/{new}.json" in after
    resumed = ask("resume", url, "--to", tmp_path / "auto")
    assert (resumed["id"], saved_value(tmp_path / "auto")) == (new, 100)
