"""A push of what is committed already: does the store still hold it? If not, what it has lost is sent again, under the same name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ckptmgr.core import protocol
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import locks, notes
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.verify import Damage, damage_now


def repair(
    manifest: Manifest,
    source: Path,
    run: RunDirectory,
    *,
    described: Callable[[Manifest], None] = lambda manifest: None,
    moved: Callable[[int], None] | None = None,
) -> tuple[Damage, ...]:
    """Ask the store for every file of a committed checkpoint, and put those that are missing or damaged there again, from `source`.

    Presence and size by one listing, and the store's checksums; what this machine has noted as damaged is read in full.

    Args:
        source: holds the files that `manifest` names, with the same bytes.
        described: called, before anything is sent, with a manifest of what will be.
        moved: as for `replicate`.

    Returns:
        What was wrong, and is right now.

    Raises:
        ConflictError: it was pruned meanwhile, or another process sends the same.
        SourceChangedError: a source is not what `manifest` describes; that file was not sent.
        BackendError: the store could not be asked, or failed; what was sent is there.
    """
    damage = damage_now(run, manifest)
    if not damage:
        return ()
    wrong = {one.file for one in damage}
    described(replace(manifest, files=tuple(entry for entry in manifest.files if entry.path in wrong)))
    with locks.exclusive(run.uuid, manifest.stem, "upload") as free:
        if not free:
            raise ConflictError(f"another process is pushing {source} to {run.url}", hint="wait for it")
        if not drive(protocol.repair(manifest, wrong), StoreDriver(run, source=source, moved=moved)):
            raise ConflictError(f"{manifest.stem} was removed while it was pushed", hint="push it again")
    notes.forget(run.url, manifest.stem)
    return tuple(damage)
