"""The row of a long list: `ckptmgr ls` of a run of many checkpoints, beside the names alone by s5cmd."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from _bench import RUN, Bench, Failed, Measured
from _many import fill
from _peers import Job
from _stores import Place

WRITERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """`ckptmgr ls --json` with metrics, by a machine that never saw the run (`cold`) and by one that did (`warm`); whole processes."""

    title: str
    place: str
    clients: Sequence[str] = ("cold", "warm", "s5cmd")

    @contextlib.contextmanager
    def actions(
        self, bench: Bench, clients: Sequence[str], *more: str
    ) -> Iterator[Mapping[str, Callable[[], Measured]]]:
        place, count = bench.stores.place(self.place), bench.sources.checkpoints
        with place.bucket() as bucket, tempfile.TemporaryDirectory(dir=bench.directory) as home:
            url = bench.create_run(place, bucket)
            _fill_run(bench, place, bucket, count)
            if "warm" in clients:
                _ours(bench, place, url, count, Path(home))
            known = {
                "cold": partial(_cold, bench, place, url, count, *more),
                "warm": partial(_ours, bench, place, url, count, Path(home), *more),
                "s5cmd": partial(_s5cmd, bench, place, bucket, count),
            }
            yield {client: known[client] for client in clients}


def _fill_run(bench: Bench, place: Place, bucket: str, count: int) -> None:
    run = json.loads(place.read(bucket, f"{RUN}/run.json"))
    with tempfile.TemporaryDirectory(dir=bench.directory) as made:
        fill(Path(made), run_uuid=run["uuid"], count=count)
        paths = [path for path in Path(made).rglob("*") if path.is_file()]
        with ThreadPoolExecutor(WRITERS) as pool:
            list(
                pool.map(lambda path: place.write(bucket, f"{RUN}/{path.relative_to(made)}", path.read_bytes()), paths)
            )


def _cold(bench: Bench, place: Place, url: str, count: int, *more: str) -> Measured:
    with tempfile.TemporaryDirectory(dir=bench.directory) as home:
        return _ours(bench, place, url, count, Path(home), *more)


def _ours(bench: Bench, place: Place, url: str, count: int, home: Path, *more: str) -> Measured:
    environment = bench.environment(place, home)
    if more:  # a profile, which needs the process to be ours
        return bench.run_clocked(bench.command("ls", "-", url, *more), environment)
    script = Path(sys.executable).with_name("ckptmgr")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "ckptmgr.cli.main"]
    found, out = bench.run([*command, "ls", url, "--json"], environment)
    listed = json.loads(out)["checkpoints"]
    if len(listed) != count or "eval_loss" not in listed[0]["metrics"]:
        raise Failed(f"ckptmgr ls tells of {len(listed)} checkpoints of {count}")
    return found


def _s5cmd(bench: Bench, place: Place, bucket: str, count: int) -> Measured:
    environment = bench.environment(place)
    job = Job(up=False, directory=bench.directory, bucket=bucket, prefix=f"{RUN}/manifests", endpoint=place.endpoint)
    found, out = bench.run(bench.peers.listing(job), environment)
    if len(out.splitlines()) != count:
        raise Failed(f"s5cmd ls tells of {len(out.splitlines())} objects of {count}")
    return found
