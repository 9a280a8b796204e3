"""What `ckptmgr doctor` finds out by doing it: writing, reading, refusing, removing, and how long that takes.

Each method answers one question with a `Verdict`, or raises what the store said, which the doctor takes for one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmgr.backends import probes
from ckptmgr.backends.base import Backend
from ckptmgr.backends.objectstore import ObjectStoreBackend
from ckptmgr.core.checksums import Digester
from ckptmgr.core.errors import AccessDeniedError, ObjectExistsError, ObjectNotFoundError
from ckptmgr.core.units import duration_text, size_text
from ckptmgr.run.verdicts import Verdict

# All that is written, below the place.
_NAMES = ("small", "create", "copy", "parts", "aborted", "wrong", "rate")
_SMALL = 4096
_ROUNDS = 9
# The rate: a first, small file that a slow link can take, then one whose parts go side by side.
_FIRST_BYTES = 8 << 20
_SECOND_BYTES = 32 << 20
RATE_PART_BYTES = 8 << 20
_LONGEST_S = 4.0
_SLOW_S = 1.5


class EnoughError(Exception):
    """Raised into an upload that has shown how fast it is."""


@dataclass(slots=True)
class Trials:
    """Questions to one store.

    Attributes:
        fs: the store.
        wide: opens the same one with parts of `RATE_PART_BYTES`, as an object store sends a large file.
        place: a path of its own below the store, where everything is written.
        scratch: a directory of this machine for what is sent.
        written: whether `put` has left a file there.
    """

    fs: Backend
    wide: Callable[[], Backend]
    place: str
    scratch: Path
    written: bool = False
    data: bytes = field(default_factory=lambda: secrets.token_bytes(_SMALL))

    @property
    def objects(self) -> ObjectStoreBackend | None:
        return probes.object_store(self.fs)

    @property
    def small(self) -> str:
        return f"{self.place}/small"

    # --- small objects ----------------------------------------------------------------------------------------------------

    def put(self) -> Verdict:
        self.fs.pipe_file(self.small, self.data)
        self.written = True
        return Verdict(check="put", level="ok", text=f"{_SMALL} bytes written")

    def get(self) -> Verdict:
        if self.fs.cat_file(self.small) != self.data:
            return Verdict(
                check="get",
                level="problem",
                text="the store answers other bytes than were written",
                advice="do not use it; look for a cache or a proxy between here and the store",
            )
        return Verdict(check="get", level="ok", text="the same bytes come back")

    def head(self) -> Verdict:
        record = self.fs.info(self.small)
        if record["size"] != _SMALL:
            text = f"the store says that {_SMALL} written bytes are {record['size']}"
            return Verdict(check="head", level="problem", text=text, advice="do not use it")
        return Verdict(check="head", level="ok", text="size and existence are told")

    def create_only(self, *, recorded: bool | None) -> Verdict:
        """Whether a second create-only write is refused.

        Args:
            recorded: what the run here found when it was created; None if there is none.
        """
        path, first = f"{self.place}/create", b"first"
        with contextlib.suppress(ObjectExistsError):
            # Refused: a retry met our own first try.
            self.fs.pipe_file(path, first, mode="create")
        refused = False
        try:
            self.fs.pipe_file(path, b"second", mode="create")
        except ObjectExistsError:
            refused = self.fs.cat_file(path) == first
        facts = {"create_only": refused and self.fs.capabilities.create_only}
        if refused and self.fs.capabilities.create_only:
            return Verdict(check="create_only", level="ok", text="a second create-only write is refused", facts=facts)
        careful = "commits stay safe under names of their own, and clean-up waits longer"
        if recorded:
            return Verdict(
                check="create_only",
                level="warning",
                text="create-only writes are ignored now, and were not when the run here was created",
                advice="was the bucket's versioning changed? Begin a new run, for which this is noted",
                facts=facts,
            )
        if refused:
            text = "create-only writes are refused as they should be, but are not relied on with this kind of store"
            return Verdict(check="create_only", level="ok", text=f"{text}: {careful}", facts=facts)
        return Verdict(
            check="create_only",
            level="warning",
            text="create-only writes are ignored by this store",
            advice=f"nothing has to be done: {careful}",
            facts=facts,
        )

    def delete(self) -> Verdict:
        self.fs.rm_file(self.small)
        try:
            self.fs.cat_file(self.small)
        except ObjectNotFoundError:
            return Verdict(check="delete", level="ok", text="deleted, and gone")
        except AccessDeniedError:
            # Without permission to list, S3 does not tell that nothing is there.
            return Verdict(check="delete", level="ok", text="deleted; whether it is gone may not be asked")
        text = "what was deleted is still there"
        return Verdict(check="delete", level="warning", text=text, advice="`ckptmgr prune` will free nothing")

    def copy(self) -> Verdict:
        path = f"{self.place}/copy"
        self.fs.cp_file(self.small, path)
        if self.fs.cat_file(path) != self.data:
            return Verdict(
                check="copy", level="problem", text="a copy within the store has other bytes", advice="do not use it"
            )
        return Verdict(check="copy", level="ok", text="copies within the store")

    def round_trip(self, path: str) -> Verdict:
        """The time of a small request, with the connection open: the median of a few."""
        times = []
        for _ in range(_ROUNDS):
            started = time.monotonic()
            self.fs.cat_file(path)
            times.append(time.monotonic() - started)
        median = statistics.median(times)
        text = f"{median * 1000:.1f} ms for a small read, the median of {_ROUNDS}"
        return Verdict(check="round_trip", level="ok", text=text, facts={"median_s": median, "worst_s": max(times)})

    # --- large objects ----------------------------------------------------------------------------------------------------

    def multipart(self, store: ObjectStoreBackend, part_bytes: int) -> Verdict:
        """An upload in two parts."""
        file = self._file("parts", part_bytes + _SMALL)
        tried = probes.try_parts(store, file, f"{self.place}/parts", part_bytes=part_bytes)
        facts = {"lists_parts": tried.are_listed, "keeps_checksum": tried.crc is not None}
        if tried.crc is not None and not tried.is_right:
            return Verdict(
                check="multipart",
                level="warning",
                text="the checksum that the store keeps of an upload in parts is not that of its bytes",
                advice="set CKPTMGR_CHECKSUM=none; `ckptmgr verify` without --quick proves what is stored",
                facts=facts,
            )
        if not tried.are_listed:
            return Verdict(
                check="multipart",
                level="warning",
                text="large files go up in parts, but the store does not tell which parts it holds",
                advice="an interrupted upload will begin anew",
                facts=facts,
            )
        keeps = "and their whole has a checksum" if tried.crc is not None else "without a checksum of the whole"
        return Verdict(
            check="multipart",
            level="ok",
            text=f"large files go up in parts, which the store lists, {keeps}",
            facts=facts,
        )

    def abort(self, store: ObjectStoreBackend) -> Verdict:
        if not probes.try_abort(store, f"{self.place}/aborted"):
            return Verdict(
                check="abort",
                level="warning",
                text="an upload is still there after it was aborted",
                advice="its parts are paid for: have the bucket drop them by a rule",
            )
        return Verdict(check="abort", level="ok", text="an upload that is given up leaves nothing")

    def checksum(self, store: ObjectStoreBackend) -> Verdict:
        """Whether the store checks what it receives, and tells what it holds."""
        kept = store.stored_crc(self.small)
        digester = Digester()
        digester.update(self.data)
        ours = None if kept is None else getattr(digester.digests(), kept[0])
        refuses = probes.try_wrong_crc(store, f"{self.place}/wrong", self.data)
        facts = {"kept": None if kept is None else kept[0], "refuses_wrong": refuses}
        if kept is not None and ours is not None and kept[1] != ours:
            text = "the checksum that the store tells is not that of the bytes it was given"
            return Verdict(check="checksum", level="problem", text=text, advice="do not use it", facts=facts)
        if refuses is False:
            return Verdict(
                check="checksum",
                level="warning",
                text="the store takes bytes whose checksum is wrong",
                advice="damage on the way is found by what it tells of the object afterwards, if that is its own"
                if kept is not None
                else "damage on the way is found only by `ckptmgr verify` without --quick",
                facts=facts,
            )
        if kept is None:
            return Verdict(
                check="checksum",
                level="warning",
                text="the store keeps no checksum of whole objects",
                advice="`ckptmgr verify --quick` compares sizes only; `ckptmgr verify` reads everything",
                facts=facts,
            )
        text = f"the store keeps the {kept[0]} of each object, and refuses bytes that do not fit"
        if refuses is None:
            text = f"the store answers the {kept[0]} of what it received, which is compared"
        return Verdict(check="checksum", level="ok", text=text, facts=facts)

    def upload_rate(self, size_bytes: int | None, grace_s: float, saving_s: float | None) -> Verdict:
        """How fast bytes go up, and what that means for a checkpoint of `size_bytes` in a grace period.

        Args:
            size_bytes: of a checkpoint; None if nobody knows.
            saving_s: p95 of the time from a save's beginning to its commit on this machine's disk; None if nothing was saved here.
        """
        moved, seconds = self._send(self.fs, _FIRST_BYTES)
        if seconds < _SLOW_S:
            more, longer = self._send(self.wide(), _SECOND_BYTES)
            if more / longer > moved / seconds:
                moved, seconds = more, longer
        rate = moved / seconds
        facts: dict[str, Any] = {"bytes_s": rate, "sent_bytes": moved, "size_bytes": size_bytes, "grace_s": grace_s}
        text = f"{size_text(rate)}/s"
        if size_bytes is None:
            advice = "give --size, such as --size 10GiB, to see what that means for a checkpoint"
            return Verdict(check="upload_rate", level="ok", text=text, advice=advice, facts=facts)
        upload_s = size_bytes / rate
        whole_s = upload_s + (saving_s or 0.0)
        facts.update(upload_s=upload_s, saving_s=saving_s)
        text += f": a checkpoint of {size_text(size_bytes)} takes {duration_text(upload_s)}"
        if saving_s is not None:
            text += f", and {duration_text(saving_s)} to save (p95)"
        if whole_s > grace_s:
            return Verdict(
                check="upload_rate",
                level="warning",
                text=f"{text}, more than the {duration_text(grace_s)} of grace before a machine is taken",
                advice="save more often, for what is not up by then is lost unless the disk outlives the machine (`ckptmgr drain`)",
                facts=facts,
            )
        return Verdict(
            check="upload_rate", level="ok", text=f"{text}, within {duration_text(grace_s)} of grace", facts=facts
        )

    def _send(self, fs: Backend, size: int) -> tuple[int, float]:
        """Bytes sent, and in how many seconds; cut off when that is long enough to tell."""
        file = self._file("rate", size)
        started, moved = time.monotonic(), 0

        class Meter:
            def relative_update(self, count: int) -> None:
                nonlocal moved
                moved += count
                if moved < size and time.monotonic() - started > _LONGEST_S:
                    raise EnoughError

        # Retries would be counted as slowness, which they are.
        with contextlib.suppress(EnoughError):
            fs.put_file(str(file), f"{self.place}/rate", callback=Meter())
            moved = size
        return max(moved, 1), max(time.monotonic() - started, 1e-6)

    def _file(self, name: str, size: int) -> Path:
        """A file of random bytes: some stores and links compress."""
        path = self.scratch / name
        if not path.exists() or path.stat().st_size != size:
            path.write_bytes(os.urandom(size))
        return path

    # --- the end ----------------------------------------------------------------------------------------------------------

    def clean_up(self) -> None:
        """Remove everything that was written.

        Raises:
            BackendError: something could not be removed.
        """
        # By name: those who may write and delete may not be allowed to list.
        self.fs.rm_files([f"{self.place}/{name}" for name in _NAMES])
        if self.objects is None:
            with contextlib.suppress(ObjectNotFoundError):
                self.fs.rm(self.place, recursive=True)
