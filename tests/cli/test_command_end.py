"""`ckptmgr resume … -- COMMAND`: signals, exit codes, and the uploads that are left."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
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

# Writes down what it was given, as JSON, and ends as told.
_REPORT = """
import json, os, sys
out, code, *words = sys.argv[1:]
names = ("CKPTMGR_RESUME_FROM", "CKPTMGR_LOCAL_DIR")
document = {"words": words, "environment": {name: os.environ.get(name) for name in names}}
open(out, "w").write(json.dumps(document))
print("the command's own words")
sys.exit(int(code))
"""

# Ends with 41 if the streams with these numbers are open, and lead nowhere.
_LOOKS = """
import os, sys
nowhere = os.stat(os.devnull)
sys.exit(41 if all(os.path.samestat(os.fstat(int(number)), nowhere) for number in sys.argv[1]) else 1)
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Where the command writes down what it was given."""
    return tmp_path / "report.json"


def reporting(report: Path, *words: str, code: int = 0) -> list[str]:
    """A COMMAND that reports its `words` and ends with `code`."""
    return ["--", sys.executable, "-c", _REPORT, str(report), str(code), *words]


# --- how it ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1, 6, 75, 143])
def test_exit_code_passes_through(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, code: int
) -> None:
    """Whatever the command ends with is what the platform sees."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", *reporting(report, code=code)).returncode == code


def test_command_that_is_not_there(make_store: MakeStore, cli_here: Cli) -> None:
    """A command that cannot be started is a mistake (2) that names it."""
    store = make_store("local")
    result = cli_here("resume", f"{store.url}/run", "--or-start", "--", "no-such-command-here", "x")
    assert result.returncode == 2
    assert "no-such-command-here" in result.stderr.splitlines()[-1]


# Tells that it is there, waits for a signal, and says which one came.
_WAITING = """
import signal, sys
numbers = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1}
signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
print("ready", flush=True)
got = signal.sigwait(numbers)
print(signal.Signals(got).name, flush=True)
sys.exit(40)
"""


def _start(words: list[str], **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_reach_the_command(make_store: MakeStore, number: signal.Signals, tmp_path: Path) -> None:
    """What a platform sends to ckptmgr is for the training, which ends as it sees fit; its code passes through."""
    store = make_store("local")
    words = [sys.executable, "-m", "ckptmgr.cli.main", "resume", f"{store.url}/run", "--or-start"]
    process = _start([*words, "--", sys.executable, "-c", _WAITING], cwd=tmp_path, start_new_session=True)
    assert _line(process) == "ready"
    process.send_signal(number)
    assert _line(process) == number.name
    assert process.wait(60) == 40
    process.communicate()


def test_command_killed_by_a_signal(make_store: MakeStore, cli_here: Cli) -> None:
    """128 + n, as a shell has it."""
    store = make_store("local")
    words = ["resume", f"{store.url}/run", "--or-start", "--", "sh", "-c"]
    assert cli_here(*words, "kill -TERM $$").returncode == 143
    assert cli_here(*words, "kill -KILL $$").returncode == 137


def test_ignored_signals_stay_ignored(make_store: MakeStore, tmp_path: Path) -> None:
    """Under `nohup` neither ckptmgr nor the training dies of the hang-up that it was started to ignore."""
    store = make_store("local")
    words = [sys.executable, "-m", "ckptmgr.cli.main", "resume", f"{store.url}/run", "--or-start"]
    wait = "import sys\nprint('ready', flush=True)\nsys.stdin.read()\nsys.exit(41)"
    process = _start(
        ["nohup", *words, "--", sys.executable, "-c", wait],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert _line(process) == "ready"
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=30)
    assert process.returncode == 41


def test_terminal_interrupt_is_not_doubled(make_store: MakeStore, tmp_path: Path) -> None:
    """Ctrl-C at a terminal reaches the training once, from the terminal: a second one would cut its last save short."""
    store = make_store("local")
    count = """
import os, signal
reader, writer = os.pipe()
os.set_blocking(writer, False)
signal.set_wakeup_fd(writer)  # a byte for every signal, in the order in which they come
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: None)
print("ready", flush=True)
interrupts = 0
while os.read(reader, 1)[0] != signal.SIGTERM:
    interrupts += 1
    print("hit", flush=True)
print(f"{interrupts} in all", flush=True)
"""
    words = [sys.executable, "-m", "ckptmgr.cli.main", "resume", f"{store.url}/run", "--or-start"]
    ours, theirs = pty.openpty()

    def take_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = _start(
        [*words, "--", sys.executable, "-c", count],
        cwd=tmp_path,
        stdin=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    assert _line(process) == "ready"
    os.write(ours, b"\x03")
    # The terminal sends the signal in its own time; a forwarded one would come before the TERM, which is forwarded after it.
    assert _line(process) == "hit"
    process.send_signal(signal.SIGTERM)
    assert _line(process) == "1 in all"
    assert process.wait(60) == 0
    process.communicate()
    os.close(ours)


# --- the local tier -----------------------------------------------------------------------------------------------------


def make_tier(store: Store, tier: Path) -> None:
    """Give the machine a local tier with everything that the store's run has."""
    for key, data in store.snapshot("run/").items():
        path = tier / key.removeprefix("run/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def pending(make_store: MakeStore, push_steps: PushSteps, tmp_path: Path) -> tuple[Store, Path, str]:
    """A run with step 100 on OSS, and a local tier with 100 and 200, of which 200 is not uploaded."""
    store = make_store("oss")
    _, newest = push_steps(f"{store.url}/run", 100, 200)
    make_tier(store, tmp_path / "tier")
    for key in store.keys("run/"):
        if newest in key:
            store.delete(key)
    return store, tmp_path / "tier", newest


def test_tier_is_drained_after_the_command(
    pending: tuple[Store, Path, str], cli_here: Cli, report: Path, tmp_path: Path
) -> None:
    """What the training left on this disk is committed in the store before ckptmgr ends."""
    store, tier, newest = pending
    result = cli_here("resume", f"{store.url}/run/", "--local-dir", tier, *reporting(report, "{}"))
    assert result.returncode == 0, result.stderr
    assert f"run/manifests/{newest}.json" in store.snapshot()
    assert (
        store.get(f"run/checkpoints/{newest}/model.bin") == (tmp_path / "trained/checkpoint-200/model.bin").read_bytes()
    )
    assert f"committed step 200 ({newest})" in result.stderr
    assert json.loads(report.read_text())["words"] == [str(tmp_path / "run" / "checkpoint-200")]


@pytest.mark.parametrize(("code", "expected"), [(0, 6), (3, 3)])
def test_uploads_that_stay_pending(
    pending: tuple[Store, Path, str], cli_here: Cli, report: Path, code: int, expected: int
) -> None:
    """A training that ended well, but whose saves are only on this disk, ends with 6; its own failure says more than that."""
    store, tier, newest = pending
    # The run is there, and can be read; writing is refused.
    with store.server.faults.injected(Fault(method="PUT", status=403, code="AccessDenied", times=None)):
        result = cli_here("resume", f"{store.url}/run", "--local-dir", tier, *reporting(report, code=code))
    assert result.returncode == expected, result.stderr
    assert newest in result.stderr
    assert f"run/manifests/{newest}.json" not in store.snapshot()
    assert (tier / "manifests" / f"{newest}.json").exists()
    drained = cli_here("drain", tier, "--json")
    assert drained.returncode == 0, drained.stderr
    assert json.loads(drained.stdout) == {"local_dir": str(tier), "pending": [], "dropped": []}
    assert f"run/manifests/{newest}.json" in store.snapshot()


def test_tier_that_the_command_makes_is_drained(
    make_store: MakeStore, push_steps: PushSteps, make_checkpoint: MakeCheckpoint, cli_here: Cli, tmp_path: Path
) -> None:
    """The first start: no tier before the command, one after it."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100, 200)
    make_tier(store, tmp_path / "made")
    for key in store.keys("run/"):
        if "-000000000200-" in key or "-000000000100-" in key:
            store.delete(key)
    result = cli_here(
        "resume",
        f"{store.url}/run",
        "--local-dir",
        tmp_path / "tier",
        "--or-start",
        "--",
        "mv",
        tmp_path / "made",
        tmp_path / "tier",
    )
    assert result.returncode == 0, result.stderr
    assert len(store.keys("run/manifests/")) == 2


def test_nothing_pending_asks_nobody(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, tmp_path: Path
) -> None:
    """A tier whose saves are all confirmed is not a reason to ask the store once more after the command."""
    store = make_store("oss")
    push_steps(f"{store.url}/run", 100)
    make_tier(store, tmp_path / "tier")
    assert cli_here("drain", tmp_path / "tier").returncode in (0, 6)
    result = cli_here("resume", f"{store.url}/run", "--local-dir", tmp_path / "tier", "--", "true")
    assert result.returncode == 0, result.stderr
    store.server.log.clear()
    assert cli_here("resume", f"{store.url}/run", "--local-dir", tmp_path / "tier", *reporting(report)).returncode == 0
    plain = len(store.server.log)
    store.server.log.clear()
    assert cli_here("resume", f"{store.url}/run", "--local-dir", tmp_path / "tier").returncode == 0
    assert len(store.server.log) == plain


@pytest.mark.parametrize("garbled", [b"xx", b""])
def test_a_tier_whose_own_record_is_garbled(
    store: Store, push_steps: Callable[..., list[str]], cli_here: Cli, tmp_path: Path, report: Path, garbled: bytes
) -> None:
    """The store is whole: it is named, with the way out, and the store's checkpoint is resumed."""
    push_steps(f"{store.url}/run", 100)
    tier = tmp_path / "tier"
    tier.mkdir()
    (tier / "run.json").write_bytes(garbled)
    result = cli_here("resume", f"{store.url}/run", "--local-dir", tier)
    assert result.returncode == 0, result.stderr
    assert f"{tier}/run.json is not JSON" in result.stderr
    assert "move that run.json away" in result.stderr
    assert cli_here("resume", f"{store.url}/run", "--local-dir", tier, *reporting(report, "{}")).returncode == 0
    drained = cli_here("drain", tier)
    assert drained.returncode == 5
    assert "move that run.json away" in drained.stderr


@pytest.mark.parametrize(("closed", "numbers"), [("<&-", "0"), (">&-", "1"), ("<&- >&- 2>&-", "012")])
def test_closed_streams(make_store: MakeStore, tmp_path: Path, closed: str, numbers: str) -> None:
    """As cron and daemons start it. A store's socket or file never takes the number of a stream, which COMMAND would read or write."""
    store = make_store("moto")
    words = [
        "-m",
        "ckptmgr.cli.main",
        "resume",
        f"{store.url}/run",
        "--or-start",
        "--",
        sys.executable,
        "-c",
        _LOOKS,
        numbers,
    ]
    command = f"{shlex.join([sys.executable, *words])} {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert done.returncode == 41, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_an_encoding_without_the_characters(
    make_store: MakeStore, push_steps: PushSteps, tmp_path: Path, encoding: str
) -> None:
    """A name goes out as the bytes that it has on disk where the encoding lacks it, and the lines of a table are no error."""
    url = f"{make_store('local').url}/r\N{GREEK SMALL LETTER MU}n"
    push_steps(url, 100)
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    for words in (["ls", url], ["resume", url]):
        call = [sys.executable, "-m", "ckptmgr.cli.main", *words]
        done = subprocess.run(call, capture_output=True, env=environ, cwd=tmp_path, timeout=60, check=False)
        assert (done.returncode, b"unexpected" in done.stderr) == (0, False), done.stderr
    assert Path(os.fsdecode(done.stdout.strip())).is_dir()
