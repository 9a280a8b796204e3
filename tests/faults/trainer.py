"""A trainer without torch: saves into a local tier, and has an uploader. It does what it is told, one line of JSON at a time, and answers each
with a line of JSON. A test may kill it at any moment.

    trainer.py TIER URL '{"linger_s": 300}'

    {"do": "save", "step": 100, "files": {"a.bin": 1000}}     files of so many bytes; -> {"id": …}
    {"do": "notify"}     {"do": "status"}     {"do": "close", "timeout_s": 5}     {"do": "fork"}     {"do": "hold_line"}
    {"do": "die"}     {"do": "notify_and_die"}     {"do": "fork_while_locked"}
"""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
from typing import Any

from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.retention import KeepLast
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce, utc_stamp
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer import supervisor
from ckptmgr.transfer.child import TransferProcess
from ckptmgr.transfer.messages import Task
from ckptmgr.transfer.tidying import Retention
from ckptmgr.transfer.uploader import Uploader

Reply = dict[str, Any]


class OurRule(KeepLast):
    """A retention rule of the program's own."""


def task_of(tier: LocalTier, run: RunDirectory, **options: Any) -> Task:
    """What a transfer process of `tier` is to do."""
    return Task(
        **{
            "url": run.url,
            "record": run.record,
            "local_dir": str(tier.root),
            "attempt": 1,
            "retention": Retention(store=None, local=KeepLast(1000)),
            "retry": RetryPolicy(attempts=3, base_s=0.01, cap_s=0.1),
            "wrap_backend": None,
            "linger_s": 300.0,
            "pause_s": 1000.0,
            "log_level": 20,
            "labels": {"run": run.url, "attempt": "1"},
            **options,
        }
    )


def save(tier: LocalTier, run: RunDirectory, step: int, files: dict[str, int]) -> Stem:
    """Commit files of so many random bytes into the tier."""
    stem = Stem(1, step, max((s.seq for s in tier.run.stems()), default=0) + 1, new_nonce())
    prepared = tier.prepare(stem)
    for name, size in files.items():
        (prepared / name).write_bytes(os.urandom(size))
    manifest = Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared), created_at=utc_stamp())
    tier.commit(manifest, prepared, target=run.url)
    return stem


class Trainer:
    def __init__(self, directory: str, url: str, options: dict[str, Any]) -> None:
        self.run = RunDirectory.open(url)
        self.tier = LocalTier.open(directory)
        self.tier.hold()
        if options.pop("own_rule", False):
            options["retention"] = Retention(store=None, local=OurRule(5))
        task = task_of(self.tier, self.run, **options)
        self.uploader = Uploader(self.tier, self.run, stop=threading.Event(), task=task)

    def save(self, step: int, files: dict[str, int]) -> Reply:
        return {"id": str(save(self.tier, self.run, step, files))}

    def notify(self) -> Reply:
        self.uploader.notify()
        return {}

    def status(self) -> Reply:
        status = self.uploader.status()
        return {"host": status.host, "pending": [str(stem) for stem in status.pending], "last_error": status.last_error}

    def close(self, timeout_s: float | None = None) -> Reply:
        return {"left": [str(stem) for stem in self.uploader.close(timeout_s)]}

    def die(self) -> Reply:
        os.kill(os.getpid(), signal.SIGKILL)
        return {}

    def notify_and_die(self) -> Reply:
        """Be killed the moment the transfer process has been started: it has not read a word yet."""

        class Last(TransferProcess):
            def __init__(self, task: Task) -> None:
                super().__init__(task)
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(supervisor, "TransferProcess", Last)  # noqa: B010 - for mypy it is none of that module's
        self.uploader.notify()
        threading.Event().wait()
        return {}

    def fork(self) -> Reply:
        """A child that lives on, as a DataLoader worker may."""
        pid = os.fork()
        if pid == 0:
            os.closerange(0, 3)
            signal.pause()
        return {"pid": pid}

    def mind_children(self, ignore: bool) -> Reply:
        """Have the kernel, or a thread, collect the exit status of every child."""
        if ignore:
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        else:
            threading.Thread(target=_reap, daemon=True).start()
        return {}

    def hold_line(self) -> Reply:
        """Another program that holds all sockets of this one."""
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
        sockets = [fd for fd in fds if _is_socket(fd)]
        holder = subprocess.Popen(
            ["sleep", "600"], pass_fds=sockets, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        return {"pid": holder.pid, "sockets": len(sockets)}

    def fork_while_locked(self) -> Reply:
        """Fork while another thread holds every lock that the uploader has; what the child says of its uploader."""
        locks = [self.uploader._lock, self.uploader.tally._lock]
        locked, done = threading.Event(), threading.Event()

        def hold() -> None:
            for lock in locks:
                lock.acquire()
            locked.set()
            done.wait()
            for lock in locks:
                lock.release()

        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait()
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            self.uploader.notify()
            self.uploader.hurry()
            left = [str(stem) for stem in self.uploader.close(60)]
            status = self.uploader.status()
            threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
            sockets = sum(map(_is_socket, map(int, os.listdir("/proc/self/fd"))))
            said = {"left": left, "host": status.host, "threads": threads, "sockets": sockets}
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, "rb") as said_by_child:
            said = json.loads(said_by_child.read())
        done.set()
        holder.join()
        os.waitpid(pid, 0)
        return {"child": said}


def _reap() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            threading.Event().wait(0.01)


def _is_socket(fd: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(fd).st_mode)
    except OSError:
        return False


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    trainer = Trainer(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
    print("{}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(trainer, command.pop("do"))(**command)
        except KeyboardInterrupt:
            print(json.dumps({"interrupted": True}), flush=True)
            raise
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main()
