"""Loading a checkpoint's directory into a trainer, with a report of what is not as it was."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmgr.core.conditions import Conditions, Drift
from ckptmgr.core.errors import CheckpointNotFoundError, ManifestError
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.ancestry import is_copy
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.training import state as training_state
from ckptmgr.training.agreeing import on_all_ranks
from ckptmgr.training.conditions import compare_all, log_report, present, with_drift
from ckptmgr.training.ranks import can_agree, world_size
from ckptmgr.training.starting import refuse_to_part

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
        drifts = compare_all(manifest, now, refused)
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


def newest(directory: Path | None, manager: Any) -> Path | None:
    """What to resume from when `directory` was asked for, or nothing was: see `CheckpointManager.newer_than`. A collective with several ranks.

    Args:
        directory: each rank's own path, of the same checkpoint.
        manager: the `CheckpointManager`; anything else has no say.

    Raises:
        ConflictError: ranks were given different checkpoints, or some of them none.
        CkptmgrError: what is newer could not be had; the same error on all ranks.
    """
    if world_size() > 1 and not can_agree():
        return directory
    ask = getattr(manager, "newer_than", None)
    given = on_all_ranks(lambda: (directory is not None, callable(ask)))
    if directory is not None and ask is not None and all(all(each) for each in given):
        found: Path | None = ask(directory)
        if found is not None:
            return found
    elif len({asks for _, asks in given}) > 1:
        _log.warning("only some ranks have a manager of checkpoints: nobody asks for what is newer")
    refuse_to_part(directory)
    return directory
