"""Bad input through the command line: one line on stderr, the right exit code, nothing on stdout, nothing changed anywhere."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import DirectoryStore, Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


def tree(root: Path) -> dict[str, bytes | None]:
    """Every path below `root` with its bytes; None for a folder."""
    return {path.relative_to(root).as_posix(): None if path.is_dir() else path.read_bytes() for path in root.rglob("*")}


def refused(result: Result, code: int, *says: str) -> None:
    """Assert that a command failed as every command must: the exit code, and one line with what, why and what to do."""
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("ckptmgr: error: ")
    for text in says:
        assert text in lines[0]


def some_commands(url: str, directory: Path) -> list[list[str]]:
    """One that reads, one that would start from scratch, one that writes."""
    every = every_command(url, directory)
    return [every[0], every[4], every[5]]


def every_command(url: str, directory: Path) -> list[list[str]]:
    """One line of each command that takes a run."""
    return [
        ["ls", url],
        ["show", url],
        ["verify", url],
        ["resume", url],
        ["resume", url, "--or-start", "--", "touch", str(directory.parent / "STARTED")],
        ["push", str(directory), url],
        ["prune", url, "--keep-last", "1", "--yes"],
    ]


# --- the command line and URLs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["frobnicate"], "frobnicate"),
        (["ls"], "URL"),
        (["ls", "a", "b"], "b"),
        (["ls", "a", "--nope"], "--nope"),
        (["resume"], "RUN"),
        (["resume", "a", "latest", "more"], "more"),
        (["resume", "a", "--"], "no command"),
        (["resume", "a", "--json", "--", "true"], "--json"),
        (["push", "a"], "RUN"),
        (["push", "a", "b", "--step", "x"], "--step"),
        (["prune", "a", "--keep-last", "many"], "--keep-last"),
        (["verify", "a", "--quick", "--sample", "5%"], "exclude"),
        (["push", "", "b"], "must not be empty"),
        (["resume", "a", "--to", ""], "must not be empty"),
        (["resume", "a", "--to="], "the value of --to must not be empty"),
    ],
)
def test_wrong_usage(cli_here: Cli, words: list[str], says: str) -> None:
    """A command line that makes no sense is one line that names the word and where to read on."""
    refused(cli_here(*words), 2, says)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "needs a rule"),
        (["--keep-last", "0"], "at least 1"),
        (["--keep-every", "-5"], "at least 1"),
        (["--keep-best", "eval_loss:min:0"], "at least 1"),
        (["--keep-within", "7 days"], "--keep-within"),
        (["--keep-within", "0d"], "positive"),
        (["--keep-best", "accuracy"], "accuracy:max"),
        (["--keep-best", "misspelled:min"], "'misspelled'"),
    ],
)
def test_prune_rules_that_make_no_sense(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, options: list[str], says: str
) -> None:
    """Without a rule, or with one that can only be a mistake, prune plans and deletes nothing."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100, 200, options=["--metric", "accuracy=1", "--metric", "eval_loss=2"])
    before = store.snapshot()
    for yes in ([], ["--yes"]):
        refused(cli_here("prune", f"{store.url}/run", *options, *yes), 2, says, " - ")
    assert store.snapshot() == before


@pytest.mark.parametrize("share", ["200%", "0%", "-1", "nan", "ten"])
def test_sample_that_is_no_percentage(cli_here: Cli, share: str) -> None:
    """Of which files to read is not guessed."""
    refused(cli_here("verify", "run", "--sample", share), 2, "percentage", " - ")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("os3://bucket/run", "unknown scheme 'os3'"),
        ("s3:/bucket/run", "two slashes"),
        ("s3://", "no bucket"),
        ("s3://key:topsecret@bucket/run", "must not carry credentials"),
        ("s3://key:top/secret@bucket/run", "must not carry credentials"),
        ("oss://bucket/run?Signature=topsecret", "must not carry a query"),
        ("", "must not be empty"),
    ],
)
def test_url_that_cannot_be_meant(
    cli_here: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str, says: str
) -> None:
    """Every command refuses a wrong URL before it does anything, in one line that says how to write it and repeats no secret."""
    directory = make_checkpoint(100)
    before = tree(tmp_path)
    for words in every_command(url, directory):
        result = cli_here(*words)
        refused(result, 2, says)
        assert "secret" not in result.stderr
        assert len(result.stderr) < 300
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("hidden", "words", "says"),
    [
        ("boto3", ["ls", "s3://bucket/run"], "pip install 'ckptmgr[s3]'"),
        ("oss2", ["resume", "oss://bucket/run", "--or-start", "--", "true"], "pip install 'ckptmgr[oss]'"),
        ("torch", ["demo"], "pip install 'ckptmgr[torch]'"),
    ],
)
def test_missing_extra(hidden: str, words: list[str], says: str, tmp_path: Path) -> None:
    """A command that needs a package which is not installed says what to install."""
    code = f"import sys; sys.modules[{hidden!r}] = None\nfrom ckptmgr.cli.main import main\nmain({words!r})"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    refused(result, 2, says)


def test_traceback_only_with_verbose(cli_here: Cli, tmp_path: Path) -> None:
    """-v, wherever it stands, adds the traceback to the one line."""
    quiet = cli_here("ls", tmp_path / "nothing")
    refused(quiet, 3)
    for words in (["-v", "ls", tmp_path / "nothing"], ["ls", tmp_path / "nothing", "--verbose"]):
        loud = cli_here(*words)
        assert loud.returncode == 3
        assert "Traceback (most recent call last)" in loud.stderr
        assert loud.stderr.splitlines()[-1] == quiet.stderr.strip()


@pytest.mark.parametrize(
    "words",
    [
        ["resume", "{run}", "--to", "s3://bucket/dir"],
        ["resume", "{run}", "--local-dir", "oss://bucket/dir"],
        ["push", "s3://bucket/checkpoint-100", "{run}"],
        ["drain", "s3://bucket/dir"],
    ],
)
def test_url_where_a_directory_is_meant(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, words: list[str]
) -> None:
    """Refused; as a path it would quietly make a folder called `s3:`."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    before = tree(tmp_path)
    refused(cli_here(*(word.format(run=f"{store.url}/run") for word in words)), 2, "://bucket/", "give a path")
    assert tree(tmp_path) == before


def test_file_url_where_a_directory_is_meant(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path
) -> None:
    """A file URL is its path."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", "--to", f"file://{tmp_path}/here").stdout == f"{tmp_path}/here\n"


# --- what is (not) there ------------------------------------------------------------------------------------------------


def test_empty_store(store: Store, cli_here: Cli, tmp_path: Path) -> None:
    """A store without a run is "nothing there" (3) for every command that only reads, and stays empty."""
    for words in (["ls"], ["show"], ["verify"], ["resume"], ["prune", "--keep-last", "1", "--yes"]):
        refused(cli_here(words[0], f"{store.url}/run", *words[1:]), 3, f"{store.url}/run", " - ")
    refused(cli_here("ls", store.url), 3, store.url, " - ")
    assert store.keys() == []
    assert tree(tmp_path) == {}


def test_run_name_that_is_a_file(store: Store, cli_here: Cli, make_checkpoint: MakeCheckpoint) -> None:
    """Where a file (or an object) is, no run can be: refused (2), and the file stays as it was."""
    store.put("run", b"not a run")
    for words in every_command(f"{store.url}/run", make_checkpoint(100)):
        if store.name == "local" and words[0] == "verify":
            # A local file may be the one file of a restored checkpoint, whose manifest lies beside it; here none does.
            refused(cli_here(*words), 3, "ckptmgr.json", " - ")
        else:
            refused(cli_here(*words), 2, f"{store.url}/run is a file", " - ")
    assert store.snapshot() == {"run": b"not a run"}


@pytest.mark.parametrize("selector", ["500", "tag:none", "id:000001-000000000100-000001-00000000", "best:eval_loss"])
def test_selector_that_matches_nothing(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, selector: str
) -> None:
    """A selector without a checkpoint is "not found" (3), with what there is."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100, 200)
    before, here = store.snapshot(), set(tmp_path.iterdir())
    for command in ("show", "resume", "verify"):
        refused(cli_here(command, f"{store.url}/run", selector), 3, selector, "100, 200", "ckptmgr ls")
    refused(cli_here("resume", f"{store.url}/run", selector, "--or-start", "--", "touch", tmp_path / "STARTED"), 3)
    assert store.snapshot() == before
    assert set(tmp_path.iterdir()) == here


@pytest.mark.parametrize("selector", ["", "newest", "-1", "1.5", "best:", "tag:", "tag:../x", "id:500", "id:", "best"])
def test_malformed_selector(cli_here: Cli, selector: str) -> None:
    """A selector that is none is refused (2) before the store is asked for anything, with the forms."""
    for command in ("show", "resume", "verify"):
        # For resume, what stands after -- is a COMMAND.
        words = ["s3://bucket/run", selector] if command == "resume" else ["s3://bucket/run", "--", selector]
        refused(cli_here(command, *words), 2)


def test_metric_without_a_direction(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli) -> None:
    """Whether less or more is better is not guessed: exit 2, with both ways to say it."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100, options=["--metric", "accuracy=0.5"])
    refused(cli_here("show", f"{store.url}/run", "best:accuracy"), 2, "accuracy:min", "accuracy:max")


@pytest.mark.parametrize(
    ("make", "options", "says"),
    [
        ("nothing", [], "does not exist"),
        ("file", [], "is a file"),
        ("empty", [], "holds no file"),
        ("no step", [], "--step"),
        ("link", [], "link to a folder"),
        ("good", ["--step", "-1"], "negative"),
        ("good", ["--metric", "x"], "NAME=NUMBER"),
        ("good", ["--metric", "=1"], "NAME=NUMBER"),
        ("good", ["--metric", "loss=low"], "NAME=NUMBER"),
        ("good", ["--tag", "a/b"], "tag"),
        ("control", [], "name"),
    ],
)
def test_push_of_what_cannot_be_pushed(
    make_store: MakeStore, cli_here: Cli, tmp_path: Path, make: str, options: list[str], says: str
) -> None:
    """Refused before the run is created or a byte is sent."""
    store = make_store("local")
    directory = tmp_path / ("final" if make == "no step" else "checkpoint-100")
    if make == "file":
        directory.write_bytes(b"x")
    elif make != "nothing":
        directory.mkdir()
        (directory / ("new\nline" if make == "control" else "model.bin")).write_bytes(b"x")
    if make == "empty":
        (directory / "model.bin").unlink()
        (directory / "folder").mkdir()
    if make == "link":
        (directory / "folder").symlink_to(tmp_path)
    result = cli_here("push", directory, f"{store.url}/run", *options)
    refused(result, 2, says, " - ")
    assert store.keys() == []


# --- damaged manifests --------------------------------------------------------------------------------------------------


def not_json(_: bytes) -> bytes:
    return b"<html>captive portal</html>"


def truncated(manifest: bytes) -> bytes:
    return manifest[: len(manifest) // 2]


def emptied(_: bytes) -> bytes:
    return b""


def edited(manifest: bytes) -> bytes:
    return manifest.replace(b'"size": 1', b'"size": 2', 1)


def of_the_future(manifest: bytes) -> bytes:
    return json.dumps({**json.loads(manifest), "version": 2}).encode()


DAMAGES = [
    pytest.param(not_json, "not JSON", id="not-json"),
    pytest.param(truncated, "not JSON", id="truncated"),
    pytest.param(emptied, "not JSON", id="empty"),
    pytest.param(edited, "own digest", id="edited"),
    pytest.param(of_the_future, "upgrade ckptmgr", id="future"),
]
Damage = Callable[[bytes], bytes]


def spoil(store: Store, checkpoint: str, damage: Damage) -> None:
    key = f"run/manifests/{checkpoint}.json"
    intact = store.get(key)
    store.put(key, damage(intact))
    assert store.get(key) != intact


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_unreadable_manifest_is_shown_and_named(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, damage: Damage, says: str
) -> None:
    """ls shows it as damaged with the reason; show, resume and verify of it say 5; nothing is changed by looking."""
    store = make_store("local")
    url = f"{store.url}/run"
    _, newest = push_steps(url, 100, 200)
    spoil(store, newest, damage)
    before = store.snapshot()

    listed = cli_here("ls", url)
    assert listed.returncode == 0
    assert any("damaged" in line and newest in line for line in listed.stdout.splitlines())
    assert newest in listed.stderr
    assert says in listed.stderr
    rows = json.loads(cli_here("ls", url, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [(100, "committed"), (200, "damaged")]

    for selector in ("200", f"id:{newest}"):
        refused(cli_here("show", url, selector), 5, newest, says)
        refused(cli_here("resume", url, selector), 5, newest, says)
    refused(cli_here("show", url), 5, newest, says)
    refused(cli_here("resume", url, "--strict"), 5, newest, says)

    verified = cli_here("verify", url, "--json")
    assert verified.returncode == 5
    document = json.loads(verified.stdout)
    assert document["checked"] == 2
    assert [(item["id"], item["file"]) for item in document["damaged"]] == [(newest, f"manifests/{newest}.json")]
    assert says in document["damaged"][0]["why"]
    assert cli_here("verify", url, "200").returncode == 5
    assert cli_here("verify", url, "100").returncode == 0
    assert store.snapshot() == before


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_resume_latest_passes_over_an_unreadable_manifest(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, damage: Damage, says: str
) -> None:
    """The next older one is taken, and the damaged one is named with the reason, on stderr and in the document."""
    store = make_store("local")
    url = f"{store.url}/run"
    _, newest = push_steps(url, 100, 200)
    spoil(store, newest, damage)
    resumed = cli_here("resume", url, "--json")
    assert resumed.returncode == 0, resumed.stderr
    document = json.loads(resumed.stdout)
    assert (document["step"], document["path"]) == (100, str(tmp_path / "run" / "checkpoint-100"))
    assert [(item["id"], item["step"]) for item in document["skipped"]] == [(newest, 200)]
    assert says in document["skipped"][0]["why"]
    assert newest in resumed.stderr
    assert says in resumed.stderr
    assert sorted(tree(tmp_path / "run")) == [
        "checkpoint-100",
        "checkpoint-100.ckptmgr.json",
        "checkpoint-100/model.bin",
        "checkpoint-100/sub",
        "checkpoint-100/sub/opt.bin",
    ]


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_prune_deletes_nothing_behind_an_unreadable_newest(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, damage: Damage, says: str
) -> None:
    """If the newest one turns out to be gone, the older ones are all there is (I8): exit 5, nothing deleted."""
    store = make_store("local")
    *_, newest = push_steps(f"{store.url}/run", 100, 200, 300)
    spoil(store, newest, damage)
    before = store.snapshot()
    refused(cli_here("prune", f"{store.url}/run", "--keep-last", "1", "--yes"), 5, newest, says)
    assert store.snapshot() == before
    planned = cli_here("prune", f"{store.url}/run", "--keep-last", "1")
    assert planned.returncode == 0
    assert newest in planned.stderr
    assert store.snapshot() == before


@pytest.mark.parametrize(("damage", "says"), DAMAGES)
def test_prune_never_deletes_an_unreadable_one(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, damage: Damage, says: str
) -> None:
    """An older unreadable manifest and its data stay; the rest is pruned as planned."""
    store = make_store("local")
    oldest, middle, newest = push_steps(f"{store.url}/run", 100, 200, 300)
    spoil(store, oldest, damage)
    kept = {key: data for key, data in store.snapshot().items() if oldest in key or newest in key}
    pruned = cli_here("prune", f"{store.url}/run", "--keep-last", "1", "--yes", "--json")
    assert pruned.returncode == 0, pruned.stderr
    assert [item["id"] for item in json.loads(pruned.stdout)["delete"]] == [middle]
    after = store.snapshot()
    assert {key: after[key] for key in kept} == kept
    assert not any(f"checkpoints/{middle}" in key for key in after)


@pytest.mark.parametrize(("damage", "says"), [DAMAGES[0], DAMAGES[-1]])
def test_unreadable_run_json(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, damage: Damage, says: str
) -> None:
    """A run whose own record cannot be read is damaged (5) for every command, and null in the list of a store."""
    store = make_store("local")
    push_steps(f"{store.url}/other", 100)
    push_steps(f"{store.url}/run", 100)
    store.put("run/run.json", damage(store.get("run/run.json")))
    before = store.snapshot()
    for words in every_command(f"{store.url}/run", tmp_path / "trained" / "checkpoint-100"):
        refused(cli_here(*words), 5, f"{store.url}/run/run.json", says)
    listed = cli_here("ls", store.url, "--json")
    assert listed.returncode == 0
    assert says in listed.stderr
    rows = json.loads(listed.stdout)["runs"]
    assert [(row["run"], row["checkpoints"], row["latest_step"]) for row in rows] == [
        ("other", 1, 100),
        ("run", None, None),
    ]
    assert store.snapshot() == before
    assert not (tmp_path / "trained" / "STARTED").exists()


# --- stores that refuse or fail -----------------------------------------------------------------------------------------


def as_whom(store: Store, key: str = "", secret: str = "") -> Mapping[str, str]:
    """The variables that hold a key and a secret for this kind of store."""
    names = (
        ("OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET")
        if store.name == "oss"
        else ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    )
    identity = store.server.identities[0]
    return dict(zip(names, (key or identity.access_key, secret or identity.secret_key), strict=True))


@pytest.mark.parametrize("kind", ["s3", "oss"])
@pytest.mark.parametrize("wrong", ["secret", "key", "none"])
def test_wrong_credentials(
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    wrong: str,
) -> None:
    """Refused by the store (4), in one line that names the variables to check and not their values."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    values = as_whom(store, **({} if wrong == "none" else {wrong: "not-the-right-one"}))
    for name, value in values.items():
        monkeypatch.delenv(name) if wrong == "none" else monkeypatch.setenv(name, value)
    before, here = store.snapshot(), tree(tmp_path)
    for words in some_commands(f"{store.url}/run", make_checkpoint(100)):
        result = cli_here(*words)
        refused(result, 4, *values)
        assert "not-the-right-one" not in result.stderr
        assert store.server.identities[0].secret_key not in result.stderr
    assert store.snapshot() == before
    assert tree(tmp_path) == here


@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_no_such_bucket(
    make_store: MakeStore, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path, kind: str
) -> None:
    """A bucket that does not exist is not an empty one: 4, and no bucket is created."""
    store = make_store(kind)
    url = store.url.replace("bkt-", "nobkt-")
    for words in some_commands(f"{url}/run", make_checkpoint(100)):
        refused(cli_here(*words), 4, url, "NoSuchBucket", "create the bucket or correct the URL")
    assert not (tmp_path / "trained" / "STARTED").exists()


@pytest.mark.parametrize("kind", ["s3", "oss"])
def test_no_permission_to_list(
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """Who may not list cannot know that there is nothing (I7): 4 and "no permission to list" for a run, for none, and for the store."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    before = store.snapshot()
    for name, value in store.server.env_of("no-list").items():
        monkeypatch.setenv(name, value)
    directory = make_checkpoint(100)
    for words in [
        ["ls", store.url],
        *every_command(f"{store.url}/run", directory),
        *some_commands(f"{store.url}/no", directory),
    ]:
        result = cli_here(*words)
        refused(result, 4, "no permission to list", store.url)
        assert "empty" not in result.stderr
    assert store.snapshot() == before
    assert not (directory.parent / "STARTED").exists()


@pytest.fixture
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retries without the waits in between."""
    monkeypatch.setattr("ckptmgr.backends.retry._JITTER", SimpleNamespace(uniform=lambda low, high: 0.0))


@pytest.mark.usefixtures("_no_waiting")
@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_store_that_fails_for_ever(
    make_store: MakeStore,
    push_steps: PushSteps,
    make_checkpoint: MakeCheckpoint,
    cli_here: Cli,
    kind: str,
) -> None:
    """A store that answers 5xx to everything, or to listings only, is unavailable (4), never empty (I7), and COMMAND is not started."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    before, directory = store.snapshot(), make_checkpoint(100)
    faults = store.server.faults
    listings = Fault(status=500, times=None, key="", method="GET")
    for fault, commands in ((Fault(status=503, times=None), every_command), (listings, some_commands)):
        with faults.injected(fault):
            for words in [["ls", store.url], *commands(f"{store.url}/run", directory)]:
                result = cli_here(*words)
                refused(result, 4, store.url.split("/")[2], "gave up after")
                assert "empty" not in result.stderr
    assert store.snapshot() == before
    assert not (directory.parent / "STARTED").exists()


@pytest.mark.parametrize("kind", ["moto", "oss"])
def test_store_that_is_down(
    make_store: MakeStore,
    push_steps: PushSteps,
    cli_here: Cli,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    kind: str,
) -> None:
    """Nobody listens at the endpoint: 4 within seconds, with the endpoint in the line, and COMMAND is not started."""
    store = make_store(kind)
    push_steps(f"{store.url}/run", 100)
    monkeypatch.setenv("OSS_ENDPOINT" if kind == "oss" else "AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    refused(
        cli_here("resume", f"{store.url}/run", "--or-start", "--", "touch", tmp_path / "STARTED"),
        4,
        "http://127.0.0.1:9",
    )
    assert time.monotonic() - started < 20
    assert not (tmp_path / "STARTED").exists()


@pytest.mark.usefixtures("_no_waiting")
def test_a_run_that_may_not_be_read_is_not_hidden_in_a_list(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli
) -> None:
    """`ls STORE` shows the runs it can read, null for the one that is refused, and ends with 4."""
    store = make_store("moto")
    push_steps(f"{store.url}/a", 100)
    push_steps(f"{store.url}/b", 200)
    with store.server.faults.injected(Fault(status=403, code="AccessDenied", times=None, key="*/b/*")):
        listed = cli_here("ls", store.url, "--json")
    assert listed.returncode == 4
    rows = json.loads(listed.stdout)["runs"]
    assert [(row["run"], row["checkpoints"], row["latest_step"]) for row in rows] == [("a", 1, 100), ("b", None, None)]
    assert "AccessDenied" in listed.stderr


# --- disks --------------------------------------------------------------------------------------------------------------


def test_unwritable_target(make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path) -> None:
    """A target below a file cannot be made: a mistake (2), named before anything is fetched."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    (tmp_path / "file").write_bytes(b"x")
    refused(cli_here("resume", f"{store.url}/run", "--to", tmp_path / "file" / "x"), 2, "file", " - ")
    assert (tmp_path / "file").read_bytes() == b"x"


def test_fresh_start_over_an_existing_run(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path) -> None:
    """A script that starts from scratch over a run with commits is refused (7) before its first step; the run stays as it was (I12)."""
    from ckptmgr import CheckpointManager

    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    before = store.snapshot()
    manager = CheckpointManager(f"{store.url}/run", local_dir=tmp_path / "tier")
    with pytest.raises(CkptmgrError) as caught, manager:
        manager.begin()
    assert caught.value.exit_code == 7
    assert "step 100" in str(caught.value)
    assert caught.value.hint
    assert store.snapshot() == before
    assert isinstance(store, DirectoryStore)
