"""The rows of `transfer.py`: who moves what, to and from which store."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from _bench import MIB, RUN, Bench, Failed, Measured
from _listing import Listing
from _peers import Job
from _stores import NullPlace, Place

OURS = ("ours", "push", "bare", "cold", "warm")
PEERS = ("s5cmd", "rclone", "obstore", "s3fs")
UPLOADERS = ("ours", "push", "bare", *PEERS)
DOWNLOADERS = ("ours", "bare", *PEERS)


class Row(Protocol):
    """One question of the bench."""

    @property
    def title(self) -> str:
        """Of its lines in the page."""

    @property
    def clients(self) -> Sequence[str]:
        """Who can be asked."""

    def actions(
        self, bench: Bench, clients: Sequence[str], *more: str
    ) -> AbstractContextManager[Mapping[str, Callable[[], Measured]]]:
        """What measures each client once.

        Args:
            more: options for `_ours.py`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """All files of a source to a bucket of their own."""

    title: str
    place: str
    source: str
    clients: Sequence[str] = UPLOADERS

    @contextlib.contextmanager
    def actions(
        self, bench: Bench, clients: Sequence[str], *more: str
    ) -> Iterator[Mapping[str, Callable[[], Measured]]]:
        yield {client: partial(self._once, bench, client, *more) for client in clients}

    def _once(self, bench: Bench, client: str, *more: str) -> Measured:
        place, directory = bench.stores.place(self.place), bench.sources.directory(self.source)
        below = f"{RUN}/checkpoints/" if client in ("ours", "push") else f"{RUN}/"
        with place.bucket() as bucket:
            if client == "ours":
                found = bench.upload_saved(place, directory, f"s3://{bucket}/{RUN}", *more)
            elif client == "push":
                found = bench.ours(place, "push", directory, bench.create_run(place, bucket), *more)
            elif client == "bare":
                file = bench.sources.file(self.source)
                found = bench.ours(place, "put", file, f"s3://{bucket}/{RUN}/{file.name}", *more)
            else:
                found = move(bench, client, place, directory, bucket, RUN, up=True, small=self.source == "small")
            stored = sum(place.sizes(bucket, below).values())
        expect(stored, bench.sources.bytes_of(self.source), client)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A checkpoint, or what lies below it, to a directory that is not there before."""

    title: str
    place: str
    source: str
    clients: Sequence[str] = DOWNLOADERS

    @contextlib.contextmanager
    def actions(
        self, bench: Bench, clients: Sequence[str], *more: str
    ) -> Iterator[Mapping[str, Callable[[], Measured]]]:
        place = bench.stores.place(self.place)
        with place.bucket() as bucket:
            bench.ours(place, "push", bench.sources.directory(self.source), bench.create_run(place, bucket))
            (folder,) = {key.rpartition("/")[0] for key in place.sizes(bucket, f"{RUN}/checkpoints/")}
            yield {client: partial(self._once, bench, client, place, bucket, folder, *more) for client in clients}

    def _once(self, bench: Bench, client: str, place: Place, bucket: str, folder: str, *more: str) -> Measured:
        target = bench.directory / "target" / "checkpoint-1"
        target.mkdir(parents=True)
        try:
            if client == "ours":
                found = bench.ours(place, "resume", target, f"s3://{bucket}/{RUN}", *more)
            elif client == "bare":
                name = bench.sources.file(self.source).name
                found = bench.ours(place, "get", target / name, f"s3://{bucket}/{folder}/{name}", *more)
            else:
                found = move(bench, client, place, target, bucket, folder, up=False, small=self.source == "small")
            expect(sum(path.stat().st_size for path in target.iterdir()), bench.sources.bytes_of(self.source), client)
        finally:
            shutil.rmtree(target.parent)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Unchanged:
    """The next checkpoint, in which only a small file is new."""

    title: str
    place: str
    clients: Sequence[str] = ("ours",)

    @contextlib.contextmanager
    def actions(
        self, bench: Bench, clients: Sequence[str], *more: str
    ) -> Iterator[Mapping[str, Callable[[], Measured]]]:
        yield {client: partial(self._once, bench, *more) for client in clients}

    def _once(self, bench: Bench, *more: str) -> Measured:
        place, sources = bench.stores.place(self.place), bench.sources
        with place.bucket() as bucket:
            url = bench.create_run(place, bucket)
            bench.ours(place, "push", sources.directory("one"), url)
            found = counted(place, lambda: bench.ours(place, "push", sources.next_directory("one"), url, *more))
            files = [size for size in place.sizes(bucket, f"{RUN}/checkpoints/").values() if size >= MIB]
        expect(sum(files), 2 * sources.bytes_of("one"), "ours")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """The same push again, after one that was killed when 60 % had been read to be sent."""

    title: str
    place: str
    clients: Sequence[str] = ("ours",)

    @contextlib.contextmanager
    def actions(
        self, bench: Bench, clients: Sequence[str], *more: str
    ) -> Iterator[Mapping[str, Callable[[], Measured]]]:
        yield {client: partial(self._once, bench, *more) for client in clients}

    def _once(self, bench: Bench, *more: str) -> Measured:
        place, directory = bench.stores.place(self.place), bench.sources.directory("one")
        dies_after = str(bench.sources.bytes_of("one") * 6 // 10 // MIB)
        with place.bucket() as bucket:
            url = bench.create_run(place, bucket)
            with contextlib.suppress(Failed):
                bench.ours(place, "push", directory, url, "--die-after", dies_after)
                raise AssertionError("the first try was to be killed")
            found = counted(place, lambda: bench.ours(place, "push", directory, url, *more))
            expect(sum(place.sizes(bucket, f"{RUN}/checkpoints/").values()), bench.sources.bytes_of("one"), "ours")
        return found


def counted(place: Place, action: Callable[[], Measured]) -> Measured:
    """With the bytes that the store was sent meanwhile, where it counts them."""
    if not isinstance(place, NullPlace):
        return action()
    before = place.server.received
    found = action()
    return replace(found, sent=place.server.received - before)


def move(
    bench: Bench, client: str, place: Place, directory: Path, bucket: str, prefix: str, *, up: bool, small: bool
) -> Measured:
    """One transfer by one of the others."""
    environment = bench.environment(place)
    job = Job(
        up=up,
        directory=directory,
        bucket=bucket,
        prefix=prefix,
        endpoint=place.endpoint,
        environment=environment,
        is_small=small,
    )
    command = bench.peers.command(client, job)
    if client in ("s5cmd", "rclone"):
        return bench.run(command, environment)[0]
    return bench.run_clocked(command, environment)


def expect(count: int, wanted: int, client: str) -> None:
    """A measurement of something else than what was asked for is none."""
    if count != wanted:
        raise Failed(f"{client} moved {count} bytes of {wanted}")


def _without_bare(clients: Sequence[str]) -> Sequence[str]:
    return [client for client in clients if client != "bare"]


ROWS: Mapping[str, Row] = {
    "up1": Upload(title="upload, 1 file, http", place="http", source="one"),
    "up1_https": Upload(title="upload, 1 file, https", place="https", source="one"),
    "up1_null": Upload(title="upload, 1 file, null server", place="null", source="one"),
    "up8": Upload(title="upload, 8 files, http", place="http", source="eight", clients=_without_bare(UPLOADERS)),
    "down1": Download(title="download, 1 file, http", place="http", source="one"),
    "down1_https": Download(title="download, 1 file, https", place="https", source="one"),
    "small": Upload(title="upload, small files, http", place="http", source="small", clients=_without_bare(UPLOADERS)),
    "small_down": Download(
        title="download, small files, http", place="http", source="small", clients=_without_bare(DOWNLOADERS)
    ),
    "list": Listing(title="list of checkpoints, http", place="http"),
    "unchanged": Unchanged(title="upload, 1 unchanged file, http", place="http"),
    "unchanged_null": Unchanged(title="upload, 1 unchanged file, null server", place="null"),
    "repeat_null": Repeat(title="the rest of a killed upload, null server", place="null"),
}
