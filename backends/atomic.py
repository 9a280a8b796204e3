"""Durable files on a local file system: everything that ckptmgr keeps on a disk goes through here.

The order is always the same: write a temporary file beside the target, fsync it, give it its name in one step, fsync the directory.
Skip the first fsync and a power cut leaves a name with no bytes; skip the second and the name itself is lost.
Source: Pillai et al., "All File Systems Are Not Created Equal", OSDI 2014.

Temporary files are named `.ckptmgr-tmp-…`; no listing of ours shows them, `find_temps` does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Literal

from ckptmgr.backends.claim import create_by_claim
from ckptmgr.backends.localfile import SourceFile, write_all
from ckptmgr.backends.oserrors import os_errors
from ckptmgr.core.checksums import Digests

TEMP_PREFIX = ".ckptmgr-tmp-"
BLOCK_BYTES = 2 << 20

# What file systems without hard links answer: FUSE, exFAT, some network mounts.
_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
# What file systems that cannot fsync a directory answer (CIFS, some FUSE): nothing more can be done there.
_NO_DIR_FSYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}


def write_atomic(path: str | os.PathLike[str], data: bytes, *, create: bool = False, durable: bool = True) -> None:
    """Put `data` at `path`, all or nothing, durable on return. The directory must exist.

    Safe from any thread and process. With `create` exactly one of several racing writers wins.

    Args:
        durable: without it, readers see all or nothing, but a power cut may leave anything: for what ends with this process.

    Raises:
        ObjectExistsError: `create`, and something is at `path`; nothing was changed.
        TransientBackendError: `create` on a file system without links, and another writer holds the claim.
        DiskFullError, AccessDeniedError, PermanentBackendError: nothing new is visible at `path`, unless the failure
            came from the last fsync of the directory: then the file is there but may not survive a power cut.
    """
    path = os.fspath(path)
    with os_errors("write", path, needed_bytes=len(data)), _temp_beside(path) as (temp, fd):
        write_all(fd, data)
        if durable:
            os.fsync(fd)
        publish(temp, path, create=create, durable=durable)


def publish(temp: str, path: str, *, create: bool, durable: bool = True) -> None:
    """Give the written and fsynced file `temp` the name `path` in one step, then make the name durable, unless `durable` is false.

    `temp` must be in the directory of `path`. It may still exist afterwards when `create` is set.

    Raises:
        FileExistsError: `create`, and something is at `path`.
    """
    if create:
        try:
            _link(temp, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            create_by_claim(temp, path)
    else:
        os.replace(temp, path)
    if durable:
        fsync_dir(os.path.dirname(path) or ".")


def _link(temp: str, path: str) -> None:
    try:
        os.link(temp, path)
    except FileExistsError:
        # NFS may send a link request twice; the second answer is "exists" although the first one made the link.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(temp), os.lstat(path)):
                return
        raise


def fsync_dir(path: str | os.PathLike[str]) -> None:
    """Make the names in the directory `path` durable; a no-op where the file system cannot do that."""
    path = os.fspath(path)
    with os_errors("fsync", path):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_DIR_FSYNC:
                raise
        finally:
            os.close(fd)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Make the bytes of the file at `path` durable. A failure is final: the kernel may have dropped the dirty pages."""
    path = os.fspath(path)
    with os_errors("fsync", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def make_dirs_durable(path: str | os.PathLike[str], *, durable: bool = True) -> None:
    """Create the directory `path` and its missing parents, each one durable in its parent before the next is made, unless `durable` is false."""
    path = os.path.abspath(path)
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        parent = os.path.dirname(path)
        if parent == path:
            break
        path = parent
    for directory in reversed(missing):
        with os_errors("mkdir", directory):
            try:
                os.mkdir(directory)
            except FileExistsError:
                # Another process made it just now; a file in its place is an error.
                if not os.path.isdir(directory):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory) from None
        if durable:
            fsync_dir(os.path.dirname(directory))


def copy_durable(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    create: bool = False,
    expected: Digests | None = None,
    progress: Callable[[int], object] | None = None,
) -> Digests:
    """Copy the file `src` to `dst`, all or nothing, durable on return; digested in the same pass.

    Args:
        create: refuse if something is at `dst`.
        expected: what `src` held when it was described.
        progress: called with the number of bytes of each block written.

    Returns:
        The digests of what `dst` holds.

    Raises:
        SourceChangedError: `src` is missing, changed while it was read, or is not `expected`; nothing is visible at `dst`.
        ObjectExistsError: `create`, and something is at `dst`.
    """
    dst = os.fspath(dst)
    with SourceFile(src, expected) as source, os_errors("write", dst), _temp_beside(dst) as (temp, fd):
        for block in source.blocks(BLOCK_BYTES):
            write_all(fd, block)
            if progress is not None:
                progress(len(block))
        digests = source.finish()
        os.fsync(fd)
        publish(temp, dst, create=create)
    return digests


def link_or_copy(
    src: str | os.PathLike[str], dst: str | os.PathLike[str], *, sync: bool = True
) -> Literal["link", "copy"]:
    """Make `dst` a hard link to `src`, or a copy where links do not work (another device, FUSE).

    Only for files that nobody writes in place any more: a link shares its bytes.

    Args:
        sync: make the bytes and the name durable. Without it the caller syncs the directory when all its files are in.

    Raises:
        ObjectExistsError: something is at `dst`.
        SourceChangedError: `src` is missing.
    """
    src, dst = os.fspath(src), os.fspath(dst)
    try:
        os.link(src, dst)
    except OSError as error:
        if error.errno in _NO_LINKS | {errno.EXDEV, errno.ENOENT}:
            copy_durable(src, dst, create=True)
            return "copy"
        with os_errors("link", dst):
            raise
    if sync:
        fsync_file(dst)
        fsync_dir(os.path.dirname(dst) or ".")
    return "link"


def digest_file(path: str | os.PathLike[str], *, progress: Callable[[int], object] | None = None) -> Digests:
    """The digests of the file at `path`.

    Raises:
        SourceChangedError: it is missing, not a regular file, or changed while it was read.
    """
    with SourceFile(path) as source:
        for block in source.blocks(BLOCK_BYTES):
            if progress is not None:
                progress(len(block))
        return source.finish()


def is_temp(name: str) -> bool:
    """Whether a base name is that of a temporary file of ours."""
    return name.startswith(TEMP_PREFIX)


def find_temps(root: str | os.PathLike[str]) -> Iterator[str]:
    """The paths of all temporary files below `root`: left by a kill, or still being written by another process."""
    for directory, _, names in os.walk(root):
        yield from (os.path.join(directory, name) for name in names if is_temp(name))


@contextlib.contextmanager
def _temp_beside(path: str) -> Iterator[tuple[str, int]]:
    """A new open file in the directory of `path`; closed and removed at the end, whatever happened."""
    temp = os.path.join(os.path.dirname(path), f"{TEMP_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    # 0o666 and the umask, not mkstemp's 0o600: colleagues must be able to read a shared store.
    fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
    try:
        yield temp, fd
    finally:
        os.close(fd)
        # Gone already after a rename; a temporary file that cannot be removed is clutter, not a failure of the write.
        with contextlib.suppress(OSError):
            os.unlink(temp)
