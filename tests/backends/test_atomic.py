"""Durable local files: the order of the system calls, create-only with and without links, and what failures leave behind."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends import atomic, claim
from ckptmgr.backends.atomic import (
    TEMP_PREFIX,
    copy_durable,
    digest_file,
    find_temps,
    fsync_dir,
    link_or_copy,
    make_dirs_durable,
    write_atomic,
)
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import (
    AccessDeniedError,
    BucketNotFoundError,
    DiskFullError,
    ObjectExistsError,
    PermanentBackendError,
    SourceChangedError,
    TransientBackendError,
)

DEADLINE_S = 60.0


@pytest.fixture
def trace(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that make something durable or visible, in order: `fsync NAME`, `link NAME`, `replace NAME`, `mkdir NAME`."""
    calls: list[str] = []

    def record(name: str, what: Callable[..., str]) -> None:
        real = getattr(os, name)

        def traced(*args: Any, **kwargs: Any) -> Any:
            calls.append(f"{name} {what(*args)}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, traced)

    def base(path: Any) -> str:
        name = os.path.basename(path)
        return "temp" if name.startswith(TEMP_PREFIX) else name

    record("fsync", lambda fd: base(os.readlink(f"/proc/self/fd/{fd}")))
    record("link", lambda src, dst: base(dst))
    record("replace", lambda src, dst: base(dst))
    record("mkdir", lambda path, *mode: base(path))
    return calls


def _no_links(monkeypatch: pytest.MonkeyPatch, number: int = errno.EPERM) -> None:
    def link(src: str, dst: str) -> None:
        raise OSError(number, os.strerror(number), src)

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize(("create", "naming"), [(False, "replace"), (True, "link")])
def test_bytes_before_name_before_directory(tmp_path: Path, trace: list[str], create: bool, naming: str) -> None:
    """A power cut at any moment leaves no name without its bytes, and after the return both are on disk."""
    write_atomic(tmp_path / "f", b"data", create=create)
    assert trace == ["fsync temp", f"{naming} f", f"fsync {tmp_path.name}"]
    assert (tmp_path / "f").read_bytes() == b"data"


def test_copy_is_as_durable_as_a_write(tmp_path: Path, trace: list[str]) -> None:
    """A copy takes the same steps, and returns the digests of what it wrote."""
    data = os.urandom(3 * atomic.BLOCK_BYTES + 5)
    (tmp_path / "src").write_bytes(data)
    moved: list[int] = []
    digests = copy_durable(tmp_path / "src", tmp_path / "dst", progress=moved.append)
    assert trace == ["fsync temp", "replace dst", f"fsync {tmp_path.name}"]
    assert (tmp_path / "dst").read_bytes() == data
    assert digests == digest_bytes(data) == digest_file(tmp_path / "dst")
    assert sum(moved) == len(data)


def test_new_directories_are_durable_from_the_top(tmp_path: Path, trace: list[str]) -> None:
    """Each new directory's name is on disk before the next one is made in it; existing ones cost nothing."""
    make_dirs_durable(tmp_path / "a" / "b")
    assert trace == ["mkdir a", f"fsync {tmp_path.name}", "mkdir b", "fsync a"]
    trace.clear()
    make_dirs_durable(tmp_path / "a" / "b")
    assert trace == []


def test_a_file_in_place_of_a_directory_is_named(tmp_path: Path) -> None:
    """A path below a file cannot be made, and the file stays."""
    (tmp_path / "file").write_bytes(b"1")
    with pytest.raises(PermanentBackendError, match="Not a directory"):
        make_dirs_durable(tmp_path / "file" / "sub")
    assert (tmp_path / "file").read_bytes() == b"1"


def test_missing_directory(tmp_path: Path) -> None:
    """A write into a directory that does not exist says so."""
    with pytest.raises(BucketNotFoundError, match="its directory does not exist"):
        write_atomic(tmp_path / "none" / "f", b"1")


def test_new_files_obey_the_umask(tmp_path: Path) -> None:
    """Others may read a store that the umask lets them read."""
    before = os.umask(0o022)
    try:
        write_atomic(tmp_path / "f", b"1")
    finally:
        os.umask(before)
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o644


# -- create-only --------------------------------------------------------------------------------------------------


def test_a_link_request_sent_twice_is_a_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS may answer "exists" to the retransmission of a link that was made: the file is ours, so it is no refusal."""
    real = os.link

    def twice(src: str, dst: str) -> None:
        real(src, dst)
        raise FileExistsError(errno.EEXIST, "File exists", src)

    monkeypatch.setattr(os, "link", twice)
    write_atomic(tmp_path / "f", b"mine", create=True)
    assert (tmp_path / "f").read_bytes() == b"mine"
    with pytest.raises(ObjectExistsError):
        write_atomic(tmp_path / "f", b"other", create=True)
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_create_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Where links are refused a claim decides, and leaves nothing behind."""
    _no_links(monkeypatch, number)
    write_atomic(tmp_path / "f", b"1", create=True)
    with pytest.raises(ObjectExistsError):
        write_atomic(tmp_path / "f", b"2", create=True)
    assert (tmp_path / "f").read_bytes() == b"1"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("links", [True, False])
def test_create_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    """Of eight racing threads one creates the file; the others are refused, or told that somebody is at it."""
    if not links:
        _no_links(monkeypatch)
    for attempt in range(20):
        path = tmp_path / f"f{attempt}"
        barrier = threading.Barrier(8)
        won: list[int] = []
        lost: list[int] = []

        def run(number: int, path: Path = path, barrier: threading.Barrier = barrier, won: list[int] = won, lost: list[int] = lost) -> None:  # fmt: skip
            barrier.wait(DEADLINE_S)
            try:
                write_atomic(path, b"%d" % number, create=True)
            except (ObjectExistsError, TransientBackendError):
                lost.append(number)
            else:
                won.append(number)

        threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        assert (len(won), len(lost)) == (1, 7)
        assert path.read_bytes() == b"%d" % won[0]
    assert not [name for name in os.listdir(tmp_path) if not name.startswith("f") or name.endswith(".claim")]


def test_a_living_claim_keeps_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one writer is between its claim and its rename, another is told to come back, not that the file exists."""
    _no_links(monkeypatch)
    at_rename, go_on = threading.Event(), threading.Event()
    real = os.rename

    def slow(src: str, dst: str) -> None:
        at_rename.set()
        assert go_on.wait(DEADLINE_S)
        real(src, dst)

    monkeypatch.setattr(os, "rename", slow)
    first = threading.Thread(target=write_atomic, args=(tmp_path / "f", b"first"), kwargs={"create": True}, daemon=True)
    first.start()
    assert at_rename.wait(DEADLINE_S)
    with pytest.raises(TransientBackendError, match=f"process {os.getpid()}"):
        write_atomic(tmp_path / "f", b"second", create=True)
    go_on.set()
    first.join(DEADLINE_S)
    with pytest.raises(ObjectExistsError):
        write_atomic(tmp_path / "f", b"second", create=True)
    assert (tmp_path / "f").read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["f"]


_DIE_AT_RENAME = """
import os, sys
from ckptmgr.backends.atomic import write_atomic
def link(src, dst): raise OSError(1, "no links")
os.link = link
os.rename = lambda src, dst: os._exit(9)
write_atomic(sys.argv[1], b"dead", create=True)
"""


def test_a_dead_claim_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that died between claim and rename, even two in a row, does not block the key for ever."""
    path = tmp_path / "f"
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", _DIE_AT_RENAME, str(path)], timeout=DEADLINE_S, check=False)
        assert done.returncode == 9
    assert (tmp_path / "f.claim" / "next").is_dir()
    _no_links(monkeypatch)
    write_atomic(path, b"alive", create=True)
    assert path.read_bytes() == b"alive"
    assert not (tmp_path / "f.claim").exists()


@pytest.mark.parametrize("owner", ["elsewhere", "unwritten"])
def test_a_claim_whose_owner_cannot_be_judged_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """A claim of another machine, or one without a readable owner, is left alone, and the message says what to remove."""
    _no_links(monkeypatch)
    held = tmp_path / "f.claim"
    held.mkdir()
    if owner == "elsewhere":
        (held / claim._OWNER).write_text(json.dumps({**claim._identity(), "host": "another-host", "pid": 1}))
    with pytest.raises(TransientBackendError) as caught:
        write_atomic(tmp_path / "f", b"mine", create=True)
    assert str(held) in caught.value.hint
    assert os.listdir(tmp_path) == ["f.claim"]


def test_a_reused_pid_is_not_its_predecessor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pid with another start time, or from before a reboot, is dead; this process is not."""
    me = claim._identity()
    assert not claim._is_dead(me)
    assert claim._is_dead({**me, "start": "1"})
    assert claim._is_dead({**me, "boot": "another"})
    assert not claim._is_dead({**me, "namespace": "pid:[1]", "start": "1"})
    assert not claim._is_dead({**me, "host": "another", "start": "1"})


# -- failures -----------------------------------------------------------------------------------------------------


def _fill_up(monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
    """Let write(2) move `after` bytes and then fail, as a disk does: a short write first."""
    real = os.write
    room = after

    def write(fd: int, data: Any) -> int:
        nonlocal room
        if room == 0:
            raise OSError(number, os.strerror(number))
        moved = real(fd, memoryview(data)[:room])
        room -= moved
        return moved

    monkeypatch.setattr(os, "write", write)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("create", [False, True])
def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, create: bool) -> None:
    """A full disk leaves what was there, and nothing else; the error says how much is free."""
    if not create:
        (tmp_path / "f").write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    _fill_up(monkeypatch, 3, number)
    with pytest.raises(DiskFullError) as caught:
        write_atomic(tmp_path / "f", b"123456", create=create)
    assert caught.value.needed_bytes == 6  # type: ignore[attr-defined]
    assert caught.value.free_bytes > 0  # type: ignore[attr-defined]
    assert "bytes free" in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before
    assert create or (tmp_path / "f").read_bytes() == b"old"


def test_disk_full_while_copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that does not fit is not there."""
    (tmp_path / "src").write_bytes(b"x" * 1000)
    _fill_up(monkeypatch, 100)
    with pytest.raises(DiskFullError):
        copy_durable(tmp_path / "src", tmp_path / "dst")
    assert os.listdir(tmp_path) == ["src"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
def test_a_really_full_disk(tmp_path: Path) -> None:
    """On a file system of 1 MiB, a write of 2 MiB fails as designed, and the next small one works."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"mount is refused here: {mounted.stderr.decode()}")
    try:
        with pytest.raises(DiskFullError) as caught:
            write_atomic(tmp_path / "f", b"x" * (2 << 20))
        assert caught.value.needed_bytes == 2 << 20  # type: ignore[attr-defined]
        assert os.listdir(tmp_path) == []
        write_atomic(tmp_path / "f", b"small", create=True)
        assert (tmp_path / "f").read_bytes() == b"small"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_failed_fsync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After fsync reported EIO the kernel may have dropped the data: nothing is published, and fsync is not asked again."""
    (tmp_path / "f").write_bytes(b"old")
    asked = []

    def fsync(fd: int) -> None:
        asked.append(fd)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(PermanentBackendError, match="Input/output error"):
        write_atomic(tmp_path / "f", b"new")
    assert len(asked) == 1
    assert (tmp_path / "f").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["f"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Missing rights and read-only mounts are refusals that name the path."""
    real = os.open

    def refuse(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), path)
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(AccessDeniedError, match="/f'"):
        write_atomic(tmp_path / "f", b"1")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_directories_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A file system without fsync of directories is used as well as it can be."""

    def fsync(fd: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fsync)
    fsync_dir(tmp_path)


_KILLED_AT = """
import os, signal, sys
target, mode, stop_at = sys.argv[1], sys.argv[2], int(sys.argv[3])
from ckptmgr.backends import atomic, localfile
count = 0
def counted(name):
    real = getattr(os, name)
    def call(*args, **kwargs):
        global count
        count += 1
        if count == stop_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **kwargs)
    setattr(os, name, call)
for name in ("open", "write", "fsync", "link", "replace", "unlink", "close"):
    counted(name)
atomic.write_atomic(target, b"new" * 1000, create=mode == "create")
"""


@pytest.mark.parametrize("mode", ["create", "overwrite"])
def test_killed_at_every_step(tmp_path: Path, mode: str) -> None:
    """SIGKILL before each system call in turn: the file is the old one, the new one, or not there, and nothing is listed besides."""
    old = {"create": None, "overwrite": b"old"}[mode]
    seen = set()
    for step in range(1, 30):
        directory = tmp_path / str(step)
        directory.mkdir()
        path = directory / "f"
        if old is not None:
            path.write_bytes(old)
        done = subprocess.run(
            [sys.executable, "-c", _KILLED_AT, str(path), mode, str(step)], timeout=DEADLINE_S, check=False
        )
        left = path.read_bytes() if path.exists() else None
        assert left in (old, b"new" * 1000), f"torn at step {step}"
        seen.add(left)
        assert {name for name in os.listdir(directory) if not name.startswith(TEMP_PREFIX)} <= {"f"}
        assert len(list(find_temps(directory))) <= 1
        if done.returncode == 0:
            break
        assert done.returncode == -signal.SIGKILL
    else:
        pytest.fail("the write never ended")
    assert step > 6
    assert seen == {old, b"new" * 1000}


# -- links and sources --------------------------------------------------------------------------------------------


def test_link_or_copy_links(tmp_path: Path, trace: list[str]) -> None:
    """On one file system no byte is copied, and both bytes and name are made durable."""
    (tmp_path / "src").write_bytes(b"1")
    assert link_or_copy(tmp_path / "src", tmp_path / "dst") == "link"
    assert (tmp_path / "dst").stat().st_ino == (tmp_path / "src").stat().st_ino
    assert trace == ["link dst", "fsync dst", f"fsync {tmp_path.name}"]
    with pytest.raises(ObjectExistsError):
        link_or_copy(tmp_path / "src", tmp_path / "dst")


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK])
def test_link_or_copy_copies_where_links_do_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Across devices the bytes are copied, durably, and never over something."""
    (tmp_path / "src").write_bytes(b"1")
    real = os.link

    def link(src: str, dst: str) -> None:
        if os.path.basename(src) == "src":
            raise OSError(number, os.strerror(number))
        real(src, dst)

    monkeypatch.setattr(os, "link", link)
    assert link_or_copy(tmp_path / "src", tmp_path / "dst") == "copy"
    assert (tmp_path / "dst").read_bytes() == b"1"
    assert (tmp_path / "dst").stat().st_ino != (tmp_path / "src").stat().st_ino
    with pytest.raises(ObjectExistsError):
        link_or_copy(tmp_path / "src", tmp_path / "dst")


def test_link_or_copy_of_nothing(tmp_path: Path) -> None:
    """A source that is gone is named as such."""
    with pytest.raises(SourceChangedError, match="is gone"):
        link_or_copy(tmp_path / "src", tmp_path / "dst")
    assert os.listdir(tmp_path) == []


def test_copy_of_a_file_that_changes_meanwhile(tmp_path: Path) -> None:
    """I10: a source that grows, or is rewritten in place, while it is copied leaves no copy."""
    for change in (lambda file: file.write(b"x"), lambda file: (file.seek(0), file.write(b"y"))):
        source = tmp_path / "src"
        source.write_bytes(b"0" * (2 * atomic.BLOCK_BYTES))
        os.utime(source, ns=(1, 1))

        def meddle(moved: int, change: Any = change, source: Path = source) -> None:
            with open(source, "r+b") as file:
                file.seek(0, os.SEEK_END)
                change(file)

        with pytest.raises(SourceChangedError):
            copy_durable(source, tmp_path / "dst", progress=meddle)
        assert os.listdir(tmp_path) == ["src"]


def test_copy_of_something_else(tmp_path: Path) -> None:
    """A source that is not what was described leaves no copy, and both digests are in the error."""
    (tmp_path / "src").write_bytes(b"actual")
    with pytest.raises(SourceChangedError) as caught:
        copy_durable(tmp_path / "src", tmp_path / "dst", expected=digest_bytes(b"wanted"))
    assert caught.value.expected == digest_bytes(b"wanted").blake3  # type: ignore[attr-defined]
    assert caught.value.actual == digest_bytes(b"actual").blake3  # type: ignore[attr-defined]
    assert os.listdir(tmp_path) == ["src"]


def test_digest_of_a_fifo_does_not_wait(tmp_path: Path) -> None:
    """A named pipe among the files of a checkpoint is refused at once instead of waiting for its writer."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SourceChangedError, match="not a regular file"):
        digest_file(tmp_path / "pipe")
