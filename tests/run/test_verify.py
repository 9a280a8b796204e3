"""`verify`: of a run, by reading everything, some, or nothing; of a directory that `resume` made."""

from __future__ import annotations

import itertools
import json
import random
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import IntegrityError
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.push import push
from ckptmgr.run.resume import resume
from ckptmgr.run.verify import Depth, verify_run
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.faulty import FaultyBackend
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


def damage_in(result: Result, *, checked: int) -> list[tuple[str, int, str]]:
    """The (id, step, file) of everything that `verify --json` calls damaged; the exit code and the shape are asserted."""
    document: dict[str, Any] = json.loads(result.stdout)
    assert document.keys() - {"by_size_only"} == {"checked", "damaged"}
    assert document["checked"] == checked
    assert result.returncode == (5 if document["damaged"] else 0), result.stderr
    for item in document["damaged"]:
        assert item.keys() == {"id", "step", "file", "why"}
        assert item["why"]
    return [(item["id"], item["step"], item["file"]) for item in document["damaged"]]


def other_bytes(data: bytes) -> bytes:
    """As many bytes, one bit of them changed."""
    return data[:5] + bytes([data[5] ^ 1]) + data[6:]


# --- a run --------------------------------------------------------------------------------------------------------------


def test_a_whole_run(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """No damage: exit 0, and nothing is changed by looking."""
    push_steps(f"{store.url}/run", 100, 200)
    before = store.snapshot()
    assert damage_in(cli_here("verify", f"{store.url}/run", "--json"), checked=2) == []
    told = cli_here("verify", f"{store.url}/run")
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == f"{store.url}/run: 2 checkpoints checked, no damage\n"
    assert store.snapshot() == before


def test_a_run_without_a_checkpoint(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """Nothing to check is not "no damage": exit 3, and data without a manifest is named."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    store.delete(f"run/manifests/{stem}.json")
    result = cli_here("verify", f"{store.url}/run")
    assert (result.returncode, result.stdout) == (3, "")
    assert "holds data (1 uncommitted or foreign) but no committed checkpoint" in result.stderr
    wrong = cli_here("verify", f"{store.url}/run@v1")
    assert wrong.returncode == 3
    assert f"`ckptmgr verify {store.url}/run 1`" in wrong.stderr


@pytest.mark.parametrize("depth", ["full", "quick"])
@pytest.mark.parametrize("damage", ["missing", "shorter", "other bytes"])
@pytest.mark.parametrize("kind", ["local", "oss"])
def test_damage_is_found(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, kind: str, damage: str, depth: str
) -> None:
    """A file that is gone, cut, or changed in one bit; without a download, as far as the store itself can tell."""
    store = make_store(kind)
    _, newest = push_steps(f"{store.url}/run", 100, 200)
    key = f"run/checkpoints/{newest}/sub/opt.bin"
    data = store.get(key)
    if damage == "missing":
        store.delete(key)
    else:
        store.put(key, data[:-1] if damage == "shorter" else other_bytes(data))
    options = ["--quick"] if depth == "quick" else []
    found = damage_in(cli_here("verify", f"{store.url}/run", "--json", *options), checked=2)
    # Without a download only OSS, which keeps a CRC of every object, can tell other bytes of the same length.
    unseen = depth == "quick" and damage == "other bytes" and kind == "local"
    assert found == ([] if unseen else [(newest, 200, "sub/opt.bin")])
    assert damage_in(cli_here("verify", f"{store.url}/run", "100", "--json", *options), checked=1) == []


def test_bit_rot_that_the_store_does_not_notice(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """Reading in full finds what the store's own checksum does not tell: damage at rest behind an unchanged CRC."""
    store = make_store("oss")
    (stem,) = push_steps(f"{store.url}/run", 100)
    store.server.raw_flip_bit(store.url.split("/")[2], f"exp/run/checkpoints/{stem}/model.bin")
    assert damage_in(cli_here("verify", f"{store.url}/run", "--quick", "--json"), checked=1) == []
    assert damage_in(cli_here("verify", f"{store.url}/run", "--json"), checked=1) == [(stem, 100, "model.bin")]


def test_damage_for_people(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """A row for each damaged file on stdout, one line of verdict on stderr."""
    store = make_store("local")
    first, second = push_steps(f"{store.url}/run", 100, 200)
    store.delete(f"run/checkpoints/{first}/model.bin")
    store.delete(f"run/checkpoints/{first}/sub/opt.bin")
    told = cli_here("verify", f"{store.url}/run")
    assert told.returncode == 5
    rows = told.stdout.splitlines()[2:]
    assert [row.split()[:4] for row in rows] == [
        ["100", "model.bin", "is", "missing"],
        ["100", "sub/opt.bin", "is", "missing"],
    ]
    assert all(first in row for row in rows)
    assert second not in told.stdout
    assert told.stderr.splitlines()[0].startswith(f"ckptmgr: error: {store.url}/run: 1 of 2 checkpoints damaged - ")


def test_quick_says_what_it_could_not_compare(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Where the store keeps no checksum, quick has seen sizes only, and the reader must not take that for more."""
    push_steps(f"{store.url}/run", 100)
    told = cli_here("verify", f"{store.url}/run", "--quick").stdout
    assert ("(2 of 2 files by size only: the store keeps no checksum of them)" in told) is (store.name == "local")
    assert "size" not in cli_here("verify", f"{store.url}/run").stdout
    document = json.loads(cli_here("verify", f"{store.url}/run", "--quick", "--json").stdout)
    assert document["by_size_only"] == (2 if store.name == "local" else 0)


def test_quick_names_what_something_else_wrote(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """An object of the right size without the checksum that its neighbours have is no proof of damage, and is not passed over."""
    store = make_store("s3")
    (stem,) = push_steps(f"{store.url}/run", 100)
    key = f"run/checkpoints/{stem}/model.bin"
    before = store.get(key)
    store.put(key, bytes(len(before)))
    result = cli_here("verify", f"{store.url}/run", "--quick", "--json")
    assert damage_in(result, checked=1) == [(stem, 100, "model.bin")]
    assert json.loads(result.stdout)["by_size_only"] == 1
    assert "1 file may be damaged" in result.stderr
    store.put(key, before)  # as it was: only a reading tells
    assert cli_here("verify", f"{store.url}/run", "--quick").returncode == 5
    assert cli_here("verify", f"{store.url}/run").returncode == 0
    assert cli_here("ls", f"{store.url}/run", "--check").returncode == 0


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_quick_downloads_nothing(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, kind: str) -> None:
    """Presence, size and checksum come from the store's answers about the objects, never from the objects."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100, 200)
    store.server.log.clear()
    assert damage_in(cli_here("verify", f"{store.url}/run", "--quick", "--json"), checked=2) == []
    asked = [entry for entry in store.server.log if "/checkpoints/" in entry.key]
    assert {entry.method for entry in asked} == {"HEAD"}
    # One question about each file, and one listing of all of them.
    assert len(asked) == len({entry.key for entry in asked}) == 4
    lists = [entry for entry in store.server.log if "checkpoints" in entry.query.get("prefix", "")]
    assert len(lists) == 1


def test_sample_reads_its_share(make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli) -> None:
    """A tenth of the files is read, the others are asked about; another tenth the next time."""
    store = make_store("oss")
    files = {f"part-{number:03d}": b"%d" % number for number in range(100)}
    assert cli_here("push", make_checkpoint(1, files), f"{store.url}/run").returncode == 0
    sampled = []
    for _ in range(2):
        store.server.log.clear()
        assert damage_in(cli_here("verify", f"{store.url}/run", "--sample", "10%", "--json"), checked=1) == []
        log = [entry for entry in store.server.log if "/checkpoints/" in entry.key]
        sampled.append({entry.key for entry in log if entry.method == "GET"})
        assert len({entry.key for entry in log}) == 100
    assert all(1 <= len(sample) <= 40 for sample in sampled)
    assert sampled[0] != sampled[1]


def test_everything_is_read_block_by_block(
    make_store: MakeStore,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A file larger than a block is read through in order, without a copy on this machine's disk."""
    monkeypatch.setattr("ckptmgr.run.verify._BLOCK_BYTES", 1000)
    store = make_store("oss")
    data = bytes(range(256)) * 17
    assert cli_here("push", make_checkpoint(1, {"model.bin": data, "empty": b""}), f"{store.url}/run").returncode == 0
    (key,) = (key for key in store.keys("run/checkpoints/") if key.endswith("model.bin"))
    before = sorted(tmp_path.rglob("*"))
    assert damage_in(cli_here("verify", f"{store.url}/run", "--json"), checked=1) == []
    ranges = [
        entry.headers.get("range") for entry in store.server.log if entry.key.endswith(key) and entry.method == "GET"
    ]
    assert len(ranges) == 5
    store.server.raw_flip_bit(store.url.split("/")[2], f"exp/{key}", 4000)
    assert [file for _, _, file in damage_in(cli_here("verify", f"{store.url}/run", "--json"), checked=1)] == [
        "model.bin"
    ]
    assert sorted(tmp_path.rglob("*")) == before


def test_several_files_are_read_at_once_within_a_bound(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve files of ten blocks each: more than one is read at a time, never more blocks than allowed, and each file is right."""
    monkeypatch.setattr("ckptmgr.run.verify._BLOCK_BYTES", 1000)
    monkeypatch.setattr("ckptmgr.run.verify._BLOCKS", 3)
    store = make_store("moto")
    source = tmp_path / "checkpoint-1"
    source.mkdir()
    for number in range(12):
        (source / f"shard-{number}").write_bytes(random.Random(number).randbytes(9_500))
    stem = push(source, RunDirectory.open_or_create(f"{store.url}/run")).stem
    fs, root = open_store(f"{store.url}/run")
    counting = Counting(fs)
    run = RunDirectory.open(f"{store.url}/run", fs=counting, root=root)
    assert verify_run(run, run.history(), [stem], Depth()) == []
    assert counting.most == 3
    store.server.raw_flip_bit(store.url.split("/")[2], f"exp/run/checkpoints/{stem}/shard-7", 9_400)
    assert [found.file for found in verify_run(run, run.history(), [stem], Depth())] == ["shard-7"]


class Counting(FaultyBackend):
    """Counts the reads of data that are under way; each waits a moment for two others."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.now = self.most = 0
        self._change = threading.Condition()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if "/checkpoints/" not in path:
            return super().cat_file(path, start, end, **kwargs)
        with self._change:
            self.now += 1
            self.most = max(self.most, self.now)
            self._change.notify_all()
            self._change.wait_for(lambda: self.most >= 3, timeout=30)
        try:
            return super().cat_file(path, start, end, **kwargs)
        finally:
            with self._change:
                self.now -= 1


def test_a_listing_that_lags_is_not_damage(make_store: MakeStore, push_steps: PushSteps) -> None:
    """Some stores list late: what a listing does not show, or shows with another size, is looked at before it is called damaged."""
    store = make_store("moto")
    push_steps(f"{store.url}/run", 100, 200)
    fs, root = open_store(f"{store.url}/run")

    class Late(FaultyBackend):
        def find(self, path: str, *arguments: Any, **kwargs: Any) -> Any:
            found = super().find(path, *arguments, **kwargs)
            if not isinstance(found, dict) or "checkpoints" not in path:
                return found
            return {name: {**record, "size": 1} for name, record in found.items() if "opt.bin" not in name}

    run = RunDirectory.open(f"{store.url}/run", fs=Late(fs), root=root)
    history = run.history()
    for depth in (Depth(quick=True), Depth()):
        assert verify_run(run, history, history.manifests, depth) == []


def test_what_lies_beside_a_checkpoint_is_a_note(store: Store, push_steps: PushSteps, cli_here: Cli) -> None:
    """Objects under a checkpoint that its manifest does not name harm nothing: exit 0, a warning that names them."""
    _, newest = push_steps(f"{store.url}/run", 100, 200)
    store.put(f"run/checkpoints/{newest}/sub/.nfs01", b"x")
    for options in ([], ["--quick"]):
        result = cli_here("verify", f"{store.url}/run", "--json", *options)
        assert damage_in(result, checked=2) == []
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"ckptmgr: warning: {newest} has 1 file ")
        assert line.endswith("sub/.nfs01")


@pytest.mark.parametrize(
    ("kind", "part_bytes"), [("local", None), ("moto", None), ("moto", 5 << 20), ("oss", 100 << 10)]
)
def test_damage_at_rest(
    make_store: MakeStore, tmp_path: Path, cli_here: Cli, kind: str, part_bytes: int | None
) -> None:
    """Rows 25, 26 and 29: a flipped bit, a short, an empty, a missing object, stored in one request or in parts. `verify` names each, and none hides
    another; without a download it finds all but the flipped bit, which the store does not notice; `ls --check` lists the checkpoint as damaged;
    `resume` takes the older one."""
    store = make_store(kind)
    url = f"{store.url}/run"
    fs, root = open_store(url)
    if part_bytes is not None:
        in_parts: Any = fs
        while hasattr(in_parts, "inner"):
            in_parts = in_parts.inner
        in_parts._part_bytes = in_parts._multipart_threshold = part_bytes
    ids = []
    for step in (100, 200):
        source = tmp_path / f"checkpoint-{step}"
        source.mkdir()
        for name in ("config.json", "cut.bin", "empty.bin", "flip.bin", "missing.bin"):
            size = 30 if step == 100 or name == "config.json" else (part_bytes or 3000) + 77
            (source / name).write_bytes(random.Random(f"{step} {name}").randbytes(size))
        ids.append(push(source, RunDirectory.open_or_create(url, fs=fs, root=root)).stem)
    below = f"run/checkpoints/{ids[1]}"
    size = (part_bytes or 3000) + 77
    store.put(f"{below}/cut.bin", store.get(f"{below}/cut.bin")[:-1])
    store.put(f"{below}/empty.bin", b"")
    store.delete(f"{below}/missing.bin")
    if kind == "local":
        store.put(f"{below}/flip.bin", other_bytes(store.get(f"{below}/flip.bin")))
    else:
        store.server.raw_flip_bit(store.url.split("/")[2], f"exp/{below}/flip.bin", size - 5)
    found = [(str(ids[1]), 200, name) for name in ("cut.bin", "empty.bin", "flip.bin", "missing.bin")]
    seen_by_store = [one for one in found if one[2] != "flip.bin"]
    assert damage_in(cli_here("verify", url, "--quick", "--json"), checked=2) == seen_by_store
    rows = json.loads(cli_here("ls", url, "--check", "--json").stdout)["checkpoints"]
    assert [row["state"] for row in rows] == ["committed", "damaged"]
    assert damage_in(cli_here("verify", url, "--json"), checked=2) == found
    assert damage_in(cli_here("verify", url, "200", "--json"), checked=1) == found
    resumed = json.loads(cli_here("resume", url, "--to", "target", "--json").stdout)
    assert (resumed["step"], [item["id"] for item in resumed["skipped"]]) == (100, [str(ids[1])])


def test_a_thousand_flipped_bits(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Goal of the design: every one of 1,000 single-bit flips, over all files and anywhere in them, is found by `verify`, and by `resume` (which is
    asked about every fifth)."""
    monkeypatch.setattr("os.fsync", lambda fd: None)
    store = make_store("local")
    source = tmp_path / "checkpoint-1"
    (source / "sub").mkdir(parents=True)
    chance = random.Random(20261130)
    sizes = {"model.safetensors": 70_000, "optimizer.pt": 20_000, "sub/rng.pth": 500, "config.json": 3, "one": 1}
    for name, size in sizes.items():
        (source / name).write_bytes(chance.randbytes(size))
    run = RunDirectory.open_or_create(f"{store.url}/run")
    stem = push(source, run).stem
    history = run.history()
    meant = parse_selector(f"id:{stem}")
    for number, name in zip(range(1000), itertools.cycle(sizes), strict=False):
        path = Path(run.root, "checkpoints", str(stem), name)
        right = path.read_bytes()
        at, bit = chance.randrange(len(right)), chance.randrange(8)
        path.write_bytes(right[:at] + bytes([right[at] ^ 1 << bit]) + right[at + 1 :])
        assert [found.file for found in verify_run(run, history, [stem], Depth())] == [name], (name, at, bit)
        if number // len(sizes) % 5 == 0:
            with pytest.raises(IntegrityError, match=re.escape(name)):
                resume(run, meant, to=tmp_path / "target")
        path.write_bytes(right)
    assert verify_run(run, history, [stem], Depth()) == []


def test_damage_is_told_although_the_store_fails_later(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli
) -> None:
    """The store refuses the last checkpoint: exit 4 and no verdict, but what was found before is named."""
    store = make_store("oss")
    first, second = push_steps(f"{store.url}/run", 100, 200)
    store.delete(f"run/checkpoints/{first}/model.bin")
    refusal = Fault(key=f"*/{second}/model.bin", status=403, code="AccessDenied", times=None)
    with store.server.faults.injected(refusal):
        result = cli_here("verify", f"{store.url}/run", "--json")
    assert (result.returncode, result.stdout) == (4, "")
    assert f"{first} is damaged: model.bin is missing" in result.stderr.splitlines()[0]


def test_store_that_fails_is_not_damage(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """A file that could not be read is not a damaged one (I7): exit 4, no verdict."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    with store.server.faults.injected(
        Fault(method="GET", key="*/model.bin", status=403, code="AccessDenied", times=None)
    ):
        result = cli_here("verify", f"{store.url}/run", "--json")
    assert (result.returncode, result.stdout) == (4, "")
    assert "model.bin" in result.stderr


def test_pruned_meanwhile_is_not_damage(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """Files that vanish together with their checkpoint are not missing."""
    store = make_store("oss")
    (stem, _) = push_steps(f"{store.url}/run", 100, 200)
    closing = json.dumps({"format": "ckptmgr", "version": 1, "id": stem, "closed": "pruned", "closed_at": None})

    def prune_first(seen: Any) -> bool:
        if stem in seen.key and "/checkpoints/" in seen.key and store.keys(f"run/checkpoints/{stem}/"):
            store.put(f"run/manifests/{stem}.json", closing.encode())
            for key in store.keys(f"run/checkpoints/{stem}/"):
                store.delete(key)
        return False

    with store.server.faults.injected(Fault(match=prune_first)):
        assert damage_in(cli_here("verify", f"{store.url}/run", "--json"), checked=2) == []
    assert store.keys(f"run/checkpoints/{stem}/") == []


# --- a directory --------------------------------------------------------------------------------------------------------


@pytest.fixture
def restored(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> Path:
    """A directory that `resume` made, of step 100."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    return Path(cli_here("resume", f"{store.url}/run").stdout.strip())


@pytest.mark.parametrize("slash", ["", "/"])
def test_restored_directory(restored: Path, cli_here: Cli, slash: str) -> None:
    """As it was restored: exit 0, by the manifest beside it, whatever became of the store."""
    assert damage_in(cli_here("verify", f"{restored}{slash}", "--json"), checked=1) == []
    assert cli_here("verify", f"{restored}{slash}").returncode == 0
    assert damage_in(cli_here("verify", f"file://{restored}{slash}", "--json"), checked=1) == []


@pytest.mark.parametrize(
    ("change", "file"),
    [
        ("flip", "model.bin"),
        ("remove", "sub/opt.bin"),
        ("add", "notes.txt"),
        ("cut", "model.bin"),
        ("folder", "model.bin"),
    ],
)
def test_changed_directory(restored: Path, cli_here: Cli, change: str, file: str) -> None:
    """A flipped bit, a missing, an added, a shortened file, a folder in the place of a file: each is named."""
    path = restored / file
    if change == "flip":
        path.write_bytes(other_bytes(path.read_bytes()))
    elif change == "add":
        path.write_bytes(b"mine")
    elif change == "cut":
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
        if change == "folder":
            path.mkdir()
    told = cli_here("verify", restored, "--json")
    assert told.stderr.endswith(" - fetch it again, with --replace\n")
    found = damage_in(told, checked=1)
    assert [(step, name) for _, step, name in found] == [(100, file)]
    assert file in cli_here("verify", restored).stdout


def test_directory_without_a_manifest(restored: Path, cli_here: Cli) -> None:
    """There is nothing to compare with: not found (3), in one line that says where verify finds it."""
    sidecar = restored.with_name(f"{restored.name}.ckptmgr.json")
    sidecar.rename(sidecar.with_name("elsewhere"))
    result = cli_here("verify", restored)
    assert (result.returncode, result.stdout) == (3, "")
    assert sidecar.name in result.stderr


@pytest.mark.parametrize("spoiled", [b"not json", b"{}", b"[]", b'{"format": "ckptmgr", "version": 7}'])
def test_directory_with_a_damaged_manifest(restored: Path, cli_here: Cli, spoiled: bytes) -> None:
    """A sidecar that cannot be read is damage (5), not a traceback."""
    restored.with_name(f"{restored.name}.ckptmgr.json").write_bytes(spoiled)
    result = cli_here("verify", restored)
    assert (result.returncode, result.stdout) == (5, "")
    assert len(result.stderr.splitlines()) == 1


def test_selector_and_depth_are_for_runs(restored: Path, cli_here: Cli) -> None:
    """A directory holds one checkpoint, which is read in full: what says otherwise is a mistake (2)."""
    for option in (["latest"], ["--quick"], ["--sample", "10%"]):
        assert cli_here("verify", restored, *option).returncode == 2
