"""Helpers of the fault tests: a process that can be killed at any operation, and saves in a local tier without torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce
from ckptmgr.run.tier import LocalTier

Ask = Callable[..., Any]

DEADLINE_S = 60.0
# The marks of `traced.py`.
BEGIN, END = "/ckptmgr-trace-begin", "/ckptmgr-trace-end"
CHANGES = {"openat", "write", "pwrite64", "fsync", "fdatasync", "mkdir", "link", "linkat", "rename", "renameat2"}


class Kill(Protocol):
    """Does a job of `killer.py` in a process of its own; True if it was killed. Any other end but success fails the test."""

    def __call__(self, do: str, **job: Any) -> bool:
        """See `killer.py` for the jobs."""


@pytest.fixture(scope="session")
def _killer() -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("killer.py"))
    process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    yield process
    process.stdin.close()
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def kill(_killer: subprocess.Popen[str]) -> Kill:
    """See `Kill`. The environment of the test, with its store, is that of the job."""

    def run(do: str, **job: Any) -> bool:
        assert _killer.stdin is not None
        assert _killer.stdout is not None
        environment = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "OSS_", "CKPT"))}
        print(json.dumps({"do": do, **job, "env": environment | job.get("env", {})}), file=_killer.stdin, flush=True)
        reply = json.loads(_killer.stdout.readline())
        assert reply in ({"signal": 9}, {"code": 0}), reply
        return "signal" in reply

    return run


@pytest.fixture
def ask(cli_here: Callable[..., subprocess.CompletedProcess[str]]) -> Ask:
    """Runs a command line that must succeed, and returns its JSON document."""

    def run(*arguments: object) -> Any:
        done = cli_here(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files move one after the other, here and in processes that are started, so that a fault hits one of them. For `usefixtures`: before a store is opened."""
    monkeypatch.setenv("CKPTMGR_CONCURRENCY", "1")


@pytest.fixture
def new_tier(tmp_path: Path) -> Callable[[RunDirectory], LocalTier]:
    """Makes the local tier of a run."""
    return lambda run: LocalTier.open_or_create(tmp_path / "disk", uuid=run.uuid)


@pytest.fixture
def local_save() -> Callable[..., Stem]:
    """Commits a save into a local tier, as a trainer does, and returns its id; nothing is uploaded by that."""

    def save(tier: LocalTier, run: RunDirectory, step: int, files: Mapping[str, bytes] | None = None) -> Stem:
        stem = Stem(1, step, max((s.seq for s in tier.run.stems()), default=0) + 1, new_nonce())
        prepared = tier.prepare(stem)
        for name, data in (files or {"a.bin": b"a%d" % step, "b.bin": b"b%d" % step}).items():
            (prepared / name).parent.mkdir(exist_ok=True)
            (prepared / name).write_bytes(data)
        manifest = Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared))
        tier.commit(manifest, prepared, target=run.url)
        return stem

    return save


# --- one system call at a time ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One system call of a traced process: the `nth` (from 1) of its name, and its line in the trace."""

    name: str
    nth: int
    line: str

    @property
    def is_change(self) -> bool:
        """Whether it changes something on disk, or makes a change durable; removals apart."""
        return self.name in CHANGES and (self.name != "openat" or "O_CREAT" in self.line)

    def __str__(self) -> str:
        return f"{self.name} no. {self.nth}: {self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a traced process ended: killed or not, what it had said before, and all its calls between the two marks."""

    killed: bool
    said: Sequence[str]
    calls: Sequence[Call]


class Tracer:
    """Runs jobs of `traced.py` under strace."""

    def __init__(self, folder: Path) -> None:
        self._trace = folder / "trace"
        command = [sys.executable, str(Path(__file__).with_name("traced.py"))]
        self._jobs = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __call__(self, job: dict[str, Any], *options: str) -> Ended:
        """Do `job` with further options of strace. A job that fails in another way than with an error of ours fails the test."""
        pid = self._ask(job)["pid"]
        command = ["strace", "-f", "-y", "-o", str(self._trace), *options, "-p", str(pid)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
            assert strace.stderr is not None
            said = strace.stderr.readline()
            ended = self._ask("go")
            assert strace.wait(DEADLINE_S) in (0, 1), strace.stderr.read()
            if "attached" not in said:
                pytest.skip(f"strace cannot trace a process here: {said.strip()}")
        assert ended.get("signal", 9) == 9, ended
        assert ended.get("code", 0) == 0, "the job failed, see its traceback above"
        return Ended(killed="signal" in ended, said=ended["said"], calls=_calls(self._trace.read_text()))

    def program(self, *command: str) -> Sequence[Call]:
        """The changes and removals that a whole program makes between the marks, in all its threads and processes."""
        names = ",".join(sorted(CHANGES | {"access", "unlink", "unlinkat"}))
        strace = ["strace", "-f", "-y", "-s", "0", "-o", str(self._trace), "-e", f"trace={names}"]
        done = subprocess.run([*strace, *command], capture_output=True, text=True, timeout=2 * DEADLINE_S, check=False)
        if "PTRACE" in done.stderr and not self._trace.stat().st_size:
            pytest.skip(f"strace cannot trace a process here: {done.stderr.strip()}")
        assert done.returncode == 0, done.stderr
        return _calls(self._trace.read_text())

    def close(self) -> None:
        assert self._jobs.stdin is not None
        assert self._jobs.stdout is not None
        self._jobs.stdin.close()
        assert self._jobs.wait(DEADLINE_S) == 0
        self._jobs.stdout.close()

    def _ask(self, message: object) -> Any:
        assert self._jobs.stdin is not None
        assert self._jobs.stdout is not None
        print(json.dumps(message), file=self._jobs.stdin, flush=True)
        return json.loads(self._jobs.stdout.readline())


def _calls(trace: str) -> list[Call]:
    """The calls between the marks; counted from where strace was attached, as strace counts them."""
    seen: Counter[str] = Counter()
    found: list[Call] = []
    inside = False
    for line in _whole_lines(trace):
        match = re.match(r"\d+ +(\w+)\(", line)
        if match is None:
            continue
        seen[match[1]] += 1
        inside = inside or BEGIN in line
        if inside:
            found.append(Call(name=match[1], nth=seen[match[1]], line=line.split(maxsplit=1)[1]))
        if END in line:
            break
    return found


def _whole_lines(trace: str) -> Iterator[str]:
    """The lines, in the order in which the calls returned: one that another thread's came between is put together again."""
    begun: dict[str, str] = {}
    for line in trace.splitlines():
        number = line.partition(" ")[0]
        if line.endswith("<unfinished ...>"):
            begun[number] = line.removesuffix("<unfinished ...>")
        elif resumed := re.match(r"\d+ +<\.\.\. \w+ resumed>", line):
            yield begun.pop(number, number) + line[resumed.end() :]
        else:
            yield line


@pytest.fixture(scope="session")
def tracer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tracer]:
    """Skips where there is no strace, or no permission to trace."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nothing can be killed at a given system call")
    tracer = Tracer(tmp_path_factory.mktemp("tracer"))
    yield tracer
    tracer.close()
