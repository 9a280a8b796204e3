"""Create-only where hard links are refused (FUSE, exFAT): a directory `<path>.claim` decides who may create `path`.

`mkdir` is atomic on every file system. Who makes the claim, and then still finds nothing at `path`, renames its file there and
removes the claim. A claim whose owner died is taken over by making `next` inside it: again one `mkdir`, again one winner, and a claim is
never removed before its file exists, so two processes cannot both believe that it is theirs.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket

from ckptmgr.core.errors import TransientBackendError

CLAIM_SUFFIX = ".claim"
_OWNER = ".ckptmgr-tmp-owner"


def create_by_claim(temp: str, path: str) -> None:
    """Rename `temp` to `path` unless something is there.

    Raises:
        FileExistsError: something is at `path`.
        TransientBackendError: another writer holds the claim: it is about to create `path`, or it died on another machine.
    """
    if os.path.lexists(path):
        raise _taken(path)
    claim = path + CLAIM_SUFFIX
    holder = claim
    while True:
        try:
            os.mkdir(holder)
            break
        except FileExistsError:
            owner = _read_owner(holder)
            if owner is None or not _is_dead(owner):
                raise _held(path, claim, owner) from None
            holder = os.path.join(holder, "next")
    try:
        _write_owner(holder)
        # The previous holder may have finished, and removed its claim, between our first look and our mkdir.
        if os.path.lexists(path):
            raise _taken(path)
        os.rename(temp, path)
    finally:
        # Also after a failure: with nothing at `path`, nobody may be kept out by a claim of a living process.
        with contextlib.suppress(OSError):
            shutil.rmtree(claim if os.path.lexists(path) else holder)


def _taken(path: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)


def _held(path: str, claim: str, owner: dict[str, object] | None) -> TransientBackendError:
    if owner is None and os.path.lexists(path):
        raise _taken(path)
    who = f"process {owner.get('pid')} on {owner.get('host')}" if owner else "an unknown process"
    return TransientBackendError(
        f"{path!r} is being created by {who}",
        hint=f"if that process is dead, remove the directory {claim!r}",
        backend="file",
        operation="create",
        key=path,
    )


def _identity() -> dict[str, object]:
    """Who this process is, in a form that another process of the same machine can check."""
    return {
        "host": socket.gethostname(),
        "boot": _boot_id(),
        # A pid means nothing outside its namespace: two containers of one machine may share host name and boot id.
        "namespace": _pid_namespace(),
        "pid": os.getpid(),
        "start": _start_time(os.getpid()),
    }


def _is_dead(owner: dict[str, object]) -> bool:
    """Whether `owner` certainly no longer runs; False whenever this machine cannot tell."""
    me = _identity()
    if owner.get("host") != me["host"] or None in (
        owner.get("boot"),
        me["boot"],
        owner.get("namespace"),
        me["namespace"],
    ):
        return False
    if owner["boot"] != me["boot"]:
        return True
    if owner["namespace"] != me["namespace"]:
        return False
    start = _start_time(int(str(owner["pid"])))
    return start is None or start != owner.get("start")


def _boot_id() -> str | None:
    return _first_line("/proc/sys/kernel/random/boot_id")


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _start_time(pid: int) -> str | None:
    """When the process `pid` started, in clock ticks since boot; None if there is none. Tells a reused pid from its predecessor."""
    line = _first_line(f"/proc/{pid}/stat")
    # The second field is the command in parentheses, which may itself hold spaces and parentheses.
    return None if line is None else line.rpartition(")")[2].split()[19]


def _first_line(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.readline().strip()
    except OSError:
        return None


def _write_owner(directory: str) -> None:
    with open(os.path.join(directory, _OWNER), "w", encoding="utf-8") as file:
        json.dump(_identity(), file)
        file.flush()
        os.fsync(file.fileno())


def _read_owner(directory: str) -> dict[str, object] | None:
    """The owner recorded in a claim; None when it is not written yet, torn, or gone."""
    try:
        with open(os.path.join(directory, _OWNER), encoding="utf-8") as file:
            owner = json.load(file)
    except (OSError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None
