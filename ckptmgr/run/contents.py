"""What a trainer's directory holds, as the files of a manifest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckptmgr.backends.atomic import digest_file
from ckptmgr.backends.oserrors import translate_os_error
from ckptmgr.backends.registry import normalize_url
from ckptmgr.core.errors import ConfigError, ManifestError
from ckptmgr.core.files import FileEntry, role_of
from ckptmgr.core.layout import check_relative_path, check_unicode

#: Threads that digest where no training runs beside.
DIGESTING = 4


def describe(directory: Path, *, workers: int = 1, follow_links: bool = False) -> tuple[FileEntry, ...]:
    """What `directory` holds, as the files of a manifest; reads every byte.

    Links to files are stored as what they point to. A link to a folder, and anything that is neither file nor folder, is refused.

    Args:
        workers: threads that read; more than one only where no training runs beside.
        follow_links: see `storable_files`.

    Raises:
        ConfigError: empty, or it holds something that cannot be stored.
        SourceChangedError: a file changed or vanished while it was read.
    """

    def entry(path: str) -> FileEntry:
        return FileEntry.of(path, digest_file(directory / path))

    paths = storable_files(directory, follow_links=follow_links)
    if workers < 2 or len(paths) < 2:
        return tuple(map(entry, paths))
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(min(workers, len(paths)), thread_name_prefix="ckptmgr-digest") as pool:
        return tuple(pool.map(entry, paths))


def storable_files(directory: Path, *, follow_links: bool = False) -> Sequence[str]:
    """The files that `directory` holds, sorted, without reading them.

    Args:
        follow_links: also those that lead out of the folder that `directory` lies in, whatever they lead to. Otherwise only weights may, as they do in
            the snapshots of hub caches, whose other files are there as well: anything else could be a secret of this machine.

    Raises:
        ConfigError: there is none, or something that cannot be stored.
    """
    found = []
    for folder, folders, names in os.walk(directory, onerror=_unreadable):
        folders.sort()
        for name in folders:
            path = Path(folder, name)
            if path.is_symlink():
                raise ConfigError(
                    f"{path} is a link to a folder", hint="replace it with what it points to, or remove it"
                )
        for name in names:
            path = Path(folder, name)
            if not path.is_file():
                kind = "a broken link" if path.is_symlink() else "neither a file nor a folder"
                raise ConfigError(f"{path} is {kind} and cannot be stored", hint="remove it, or push another directory")
            if not follow_links and path.is_symlink() and _leads_out(path, directory):
                raise ConfigError(
                    f"{path} is a link that leads out of the run's folder, to {os.path.realpath(path)}",
                    hint="replace it with what it points to, or remove it; `push --follow-links` takes it as it is",
                )
            found.append(_storable_name(path.relative_to(directory).as_posix(), directory))
    if not found:
        raise ConfigError(f"{directory} holds no file", hint="give the directory of a checkpoint")
    return sorted(found)


def refuse_names(paths: Iterable[str], url: str) -> None:
    """Raise ConfigError if one of `paths` is the name of a file that the store of `url` cannot hold; a disk holds any."""
    if not normalize_url(url).startswith("file://"):
        for path in paths:
            check_unicode(path)


def refuse_around(url: str, place: Path) -> None:
    """Raise ConfigError if the run or artifact at `url` lies in what is pushed: each push would hold all earlier ones."""
    scheme, _, path = url.partition("://")
    inside, outside = Path(os.path.realpath(path)), Path(os.path.realpath(place))
    if scheme == "file" and (inside == outside or outside in inside.parents):
        raise ConfigError(f"{url} lies in {place}, which is to be pushed", hint="keep the store elsewhere")


def _leads_out(path: Path, directory: Path) -> bool:
    """Whether the link to a file leads to what is neither weights, nor of the folder that `directory` lies in, nor of its hub cache."""
    if role_of(path.name) == "weights":
        return False
    real = os.path.realpath(directory)
    near = [os.path.dirname(real), os.path.realpath(directory.parent), os.path.join(real, "../../blobs")]
    target = Path(os.path.realpath(path))
    return not any(Path(os.path.realpath(folder)) in target.parents for folder in near)


def _unreadable(error: OSError) -> None:
    """A folder that cannot be read must not be left out of a checkpoint in silence, as os.walk would."""
    raise translate_os_error(error, "open", os.fspath(error.filename)) from error


def _storable_name(name: str, directory: Path) -> str:
    try:
        return check_relative_path(name)
    except ManifestError as exc:
        raise ConfigError(
            f"{directory} holds a file with the name {name!r}, which no store is given", hint="rename it"
        ) from exc
