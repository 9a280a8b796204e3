"""What this machine has seen of damage: one small file per checkpoint, in the user's state directory, never in the store.

A note shortens work and informs (`ls` shows the checkpoint as damaged, `resume` looks at the noted file first); it never decides: what it says is
looked at again before anything is refused because of it, and it goes once that turns out to be right. Losing one costs a repeated look.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import msgspec

from ckptmgr.backends.atomic import make_dirs_durable, write_atomic
from ckptmgr.core.errors import BackendError, ManifestError
from ckptmgr.core.layout import Stem, parse_stem
from ckptmgr.core.manifest import FORMAT, VERSION, canonical_json, convert_record, decode_record
from ckptmgr.run.identity import state_dir, utc_stamp

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """`file` of a checkpoint (or its manifest's key) was found wrong, in the way that `why` says, at `seen_at`."""

    file: str
    why: str
    seen_at: str = ""


class _NoteDoc(msgspec.Struct, kw_only=True):
    file: str
    why: str
    seen_at: str = ""


def _folder(run_url: str) -> Path:
    # By place, not by the run's uuid: a local tier holds the same checkpoints as the store, and either may be damaged.
    return state_dir() / "damaged" / sha256(run_url.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def remember(run_url: str, stem: Stem, file: str, why: str) -> None:
    """Note that `file` of `stem` is damaged. A disk that cannot be written costs the note, nothing else."""
    document = {"format": FORMAT, "version": VERSION, "file": file, "why": why, "seen_at": utc_stamp()}
    try:
        make_dirs_durable(_folder(run_url))
        write_atomic(_folder(run_url) / f"{stem}.json", canonical_json(document))
    except BackendError as exc:
        logger.info("cannot note that %s is damaged: %s", stem, exc)


def forget(run_url: str, stem: Stem) -> None:
    """Nothing is wrong with `stem` any more."""
    with contextlib.suppress(OSError):
        (_folder(run_url) / f"{stem}.json").unlink()


def noted(run_url: str, stems: Iterable[Stem]) -> dict[Stem, Note]:
    """The notes on those of `stems` that have one."""
    wanted = set(stems)
    found: dict[Stem, Note] = {}
    try:
        paths = sorted(_folder(run_url).iterdir())
    except OSError:
        return found
    for path in paths:
        stem = parse_stem(path.name.removesuffix(".json"))
        if stem is None or stem not in wanted:
            continue
        with contextlib.suppress(OSError, ManifestError):
            doc = convert_record(decode_record(path.read_bytes(), where=str(path)), _NoteDoc, str(path))
            found[stem] = Note(file=doc.file, why=doc.why, seen_at=doc.seen_at)
    return found
