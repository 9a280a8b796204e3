"""`ckptmgr pull`: a verified copy of a checkpoint, or of a part of it."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import CheckpointNotFoundError, DiskFullError, IntegrityError
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.pull import Pulled, pull
from ckptmgr.run.push import push
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.testing.faulty import FaultyBackend, StoreFault
from ckptmgr.testing.outcomes import files_in
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]

DEADLINE_S = 60.0
FILES = {
    "model-00001-of-00002.safetensors": b"w" * 3000,
    "model-00002-of-00002.safetensors": b"v" * 2000,
    "optimizer.pt": b"o" * 5000,
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "trainer_state.json": b'{"global_step": 100}',
    "global_step100/zero_pp_rank_0_optim_states.pt": b"z" * 400,
}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def document(result: Result) -> dict[str, Any]:
    """What `pull --json` says; the exit code and the shape are asserted."""
    assert result.returncode == 0, result.stderr
    said: dict[str, Any] = json.loads(result.stdout)
    assert said.keys() == {"path", "id", "step", "files", "size_bytes", "fetched_bytes", "partial"}
    return said


def refused(result: Result, code: int, *says: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("ckptmgr: error: ")
    for text in says:
        assert text in line


@pytest.fixture
def run_url(make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli) -> str:
    """A local run with a checkpoint of `FILES`, step 100."""
    url = f"{make_store('local').url}/run"
    assert cli_here("push", make_checkpoint(100, FILES), url).returncode == 0
    return url


# --- what is copied -----------------------------------------------------------------------------------------------------


def test_a_whole_checkpoint(store: Store, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path) -> None:
    """stdout is DIR in full and a newline; it holds the files and nothing else, and is a checkpoint that `verify` knows and a trainer may resume."""
    for step in (100, 200):
        assert (
            cli_here("push", make_checkpoint(step, FILES | {"step": b"%d" % step}), f"{store.url}/run").returncode == 0
        )
    target = tmp_path / "deep" / "copy"
    pulled = cli_here("pull", f"{store.url}/run", "100", "--to", target)
    assert (pulled.returncode, pulled.stdout) == (0, f"{target}\n")
    assert "8 files, 10.4 kB verified, 10.4 kB of it from" in pulled.stderr
    assert files_in(target) == FILES | {"step": b"100"}
    assert names(target.parent) == ["copy", "copy.ckptmgr.json"]
    assert (read_sidecar(target).manifest.step, read_sidecar(target).how) == (100, "explicit")
    assert json.loads(cli_here("verify", target, "--json").stdout) == {"checked": 1, "damaged": []}


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        (["weights"], ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        (["config", "tokenizer"], ["config.json", "tokenizer.json"]),
        (["*.json"], ["config.json", "tokenizer.json", "trainer_state.json"]),
        (["model-00002*"], ["model-00002-of-00002.safetensors"]),
        (["optimizer"], ["global_step100/zero_pp_rank_0_optim_states.pt", "optimizer.pt"]),
        (["global_step100/*"], ["global_step100/zero_pp_rank_0_optim_states.pt"]),
        (["zero_pp*.pt", "config.json", "trainer"], [
            "config.json", "global_step100/zero_pp_rank_0_optim_states.pt", "trainer_state.json",
        ]),
    ],
)  # fmt: skip
def test_only_some_files(run_url: str, cli_here: Cli, tmp_path: Path, only: list[str], expected: list[str]) -> None:
    """Roles by name, and patterns of names and paths; what is there can be verified, and is no checkpoint."""
    target = tmp_path / "part"
    options = [word for one in only for word in ("--only", one)]
    said = document(cli_here("pull", run_url, "--to", target, *options, "--json"))
    size = sum(len(FILES[name]) for name in expected)
    assert (said["path"], said["step"], said["files"], said["partial"]) == (str(target), 100, expected, True)
    assert said["size_bytes"] == said["fetched_bytes"] == size
    assert files_in(target) == {name: FILES[name] for name in expected}
    assert json.loads(cli_here("verify", target, "--json").stdout) == {"checked": 1, "damaged": []}
    assert "a part of it" in cli_here("verify", target).stdout
    with pytest.raises(CheckpointNotFoundError, match="only a part of checkpoint"):
        read_sidecar(target)


def test_nothing_but_what_was_asked_for_is_read(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path
) -> None:
    """The optimizer of a large model is not downloaded for its weights; a second time, nothing is."""
    store = make_store("oss")
    assert cli_here("push", make_checkpoint(100, FILES), f"{store.url}/run").returncode == 0
    for fetched, asked in (
        (5000, {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}),
        (0, set()),
    ):
        store.server.log.clear()
        said = document(cli_here("pull", f"{store.url}/run", "--only", "weights", "--to", tmp_path / "here", "--json"))
        assert said["fetched_bytes"] == fetched
        assert {entry.key.split("/")[-1] for entry in store.server.log if "/checkpoints/" in entry.key} == asked


def test_a_damaged_part_is_found(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """`verify DIR` names what of a part is changed, missing or added."""
    target = tmp_path / "part"
    document(cli_here("pull", run_url, "--to", target, "--only", "weights", "--json"))
    (target / "model-00001-of-00002.safetensors").write_bytes(b"w" * 2999 + b"x")
    (target / "model-00002-of-00002.safetensors").unlink()
    (target / "optimizer.pt").write_bytes(FILES["optimizer.pt"])
    result = cli_here("verify", target, "--json")
    assert result.returncode == 5
    assert [item["file"] for item in json.loads(result.stdout)["damaged"]] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "optimizer.pt",
    ]


def test_a_manifest_that_was_cut(
    make_store: MakeStore, push_steps: Callable[..., list[str]], cli_here: Cli, tmp_path: Path
) -> None:
    """The advice is that of a damaged file: another one."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    key = f"run/manifests/{stem}.json"
    store.put(key, store.get(key)[:100])
    done = cli_here("pull", f"{store.url}/run", "--to", tmp_path / "copy")
    assert done.returncode == 5
    assert "is damaged" in done.stderr
    assert "choose another of `ckptmgr ls --check`" in done.stderr
    assert not (tmp_path / "copy").exists()


def test_a_part_is_not_resumed_from(run_url: str, cli_here: Cli, tmp_path: Path) -> None:
    """`resume` into the directory of a part refuses, and replaces it only when told to; then it is a whole one."""
    target = tmp_path / "here"
    document(cli_here("pull", run_url, "--to", target, "--only", "weights", "--json"))
    refused(cli_here("resume", run_url, "--to", target), 7)
    resumed = cli_here("resume", run_url, "--to", target, "--replace")
    assert resumed.returncode == 0, resumed.stderr
    assert files_in(target) == FILES
    assert read_sidecar(target).manifest.step == 100


@pytest.mark.parametrize("only", ["weight", "rng", "*.gguf", "other/*"])
def test_only_that_means_nothing(run_url: str, cli_here: Cli, tmp_path: Path, only: str) -> None:
    """Exit 3, also when another --only means something: half of what was asked for must not look like all. It names the roles and files there are."""
    refused(
        cli_here("pull", run_url, "--to", tmp_path / "here", "--only", "weights", "--only", only),
        3,
        f"--only {only} means",
        "weights (model-00001-of-00002.safetensors, model-00002-of-00002.safetensors)",
        "config (config.json)",
    )
    assert not (tmp_path / "here").exists()


def test_selectors_and_what_they_miss(
    run_url: str, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path
) -> None:
    """Any selector; one that matches nothing, or an empty run, is exit 3."""
    pushed = cli_here("push", make_checkpoint(200), run_url, "--metric", "loss=0.5", "--tag", "good")
    assert pushed.returncode == 0
    for at, selector in enumerate(("latest", "200", "best:loss", "tag:good", f"id:{pushed.stdout.strip()}")):
        assert document(cli_here("pull", run_url, selector, "--to", tmp_path / f"{at}", "--json"))["step"] == 200
    refused(cli_here("pull", run_url, "300", "--to", tmp_path / "none"), 3, "300")
    refused(cli_here("pull", f"{run_url}2", "--to", tmp_path / "none"), 3)
    refused(cli_here("pull", run_url), 2, "--to")
    refused(cli_here("pull", run_url, "--to", "s3://bucket/x"), 2)
    assert not (tmp_path / "none").exists()


# --- the target ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["a file", "other files", "another step", "more files"])
def test_other_content_is_refused_or_replaced(
    run_url: str, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path, what: str
) -> None:
    """DIR holds something else: exit 7, untouched; with --replace it holds the checkpoint and nothing of what it held."""
    target = tmp_path / "here"
    if what == "a file":
        target.write_bytes(b"mine")
    elif what == "other files":
        (target / "sub").mkdir(parents=True)
        (target / "sub/notes.txt").write_bytes(b"mine")
    else:
        assert cli_here("push", make_checkpoint(50, {"config.json": b"{ }"}), run_url, "--step", "50").returncode == 0
        step = "50" if what == "another step" else "100"
        document(cli_here("pull", run_url, step, "--to", target, "--json"))
        if what == "more files":
            (target / "notes.txt").write_bytes(b"mine")
    before = files_in(tmp_path)
    refused(cli_here("pull", run_url, "100", "--to", target), 7, str(target), "--replace")
    assert files_in(tmp_path) == before
    document(cli_here("pull", run_url, "100", "--to", target, "--replace", "--json"))
    assert files_in(target) == FILES
    assert [name for name in names(tmp_path) if name.startswith("here")] == ["here", "here.ckptmgr.json"]


def test_what_is_right_already_is_not_fetched_again(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path
) -> None:
    """The rest of a checkpoint, of which a part was pulled, comes alone: of that part only what is damaged is fetched."""
    store = make_store("oss")
    run = f"{store.url}/run"
    assert cli_here("push", make_checkpoint(100, FILES), run).returncode == 0
    target = tmp_path / "here"
    document(cli_here("pull", run, "--only", "weights", "--only", "optimizer", "--to", target, "--json"))
    (target / "optimizer.pt").write_bytes(b"x" * 5000)
    store.server.log.clear()
    said = document(cli_here("pull", run, "--to", target, "--replace", "--json"))
    asked = {entry.key.split("/")[-1] for entry in store.server.log if "/checkpoints/" in entry.key}
    assert asked == {"config.json", "tokenizer.json", "trainer_state.json", "optimizer.pt"}
    assert (said["partial"], said["size_bytes"]) == (False, sum(map(len, FILES.values())))
    assert said["fetched_bytes"] == sum(len(FILES[name]) for name in asked)
    assert files_in(target) == FILES


def test_no_room(run_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before the first byte, by what the wanted files need."""
    run = RunDirectory.open(run_url)
    free = (16 << 20) + 100
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free}))
    with pytest.raises(DiskFullError) as raised:
        pull(run, parse_selector("latest"), tmp_path / "here", only=["weights"])
    assert raised.value.free_bytes == free  # type: ignore[attr-defined]
    assert not (tmp_path / "here").exists()
    assert not (tmp_path / "here.partial").exists()
    pulled = pull(run, parse_selector("latest"), tmp_path / "here", only=["config"])
    assert [entry.path for entry in pulled.files] == ["config.json"]


def test_not_into_the_run_itself(run_url: str, cli_here: Cli) -> None:
    """A copy in the run's own directory would look like data of it."""
    refused(cli_here("pull", run_url, "--to", run_url.removeprefix("file://") + "/checkpoints/copy"), 2, "lies inside")


# --- damage and races ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["pull", "resume"])
@pytest.mark.parametrize("options", [[], ["--replace"]])
def test_what_is_no_file_is_never_replaced(
    run_url: str, cli_here: Cli, tmp_path: Path, command: str, options: list[str]
) -> None:
    """`--to /dev/null` as root, with --replace, would take the machine's away."""
    os.mkfifo(tmp_path / "pipe")
    refused(cli_here(command, run_url, "--to", "pipe", *options), 2, "is a device, a pipe or a socket", "nothing was")
    assert (tmp_path / "pipe").is_fifo()
    assert not list(tmp_path.glob("pipe.*"))


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_a_damaged_file(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path, damage: str
) -> None:
    """Exit 5, nothing at DIR, and no older checkpoint instead; a part without the damaged file can still be had."""
    store = make_store("oss")
    run = f"{store.url}/run"
    for step in (100, 200):
        pushed = cli_here("push", make_checkpoint(step, FILES | {"step": b"%d" % step}), run)
        assert pushed.returncode == 0
    key = f"run/checkpoints/{pushed.stdout.strip()}/optimizer.pt"
    if damage == "missing":
        store.delete(key)
    else:
        store.server.raw_flip_bit(store.url.split("/")[2], f"exp/{key}", 77)
    refused(cli_here("pull", run, "--to", tmp_path / "here"), 5, "optimizer.pt")
    assert [name for name in names(tmp_path) if name.startswith("here")] == []
    assert document(cli_here("pull", run, "--only", "weights", "--to", tmp_path / "here", "--json"))["step"] == 200
    assert json.loads(cli_here("ls", run, "--json").stdout)["checkpoints"][1]["state"] == "damaged"


@pytest.mark.parametrize("selector", ["latest", "200"])
def test_pruned_while_it_is_pulled(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli: Cli, cli_here: Cli, tmp_path: Path, selector: str
) -> None:
    """`latest` is the newest by then, and one that was named is said to be removed (3); never a mixture, never less than all."""
    store = make_store("oss")
    url = f"{store.url}/run"
    sources = {step: make_checkpoint(step, FILES | {"step": b"%d" % step}) for step in (200, 300)}
    assert cli_here("push", sources[200], url).returncode == 0
    fs, root = open_store(url)
    faulty = FaultyBackend(fs)
    held = faulty.add(StoreFault(verb="get_file", path="*/optimizer.pt", hold=True))
    run = RunDirectory.open(url, fs=faulty, root=root)
    outcome: list[Pulled | Exception] = []

    def read() -> None:
        try:
            outcome.append(pull(run, parse_selector(selector), tmp_path / "here"))
        except Exception as exc:  # noqa: BLE001 - handed to the test
            outcome.append(exc)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        assert held.reached.wait(DEADLINE_S)
        push(sources[300], RunDirectory.open(url))
        # Another host has locks of its own: it does not see this reader.
        elsewhere = {"CKPTMGR_LOCK_DIR": str(tmp_path / "locks-of-another-host")}
        assert cli("prune", url, "--keep-last", "1", "--yes", env=elsewhere).returncode == 0
    finally:
        held.release()
        thread.join(DEADLINE_S)
    (pulled,) = outcome
    if selector == "latest":
        assert isinstance(pulled, Pulled)
        assert pulled.manifest.step == 300
        assert files_in(tmp_path / "here") == FILES | {"step": b"300"}
    else:
        assert isinstance(pulled, CheckpointNotFoundError)
        assert "was removed during download" in str(pulled)
        assert not (tmp_path / "here").exists()


def test_an_interrupted_pull_is_taken_up(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path
) -> None:
    """The store fails in the middle: nothing at DIR; a repeat fetches what is missing."""
    store = make_store("oss")
    url = f"{store.url}/run"
    assert cli_here("push", make_checkpoint(100, FILES), url).returncode == 0
    fs, root = open_store(url)
    faulty = FaultyBackend(fs)
    run = RunDirectory.open(url, fs=faulty, root=root)
    arrived = threading.Event()

    class LastFails(FaultyBackend):
        def get_file(self, rpath: str, lpath: str, *arguments: Any, **kwargs: Any) -> Any:
            if rpath.endswith("optimizer.pt"):
                assert arrived.wait(DEADLINE_S)
                raise IntegrityError("the line is cut")
            done = super().get_file(rpath, lpath, *arguments, **kwargs)
            if rpath.endswith("00001-of-00002.safetensors"):
                arrived.set()
            return done

    run.fs = LastFails(fs)
    with pytest.raises(IntegrityError):
        pull(run, parse_selector("latest"), tmp_path / "here", only=["weights", "optimizer"])
    assert not (tmp_path / "here").exists()
    assert (tmp_path / "here.partial/model-00001-of-00002.safetensors").read_bytes() == b"w" * 3000
    run.fs = faulty
    pulled = pull(run, parse_selector("latest"), tmp_path / "here", only=["weights", "optimizer"])
    assert pulled.fetched_bytes <= 7400
    assert not [call for call in faulty.calls("get_file") if "00001-of-00002" in call.path]
    assert len(files_in(tmp_path / "here")) == 4
