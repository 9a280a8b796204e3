"""A scene for a transfer process: a store that counts and holds requests, a tier, uploaders and trainers."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.layout import Stem
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.faults import ActiveFault, Fault
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.messages import Event, Task
from ckptmgr.transfer.status import TransferFile
from ckptmgr.transfer.uploader import Uploader

T = TypeVar("T", bound=Event)
DEADLINE_S = 60.0
SCRIPT = Path(__file__).parents[1] / "trainer.py"

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

    def were_sent_once(self, stems: list[Stem], files: int = 2) -> bool:
        """Whether the data and the manifests of `stems` were sent, each of them once."""
        ours = [key for key in self.puts() if any(str(stem) in key for stem in stems)]
        return len(ours) == len(set(ours)) == len(stems) * (files + 1)

    @staticmethod
    def ends(pid: int, timeout_s: float = DEADLINE_S) -> bool:
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

    @classmethod
    def is_running(cls, pid: int) -> bool:
        return not cls.ends(pid, 0)


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
