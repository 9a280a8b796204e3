"""The transfer process: it outlives the trainer, it is started again, it never holds anybody up, and it is nobody else's business."""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import queue
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptmgr.backends.base import Backend
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import ActiveFault, Fault
from ckptmgr.testing.relay import Relay
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.messages import Busy, Committed, Event, Failed, Moved, Task
from ckptmgr.transfer.metrics import read_metrics
from ckptmgr.transfer.status import TransferFile
from ckptmgr.transfer.supervisor import Supervisor
from ckptmgr.transfer.uploader import Uploader

T = TypeVar("T", bound=Event)
DEADLINE_S = 60.0
SCRIPT = Path(__file__).with_name("trainer.py")

_spec = importlib.util.spec_from_file_location("ckptmgr_test_trainer", SCRIPT)
assert _spec is not None
assert _spec.loader is not None
trainer_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(trainer_module)
task_of: Callable[..., Task] = trainer_module.task_of


class Trainer:
    """`trainer.py`, running."""

    def __init__(self, tier: LocalTier, run: RunDirectory, cwd: Path | None, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tier.root), run.url, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
        )
        self._answer()

    def __call__(self, do: str, **arguments: Any) -> Any:
        """Have it do something; what it answers."""
        self.tell(do, **arguments)
        return self._answer()

    def tell(self, do: str, **arguments: Any) -> None:
        """As a call, without waiting for the answer."""
        assert self.process.stdin is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def kill(self) -> str:
        """SIGKILL; what it had said on standard error. Returns as soon as its pipes are closed by all that have them."""
        self.process.kill()
        return self.process.communicate(timeout=DEADLINE_S)[1]


class Scene:
    """A run on a store that counts and holds requests, its local tier, and what uploads from there."""

    def __init__(self, store: Store, tier: LocalTier, run: RunDirectory, local_save: Callable[..., Stem]) -> None:
        self.store = store
        self.faults = store.server.faults
        self.run = run
        self.tier = tier
        self.events: queue.Queue[Event] = queue.Queue()
        self.uploaders: list[Uploader] = []
        self.trainers: list[Trainer] = []
        self._local_save = local_save

    def save(self, *steps: int, **options: Any) -> list[Stem]:
        return [self._local_save(self.tier, self.run, step, **options) for step in steps]

    def uploader(self, task: Task | None = None, **options: Any) -> Uploader:
        """One of this process, which starts a transfer process with its first `notify`."""
        task = task or task_of(self.tier, self.run, **options)
        uploader = Uploader(
            self.tier,
            self.run,
            stop=threading.Event(),
            task=task,
            pause_s=task.pause_s,
            observe=self.events.put,
        )
        self.uploaders.append(uploader)
        return uploader

    def in_thread(self, retry: RetryPolicy) -> Uploader:
        """One that does it all in this process."""
        stop = threading.Event()
        fs, root = open_store(self.run.url, policy=retry, stop=stop)
        run = RunDirectory.open(self.run.url, fs=fs, root=root)
        uploader = Uploader(self.tier, run, stop=stop, observe=self.events.put)
        self.uploaders.append(uploader)
        return uploader

    def trainer(self, *, cwd: Path | None = None, **options: Any) -> Trainer:
        """A process of its own that has an uploader."""
        self.trainers.append(Trainer(self.tier, self.run, cwd, **options))
        return self.trainers[-1]

    def hold(self, key: str = "*/checkpoints/*", **options: Any) -> ActiveFault:
        """Hold PUTs of data."""
        active: ActiveFault = self.faults.add(Fault(method="PUT", key=key, hold="before", **options))
        return active

    def wait_for(self, kind: type[T], when: Callable[[T], bool] = lambda event: True) -> T:
        """The next event of this kind that an uploader of this process saw."""
        while True:
            event = self.events.get(timeout=DEADLINE_S)
            if isinstance(event, kind) and when(event):
                return event

    def host(self) -> int:
        """The process that has the tier's `transfer.json`; it lives."""
        view = TransferFile(self.tier.root).read()
        assert view is not None
        assert view.alive
        assert view.pid is not None
        return view.pid

    def manifests(self) -> list[str]:
        return [key.split("/")[2].removesuffix(".json") for key in self.store.keys("run/manifests/")]

    def puts(self) -> list[str]:
        """The keys of all PUTs that were applied, data and manifests, in their order."""
        return [
            r.key for r in self.store.server.log if r.method == "PUT" and r.status == 200 and "/run.json" not in r.key
        ]

    def state_of(self, stem: Stem) -> str:
        entry = self.tier.journal.read(stem)
        return "" if entry is None else entry.state


@pytest.fixture
def scene(
    make_store: Callable[[str], Store], new_tier: Callable[[RunDirectory], LocalTier], local_save: Callable[..., Stem]
) -> Iterator[Scene]:
    store = make_store("moto")
    run = RunDirectory.open_or_create(f"{store.url}/run")
    made = Scene(store, new_tier(run), run, local_save)
    store.server.log.clear()
    yield made
    made.faults.clear()
    for uploader in made.uploaders:
        uploader.close(DEADLINE_S)
    for trainer in made.trainers:
        trainer.kill()
    view = TransferFile(made.tier.root).read()
    if view is not None and view.alive and view.pid != os.getpid():
        os.kill(view.pid or 0, signal.SIGKILL)


def wait_until_gone(pid: int, timeout_s: float = DEADLINE_S) -> bool:
    """Whether a process ends in time."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        waiting = select.poll()
        waiting.register(fd, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1000))
    finally:
        os.close(fd)


def is_running(pid: int) -> bool:
    return not wait_until_gone(pid, 0)


def each_once(keys: list[str], stems: list[Stem], files: int = 2) -> bool:
    """Whether these are the data and the manifests of `stems`, each of them once."""
    ours = [key for key in keys if any(str(stem) in key for stem in stems)]
    return len(ours) == len(set(ours)) == len(stems) * (files + 1)


# --- it outlives the trainer ------------------------------------------------------------------------------------------------


def test_what_a_killed_trainer_had_saved_is_committed_by_the_process_it_left(scene: Scene) -> None:
    """SIGKILL with three saves pending: whoever waits for the trainer's output goes on at once, and the saves become durable all the same."""
    held = scene.hold()
    stems = scene.save(100, 200, 300)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    assert is_running(pid)
    held.release()
    assert wait_until_gone(pid)
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert each_once(scene.puts(), stems)
    assert [scene.state_of(stem) for stem in stems] == ["uploaded"] * 3
    # Nobody else would record, or show, what it did alone.
    records = [record for record in read_metrics(scene.tier.root) if record["kind"] == "upload"]
    assert sorted(record["id"] for record in records) == sorted(map(str, stems))
    assert all(record["run"] == scene.run.url and record["seconds"] > 0 for record in records)
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert (view.alive, view.committed, view.pid) == (False, 3, pid)
    assert "the trainer is gone" in (scene.tier.root / "transfer.log").read_text()


def test_a_trainer_that_lives_records_its_uploads_itself(scene: Scene) -> None:
    """What it hears of is not recorded a second time by the process that did it."""
    scene.save(100)
    uploader = scene.uploader()
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert list(read_metrics(scene.tier.root)) == []
    assert (scene.tier.root / "transfer.log").read_text() == ""


def test_a_trainer_killed_before_its_process_has_read_a_word(scene: Scene) -> None:
    """The task lies in the socket by then, and is done."""
    stems = scene.save(100)
    held = scene.hold()
    trainer = scene.trainer()
    trainer.tell("notify_and_die")
    assert trainer.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    held.release()
    assert wait_until_gone(pid)
    assert scene.manifests() == [str(stems[0])]


def test_a_quick_restart_and_the_process_left_behind_do_no_work_twice(scene: Scene) -> None:
    """The first one has a save in hand when the second trainer starts: that waits for it, takes the others, and each object is sent once."""
    held = scene.hold(times=1)
    stems = scene.save(100, 200, 300)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    stems += scene.save(400)
    second = scene.uploader()
    second.notify()
    assert scene.wait_for(Busy).stem == stems[2]
    scene.wait_for(Committed, lambda event: event.stem == stems[0])
    assert is_running(pid)
    held.release()
    assert second.close(DEADLINE_S) == []
    assert wait_until_gone(pid)
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert each_once(scene.puts(), stems)
    assert second.poll_errors() == []


def test_linger_0_leaves_with_the_trainer(scene: Scene) -> None:
    """Whatever request it is in: what it had not committed stays pending."""
    held = scene.hold()
    (stem,) = scene.save(100)
    trainer = scene.trainer(linger_s=0)
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    assert wait_until_gone(pid, 10)
    held.release()
    assert scene.manifests() == []
    assert drain(scene.tier, scene.run).committed == (stem,)


def test_it_lingers_until_the_store_is_back(scene: Scene) -> None:
    """An upload that had been given up for now is tried again soon: the process has no more than its linger time."""
    down = scene.faults.add(Fault(method="PUT", status=503, code="SlowDown", times=4))
    (stem,) = scene.save(100)
    # Three tries each: the first upload fails, and a trainer would have it repeated after 1000 s.
    trainer = scene.trainer(pause_s=1000)
    trainer("notify")
    assert down.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    assert wait_until_gone(pid)
    assert down.hits == 4
    assert scene.manifests() == [str(stem)]


def test_it_leaves_when_everything_left_is_refused_for_good(scene: Scene) -> None:
    """Nobody is there who could give it better credentials."""
    refused = scene.faults.add(Fault(method="PUT", status=403, code="AccessDenied", times=None))
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert refused.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    assert wait_until_gone(pid, 20)
    assert refused.hits <= 3
    assert scene.state_of(stem) == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_the_trainers_business_while_it_lives(scene: Scene, number: signal.Signals) -> None:
    """Sent to every process of a job they end no upload; afterwards they mean what they say, and the journal stays whole."""
    first = scene.hold(times=1)
    second = scene.hold(key="*-000000000100-*", times=None)
    older, newer = scene.save(100, 200)
    trainer = scene.trainer()
    trainer("notify")
    assert first.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, number)
    first.release()
    # It has gone on to the next: the signal has changed nothing.
    assert second.reached.wait(DEADLINE_S)
    assert scene.manifests() == [str(newer)]
    assert scene.host() == pid
    trainer.kill()
    os.kill(pid, number)
    assert wait_until_gone(pid, 10)
    second.release()
    assert (scene.state_of(newer), scene.state_of(older)) == ("uploaded", "uploading")
    assert drain(scene.tier, scene.run).committed == (older,)


def test_it_notices_the_end_although_others_hold_the_line(scene: Scene) -> None:
    """A forked worker, and a program that was given every socket of the trainer's, live on: no end of file ever comes."""
    held = scene.hold()
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    worker, holder = trainer("fork")["pid"], trainer("hold_line")
    try:
        assert holder["sockets"] >= 1
        trainer.process.kill()
        trainer.process.wait()
        held.release()
        assert wait_until_gone(pid, 30)
        assert is_running(worker)
        assert is_running(holder["pid"])
        assert scene.manifests() == [str(stem)]
        assert "the trainer is gone" in (scene.tier.root / "transfer.log").read_text()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.kill(holder["pid"], signal.SIGKILL)


def test_it_leaves_at_once_when_the_tier_is_gone_as_well(scene: Scene) -> None:
    """A test's temporary directory, a job's scratch disk: nothing is made anew there."""
    held = scene.hold(times=None)
    scene.save(100, 200)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    shutil.rmtree(scene.tier.root)
    assert wait_until_gone(pid, 10)
    assert not scene.tier.root.exists()
    held.release()


# --- it dies --------------------------------------------------------------------------------------------------------------


def test_a_process_that_was_killed_is_started_again_at_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The upload goes on, and the death shows: in the log, in the errors, in the status."""
    held = scene.hold(times=1)
    (stem,) = scene.save(100)
    uploader = scene.uploader()
    uploader.notify()
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, signal.SIGKILL)
    scene.wait_for(Committed)
    assert scene.manifests() == [str(stem)]
    (error,) = uploader.poll_errors()
    assert str(error) == f"the transfer process {pid} died (killed by SIGKILL) - it is started again"
    assert uploader.status().last_error == str(error)
    assert f"the transfer process {pid} died" in caplog.text
    assert scene.host() != pid
    assert uploader.close(DEADLINE_S) == []


@pytest.mark.parametrize("how", ["hurry", "close"])
def test_after_a_second_death_it_waits_unless_there_is_no_time(scene: Scene, how: str) -> None:
    """No process is started over and over; a save alone does not change that, an emergency or the end does."""
    first, second = scene.hold(times=1), scene.hold(times=1)
    (older,) = scene.save(100)
    uploader = scene.uploader(pause_s=1000)
    uploader.notify()
    for held in (first, second):
        assert held.reached.wait(DEADLINE_S)
        os.kill(scene.host(), signal.SIGKILL)
        scene.wait_for(Failed)
    (newer,) = scene.save(200)
    uploader.notify()
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert not view.alive
    assert scene.manifests() == []
    if how == "hurry":
        uploader.hurry()
        assert scene.wait_for(Committed).stem == newer
        assert scene.wait_for(Committed).stem == older
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == sorted([str(older), str(newer)])
    assert len(uploader.poll_errors()) == 2


def test_a_process_that_dies_while_it_is_waited_for(scene: Scene) -> None:
    """Killed during `close`: a further one finishes. Killed again, it stays pending, and `close` ends."""
    holds = [scene.hold(times=1) for _ in range(2)]
    (stem,) = scene.save(100)
    uploader = scene.uploader(pause_s=1000)
    uploader.notify()
    left: list[Stem] = []
    closing = threading.Thread(target=lambda: left.extend(uploader.close(None)))
    closing.start()
    for held in holds:
        assert held.reached.wait(DEADLINE_S)
        os.kill(scene.host(), signal.SIGKILL)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert left == [stem]
    assert drain(scene.tier, scene.run).committed == (stem,)


def test_the_uploader_thread_that_dies_is_started_again_by_the_next_save(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 48: a MemoryError in it: training goes on, the error shows, the process that it had goes on with its work, and nothing is done twice."""
    uploader = scene.uploader()
    note, dead = uploader.tally.note, threading.Event()

    def no_memory(event: Event) -> None:
        if not dead.is_set():
            dead.set()
            raise MemoryError
        note(event)

    monkeypatch.setattr(uploader.tally, "note", no_memory)
    stems = scene.save(100)
    uploader.notify()
    assert scene.wait_for(Failed).error.hint == "it is started again by the next save"
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-uploader":
            thread.join(DEADLINE_S)
    stems += scene.save(200)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert each_once(scene.puts(), stems)
    assert [str(error) for error in uploader.poll_errors()] == [
        "the uploader thread died: MemoryError() - it is started again by the next save"
    ]
    assert "is started again" in caplog.text


def test_a_close_gives_what_a_dead_thread_has_left_a_last_try(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 48: no save comes after its death."""
    uploader = scene.uploader()

    def no_memory(supervisor: Supervisor) -> None:
        raise MemoryError

    (stem,) = scene.save(100)
    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "run", no_memory)
        uploader.notify()
        scene.wait_for(Failed)
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-uploader":
            thread.join(DEADLINE_S)
    assert uploader.close(DEADLINE_S) == []
    assert scene.manifests() == [str(stem)]


def test_a_thread_that_cannot_be_started_is_no_failure_of_the_save(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the machine on threads: it is said, and the next save tries again."""
    uploader = scene.uploader()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        stems = scene.save(100)
        uploader.notify()
    (error,) = uploader.poll_errors()
    assert "cannot be started: can't start new thread" in str(error)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert scene.manifests() == [str(stems[0])]


# --- it hangs -------------------------------------------------------------------------------------------------------------


def test_a_process_that_hangs_holds_up_neither_a_save_nor_the_end(scene: Scene) -> None:
    """Stopped: thousands of saves are told to it at once, `close` keeps its time and names what is left; woken up, it commits that."""
    held = scene.hold(times=None)
    (first,) = scene.save(100)
    uploader = scene.uploader()
    uploader.notify()
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, signal.SIGSTOP)
    try:
        (second,) = scene.save(200)
        started = time.monotonic()
        for _ in range(3000):
            uploader.notify()
        uploader.hurry()
        assert uploader.close(0.5) == [second, first]
        assert time.monotonic() - started < 5
        held.release()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert wait_until_gone(pid)
    assert sorted(scene.manifests()) == sorted([str(first), str(second)])


def test_a_trainer_that_hangs_does_not_hold_up_the_uploads(scene: Scene) -> None:
    """Stopped, it reads nothing of what the process has to say; every save becomes durable all the same."""
    trainer = scene.trainer()
    held = scene.hold(times=1)
    stems = scene.save(*range(1, 101), files={"a.bin": b"a"})
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    os.kill(trainer.process.pid, signal.SIGSTOP)
    try:
        last = scene.faults.add(Fault(method="PUT", key=f"*/manifests/{stems[0]}.json", hold="after"))
        held.release()
        assert last.reached.wait(DEADLINE_S)
        last.release()
    finally:
        os.kill(trainer.process.pid, signal.SIGCONT)
    assert trainer("close", timeout_s=60)["left"] == []
    assert len(scene.manifests()) == 100


def test_a_store_that_hangs_does_not_hold_up_the_end(scene: Scene) -> None:
    """`close` keeps its time and names what is left; the process goes on, and commits it once the store is back."""
    held = scene.hold(times=None)
    stems = scene.save(100, 200)
    uploader = scene.uploader()
    uploader.notify()
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    started = time.monotonic()
    assert uploader.close(0.3) == stems[::-1]
    assert uploader.close(0.3) == stems[::-1]
    assert time.monotonic() - started < 5
    assert is_running(pid)
    held.release()
    assert wait_until_gone(pid)
    assert uploader.close(0.3) == []
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert each_once(scene.puts(), stems)


def test_a_close_that_comes_before_the_process_is_up(scene: Scene) -> None:
    """No time at all: the process is started all the same, let go at once, and does its work."""
    stems = scene.save(100, 200)
    held = scene.hold(times=1)
    uploader = scene.uploader()
    uploader.notify()
    started = time.monotonic()
    assert uploader.close(0) == stems[::-1]
    assert time.monotonic() - started < 5
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    held.release()
    assert wait_until_gone(pid)
    assert sorted(scene.manifests()) == sorted(map(str, stems))


def test_ctrl_c_while_waiting_ends_both(scene: Scene) -> None:
    """In `close`: KeyboardInterrupt is raised at once, the transfer process is killed, and the program is gone within three seconds."""
    held = scene.hold(times=None)
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.tell("close", timeout_s=None)
    assert trainer.process.stderr is not None
    assert any("waiting for 1 upload(s)" in line for line in trainer.process.stderr)
    trainer.process.send_signal(signal.SIGINT)
    assert trainer.process.wait(3) in (-signal.SIGINT, 130)
    assert wait_until_gone(pid, 3)
    held.release()
    assert scene.manifests() == []
    assert drain(scene.tier, scene.run).committed == (stem,)


# --- hurry ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["process", "thread"])
def test_an_older_upload_that_waits_for_its_next_try_gives_way(scene: Scene, host: str) -> None:
    """The newest is committed first; the older one goes on later, without a byte of what was confirmed."""
    patient = RetryPolicy(attempts=10, base_s=1000.0, cap_s=1000.0, deadline_s=2000.0)
    # Cut short, the wait is followed by one more try at once.
    failing = scene.faults.add(Fault(method="PUT", key="*-000000000100-*/b.bin", status=503, code="SlowDown", times=2))
    (older,) = scene.save(100)
    uploader = scene.uploader(retry=patient) if host == "process" else scene.in_thread(patient)
    uploader.notify()
    assert failing.reached.wait(DEADLINE_S)
    (newer,) = scene.save(200)
    uploader.notify()
    assert scene.wait_for(Committed).stem == newer
    assert scene.wait_for(Committed).stem == older
    assert uploader.close(DEADLINE_S) == []
    assert each_once(scene.puts(), [older, newer])
    # It was told to give way: that is no failure.
    assert uploader.poll_errors() == []


def test_an_older_upload_under_way_gives_way(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a large file on a slow link; its parts stay, and what was confirmed is not sent again."""
    large = {"a.bin": b"a" * 1000, "b.bin": os.urandom(33 << 20)}
    (older,) = scene.save(100, files=large)
    with Relay(scene.store.server.url, bytes_per_s=12_000_000, buffer_bytes=64 << 10) as relay:
        monkeypatch.setenv("AWS_ENDPOINT_URL", relay.url)
        uploader = scene.uploader()
        uploader.notify()
        scene.wait_for(Moved, lambda event: event.sent_bytes > 2 << 20)
        (newer,) = scene.save(200)
        uploader.hurry()
        assert scene.wait_for(Committed).stem == newer
        assert scene.wait_for(Committed).stem == older
        assert uploader.close(DEADLINE_S) == []
        assert len(relay.requests(rf"POST /\S+{older}\S+uploads")) == 1
        assert len(relay.requests(rf"PUT /\S+{older}/a.bin")) == 1
    assert uploader.poll_errors() == []
    assert scene.store.get(f"run/checkpoints/{older}/b.bin") == large["b.bin"]


def test_a_newest_that_is_refused_does_not_keep_the_older_ones_from_going_up(scene: Scene) -> None:
    """In a hurry, too: an older one gives way to what is new, not to what has failed already, or the two would take turns without end."""
    (newer,) = scene.save(200)
    refused = scene.faults.add(Fault(method="PUT", key=f"*/{newer}/*", status=403, code="AccessDenied", times=None))
    uploader = scene.uploader()
    uploader.hurry()
    uploader.notify()
    scene.wait_for(Failed)
    stems = scene.save(*range(100, 110))
    uploader.notify()
    for _ in stems:
        scene.wait_for(Committed)
    assert refused.hits <= 5  # once a round at most
    assert uploader.close(DEADLINE_S) == [newer]


# --- it is a process of its own -------------------------------------------------------------------------------------------


def test_what_kind_of_process_it_is(scene: Scene, tmp_path: Path) -> None:
    """No PyTorch in it; low priority, a session of its own, none of the trainer's files, and an environment that is just the trainer's."""
    held = scene.hold()
    scene.save(100)
    # A file in the working directory is not imported in the place of a module of ours.
    (tmp_path / "elsewhere").mkdir()
    for name in ("msgspec", "queue", "tenacity"):
        (tmp_path / "elsewhere" / f"{name}.py").write_text("raise RuntimeError('imported')")
    trainer = scene.trainer(cwd=tmp_path / "elsewhere")
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    assert trainer("status")["host"] == "process"
    pid = scene.host()
    proc = Path(f"/proc/{pid}")
    loaded = proc.joinpath("maps").read_text()
    assert "/torch/" not in loaded
    assert "/numpy/" not in loaded
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    assert os.getsid(pid) == pid
    log = str(scene.tier.root / "transfer.log")
    assert [os.readlink(proc / f"fd/{fd}") for fd in (0, 1, 2)] == [os.devnull, log, log]
    theirs = {os.readlink(path) for path in Path(f"/proc/{trainer.process.pid}/fd").iterdir()}
    ours = {os.readlink(path) for path in (proc / "fd").iterdir()}
    assert not {name for name in theirs & ours if name.startswith(("pipe:", "socket:"))}
    environment = proc.joinpath("environ").read_bytes().split(b"\0")
    assert environment == Path(f"/proc/{trainer.process.pid}/environ").read_bytes().split(b"\0")
    assert os.readlink(proc / "cwd") == str(tmp_path / "elsewhere")
    held.release()
    assert trainer("close", timeout_s=60)["left"] == []


@pytest.mark.parametrize("place", ["the working directory", "an archive"])
def test_what_the_trainer_can_import_the_process_can(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """A backend of the user's, from wherever the trainer has it: `''` in the search path, a zip file; what is not there does not matter."""
    code = "from ckptmgr.testing.faulty import FaultyBackend\n\ndef wrap(backend):\n    return FaultyBackend(backend)\n"
    name = f"users_backend_{place.split()[1]}"
    folder = tmp_path / "modules"
    folder.mkdir()
    if place == "an archive":
        with zipfile.ZipFile(folder / "users.zip", "w") as archive:
            archive.writestr(f"{name}.py", code)
    else:
        (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    first = "" if place == "the working directory" else str(folder / "users.zip")
    monkeypatch.setattr(sys, "path", [first, "/nowhere", Path("/no-text"), *sys.path])
    importlib.invalidate_caches()
    (stem,) = scene.save(100)
    uploader = scene.uploader(wrap_backend=importlib.import_module(name).wrap)
    uploader.notify()
    scene.wait_for(Committed)
    assert uploader.status().host == "process"
    assert uploader.close(DEADLINE_S) == []
    assert scene.manifests() == [str(stem)]


@pytest.mark.parametrize("children", ["are ignored", "are reaped by somebody else"])
def test_a_program_that_sees_to_children_itself(scene: Scene, children: str) -> None:
    """Its exit status is lost to us; it is not taken for a death, or a death for an end."""
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("mind_children", ignore=children == "are ignored")
    held = scene.hold(times=1)
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    os.kill(scene.host(), signal.SIGKILL)
    held.release()
    assert trainer("close", timeout_s=60)["left"] == []
    assert scene.manifests() == [str(stem)]
    assert trainer.kill().count(" died (") == 1


def test_a_forked_child_has_no_part_in_it(scene: Scene) -> None:
    """Forked while other threads hold every lock: nothing waits, nothing is sent, no line stays open, and nothing is uploaded twice."""
    held = scene.hold()
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    said = trainer("fork_while_locked")["child"]
    assert said == {"left": [str(stem)], "host": "", "threads": [], "sockets": 0}
    held.release()
    assert trainer("close", timeout_s=60)["left"] == []
    assert each_once(scene.puts(), [stem])


# --- where there can be none ----------------------------------------------------------------------------------------------


def in_the_thread(scene: Scene, uploader: Uploader, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Assert that uploads run in this process, and that it is said once, with the reason."""
    (first,) = scene.save(100)
    uploader.notify()
    scene.wait_for(Committed, lambda event: event.stem == first)
    assert uploader.status().host == "thread"
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert (view.alive, view.host, view.pid) == (True, "thread", os.getpid())
    (second,) = scene.save(200)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == sorted([str(first), str(second)])
    said = [record.getMessage() for record in caplog.records if "not in a process of their own" in record.getMessage()]
    assert len(said) == 1, said
    assert why in said[0]


def test_a_lambda_keeps_uploads_in_the_trainer(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    in_the_thread(scene, scene.uploader(wrap_backend=lambda backend: backend), caplog, "lambda")


def test_a_module_that_fails_in_the_process_keeps_uploads_in_the_trainer(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is made at run time, and lies on no disk."""

    def wrap(backend: Backend) -> Backend:
        return backend

    module = types.ModuleType("made_at_run_time")
    wrap.__module__, wrap.__qualname__ = module.__name__, "wrap"
    module.wrap = wrap  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    in_the_thread(scene, scene.uploader(wrap_backend=wrap), caplog, "No module named 'made_at_run_time'")


def test_a_class_of_the_main_module_keeps_uploads_in_the_trainer(scene: Scene) -> None:
    """It must not be imported elsewhere: that would run the user's program again."""
    (stem,) = scene.save(100)
    trainer = scene.trainer(own_rule=True)
    trainer("notify")
    assert trainer("close", timeout_s=60)["left"] == []
    assert scene.manifests() == [str(stem)]
    assert trainer.kill().count("not in a process of their own: it uses something of the program's main module") == 1


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("executable", "", "embeds Python"),
        ("executable", None, "embeds Python"),
        ("executable", "/nowhere/python", "cannot be started"),
        ("executable", "/bin/false", "does not start (exit code 1; see transfer.log in the local tier)"),
        ("frozen", True, "frozen"),
    ],
)
def test_a_program_without_an_interpreter_uploads_by_itself(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, why: str
) -> None:
    monkeypatch.setattr(sys, name, value, raising=False)
    in_the_thread(scene, scene.uploader(), caplog, why)


def test_an_interpreter_that_never_answers_is_given_up(
    scene: Scene, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program that embeds Python, and takes our command line for a call of its own."""
    other = tmp_path / "some-program"
    other.write_text("#!/bin/sh\nexec sleep 600\n")
    other.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(other))
    monkeypatch.setattr("ckptmgr.transfer.supervisor._READY_S", 0.5)
    in_the_thread(scene, scene.uploader(), caplog, "does not start")


def test_the_log_level_of_the_trainer_holds(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """What the process logs comes out of the trainer's loggers."""
    with caplog.at_level(logging.INFO, logger="ckptmgr"):
        (stem,) = scene.save(100)
        uploader = scene.uploader()
        uploader.notify()
        assert uploader.close(DEADLINE_S) == []
    names = {record.name for record in caplog.records if f"committed as {stem}" in record.getMessage()}
    assert names == {"ckptmgr.transfer.upload"}
