"""What every command has: help with its options and exit codes, one document with --json, no noise, a quick start."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeStore = Callable[[str], Store]
PushSteps = Callable[..., list[str]]
MakeCheckpoint = Callable[..., Path]

# The interface that people script against (design notes, section 9).
OPTIONS = {
    "demo": ["--store", "--json"],
    "ls": ["--all", "--check", "--json"],
    "show": ["--json"],
    "verify": ["--quick", "--sample", "--json"],
    "resume": ["--to", "--local-dir", "--or-start", "--strict", "--replace", "--refuse-drift", "--json"],
    "push": ["--step", "--metric", "--tag", "--new-attempt", "--follow-links", "--json"],
    "pull": ["--to", "--only", "--replace", "--json"],
    "drain": ["--json"],
    "status": ["--json"],
    "prune": [
        *("--keep-last", "--keep-best", "--keep-worst", "--keep-every", "--keep-within"),
        *("--all-lineages", "--yes", "--json"),
    ],
    "gc": ["--grace", "--yes", "--json"],
    "doctor": ["--size", "--grace", "--json"],
}


def document(text: str) -> object:
    """The one strict JSON document that `text` is."""

    def refuse(constant: str) -> object:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("command", OPTIONS)
def test_help_of_a_command(cli_here: Cli, command: str) -> None:
    """Every option with a text, the exit codes, within 80 columns but for examples that must stay in one piece."""
    told = cli_here(command, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    found = re.findall(r"^  (--[a-z-]+)(?: \S+)*  +\S|^  (--[a-z-]+)(?: \S+)*$", told.stdout, re.MULTILINE)
    assert sorted({option for pair in found for option in pair if option}) == sorted(OPTIONS[command])
    assert re.search("^  .*Exit codes:", told.stdout, re.MULTILINE)
    assert max(len(line) for line in told.stdout.splitlines() if not line.startswith("    ckptmgr")) <= 80
    assert cli_here(command, "-h").stdout == told.stdout


def test_help_of_all(cli_here: Cli) -> None:
    """Every command with a line of its own, and every exit code."""
    told = cli_here("--help")
    assert told.returncode == 0
    listed = dict(re.findall(r"^  ([a-z]+) +(\S.*)$", told.stdout.split("Commands:")[1].split("\n\n")[0], re.MULTILINE))
    assert listed.keys() == {*OPTIONS, "artifact", "config"}  # families of their own, with their own tests
    assert not any(text.endswith("...") for text in listed.values())
    for code in ("0 ", "1 ", "2 ", "3 ", "4 ", "5 ", "6 ", "7 ", "75", "130", "143"):
        assert re.search(rf"\b{code}", told.stdout.split("Exit codes:")[1])


def test_resume_help_shows_the_command(cli_here: Cli) -> None:
    """What may stand after --, by usage and by example."""
    told = cli_here("resume", "--help").stdout
    assert "Usage: ckptmgr resume [OPTIONS] RUN [SELECTOR] [-- COMMAND …]" in told
    assert "-- python train.py --resume_from_checkpoint {}" in told
    assert "CKPTMGR_LOCAL_DIR" in told


def test_no_command(cli_here: Cli) -> None:
    """Nothing at all is a usage error that shows the help, on stderr."""
    told = cli_here()
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == cli_here("--help").stdout


def test_version(cli_here: Cli) -> None:
    """--version prints the version and nothing else."""
    from ckptmgr import __version__

    assert (cli_here("--version").stdout, cli_here("--version").returncode) == (f"ckptmgr {__version__}\n", 0)


def test_json_is_one_document_and_nothing_else(
    store: Store, cli_here: Cli, push_steps: PushSteps, make_checkpoint: MakeCheckpoint
) -> None:
    """Every command, -v included: stdout parses as a whole; logs and progress are on stderr."""
    url = f"{store.url}/run"
    push_steps(url, 100, 200, options=["--metric", "loss=-inf"])
    for words in (
        ["ls", store.url],
        ["ls", url, "--all", "--check"],
        ["show", url],
        ["verify", url],
        ["verify", url, "--quick"],
        ["resume", url],
        ["pull", url, "--to", "copy"],
        ["push", str(make_checkpoint(300)), url],
        ["prune", url, "--keep-last", "1"],
        ["prune", url, "--keep-last", "1", "--yes"],
        ["gc", url],
        ["gc", store.url, "--yes"],
    ):
        told = cli_here(*words, "--json", "-v")
        assert told.returncode == 0, told.stderr
        assert isinstance(document(told.stdout), dict)


def test_names_of_any_script_survive(
    make_store: MakeStore, cli: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A locale without UTF-8 and a path that is not UTF-8 break neither the document nor the printed path."""
    store = make_store("local")
    odd = tmp_path / os.fsdecode(b"checkpoint-\xff-7")
    odd.mkdir()
    (odd / "模型.bin").write_bytes(b"w")
    (odd / "b").write_bytes(b"b")
    plain = {"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    pushed = cli("push", odd, f"{store.url}/实验", "--json", env=plain)
    assert pushed.returncode == 0, pushed.stderr
    listed = cli("ls", store.url, "--json", env=plain)
    assert [run["run"] for run in json.loads(listed.stdout)["runs"]] == ["实验"]
    target = tmp_path / os.fsdecode(b"to-\xfe")
    words = [sys.executable, "-m", "ckptmgr.cli.main", "resume", f"{store.url}/实验", "--to", str(target)]
    printed = subprocess.run(words, capture_output=True, cwd=tmp_path, check=True, timeout=60).stdout
    assert printed == os.fsencode(target) + b"\n"
    assert (target / "模型.bin").read_bytes() == b"w"


def on_a_terminal(words: list[str], cwd: Path, columns: int = 100) -> tuple[str, str]:
    """What a command writes on stdout and stderr when both are terminals."""
    texts = []
    pairs = [pty.openpty(), pty.openpty()]
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "ckptmgr.cli.main", *words],
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=pairs[0][1],
        stderr=pairs[1][1],
    )

    def read(ours: int) -> bytes:
        blocks = []
        try:
            while block := os.read(ours, 65536):
                blocks.append(block)
        except OSError:  # the other end was closed by the last process that had it
            pass
        os.close(ours)
        return b"".join(blocks)

    results: dict[int, bytes] = {}
    threads = [threading.Thread(target=lambda ours=ours: results.__setitem__(ours, read(ours))) for ours, _ in pairs]
    for _, theirs in pairs:
        os.close(theirs)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert process.wait(60) == 0
    for ours, _ in pairs:
        texts.append(results[ours].decode().replace("\r\n", "\n"))
    return texts[0], texts[1]


def test_progress_is_for_terminals_only(make_store: MakeStore, push_steps: PushSteps, cli: Cli, tmp_path: Path) -> None:
    """A bar on stderr where that is a terminal; elsewhere no control character at all. stdout is the path in both."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    out, err = on_a_terminal(["resume", f"{store.url}/run", "--to", "a"], tmp_path)
    assert out == f"{tmp_path / 'a'}\n"
    assert "\x1b[" in err
    assert "step 100" in err
    piped = cli("resume", f"{store.url}/run", "--to", "b")
    assert piped.stdout == f"{tmp_path / 'b'}\n"
    assert "\x1b" not in piped.stderr
    assert "\r" not in piped.stderr


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_ls_on_a_terminal(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path, columns: int) -> None:
    """One line per checkpoint at any usual width, with id, step, size and state in full, and the first metric."""
    store = make_store("local")
    options = [f"--metric={name}=0.123456" for name in ("eval_loss", "eval_rouge_l_sum", "eval_bleu", "grad_norm")]
    ids = push_steps(f"{store.url}/run", 100, 100000, options=options)
    out, _ = on_a_terminal(["ls", f"{store.url}/run"], tmp_path, columns)
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in out.splitlines()][1:]
    assert len(lines) == 4
    assert max(map(len, lines)) <= columns
    assert [line.split()[-1] for line in lines[2:]] == ids
    assert [line.split()[0] for line in lines[2:]] == ["100", "100000"]
    assert all("committed" in line and "0.1235" in line for line in lines[2:])
    assert "eval_loss" in lines[0]


@pytest.mark.parametrize("at", ["*/run.json", "*/manifests/*"])
def test_interrupted(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path, at: str) -> None:
    """Ctrl-C ends a command with 130 and one line, at once, whatever a store does not answer."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100, 200, 300)
    with store.server.faults.injected(Fault(hold="before", times=None, key=at)) as held:
        words = [sys.executable, "-m", "ckptmgr.cli.main", "ls", f"{store.url}/run"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
        assert held.reached.wait(60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (130, "", "ckptmgr: error: interrupted\n")


def test_reader_that_has_seen_enough(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path) -> None:
    """`ckptmgr ls … | true`: no error, no traceback."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "ckptmgr.cli.main", "ls", f"{store.url}/run"]
    done = subprocess.run(
        words, stdout=writer, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path, timeout=60
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no such device")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_stdout_that_is_full(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path, options: list[str]) -> None:
    """`ckptmgr ls … > /dev/full`: one line that names stdout, and no second one at the end of the interpreter."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    words = [sys.executable, "-m", "ckptmgr.cli.main", "ls", f"{store.url}/run", *options]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, check=False, cwd=tmp_path, timeout=60
        )
    assert (done.returncode, done.stderr) == (
        4,
        "ckptmgr: error: cannot write to stdout: No space left on device\n",
    )


# --- start-up -----------------------------------------------------------------------------------------------------------

_NOT_NEEDED = (
    "torch",
    "boto3",
    "botocore",
    "oss2",
    "numpy",
    "rich.table",
    "rich.console",
    "tenacity",
    "pydantic",
    "awscrt",
)


@pytest.mark.parametrize(
    ("words", "also"),
    [
        (["--help"], ("fsspec", "msgspec", "logging")),
        (["ls", "--help"], ("fsspec", "msgspec")),
        (["ls"], ("ckptmgr.core.protocol",)),
        (["prune", "--keep-last", "1"], ()),
        (["gc"], ()),
        (["show"], ("ckptmgr.core.protocol",)),
    ],
)
def test_what_is_not_loaded(
    make_store: MakeStore, push_steps: PushSteps, words: list[str], also: tuple[str, ...]
) -> None:
    """Each of these costs more than the command itself."""
    url = f"{make_store('local').url}/run"
    push_steps(url, 100)
    command = words if "--help" in words else [words[0], url, *words[1:]]
    code = f"import sys\nfrom ckptmgr.cli.main import run\nrun({command!r})\nprint(*sys.modules, sep=chr(10), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert loaded & {*_NOT_NEEDED, *also} == set()
