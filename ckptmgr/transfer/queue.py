"""The queue of uploads, which is the local tier: how much may wait, and what gives way when it is full."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.run.journal import UploadEntry
from ckptmgr.run.tier import LocalTier

#: Reasons of saves that are taken because the process is about to end.
EMERGENCIES = frozenset({"sigterm", "sigusr1", "ec2", "aliyun", "stop_file", "jit_checkpoint"})

WhenFull = Literal["keep-newest", "skip", "wait"]
WhenBusy = Literal["wait", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRules:
    """How much may wait for the store, and what happens when more comes.

    Attributes:
        max_bytes: of saves that wait in the local tier, the one that comes included; None for no limit.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Whether a save may begin.

    Attributes:
        admitted: it may.
        why: if not, why, with the numbers; if so, what had to be done for it, or "".
        dropped: saves that gave way and were never in the store, oldest first; each is logged, and listed until `forget_evicted`.
        freed_bytes: that were freed on the disk, uploaded copies included.
    """

    admitted: bool
    why: str = ""
    dropped: tuple[Stem, ...] = ()
    freed_bytes: int = 0


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
    raise NotImplementedError


def trim(tier: LocalTier, target: str, rules: QueueRules) -> Room:
    raise NotImplementedError


def shortage(tier: LocalTier, needed_bytes: int, rules: QueueRules) -> str | None:
    raise NotImplementedError


def evicted(tier: LocalTier) -> list[UploadEntry]:
    raise NotImplementedError


def forget_evicted(tier: LocalTier) -> list[UploadEntry]:
    raise NotImplementedError
