"""A local tier that tests save into without torch, on a disk whose size they choose."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.contents import describe
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import new_nonce, utc_now
from ckptmgr.run.tier import LocalTier
from ckptmgr.transfer.drain import drain

SIZE = 8192
Usage = namedtuple("Usage", ["total", "used", "free"])


class Disk:
    """A run, its local tier, and what saves and uploads there."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.run = RunDirectory.open_or_create(str(folder / "store" / "run"))
        self.tier = LocalTier.open_or_create(folder / "disk", uuid=self.run.uuid)
        self._patch = patch

    @property
    def url(self) -> str:
        return self.run.url

    def save(
        self,
        step: int,
        *,
        size: int = SIZE,
        attempt: int = 1,
        reasons: Sequence[str] = ("every_n_steps:1",),
        metrics: Mapping[str, float] | None = None,
        modes: Mapping[str, str] | None = None,
        age_s: float = 0.0,
        target: str | None = None,
    ) -> Stem:
        """Commit one file of `size` bytes into the tier; nothing is uploaded by that."""
        stem = Stem(attempt, step, max((s.seq for s in self.tier.run.stems()), default=0) + 1, new_nonce())
        prepared = self.tier.prepare(stem)
        (prepared / "model.bin").write_bytes(os.urandom(size))
        manifest = Manifest(
            stem=stem,
            run_uuid=self.run.uuid,
            files=describe(prepared),
            created_at=(utc_now() - timedelta(seconds=age_s)).isoformat(),
            reasons=tuple(reasons),
            metrics=metrics or {},
            metric_modes=modes or {},
        )
        self.tier.commit(manifest, prepared, target=self.url if target is None else target)
        return stem

    def upload(self) -> None:
        """Everything that waits goes into the store."""
        assert drain(self.tier, self.run).pending == ()

    def waiting(self) -> list[Stem]:
        """Oldest first."""
        return sorted(manifest.stem for manifest, _ in self.tier.pending())

    def here(self) -> list[Stem]:
        """Checkpoints in the tier, oldest first; each of them has its data, and nothing else has any."""
        stems = self.tier.run.stems()
        assert sorted(path.name for path in (self.tier.root / "checkpoints").iterdir()) == [str(s) for s in stems]
        return stems

    def has_size(self, total: int) -> None:
        """From now on the disk looks as if it had `total` bytes, of which the checkpoints of the tier take theirs."""

        def disk_usage(path: object) -> Usage:
            files = {f.stat().st_ino: f.stat().st_blocks * 512 for f in self.tier.root.rglob("*.bin") if f.is_file()}
            used = sum(files.values())
            return Usage(total, used, total - used)

        self._patch.setattr(shutil, "disk_usage", disk_usage)


@pytest.fixture
def make_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Disk]:
    """Opens the run and the tier below a folder, or makes them."""
    return lambda folder: Disk(folder, monkeypatch)


@pytest.fixture
def disk(tmp_path: Path, make_disk: Callable[[Path], Disk]) -> Disk:
    return make_disk(tmp_path)


@pytest.fixture
def clock() -> Callable[[], float]:
    """Seconds that pass when `clock.now` is set."""
    return Clock()


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
