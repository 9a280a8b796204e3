"""The directory that a checkpoint is restored into: what may be there, the partial copy beside it, its final name."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckptmgr.backends.atomic import fsync_dir, fsync_file, make_dirs_durable
from ckptmgr.core.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    ConfigError,
    DiskFullError,
    ManifestError,
)
from ckptmgr.core.layout import PARTIAL, RESUMED
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import locks
from ckptmgr.run.driver import file_problem
from ckptmgr.run.sidecar import Sidecar, read_sidecar, write_sidecar

_KEEP_FREE = 16 << 20


@dataclass(frozen=True, slots=True)
class Target:
    """The directory at the absolute path `directory`; its sidecar and its partial copy lie beside it.

    Attributes:
        lasting: it is to survive a power cut. Without it nothing is synced: right only where nobody will take what a dead process left there.
    """

    directory: Path
    lasting: bool = True

    @property
    def partial(self) -> Path:
        """Where bytes arrive. A kill leaves it behind, and a repeat takes from it what verifies."""
        return self.directory.with_name(self.directory.name + PARTIAL)

    def refuse_run(self, root: Path) -> None:
        """Raise ConfigError if the directory lies in the run directory `root`, or around it: neither may be written into, nor replaced.

        A run's own `resumed` folder is meant for this.
        """
        here, root = Path(os.path.realpath(self.directory)), Path(os.path.realpath(root))
        inside = here == root or root in here.parents
        if (inside and root / RESUMED not in here.parents) or here in root.parents:
            raise ConfigError(
                f"{self.directory} {'lies inside' if inside else 'contains'} the run {root} itself",
                hint="give another --to; nothing was changed",
            )

    def difference(self, sidecar: Sidecar) -> str | None:
        """What the directory holds other than exactly the files of this manifest, by reading all of it; None, and its sidecar is up to date, if nothing."""
        manifest = sidecar.manifest
        if self.directory.is_symlink() or not self.directory.is_dir():
            return "it is no directory"
        wanted = {entry.path for entry in manifest.files}
        # The first level alone tells most other directories apart, and some of those are large.
        top = {path.name for path in self.directory.iterdir()} - {path.split("/")[0] for path in wanted}
        if top:
            return f"{min(top)} is not part of {manifest.id}"
        there_now = {path.relative_to(self.directory).as_posix(): path for path in _files(self.directory)}
        if there_now.keys() != wanted:
            more, less = there_now.keys() - wanted, wanted - there_now.keys()
            return f"{min(more)} is not part of {manifest.id}" if more else f"{min(less)} is missing"
        # A link may be gone, or lead to something else, by the time the trainer reads it.
        links = [name for name, path in there_now.items() if path.is_symlink()]
        if links:
            return f"{min(links)} is a link"
        problems = ((entry.path, file_problem(self.directory / entry.path, entry)) for entry in manifest.files)
        differs = next((f"{path} {why}" for path, why in problems if why is not None), None)
        if differs is not None:
            return differs
        try:
            there = read_sidecar(self.directory, parts=True)
        except (CheckpointNotFoundError, ManifestError):
            there = None
        if there != sidecar:
            write_sidecar(self.directory, sidecar, durable=self.lasting)
        return None

    def check(self, *, replace: bool, difference: str = "") -> None:
        """Refuse what is there before anything is fetched.

        Args:
            difference: from what is to come there, for the message.

        Raises:
            CheckpointExistsError: something else is there, and `replace` is not asked for.
            ConfigError: it cannot be written, or replaced.
        """
        directory = self.directory
        if os.path.ismount(directory):
            raise ConfigError(
                f"{directory} is a mount point, which cannot be given its content in one step",
                hint=f"give a directory below it, such as --to {directory / 'checkpoint'}",
            )
        if not directory.is_symlink() and directory.is_dir() and not any(directory.iterdir()):
            return
        if os.path.lexists(directory):
            if not (directory.is_symlink() or directory.is_dir() or directory.is_file()):
                raise ConfigError(
                    f"{directory} is a device, a pipe or a socket, and is not replaced",
                    hint="give another --to; nothing was changed",
                )
            if not replace:
                what = "is a file"
                if directory.is_dir():
                    what = "holds something else" + (f": {difference}" if difference else "")
                raise CheckpointExistsError(
                    f"{directory} {what}", hint="give another --to, or --replace to replace it; nothing was changed"
                )
            if any(kept == directory or directory in kept.parents for kept in (Path.cwd(), Path("~").expanduser())):
                raise ConfigError(
                    f"{directory} is the working or the home directory, or holds it, and is not replaced",
                    hint="give another --to; nothing was changed",
                )
        above = _existing_parent(directory)
        if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{directory} cannot be made: {above} is {'not writable' if above.is_dir() else 'a file'}",
                hint="give another --to",
            )

    def check_room(self, manifest: Manifest, *, linked_from: Path | None) -> None:
        """Refuse before the first byte when the disk cannot hold `manifest`'s files (K069).

        Args:
            linked_from: a local tier to make hard links from: on the same disk they need no room.

        Raises:
            DiskFullError: with both numbers.
        """
        above = _existing_parent(self.directory)
        if linked_from is not None and os.stat(linked_from).st_dev == os.stat(above).st_dev:
            return
        have = sum(min(entry.size, _size(self.partial / entry.path)) for entry in manifest.files)
        needed, free = manifest.size_bytes - have + _KEEP_FREE, shutil.disk_usage(above).free
        if needed > free:
            raise DiskFullError(
                f"{above} has {free} bytes free, but checkpoint {manifest.id} needs {manifest.size_bytes}",
                hint="free some space or give another --to; nothing was fetched",
                needed_bytes=needed,
                free_bytes=free,
            )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the only process of this machine that fills the directory; waits for another one, which may be about to finish it."""
        with locks.waiting("targets", str(self.directory)):
            yield

    @contextlib.contextmanager
    def partial_copy(self, manifest: Manifest) -> Iterator[Path]:
        """The partial directory, for the length of a `with` block in which it is filled and published.

        Of an earlier one only paths that belong to `manifest` are left. It stays when the block fails (the store, the disk, Ctrl-C), so that a
        repeat goes on from there; when the block ends without publishing it is removed, and so are the parents that were made for it.
        """
        above = _existing_parent(self.directory)
        make_dirs_durable(self.partial, durable=self.lasting)
        _sweep(self.partial, {entry.path for entry in manifest.files})
        try:
            yield self.partial
        except BaseException:
            if not any(True for _ in _files(self.partial)):
                self._remove_partial(above)
            raise
        self._remove_partial(above)

    def _remove_partial(self, above: Path) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        for parent in self.partial.parents:
            if parent == above:
                return
            with contextlib.suppress(OSError):  # something is in it, or was published into it
                parent.rmdir()

    def publish(self, sidecar: Sidecar) -> None:
        """Give the partial directory, which is complete, its final name. Synced first: a name that survives a power cut must have its bytes."""
        _sweep(
            self.partial, {entry.path for entry in sidecar.manifest.files}
        )  # what came in meanwhile was not verified
        if self.lasting:
            for entry in sidecar.manifest.files:
                fsync_file(self.partial / entry.path)
            for folder in {self.partial, *(path for path in self.partial.rglob("*") if path.is_dir())}:
                fsync_dir(folder)
        old: Path | None = None
        if not self.directory.is_symlink() and self.directory.is_dir() and not any(self.directory.iterdir()):
            self.directory.rmdir()
        elif os.path.lexists(self.directory):
            old = self.directory.with_name(f"{self.directory.name}.replaced-{os.getpid()}")
            os.rename(self.directory, old)
        try:
            # Before the final name: without it the directory would have no known origin after a kill between the two. After the old one has lost that
            # name: or this sidecar would call the old files the new checkpoint.
            write_sidecar(self.directory, sidecar, durable=self.lasting)
            os.rename(self.partial, self.directory)
        except BaseException:
            if old is not None and not os.path.lexists(self.directory):
                os.rename(old, self.directory)
            raise
        if self.lasting:
            fsync_dir(self.directory.parent)
        if old is not None:
            shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()


def _existing_parent(directory: Path) -> Path:
    return next(parent for parent in directory.parents if os.path.lexists(parent))


def _files(directory: Path) -> Iterator[Path]:
    """Everything below `directory` that is not a folder; links are not followed."""
    return (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() and not path.is_symlink() else 0


def _sweep(partial: Path, wanted: set[str]) -> None:
    """Remove what cannot become part of the checkpoint: files and links of another one, and folders where a file must go."""
    folders = {parent.as_posix() for path in wanted for parent in Path(path).parents}
    for path in sorted(partial.rglob("*"), reverse=True):
        name = path.relative_to(partial).as_posix()
        if path.is_symlink() or not path.is_dir():
            if path.is_symlink() or name not in wanted:
                path.unlink()
        elif name not in folders:
            path.rmdir()  # emptied before: what is below a folder sorts behind it
