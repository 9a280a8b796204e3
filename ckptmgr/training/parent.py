"""What an attempt descends from: the checkpoint that its process restored."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.core.errors import CheckpointNotFoundError
from ckptmgr.core.layout import Stem, parse_stem
from ckptmgr.core.manifest import How, Manifest
from ckptmgr.run.ancestry import identify, is_copy
from ckptmgr.run.candidates import look, merged
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.resume import Resumed
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parent:
    """What this process restored, and so what its attempt descends from. `restored` is False for a start from scratch; `manifest` is what is known
    of the checkpoint."""

    stem: Stem | None = None
    how: How = "auto"
    restored: bool = False
    manifest: Manifest | None = None

    @classmethod
    def of(cls, resumed: Resumed) -> Parent:
        """The parent that a resume has brought."""
        return cls(stem=resumed.manifest.stem, how=resumed.how, restored=True, manifest=resumed.manifest)

    def __str__(self) -> str:
        if self.how == "fresh":
            return "a new lineage"
        return "from scratch" if self.stem is None else f"from {self.stem}, {self.how}"


def parent_of(directory: Path, run: RunDirectory, tier: LocalTier) -> Parent:
    """Which checkpoint of `run` the directory is that a trainer resumed from; one that is none of `run`'s does not count as restored."""
    stem = parse_stem(directory.name)
    if stem is not None and directory.parent == tier.data_dir(stem).parent:
        return Parent(stem=stem, restored=True, manifest=tier.run.history().manifests.get(stem))
    try:
        sidecar = read_sidecar(directory)
    except CheckpointNotFoundError:
        return _identified(directory, run, tier)
    if sidecar.manifest.run_uuid != run.uuid:
        logger.warning("%s is checkpoint %s of another run", directory, sidecar.manifest.id)
        return Parent()
    # A sidecar outlives a directory that the trainer's rotation removed, and another one may have taken its name.
    if not is_copy(directory.parent if directory.is_file() else directory, sidecar.manifest):
        return _identified(directory, run, tier)
    return Parent(stem=sidecar.manifest.stem, how=sidecar.how, restored=True, manifest=sidecar.manifest)


def _identified(directory: Path, run: RunDirectory, tier: LocalTier) -> Parent:
    """A trainer's own directory, such as `output_dir/checkpoint-500`: it counts if a checkpoint of the run has the same bytes."""
    history = merged(*look(run, tier))
    stem = identify(directory, run, history)
    if stem is None:
        logger.warning("%s is not a checkpoint of %s, as far as its files say", directory, run.url)
        return Parent()
    return Parent(stem=stem, restored=True, manifest=history.manifests.get(stem))
