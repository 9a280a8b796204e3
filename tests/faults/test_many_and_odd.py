"""Rows 50 and 51: names that URLs dislike, files of no bytes and of more than any counter of 32 bits, as many parts as there may be, long listings."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends import parts
from ckptmgr.backends.body import BodyDigest, FileBody
from ckptmgr.backends.localfile import SourceFile
from ckptmgr.backends.objectupload import ObjectUpload
from ckptmgr.backends.parts import MAX_PARTS, Part, PartPlan, Receipt, download_parts, plan_parts
from ckptmgr.backends.partupload import upload_parts
from ckptmgr.backends.retry import Retrier
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.layout import Stem, manifest_key
from ckptmgr.run.directory import RunDirectory
from ckptmgr.testing.memory_objects import MemoryObjects
from ckptmgr.testing.memory_parts import MemoryJournal, MemorySender
from ckptmgr.testing.stores import Store
from ckptmgr.testing.waits import Stopwatch

Ask = Callable[..., Any]
LARGE = (5 << 30) + 1


# --- names and sizes ------------------------------------------------------------------------------------------------------

ODD_FILES = {
    "with space/ and more .bin": b"space",
    "uni-çødé/検査-🚀.bin": b"unicode",
    "percent%20/not%2Fdecoded%.bin": b"percent",
    "plus+sign/a+b=c&d.bin": b"plus",
    "hash#/question?.bin": b"hash",
    "quote'\"/amp&lt;.bin": b"quote",
    "empty.bin": b"",
}


def test_odd_names_round_trip(store: Store, ask: Ask, make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Row 50: a checkpoint of such files, one of them with a key of a thousand characters, one of them empty: pushed, verified, resumed, removed, on all
    backends; other tools find them under these very names."""
    run = f"{store.url}/run"
    first = make_checkpoint(100, ODD_FILES)
    stem = ask("push", first, run)["id"]
    # What the store adds before a file's name, up to the bucket or the root; a thousand in all.
    room = 1000 - len(f"exp/run/checkpoints/{stem}/")
    folders = "/".join("d" * 200 for _ in range(room // 201))
    name = f"{folders}/{'f' * (room - len(folders) - 1)}"
    files = {**ODD_FILES, name: b"long"}
    second = ask("push", make_checkpoint(200, files, under="more"), run)["id"]
    held = store.snapshot(f"run/checkpoints/{second}/")
    assert held == {f"run/checkpoints/{second}/{file}": data for file, data in files.items()}
    assert max(len(f"exp/{key}") for key in held) == 1000
    assert ask("verify", run)["damaged"] == []
    got = Path(ask("resume", run, "--to", tmp_path / "got")["path"])
    found = {path.relative_to(got).as_posix(): path.read_bytes() for path in got.rglob("*") if path.is_file()}
    assert found == files
    ask("prune", run, "--keep-last", "1", "--yes")
    assert store.keys("run/checkpoints/") == sorted(held)


class _Sizes(MemorySender):
    """Keeps where the parts are, not their bytes."""

    crc = staticmethod(lambda data, initial, /: initial)

    def __init__(self) -> None:
        super().__init__()
        self.ranges: dict[int, tuple[int, int]] = {}

    def send(self, upload_id: str, part: Part, body: FileBody, digest: BodyDigest) -> Receipt:
        assert len(body) == part.length
        body.start_sending()
        body.seek(0, os.SEEK_END)
        self.ranges[part.number] = part.offset, part.length
        return Receipt(number=part.number, etag=str(part.number), size=part.length)

    def finish(self, upload_id: str, receipts: list[Receipt], size: int, crc: str | None) -> None:
        assert [receipt.number for receipt in receipts] == sorted(self.ranges)
        assert size == LARGE


def test_five_gibibytes_and_a_byte_go_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 50: more than one request may carry, and than 32 bits count: each byte is looked at once, in order, and is in one part."""
    looked = [0]

    def look(source: SourceFile, offset: int, view: memoryview) -> None:
        assert offset == looked[0]
        looked[0] += len(view)

    monkeypatch.setattr(SourceFile, "readinto_at", look)
    with open(tmp_path / "f", "wb") as file:
        file.truncate(LARGE)
    sender, told = _Sizes(), list[int]()
    with SourceFile(tmp_path / "f") as source:
        upload_parts(source, plan_parts(LARGE), sender, what="f", retrier=Retrier(), progress=told.append)
    at = 0
    for number in range(1, len(sender.ranges) + 1):
        offset, length = sender.ranges[number]
        assert offset == at
        at += length
    assert at == sum(told) == looked[0] == LARGE


def test_five_gibibytes_and_a_byte_come_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 50: every byte is asked for and written once, at its place."""
    written: list[tuple[int, int]] = []

    class Zeros:
        def __init__(self, length: int) -> None:
            self.left = length

        def readinto(self, view: memoryview, /) -> int:
            count = min(self.left, len(view))
            self.left -= count
            return count

        def close(self) -> None:
            pass

    def write(fd: int, block: memoryview, offset: int) -> int:
        written.append((offset, len(block)))
        return len(block)

    monkeypatch.setattr(os, "pwrite", write)
    monkeypatch.setattr(parts, "reserve", lambda fd, size: None)
    told: list[int] = []
    with open(tmp_path / "f", "wb") as file:
        download_parts(
            lambda offset, length: Zeros(length),
            plan_parts(LARGE),
            file.fileno(),
            what="f",
            retrier=Retrier(),
            progress=told.append,
        )
    at = 0
    for offset, length in sorted(written):
        assert offset == at
        at += length
    assert at == sum(told) == LARGE


# --- many -----------------------------------------------------------------------------------------------------------------


def test_one_part_more_than_there_may_be() -> None:
    """Row 51: 10,001 parts of the usual size are planned as fewer, larger ones."""
    plan = plan_parts(10_001 * parts.PART_BYTES)
    assert plan.count <= MAX_PARTS
    assert plan.part_bytes > parts.PART_BYTES
    assert sum(part.length for part in plan) == 10_001 * parts.PART_BYTES


def test_as_many_parts_as_there_may_be(tmp_path: Path) -> None:
    """Row 51: 10,000 parts go up, and another try of an upload that was cut short after 9,000 sends the rest."""
    data = os.urandom(MAX_PARTS * 10)
    (tmp_path / "f").write_bytes(data)
    store, journal = MemoryObjects(retrier=Retrier()), MemoryJournal()

    class Interrupted(BaseException):
        pass

    def interrupt(count: int) -> None:
        if store.requests.get("send", 0) >= 9_000:
            raise Interrupted

    def upload(progress: Callable[[int], object] | None) -> None:
        with SourceFile(tmp_path / "f", digest_bytes(data)) as source:
            upload_parts(
                source,
                PartPlan(size=len(data), part_bytes=10),
                ObjectUpload(store, "a/f", "overwrite", store._retrier),
                what="f",
                retrier=store._retrier,
                progress=progress,
                journal=journal,
            )

    with pytest.raises(Interrupted):
        upload(interrupt)
    sent = store.requests["send"]
    assert store.paths() == []
    upload(None)
    assert store.data("a/f") == data
    assert 9_000 <= sent < MAX_PARTS
    # Those under way when it was cut short are sent again.
    assert MAX_PARTS <= store.requests["send"] <= MAX_PARTS + 4


def test_a_hundred_thousand_manifests_are_listed_in_pages() -> None:
    """Row 51: every page is asked for once, none is larger than stores give, the order is that of the lineage, and 10 k take less than 5 s."""
    store = MemoryObjects(retrier=Retrier())
    run = RunDirectory.open_or_create("memobj://bucket/run", fs=store, root="bucket/run")
    stems = [
        Stem(attempt, step, seq, f"{step:08x}")
        for attempt in range(1, 11)
        for seq, step in enumerate(range(0, 100_000, 10), start=1)
    ]
    store.fill([f"bucket/run/{manifest_key(stem)}" for stem in stems])
    assert len(stems) == 100_000
    limits: list[int] = []
    page = store._page

    def watched(bucket: str, prefix: str, delimiter: str, token: str | None, limit: int) -> Any:
        answer = page(bucket, prefix, delimiter, token, limit)
        limits.append(len(answer.objects))
        return answer

    store._page = watched  # type: ignore[method-assign]
    watch = Stopwatch()
    assert run.stems() == stems
    assert watch.seconds < 50
    assert len(limits) <= 101
    assert max(limits) == 1000
    assert sum(limits) == 100_000
