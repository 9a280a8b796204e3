"""Fault rows 44 and 45: a training is signalled wherever it may be, saves or has saved, and leaves in time with the code it was told.

Every test also looks at all that is left on disk and in the store: each checkpoint is whole, and nothing half written counts.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.run.verify import Depth, verify_run
from ckptmgr.testing.faults import Fault
from ckptmgr.testing.stores import Store
from ckptmgr.testing.waits import Stopwatch

pytest.importorskip("torch")

DEADLINE_S = 90.0
GRACE_S = 25.0


class Training:
    """A training in a process of its own, see `preempted.py`."""

    def __init__(self, jobs: subprocess.Popen[str], job: dict[str, Any], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        out, self._err = folder / "out", folder / "err"
        os.mkfifo(out)
        self._jobs = jobs
        assert jobs.stdin is not None
        # The store of the test, which the process that forks was not started with.
        env = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "OSS_"))}
        print(json.dumps({**job, "out": str(out), "err": str(self._err), "env": env}), file=jobs.stdin, flush=True)
        self.pid: int = self._answer()["pid"]
        self._fd = os.open(out, os.O_RDONLY)
        self._rest = b""
        self.lines: list[dict[str, Any]] = []
        self.took_s = 0.0
        self._signalled: Stopwatch | None = None
        self._ended: dict[str, int] | None = None

    @property
    def errors(self) -> str:
        return self._err.read_text()

    @property
    def losses(self) -> dict[str, str]:
        """Of each step, and of each evaluation by the step it was made at."""
        named = [(name, line) for line in self.lines for name in ("step", "evaluated") if name in line]
        return {f"{name} {line[name]}": line["loss"] for name, line in named}

    def wait_for(self, key: str, times: int = 1) -> dict[str, Any]:
        """The line with `key`, read when it comes."""
        while sum(key in line for line in self.lines) < times:
            assert self._read(), f"it ended before {key!r}: {self.lines} {self.errors}"
        return [line for line in self.lines if key in line][-1]

    def send(self, number: int = signal.SIGTERM) -> None:
        self._signalled = Stopwatch()
        os.kill(self.pid, number)

    def send_to_group(self, number: int = signal.SIGTERM) -> None:
        self._signalled = Stopwatch()
        os.killpg(self.pid, number)

    def wait(self) -> dict[str, int]:
        """How it ended; `took_s` is how long after the signal. What it had to say is in `lines`."""
        while self._read():
            pass
        if self._ended is None:
            self._ended = self._answer()
            if self._signalled is not None:
                self.took_s = self._signalled.seconds
            os.close(self._fd)
        return self._ended

    def kill(self) -> None:
        """Whatever it does; for the end of a test that failed."""
        if self._ended is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def _answer(self) -> dict[str, int]:
        assert self._jobs.stdout is not None
        return json.loads(self._jobs.stdout.readline())  # type: ignore[no-any-return]

    def _read(self) -> bool:
        if self._ended is not None:
            return False
        assert select.select([self._fd], [], [], DEADLINE_S)[0], (
            f"no word from the training: {self.lines} {self.errors}"
        )
        block = os.read(self._fd, 1 << 16)
        *whole, self._rest = (self._rest + block).split(b"\n")
        for line in map(json.loads, whole):
            self.lines.append(line)
            if "at" in line:
                self._signalled = Stopwatch()
        return bool(block)


@pytest.fixture(scope="module")
def _jobs() -> Iterator[subprocess.Popen[str]]:
    script = str(Path(__file__).with_name("preempted.py"))
    process = subprocess.Popen([sys.executable, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    yield process
    process.stdin.close()
    assert process.wait(DEADLINE_S) == 0
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A run in a directory."""
    return f"file://{tmp_path / 'store' / 'run'}"


@pytest.fixture
def start(_jobs: subprocess.Popen[str], tmp_path: Path, url: str) -> Iterator[Callable[..., Training]]:
    """Starts a training of the run, one after the other."""
    started: list[Training] = []

    def make(**job: Any) -> Training:
        folder = tmp_path / f"training{len(started)}"
        started.append(Training(_jobs, {"url": url, "disk": str(tmp_path / "disk"), **job}, folder))
        return started[-1]

    yield make
    for training in started:
        training.kill()


@pytest.fixture(scope="module")
def whole(_jobs: subprocess.Popen[str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """The losses of the uninterrupted run, by the number of its loader's workers."""
    known: dict[int, dict[str, str]] = {}

    def run(workers: int) -> dict[str, str]:
        if workers not in known:
            folder = tmp_path_factory.mktemp("whole")
            job = {"url": f"file://{folder / 'store' / 'run'}", "disk": str(folder / "disk"), "workers": workers}
            training = Training(_jobs, job, folder / "training")
            assert training.wait() == {"code": 0}, training.errors
            known[workers] = training.losses
        return known[workers]

    return run


def checkpoints(url: str) -> list[tuple[int, tuple[str, ...]]]:
    """Step and reasons of each checkpoint of the run, oldest first."""
    return [(manifest.step, manifest.reasons) for manifest in RunDirectory.open(url).history().readable_chain()[::-1]]


def assert_whole(run: RunDirectory) -> None:
    """Every checkpoint has all its bytes, and there is one."""
    history = run.history()
    assert history.manifests
    assert verify_run(run, history, history.manifests, Depth()) == []


def assert_left_in_order(training: Training, url: str, disk: Path, *, code: int = 143) -> None:
    """In time, with the code it was told, no exception, the end of the training called, and nothing torn or half written left anywhere."""
    assert training.wait() == {"code": code}, training.errors
    assert training.took_s < GRACE_S
    assert "end" in training.lines[-1]
    assert not any("exception" in line for line in training.lines)
    tier = LocalTier.open(disk)
    assert_whole(RunDirectory.open(url))
    assert_whole(tier.run)
    assert list(tier.clean()) == []


# --- row 44 -------------------------------------------------------------------------------------------------------------------

Whole = Callable[[int], dict[str, str]]


def test_in_a_step(start: Callable[..., Training], url: str, tmp_path: Path, whole: Whole) -> None:
    """It is taken back: the edge before is saved, for this reason, and the resumed run equals the uninterrupted one."""
    first = start(at=["forward", 8], send=[signal.SIGTERM], every=100)
    assert_left_in_order(first, url, tmp_path / "disk")
    assert checkpoints(url) == [(2, ("sigterm",))]
    second = start(every=100)
    assert second.wait() == {"code": 0}, second.errors
    assert first.losses | second.losses == whole(0)


def test_in_an_evaluation(start: Callable[..., Training], url: str, tmp_path: Path, whole: Whole) -> None:
    """It is cut off; the resumed run evaluates this step again. The exit code is the one that was configured."""
    first = start(at=["evaluation", 2], send=[signal.SIGUSR1], every=100, preemption={"exit_code": 75})
    assert_left_in_order(first, url, tmp_path / "disk", code=75)
    assert checkpoints(url) == [(3, ("sigusr1",))]
    second = start(every=100)
    assert second.wait() == {"code": 0}, second.errors
    assert "evaluated 3" not in first.losses
    assert first.losses | second.losses == whole(0)


# The state is asked for first when buffers are reserved for it, after step 1.
@pytest.mark.parametrize("at", [["copy", 2], ["write", 1]], ids=["copy", "write"])
def test_in_a_save(at: list[Any], start: Callable[..., Training], url: str, tmp_path: Path) -> None:
    """While the state is copied, and while the writer's thread writes it: that save is finished, and the newest step is saved once."""
    training = start(at=at, send=[signal.SIGTERM])
    assert_left_in_order(training, url, tmp_path / "disk")
    steps = [step for step, _ in checkpoints(url)]
    assert steps[0] == 2
    assert steps == sorted(set(steps))
    # Its last line but one; what was done after that is taken back.
    assert steps[-1] == max(line["step"] for line in training.lines if "step" in line)


def test_during_an_upload(make_store: Callable[[str], Store], start: Callable[..., Training], tmp_path: Path) -> None:
    """The upload of an earlier save gives way, or is finished; the emergency save is in the store before the process leaves."""
    store = make_store("moto")
    url = f"{store.url}/run"
    held = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before"))
    training = start(url=url, every=2, max_steps=1_000_000)
    assert held.reached.wait(DEADLINE_S)
    training.send()
    held.release()
    assert_left_in_order(training, url, tmp_path / "disk")
    last = max(line["step"] for line in training.lines if "step" in line)
    step, reasons = checkpoints(url)[-1]
    assert step == last
    assert last % 2 == 0 or reasons == ("sigterm",)


@pytest.mark.parametrize("workers", [0, 5])
def test_while_it_waits_for_data(workers: int, start: Callable[..., Training], url: str, tmp_path: Path) -> None:
    """A loader that hangs is not waited for: the edge before the wait is saved at once. Nor are its workers, for each of which torch has five seconds."""
    # Each worker hangs in its second batch, so that five come; that is one step and a part of the next.
    training = start(at=["worker_sample", 5] if workers else ["sample", 17], stay=True, every=100, workers=workers)
    training.wait_for("at", times=workers or 1)
    training.wait_for("step")
    training.send()
    assert_left_in_order(training, url, tmp_path / "disk")
    assert checkpoints(url) == [(1, ("sigterm",))]


def test_twice(start: Callable[..., Training], url: str, tmp_path: Path) -> None:
    """The second signal gives up the save: the last periodic one is what there is, and it is uploaded."""
    training = start(at=["forward", 10], send=[signal.SIGTERM, signal.SIGTERM])
    assert_left_in_order(training, url, tmp_path / "disk")
    assert training.losses.keys() >= {"step 4"}
    assert checkpoints(url) == [(2, ("every_n_steps:2",))]


def test_to_the_whole_process_group(start: Callable[..., Training], url: str, tmp_path: Path, whole: Whole) -> None:
    """The workers of the loaders die of it, which tears nothing and is no error; uploads go on. The resumed run is exact."""
    first = start(at=["forward", 8], until_workers_end=True, every=100, workers=2)
    first.wait_for("at")
    first.send_to_group()
    assert_left_in_order(first, url, tmp_path / "disk")
    assert checkpoints(url) == [(2, ("sigterm",))]
    second = start(every=100, workers=2)
    assert second.wait() == {"code": 0}, second.errors
    assert first.losses | second.losses == whole(2)


@pytest.mark.slow
def test_workers_that_die_during_an_optimizer_step_tear_nothing(
    start: Callable[..., Training], url: str, tmp_path: Path, whole: Whole
) -> None:
    """torch says so by an exception out of the handler of SIGCHLD, in the middle of whatever runs: it comes too late to be of use to anybody."""
    first = start(at=["optimizer", 3], until_workers_end=True, every=100, workers=2)
    first.wait_for("at")
    first.send_to_group()
    assert_left_in_order(first, url, tmp_path / "disk")
    assert checkpoints(url) == [(2, ("sigterm",))]
    second = start(every=100, workers=2)
    assert second.wait() == {"code": 0}, second.errors
    assert first.losses | second.losses == whole(2)


def test_the_group_loses_its_workers_during_a_wait(start: Callable[..., Training], url: str, tmp_path: Path) -> None:
    """Sent from outside, while a worker hangs and the trainer waits for it."""
    training = start(at=["worker_sample", 17], stay=True, every=100, workers=2)
    training.wait_for("at")
    training.wait_for("step")
    training.send_to_group()
    assert_left_in_order(training, url, tmp_path / "disk")
    last = max(line["step"] for line in training.lines if "step" in line)
    assert checkpoints(url) == [(last, ("sigterm",))]


# --- row 45 -------------------------------------------------------------------------------------------------------------------


def test_the_machine_is_gone_before_the_queue_is_empty(
    make_store: Callable[[str], Store], start: Callable[..., Training], ask: Callable[..., Any], tmp_path: Path
) -> None:
    """SIGKILL to the trainer and its transfer process, with everything still to be sent: the local tier is whole, a drain completes it later."""
    store = make_store("moto")
    url, disk = f"{store.url}/run", tmp_path / "disk"
    held = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before", times=None))
    training = start(url=url, at=["forward", 19], send=[signal.SIGTERM], every=1, ballast=4 << 20)
    assert held.reached.wait(DEADLINE_S)
    training.wait_for("end")
    # It has said so before it began to wait for its uploads.
    saved = LocalTier.open(disk).run.stems()
    for pid in (*children_of(training.pid), training.pid):
        os.kill(pid, signal.SIGKILL)
    assert training.wait() == {"signal": signal.SIGKILL}
    tier = LocalTier.open(disk)
    assert_whole(tier.run)
    assert set(saved) <= set(tier.run.stems())
    assert [manifest.step for manifest, _ in tier.pending(url)] == [7, 6, 5, 4, 3, 2, 1]
    assert RunDirectory.open(url).stems() == []
    store.server.faults.clear()
    assert ask("drain", disk)["pending"] == []
    assert [step for step, _ in checkpoints(url)] == [1, 2, 3, 4, 5, 6, 7]
    assert_whole(RunDirectory.open(url))


def children_of(pid: int) -> list[int]:
    """Of all threads of a process."""
    found = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for path in found for child in path.read_text().split()]


def test_during_the_last_upload(
    make_store: Callable[[str], Store], start: Callable[..., Training], tmp_path: Path
) -> None:
    """Training is over and waits for its uploads, for minutes if need be: at the signal it waits as long as the notice leaves."""
    store = make_store("moto")
    url, disk = f"{store.url}/run", tmp_path / "disk"
    held = store.server.faults.add(Fault(method="PUT", key="*/checkpoints/*", hold="before", times=None))
    training = start(url=url, preemption={"grace_s": 6.0})
    training.wait_for("end")
    assert held.reached.wait(DEADLINE_S)
    training.send()
    ended = training.wait()
    assert ended == {"code": 143}, training.errors
    assert training.took_s < 6.0
    assert LocalTier.open(disk).pending()
