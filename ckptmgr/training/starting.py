"""Ranks that would start from different checkpoints are refused. Imports no torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from ckptmgr.core.errors import CkptmgrError, ConflictError
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.sidecar import read_sidecar
from ckptmgr.training.agreeing import on_all_ranks

_HINT = "give all of them the same one: set torch.distributed up before a manager is asked for it"


def refuse_other_start(step: int, manifest: Manifest | None) -> None:
    """Refuse a training that begins at different steps, or goes on from different checkpoints. A collective if `can_agree`.

    Args:
        step: the one that this rank begins at.
        manifest: of what this rank goes on from; None where nobody knows, which agrees with every other one.

    Raises:
        ConflictError: ranks differ.
    """
    starts = on_all_ranks(lambda: (step, "" if manifest is None else manifest.id))
    if len({step for step, _ in starts}) > 1 or len({each for _, each in starts if each}) > 1:
        told = ", ".join(f"rank {number}: step {step} {each}".rstrip() for number, (step, each) in enumerate(starts))
        raise ConflictError(
            f"the ranks begin at different steps, or go on from different checkpoints ({told})", hint=_HINT
        )


def refuse_to_part(directory: Path | None) -> None:
    """Refuse a start from different checkpoints. A collective if `can_agree`.

    Args:
        directory: each rank's own path; None for a start from scratch. A path that does not say which checkpoint it is agrees with every other one.

    Raises:
        ConflictError: ranks were given different checkpoints, or some of them none.
    """
    ids = on_all_ranks(lambda: "" if directory is None else _id_of(directory) or "?")
    if len({each for each in ids if each != "?"}) > 1 or ("" in ids and any(ids)):
        told = ", ".join(f"rank {number}: {each or 'nothing'}" for number, each in enumerate(ids))
        raise ConflictError(
            f"the ranks go on from different checkpoints ({told})",
            hint=f"{_HINT}, or run `ckptmgr resume RUN id:ID` on every machine",
        )


def _id_of(directory: Path) -> str | None:
    with contextlib.suppress(CkptmgrError, OSError):
        return read_sidecar(directory).manifest.id
    return None
