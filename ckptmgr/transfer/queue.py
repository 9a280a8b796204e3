"""The queue of uploads, which is the local tier: how much may wait, and what gives way when it is full (I6).

Room is made in this order, and only as far as it is needed:

1. for the disk, local copies of what the store has confirmed, oldest first, but never the newest checkpoint;
2. saves that wait, those whose upload has not begun before those whose has, oldest first. Never the newest, the best by each metric that a policy
   watches, one taken in an emergency, nor one that is being uploaded or read.

What was given up is named: logged, listed by `evicted`, and in the exit code until `forget_evicted`. Nothing is given up for a save that does not fit
even then. The newest stays until the next one is committed: so the disk must have room for two checkpoints, and the bytes that wait may exceed
`max_bytes` by that one until `trim`, or the next `make_room`, lets it go.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core.errors import CkptmgrError, ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.selectors import rank_by_metric
from ckptmgr.core.units import size_text
from ckptmgr.run import locks
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)

#: Reasons of saves that are taken because the process is about to end.
EMERGENCIES = frozenset({"sigterm", "sigusr1", "ec2", "aliyun", "stop_file", "jit_checkpoint"})

_POLL_S = 0.5
_MOST_FLOOR_BYTES = 1 << 30

WhenFull = Literal["keep-newest", "skip", "wait"]
WhenBusy = Literal["wait", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """How much may wait for the store, and what happens when more comes.

    Attributes:
        max_bytes: of saves that wait in the local tier, the one that comes included; None for no limit. A save that comes when nothing waits is
            taken whatever its size.
        min_free_bytes: what a save must leave free on the disk; None for 1 % of the disk, at most 1 GiB.
        when_full: `keep-newest`: the oldest of those that wait give way; `skip`: what comes is not saved; `wait`: for uploads to make room, for
            `max_block_s` at most, then as `keep-newest`.
        when_busy: what a save does while the one before it is still being written: `wait` for at most `max_block_s`, or `skip`.
        max_block_s: the most that training waits, in seconds.
    """

    max_bytes: int | None = None
    min_free_bytes: int | None = None
    when_full: WhenFull = "keep-newest"
    when_busy: WhenBusy = "wait"
    max_block_s: float = 60.0

    def __post_init__(self) -> None:
        for name, kinds in (("when_full", get_args(WhenFull)), ("when_busy", get_args(WhenBusy))):
            if getattr(self, name) not in kinds:
                raise ConfigError(
                    f"{name}={getattr(self, name)!r} is not known",
                    hint=f"use one of {', '.join(kinds)}",
                    argument=name,
                )
        for name in ("max_bytes", "min_free_bytes", "max_block_s"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not value >= 0):
                raise ConfigError(
                    f"{name}={value!r} makes no sense", hint="give a number that is not negative", argument=name
                )

    def floor_bytes(self, disk_bytes: int) -> int:
        """What must stay free of a disk of this size."""
        return min(disk_bytes // 100, _MOST_FLOOR_BYTES) if self.min_free_bytes is None else self.min_free_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Whether a save may begin.

    Attributes:
        admitted: it may.
        why: if not, why not, with the numbers; else "".
        dropped: saves that were given up for it without having been in the store, in that order; also those of a try that failed half-way.
        freed_bytes: that this freed on the disk, copies of uploaded saves included.
        disk_full: it is the disk that has no room, not the queue.
    """

    admitted: bool
    why: str = ""
    dropped: tuple[Stem, ...] = ()
    freed_bytes: int = 0
    disk_full: bool = False


def make_room(
    tier: LocalTier,
    target: str,
    incoming_bytes: int,
    rules: QueueRules,
    *,
    urgent: bool = False,
    disk_bytes: int | None = None,
    hurry: Callable[[], bool] = lambda: False,
    pause: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Room:
    """Make room for a save, or say why there is none. Changes nothing if there is room.

    Called by the one process that saves into `tier`, from any thread of it. Blocks for as long as removing files takes; under `wait` for
    `max_block_s` besides.

    Args:
        target: URL of the run that the save is meant for; the newest one for it stays, as does the newest of the tier.
        incoming_bytes: size of the save.
        urgent: the process is about to end: only the disk counts, down to its last byte, and nothing is waited for.
        disk_bytes: what the save will take of the disk, if that is not `incoming_bytes`: next to nothing for hard links.
        hurry: asked while waiting; True ends the wait.
        pause: waits for that many seconds, or less when something has changed.

    Raises:
        BackendError: the tier cannot be read, or a copy not be removed; nothing was given up.
    """
    queue = _Queue(tier, target, incoming_bytes, incoming_bytes if disk_bytes is None else disk_bytes, rules, urgent)
    if queue.fits():
        return Room(admitted=True)
    freed = queue.free_uploaded()
    if rules.when_full == "wait" and not urgent:
        deadline = clock() + rules.max_block_s
        while not queue.fits() and queue.pending and not hurry() and (left := deadline - clock()) > 0:
            pause(min(left, _POLL_S))
            queue.look()
            freed += queue.free_uploaded()
    if queue.fits():
        return Room(admitted=True, freed_bytes=freed)
    room = queue.refused() if rules.when_full == "skip" and not urgent else queue.drop()
    return replace(room, freed_bytes=room.freed_bytes + freed)


def trim(tier: LocalTier, target: str, rules: QueueRules) -> Room:
    """Bring what waits down to `max_bytes`, as far as that goes, once a save is committed: the one that was the newest before it may go now."""
    if rules.max_bytes is None or rules.when_full == "skip":
        return Room(admitted=True)
    queue = _Queue(tier, target, 0, 0, replace(rules, min_free_bytes=0), urgent=False)
    return Room(admitted=True) if queue.fits() else replace(queue.drop(partly=True), admitted=True, why="")


def shortage(tier: LocalTier, needed_bytes: int, rules: QueueRules) -> str | None:
    """What is too small for saves of `needed_bytes`, with both numbers; None if nothing is. Changes nothing (K069).

    Room that saves in the tier take counts as free, for uploads will give it back; but the newest of them stays until there is a newer one.
    """
    disk = _usage(tier)
    floor = rules.floor_bytes(disk.total)
    newest = tier.run.history().newest()
    ours = {stem: _disk_bytes(tier, stem) for stem in tier.run.stems()}
    room = disk.free - floor + sum(ours.values())
    has = f"the disk of {tier.root} has {size_text(disk.free)} free"
    if floor:
        has += f", {size_text(floor)} of which must stay free"
    if room - (0 if newest is None else ours.get(newest, 0)) < needed_bytes:
        return f"a checkpoint takes {size_text(needed_bytes)}, and {has}"
    if room < 2 * needed_bytes:
        return f"there must be room for two checkpoints of {size_text(needed_bytes)}, for one stays until the next is whole, and {has}"
    if rules.max_bytes is not None and rules.max_bytes < needed_bytes:
        return (
            f"a checkpoint takes {size_text(needed_bytes)}, and {size_text(rules.max_bytes)} may wait for upload: "
            "while one waits, no other is saved"
        )
    return None


def evicted(tier: LocalTier) -> list[UploadEntry]:
    """Saves that were given up unsent and that nobody has acknowledged, oldest first; `error` says why, `size_bytes` how large it was.

    A save that a process was killed over while it gave it up, and that is still whole, waits again instead: ask before a drain, not after it.
    """
    tier.take_back()
    return tier.evicted()


def forget_evicted(tier: LocalTier) -> list[UploadEntry]:
    """Somebody was told of all that `evicted` lists: from now on the tier says nothing of them. Returns those."""
    gone = tier.evicted()
    for entry in gone:
        tier.forget_evicted(entry.stem)
    return gone


class _Queue:
    """One look at what waits, and at the disk, for one save that comes.

    Attributes:
        pending: saves that wait, newest first; not looked at when nothing limits them and the disk has room.
    """

    def __init__(
        self, tier: LocalTier, target: str, incoming_bytes: int, disk_bytes: int, rules: QueueRules, urgent: bool
    ) -> None:
        self._tier = tier
        self._target = target
        self._incoming_bytes = incoming_bytes
        self._disk_bytes = disk_bytes
        self._rules = rules
        self._limit = None if urgent else rules.max_bytes
        self._urgent = urgent
        self.pending: list[tuple[Manifest, UploadEntry]] = []
        self.look()

    def look(self) -> None:
        """Look again."""
        disk = _usage(self._tier)
        self._free = disk.free
        self._floor = 0 if self._urgent else self._rules.floor_bytes(disk.total)
        self.pending = self._tier.pending() if self._limit is not None or self._missing_bytes() > 0 else []

    def fits(self) -> bool:
        return self._missing_bytes() <= 0 and self._over_bytes([manifest for manifest, _ in self.pending]) <= 0

    def free_uploaded(self) -> int:
        """Remove local copies of uploaded saves, oldest first, as far as the disk lacks room; the bytes freed."""
        if self._missing_bytes() <= 0:
            return 0
        tier, before = self._tier, self._free
        history = tier.run.history()
        for stem in sorted(tier.uploaded() & history.manifests.keys()):
            gain = 0 if stem == history.newest() else _disk_bytes(tier, stem)
            if gain == 0:
                continue
            with locks.exclusive(tier.run.uuid, stem, "read") as unread:
                if unread:
                    tier.remove(stem)
                    logger.info("removed the local copy of step %d (%s), which is in the store", stem.step, stem)
                    self._free += gain
            if self._missing_bytes() <= 0:
                break
        return self._free - before

    def drop(self, *, partly: bool = False) -> Room:
        """Give up saves that wait until the one that comes fits; none, if it does not fit even then, unless `partly`."""
        left = [manifest for manifest, _ in self.pending]
        missing = self._missing_bytes()
        chosen: list[tuple[Manifest, int]] = []
        with contextlib.ExitStack() as held:
            for manifest in self._in_order():
                over = self._over_bytes(left)
                if over <= 0 and missing <= 0:
                    break
                gain = _disk_bytes(self._tier, manifest.stem)
                if (over <= 0 and gain == 0) or not held.enter_context(_alone(self._tier, manifest.stem)):
                    continue
                left.remove(manifest)
                entry = self._tier.journal.read(manifest.stem)
                if entry is None or entry.is_pending:  # else it was committed a moment ago
                    chosen.append((manifest, gain))
                    missing -= gain
            if partly or (missing <= 0 and (self._over_bytes(left) <= 0 or self._over_for_now(left))):
                return self._give_up(chosen)
        return self.refused()

    def refused(self) -> Room:
        """The answer when there is no room."""
        return Room(admitted=False, why=self._reason(), disk_full=self._missing_bytes() > 0)

    def _give_up(self, chosen: Sequence[tuple[Manifest, int]]) -> Room:
        reason, dropped, freed = self._reason(), list[Stem](), 0
        for manifest, gain in chosen:
            named = f"step {manifest.step} ({manifest.id}, {size_text(manifest.size_bytes)})"
            try:
                self._tier.evict(manifest.stem, size_bytes=manifest.size_bytes, why=reason)
            except (CkptmgrError, OSError) as exc:  # on a disk that is full to the last byte not even that can be noted
                why = f"{named} cannot give way: {exc}"
                return Room(admitted=False, why=why, dropped=tuple(dropped), freed_bytes=freed)
            logger.warning("%s was given up before it was uploaded: %s", named, reason)
            dropped.append(manifest.stem)
            freed += gain
        return Room(admitted=True, dropped=tuple(dropped), freed_bytes=freed)

    def _missing_bytes(self) -> int:
        return self._disk_bytes + self._floor - self._free

    def _over_bytes(self, waiting: Sequence[Manifest]) -> int:
        """By how much `waiting` and the save that comes exceed the budget. When nothing waits, that one may always come."""
        if self._limit is None or not waiting:
            return 0
        return sum(manifest.size_bytes for manifest in waiting) + self._incoming_bytes - self._limit

    def _reason(self) -> str:
        if self._missing_bytes() > 0:
            kept = f" and must keep {size_text(self._floor)}" if self._floor else ""
            has = f"the disk of {self._tier.root} has {size_text(self._free)} free{kept}"
            return f"{has}, and the save takes {size_text(self._disk_bytes)}"
        waiting = size_text(sum(manifest.size_bytes for manifest, _ in self.pending))
        comes = f", one of {size_text(self._incoming_bytes)} comes" if self._incoming_bytes else ""
        return f"saves of {waiting} wait for upload{comes}, and {size_text(self._limit or 0)} may wait"

    def _in_order(self) -> list[Manifest]:
        """What may give way, in the order in which it does."""
        newest = self._tier.run.history().newest()
        ours = next((m.stem for m, entry in self.pending if entry.target in ("", self._target)), None)
        stays = {newest, ours, *_precious([manifest for manifest, _ in self.pending])}
        loose = [(entry.tries > 0, manifest) for manifest, entry in self.pending if manifest.stem not in stays]
        return [manifest for _, manifest in sorted(loose, key=lambda item: (item[0], item[1].stem))]

    def _over_for_now(self, left: Sequence[Manifest]) -> bool:
        """Whether the budget will hold once the save that comes is committed, for then the newest of today may go."""
        newest, *others = left
        if newest.stem in _precious(left) or self._over_bytes(others) > 0:
            return False
        with _alone(self._tier, newest.stem) as free:
            return free


def is_emergency(manifest: Manifest) -> bool:
    """Whether it was saved because the machine was about to go."""
    return any(why.partition(":")[0] in EMERGENCIES for why in manifest.reasons)


def _precious(waiting: Sequence[Manifest]) -> set[Stem]:
    """Those that never give way, however old: the best by each metric that a policy watches, and what was saved in an emergency."""
    modes = {(name, mode) for manifest in waiting for name, mode in manifest.metric_modes.items()}
    ranked = [rank_by_metric(waiting, name, "max" if mode == "max" else "min") for name, mode in sorted(modes)]
    emergencies = (manifest.stem for manifest in waiting if is_emergency(manifest))
    return {*(best[0].stem for best in ranked if best), *emergencies}


@contextlib.contextmanager
def _alone(tier: LocalTier, stem: Stem) -> Iterator[bool]:
    """Try to be the only one that uploads or reads it; yields False at once if somebody does."""
    with locks.exclusive(tier.run.uuid, stem, "upload") as idle, locks.exclusive(tier.run.uuid, stem, "read") as unread:
        yield idle and unread


def _usage(tier: LocalTier) -> shutil._ntuple_diskusage:
    with os_errors("read", str(tier.root)):
        return shutil.disk_usage(tier.root)


def _disk_bytes(tier: LocalTier, stem: Stem) -> int:
    """What removing the data of `stem` would free: files that another directory names as well free nothing."""
    found = 0
    for folder, _, names in os.walk(tier.data_dir(stem)):
        for name in names:
            with contextlib.suppress(OSError):
                stat = os.lstat(os.path.join(folder, name))
                found += stat.st_blocks * 512 if stat.st_nlink == 1 else 0
    return found
