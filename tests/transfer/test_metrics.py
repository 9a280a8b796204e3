"""Figures: records that several processes append, and the file for Prometheus, read by a strict parser of the tests' own."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import METRICS_FILE, OLD_METRICS_FILE
from ckptmgr.transfer.metrics import MetricsLog, read_metrics
from ckptmgr.transfer.prometheus import FAMILIES

LABELS = {"run": "s3://bucket/exp/run", "host": "gpu-7", "rank": "0", "attempt": "3"}
DEADLINE_S = 60.0


def save(log: MetricsLog, step: int, **more: object) -> None:
    values = {"size_bytes": 1000, "stall_s": 0.25, "wait_s": 0.0, "stage_s": 0.125, "write_s": 2.0, **more}
    log.record("save", id=f"id-{step}", step=step, **values)


# --- records ----------------------------------------------------------------------------------------------------------------


def test_a_record_has_its_time_its_labels_and_its_values(tmp_path: Path) -> None:
    """One line of strict JSON; what is not known is left out."""
    log = MetricsLog(tmp_path, labels=LABELS)
    log.record("upload", id="a", step=5, seconds=2.5, sent_bytes=10, retries=0, lag_s=None)
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    record = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", record.pop("at"))
    told = {"id": "a", "step": 5, "seconds": 2.5, "sent_bytes": 10, "retries": 0}
    assert record == {"kind": "upload", **LABELS, **told}
    assert log.lost == 0


def test_odd_values_are_written_as_json_has_them(tmp_path: Path) -> None:
    """Non-finite numbers, long errors, line breaks, bytes of a path that are not UTF-8, things that are no JSON at all."""
    log = MetricsLog(tmp_path)
    log.record("upload_failed", a=math.nan, b=-math.inf, error="x\n" * 5000, path="a\udcff", of=Path("p"), ok=True)
    (record,) = read_metrics(tmp_path)
    assert (record["a"], record["b"], record["path"], record["of"], record["ok"]) == (
        "NaN",
        "-Infinity",
        "a\udcff",
        "p",
        True,
    )
    assert record["error"] == "x\n" * 500
    assert (tmp_path / METRICS_FILE).read_bytes().count(b"\n") == 1


def test_a_full_file_becomes_the_old_one(tmp_path: Path) -> None:
    """Two files at most, of about the size asked for; read together they are in order, and nothing between them is lost."""
    log = MetricsLog(tmp_path, max_bytes=10_000)
    for n in range(500):
        log.record("save", step=n)
    assert sorted(path.name for path in tmp_path.glob("metrics*")) == [METRICS_FILE, OLD_METRICS_FILE]
    assert all(path.stat().st_size < 10_200 for path in tmp_path.glob("metrics*"))
    steps = [record["step"] for record in read_metrics(tmp_path)]
    assert len(steps) > 100
    assert steps == list(range(500 - len(steps), 500))


def test_processes_and_threads_append_to_one_file(tmp_path: Path) -> None:
    """Trainer and transfer process at once: every record whole, none lost; the file changes hands meanwhile."""
    script = """
import sys
from pathlib import Path
from ckptmgr.transfer.metrics import MetricsLog
log = MetricsLog(Path(sys.argv[1]), max_bytes=100_000, prometheus=Path(sys.argv[1], "x.prom"))
sys.stdin.readline()
for n in range(300):
    log.record("upload", who="child", n=n)
log.flush()
assert log.lost == 0
print("done", flush=True)
sys.stdin.readline()
log.flush()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    log = MetricsLog(tmp_path, max_bytes=100_000, prometheus=tmp_path / "x.prom")

    def write(who: str) -> None:
        for n in range(300):
            log.record("upload", who=who, n=n)

    threads = [threading.Thread(target=write, args=(who,)) for who in ("a", "b")]
    with process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert process.stdout.readline() == "done\n"
        log.flush()
        process.stdin.write("end\n")
        process.stdin.flush()
        assert process.wait(DEADLINE_S) == 0
    found = [(record["who"], record["n"]) for record in read_metrics(tmp_path)]
    for who in ("a", "b", "child"):
        assert [n for whose, n in found if whose == who] == list(range(300))
    assert log.lost == 0
    assert parse(tmp_path / "x.prom")["ckptmgr_uploads_total"] == {frozenset(): 900.0}


def test_a_torn_line_costs_itself_alone(tmp_path: Path) -> None:
    """A full disk took half of a record: the next begins on a line of its own."""
    log = MetricsLog(tmp_path)
    log.record("save", step=1)
    with (tmp_path / METRICS_FILE).open("ab") as file:
        file.write(b'{"at": "2026-11-29T12:0')
    log.record("save", step=3)
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 3]


def test_what_is_no_record_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "m.jsonl").write_bytes(b'\n{"step": 1}\n[2]\n"3"\n\xff\n{"step": 4}')
    assert list(read_metrics(tmp_path / "m.jsonl")) == [{"step": 1}, {"step": 4}]


def test_nothing_recorded_yet_is_nothing_and_a_wrong_path_is_said(tmp_path: Path) -> None:
    assert list(read_metrics(tmp_path)) == []
    with pytest.raises(ConfigError, match="nothing at"):
        read_metrics(tmp_path / "missing")


def test_a_disk_that_refuses_is_counted_and_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised into training, however often."""
    log = MetricsLog(tmp_path / "missing", prometheus=tmp_path / "missing" / "x.prom")
    with caplog.at_level(logging.WARNING, "ckptmgr"):
        for step in range(3):
            save(log, step)
        log.flush()
    assert log.lost == 7
    assert len(caplog.records) == 1


# --- Prometheus -------------------------------------------------------------------------------------------------------------

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def parse(path: Path) -> Samples:
    """What a file in the text format 0.0.4 says; anything that the format or the naming rules do not allow fails.

    Each metric is one group: HELP, TYPE, its samples; no metric, and no label set within one, comes twice; no time stamps.
    """
    text = path.read_bytes().decode("utf-8")
    assert text.endswith("\n")
    found: Samples = {}
    lines = text.split("\n")[:-1]
    at = 0
    while at < len(lines):
        told = re.fullmatch(rf"# HELP ({_NAME}) ((?:[^\\]|\\\\|\\n)+)", lines[at])
        assert told, lines[at]
        name = told[1]
        kind = re.fullmatch(rf"# TYPE {name} (counter|gauge)", lines[at + 1])
        assert kind, lines[at + 1]
        assert name not in found
        assert name.startswith("ckptmgr_")
        assert name.endswith("_total") == (kind[1] == "counter")
        assert not re.search(r"_(ms|minutes|kb|mb|mib|percent)(_|$)", name)
        at += 2
        samples: dict[frozenset[tuple[str, str]], float] = {}
        while at < len(lines) and not lines[at].startswith("#"):
            sample = re.fullmatch(rf"{name}(?:\{{({_LABEL}(?:,{_LABEL})*)\}})? (\S+)", lines[at])
            assert sample, lines[at]
            labels = {label.partition("=")[0]: label.partition("=")[2] for label in re.findall(_LABEL, sample[1] or "")}
            plain = {key: unescaped(value[1:-1]) for key, value in labels.items()}
            value = float(sample[2])
            assert kind[1] == "gauge" or value >= 0
            assert frozenset(plain.items()) not in samples
            samples[frozenset(plain.items())] = value
            at += 1
        assert samples
        found[name] = samples
    return found


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda match: "\n" if match[1] == "n" else match[1], text)


def of(samples: Samples, name: str, labels: Mapping[str, str] = LABELS) -> float:
    """The value of one series; the attempt is no label, for it would begin each series anew."""
    return samples[f"ckptmgr_{name}"][frozenset((key, value) for key, value in labels.items() if key != "attempt")]


@pytest.fixture
def prom(tmp_path: Path) -> Path:
    return tmp_path / "collector" / "ckptmgr.prom"


@pytest.fixture
def log(tmp_path: Path, prom: Path) -> MetricsLog:
    prom.parent.mkdir()
    return MetricsLog(tmp_path, prometheus=prom, labels=LABELS, clock=lambda: 1_795_000_000.5)


def test_saves_and_uploads_are_added_up(log: MetricsLog, prom: Path) -> None:
    save(log, 100)
    save(log, 200, stall_s=0.5)
    log.record("upload", id="x", step=100, seconds=4.0, size_bytes=1000, sent_bytes=900, retries=2, lag_s=7.5)
    log.record("upload_failed", id="y", step=200, error="503")
    log.record("drop", id="y", step=200)
    log.record("skip", step=300, why="full")
    log.record("save_failed", step=400, error="full")
    log.record("preempted", source="sigterm")
    log.record("something new", step=999)
    said = parse(prom)
    assert {name: of(said, name) for name in (family.name for family in FAMILIES)} == {
        "saves_total": 2,
        "saved_bytes_total": 2000,
        "save_stall_seconds_total": 0.75,
        "save_wait_seconds_total": 0,
        "save_stage_seconds_total": 0.25,
        "save_write_seconds_total": 4,
        "last_save_step": 200,
        "last_save_stall_seconds": 0.5,
        "last_save_timestamp_seconds": 1_795_000_000.5,
        "save_failures_total": 1,
        "skipped_saves_total": 1,
        "uploads_total": 1,
        "upload_seconds_total": 4,
        "upload_sent_bytes_total": 900,
        "upload_retries_total": 2,
        "last_upload_step": 100,
        "last_upload_lag_seconds": 7.5,
        "last_upload_timestamp_seconds": 1_795_000_000.5,
        "upload_failures_total": 1,
        "dropped_saves_total": 1,
        "preemptions_total": 1,
        "attempt": 3,
    }
    assert log.lost == 0


def test_every_counter_is_there_from_the_first_record(log: MetricsLog, prom: Path) -> None:
    """As 0: a counter that first appears as 1 does not look to `increase()` as if it had grown."""
    save(log, 1)
    said = parse(prom)
    assert of(said, "upload_failures_total") == of(said, "dropped_saves_total") == 0
    assert "ckptmgr_last_upload_lag_seconds" not in said


def test_counters_go_on_after_a_restart(tmp_path: Path, log: MetricsLog, prom: Path) -> None:
    """The next attempt, in the same series."""
    save(log, 100)
    again = MetricsLog(tmp_path, prometheus=prom, labels={**LABELS, "attempt": "4"})
    save(again, 200)
    said = parse(prom)
    assert (of(said, "saves_total"), of(said, "attempt"), of(said, "last_save_step")) == (2, 4, 200)


def test_two_runs_share_a_file(tmp_path: Path, log: MetricsLog, prom: Path) -> None:
    """On one machine; the name of one has everything that must be escaped."""
    labels = {**LABELS, "run": 's3://b/a "quoted\\path"\nand more ü'}
    other = MetricsLog(tmp_path, prometheus=prom, labels=labels)
    for step in (1, 2):
        save(log, step)
        save(other, step)
    save(other, 3)
    said = parse(prom)
    assert (of(said, "saves_total"), of(said, "saves_total", labels)) == (2, 3)
    assert len(said["ckptmgr_saves_total"]) == 2


def test_values_that_are_no_numbers_are_left_out(log: MetricsLog, prom: Path) -> None:
    """NaN would spoil a counter for ever; a negative time, of a clock that was set, would make it fall."""
    save(log, 1, stall_s=math.nan, write_s=-5.0, size_bytes="many", stage_s=None)
    said = parse(prom)
    names = ("saves_total", "save_stall_seconds_total", "save_write_seconds_total", "saved_bytes_total")
    assert [of(said, name) for name in names] == [1, 0, 0, 0]


def test_it_is_replaced_in_one_step_and_readable_by_others(log: MetricsLog, prom: Path) -> None:
    """The collector, another user, never reads half of it, nor a temporary file: it reads what ends in .prom."""
    save(log, 1)
    with prom.open("rb") as before:
        save(log, 2)
        assert b"ckptmgr_saves_total" in before.read()
        assert os.fstat(before.fileno()).st_nlink == 0
    assert stat.S_IMODE(prom.stat().st_mode) & 0o044 == 0o044
    assert [path.name for path in prom.parent.iterdir() if path.suffix == ".prom"] == [prom.name]


def test_somebody_elses_metrics_are_left_alone(log: MetricsLog, prom: Path) -> None:
    prom.write_text("node_load1 0.5\n")
    save(log, 1)
    assert prom.read_text() == "node_load1 0.5\n"
    assert log.lost == 1
    assert [record["step"] for record in read_metrics(prom.parent.parent)] == [1]


def test_while_another_process_writes_nothing_waits_and_nothing_is_lost(log: MetricsLog, prom: Path) -> None:
    """A stopped process with the lock must not stop training."""
    import fcntl

    save(log, 1)
    with (prom.parent / f".{prom.name}.lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        save(log, 2)
        assert of(parse(prom), "saves_total") == 1
    log.flush()
    assert of(parse(prom), "saves_total") == 2
    assert log.lost == 0


def test_a_name_that_no_collector_reads_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="would never be read"):
        MetricsLog(tmp_path, prometheus=tmp_path / "ckptmgr.txt")


@pytest.mark.parametrize(
    "text",
    [
        "ckptmgr_x_total 1",
        "# HELP ckptmgr_x_total x\nckptmgr_x_total 1\n",
        "# HELP ckptmgr_x_total x\n# TYPE ckptmgr_x_total gauge\nckptmgr_x_total 1\n",
        "# HELP ckptmgr_x x\n# TYPE ckptmgr_x counter\nckptmgr_x 1\n",
        '# HELP ckptmgr_x x\n# TYPE ckptmgr_x gauge\nckptmgr_x{a="\\q"} 1\n',
        '# HELP ckptmgr_x x\n# TYPE ckptmgr_x gauge\nckptmgr_x{a="1"} 1\nckptmgr_x{a="1"} 2\n',
        "# HELP ckptmgr_x x\n# TYPE ckptmgr_x gauge\nckptmgr_x 1 1795000000\n",
    ],
)
def test_the_parser_is_strict(tmp_path: Path, text: str) -> None:
    """What the tests above rely on: it refuses what a collector would."""
    (tmp_path / "x.prom").write_text(text)
    with pytest.raises(AssertionError):
        parse(tmp_path / "x.prom")
