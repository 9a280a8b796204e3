"""Measured processes, and what they move."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from _peers import HERE, Peers
from _stores import Place, Stores

DEADLINE_S = 900
MIB = 1 << 20
RUN = "run"


class Failed(Exception):
    """A measured process failed, or did not do what it was to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one process took.

    Attributes:
        wall_s: seconds; user_s and sys_s: of the processor, children included.
        base_mib: resident before it began; None for a program that is measured as a whole.
        peak_mib: resident at most.
        synced_s: of the seconds, those in which it waited for the disk; ours only.
        sent: bytes that the store was sent; None where nobody counted.
    """

    wall_s: float
    user_s: float
    sys_s: float
    peak_mib: float
    base_mib: float | None = None
    synced_s: float = 0.0
    imported: int = 0
    sent: int | None = None

    @property
    def cpu_s(self) -> float:
        return self.user_s + self.sys_s

    @property
    def extra_mib(self) -> float:
        return self.peak_mib - (self.base_mib or 0.0)


class Sources:
    """Directories to upload, filled with random bytes when they are first asked for.

    Args:
        size_mib: of the one file; the eight have a quarter each.
        small: how many small files, of 16 KiB.
        checkpoints: how many a long list has.
    """

    def __init__(self, directory: Path, *, size_mib: int, small: int, checkpoints: int) -> None:
        self._directory, self.checkpoints = directory, checkpoints
        quarter = max(1, size_mib // 4)
        self._files = {
            "one": {"model.safetensors": size_mib * MIB},
            "eight": {f"model-{number}.safetensors": quarter * MIB for number in range(1, 9)},
            "small": {f"shard-{number:05}.bin": 16 << 10 for number in range(small)},
        }

    def directory(self, source: str) -> Path:
        """The directory; its name ends in a step, as a trainer's."""
        directory = self._directory / source / "checkpoint-1"
        if not directory.exists():
            directory.mkdir(parents=True)
            for name, size in self._files[source].items():
                with (directory / name).open("wb") as file:
                    for start in range(0, size, 16 * MIB):
                        file.write(os.urandom(min(16 * MIB, size - start)))
        return directory

    def next_directory(self, source: str) -> Path:
        """The next step, in which one small file is new and all others are the same."""
        first = self.directory(source)
        directory = first.with_name("checkpoint-2")
        if not directory.exists():
            directory.mkdir()
            for path in first.iterdir():
                os.link(path, directory / path.name)
            (directory / "trainer_state.json").write_text('{"global_step": 2}')
        return directory

    def file(self, source: str) -> Path:
        """Its only file."""
        (name,) = self._files[source]
        return self.directory(source) / name

    def names(self, source: str) -> Sequence[str]:
        """Its files."""
        return list(self._files[source])

    def bytes_of(self, source: str) -> int:
        """Size of all its files."""
        return sum(self._files[source].values())


class Bench:
    """Runs measured processes.

    Args:
        directory: on the disk where sources, targets and the store's volumes are.
    """

    def __init__(self, directory: Path, stores: Stores, peers: Peers, sources: Sources) -> None:
        self.directory, self.stores, self.peers, self.sources = directory, stores, peers, sources
        self.home = directory / "home"
        self.home.mkdir()

    def environment(self, place: Place, home: Path | None = None) -> dict[str, str]:
        """Of a measured process: the caller's, except for what leads to other stores or keeps state from one measurement to another."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "OSS_", "XDG_"))}
        own = {
            "HOME": str(home or self.home),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_REGION": "us-east-1",
        }
        return {**kept, **own, **place.environment}

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[Measured, str]:
        """Run it, with nothing left to be written to the disk by whoever ran before.

        Returns:
            What the process took as a whole, and what it printed.

        Raises:
            Failed: it did.
        """
        os.sync()
        result = self.directory / "took"
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "_launch.py"), str(result), *command],
            env=environment,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )
        try:
            out, err = process.communicate(timeout=DEADLINE_S)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        if process.returncode != 0:
            raise Failed(f"{' '.join(command[:3])} … ended with {process.returncode}: {(err or out).strip()[-600:]}")
        wall_s, user_s, sys_s, peak_kib = map(float, result.read_text().split())
        return Measured(wall_s=wall_s, user_s=user_s, sys_s=sys_s, peak_mib=peak_kib / 1024), out

    def run_clocked(self, command: Sequence[str], environment: Mapping[str, str]) -> Measured:
        """Run what says itself, by `_clock.py`, what it took after its imports."""
        _, out = self.run(command, environment)
        return Measured(**json.loads(out.splitlines()[-1]))

    def ours(self, place: Place, action: str, path: Path | str, url: str, *more: str) -> Measured:
        """One action of `_ours.py`."""
        return self.run_clocked(self.command(action, path, url, *more), self.environment(place))

    def upload_saved(self, place: Place, directory: Path, url: str, *more: str) -> Measured:
        """The upload of a checkpoint that was saved before."""
        tier = self.directory / "tier"
        self.ours(place, "save", directory, url)
        try:
            return self.ours(place, "upload", "-", url, *more)
        finally:
            shutil.rmtree(tier)

    def create_run(self, place: Place, bucket: str) -> str:
        """The URL of an empty run."""
        url = f"s3://{bucket}/{RUN}"
        self.ours(place, "create", "-", url)
        return url

    @staticmethod
    def command(action: str, path: Path | str, url: str, *more: str) -> list[str]:
        """What runs one action of `_ours.py`."""
        return [sys.executable, str(HERE / "_ours.py"), action, str(path), url, *more]
