"""Cases of sizes: more than one request may carry, and than there may be parts, against a store that holds to the limits of S3."""

from __future__ import annotations

import subprocess
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


@pytest.fixture
def with_holes(tmp_path: Path) -> Callable[..., Path]:
    """Makes a checkpoint whose model has `size` bytes, zero but for `marks`; it takes next to no disk."""

    def make(step: int, size: int, marks: dict[int, bytes]) -> Path:
        directory = tmp_path / f"checkpoint-{step}"
        directory.mkdir()
        (directory / "step").write_bytes(b"%d" % step)
        with open(directory / "model.safetensors", "wb") as file:
            file.truncate(size)
            for offset, mark in marks.items():
                file.seek(offset)
                file.write(mark)
        return directory

    return make


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
    with_holes: Callable[..., Path],
    ask: Ask,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    parts: list[int],
) -> None:
    """By a store that refuses smaller ones: parts of 5 MiB, and a last one of a byte."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "5MiB")
    stem = ask("push", with_holes(100, size, {0: b"!"}), "s3://bkt/run")["id"]
    assert sorted(count for what, count in sparse.moved if what == "part") == parts
    assert sparse.objects[f"bkt/run/checkpoints/{stem}/model.safetensors"].size == size


def test_k106_parts_that_are_too_small_are_refused_in_one_line(
    sparse: SparseServer, with_holes: Callable[..., Path], cli_here: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is sent, and not at the last part."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "4MiB")
    refused = cli_here("push", with_holes(100, 15 * MIB, {}), "s3://bkt/run")
    assert (refused.returncode, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert "parts of 4194304 bytes are too small" in line
    assert "CKPTMGR_PART_SIZE to 5120KiB" in line
    assert sparse.objects == {}


@pytest.mark.slow
def test_k106_more_parts_than_there_may_be_become_larger_ones(
    with_holes: Callable[..., Path], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """10,486 parts of the 100 KiB that OSS takes at least would fail at part 10,001: 1 GiB goes up in fewer."""
    monkeypatch.setenv("CKPTMGR_PART_SIZE", "100KiB")
    with SparseServer(min_part_bytes=100 * KIB) as server:
        serve(server, monkeypatch)
        stem = ask("push", with_holes(100, GIB, {GIB - 1: b"!"}), "oss://bkt/run")["id"]
        sent = [count for what, count in server.moved if what == "part"]
        assert sum(sent) == GIB > 10_001 * 100 * KIB
        assert len(sent) <= MAX_PARTS
        key = f"bkt/run/checkpoints/{stem}/model.safetensors"
        assert (server.objects[key].size, server.bytes_at(key, GIB - 2, 2)) == (GIB, b"\0!")
