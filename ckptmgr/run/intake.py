"""Taking what a framework wrote into the local tier: at once, without reading it, and safe from its rotation.

Hugging Face's Trainer deletes old checkpoint directories as soon as it has written a new one, whether they were uploaded or not. A hard link keeps
the bytes whatever becomes of the name. It also *shares* them: who writes such a file in place (`torch.save` to an existing path truncates it)
reaches through the link. So only files that the framework calls final are linked; all others get bytes of their own, by reflink where the
file system has it, else by a copy. Should a linked file be written to all the same, its digest tells: what is uploaded is all old or
nothing, never a mixture (I10).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from ckptmgr.backends.atomic import TEMP_PREFIX, is_temp
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core.errors import SourceChangedError
from ckptmgr.core.layout import Stem
from ckptmgr.run.contents import storable_files
from ckptmgr.run.tier import LocalTier

# linux/fs.h: share the blocks of two files until either is written to (XFS, Btrfs, bcachefs, some network file systems).
_FICLONE = 0x40049409
_BLOCK_BYTES = 16 << 20
# Another disk, no links there, somebody else's file under fs.protected_hardlinks, too many links: a copy will do.
_NO_LINK = {
    errno.EXDEV,
    errno.EPERM,
    errno.EACCES,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EMLINK,
    errno.EINVAL,
}


def take(tier: LocalTier, source: Path, stem: Stem, *, final: bool = True) -> Path:
    """Fill the prepared directory of `stem` with the files of `source`; nothing is digested or synced here.

    With hard links this takes microseconds per file, whatever their size. Links in `source` that lead to files are followed, and what they lead to is
    copied: it need not be the framework's own. Empty folders are left out.

    Args:
        final: whether the framework never writes these files in place again; else they are reflinked or copied, which takes as long as it takes.

    Returns:
        The prepared directory, for `describe` and `LocalTier.commit`.

    Raises:
        SourceChangedError: `source`, or a file of it, is gone or was written to while it was copied.
        ConfigError: `source` is empty or holds something that cannot be stored.
        DiskFullError, AccessDeniedError, PermanentBackendError: as the disk says.
            After any of them nothing is left in the tier, and `source` is as it was.
    """
    source = Path(os.path.abspath(source))
    if not source.is_dir():
        raise SourceChangedError(
            f"{source} {'is not a directory' if source.exists() else 'is gone'}, so step {stem.step} cannot be taken from it",
            hint="take a checkpoint before anything renames or removes it",
            path=str(source),
        )
    # A killed `unshare` leaves one behind.
    names = [name for name in storable_files(source) if not is_temp(name.rsplit("/", 1)[-1])]
    prepared = tier.prepare(stem)
    try:
        for name in names:
            target = prepared / name
            with os_errors("mkdir", str(target.parent)):
                target.parent.mkdir(parents=True, exist_ok=True)
            _bring(source / name, target, link=final)
    except BaseException:
        tier.discard(prepared)
        raise
    return prepared


def is_linkable(source: Path, tier_root: Path) -> bool:
    """Whether files below `source` can be hard-linked into the tier, as far as the disks tell; either may not exist yet."""
    return _device_of(source) == _device_of(tier_root)


def unshare(directory: Path) -> int:
    """Give each file of `directory` that shares its bytes with another name bytes of its own; the number of bytes copied.

    For a framework that is about to write into an existing checkpoint directory: what was taken from it earlier stays what it was. Each file is
    replaced in one step, with the same mode and times; it is the other name that keeps the inode. Does nothing where nothing is shared,
    or where there is no such directory.

    Raises:
        SourceChangedError: a file was written to meanwhile.
        DiskFullError, AccessDeniedError, PermanentBackendError: files not replaced yet are still shared.
    """
    copied = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(folder, name)
            found = _shared(path)
            if found is not None:
                _replace_by_copy(path)
                copied += found.st_size
    return copied


def _bring(source: Path, target: Path, *, link: bool) -> None:
    # os.link would link a symbolic link itself.
    if link and not source.is_symlink():
        try:
            os.link(source, target)
        except FileNotFoundError as exc:
            raise _vanished(source) from exc
        except OSError as exc:
            if exc.errno not in _NO_LINK:
                with os_errors("link", str(target)):
                    raise
        else:
            return
    _copy(source, target)


def _copy(source: str | Path, target: str | Path) -> None:
    """Make the new file `target` with the bytes of `source`, which must not change meanwhile."""
    with os_errors("open", str(source)):
        try:
            reader = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError) as exc:
            raise _vanished(source) from exc
    try:
        before = os.fstat(reader)
        with os_errors("write", str(target), needed_bytes=before.st_size):
            writer = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
            try:
                if not _reflink(reader, writer):
                    _copy_bytes(reader, writer, before.st_size)
            finally:
                os.close(writer)
        after = os.fstat(reader)
    finally:
        os.close(reader)
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise SourceChangedError(
            f"{source} was written to while it was copied",
            hint="take a checkpoint when the framework has finished writing it",
            path=str(source),
        )


def _reflink(reader: int, writer: int) -> bool:
    try:
        fcntl.ioctl(writer, _FICLONE, reader)
    except OSError:
        # Whatever the reason: a copy works as well, and meets a full or broken disk with a better message.
        return False
    return True


def _copy_bytes(reader: int, writer: int, size: int) -> None:
    """Copy within the kernel: neither the GIL nor this process's memory takes part."""
    at = 0
    while at < size:
        sent = os.sendfile(writer, reader, at, min(_BLOCK_BYTES, size - at))
        if not sent:
            return  # it became shorter; the caller sees that by its size
        at += sent


def _vanished(source: str | Path) -> SourceChangedError:
    return SourceChangedError(
        f"{source} vanished while its checkpoint was taken",
        hint="take a checkpoint before anything renames or removes it",
        path=str(source),
    )


def _shared(path: str) -> os.stat_result | None:
    """The facts of a regular file that has another name; None of anything else."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found if found.st_nlink > 1 and (found.st_mode & 0o170000) == 0o100000 else None


def _replace_by_copy(path: str) -> None:
    # A name that clean-up knows, should this process be killed here.
    temp = os.path.join(os.path.dirname(path), f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    try:
        _copy(path, temp)
        with os_errors("write", path):
            shutil.copystat(path, temp)
            os.replace(temp, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)


def _device_of(path: Path) -> int:
    """The device that `path` is on, or would be."""
    path = Path(os.path.realpath(path))
    return os.stat(next(place for place in (path, *path.parents) if place.exists())).st_dev
