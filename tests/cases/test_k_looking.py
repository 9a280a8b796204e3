"""Cases of looking: without the right to list, beside other processes, while somebody prunes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import AccessDeniedError, CheckpointNotFoundError
from ckptmgr.core.layout import Stem, tag_key
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.records import TagRecord, encode_tag
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.resume import Resumed, resume
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied
from ckptmgr.testing.stores import Store
from ckptmgr.testing.waits import Stopwatch
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.transfer.drain import drain

Cli = Callable[..., subprocess.CompletedProcess[str]]
Tree = Callable[[str, Mapping[str, bytes]], Path]
Ask = Callable[..., Any]
MakeStore = Callable[[str], Store]

DEADLINE_S = 60.0
SIX = {f"part-{number}": b"%d" % number * 50 for number in range(6)}


# --- without the right to list ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_k014_without_the_right_to_list(
    make_store: MakeStore,
    cli_here: Cli,
    ask: Ask,
    tree: Tree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Saves commit, the first one and one that was interrupted, although S3 refuses to say that a key is absent; listing fails and is not "empty"; a
    checkpoint that is named by its id is shown by its manifest: resumed, verified, pulled."""
    store = make_store(kind)
    url = f"{store.url}/run"
    ask("push", tree("checkpoint-100", SIX), url)
    before = store.snapshot()
    for name, value in store.server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    fs, root = open_store(url)
    faulty = FaultyBackend(fs)
    run = RunDirectory.open(url, fs=faulty, root=root)
    tier = LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)
    stems = [save(tier, run, step) for step in (200, 300)]
    cut = faulty.add(StoreFault(verb="pipe_file", path=f"*/manifests/{stems[0]}.json", error=denied))
    assert drain(tier, run).pending == (stems[0],)
    assert cut.hits == 1
    assert drain(tier, run).pending == ()
    after = store.snapshot()
    assert {key: after[key] for key in before} == before
    assert {key for key in after.keys() - before.keys() if "/manifests/" in key} == {
        f"run/manifests/{stem}.json" for stem in stems
    }
    with pytest.raises(AccessDeniedError, match="no permission to list"):
        run.history()
    for words in (["ls", url], ["resume", url], ["resume", url, "200"]):
        refused = cli_here(*words)
        assert (refused.returncode, refused.stdout) == (4, "")
        assert "no permission to list" in refused.stderr
        assert "empty" not in refused.stderr
    named = f"id:{stems[0]}"
    assert ask("resume", url, named, "--to", tmp_path / "here")["step"] == 200
    assert ask("pull", url, named, "--to", tmp_path / "there")["step"] == 200
    assert {p.name: p.read_bytes() for p in (tmp_path / "here").iterdir()} == SIX | {"step": b"200"}
    assert ask("verify", url, named) == {"checked": 1, "damaged": []}
    assert ask("verify", url, named, "--quick") == {"checked": 1, "damaged": [], "by_size_only": 0}
    absent = cli_here("resume", url, f"id:{stems[0].renamed('00000000')}")
    assert absent.returncode == (4 if kind == "moto" else 3), absent.stderr


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_k014_the_first_save_of_a_run_without_the_right_to_list(
    make_store: MakeStore,
    cli_here: Cli,
    ask: Ask,
    tree: Tree,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """That run.json can be created proves that there is no run: a push and a training commit, with a warning; the next ones are refused, not taken for first
    ones; what was saved is resumed by its id."""
    store = make_store(kind)
    for name, value in store.server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    pushed = cli_here("push", tree("checkpoint-100", SIX), f"{store.url}/pushed", "--json")
    assert pushed.returncode == 0, pushed.stderr
    assert "no permission to list" in pushed.stderr
    with CheckpointManager(f"{store.url}/trained", local_dir=tmp_path / "disk", transfer="thread") as manager:
        assert manager.restore({}) is None
        ids = [json.loads(pushed.stdout)["id"], *(manager.save(step, {"step": step}) for step in (200, 300))]
    urls = [f"{store.url}/{name}" for name in ("pushed", "trained", "trained")]
    for url, stem in zip(urls, ids, strict=True):
        got = ask("resume", url, f"id:{stem}", "--to", tmp_path / str(stem))
        assert f"{got['step']:012d}" in str(stem)
    before = store.snapshot()
    assert len([key for key in before if "/manifests/" in key]) == 3
    commands: list[list[Any]] = [
        ["ls", urls[0]],
        ["ls", urls[1]],
        ["push", tree("checkpoint-200", SIX), urls[0]],
        ["resume", urls[1], "--or-start", "--", "touch", tmp_path / "started"],
    ]
    for words in commands:
        refused = cli_here(*words)
        assert refused.returncode == 4, (words, refused.stderr)
        assert "no permission to list" in refused.stderr
    with (
        pytest.raises(AccessDeniedError, match="no permission to list"),
        CheckpointManager(urls[1], local_dir=tmp_path / "elsewhere", transfer="thread") as again,
    ):
        again.save(100, {"step": 100})
    assert not (tmp_path / "started").exists()
    assert store.snapshot() == before


def test_k014_nothing_is_made_where_create_only_is_not_decided(
    make_store: MakeStore, cli_here: Cli, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There nothing would prove that the run is new: refused as any other look."""
    store = make_store("moto")
    for name, value in store.server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    store.server.faults.add(Fault(method="PUT", ignore_headers=("if-none-match",), times=None))
    refused = cli_here("push", tree("checkpoint-100", SIX), f"{store.url}/run")
    assert refused.returncode == 4
    assert "AccessDenied" in refused.stderr
    assert store.keys() == []


def save(tier: LocalTier, run: RunDirectory, step: int) -> Stem:
    """Commit a save of `SIX` and its step into the local tier."""
    stem = Stem(1, step, step // 100, f"{step:08x}")
    prepared = tier.prepare(stem)
    for name, data in (SIX | {"step": b"%d" % step}).items():
        (prepared / name).write_bytes(data)
    tier.commit(Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared)), prepared, target=run.url)
    return stem


# --- beside other processes ---------------------------------------------------------------------------------------------


def test_k112_a_long_lived_process_sees_what_others_do(
    store: Store, cli: Cli, ask: Ask, tree: Tree, tmp_path: Path
) -> None:
    """It has listed the run, empty, when another process commits: its next call sees the checkpoint and opens each file; pruned and gone, it is not
    offered any more."""
    url = f"{store.url}/run"
    run = RunDirectory.open_or_create(url)
    assert (run.history().manifests, run.keys("checkpoints")) == ({}, [])
    pushed = cli("push", tree("checkpoint-100", SIX), url, "--json")
    assert pushed.returncode == 0, pushed.stderr
    watch = Stopwatch()
    (stem,) = run.history().manifests
    resumed = resume(run, parse_selector("latest"), to=tmp_path / "here")
    assert watch.seconds < 5.0
    assert (str(stem), resumed.manifest.stem) == (json.loads(pushed.stdout)["id"], stem)
    assert {path.name: path.read_bytes() for path in resumed.directory.iterdir()} == SIX
    ask("push", tree("checkpoint-200", SIX | {"more": b"1"}), url)
    ask("prune", url, "--keep-last", "1", "--yes")
    assert [manifest.step for manifest in run.history().manifests.values()] == [200]
    assert stem in run.history().closed
    with pytest.raises(CheckpointNotFoundError):
        resume(run, parse_selector(f"id:{stem}"), to=tmp_path / "there")
    for key in store.keys("run/manifests/"):
        store.delete(key)
    assert run.history().manifests == {}


def test_k126_a_pointer_is_never_read_in_part(store: Store, ask: Ask, tree: Tree) -> None:
    """A tag that another process moves, to a text one byte longer: each of ten reads gives the old or the new one, and from the change on the new."""
    url = f"{store.url}/run"
    ids = [Stem.parse(ask("push", tree(f"checkpoint-{step}", {"a": b"%d" % step}), url)["id"]) for step in (999, 1000)]
    run = RunDirectory.open(url)
    run.tag("newest", ids[0])
    short = store.get(f"run/{tag_key('newest')}")
    seen = []
    for number in range(10):
        if number == 5:
            longer = encode_tag(TagRecord(tag="newest", stem=ids[1], created_at=None)) + b" " * 200
            store.put(f"run/{tag_key('newest')}", longer)
            assert len(longer) > len(short)
        seen.append(run.tags()["newest"])
        assert run.fs.cat_file(run.path(tag_key("newest"))) == (short if number < 5 else longer)
    assert seen == [ids[0]] * 5 + [ids[1]] * 5
    assert ask("show", url, "tag:newest")["step"] == 1000


# --- while somebody prunes ----------------------------------------------------------------------------------------------


def test_k058_pruned_while_it_is_downloaded(store: Store, cli: Cli, ask: Ask, tree: Tree, tmp_path: Path) -> None:
    """Some of six files have arrived when another machine commits 200 and prunes 100: the download ends with 200, whole; one that was named with
    "was removed during download"."""
    url = f"{store.url}/run"
    first = ask("push", tree("checkpoint-100", SIX | {"step": b"100"}), url)["id"]
    fs, root = open_store(url)
    outcomes: dict[str, Any] = {}

    def read(selector: str) -> tuple[threading.Thread, Any]:
        faulty = FaultyBackend(fs)
        held = faulty.add(StoreFault(verb="get_file", path="*/part-3", hold=True))
        run = RunDirectory.open(url, fs=faulty, root=root)

        def call() -> None:
            try:
                outcomes[selector] = resume(run, parse_selector(selector), to=tmp_path / selector.partition(":")[0])
            except Exception as exc:  # noqa: BLE001 - handed to the test
                outcomes[selector] = exc

        thread = threading.Thread(target=call)
        thread.start()
        return thread, held

    readers = [read("latest"), read(f"id:{first}")]
    try:
        assert all(held.reached.wait(DEADLINE_S) for _, held in readers)
        ask("push", tree("checkpoint-200", SIX | {"step": b"200"}), url)
        elsewhere = {"CKPTMGR_LOCK_DIR": str(tmp_path / "locks-of-another-host")}
        assert cli("prune", url, "--keep-last", "1", "--yes", env=elsewhere).returncode == 0
        assert store.keys(f"run/checkpoints/{first}/") == []
    finally:
        for thread, held in readers:
            held.release()
            thread.join(DEADLINE_S)
    newest, named = outcomes["latest"], outcomes[f"id:{first}"]
    assert isinstance(named, CheckpointNotFoundError)
    assert "was removed during download" in str(named)
    assert not (tmp_path / "id").exists()
    if isinstance(newest, Resumed):
        assert {p.name: p.read_bytes() for p in newest.directory.iterdir()} == SIX | {"step": b"200"}
    else:
        assert isinstance(newest, CheckpointNotFoundError)
        assert "removed" in str(newest)
        assert not (tmp_path / "latest").exists()


def test_k078_an_interrupted_removal_is_no_checkpoint(store: Store, ask: Ask, tree: Tree, tmp_path: Path) -> None:
    """Prune is cut off after two of six objects: 100 is not listed as committed, nor resumed, and the next prune removes the rest."""
    url = f"{store.url}/run"
    first, second = (
        ask("push", tree(f"checkpoint-{step}", SIX | {"s": b"%d" % step}), url)["id"] for step in (100, 200)
    )
    script = (
        "import os, sys\n"
        "from ckptmgr.backends.registry import open_store\n"
        "from ckptmgr.core.retention import KeepLast\n"
        "from ckptmgr.run.directory import RunDirectory\n"
        "from ckptmgr.run.prune import prune\n"
        "from ckptmgr.testing.faulty import FaultyBackend, StoreFault\n"
        "fs, root = open_store(sys.argv[1])\n"
        "faulty = FaultyBackend(fs)\n"
        "faulty.add(StoreFault(verb='rm_file', path='*/checkpoints/*', skip=1, when='after', kill=True))\n"
        "prune(RunDirectory.open(sys.argv[1], fs=faulty, root=root), KeepLast(1))\n"
    )
    assert subprocess.run([sys.executable, "-c", script, url], timeout=DEADLINE_S, check=False).returncode == -9
    assert len(store.keys(f"run/checkpoints/{first}/")) == 5
    rows = ask("ls", url, "--all", "--check")["checkpoints"]
    assert [(row["id"], row["state"]) for row in rows] == [(second, "committed")]
    assert ask("resume", url, "--to", tmp_path / "here")["id"] == second
    assert ask("prune", url, "--keep-last", 1, "--yes")["delete"] == []
    assert store.keys(f"run/checkpoints/{first}/") == []
    assert len(store.keys(f"run/checkpoints/{second}/")) == 7


def test_k027_two_nodes_prune_one_folder(make_store: MakeStore, ask: Ask, tree: Tree, tmp_path: Path) -> None:
    """Fifty times two processes apply retention to one shared folder at the same moment, with locks of their own, as on two hosts: neither fails, the
    same checkpoints survive, the newest untouched."""
    store = make_store("local")
    original = Path(store.root, "run-0")  # type: ignore[attr-defined]
    ids = [
        ask("push", tree(f"checkpoint-{step}", SIX | {"s": b"%d" % step}), f"{store.url}/run-0")["id"]
        for step in (1, 2, 3, 4)
    ]
    for number in range(1, 50):
        shutil.copytree(original, original.with_name(f"run-{number}"))
    script = (
        "import sys\n"
        "from ckptmgr.core.retention import KeepLast\n"
        "from ckptmgr.run.directory import RunDirectory\n"
        "from ckptmgr.run.prune import prune\n"
        "import os; os.fsync = lambda fd: None\n"
        "print('ready', flush=True)\n"
        "for url in sys.stdin:\n"
        "    prune(RunDirectory.open(url.strip()), KeepLast(2))\n"
        "    print('done', flush=True)\n"
    )
    nodes = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "CKPTMGR_LOCK_DIR": str(tmp_path / f"locks-{node}")},
        )
        for node in range(2)
    ]
    try:
        for node in nodes:
            assert node.stdout is not None
            assert node.stdout.readline() == "ready\n"
        for number in range(50):
            for node in nodes:
                assert node.stdin is not None
                print(f"{store.url}/run-{number}", file=node.stdin, flush=True)
            for node in nodes:
                assert node.stdout is not None
                assert node.stdout.readline() == "done\n", number
            run = original.with_name(f"run-{number}")
            assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ids[2:]
            whole = {p.relative_to(run).as_posix(): p.read_bytes() for p in (run / f"checkpoints/{ids[3]}").iterdir()}
            assert whole == {f"checkpoints/{ids[3]}/{name}": data for name, data in (SIX | {"s": b"4"}).items()}
    finally:
        for node in nodes:
            node.communicate(timeout=DEADLINE_S)
    assert [node.returncode for node in nodes] == [0, 0]
