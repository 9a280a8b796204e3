"""Making a run: nothing is hidden by it, and what the store decides is found out."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckptmgr.core import layout
from ckptmgr.core.errors import AccessDeniedError, ConflictError, ManifestError, ObjectExistsError, ObjectNotFoundError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest, decode_manifest
from ckptmgr.core.records import RunRecord, decode_run, encode_run
from ckptmgr.run.identity import new_nonce, new_uuid, utc_stamp
from ckptmgr.run.loose import foreign_in, names_below

if TYPE_CHECKING:
    from ckptmgr.run.directory import RunDirectory

logger = logging.getLogger(__name__)
_LOOKED_AT = 20
_NAMED = 3
_NOUNS = {"checkpoints": "a run", "artifact": "an artifact"}


def create(run: RunDirectory, uuid: str | None, kind: str) -> None:
    """Write run.json where there is none.

    Args:
        uuid: the identity that the run gets; drawn if None.

    Raises:
        ConflictError: the run would hide something, or lie where none may. Nothing was changed.
    """
    uuid = _uuid_for_creation(run, uuid, _NOUNS[kind])
    record = RunRecord(uuid=uuid, kind=kind, create_only=_probe_create_only(run), created_at=utc_stamp())
    # Refused: another process created it just now, or our own unanswered try did. What is there decides.
    with contextlib.suppress(ObjectExistsError):
        run.fs.pipe_file(run.path(layout.RUN_FILE), encode_run(record), mode="create")
    if not run.fs.capabilities.is_lasting:
        logger.warning("%s is kept in the memory of this process, and is gone when it ends", run.url)


def created_unseen(run: RunDirectory, uuid: str, kind: str) -> RunRecord | None:
    """Write run.json although nothing in the run can be listed; None if it is not sure that there was none.

    To who may not list, a store does not say that a key is absent. That run.json is created where the store decides create-only writes says it, and
    every commit comes after a run.json.
    """
    try:
        if run.fs.capabilities.is_local or not _probe_create_only(run):
            return None
        _refuse_place(run, _NOUNS[kind])
        record = RunRecord(uuid=uuid, kind=kind, create_only=True, created_at=utc_stamp())
        # Refused: by an own try that was not answered, or for there is a run that may not be read. What is there decides.
        with contextlib.suppress(ObjectExistsError):
            run.fs.pipe_file(run.path(layout.RUN_FILE), encode_run(record), mode="create")
        if run.read(layout.RUN_FILE) != encode_run(record):
            return None
    except AccessDeniedError:
        return None
    logger.warning(
        "no permission to list %s: this first start goes on, later ones cannot find its checkpoints without",
        run.url,
    )
    return record


def runs_among(run: RunDirectory, names: Sequence[str]) -> list[str]:
    """Those of `names`, found one level below `run`, that are runs or artifacts: it is a store of them then. Of many names, the first are looked at.

    Raises:
        BackendError: could not look.
    """
    looked_at = names[:_LOOKED_AT]
    found = run.map(lambda name: run.read(f"{name}/{layout.RUN_FILE}"), looked_at)
    return [name for name, data in zip(looked_at, found, strict=True) if data is not None]


def store_text(url: str, below: Sequence[str], noun: str = "a run") -> str:
    """Says that no `noun` is at `url` but a store, with the names of some that are `below` it."""
    more = ", …" if len(below) > _NAMED else ""
    return f"{url} is a store of runs ({', '.join(below[:_NAMED])}{more}), not {noun}"


def _uuid_for_creation(run: RunDirectory, uuid: str | None, noun: str) -> str:
    """The identity that a run created here gets: `uuid`, or that of manifests whose run.json was lost, or a new one.

    Raises:
        ConflictError: a run here would hide other runs, or adopt another one's manifests.
    """
    found = {_run_uuid_in(run, stem) for stem in run.stems()}
    if found - {uuid}:
        if len(found) > 1 or uuid is not None or None in found:
            raise ConflictError(
                f"{run.url} holds manifests of another run, but no {layout.RUN_FILE}",
                hint="bring that file back, or use another run name; nothing was changed",
            )
        uuid = found.pop()
        logger.warning(
            "%s has lost its %s; it is made again, as its manifests say: run %s", run.url, layout.RUN_FILE, uuid
        )
    below = runs_among(run, names_below(run, ""))
    if below:
        raise ConflictError(
            store_text(run.url, below, noun),
            hint=f"name {noun} in it, such as {run.url}/NEW; nothing was changed",
            url=run.url,
        )
    if uuid is None:  # else it has been somewhere already, or is the local tier of such a one
        _refuse_place(run, noun)
    return uuid or new_uuid()


def _refuse_place(run: RunDirectory, noun: str) -> None:
    """Raise ConflictError if a run here would lie within another one, which shows it as foreign data, or take a whole bucket that others use."""
    parts = run.root.rstrip("/").split("/")
    above = ["/".join(parts[:count]) for count in range(1, len(parts)) if parts[count - 1]]
    outer = next(
        (place for place, is_run in zip(above, run.map(partial(_is_run, run), above), strict=True) if is_run), None
    )
    if outer is not None:
        levels = len(parts) - len(outer.split("/"))
        name = run.url.rsplit("/", levels)[0]
        raise ConflictError(
            f"{run.url} lies within the run {name}",
            hint=f"name that run, or another place such as {name.rsplit('/', 1)[0]}/NEW; nothing was changed",
            url=run.url,
        )
    if len(parts) == 1 and not run.fs.capabilities.is_local:
        others = foreign_in(names_below(run, ""))
        if others:
            raise ConflictError(
                f"{run.url} is a bucket that holds other things ({others[0]}, …), not {noun}",
                hint=f"name {noun} in it, such as {run.url.rstrip('/')}/NEW; nothing was changed",
                url=run.url,
            )


def _is_run(run: RunDirectory, place: str) -> bool:
    """Whether a run lies at `place`. Above our own prefix we may have no permission to look, and may meet another program's run.json."""
    try:
        decode_run(run.fs.cat_file(f"{place}/{layout.RUN_FILE}"), where=place)
    except (ObjectNotFoundError, AccessDeniedError, ManifestError):
        return False
    return True


def _run_uuid_in(run: RunDirectory, stem: Stem) -> str | None:
    """The run that the manifest of `stem` names; None if it cannot be read."""
    data = run.read(layout.manifest_key(stem))
    try:
        record = None if data is None else decode_manifest(data, where=layout.manifest_key(stem))
    except ManifestError:
        return None
    return record.run_uuid if isinstance(record, Manifest) else None


def _probe_create_only(run: RunDirectory) -> bool:
    """Whether this store really refuses a second create-only write; some accept the header and ignore it.

    Source: design notes, S3-compatible stores (GCS interop, StorageGRID, versioned OSS buckets).
    """
    if not run.fs.capabilities.create_only:
        return False
    if run.fs.capabilities.is_local:
        return True
    key = run.path(f"{layout.ATTEMPTS}/{layout.PROBE_PREFIX}{new_nonce()}")
    # Refused: a retry met our own first try. The second write decides.
    with contextlib.suppress(ObjectExistsError):
        run.fs.pipe_file(key, b"first", mode="create")
    try:
        run.fs.pipe_file(key, b"second", mode="create")
    except ObjectExistsError:
        refused = True
    else:
        refused = False
        logger.warning("%s ignores create-only writes: commits stay safe, clean-up waits longer (see docs)", run.url)
    run.fs.rm_file(key)
    return refused
