"""What lies in a run without being a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ckptmgr.core import layout
from ckptmgr.core.errors import AccessDeniedError, ObjectNotFoundError
from ckptmgr.core.layout import Stem

if TYPE_CHECKING:
    from ckptmgr.run.directory import RunDirectory

LooseState = Literal["uncommitted", "foreign", "bare"]

_OURS = {
    layout.RUN_FILE,
    layout.ATTEMPTS,
    layout.CHECKPOINTS,
    layout.MANIFESTS,
    layout.PARTS,
    layout.TAGS,
    layout.ARTIFACTS,
    layout.UPLOADS,
    layout.RESUMED,
    layout.RESTORED_FILE,
    layout.TRANSFER_FILE,
    layout.METRICS_FILE,
    layout.OLD_METRICS_FILE,
    layout.LOG_FILE,
    layout.OLD_LOG_FILE,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LooseData:
    """Something under the run that is not a checkpoint.

    Attributes:
        name: in the run directory, or in its `checkpoints`.
        state: `uncommitted` data of an unfinished save, `foreign` files, or a `bare` folder without any file.
        stem: of what is named like a save of ours.
    """

    name: str
    state: LooseState
    stem: Stem | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What lies one level below a run's `checkpoints` (`data`), and below the run itself (`top`)."""

    data: list[str]
    top: list[str]


def names_in(run: RunDirectory) -> Names:
    """As `RunDirectory.names`."""
    data, top = run.map(lambda key: names_below(run, key), [layout.CHECKPOINTS, ""])
    return Names(data=data, top=top)


def loose_in(run: RunDirectory, known: Iterable[Stem], names: Names) -> list[LooseData]:
    """As `RunDirectory.loose_data`."""
    committed = {str(stem) for stem in known}
    result = []
    unknown = [name for name in names.data if name not in committed]
    are_bare = run.map(lambda name: _is_bare_folder(run, f"{layout.CHECKPOINTS}/{name}"), unknown)
    for name, bare in zip(unknown, are_bare, strict=True):
        stem = layout.parse_stem(name.removesuffix(layout.PARTIAL))
        state: LooseState = "bare" if bare else "foreign" if stem is None else "uncommitted"
        result.append(LooseData(name=name, state=state, stem=stem))
    result.extend(LooseData(name=name, state="foreign") for name in foreign_in(names.top))
    return result


def foreign_in(names: Iterable[str]) -> list[str]:
    """Those of `names`, which lie directly in a run, that no run of ours has."""
    return [name for name in names if name not in _OURS and not layout.is_doctors(name)]


def _is_bare_folder(run: RunDirectory, key: str) -> bool:
    """Whether nothing is there but folders: on a local disk, or in a store that lists those of keys that are gone, as SeaweedFS does."""
    top = run.path(key)
    if not run.fs.capabilities.is_local:
        return not run.fs.exists(top)
    if not os.path.isdir(top):
        return False
    unreadable: list[OSError] = []
    return not any(names for _, _, names in os.walk(top, onerror=unreadable.append)) and not unreadable


def names_below(run: RunDirectory, key: str) -> list[str]:
    """What lies one level below `key`, or below the run itself if that is empty; none of it hidden."""
    base = run.path(key) if key else run.root
    try:
        entries = run.fs.ls(base, detail=False)
    except ObjectNotFoundError:
        return []
    except AccessDeniedError:
        if not run.is_new:
            raise
        return []
    names = [str(entry).rstrip("/").rsplit("/", 1)[-1] for entry in entries if str(entry).rstrip("/") != base]
    return [name for name in names if name and not name.startswith(".")]
