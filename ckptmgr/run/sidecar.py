"""`DIR.ckptmgr.json`: the manifest that lies beside a restored directory, and how it was chosen.

Beside, not inside: the directory stays exactly what the trainer wrote. `verify DIR` reads it, and the next attempt learns from it which checkpoint it
descends from, and whether that was automatic or the user's decision.

Beside a part of a checkpoint (`ckptmgr pull --only`) lies a document of the same name that holds a manifest of these files, wrapped: no reader, of whatever
version, takes it for that of a checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckptmgr.backends.atomic import write_atomic
from ckptmgr.core.errors import CheckpointNotFoundError, ManifestError
from ckptmgr.core.manifest import FORMAT, VERSION, Manifest, canonical_json, decode_manifest, encode_manifest

_HOW = "resumed_how"
_PART = "part"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What a restored directory is: `how` is `auto` for `latest`, `explicit` for any other selector.

    With `is_part` it is only a part of the checkpoint, and `manifest` names only the files that are there: nothing to resume from.
    """

    manifest: Manifest
    how: Literal["auto", "explicit"] = "auto"
    is_part: bool = False


def sidecar_path(directory: Path) -> Path:
    """Where the sidecar of `directory` lies."""
    return directory.with_name(f"{directory.name}.ckptmgr.json")


def write_sidecar(directory: Path, sidecar: Sidecar, *, durable: bool = True) -> None:
    """Put the sidecar beside `directory`, all or nothing, durably unless `durable` is false."""
    document = json.loads(encode_manifest(sidecar.manifest))
    document[_HOW] = sidecar.how
    if sidecar.is_part:
        document = {"format": FORMAT, "version": VERSION, _PART: document}
    write_atomic(sidecar_path(directory), canonical_json(document), durable=durable)


def read_sidecar(directory: Path, *, parts: bool = False) -> Sidecar:
    """The sidecar beside `directory`; a single restored file is looked up by its directory.

    Args:
        parts: also that of a part of a checkpoint.

    Raises:
        CheckpointNotFoundError: there is none, or, without `parts`, the directory is only a part of a checkpoint.
        ManifestError: it is damaged.
    """
    path = sidecar_path(directory)
    if not path.is_file() and directory.is_file():
        path = sidecar_path(directory.parent)
    try:
        data = path.read_bytes()
    except FileNotFoundError as exc:
        raise CheckpointNotFoundError(
            f"{directory} has no {path.name} beside it, so there is nothing to compare it with",
            hint="verify takes a run, or a directory that `ckptmgr resume` or `ckptmgr pull` made",
        ) from exc
    try:
        document = json.loads(data)
    except ValueError as exc:
        raise ManifestError(f"{path} is not JSON", hint="run `ckptmgr resume` again") from exc
    if not isinstance(document, dict):
        raise ManifestError(f"{path} is not a manifest", hint="run `ckptmgr resume` again")
    part = document.get(_PART) if "files" not in document else None
    if isinstance(part, dict):
        document = part
    how = document.pop(_HOW, "auto")
    manifest = decode_manifest(canonical_json(document), where=str(path))
    if not isinstance(manifest, Manifest):
        raise ManifestError(f"{path} is a closing record, not a manifest", hint="run `ckptmgr resume` again")
    if part is not None and not parts:
        raise CheckpointNotFoundError(
            f"{directory} is only a part of checkpoint {manifest.id}, as `ckptmgr pull --only` made it",
            hint="get all of it with `ckptmgr resume`",
        )
    return Sidecar(manifest=manifest, how="explicit" if how == "explicit" else "auto", is_part=part is not None)
