"""Cases of sizes: more than one request may carry, and than there may be parts, against a store that holds to the limits of S3."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.parts import PART_BYTES, plan_parts
from ckptmgr.testing.sparse import MAX_BYTES, MAX_PARTS, MIB, MIN_PART_BYTES, SparseServer

Cli = Callable[..., subprocess.CompletedProcess[str]]
Ask = Callable[..., Any]
KIB, GIB = 1 << 10, 1 << 30


def serve(server: SparseServer, monkeypatch: pytest.MonkeyPatch) -> SparseServer:
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> Iterator[SparseServer]:
    """A store with the limits of S3 that keeps no zeros."""
    with SparseServer() as server:
        yield serve(server, monkeypatch)


def write_with_holes(directory: Path, size: int, marks: dict[int, bytes]) -> Path:
    """A checkpoint whose model has `size` bytes, zero but for `marks`; it takes next to no disk."""
    directory.mkdir()
    (directory / "step").write_bytes(b"100")
    with open(directory / "model.safetensors", "wb") as file:
        file.truncate(size)
        for offset, mark in marks.items():
            file.seek(offset)
            file.write(mark)
    return directory


# --- K106 -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size", [1, 5 * MIB, 5 * GIB, 489 * GIB // 10, 80 * GIB, 1 << 40], ids=lambda size: f"{size / GIB:.3g}GiB"
)
@pytest.mark.parametrize("asked", [MIN_PART_BYTES, PART_BYTES, MAX_BYTES], ids=["5MiB", "default", "5GiB"])
def test_k106_every_plan_holds_to_the_limits(size: int, asked: int) -> None:
    """At most 10,000 parts, each but the last from 5 MiB to 5 GiB, whatever size was asked for."""
    parts = list(plan_parts(size, asked))
    assert 1 <= len(parts) <= MAX_PARTS
    assert all(MIN_PART_BYTES <= part.length <= MAX_BYTES for part in parts[:-1])
    assert 0 < parts[-1].length <= MAX_BYTES
    assert [part.offset for part in parts] == [number * parts[0].length for number in range(len(parts))]
    assert sum(part.length for part in parts) == size


@pytest.mark.parametrize(
    ("size", "parts"), [(1, []), (5 * MIB, []), (10 * MIB + 1, [1, 5 * MIB, 5 * MIB]), (15 * MIB, [5 * MIB] * 3)]
)
def test_k106_the_smallest_parts_are_taken(
    sparse: SparseServer,
    ask: Ask,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    parts: list[int],
) -> None:
    """By a store that refuses smaller ones: parts of 5 MiB, and a last one of a byte."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "5MiB")
    stem = ask("push", write_with_holes(tmp_path / "checkpoint-100", size, {0: b"!"}), "s3://bkt/run")["id"]
    assert sorted(count for what, count in sparse.moved if what == "part") == parts
    assert sparse.objects[f"bkt/run/checkpoints/{stem}/model.safetensors"].size == size


def test_k106_parts_that_are_too_small_are_refused_in_one_line(
    sparse: SparseServer, cli_here: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is sent, and not at the last part."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "4MiB")
    refused = cli_here("push", write_with_holes(tmp_path / "checkpoint-100", 15 * MIB, {}), "s3://bkt/run")
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "parts of 4194304 bytes are too small" in line
    assert "CKPTMGR_PART_SIZE to 5120KiB" in line
    assert sparse.objects == {}


@pytest.mark.slow
def test_k106_more_parts_than_there_may_be_become_larger_ones(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,486 parts of the 100 KiB that OSS takes at least would fail at part 10,001: 1 GiB goes up in fewer."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "100KiB")
    with SparseServer(min_part_bytes=100 * KIB) as server:
        serve(server, monkeypatch)
        stem = ask("push", write_with_holes(tmp_path / "checkpoint-100", GIB, {GIB - 1: b"!"}), "oss://bkt/run")["id"]
        sent = [count for what, count in server.moved if what == "part"]
        assert sum(sent) == GIB > 10_001 * 100 * KIB
        assert len(sent) <= MAX_PARTS
        key = f"bkt/run/checkpoints/{stem}/model.safetensors"
        assert (server.objects[key].size, server.bytes_at(key, GIB - 2, 2)) == (GIB, b"\0!")


# --- K048 -----------------------------------------------------------------------------------------------------------------

# Runs one command, whose downloads leave holes where they would write zeros, and prints what it took of memory at most.
CHILD = """
import contextlib, os, sys
from ckptmgr.backends import parts
from ckptmgr.cli.main import run

write = os.pwrite
parts.reserve = os.ftruncate
parts.pipe_for = lambda incoming, size: contextlib.nullcontext()
os.pwrite = lambda fd, block, at: len(block) if bytes(block) == bytes(len(block)) else write(fd, block, at)
code = run(sys.argv[1:])
with open("/proc/self/status") as status:
    # Not ru_maxrss, which a process has from its parent, of before it was another program.
    print(next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmHWM:")))
sys.exit(code)
"""


SIX_GIB = 6 * GIB
MARKS = {offset: os.urandom(MIB) for offset in (0, 4 * GIB, 5 * GIB, SIX_GIB - MIB)}
URL = "s3://bkt/run"


class Large:
    """A checkpoint of 6 GiB in a store of its own; `id` is what was pushed."""

    def __init__(self, server: SparseServer, directory: Path) -> None:
        self.server, self.directory = server, directory
        self.id = self.ask("push", directory, URL)["id"]
        self.sent = self.moved()

    def ask(self, *words: object) -> Any:
        """The document of a command, in a process of its own that must not take 512 MiB."""
        command = [sys.executable, "-c", CHILD, *map(str, words), "--json"]
        environment = {**os.environ, **self.server.env}
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False, env=environment)
        assert done.returncode == 0, done.stderr
        *document, peak_mib = done.stdout.splitlines()
        assert int(peak_mib) < 512
        return json.loads("".join(document))

    def moved(self) -> Counter[str]:
        """The bytes that were moved since the last call, by the kind of request. None moved more than there may be."""
        total = Counter[str]()
        for what, count in self.server.moved:
            assert count <= MAX_BYTES
            total[what] += count
        self.server.moved.clear()
        return total


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, _no_real_cloud: None) -> Iterator[Large]:
    with SparseServer() as server:
        directory = tmp_path_factory.mktemp("large") / "checkpoint-100"
        yield Large(server, write_with_holes(directory, SIX_GIB, MARKS))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the peak is read from /proc")
class TestK048:
    """6 GiB with marks at 0, 4 GiB, 5 GiB and the end: no request carries or copies more than 5 GiB, no command takes 512 MiB of memory, the bytes are right."""

    def check(self, large: Large, stem: str) -> None:
        key = f"bkt/run/checkpoints/{stem}/model.safetensors"
        assert large.server.objects[key].size == SIX_GIB
        assert {at: large.server.bytes_at(key, at, MIB) for at in MARKS} == MARKS

    def test_k048_more_than_five_gibibytes_go_up(self, large: Large) -> None:
        """In parts."""
        assert large.sent["part"] == SIX_GIB
        assert large.sent["put"] < MIB
        self.check(large, large.id)

    def test_k048_they_are_verified(self, large: Large) -> None:
        """Every byte is read."""
        assert large.ask("verify", URL) == {"checked": 1, "damaged": []}
        assert large.moved()["get"] >= SIX_GIB

    def test_k048_they_come_down(self, large: Large, tmp_path: Path) -> None:
        """And are what went up, by their digest."""
        got = Path(large.ask("resume", URL, f"id:{large.id}", "--to", tmp_path / "got")["path"]) / "model.safetensors"
        assert got.stat().st_size == SIX_GIB
        with open(got, "rb") as file:
            assert {at: os.pread(file.fileno(), MIB, at) for at in MARKS} == MARKS
        assert large.moved()["get"] >= SIX_GIB

    def test_k048_they_are_copied_within_the_store(self, large: Large) -> None:
        """For a later checkpoint that has them unchanged."""
        (large.directory / "step").write_bytes(b"200")
        second = large.ask("push", large.directory, URL, "--step", 200)["id"]
        moved = large.moved()
        assert (moved["copy part"], moved["copy"], moved["part"]) == (SIX_GIB, 0, 0)
        self.check(large, second)
