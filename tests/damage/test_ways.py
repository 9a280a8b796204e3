"""Damage on other ways than at rest in the store: on the line, in the local tier, in the directory that was restored, between two looks."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import CheckpointExistsError, DiskFullError, IntegrityError
from ckptmgr.core.layout import data_key, manifest_key
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.run.resume import Resumed, resume
from ckptmgr.run.sidecar import read_sidecar, sidecar_path, write_sidecar
from ckptmgr.run.target import Target
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import verify_directory
from ckptmgr.testing.damages import KINDS, Change, Kind, PushedTree, change, flipped
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, disk_full
from ckptmgr.testing.outcomes import files_in
from ckptmgr.testing.stores import Store
from ckptmgr.testing.trees import write_tree

Cli = Callable[..., subprocess.CompletedProcess[str]]
PushTree = Callable[..., PushedTree]
LATEST = parse_selector("latest")


def faulty(pushed: PushedTree) -> tuple[RunDirectory, FaultyBackend]:
    fs, root = open_store(pushed.run.url)
    backend = FaultyBackend(fs)
    return RunDirectory.open(pushed.run.url, fs=backend, root=root), backend


# --- on the line ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"corrupt": True}, {"truncate": 3}])
def test_damage_on_the_line(push_tree: PushTree, tmp_path: Path, fault: dict[str, Any]) -> None:
    """Once: fetched again, and right. Always: the file is named and the older one taken."""
    pushed = push_tree("T1")
    run, backend = faulty(pushed)
    pattern = f"*/{pushed.stems[1]}/*optimizer.pt"
    once = backend.add(StoreFault(verb="get_file", path=pattern, **fault))
    found = resume(run, LATEST, to=tmp_path / "once")
    assert (once.hits, found.manifest.stem, found.skipped) == (1, pushed.stems[1], ())
    assert files_in(tmp_path / "once") == pushed.files[1]
    backend.add(StoreFault(verb="get_file", path=pattern, times=None, **fault))
    found = resume(run, LATEST, to=tmp_path / "always")
    assert found.manifest.stem == pushed.stems[0]
    assert "optimizer.pt has " in found.skipped[0].why
    assert files_in(tmp_path / "always") == pushed.files[0]


def test_disk_full_half_way(push_tree: PushTree, tmp_path: Path) -> None:
    """No directory, nothing called damaged; with room again the same call goes on."""
    pushed = push_tree("T1")
    run, backend = faulty(pushed)
    backend.add(StoreFault(verb="get_file", path="*optimizer.pt", error=disk_full))
    with pytest.raises(DiskFullError):
        resume(run, LATEST, to=tmp_path / "target")
    assert not (tmp_path / "target").exists()
    found = resume(run, LATEST, to=tmp_path / "target")
    assert (found.manifest.stem, found.skipped) == (pushed.stems[1], ())
    assert files_in(tmp_path / "target") == pushed.files[1]


def test_replaced_in_the_store_after_the_history_was_read(push_tree: PushTree, tmp_path: Path) -> None:
    """A store that changes under the reader: what was fetched is compared with the manifest, never with the store."""
    pushed = push_tree("T13")
    run, backend = faulty(pushed)
    held = backend.add(StoreFault(verb="get_file", path=f"*/{pushed.stems[1]}/*", times=1, hold=True))
    path = next(iter(pushed.files[1]))
    key = f"run/{data_key(pushed.stems[1], path)}"
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(resume(run, LATEST, to=tmp_path / "target")))
    thread.start()
    assert held.reached.wait(60)
    for name in pushed.files[1]:
        pushed.store.put(f"run/{data_key(pushed.stems[1], name)}", pushed.files[0].get(name, b"other"))
    held.release()
    thread.join(60)
    assert pushed.store.get(key) != pushed.files[1][path]
    assert [found.manifest.stem for found in results] == [pushed.stems[0]]
    assert files_in(tmp_path / "target") == pushed.files[0]


# --- remembered -----------------------------------------------------------------------------------------------------------


def test_what_was_damaged_is_looked_at_first(push_tree: PushTree, tmp_path: Path) -> None:
    """The next start reads the one file that was wrong, and none of the others, before it goes to the older one; once that is right, all of them."""
    pushed = push_tree("T5")
    run, backend = faulty(pushed)
    newer = str(pushed.stems[1])
    path = max(pushed.files[1])
    spoiled = Change(stored={path: b"wrong"}, wrong=frozenset({path}))

    def fetched_into(name: str) -> tuple[Resumed, set[str]]:
        before = len(backend.calls("get_file"))
        found = resume(run, LATEST, to=tmp_path / name)
        calls = [call.path for call in backend.calls("get_file")[before:] if newer in call.path]
        return found, {call.split(f"{newer}/")[1] for call in calls}

    with pushed.damaged(spoiled):
        fetched_into("first")
        found, fetched = fetched_into("second")
        assert (found.manifest.stem, fetched) == (pushed.stems[0], {path})
    found, fetched = fetched_into("third")
    assert (found.manifest.stem, fetched) == (pushed.stems[1], {*pushed.files[1]})


# --- in the local tier ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_local_tier(kind: Kind, push_tree: PushTree, chance: random.Random, tmp_path: Path) -> None:
    """The store's copy of the same checkpoint is taken; with both damaged, the older one; what lies beside is left out."""
    pushed = push_tree("T6")
    root = tmp_path / "tier"
    shutil.copytree(pushed.run.root, root)
    tier = LocalTier(RunDirectory.open(f"file://{root}"))
    spoiled = change(kind, chance.choice([*pushed.files[1]]), pushed.files[1], pushed.files[0], chance)
    assert spoiled is not None

    def put(path: str, data: bytes | None) -> None:
        file = root / data_key(pushed.stems[1], path)
        file.unlink(missing_ok=True)
        if data is not None:
            file.write_bytes(data)

    assert resume(pushed.run, LATEST, to=tmp_path / "whole", tier=tier).source == "local"
    with pushed.damaged(spoiled, put):
        found = resume(pushed.run, LATEST, to=tmp_path / "one", tier=tier)
        assert (found.manifest.stem, found.source) == (pushed.stems[1], "remote" if spoiled.wrong else "local")
        assert files_in(tmp_path / "one") == pushed.files[1]
        if spoiled.wrong:
            with pushed.damaged(spoiled):
                found = resume(pushed.run, LATEST, to=tmp_path / "both", tier=tier)
                assert (found.manifest.stem, found.source) == (pushed.stems[0], "local")
                assert [skipped.stem for skipped in found.skipped] == [pushed.stems[1]]
                assert files_in(tmp_path / "both") == pushed.files[0]


# --- in the directory that was restored -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_damage_in_the_restored_directory(
    kind: Kind, push_tree: PushTree, chance: random.Random, tmp_path: Path
) -> None:
    """`verify DIR` names it, and the next resume refuses the directory, or with --replace puts it right."""
    pushed = push_tree("T8")
    target = tmp_path / "target"
    resume(pushed.run, LATEST, to=target)
    assert verify_directory(target)[1] == []
    spoiled = change(kind, chance.choice([*pushed.files[1]]), pushed.files[1], pushed.files[0], chance)
    assert spoiled is not None
    for path, data in spoiled.stored.items():
        (target / path).unlink(missing_ok=True)
        if data is not None:
            (target / path).write_bytes(data)
    assert {damage.file for damage in verify_directory(target)[1]} == (spoiled.wrong or {*spoiled.stored})
    with pytest.raises(CheckpointExistsError):
        resume(pushed.run, LATEST, to=target)
    resume(pushed.run, LATEST, to=target, replace=True)
    assert files_in(target) == pushed.files[1]
    assert verify_directory(target)[1] == []


@pytest.mark.parametrize("what", ["file", "folder", "one more folder"])
def test_links_in_the_restored_directory(push_tree: PushTree, tmp_path: Path, what: str) -> None:
    """What a link leads to is right today, and may be something else when a trainer reads it: named, refused."""
    pushed = push_tree("T6")
    target = tmp_path / "target"
    resume(pushed.run, LATEST, to=target)
    folder = target / "checkpoint-200" / "optimizer_0"
    elsewhere = tmp_path / "elsewhere"
    if what == "one more folder":
        elsewhere.mkdir()
        (target / "more").symlink_to(elsewhere)
    else:
        moved = folder if what == "folder" else folder / "__0_0.distcp"
        moved.rename(elsewhere)
        moved.symlink_to(elsewhere)
    named = {"file": "checkpoint-200/optimizer_0/__0_0.distcp", "folder": "checkpoint-200/optimizer_0"}
    assert named.get(what, "more") in {damage.file for damage in verify_directory(target)[1]}
    with pytest.raises(CheckpointExistsError):
        resume(pushed.run, LATEST, to=target)


def test_what_comes_into_the_partial_copy_does_not_come_out(
    push_tree: PushTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that somebody puts there while the download is under way was never verified."""
    pushed = push_tree("T13")
    target = tmp_path / "target"
    publish = Target.publish

    def late(self: Target, *arguments: Any) -> None:
        (self.partial / "stray.bin").write_bytes(b"x")
        publish(self, *arguments)

    monkeypatch.setattr(Target, "publish", late)
    resume(pushed.run, LATEST, to=target)
    assert files_in(target) == pushed.files[1]


def test_a_kill_while_a_directory_is_replaced(
    push_tree: PushTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment do the old files lie beside the new checkpoint's sidecar; a failure puts the old ones back."""
    pushed = push_tree("T13")
    target = tmp_path / "target"
    resume(pushed.run, parse_selector("100"), to=target)
    seen: list[bool] = []

    def fail(directory: Path, sidecar: Any, **options: Any) -> None:
        seen.append(directory.exists())
        write_sidecar(directory, sidecar, **options)
        sidecar_path(directory).unlink()
        raise DiskFullError("no room for the sidecar", free_bytes=0)

    monkeypatch.setattr("ckptmgr.run.target.write_sidecar", fail)
    with pytest.raises(DiskFullError):
        resume(pushed.run, LATEST, to=target, replace=True)
    assert seen == [False]
    assert files_in(target) == pushed.files[0]
    monkeypatch.undo()
    resume(pushed.run, LATEST, to=target, replace=True)
    assert files_in(target) == pushed.files[1]
    assert read_sidecar(target).manifest.stem == pushed.stems[1]


# --- cases, on the command line -------------------------------------------------------------------------------------------


def test_k105_every_file_of_a_deepspeed_tree(make_store: Callable[[str], Store], cli_here: Cli, tmp_path: Path) -> None:
    """`latest`, which has no ending, zero_to_fp32.py and the files of all eight ranks come back equal."""
    url = f"{make_store('oss').url}/run"
    source = write_tree("T5", tmp_path / "out", step=500)
    assert cli_here("push", source, url).returncode == 0
    resumed = cli_here("resume", url, "--to", "back")
    assert resumed.returncode == 0, resumed.stderr
    back = files_in(tmp_path / "back")
    assert back == files_in(source)
    assert back["latest"] == b"global_step500"
    assert "zero_to_fp32.py" in back
    assert len([path for path in back if "optim_states" in path]) == 8
    assert len([path for path in back if path.startswith("rng_state_")]) == 8


def test_k045_a_missing_sampler_state(push_tree: PushTree, cli_here: Cli, tmp_path: Path) -> None:
    """The checkpoint is refused as incomplete and the older one restored; `verify` names the missing file and exits with 5."""
    pushed = push_tree("T11", "oss")
    path = "checkpoints/checkpoint_2/sampler.bin"
    pushed.store.delete(f"run/{data_key(pushed.stems[1], path)}")
    found = json.loads(cli_here("resume", pushed.run.url, "--to", "target", "--json").stdout)
    assert (found["step"], [(item["step"], item["why"]) for item in found["skipped"]]) == (
        100,
        [(200, f"{path} is missing")],
    )
    assert files_in(tmp_path / "target") == pushed.files[0]
    verified = cli_here("verify", pushed.run.url, "200", "--json")
    assert verified.returncode == 5
    assert [(item["step"], item["file"]) for item in json.loads(verified.stdout)["damaged"]] == [(200, path)]
    refused = cli_here("resume", pushed.run.url, "200", "--to", "other")
    assert (refused.returncode, refused.stdout) == (5, "")
    assert path in refused.stderr
    assert not (tmp_path / "other").exists()


def test_k120_a_half_written_folder(
    make_store: Callable[[str], Store], cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two `-last` folders of NeMo, one of them uploaded half way when the process died: the complete one is restored, the other one named."""
    store = make_store("local")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    whole = write_tree("T12", tmp_path / "whole", step=4800)
    push(whole, run, step=4800)
    fs, root = open_store(run.url)
    backend = FaultyBackend(fs)
    backend.add(StoreFault(verb="put_file", skip=3, times=None, error=disk_full))
    with pytest.raises(DiskFullError):
        push(
            write_tree("T12", tmp_path / "half", step=6224),
            RunDirectory.open(run.url, fs=backend, root=root),
            step=6224,
        )
    assert any("6224" in key for key in store.keys("run/checkpoints/"))
    resumed = cli_here("resume", run.url, "--to", "target", "--json")
    found = json.loads(resumed.stdout)
    assert (found["step"], [item["step"] for item in found["skipped"]]) == (4800, [6224])
    assert "6224" in resumed.stderr
    assert files_in(tmp_path / "target") == files_in(whole)


def test_all_are_damaged(push_tree: PushTree, chance: random.Random, cli_here: Cli, tmp_path: Path) -> None:
    """5, each is named, and a COMMAND is not started, with --or-start neither: it would begin from scratch beside damaged data."""
    pushed = push_tree("T13")
    for stem, files in zip(pushed.stems, pushed.files, strict=True):
        path = min(files)
        pushed.store.put(f"run/{data_key(stem, path)}", flipped(files[path], chance))
    for options in ([], ["--or-start"]):
        result = cli_here("resume", pushed.run.url, *options, "--to", "target", "--", "touch", tmp_path / "started")
        assert (result.returncode, result.stdout) == (5, "")
        assert all(str(stem) in result.stderr for stem in pushed.stems)
    assert not (tmp_path / "started").exists()
    assert not (tmp_path / "target").exists()


def test_strict_takes_no_older_one(push_tree: PushTree, tmp_path: Path) -> None:
    """Damage of the newest ends a strict resume; a manifest that cannot be read does, too."""
    pushed = push_tree("T13")
    path = min(pushed.files[1])
    with pushed.damaged(Change(stored={path: None}, wrong=frozenset({path}))), pytest.raises(IntegrityError):
        resume(pushed.run, LATEST, to=tmp_path / "target", strict=True)
    pushed.store.put(f"run/{manifest_key(pushed.stems[1])}", b"{}")
    with pytest.raises(IntegrityError):
        resume(pushed.run, LATEST, to=tmp_path / "target", strict=True)
    assert not (tmp_path / "target").exists()
