"""How much an upload slows down the training beside it, and training the upload.

    python bench/interference.py [--size-mib 1024] [--rounds N] [--boto3-rounds N] [--dir DIR] [--assert] [--record docs/benchmarks.md]

Two loops stand for training: one of pure Python, and one of 128x128 matrix products on one thread, which takes the interpreter lock as often as small
kernels do. The training process is pinned to one core; the transfer process that `CheckpointManager` starts, and a server that hashes nothing
(`null_s3.c`), are pinned to another. Each round uploads a checkpoint of 1 GiB three times, each time in another order: beside nothing, beside the one
loop, beside the other; each loop runs alone right before and after. The checkpoint is committed locally before: the server holds its upload back until
the loop begins, and the loop ends when the server has the manifest.

The last line of the output is a JSON object with the medians, over the rounds, of `python_loop_speed` and `matmul_loop_speed` (beside an upload,
as a share of alone), and of `upload_slowdown` (time beside a loop to time beside nothing, for the worse of the two loops).

For comparison boto3's `upload_file` of as many bytes, in a thread of the training process: pinned to the other core too, so that the two
share the interpreter lock and nothing else.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, process_time, sleep, thread_time
from typing import Any

import torch
from _null_s3 import BUCKET, NullS3
from _report import Limit, finish, interleaved, machine, parser, verdicts

from ckptmgr.training.manager import CheckpointManager

LIMITS = {
    "python_loop_speed": Limit(at_least=0.95),
    "matmul_loop_speed": Limit(at_least=0.95),
    "upload_slowdown": Limit(at_most=1.3),
}
LOOPS = ("python", "matmul")
TITLES = {"idle": "nothing", "python": "a Python loop", "matmul": "a loop of 128x128 products"}
PACKAGES = ("ckptmgr", "torch", "boto3", "awscrt")
ALONE_S = 0.5
DEADLINE_S = 120.0
MIB = 1 << 20


def python_loop(goes_on: Callable[[], bool]) -> int:
    """Turns of a loop that only the interpreter works in."""
    turns, found = 0, dict[int, int]()
    while goes_on():
        for number in range(200):
            found[number % 50] = number * 3
        turns += 1
    return turns


def matmul_loop(goes_on: Callable[[], bool]) -> int:
    """Turns of a loop of small kernels, each of which lets go of the interpreter lock and takes it again."""
    turns, value, weights = 0, torch.randn(128, 128), torch.randn(128, 128)
    while goes_on():
        value = torch.relu(value @ weights)
        value = value / value.norm()
        turns += 1
    return turns


def no_loop(goes_on: Callable[[], bool]) -> int:
    """A trainer that waits."""
    while goes_on():
        sleep(0.001)
    return 0


RUN = {"idle": no_loop, "python": python_loop, "matmul": matmul_loop}


@dataclass(frozen=True, slots=True)
class Timed:
    """An upload beside a loop.

    Attributes:
        seconds: that it took.
        speed: turns of the loop in a second.
        alone: the same just before and after, with nothing beside it.
        threads: CPU seconds in a second that other threads of the training process took.
    """

    seconds: float
    speed: float
    alone: float = 0.0
    threads: float = 0.0


def beside(loop: str, goes_on: Callable[[], bool]) -> Timed:
    """Run `loop` for as long as `goes_on` says."""
    start, all_cpu, own_cpu = perf_counter(), process_time(), thread_time()
    turns = RUN[loop](goes_on)
    seconds = perf_counter() - start
    others_cpu = (process_time() - all_cpu) - (thread_time() - own_cpu)
    return Timed(seconds, turns / seconds, threads=others_cpu / seconds)


def until_commit(server: NullS3, timeout_s: float) -> Callable[[], bool]:
    """What a loop asks at each turn: whether the server still waits for the next manifest. The same, and as costly, when a loop runs alone."""
    before, end = server.commits, monotonic() + timeout_s
    return lambda: server.commits == before and monotonic() < end


def compared(server: NullS3, loop: str, upload: Callable[[], Timed]) -> Timed:
    """What `upload` measures, and the loop alone before and after: whatever else slows the machine for a while slows them alike."""
    if loop == "idle":
        return upload()
    before = beside(loop, until_commit(server, ALONE_S))
    timed = upload()
    after = beside(loop, until_commit(server, ALONE_S))
    return replace(timed, alone=(before.speed + after.speed) / 2)


class Ours:
    """A manager with its transfer process, which is pinned to `cores` and has nothing to do yet."""

    def __init__(self, server: NullS3, directory: Path, size_mib: int, cores: set[int]) -> None:
        self._server = server
        tensors = [torch.rand(4 * MIB) for _ in range(max(1, size_mib // 16))]
        self._state: Mapping[str, Any] = {"weights": tensors}
        self._manager = CheckpointManager(
            f"s3://{BUCKET}/{directory.name}", local_dir=directory / "tier", transfer="process"
        )
        self._manager.begin()
        self._pid = transfer_process()
        for thread in os.listdir(f"/proc/{self._pid}/task"):
            os.sched_setaffinity(int(thread), cores)
        self._step = 0

    def upload(self, loop: str) -> Timed:
        """Commit a save locally, then time its upload beside `loop`."""
        server = self._server
        self._step += 1
        # What has not changed would be copied within the store.
        self._state["weights"][0][0] = self._step
        server.hold()
        self._manager.save(self._step, self._state, wait=True)
        server.wait_for_held(DEADLINE_S)

        def upload() -> Timed:
            goes_on = until_commit(server, DEADLINE_S)
            server.let_go()
            timed = beside(loop, goes_on)
            self._settle()
            return timed

        return compared(server, loop, upload)

    def _settle(self) -> None:
        end = monotonic() + DEADLINE_S
        while (uploads := self._manager.status().uploads).pending and monotonic() < end:
            sleep(0.01)
        if uploads.pending or uploads.failures or uploads.host != "process" or transfer_process() != self._pid:
            sys.exit(f"error: the upload of step {self._step} did not go as it should: {uploads}")
        sleep(0.2)  # what the process does after a commit is not the next round's

    def close(self) -> None:
        self._manager.close()


def transfer_process() -> int:
    """The transfer process of this one."""
    end = monotonic() + DEADLINE_S
    while monotonic() < end:
        for task in os.listdir("/proc/self/task"):
            for pid in Path(f"/proc/self/task/{task}/children").read_text().split():
                if b"ckptmgr.transfer.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
        sleep(0.01)
    sys.exit("error: the manager has no transfer process")


def boto3_upload(server: NullS3, path: Path, cores: set[int], loop: str) -> Timed:
    """Upload the file with boto3 in a thread of this process, beside `loop`."""
    import boto3

    # Made before: what is measured is the transfer.
    client = boto3.client("s3")
    over = threading.Event()

    def upload() -> None:
        os.sched_setaffinity(0, cores)  # of this thread, and of those that it starts
        client.upload_file(str(path), BUCKET, path.name)
        over.set()

    def timed() -> Timed:
        thread = threading.Thread(target=upload)
        thread.start()
        found = beside(loop, lambda: not over.is_set())
        thread.join()
        return found

    return compared(server, loop, timed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Per round: uploads of ours beside each loop, and boto3's in a thread.

    Attributes:
        load: of the machine when it began: anything else that runs there takes from the loops, more at one time than at another.
    """

    ours: Mapping[str, Sequence[Timed]]
    boto3: Mapping[str, Sequence[Timed]]
    load: float


def measure(size_mib: int, rounds: int, boto3_rounds: int, directory: Path) -> Measured:
    """All of it."""
    load, cores = os.getloadavg()[0], sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        sys.exit("error: this needs two cores: one for training, one for the transfer process and the server")
    others = {cores[1]}
    with NullS3(directory, cores=others) as server:
        os.environ.update(server.environment)
        # All threads of this process from here on.
        os.sched_setaffinity(0, {cores[0]})
        torch.set_num_threads(1)
        ours = Ours(server, directory, size_mib, others)
        actions: dict[str, Callable[[], Timed]] = {name: partial(ours.upload, name) for name in RUN}
        found, theirs = interleaved(actions, rounds), dict[str, list[Timed]]()
        ours.close()
        if boto3_rounds:
            path = directory / "file"
            with path.open("wb") as file:
                for _ in range(size_mib):
                    file.write(os.urandom(MIB))
            beside_boto3 = {name: partial(boto3_upload, server, path, others, name) for name in RUN}
            theirs = interleaved(beside_boto3, boto3_rounds, warm_up=False)
    return Measured(ours=found, boto3=theirs, load=load)


def speed(uploads: Mapping[str, Sequence[Timed]], loop: str) -> float:
    """Median over the rounds of the loop's speed beside an upload, as a share of its speed alone."""
    return median(one.speed / one.alone for one in uploads[loop])


def slowdown(uploads: Mapping[str, Sequence[Timed]], loop: str) -> float:
    """Median over the rounds of the upload's time beside the loop to its time beside nothing."""
    return median(one.seconds / other.seconds for one, other in zip(uploads[loop], uploads["idle"], strict=True))


def ratios(measured: Measured) -> dict[str, float]:
    """The numbers that have a limit."""
    found = {f"{loop}_loop_speed": round(speed(measured.ours, loop), 3) for loop in LOOPS}
    return {**found, "upload_slowdown": round(max(slowdown(measured.ours, loop) for loop in LOOPS), 3)}


def report(measured: Measured, size_mib: int, rounds: int) -> str:
    """The measurement as a Markdown section."""
    rows = []
    for title, uploads in (("transfer process", measured.ours), ("boto3 in a thread", measured.boto3)):
        for loop, timed in uploads.items():
            seconds = median(one.seconds for one in timed)
            share = "" if loop == "idle" else f"{speed(uploads, loop):.1%}"
            threads = f"{median(one.threads for one in timed):.1%}"
            rows.append(f"| {title} | {TITLES[loop]} | {seconds:.2f} | {share} | {threads} |")
    turns = [f"{median(one.alone for one in measured.ours[loop]):.0f} turns/s of {TITLES[loop]}" for loop in LOOPS]
    how = (
        f"`python bench/interference.py --rounds {rounds}`: {size_mib} MiB to a server that hashes nothing. Training on one core, "
        f"the transfer process (or boto3's threads) and the server on another; medians of {rounds} interleaved rounds."
    )
    return "\n".join(
        [
            "## Upload beside training",
            "",
            how,
            "",
            "| upload by | beside | upload, s | speed of the loop | CPU of other threads there |",
            "| --- | --- | ---: | ---: | ---: |",
            *rows,
            "",
            f"Alone: {', '.join(turns)}.",
            "",
            verdicts(ratios(measured), LIMITS),
            "",
            f"{machine(PACKAGES)}; load before {measured.load:.1f}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when a ratio breaks its limit."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--size-mib", type=int, default=1024, help="size of the checkpoint (1024)")
    made.add_argument("--boto3-rounds", type=int, default=1, help="how often boto3 is measured; 0: not at all (1)")
    made.add_argument("--dir", type=Path, help="a directory on the disk to use (the system's temporary one)")
    options = made.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="interference-", dir=options.dir) as directory:
        measured = measure(options.size_mib, options.rounds, options.boto3_rounds, Path(directory))
    section = report(measured, options.size_mib, options.rounds)
    hint = "is the machine idle? see `top`, and transfer/child.py for what the trainer does meanwhile"
    return finish(options, section, ratios(measured), LIMITS, hint=hint)


if __name__ == "__main__":
    sys.exit(main())
