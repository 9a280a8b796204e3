"""The demo, killed with SIGKILL again and again at random moments, until it ends: resume must always succeed, and the end must be the same.

    python bench/soak.py [--kills 20] [--seed N] [--store local|moto|oss|weed] [--steps N] [--dir DIR]

Each life is `ckptmgr resume RUN --or-start --local-dir DISK --to DIR --replace -- python -m ckptmgr.demo.train … --resume {}`, which a scheduler would
start again and again. It is killed while it starts, or some time after one of its saves was committed locally:

- `machine`: all its processes at once, the transfer process too; in some rounds the local disk is lost as well, once the store has a commit
- `job`: the trainer and `ckptmgr resume`; the transfer process goes on by itself, also beside the next life
- `trainer`: the trainer alone; `ckptmgr resume` drains the local tier and ends with 137
- `transfer`: the transfer process alone; training must not notice, and goes on until another kill

After each kill it is known which is the newest checkpoint that must survive: the next life must resume from it. A run that comes to its end must equal,
in every loss and in the weights, to the last bit, one that nothing happened to; what the store holds of it must verify; then a new run begins,
until there were enough kills, after which the last run is left to end. The same seed makes the same choices, not the same timing.

The last line of the output is a JSON object; the exit code is 1 if something went wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from ckptmgr.testing.stores import BucketStore, DirectoryStore, Store

MARK = "CKPTMGR_SOAK"
TRAINER, TRANSFER, COMMAND = "ckptmgr.demo.train", "ckptmgr.transfer.worker", "ckptmgr.cli.main"
SAVE_EVERY, KEEP_LAST, SLOW_S = 3, 3, 0.03
START_S, AFTER_SAVE_S = 4.0, 1.0
LIFE_S = 300.0
KILLED = (128 + signal.SIGKILL, -signal.SIGKILL)


class WrongError(Exception):
    """What must never happen has happened."""


class Processes:
    """The processes of this soak: all that have its mark in their environment, whoever started them."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={secrets.token_hex(8)}".encode()

    @property
    def environment(self) -> dict[str, str]:
        name, _, value = self._mark.decode().partition("=")
        return {name: value}

    def find(self, *words: str) -> list[int]:
        """Those whose command line has one of `words`; all of them without any."""
        found = []
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
                if self._mark in environment.split(b"\0") and (not words or any(word in command for word in words)):
                    found.append(pid)
        return found

    def kill(self, *words: str) -> int:
        """SIGKILL to those; how many there were. Without words also to what they start meanwhile."""
        killed = set()
        while found := set(self.find(*words)) - (killed if words else set()):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            killed |= found
            sleep(0.01)
        return len(killed)


class Life:
    """One start of the job, until it ends or is killed."""

    def __init__(self, command: Sequence[str], folder: Path, environment: dict[str, str]) -> None:
        self._log = folder / "life.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                list(command),
                cwd=folder,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def ended(self) -> int | None:
        """Its exit code, if it is over."""
        return self.process.poll()


class Job:
    """A run of the demo: its store, its local disk, and what must survive.

    Attributes:
        attempts: highest attempt seen.
    """

    def __init__(self, store: Store, name: str, folder: Path, processes: Processes, steps: int) -> None:
        self.name = name
        self._store = store
        self._folder = folder / name
        self._folder.mkdir()
        self._processes = processes
        self._steps = steps
        self.disk = self._folder / "disk"
        self.report = self._folder / "report.json"

    @property
    def url(self) -> str:
        return f"{self._store.url}/{self.name}"

    def start(self, transfer: str) -> Life:
        self.report.unlink(missing_ok=True)
        training = [
            *(sys.executable, "-m", TRAINER, "--report", str(self.report), "--run", self.url, "--resume", "{}"),
            *("--steps", str(self._steps), "--save-every", str(SAVE_EVERY), "--keep-last", str(KEEP_LAST)),
            *("--local-dir", str(self.disk), "--slow", str(SLOW_S)),
        ]
        options = ["--or-start", "--local-dir", str(self.disk), "--to", str(self._folder / "checkpoint"), "--replace"]
        command = [sys.executable, "-m", COMMAND, "resume", self.url, *options, "--", *training]
        environment = {**self._store.env, **self._processes.environment, "CKPTMGR_TRANSFER": transfer}
        return Life(command, self._folder, environment)

    def local(self) -> set[str]:
        """Ids of what is committed on the local disk."""
        return {path.stem for path in (self.disk / "manifests").glob("0*.json")}

    def remote(self) -> set[str]:
        """Ids of what is committed in the store and not pruned."""
        keys = self._store.keys(f"{self.name}/manifests/")
        manifests = {key.rsplit("/", 1)[1].removesuffix(".json"): json.loads(self._store.get(key)) for key in keys}
        return {stem for stem, manifest in manifests.items() if "closed" not in manifest}

    def may_lose_disk(self) -> bool:
        """A store that holds data without any commit is refused by --or-start, for good reason, when the disk is gone."""
        return bool(self.remote()) or not self._store.keys(f"{self.name}/checkpoints/")

    def lose_disk(self) -> None:
        shutil.rmtree(self.disk, ignore_errors=True)

    def attempts(self) -> dict[int, str | None]:
        """The parent of each attempt."""
        keys = self._store.keys(f"{self.name}/attempts/")
        records = [(key, json.loads(self._store.get(key))) for key in keys]
        return {int(re.findall(r"\d+", key.rsplit("/", 1)[1])[0]): record.get("parent") for key, record in records}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **self._store.env, **self._processes.environment}
        words = [sys.executable, "-m", COMMAND, *arguments]
        return subprocess.run(words, cwd=self._folder, env=environment, capture_output=True, text=True, check=False)

    def check_end(self, expected: dict[str, Any]) -> None:
        """Raises WrongError unless the finished run equals `expected`, and its store holds it whole."""
        found = json.loads(self.report.read_text())
        different = [key for key, loss in expected["losses"].items() if found["losses"].get(key) != loss]
        if different or found["losses"].keys() != expected["losses"].keys():
            raise WrongError(
                f"{len(different)} losses differ from the uninterrupted run's, the first is {different[:1]}"
            )
        if found["weights"] != expected["weights"]:
            raise WrongError("the weights differ from the uninterrupted run's")
        drained = self.command("drain", str(self.disk))
        end = monotonic() + LIFE_S
        while drained.returncode == 6 and monotonic() < end:  # a transfer process of an earlier life has it in hand
            drained = self.command("drain", str(self.disk))
        verified = self.command("verify", self.url)
        for what, done in (("drain", drained), ("verify", verified)):
            if done.returncode != 0:
                raise WrongError(f"{what} ended with {done.returncode}: {done.stderr.strip()}")
        newest = max(self.remote(), default="")
        if int(newest.split("-")[1]) != self._steps:
            raise WrongError(f"the newest checkpoint in the store is {newest}, the run went to step {self._steps}")


class Soak:
    """Lives and kills, one after another."""

    def __init__(self, store: Store, folder: Path, *, kills: int, seed: int, steps: int) -> None:
        self._store = store
        self._folder = folder
        self._kills = kills
        self._random = random.Random(seed)
        self._steps = steps
        self._processes = Processes()
        self.counts: Counter[str] = Counter()
        self.runs = 0

    @property
    def killed(self) -> int:
        return sum(self.counts[kind] for kind in ("machine", "job", "trainer", "transfer"))

    def play(self) -> None:
        """All of it. Raises WrongError."""
        expected = self._uninterrupted()
        try:
            while self.killed < self._kills or not self.runs:
                self.runs += 1
                job = Job(self._store, f"run-{self.runs}", self._folder, self._processes, self._steps)
                self._live(job)
                job.check_end(expected)
                say(f"  {job.name}: equal to the uninterrupted run, {len(job.attempts())} lives, the store verifies")
        finally:
            self._processes.kill()

    def _uninterrupted(self) -> dict[str, Any]:
        report = self._folder / "whole.json"
        options = ["--report", str(report), "--steps", str(self._steps), "--save-every", str(SAVE_EVERY)]
        subprocess.run([sys.executable, "-m", TRAINER, *options], check=True)
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    def _live(self, job: Job) -> None:
        """Start the job again and again until it ends by itself."""
        survives: str | None = None
        while True:
            before = job.attempts()
            life = job.start(self._random.choices(["process", "thread"], [4, 1])[0])
            self.counts["lives"] += 1
            kind = self._one_life(job, life)
            self._check_parent(job, before, survives, life)
            if kind is None:
                return
            survives = max(job.local() | job.remote(), key=lambda stem: int(stem.split("-")[1]), default=None)

    def _one_life(self, job: Job, life: Life) -> str | None:
        """Kill it once, or more often if only its transfer process is hit; None if it has ended by itself."""
        while self.killed < self._kills:
            kind = self._random.choices(["machine", "job", "trainer", "transfer"], [4, 3, 2, 1])[0]
            moment = self._wait_for_moment(job, life)
            if moment is None:
                break
            if self._strike(kind, job, life, moment):
                return kind
        self._wait_for_end(life)
        return None

    def _wait_for_moment(self, job: Job, life: Life) -> str | None:
        """Wait for a random one to kill at, and say which; None if the life ended before."""
        chance, saves = self._random.random(), self._random.randint(1, 3)
        if chance < 0.15:
            return self._pass(life, self._random.uniform(0, START_S), "starting")
        known, end = job.local(), monotonic() + LIFE_S
        seen = set(known)
        while len(seen := seen | job.local()) < len(known) + saves:
            if life.ended() is not None:
                return None
            if monotonic() > end:
                raise WrongError(f"no save within {LIFE_S:.0f} s:\n{life.said()}")
            sleep(0.01)
        return self._pass(life, self._random.uniform(0, AFTER_SAVE_S), f"after {saves} save(s)")

    def _pass(self, life: Life, seconds: float, moment: str) -> str | None:
        end = monotonic() + seconds
        while monotonic() < end and life.ended() is None:
            sleep(min(0.01, max(0.0, end - monotonic())))
        return moment if life.ended() is None else None

    def _strike(self, kind: str, job: Job, life: Life, moment: str) -> bool:
        """One kill; whether the life is over by it. A process that is not there is not killed."""
        victims = {"machine": (), "job": (TRAINER, COMMAND), "trainer": (TRAINER,), "transfer": (TRANSFER,)}[kind]
        # The command's own command line has the trainer's in it.
        found = self._processes.find(*victims) if kind != "trainer" else [*self._trainers()]
        if not found:
            return False
        what = (
            f"{len(found)} process(es) {moment}, {len(job.local())} save(s) on disk, {len(job.remote())} in the store"
        )
        if kind == "trainer":
            os.kill(found[0], signal.SIGKILL)
        elif kind == "transfer":
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            self._processes.kill(*victims)
        self.counts[kind] += 1
        lost = ""
        if kind != "transfer":
            life.process.wait(LIFE_S)
        if kind == "machine" and job.may_lose_disk() and self._random.random() < 0.6:
            job.lose_disk()
            self.counts["disks_lost"] += 1
            lost = ", and its disk"
        say(f"  kill {self.killed:3}  {job.name}  {kind}{lost}: {what}")
        if kind == "trainer" and life.process.returncode not in KILLED:
            raise WrongError(f"the command ended with {life.process.returncode}, not 137:\n{life.said()}")
        return kind != "transfer"

    def _trainers(self) -> Iterator[int]:
        for pid in self._processes.find(TRAINER):
            with contextlib.suppress(OSError):
                if COMMAND not in Path(f"/proc/{pid}/cmdline").read_text():
                    yield pid

    def _wait_for_end(self, life: Life) -> None:
        code = life.process.wait(LIFE_S)
        if code != 0:
            raise WrongError(f"the job ended by itself with {code}:\n{life.said()}")

    def _check_parent(self, job: Job, before: dict[int, str | None], survives: str | None, life: Life) -> None:
        """The attempt that the life began, if it came that far, descends from the newest that survived."""
        began = {number: parent for number, parent in job.attempts().items() if number not in before}
        if len(began) > 1:
            raise WrongError(f"one life began {len(began)} attempts")
        for number, parent in began.items():
            if step_of(parent) != step_of(survives):
                raise WrongError(
                    f"attempt {number} went on from {parent}, although {survives} was there:\n{life.said()}"
                )


def step_of(stem: str | None) -> int:
    """The step of a checkpoint; two attempts may save the same one, equal to the last bit. 0 for none."""
    return 0 if stem is None else int(stem.split("-")[1])


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def a_store(kind: str, folder: Path) -> Iterator[Store]:
    """An empty store of that kind, with its server."""
    if kind == "local":
        yield DirectoryStore(folder / "store")
        return
    from ckptmgr.testing import servers

    server_of = {"moto": servers.MotoServer, "oss": servers.OssServer, "weed": servers.WeedServer}
    with server_of[kind]() as server:
        server.create_bucket("soak")
        yield BucketStore(name=kind, scheme="oss" if kind == "oss" else "s3", server=server, bucket="soak")


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill, resume, compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20, help="how many (20)")
    parser.add_argument("--seed", type=int, default=20261129, help="of the choices (20261129)")
    parser.add_argument("--store", choices=["local", "moto", "oss", "weed"], default="moto", help="(moto)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (60)")
    parser.add_argument("--dir", type=Path, help="where to work (the system's temporary directory)")
    options = parser.parse_args(arguments)
    say(f"seed {options.seed}, {options.kills} kills, store {options.store}")
    started, wrong = monotonic(), ""
    folder = Path(tempfile.mkdtemp(prefix="soak-", dir=options.dir))
    with a_store(options.store, folder) as store:
        soak = Soak(store, folder, kills=options.kills, seed=options.seed, steps=options.steps)
        try:
            soak.play()
        except WrongError as error:
            wrong = str(error)
            print(f"error: {wrong}\n(seed {options.seed}; everything is in {folder})", file=sys.stderr, flush=True)
    if not wrong:
        shutil.rmtree(folder)
    counts = {name: soak.counts[name] for name in ("lives", "machine", "job", "trainer", "transfer", "disks_lost")}
    found = {
        "seed": options.seed,
        "kills": soak.killed,
        "runs": soak.runs,
        **counts,
        "seconds": round(monotonic() - started),
    }
    say(json.dumps({**found, "ok": not wrong}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
