"""`verify`: of a run, by reading everything, some, or nothing; of a directory that `resume` made."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


def damage_in(result: Result, *, checked: int) -> list[tuple[str, int, str]]:
    """The (id, step, file) of everything that `verify --json` calls damaged; the exit code and the shape are asserted."""
    document: dict[str, Any] = json.loads(result.stdout)
    assert document.keys() == {"checked", "damaged"}
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


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_quick_downloads_nothing(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, kind: str) -> None:
    """Presence, size and checksum come from the store's answers about the objects, never from the objects."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100, 200)
    store.server.log.clear()
    assert damage_in(cli_here("verify", f"{store.url}/run", "--quick", "--json"), checked=2) == []
    asked = [entry for entry in store.server.log if "/checkpoints/" in entry.key]
    assert {entry.method for entry in asked} == {"HEAD"}
    assert len({entry.key for entry in asked}) == 4


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
    found = damage_in(cli_here("verify", restored, "--json"), checked=1)
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
