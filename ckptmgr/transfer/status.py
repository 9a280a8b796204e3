"""What the uploads are doing: for the trainer, for another process that asks, and in numbers that a person can act on.

The host of the replication loop (the transfer process, a thread, a drain) leaves a small file in the local tier, `transfer.json`, at most once a
second. It is information: nothing is decided by it, it is not synced, and losing or garbling it changes nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from ckptmgr.backends.atomic import TEMP_PREFIX
from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.layout import TRANSFER_FILE, Stem, parse_stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import locks
from ckptmgr.run.identity import wall_s

_LOCK_FILE = ".transfer.lock"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Durable:
    """A save that is committed in the store: its name, and when its state was saved (ISO 8601, information)."""

    stem: Stem
    created_at: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lag:
    """What would be lost with this disk: the newest state is here and not in the store.

    Attributes:
        stem: the newest save that is not committed remotely.
        age_s: seconds since it was saved, by the wall clock of its record; None if that does not say.
        steps_ahead: how many steps it is ahead of the newest durable one; None if none is known, or it is no earlier step (a rewind).
        durable: the newest save known here to be in the store; None if none is.
        durable_age_s: seconds since the state of `durable` was saved.
    """

    stem: Stem
    age_s: float | None = None
    steps_ahead: int | None = None
    durable: Stem | None = None
    durable_age_s: float | None = None

    @property
    def step(self) -> int:
        return self.stem.step

    @property
    def durable_step(self) -> int | None:
        return None if self.durable is None else self.durable.step


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadStatus:
    """What the uploader is doing.

    Attributes:
        pending: saves that are only on this disk, newest first.
        pending_bytes: their size.
        uploading: the one on its way.
        sent_bytes: bytes of it that were sent so far.
        total_bytes: its size.
        rate_bytes_s: bytes per second over the last seconds.
        eta_s: seconds until it is sent at this rate; None while nothing moves.
        committed: how many this process committed.
        failures: how many uploads failed, counting each try that gave up.
        dropped: how many saves gave way to newer ones, without ever being in the store.
        retries: requests that were repeated.
        last_error: the newest failure, one line.
        lag: None when the newest save is in the store.
        host: what moves the bytes: `process`, `thread` or `drain`; "" if nothing does yet.
    """

    pending: tuple[Stem, ...] = ()
    pending_bytes: int = 0
    uploading: Stem | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    rate_bytes_s: float = 0.0
    eta_s: float | None = None
    committed: int = 0
    failures: int = 0
    dropped: int = 0
    retries: int = 0
    last_error: str = ""
    lag: Lag | None = None
    host: str = ""


# --- how far the store is behind ------------------------------------------------------------------------------------------


def lag_of(pending: Iterable[Manifest], durable: Durable | None, now: datetime) -> Lag | None:
    """How far the store is behind; None if the newest save is in it, whatever older ones are still waiting.

    Args:
        pending: saves that the store has not confirmed, in any order.
        durable: the newest that it has, as far as is known.
    """
    newest = max(pending, key=lambda manifest: manifest.stem, default=None)
    if newest is None or (durable is not None and durable.stem > newest.stem):
        return None
    ahead = None if durable is None else newest.step - durable.stem.step
    return Lag(
        stem=newest.stem,
        age_s=age_s(newest.created_at, now),
        steps_ahead=ahead if ahead is not None and ahead >= 0 else None,
        durable=None if durable is None else durable.stem,
        durable_age_s=None if durable is None else age_s(durable.created_at, now),
    )


def newest_durable(uploaded: Iterable[Manifest], told: Durable | None = None) -> Durable | None:
    """The newest of what is marked as uploaded, and of what was `told`: local copies of uploaded saves do not stay for long."""
    found = [Durable(stem=manifest.stem, created_at=manifest.created_at) for manifest in uploaded]
    return max([*found, *([] if told is None else [told])], key=lambda durable: durable.stem, default=None)


def age_s(stamp: str | None, now: datetime) -> float | None:
    """Seconds from an ISO 8601 stamp to `now`, never negative; None if it is none, or says no time zone. Two clocks, so information only."""
    try:
        at = datetime.fromisoformat((stamp or "").replace("Z", "+00:00"))
        return max(0.0, (now - at).total_seconds())
    except (ValueError, TypeError):
        return None


class Meter:
    """Bytes of one upload, and their rate over a sliding window. Safe from any thread; its memory does not grow with what moves.

    Args:
        window_s: how far it looks back. An upload that stalls shows as a falling rate, and as none after this time.
    """

    def __init__(self, *, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._sent = 0
        # (time, bytes by then), at most 40 of them; the first is where the rate is counted from.
        self._marks: deque[tuple[float, int]] = deque([(clock(), 0)])

    @property
    def sent_bytes(self) -> int:
        """Bytes since `restart`."""
        return self._sent

    def restart(self) -> None:
        """Begin another upload."""
        with self._lock:
            self._sent = 0
            self._marks = deque([(self._clock(), 0)])

    def moved(self, count: int) -> None:
        """Note that `count` more bytes were sent."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            self._sent += count
            if now - self._marks[-1][0] >= self._window_s / 40:
                self._marks.append((now, self._sent))

    def rate(self) -> float:
        """Bytes per second."""
        with self._lock:
            now = self._clock()
            self._forget(now)
            since, before = self._marks[0]
            return (self._sent - before) / (now - since) if now > since else 0.0

    def eta_s(self, total_bytes: int) -> float | None:
        """Seconds until `total_bytes` are sent at the present rate; None while nothing moves."""
        left, rate = total_bytes - self._sent, self.rate()
        return 0.0 if left <= 0 else left / rate if rate > 0 else None

    def _forget(self, now: float) -> None:
        edge = now - self._window_s
        while len(self._marks) > 1 and self._marks[1][0] <= edge:
            self._marks.popleft()
        if len(self._marks) == 1 and self._marks[0][0] < edge:
            self._marks[0] = (edge, self._sent)  # nothing has moved for a whole window


# --- what another process sees --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class HostView:
    """What a host of the replication loop last said of itself; see `UploadStatus` for the numbers.

    Attributes:
        alive: whether that process still runs. If not, the rest is how far it came.
        pid: of the process.
        written_at_s: seconds since 1970.
        target: URL of the run it uploads to.
        durable: the newest save that it, or an earlier host, knew to be in the store.
    """

    alive: bool = False
    pid: int | None = None
    written_at_s: float | None = None
    host: str = ""
    target: str = ""
    uploading: Stem | None = None
    sent_bytes: int = 0
    total_bytes: int = 0
    rate_bytes_s: float = 0.0
    eta_s: float | None = None
    committed: int = 0
    failures: int = 0
    dropped: int = 0
    retries: int = 0
    last_error: str = ""
    durable: Durable | None = None


class TransferFile:
    """`transfer.json` of a local tier, and the lock that tells the living from the dead.

    One host at a time has the lock and writes; another one that drains the same tier meanwhile goes unseen until the first is gone. Safe from any
    thread.

    Args:
        every_s: the least time between two writes that are not forced.
    """

    def __init__(self, tier_root: Path, *, every_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._root = tier_root
        self._every_s = every_s
        self._clock = clock
        self._writing = threading.Lock()
        self._fd: int | None = None
        self._written: float | None = None
        self._durable: Durable | None = None

    def write(
        self, status: UploadStatus, *, target: str = "", durable: Durable | None = None, force: bool = False
    ) -> bool:
        """Leave `status` for others to read; whether that was done.

        Not done: too soon after the last time (unless `force`), another host has the file, or the disk refuses; none of these is an error.
        """
        with self._writing:
            now = self._clock()
            if not force and self._written is not None and now - self._written < self._every_s:
                return False
            try:
                if not self._hold():
                    return False
                known = [found for found in (self._durable, durable) if found is not None]
                self._durable = max(known, key=lambda found: found.stem, default=None)
                self._replace(_document(status, target, self._durable))
            except (OSError, CkptmgrError):
                return False
            self._written = now
            return True

    def close(self) -> None:
        """Let go: from now on readers see a host that is gone. What it said last stays. A later `write` takes it up again."""
        with self._writing:
            if self._fd is not None:
                locks.close_lock(self._fd)
                self._fd = None

    def read(self) -> HostView | None:
        """What the present or the last host said; None if there never was one, or it cannot be read. Never raises."""
        try:
            with open(self._root / TRANSFER_FILE, "rb") as file:
                document = json.loads(file.read(_MOST_BYTES))
            return _view(document, alive=self._is_alive())
        except (OSError, ValueError, TypeError, AttributeError, RecursionError):
            return None

    def _hold(self) -> bool:
        if self._fd is not None:
            return True
        fd = locks.open_lock(self._root / _LOCK_FILE)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            locks.close_lock(fd)
            return False
        self._fd = fd
        earlier = self.read()
        self._durable = None if earlier is None else earlier.durable
        return True

    def _is_alive(self) -> bool:
        if self._fd is not None:
            return True
        try:
            return locks.is_locked(self._root / _LOCK_FILE)
        except OSError:
            return False

    def _replace(self, document: Mapping[str, Any]) -> None:
        # Named like every temporary file, so that the next start removes what a kill leaves.
        temp = self._root / f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        try:
            temp.write_bytes(json.dumps(document, indent=1).encode() + b"\n")
            os.replace(temp, self._root / TRANSFER_FILE)
        except OSError:
            with contextlib.suppress(OSError):
                temp.unlink()
            raise


def _document(status: UploadStatus, target: str, durable: Durable | None) -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "written_at_s": round(wall_s(), 3),
        "host": status.host,
        "target": target,
        "uploading": None if status.uploading is None else str(status.uploading),
        "sent_bytes": status.sent_bytes,
        "total_bytes": status.total_bytes,
        "rate_bytes_s": round(status.rate_bytes_s, 1),
        "eta_s": None if status.eta_s is None else round(status.eta_s, 1),
        "committed": status.committed,
        "failures": status.failures,
        "dropped": status.dropped,
        "retries": status.retries,
        "last_error": status.last_error,
        "durable": None if durable is None else {"id": str(durable.stem), "created_at": durable.created_at},
    }


def _view(document: Mapping[str, Any], *, alive: bool) -> HostView:
    """The values of `document` that have the kind they should have; the others count as not said."""
    durable = document.get("durable")
    stem = parse_stem(_text(durable, "id")) if isinstance(durable, Mapping) else None
    return HostView(
        alive=alive,
        pid=_whole(document, "pid") or None,
        written_at_s=_number(document, "written_at_s"),
        host=_text(document, "host"),
        target=_text(document, "target"),
        uploading=parse_stem(_text(document, "uploading")),
        sent_bytes=_whole(document, "sent_bytes"),
        total_bytes=_whole(document, "total_bytes"),
        rate_bytes_s=_number(document, "rate_bytes_s") or 0.0,
        eta_s=_number(document, "eta_s"),
        committed=_whole(document, "committed"),
        failures=_whole(document, "failures"),
        dropped=_whole(document, "dropped"),
        retries=_whole(document, "retries"),
        last_error=_text(document, "last_error"),
        durable=None if stem is None else Durable(stem=stem, created_at=_text(durable, "created_at") or None),
    )


def _text(document: Any, name: str) -> str:
    value = document.get(name)
    return value if isinstance(value, str) else ""


def _whole(document: Mapping[str, Any], name: str) -> int:
    value = document.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0


def _number(document: Mapping[str, Any], name: str) -> float | None:
    value = document.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return None
    return float(value)
