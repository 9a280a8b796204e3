"""What is particular to directories as a store; the rest is in the contract."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.atomic import TEMP_PREFIX
from ckptmgr.backends.local import LocalBackend
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendTimeoutError,
    ConfigError,
    DiskFullError,
    ObjectNotFoundError,
    PermanentBackendError,
    TransientBackendError,
)


@pytest.fixture
def backend() -> LocalBackend:
    return LocalBackend()


def test_temporary_files_are_not_listed(backend: LocalBackend, tmp_path: Path) -> None:
    """What a killed writer left, or another one is writing, is in no listing."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / f"{TEMP_PREFIX}1").write_bytes(b"half")
    (tmp_path / "d" / "f").write_bytes(b"1")
    assert backend.find(str(tmp_path)) == [str(tmp_path / "d" / "f")]
    assert backend.ls(str(tmp_path / "d"), detail=False) == [str(tmp_path / "d" / "f")]


def test_an_unreadable_directory_is_not_an_empty_one(
    backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I7: a listing that could not be completed raises, also if only one directory deep down refused."""
    (tmp_path / "a" / "locked").mkdir(parents=True)
    (tmp_path / "a" / "f").write_bytes(b"1")
    real = os.scandir

    def scandir(path: Any) -> Any:
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(AccessDeniedError):
        backend.find(str(tmp_path))
    with pytest.raises(AccessDeniedError):
        backend.ls(str(tmp_path / "a" / "locked"))
    with pytest.raises(AccessDeniedError):
        list(backend.walk(str(tmp_path)))


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ESTALE, TransientBackendError),
        (errno.ETIMEDOUT, BackendTimeoutError),
        (errno.EIO, PermanentBackendError),
        (errno.EACCES, AccessDeniedError),
        (errno.ENOENT, ObjectNotFoundError),
        (errno.ENOTDIR, ObjectNotFoundError),
    ],
)
def test_only_the_systems_own_no_is_not_found(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    """I7: a network mount that hangs or breaks never looks like a missing file."""

    def fail(path: Any, **kwargs: Any) -> Any:
        raise OSError(number, os.strerror(number), path)

    monkeypatch.setattr(os, "stat", fail)
    with pytest.raises(kind) as caught:
        backend.info("/store/f")
    assert type(caught.value) is kind
    if kind is ObjectNotFoundError:
        assert not backend.exists("/store/f")
    else:
        with pytest.raises(kind):
            backend.exists("/store/f")


def test_symbolic_links(backend: LocalBackend, tmp_path: Path) -> None:
    """Links are followed; one that leads back up, to itself or nowhere ends the walk there."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "f").write_bytes(b"1")
    (tmp_path / "alias").symlink_to("real")
    (tmp_path / "real" / "up").symlink_to("..")
    (tmp_path / "self").symlink_to("self")
    (tmp_path / "nowhere").symlink_to("none")
    found = backend.find(str(tmp_path))
    assert str(tmp_path / "real" / "f") in found
    assert str(tmp_path / "alias" / "f") in found
    assert all(Path(name).read_bytes() == b"1" for name in found)


def test_a_path_that_leads_upwards_is_refused(backend: LocalBackend, tmp_path: Path) -> None:
    """A key can never reach outside of the store."""
    with pytest.raises(ConfigError, match="upwards"):
        backend.pipe_file(f"{tmp_path}/store/../escaped", b"1")
    assert os.listdir(tmp_path) == []


def test_rmdir_removes_the_empty(backend: LocalBackend, tmp_path: Path) -> None:
    """An empty directory goes, one with a file stays."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "f").write_bytes(b"1")
    backend.rmdir(str(tmp_path / "empty"))
    backend.rmdir(str(tmp_path / "full"))
    assert os.listdir(tmp_path) == ["full"]


def test_rm_recursive_leaves_no_empty_directories(backend: LocalBackend, tmp_path: Path) -> None:
    """A tree is removed with its directories, its neighbours are not."""
    (tmp_path / "tree" / "a" / "b").mkdir(parents=True)
    (tmp_path / "tree" / "a" / "b" / "f").write_bytes(b"1")
    (tmp_path / "tree2").mkdir()
    backend.rm(str(tmp_path / "tree"), recursive=True)
    assert os.listdir(tmp_path) == ["tree2"]


def test_what_cannot_be_removed_is_named_and_the_rest_is_gone(backend: LocalBackend, tmp_path: Path) -> None:
    """One refusal among many removals does not stop the others, and is reported."""
    (tmp_path / "directory").mkdir()
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(b"1")
    with pytest.raises(PermanentBackendError) as caught:
        backend.rm_files([str(tmp_path / name) for name in ("a", "directory", "b")])
    assert list(caught.value.failed) == [str(tmp_path / "directory")]  # type: ignore[attr-defined]
    assert os.listdir(tmp_path) == ["directory"]


def test_a_full_disk_under_a_download(backend: LocalBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is about the target, not about the store."""
    (tmp_path / "src").write_bytes(b"1")

    def write(fd: int, data: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(DiskFullError, match="dst"):
        backend.get_file(str(tmp_path / "src"), str(tmp_path / "dst"))


def test_etag_changes_with_the_content_even_at_the_same_size(backend: LocalBackend, tmp_path: Path) -> None:
    """A cache keyed by ETag never serves the bytes of the replaced file."""
    backend.pipe_file(str(tmp_path / "f"), b"one")
    first = backend.info(str(tmp_path / "f"))["etag"]
    backend.pipe_file(str(tmp_path / "f"), b"two")
    assert backend.info(str(tmp_path / "f"))["etag"] != first
