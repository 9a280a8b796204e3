"""Bad input through the command line: one line on stderr, the right exit code, nothing on stdout, nothing changed anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.testing.outcomes import paths_in, refused
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
Commands = Callable[[str, Path], list[list[str]]]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]


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
        (["push", "", "b"], "error: DIR must not be empty"),
        (["resume", "--to", "x", ""], "error: RUN must not be empty"),
        (["artifact", "push", "a", ""], "must not be empty"),
        (["resume", "a", "--to", ""], "the value of --to must not be empty"),
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
        ("dir://x", "dir:// is no place to keep runs in"),
        ("zip://x.zip", "zip:// is no place to keep runs in"),
        ("", "must not be empty"),
    ],
)
def test_url_that_cannot_be_meant(
    every_command: Commands, cli_here: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, url: str, says: str
) -> None:
    """Every command refuses a wrong URL before it does anything, in one line that says how to write it and repeats no secret."""
    directory = make_checkpoint(100)
    before = paths_in(tmp_path)
    for words in every_command(url, directory):
        result = cli_here(*words)
        refused(result, 2, says)
        assert "secret" not in result.stderr
        assert len(result.stderr) < 300
    assert paths_in(tmp_path) == before


@pytest.mark.parametrize("kind", ["local", "s3", "oss"])
def test_names_that_are_not_utf8(make_store: MakeStore, cli_here: Cli, tmp_path: Path, kind: str) -> None:
    """A disk keeps a file of any name; for an object store it is refused before anything is sent, and so is such a run."""
    store = make_store(kind)
    odd = tmp_path / "checkpoint-1" / os.fsdecode(b"bad\xff")
    odd.parent.mkdir()
    odd.write_bytes(b"1")
    for words in (["push", odd.parent, f"{store.url}/run"], ["artifact", "push", odd.parent, f"{store.url}/a"]):
        result = cli_here(*words)
        if kind == "local":
            assert result.returncode == 0, result.stderr
        else:
            refused(result, 2, "is not UTF-8", "rename it")
    if kind != "local":
        assert store.keys() == []
        refused(cli_here("ls", f"{store.url}/{odd.name}"), 2, "is not UTF-8")


@pytest.mark.parametrize(
    "words",
    [
        ["drain", "URL"],
        ["-v", "drain", "URL"],
        ["push", "URL", "run"],
        ["artifact", "push", "URL", "run/a"],
        ["pull", "run", "--to", "URL"],
        ["resume", "run", "--local-dir", "URL"],
        ["config", "check", "URL"],
        ["show", "run", "URL"],
    ],
)
@pytest.mark.parametrize(
    "url", ["s3://key:topsecret@bucket/run", "s3://k:a/topsecret@b", "oss://b/r?Signature=topsecret"]
)
def test_secret_where_a_path_belongs(cli_here: Cli, words: list[str], url: str) -> None:
    """A URL with credentials in the place of a directory, a selector or a file is refused, and never repeated as it is."""
    result = cli_here(*(word.replace("URL", url) for word in words))
    assert result.returncode in (2, 3)
    assert "topsecret" not in result.stdout + result.stderr


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
    before = paths_in(tmp_path)
    refused(cli_here(*(word.format(run=f"{store.url}/run") for word in words)), 2, "://bucket/", "give a path")
    assert paths_in(tmp_path) == before


def test_file_url_where_a_directory_is_meant(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path
) -> None:
    """A file URL is its path."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", "--to", f"file://{tmp_path}/here").stdout == f"{tmp_path}/here\n"


# --- what is (not) there ------------------------------------------------------------------------------------------


def test_empty_store(store: Store, cli_here: Cli, tmp_path: Path) -> None:
    """A store without a run is "nothing there" (3) for every command that only reads, and stays empty."""
    for words in (["ls"], ["show"], ["verify"], ["resume"], ["prune", "--keep-last", "1", "--yes"]):
        refused(cli_here(words[0], f"{store.url}/run", *words[1:]), 3, f"{store.url}/run", " - ")
    refused(cli_here("ls", store.url), 3, store.url, " - ")
    assert store.keys() == []
    assert paths_in(tmp_path) == {}


def test_run_name_that_is_a_file(
    every_command: Commands, store: Store, cli_here: Cli, make_checkpoint: MakeCheckpoint
) -> None:
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
    there_is = {"best": "none of its lineage has a metric", "tag": "it has no tags"}.get(
        selector.partition(":")[0], "100, 200"
    )
    for command in ("show", "resume", "verify"):
        refused(cli_here(command, f"{store.url}/run", selector), 3, selector, there_is, "ckptmgr ls")
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
