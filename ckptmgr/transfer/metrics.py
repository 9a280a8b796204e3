"""Figures that a user can plot: one JSON object per line in `metrics.jsonl` of the local tier, and a file for Prometheus if asked for.

Every record has `at` (UTC), `kind`, and the labels of its writer (run, host, rank, attempt). Kinds, and what they hold besides `id` and `step`:

    save            size_bytes, stall_s (training stood still), wait_s (of it, for an earlier save), stage_s (copy), write_s (write, digest, fsync)
    save_failed     error
    skip            why; a save that the queue's rules did not let happen
    upload          seconds, size_bytes, sent_bytes, retries, lag_s (from the save to its commit in the store)
    upload_failed   error
    drop            a save that was given up before it was in the store
    preempted       source, save_s, saved

Several processes may append to one file: each record is a single write. What cannot be written is counted in `lost`, and stops nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ckptmgr.core.errors import CkptmgrError, ConfigError
from ckptmgr.core.layout import METRICS_FILE, OLD_METRICS_FILE
from ckptmgr.core.manifest import encode_metric
from ckptmgr.run import locks
from ckptmgr.run.identity import utc_stamp, wall_s
from ckptmgr.transfer.prometheus import PrometheusFile

logger = logging.getLogger(__name__)

MAX_BYTES = 8 << 20
_LOCK_FILE = ".metrics.lock"
_LONGEST_TEXT = 1000


class MetricsLog:
    """Writes the records of one process. Safe from any thread; never raises, never blocks for another process, keeps nothing open.

    Args:
        tier_root: where `metrics.jsonl` lies.
        prometheus: also keep this file current, for the textfile collector of a node exporter; its name must end in `.prom`. Counters go on
            from what it says, so several runs, and the processes of a run, may share one.
        labels: of every record, such as run, host, rank and attempt. In Prometheus the attempt is a gauge, for it would begin each series anew.
        max_bytes: of a file, before it becomes `metrics.old.jsonl` in the place of the one before.
    """

    def __init__(
        self,
        tier_root: Path,
        *,
        prometheus: Path | None = None,
        labels: Mapping[str, str] | None = None,
        max_bytes: int = MAX_BYTES,
        clock: Callable[[], float] = wall_s,
    ) -> None:
        self._root = tier_root
        self._labels = dict(labels or {})
        self._max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._lost = 0
        self._prometheus = None if prometheus is None else PrometheusFile(prometheus, self._labels)

    @property
    def lost(self) -> int:
        """Writes that failed, of records and of the Prometheus file."""
        return self._lost

    def record(self, kind: str, **values: object) -> None:
        """Append a record of `kind`; see the module for the values. None says that something is not known, and is left out."""
        told = {name: _plain(value) for name, value in values.items() if value is not None}
        with self._lock:
            with self._counted():
                self._append({"at": utc_stamp(), "kind": kind, **self._labels, **told})
            if self._prometheus is not None:
                with self._counted():
                    self._prometheus.note(kind, told, self._clock())
                    self._prometheus.flush()

    def flush(self) -> None:
        """Bring the Prometheus file up to date, where another process was writing it the last time. At the end."""
        if self._prometheus is not None:
            with self._lock, self._counted():
                self._prometheus.flush()

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, TypeError, CkptmgrError) as exc:
            self._lost += 1
            if self._lost == 1:
                logger.warning("figures cannot be recorded, and no more is said of it: %s", exc)

    def _append(self, record: Mapping[str, Any]) -> None:
        if append_line(self._root / METRICS_FILE, json.dumps(record, allow_nan=False).encode()) > self._max_bytes:
            self._rotate()

    def _rotate(self) -> None:
        """One process renames; one that still has the old file open appends to that, and nothing is lost."""
        fd = locks.open_lock(self._root / _LOCK_FILE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Looked at under the lock: a second rename would throw away what the first has just put aside.
            if (self._root / METRICS_FILE).stat().st_size > self._max_bytes:
                os.replace(self._root / METRICS_FILE, self._root / OLD_METRICS_FILE)
        except BlockingIOError:
            pass
        finally:
            locks.close_lock(fd)


def append_line(path: Path, line: bytes) -> int:
    """Append `line` and its end to a file in a single write, so that several processes may; the size of the file then, in bytes.

    Raises:
        OSError: it could not be written, or only a part of it was: the next line then ends it first.
    """
    line += b"\n"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(fd).st_size
        # A full disk may have taken half of the line before.
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        if os.write(fd, line) < len(line):
            raise OSError(f"only part of a record could be written to {path}")
    finally:
        os.close(fd)
    return size + len(line)


def read_metrics(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The records of a local tier, oldest first; what is not a record is passed over.

    Args:
        path: the tier's directory, or a file of records.

    Raises:
        ConfigError: there is neither.
    """
    place = Path(path)
    if not place.exists():
        raise ConfigError(f"there is nothing at {place}", hint="give the local tier of a run, or its metrics.jsonl")
    files = [place / OLD_METRICS_FILE, place / METRICS_FILE] if place.is_dir() else [place]
    return (record for file in files for record in _records(file))


def _records(file: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError), file.open("rb") as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record


def _plain(value: object) -> object:
    """`value` as JSON has it, and not too long."""
    if isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else encode_metric(value)
    return str(value)[:_LONGEST_TEXT]
