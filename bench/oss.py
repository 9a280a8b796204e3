"""What a transfer to and from OSS costs the machine beside oss2's own: processor time of the client, and that every byte is proven.

    python bench/oss.py [--size-mib 1024] [--rounds 5] [--assert] [--record docs/benchmarks.md]

Each transfer runs in a process of its own, against a server in C that stores nothing and answers the CRC-64 of all it is sent. After each upload that CRC is asked for and
compared with the source's, computed here. The last line of the output is JSON: `oss_cpu_vs_oss2` (with all digests of a save), `oss_put_cpu_vs_oss2` (the upload alone)
and `oss_down_cpu_vs_oss2` are medians of ratios.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median

import fastcrc
from _null_oss import NullOss, environment_without_stores
from _report import Limit, finish, interleaved, machine, parser, verdicts, warn_if_busy

LIMITS = {"oss_cpu_vs_oss2": Limit(at_most=0.35)}
TITLES = {
    "up": "ckptmgr, BLAKE3 and both CRCs, then the upload",
    "put": "ckptmgr, the upload alone; its CRC",
    "oss2-up": "oss2 `resumable_upload`; its CRC",
    "oss2-up-bare": "oss2 `resumable_upload`; no CRC",
    "down": "ckptmgr, download; its CRC",
    "oss2-down": "oss2 `resumable_download`; its CRC",
}
RATIOS = {
    "oss_cpu_vs_oss2": ("up", "oss2-up"),
    "oss_put_cpu_vs_oss2": ("put", "oss2-up"),
    "oss_down_cpu_vs_oss2": ("down", "oss2-down"),
}
PACKAGES = ("ckptmgr", "oss2", "requests", "urllib3", "crcmod", "fastcrc", "blake3")
MIB = 1 << 20
ZEROS = "zeros"

Taken = dict[str, float]


class Transfers:
    """The transfers of one file."""

    def __init__(self, server: NullOss, directory: Path, size_mib: int) -> None:
        self._server = server
        self._source = directory / "source"
        self._target = directory / "target"
        self._crc = write_random(self._source, size_mib)
        self._size_mib = size_mib
        self._number = 0
        # What the server hands out is zeros, and so must be what it has the CRC of.
        zeros = directory / "zeros"
        zeros.touch()
        os.truncate(zeros, size_mib * MIB)
        self._run("up", zeros, ZEROS)

    def transfer(self, action: str) -> Taken:
        """One, in a process of its own; an upload that does not arrive as it was is the end of everything."""
        self._number += 1
        if action in ("down", "oss2-down"):
            taken = self._run(action, self._target, ZEROS)
            self._target.unlink()
            return taken
        key = f"{action}-{self._number}"
        taken = self._run(action, self._source, key)
        if self._server.crc(key) != self._crc:
            sys.exit(f"error: {TITLES[action]}: the store has CRC-64 {self._server.crc(key)}, the source {self._crc}")
        return taken

    def _run(self, action: str, path: Path, key: str) -> Taken:
        script = str(Path(__file__).with_name("_oss_action.py"))
        command = [sys.executable, script, action, str(path), key, str(self._size_mib)]
        environment = environment_without_stores() | self._server.environment
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        taken: Taken = json.loads(done.stdout)
        return taken


def write_random(path: Path, size_mib: int) -> int:
    """A file of random bytes; its CRC-64/XZ."""
    crc = 0
    with path.open("wb") as file:
        for _ in range(size_mib):
            block = os.urandom(MIB)
            file.write(block)
            crc = fastcrc.crc64.xz(block, crc)
    return crc


def cpu_s(taken: Taken) -> float:
    """User and system seconds."""
    return taken["user_s"] + taken["sys_s"]


def ratios(found: dict[str, list[Taken]]) -> dict[str, float]:
    """Medians of the ratios of one round."""
    return {
        name: round(median(cpu_s(a) / cpu_s(b) for a, b in zip(found[ours], found[theirs], strict=True)), 3)
        for name, (ours, theirs) in RATIOS.items()
    }


def report(found: dict[str, list[Taken]], size_mib: int, rounds: int) -> str:
    """The measurement as a Markdown section."""
    rows = [
        f"| {title} | {median(map(cpu_s, found[name])):.2f} | {min(map(cpu_s, found[name])):.2f} | {max(map(cpu_s, found[name])):.2f} "
        f"| {median(each['wall_s'] for each in found[name]):.2f} "
        f"| {max(each['peak_mib'] - each['base_mib'] for each in found[name]):.0f} |"
        for name, title in TITLES.items()
    ]
    return "\n".join(
        [
            "## OSS",
            "",
            f"`python bench/oss.py --size-mib {size_mib} --rounds {rounds}`: one file of {size_mib} MiB in parts of 32 MiB, 4 at a time, over HTTP on this machine, to and from a server that",
            f"stores nothing; {rounds} interleaved rounds. Seconds of the client's processor, user and system; imports are not in them. After each upload the server's CRC-64 was that",
            "of the file.",
            "",
            "| | CPU, median | least | most | wall, median | more memory, MiB |",
            "| --- | ---: | ---: | ---: | ---: | ---: |",
            *rows,
            "",
            verdicts(ratios(found), LIMITS),
            "",
            f"{machine(PACKAGES)}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when the ratio is above its limit."""
    options_of = parser(__doc__, rounds=5)
    options_of.add_argument("--size-mib", type=int, default=1024, help="size of the file (1024)")
    options_of.add_argument("--dir", type=Path, help="where to write; by default the directory for temporary files")
    options = options_of.parse_args(arguments)
    warn_if_busy()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory, NullOss(Path(directory)) as server:
        transfers = Transfers(server, Path(directory), options.size_mib)
        found = interleaved({name: partial(transfers.transfer, name) for name in TITLES}, options.rounds)
    section = report(found, options.size_mib, options.rounds)
    return finish(options, section, ratios(found), LIMITS, hint="is the machine idle?")


if __name__ == "__main__":
    sys.exit(main())
