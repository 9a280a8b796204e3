"""Where a run is kept: its directory in the store, and its local tier on this machine."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ckptmgr.backends.base import Backend
from ckptmgr.backends.registry import open_store
from ckptmgr.backends.retry import RetryPolicy
from ckptmgr.core.errors import CheckpointNotFoundError, ConfigError, ConflictError, PermanentBackendError
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.launch import RUN_ENV
from ckptmgr.run.tier import LocalTier

_log = logging.getLogger(__name__)


def open_places(
    url: str,
    local_dir: Path,
    *,
    retry: RetryPolicy,
    stop: threading.Event,
    wrap_backend: Callable[[Backend], Backend] | None,
) -> tuple[RunDirectory, LocalTier]:
    """The run in the store and the local tier, both made if need be, and sure to be the same run.

    Raises:
        ConflictError: the local directory is another run's; nothing was made (K100).
        BackendError: the store could not be asked.
    """
    resumed = os.environ.get(RUN_ENV)
    if resumed and resumed != url:
        _say_two_runs(resumed, url)
    fs, root = open_store(url, policy=retry, stop=stop)
    if wrap_backend is not None:
        fs = wrap_backend(fs)
    known = LocalTier.find(local_dir)
    if known is None:
        run = RunDirectory.open_or_create(url, fs=fs, root=root)
    elif url in known.targets():
        # Saves in the tier are meant for this very place: where the store lost the run, it is made again as the same one.
        run = RunDirectory.open_or_create(url, uuid=known.run.uuid, fs=fs, root=root)
    else:
        run = _run_of(known, url, fs, root)
    try:
        return run, LocalTier.open_or_create(local_dir, uuid=run.uuid)
    except PermanentBackendError as exc:
        exc.message = f"the local directory cannot be used: {exc.message}"
        exc.hint = exc.hint or "give local_dir, or CKPTMGR_LOCAL_DIR, a place on a local disk that can be written"
        raise


@cache
def _say_two_runs(resumed: str, url: str) -> None:
    """Once per process."""
    _log.warning(
        "`ckptmgr resume %s` has started this process, which uses the run %s: is one of them a mistake?", resumed, url
    )


def _run_of(tier: LocalTier, url: str, fs: Backend, root: str) -> RunDirectory:
    """The run in the store; a new one would take over what another run left in `tier`."""
    try:
        return RunDirectory.open(url, fs=fs, root=root)
    except CheckpointNotFoundError as exc:
        raise ConflictError(
            f"{tier.root} is the local tier of run {tier.run.uuid}, and there is no such run at {url}",
            hint="give another local directory, or the URL of that run; nothing was changed",
        ) from exc


def local_dir_of(url: str, given: str | os.PathLike[str] | None) -> Path:
    """Where the local tier of the run at `url` is: as `given`, as CKPTMGR_LOCAL_DIR says, or in the working directory; absolute.

    Raises:
        ConfigError: it and the run are not apart.
    """
    name = url.rsplit("/", 1)[-1]
    local_dir = Path(os.path.abspath(given or os.environ.get("CKPTMGR_LOCAL_DIR") or f".ckptmgr/{name}"))
    _refuse_one_place(url, local_dir)
    return local_dir


def _refuse_one_place(url: str, local_dir: Path) -> None:
    """Raise ConfigError if the run lies in the local directory, or around it: what retention removes from one would be gone from both."""
    if not url.startswith("file://"):
        return
    store, local = (Path(os.path.realpath(path)) for path in (url.removeprefix("file://"), local_dir))
    if store == local or store in local.parents or local in store.parents:
        raise ConfigError(
            f"the local directory {local} and the run {store} are not apart",
            hint="give local_dir another place, on a local disk",
        )
