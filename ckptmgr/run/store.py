"""A store: what lies at a URL that may hold runs."""

from __future__ import annotations

from typing import Any

from ckptmgr.backends.base import Backend
from ckptmgr.core import layout
from ckptmgr.core.errors import (
    BackendError,
    CheckpointNotFoundError,
    ManifestError,
    ObjectNotFoundError,
    TransientBackendError,
)
from ckptmgr.core.records import decode_run
from ckptmgr.run.directory import RunDirectory


def runs_of(
    url: str, *, fs: Backend | None = None
) -> tuple[str, list[RunDirectory | tuple[str, BackendError | ManifestError]]]:
    """The runs one level below a store's `url`, by name; one whose run.json cannot be read, or is refused, comes as (name, error).

    Args:
        fs: the backend, if it is open already; a client of a store takes longer to make than most requests.

    Returns:
        The store's normalised URL, and the runs.

    Raises:
        CheckpointNotFoundError: nothing is there, or no run is.
        BackendError: could not look.
    """
    from ckptmgr.backends.registry import normalize_url, open_store

    opened, root = open_store(url)
    fs = fs or opened
    store = RunDirectory(fs=fs, root=root, url=normalize_url(url))
    try:
        entries = fs.ls(root, detail=True)
    except ObjectNotFoundError as exc:
        raise CheckpointNotFoundError(
            f"nothing is stored at {store.url}",
            hint="check the URL; a run appears with its first checkpoint",
            url=store.url,
        ) from exc
    names = sorted(
        str(entry["name"]).rstrip("/").rsplit("/", 1)[-1] for entry in entries if entry["type"] == "directory"
    )
    found = [run for run in store.map(lambda name: _run_below(store, name), names) if run is not None]
    if not found:
        raise CheckpointNotFoundError(
            f"no run at {store.url} or one level below it",
            hint="check the URL; a run appears with its first checkpoint",
            url=store.url,
        )
    return store.url, found


def _run_below(store: RunDirectory, name: str) -> RunDirectory | tuple[str, BackendError | ManifestError] | None:
    """The run `name` of `store`; None if that is no run."""
    run = RunDirectory(fs=store.fs, root=f"{store.root}/{name}" if store.root else name, url=f"{store.url}/{name}")
    try:
        data = run.read(layout.RUN_FILE)
        if data is None:
            return None
        run.record = decode_run(data, where=f"{run.url}/{layout.RUN_FILE}")
    except TransientBackendError:
        raise
    except (BackendError, ManifestError) as exc:
        return name, exc
    return run


def holds_anything(url: str) -> bool:
    """Whether the store has anything at or below `url`, but for what the creation of a run leaves when it is killed.

    Raises:
        BackendError: could not look (I7).
    """
    from ckptmgr.backends.registry import open_store

    fs, root = open_store(url)
    try:
        info = fs.info(root)
    except ObjectNotFoundError:
        return False
    return info["type"] == "file" or any(_means_something(fs, entry) for entry in fs.ls(root, detail=True))


def _means_something(fs: Backend, entry: dict[str, Any]) -> bool:
    """Whether an entry is more than what the creation of a run leaves when it is killed: a probe, an empty folder."""
    if entry["type"] == "file":
        return True
    if layout.is_doctors(str(entry["name"]).rsplit("/", 1)[-1]):
        return False
    names = (str(path).rsplit("/", 1)[-1] for path in fs.find(entry["name"]))
    return any(not name.startswith(layout.PROBE_PREFIX) for name in names)
