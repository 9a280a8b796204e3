"""The measurements of `transfer.py`: who moves what, to and from which store. Each is a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _peers import HERE, Job, Peers
from _stores import Place, Stores

DEADLINE_S = 900
MIB = 1 << 20
RUN = "run"
OURS = ("ours", "bare")
PEERS = ("s5cmd", "rclone", "obstore", "s3fs")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the bench: all files of a source to a place, or from there."""

    title: str
    place: str
    up: bool
    source: str
    clients: tuple[str, ...] = (*OURS, *PEERS)


NOT_BARE = ("ours", *PEERS)
ROWS = {
    "up1": Row(title="upload, 1 file, http", place="http", up=True, source="one"),
    "up1_https": Row(title="upload, 1 file, https", place="https", up=True, source="one"),
    "up1_null": Row(title="upload, 1 file, null server", place="null", up=True, source="one"),
    "up8": Row(title="upload, 8 files, http", place="http", up=True, source="eight", clients=NOT_BARE),
    "down1": Row(title="download, 1 file, http", place="http", up=False, source="one"),
    "down1_https": Row(title="download, 1 file, https", place="https", up=False, source="one"),
    "small": Row(title="upload, small files, http", place="http", up=True, source="small", clients=NOT_BARE),
    "small_down": Row(title="download, small files, http", place="http", up=False, source="small", clients=NOT_BARE),
}


class Sources:
    """Directories to upload, filled with random bytes when they are first asked for.

    Args:
        size_mib: of the one file; the eight have a quarter each.
        small: how many small files, of 16 KiB.
    """

    def __init__(self, directory: Path, *, size_mib: int, small: int) -> None:
        self._directory = directory
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

    def file(self, source: str) -> Path:
        """Its only file."""
        (name,) = self._files[source]
        return self.directory(source) / name

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
        self._home = directory / "home"
        self._home.mkdir()

    def environment(self, place: Place, home: Path | None = None) -> dict[str, str]:
        """Of a measured process: the caller's, except for what leads to other stores or keeps state from one measurement to another."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "OSS_", "XDG_"))}
        own = {
            "HOME": str(home or self._home),
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_REGION": "us-east-1",
        }
        return {**kept, **own, **place.environment}

    def run(self, command: list[str], environment: Mapping[str, str], *, may_die: bool = False) -> Measured | None:
        """Run it, with nothing left to be written to the disk by whoever ran before.

        Returns:
            None when it `may_die` and did.
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
            if may_die:
                return None
            raise Failed(f"{' '.join(command[:3])} … ended with {process.returncode}: {(err or out).strip()[-600:]}")
        wall_s, user_s, sys_s, peak_kib = map(float, result.read_text().split())
        whole = {"wall_s": wall_s, "user_s": user_s, "sys_s": sys_s, "peak_mib": peak_kib / 1024}
        return Measured(**(json.loads(out.splitlines()[-1]) if "_clock" in _kinds(command) else whole))

    def ours(
        self, place: Place, action: str, path: Path | str, url: str, *more: str, may_die: bool = False
    ) -> Measured | None:
        """One action of `_ours.py`."""
        command = [sys.executable, str(HERE / "_ours.py"), action, str(path), url, *more]
        return self.run(command, self.environment(place), may_die=may_die)

    def move(
        self, row: Row, client: str, place: Place, bucket: str, prefix: str, directory: Path, *more: str
    ) -> Measured:
        """One transfer between `directory` and `bucket/prefix`.

        Args:
            prefix: of ours, a run on the way up; the folder of the checkpoint on the way down.
            more: for `_ours.py`.
        """
        verb = {("ours", True): "push", ("ours", False): "resume", ("bare", True): "put", ("bare", False): "get"}
        if client == "ours":
            url = f"s3://{bucket}/{prefix if row.up else RUN}"
            found = self.ours(place, verb[client, row.up], directory, url, *more)
        elif client == "bare":
            name = self.sources.file(row.source).name
            found = self.ours(place, verb[client, row.up], directory / name, f"s3://{bucket}/{prefix}/{name}")
        else:
            environment = self.environment(place)
            job = Job(
                up=row.up,
                directory=directory,
                bucket=bucket,
                prefix=prefix,
                endpoint=place.endpoint,
                environment=environment,
                is_small=row.source == "small",
            )
            found = self.run(self.peers.command(client, job), environment)
        assert found is not None
        return found

    @contextlib.contextmanager
    def actions(self, row: Row, clients: list[str], *more: str) -> Iterator[dict[str, Callable[[], Measured]]]:
        """What measures each client once."""
        place = self.stores.place(row.place)
        if row.up:
            yield {client: partial(self._up, row, client, place, *more) for client in clients}
            return
        with place.bucket() as bucket:
            self._push(place, bucket, self.sources.directory(row.source))
            (folder,) = {key.rpartition("/")[0] for key in place.sizes(bucket, f"{RUN}/checkpoints/")}
            yield {client: partial(self._down, row, client, place, bucket, folder, *more) for client in clients}

    def _push(self, place: Place, bucket: str, directory: Path) -> None:
        self.ours(place, "create", "-", f"s3://{bucket}/{RUN}", may_die=False)
        self.ours(place, "push", directory, f"s3://{bucket}/{RUN}")

    def _up(self, row: Row, client: str, place: Place, *more: str) -> Measured:
        directory = self.sources.directory(row.source)
        with place.bucket() as bucket:
            if client == "ours":
                self.ours(place, "create", "-", f"s3://{bucket}/{RUN}")
            found = self.move(row, client, place, bucket, RUN, directory, *more)
            stored = sum(place.sizes(bucket, f"{RUN}/checkpoints/" if client == "ours" else f"{RUN}/").values())
        self._expect(stored, row, client)
        return found

    def _down(self, row: Row, client: str, place: Place, bucket: str, folder: str, *more: str) -> Measured:
        target = self.directory / "target" / "checkpoint-1"
        target.mkdir(parents=True)
        try:
            found = self.move(row, client, place, bucket, folder, target, *more)
            self._expect(sum(path.stat().st_size for path in target.iterdir()), row, client)
        finally:
            shutil.rmtree(target.parent)
        return found

    def _expect(self, count: int, row: Row, client: str) -> None:
        if count != self.sources.bytes_of(row.source):
            raise Failed(f"{client} moved {count} bytes of {self.sources.bytes_of(row.source)}")


class Failed(Exception):
    """A measured process failed, or did not do what it was to do."""


def _kinds(command: list[str]) -> str:
    """Which clock tells what `command` took: its own, or that of whoever started it."""
    own = {"_ours.py", "_libraries.py"}
    return "_clock" if len(command) > 1 and Path(command[1]).name in own and command[2] != "create" else "whole"
