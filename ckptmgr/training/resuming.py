"""Loading a checkpoint's directory into a trainer, with a report of what is not as it was."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmgr.core.conditions import Conditions, Drift
from ckptmgr.core.errors import CheckpointNotFoundError, ConflictError, ManifestError
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.ancestry import is_copy
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.training import state as training_state
from ckptmgr.training.conditions import compare_or_refuse, log_report, present, unknown, with_drift
from ckptmgr.training.ranks import can_agree, gather_bytes, is_main_process, rank, world_size

_log = logging.getLogger(__name__)


def resume_pieces(
    directory: Path, pieces: Mapping[str, Any], *, refused: frozenset[str]
) -> training_state.RestoreReport:
    """Load `directory` into `pieces`, and say what came back, what did not, and what has changed since, one line each.

    What training ran under when the checkpoint was made is in the manifest beside the directory; without one, or if it is that of another directory
    which had this name, nothing is known about it.

    Args:
        refused: drifts that are an error, by `drift_names`.

    Raises:
        DriftError: one of them was found; nothing was loaded.
        IncompatibleStateError: it does not fit; pieces may be partly loaded.
        IntegrityError: a file is damaged.
    """
    manifest = manifest_of(directory)
    now = present(Conditions(), pieces)
    drifts: Sequence[Drift] = ()
    if manifest is not None:
        drifts = compare_or_refuse(manifest, now, refused)
        for name in unknown(manifest, now, refused):
            _log.warning("%s: a drift of %s would be refused, but it cannot be compared", manifest.id, name)
    elif refused:
        _log.warning("%s: no drift can be refused, its manifest does not lie beside it", directory)
    report = with_drift(training_state.restore(directory, pieces), drifts)
    log_report(report)
    if report.missing:
        _log.warning("the resumed run will not equal the uninterrupted one")
    return report


def manifest_of(directory: Path) -> Manifest | None:
    """The manifest of the checkpoint that `directory` is a copy of, as far as what lies beside it says."""
    try:
        manifest = read_sidecar(directory).manifest
    except CheckpointNotFoundError:
        return None
    except ManifestError as error:
        _log.warning("what the checkpoint was made under is not known: %s", error)
        return None
    return manifest if is_copy(directory.parent if directory.is_file() else directory, manifest) else None


def newest(directory: Path, manager: Any) -> Path:
    """What to resume from when `directory` was asked for: see `CheckpointManager.newer_than`. A collective with several ranks: rank 0 chooses.

    Args:
        manager: the `CheckpointManager`; anything else has no say.

    Raises:
        ConflictError: rank 0 has something newer, on a disk that this rank does not see.
    """
    ask = getattr(manager, "newer_than", None)
    if world_size() > 1 and not can_agree():
        return directory
    chosen = ask(directory) if callable(ask) and is_main_process() else None
    found = Path(os.fsdecode(gather_bytes(os.fsencode(chosen or directory))[0]))
    if found == directory or found.exists():
        return found
    raise ConflictError(
        f"rank 0 goes on from {found}, which is not on the disk of rank {rank()}",
        hint="end all processes and run `ckptmgr resume` again on every machine",
    )
