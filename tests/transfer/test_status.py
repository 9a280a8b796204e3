"""Rates, lag, and the file by which another process sees what the uploads do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.core.layout import TRANSFER_FILE, Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.transfer.status import (
    Durable,
    HostView,
    Meter,
    TransferFile,
    UploadStatus,
    age_s,
    lag_of,
    newest_durable,
)

NOW = datetime(2026, 11, 29, 12, 0, 0, tzinfo=timezone.utc)
DEADLINE_S = 60.0


def saved(step: int, at: str | None = None, *, attempt: int = 1) -> Manifest:
    return Manifest(stem=Stem(attempt, step, step, "0123abcd"), run_uuid="u", files=(), created_at=at)


# --- rate and time left -----------------------------------------------------------------------------------------------------


def test_a_steady_rate(clock: Any) -> None:
    """100 bytes a second, however they are cut."""
    meter = Meter(window_s=10, clock=clock)
    for _ in range(400):
        clock.now += 0.05
        meter.moved(5)
    assert meter.rate() == pytest.approx(100, rel=0.01)
    assert meter.sent_bytes == 2000
    assert meter.eta_s(3000) == pytest.approx(10, rel=0.01)


def test_a_change_of_pace_shows_within_the_window(clock: Any) -> None:
    meter = Meter(window_s=10, clock=clock)
    for pace in (1000, 10):
        for _ in range(30):
            clock.now += 0.5
            meter.moved(pace // 2)
    assert meter.rate() == pytest.approx(10, rel=0.01)


def test_a_stalled_upload_falls_to_nothing_and_recovers(clock: Any) -> None:
    """No rate, and no time left that would be a promise; then the pace of what comes, not of the pause."""
    meter = Meter(window_s=10, clock=clock)
    for _ in range(20):
        clock.now += 1
        meter.moved(100)
    clock.now += 5
    assert 0 < meter.rate() < 100
    clock.now += 60
    assert meter.rate() == 0.0
    assert meter.eta_s(10_000) is None
    for _ in range(20):
        clock.now += 1
        meter.moved(50)
    assert meter.rate() == pytest.approx(50, rel=0.01)


def test_the_next_upload_begins_at_nothing(clock: Any) -> None:
    meter = Meter(clock=clock)
    clock.now += 1
    meter.moved(100)
    meter.restart()
    assert (meter.sent_bytes, meter.rate(), meter.eta_s(5)) == (0, 0.0, None)
    clock.now += 1
    meter.moved(5)
    assert (meter.sent_bytes, meter.eta_s(5)) == (5, 0.0)


def test_bytes_of_many_threads_are_all_counted() -> None:
    """Parts of one file are sent side by side."""
    meter = Meter()

    def send() -> None:
        for _ in range(10_000):
            meter.moved(1)

    threads = [threading.Thread(target=send) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert meter.sent_bytes == 40_000


# --- how far the store is behind ----------------------------------------------------------------------------------------------


def test_nothing_waits_nothing_lags() -> None:
    assert lag_of([], Durable(stem=saved(5).stem), NOW) is None


def test_the_newest_that_waits_lags_behind_the_newest_that_is_durable() -> None:
    """In steps, and in the ages of both states."""
    waiting = [saved(300, "2026-11-29T11:59:30Z"), saved(400, "2026-11-29T11:59:50Z")]
    lag = lag_of(waiting, Durable(stem=saved(200).stem, created_at="2026-11-29T11:50:00Z"), NOW)
    assert lag is not None
    assert (lag.stem, lag.step, lag.age_s) == (waiting[1].stem, 400, 10.0)
    assert (lag.durable_step, lag.steps_ahead, lag.durable_age_s) == (200, 200, 600.0)


def test_older_ones_that_wait_are_no_lag() -> None:
    """Newest first: what would be lost with this disk is nothing that a resume would use."""
    assert lag_of([saved(100)], Durable(stem=saved(200).stem), NOW) is None


def test_nothing_durable_is_known() -> None:
    lag = lag_of([saved(100, "nonsense")], None, NOW)
    assert lag is not None
    assert (lag.step, lag.age_s, lag.steps_ahead, lag.durable, lag.durable_step) == (100, None, None, None, None)


def test_after_a_rewind_steps_say_nothing() -> None:
    """A new attempt at an earlier step is newer than a higher step of the one before."""
    lag = lag_of([saved(100, attempt=2)], Durable(stem=saved(900).stem), NOW)
    assert lag is not None
    assert (lag.step, lag.durable_step, lag.steps_ahead) == (100, 900, None)


def test_the_newest_durable_of_what_is_marked_and_what_was_told() -> None:
    """The local copy of the newest upload may be gone already."""
    marked = [saved(100, "2026-11-29T11:00:00Z"), saved(200)]
    assert newest_durable(marked) == Durable(stem=marked[1].stem)
    told = Durable(stem=saved(300).stem)
    assert newest_durable(marked, told) == told
    assert newest_durable(marked, Durable(stem=saved(150).stem)) == Durable(stem=marked[1].stem)
    assert newest_durable([]) is None


@pytest.mark.parametrize("stamp", [None, "", "yesterday", "2026-11-29T11:00:00"])
def test_an_age_that_cannot_be_told(stamp: str | None) -> None:
    assert age_s(stamp, NOW) is None


def test_a_clock_that_went_back_makes_no_negative_age() -> None:
    assert age_s("2026-11-29T13:00:00Z", NOW) == 0.0


# --- the file -----------------------------------------------------------------------------------------------------------------

STATUS = UploadStatus(
    uploading=saved(7).stem,
    sent_bytes=43,
    total_bytes=100,
    rate_bytes_s=12.5,
    eta_s=4.6,
    committed=3,
    failures=2,
    dropped=1,
    retries=5,
    last_error="503",
    host="process",
)


def test_what_one_writes_another_reads(tmp_path: Path) -> None:
    writer, reader = TransferFile(tmp_path), TransferFile(tmp_path)
    assert reader.read() is None
    durable = Durable(stem=saved(6).stem, created_at="2026-11-29T11:00:00Z")
    assert writer.write(STATUS, target="s3://bucket/run", durable=durable)
    view = reader.read()
    assert view is not None
    assert view == HostView(
        alive=True,
        pid=os.getpid(),
        written_at_s=view.written_at_s,
        host="process",
        target="s3://bucket/run",
        uploading=STATUS.uploading,
        sent_bytes=43,
        total_bytes=100,
        rate_bytes_s=12.5,
        eta_s=4.6,
        committed=3,
        failures=2,
        dropped=1,
        retries=5,
        last_error="503",
        durable=durable,
    )
    writer.close()
    gone = reader.read()
    assert gone is not None
    assert (gone.alive, gone.sent_bytes) == (False, 43)


def test_at_most_once_a_second(tmp_path: Path, clock: Any) -> None:
    """Progress comes with every block; what begins or ends is forced."""
    file = TransferFile(tmp_path, clock=clock)
    written = [file.write(UploadStatus(sent_bytes=n)) for n in range(3)]
    clock.now += 0.9
    written.append(file.write(UploadStatus(sent_bytes=3)))
    view = file.read()
    assert view is not None
    assert (written, view.sent_bytes) == ([True, False, False, False], 0)
    assert file.write(UploadStatus(sent_bytes=4), force=True)
    clock.now += 1.0
    assert file.write(UploadStatus(sent_bytes=5))
    view = file.read()
    assert view is not None
    assert view.sent_bytes == 5
    file.close()


def test_one_host_at_a_time(tmp_path: Path) -> None:
    """A quick restart: the process of the life before still uploads, and goes on being seen; when it is gone, the new one is, and what the old
    one knew to be durable is not forgotten."""
    first, second = TransferFile(tmp_path), TransferFile(tmp_path)
    durable = Durable(stem=saved(6).stem)
    assert first.write(UploadStatus(committed=1), durable=durable)
    assert not second.write(UploadStatus(committed=2))
    first.close()
    assert second.write(UploadStatus(committed=2))
    view = first.read()
    assert view is not None
    assert (view.alive, view.committed, view.durable) == (True, 2, durable)
    second.close()


def test_a_killed_host_is_seen_to_be_gone(tmp_path: Path) -> None:
    """SIGKILL: the kernel lets go of the lock. A forked worker that outlives it does not keep it."""
    script = """
import os, signal, sys
from pathlib import Path
from ckptmgr.transfer.status import TransferFile, UploadStatus
file = TransferFile(Path(sys.argv[1]))
assert file.write(UploadStatus(sent_bytes=9, host="process"))
reading, writing = os.pipe()
if os.fork() == 0:
    os.close(writing)
    print("forked", flush=True)
    os.read(0, 1)
    os._exit(0)
signal.pause()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "forked\n"
        view = TransferFile(tmp_path).read()
        assert view is not None
        assert (view.alive, view.pid) == (True, process.pid)
        process.send_signal(signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
        view = TransferFile(tmp_path).read()
        assert view is not None
        assert (view.alive, view.sent_bytes) == (False, 9)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"null",
        b"\xff\xfe",
        b'"text"',
        b"[" * 100_000,
        b"1" * 5000,
    ],
    ids=["empty", "half", "list", "null", "bytes", "text", "deep", "number"],
)
def test_garbage_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TRANSFER_FILE).write_bytes(content)
    assert TransferFile(tmp_path).read() is None


@pytest.mark.parametrize("value", [None, True, -1, "x", [], {}, 1e999, float("nan")], ids=str)
def test_values_of_a_wrong_kind_are_not_said(tmp_path: Path, value: Any) -> None:
    names = [name for name in HostView.__slots__ if name != "alive"]
    (tmp_path / TRANSFER_FILE).write_text(json.dumps(dict.fromkeys(names, value)))
    view = TransferFile(tmp_path).read()
    assert view is not None
    text = value if isinstance(value, str) else ""
    assert view == HostView(host=text, target=text, last_error=text)


def test_a_file_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    """The folder is gone, a folder is in its place: false, nothing raised, nothing left over."""
    assert not TransferFile(tmp_path / "missing").write(STATUS)
    (tmp_path / TRANSFER_FILE).mkdir()
    file = TransferFile(tmp_path)
    assert not file.write(STATUS)
    assert file.read() is None
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".transfer.lock", TRANSFER_FILE]


def test_in_a_tier_it_is_nobody_elses_file(disk: Any) -> None:
    """`ls` of a local tier takes neither it, nor the log, nor the figures for foreign files."""
    file = TransferFile(disk.tier.root)
    assert file.write(STATUS)
    file.close()
    for name in ("metrics.jsonl", "metrics.old.jsonl", "transfer.log", "transfer.old.log"):
        (disk.tier.root / name).touch()
    assert disk.tier.run.loose_data([]) == []
