"""`ckptmgr resume … -- COMMAND`: what it is given, how it ends, and when it is not started."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.run.launch import fill_in
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


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Where the command writes down what it was given."""
    return tmp_path / "report.json"


def reporting(report: Path, *words: str, code: int = 0) -> list[str]:
    """A COMMAND that reports its `words` and ends with `code`."""
    return ["--", sys.executable, "-c", _REPORT, str(report), str(code), *words]


def refused(result: Result, code: int, *says: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("ckptmgr: error: ")
    for text in says:
        assert text in result.stderr.splitlines()[-1]


# --- what the command is given ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "with_path", "without"),
    [
        ("train --resume {}", "train --resume /p", "train"),
        ("train --resume={} --lr 1", "train --resume=/p --lr 1", "train --lr 1"),
        ("train {} --lr 1", "train /p --lr 1", "train --lr 1"),
        ("train -r {} data", "train -r /p data", "train data"),
        ("train data {}", "train data /p", "train data"),
        ("{} data", "/p data", "data"),
        ("train --a --b {}", "train --a --b /p", "train --a"),
        ("train resume={} --from {}", "train resume=/p --from /p", "train"),
        ("train", "train", "train"),
    ],
)
def test_placeholder(command: str, with_path: str, without: str) -> None:
    """{} becomes the path; without one it goes, and so does an option right before it, or the word it is a part of."""
    assert fill_in(command.split(), "/p") == with_path.split()
    assert fill_in(command.split(), None) == without.split()


def test_command_is_given_the_path(
    make_store: MakeStore, push_steps: PushSteps, cli: Cli, report: Path, tmp_path: Path
) -> None:
    """By {} and by CKPTMGR_RESUME_FROM; on stdout there is nothing but what the command itself prints."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    result = cli(
        "resume", f"{store.url}/run", "--to", tmp_path / "with space", *reporting(report, "--from", "{}", "x={}")
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "the command's own words\n"
    path = str(tmp_path / "with space")
    assert json.loads(report.read_text()) == {
        "words": ["--from", path, f"x={path}"],
        "environment": {"CKPTMGR_RESUME_FROM": path, "CKPTMGR_LOCAL_DIR": None},
    }


def test_command_is_told_the_local_dir(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, tmp_path: Path
) -> None:
    """--local-dir is passed on, as an absolute path: the command may run elsewhere."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", "--local-dir", "tier", *reporting(report)).returncode == 0
    assert json.loads(report.read_text())["environment"]["CKPTMGR_LOCAL_DIR"] == str(tmp_path / "tier")


def test_options_of_the_command_are_its_own(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path
) -> None:
    """What stands after the first -- is not ckptmgr's, not even -v, --json or a second --."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    result = cli_here("resume", f"{store.url}/run", *reporting(report, "-v", "--json", "--", "--or-start"))
    assert result.returncode == 0
    assert json.loads(report.read_text())["words"] == ["-v", "--json", "--", "--or-start"]


# --- starting from scratch ----------------------------------------------------------------------------------------------


def test_or_start_where_nothing_is(store: Store, cli_here: Cli, report: Path) -> None:
    """No run at all: the command starts with an empty variable and without {}; looking creates nothing."""
    result = cli_here("resume", f"{store.url}/run", "--or-start", *reporting(report, "--from", "{}", "--lr", "1"))
    assert result.returncode == 0, result.stderr
    document = json.loads(report.read_text())
    assert document["words"] == ["--lr", "1"]
    assert document["environment"]["CKPTMGR_RESUME_FROM"] == ""
    assert store.keys() == []


@pytest.mark.parametrize("selector", ["latest", "500", "best:eval_loss", "tag:best"])
def test_or_start_on_a_run_without_data(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, selector: str
) -> None:
    """A run that was created, and claimed, and never saved anything has no data: the command starts, whatever was selected."""
    store = make_store("local")
    (stem,) = push_steps(f"{store.url}/run", 100)
    for key in store.keys("run/"):
        if stem in key:
            store.delete(key)
    result = cli_here("resume", f"{store.url}/run", selector, "--or-start", *reporting(report))
    assert result.returncode == 0, result.stderr
    assert json.loads(report.read_text())["environment"]["CKPTMGR_RESUME_FROM"] == ""


def test_or_start_without_command(make_store: MakeStore, cli_here: Cli) -> None:
    """Without COMMAND: exit 0, path null, and no line on stdout that a script could take for a path."""
    store = make_store("local")
    plain = cli_here("resume", f"{store.url}/run", "--or-start")
    assert (plain.returncode, plain.stdout) == (0, "")
    assert f"{store.url}/run" in plain.stderr
    document = cli_here("resume", f"{store.url}/run", "--or-start", "--json")
    assert json.loads(document.stdout) == {"path": None, "id": None, "step": None, "source": None, "skipped": []}


def test_or_start_does_not_start_where_there_is_something_to_resume(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, report: Path, tmp_path: Path
) -> None:
    """It is "or": with a checkpoint the command gets its path."""
    store = make_store("local")
    push_steps(f"{store.url}/run", 100)
    assert cli_here("resume", f"{store.url}/run", "--or-start", *reporting(report, "{}")).returncode == 0
    assert json.loads(report.read_text())["words"] == [str(tmp_path / "run" / "checkpoint-100")]


@pytest.mark.parametrize(
    "what", ["uncommitted", "foreign checkpoint", "foreign file", "no run at all", "pruned", "other lineage"]
)
@pytest.mark.parametrize("kind", ["local", "oss"])
def test_or_start_is_refused_where_there_is_data(
    make_store: MakeStore, push_steps: PushSteps, cli_here: Cli, tmp_path: Path, kind: str, what: str
) -> None:
    """Data that cannot be resumed is not "no data": exit 3, the command is not started, nothing is changed."""
    store = make_store(kind)
    url = f"{store.url}/run"
    (stem,) = push_steps(url, 100)
    manifest = f"run/manifests/{stem}.json"
    data = {key: value for key, value in store.snapshot("run/").items() if "/checkpoints/" in key}
    if what == "uncommitted":
        store.delete(manifest)
    elif what == "pruned":
        closing = {
            "format": "ckptmgr",
            "version": 1,
            "id": stem,
            "closed": "pruned",
            "closed_at": "2026-01-01T00:00:00Z",
        }
        store.put(manifest, json.dumps(closing).encode())
        for key in data:
            store.delete(key)
    elif what == "other lineage":
        fresh = {"format": "ckptmgr", "version": 1, "attempt": 2, "how": "fresh"}
        store.put("run/attempts/000002.json", json.dumps(fresh).encode())
    else:
        for key in store.snapshot("run/"):
            if stem in key or what == "no run at all":
                store.delete(key)
        name = "checkpoint-500/model.bin" if what == "no run at all" else "checkpoints/checkpoint-500/model.bin"
        store.put(f"run/{'notes.txt' if what == 'foreign file' else name}", b"copied by hand")
    before = store.snapshot()
    for selector in ("latest", "500"):
        result = cli_here("resume", url, selector, "--or-start", "--", "touch", tmp_path / "STARTED")
        refused(result, 3, url)
    assert store.snapshot() == before
    assert not (tmp_path / "STARTED").exists()


def test_or_start_is_refused_when_the_store_cannot_be_asked(
    make_store: MakeStore, cli_here: Cli, tmp_path: Path
) -> None:
    """ "Could not look" is never "nothing there" (I7): each of the look-ups may fail, none lets the command start."""
    store = make_store("oss")
    for skip in range(20):
        fault = Fault(status=403, code="AccessDenied", times=1, skip=skip)
        with store.server.faults.injected(fault) as active:
            result = cli_here("resume", f"{store.url}/run", "--or-start", "--", "touch", tmp_path / "STARTED")
        if not active.hits:
            break
        refused(result, 4, store.url)
        assert not (tmp_path / "STARTED").exists()
    assert skip > 1
    assert result.returncode == 0
    assert (tmp_path / "STARTED").exists()


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
    assert process.wait(30) == 40
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
    assert process.wait(30) == 0
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
    assert json.loads(drained.stdout) == {"local_dir": str(tier), "pending": []}
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
