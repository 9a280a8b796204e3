"""A file in Prometheus' text format, for the textfile collector of a node exporter.

Several processes, and runs, may share one file: each adds what has happened since its last write to what the file says, under a lock, and puts the
sum in its place in one step. So counters do not begin anew with each start.

Source: https://prometheus.io/docs/instrumenting/exposition_formats (text format 0.0.4), https://prometheus.io/docs/practices/naming
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ckptmgr.core.errors import ConfigError
from ckptmgr.run import locks

_NOW = "now"
_SAMPLE = re.compile(r'(ckptmgr_[a-z_]+)(\{(?:[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\.)*",?)*\})? ([^ ]+)')


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric: its name without `ckptmgr_`, and of which value of which kind of record it is made.

    Attributes:
        value: name of the value that is added up (counter) or kept (gauge); "" counts records, `now` is the time of the record.
    """

    name: str
    help: str
    kind: str
    value: str = ""
    type: Literal["counter", "gauge"] = "counter"


FAMILIES = (
    Family(name="saves_total", kind="save", help="Checkpoints committed to the local tier."),
    Family(name="saved_bytes_total", kind="save", value="size_bytes", help="Bytes of these checkpoints."),
    Family(
        name="save_stall_seconds_total", kind="save", value="stall_s", help="Time that training stood still for saving."
    ),
    Family(
        name="save_wait_seconds_total",
        kind="save",
        value="wait_s",
        help="Time that training waited for an earlier save to be written.",
    ),
    Family(
        name="save_stage_seconds_total", kind="save", value="stage_s", help="Time to copy the state into host memory."
    ),
    Family(name="save_write_seconds_total", kind="save", value="write_s", help="Time to write, digest and sync."),
    Family(name="last_save_step", kind="save", value="step", type="gauge", help="Step of the newest checkpoint."),
    Family(
        name="last_save_stall_seconds",
        kind="save",
        value="stall_s",
        type="gauge",
        help="Time that training stood still for the newest checkpoint.",
    ),
    Family(
        name="last_save_timestamp_seconds", kind="save", value=_NOW, type="gauge", help="When it was committed locally."
    ),
    Family(name="save_failures_total", kind="save_failed", help="Checkpoints that could not be saved."),
    Family(name="skipped_saves_total", kind="skip", help="Checkpoints that the rules of the queue did not let happen."),
    Family(name="uploads_total", kind="upload", help="Checkpoints committed in the store."),
    Family(name="upload_seconds_total", kind="upload", value="seconds", help="Time that these uploads took."),
    Family(name="upload_sent_bytes_total", kind="upload", value="sent_bytes", help="Bytes that were sent for them."),
    Family(
        name="upload_retries_total", kind="upload", value="retries", help="Requests that were repeated during them."
    ),
    Family(
        name="last_upload_step",
        kind="upload",
        value="step",
        type="gauge",
        help="Step of the last checkpoint committed in the store.",
    ),
    Family(
        name="last_upload_lag_seconds",
        kind="upload",
        value="lag_s",
        type="gauge",
        help="Time from its save to its commit in the store.",
    ),
    Family(
        name="last_upload_timestamp_seconds",
        kind="upload",
        value=_NOW,
        type="gauge",
        help="When it was committed in the store.",
    ),
    Family(name="upload_failures_total", kind="upload_failed", help="Uploads that gave up for the time being."),
    Family(
        name="dropped_saves_total",
        kind="drop",
        help="Checkpoints given up before they were in the store, to make room.",
    ),
    Family(name="preemptions_total", kind="preempted", help="Times that training was told to end."),
    Family(name="attempt", kind="", value="attempt", type="gauge", help="Number of the attempt, counted from 1."),
)
_PREFIX = "ckptmgr_"


class PrometheusFile:
    """The file at `path`, as far as it is this process's. Not thread-safe.

    Raises:
        ConfigError: the name would keep the collector from reading it.
    """

    def __init__(self, path: Path, labels: Mapping[str, str]) -> None:
        if path.suffix != ".prom":
            raise ConfigError(f"{path} would never be read", hint="give it a name that ends in .prom")
        self._path = path
        self._labels = _label_set({name: text for name, text in labels.items() if name != "attempt"})
        # Every counter is there from the start: one that appears as 1 does not look as if it had grown.
        self._added = {family.name: 0.0 for family in FAMILIES if family.type == "counter"}
        self._set: dict[str, float] = {}
        with contextlib.suppress(KeyError, ValueError):
            self._set["attempt"] = float(labels["attempt"])

    def note(self, kind: str, values: Mapping[str, Any], now_s: float) -> None:
        """Take a record into account; `flush` writes."""
        known: dict[str, Any] = {**values, "": 1, _NOW: now_s}
        for family in FAMILIES:
            value = known.get(family.value) if family.kind == kind else None
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            if family.type == "gauge":
                self._set[family.name] = float(value)
            elif value > 0:  # a counter never goes down
                self._added[family.name] = self._added.get(family.name, 0.0) + value

    def flush(self) -> bool:
        """Write what was noted since the last time; False if another process is writing just now: it goes with the next flush.

        Raises:
            OSError: it cannot be written; what was noted is kept.
            ValueError: the file holds something that is not ours; it is left alone.
        """
        fd = locks.open_lock(self._path.with_name(f".{self._path.name}.lock"))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            samples = self._read()
            for name, value in self._added.items():
                samples.setdefault(name, {})[self._labels] = samples.get(name, {}).get(self._labels, 0.0) + value
            for name, value in self._set.items():
                samples.setdefault(name, {})[self._labels] = value
            self._replace(_text(samples))
        except BlockingIOError:
            return False
        finally:
            locks.close_lock(fd)
        self._added.clear()
        self._set.clear()
        return True

    def _read(self) -> dict[str, dict[str, float]]:
        """What the file says: metric -> label set -> value."""
        found: dict[str, dict[str, float]] = {}
        try:
            text = self._path.read_text("utf-8")
        except FileNotFoundError:
            return found
        known = {family.name for family in FAMILIES}
        for line in text.split("\n"):
            if not line or line.startswith("#"):
                continue
            sample = _SAMPLE.fullmatch(line)
            name = "" if sample is None else sample[1].removeprefix(_PREFIX)
            if sample is None or name not in known:
                raise ValueError(f"{self._path} holds metrics of somebody else, and is left as it is")
            found.setdefault(name, {})[sample[2] or ""] = float(sample[3])
        return found

    def _replace(self, text: str) -> None:
        temp = self._path.with_name(
            f".{self._path.name}.{os.getpid()}"
        )  # another ending, so that no collector reads half of it
        try:
            temp.write_text(text, "utf-8")
            os.replace(temp, self._path)
        except OSError:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise


def _text(samples: Mapping[str, Mapping[str, float]]) -> str:
    lines = []
    for family in FAMILIES:
        series = samples.get(family.name)
        if series:
            name = f"{_PREFIX}{family.name}"
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.type}"]
            lines += [f"{name}{labels} {_number(value)}" for labels, value in sorted(series.items())]
    return "\n".join(lines) + "\n"


def _label_set(labels: Mapping[str, str]) -> str:
    pairs = (f'{name}="{_escaped(str(value))}"' for name, value in sorted(labels.items()))
    return f"{{{','.join(pairs)}}}" if labels else ""


def _escaped(text: str) -> str:
    """A label's value; what is not UTF-8 in a path is shown by its codes."""
    safe = text.encode("utf-8", "backslashreplace").decode()
    return safe.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 1 << 53 else repr(value)
