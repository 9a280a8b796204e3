"""Taking a framework's directory into the local tier: by link, reflink or copy, safe from its rotation, never half."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ckptmgr.backends.registry import open_store
from ckptmgr.core.errors import CkptmgrError, ConfigError, DiskFullError, PermanentBackendError, SourceChangedError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import intake
from ckptmgr.run.contents import describe, storable_files
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.tier import LocalTier
from ckptmgr.testing.outcomes import files_in
from ckptmgr.testing.stores import Store
from ckptmgr.transfer.upload import upload_one

UUID = "00000000-0000-4000-8000-000000000001"
STEM = Stem(1, 100, 1, "00000001")
FILES = {"model.safetensors": b"w" * 5000, "sub/deep/rng_state_0.pth": b"r" * 20, "trainer_state.json": b"{}"}
MakeCheckpoint = Callable[..., Path]


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier.open_or_create(tmp_path / "tier", uuid=UUID)


@pytest.fixture
def source(make_checkpoint: MakeCheckpoint) -> Path:
    """What the framework wrote."""
    return make_checkpoint(100, FILES)


@pytest.fixture
def other_disk() -> Iterator[Path]:
    """A folder on another file system than the temporary one."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat(tempfile.gettempdir()).st_dev:
        pytest.skip("there is no second file system here")
    folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def inodes(directory: Path) -> dict[str, int]:
    return {p.relative_to(directory).as_posix(): p.stat().st_ino for p in directory.rglob("*") if p.is_file()}


def left_in(tier: LocalTier) -> list[str]:
    """What lies in the tier's data, under whatever name."""
    folder = tier.root / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def commit(tier: LocalTier, prepared: Path, run: RunDirectory, stem: Stem = STEM) -> Manifest:
    """What the writer thread does afterwards."""
    manifest = Manifest(stem=stem, run_uuid=run.uuid, files=describe(prepared))
    tier.commit(manifest, prepared, target=run.url)
    return manifest


class TestTaking:
    def test_final_files_are_linked(self, tier: LocalTier, source: Path) -> None:
        """The same inodes, folders included; nothing is copied."""
        prepared = intake.take(tier, source, STEM)
        assert prepared == tier.root / "checkpoints" / f"{STEM}.partial"
        assert inodes(prepared) == inodes(source)
        assert files_in(prepared) == FILES

    def test_other_files_get_bytes_of_their_own(self, tier: LocalTier, source: Path) -> None:
        """Written in place afterwards, the taken copy stays what it was."""
        prepared = intake.take(tier, source, STEM, final=False)
        assert not set(inodes(prepared).values()) & set(inodes(source).values())
        for path in source.rglob("*.*"):
            path.write_bytes(b"overwritten")
        assert files_in(prepared) == FILES

    def test_what_was_taken_outlives_the_source(self, tier: LocalTier, source: Path) -> None:
        """Rotation removes the directory a moment later."""
        prepared = intake.take(tier, source, STEM)
        shutil.rmtree(source)
        assert files_in(prepared) == FILES

    @pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK])
    def test_where_links_are_refused_it_copies(
        self, tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        """Another disk, FUSE, somebody else's files, too many links."""

        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", refuse)
        prepared = intake.take(tier, source, STEM)
        assert files_in(prepared) == FILES
        assert not set(inodes(prepared).values()) & set(inodes(source).values())

    def test_a_source_on_another_disk(self, tier: LocalTier, other_disk: Path) -> None:
        """Really another one: the copy is made, and one can tell beforehand."""
        for name, data in FILES.items():
            (other_disk / name).parent.mkdir(parents=True, exist_ok=True)
            (other_disk / name).write_bytes(data)
        assert not intake.is_linkable(other_disk / "not/made/yet", tier.root)
        assert intake.is_linkable(tier.root.parent / "not/made/yet", tier.root)
        assert files_in(intake.take(tier, other_disk, STEM)) == FILES

    def test_a_large_file_is_copied_whole(self, tier: LocalTier, tmp_path: Path) -> None:
        """More than one block of the copying loop."""
        data = os.urandom(1 << 20) * 17 + b"end"
        (tmp_path / "big").mkdir()
        (tmp_path / "big/optimizer.pt").write_bytes(data)
        assert files_in(intake.take(tier, tmp_path / "big", STEM, final=False)) == {"optimizer.pt": data}

    def test_links_to_files_are_followed_and_copied(self, tier: LocalTier, source: Path, tmp_path: Path) -> None:
        """What they lead to may be anybody's, and written to at any time."""
        elsewhere = tmp_path / "base.safetensors"
        elsewhere.write_bytes(b"base weights")
        (source / "base.safetensors").symlink_to(elsewhere)
        prepared = intake.take(tier, source, STEM)
        assert not (prepared / "base.safetensors").is_symlink()
        elsewhere.write_bytes(b"trained on")
        assert (prepared / "base.safetensors").read_bytes() == b"base weights"

    def test_temporary_files_of_ours_are_left_out(self, tier: LocalTier, source: Path) -> None:
        """A process that was killed while it copied leaves one."""
        (source / ".ckptmgr-tmp-123-abc").write_bytes(b"half")
        assert files_in(intake.take(tier, source, STEM)) == FILES


class TestRefusing:
    @pytest.mark.parametrize("what", ["empty", "link to a folder", "a pipe", "a broken link"])
    def test_what_cannot_be_stored_is_refused_before_anything_is_made(
        self, tier: LocalTier, source: Path, tmp_path: Path, what: str
    ) -> None:
        """As a push refuses it."""
        if what == "empty":
            shutil.rmtree(source)
            (source / "folder").mkdir(parents=True)
        elif what == "link to a folder":
            (source / "link").symlink_to(tmp_path, target_is_directory=True)
        elif what == "a pipe":
            os.mkfifo(source / "pipe")
        else:
            (source / "gone").symlink_to(tmp_path / "nothing")
        with pytest.raises(ConfigError):
            intake.take(tier, source, STEM)
        assert left_in(tier) == []

    def test_a_source_that_is_gone(self, tier: LocalTier, source: Path) -> None:
        """K011: renamed or removed before it was taken: the step and the directory are named."""
        source.rename(source.with_name("elsewhere"))
        with pytest.raises(SourceChangedError, match=r"checkpoint-100 is gone, so step 100 cannot be taken"):
            intake.take(tier, source, STEM)
        assert left_in(tier) == []

    @pytest.mark.parametrize("final", [True, False])
    def test_a_file_that_vanishes_meanwhile(
        self, tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch, final: bool
    ) -> None:
        """Rotation by another thread: the file is named, and nothing is left in the tier."""

        def list_and_remove(directory: Path) -> list[str]:
            names = list(storable_files(directory))
            (source / "trainer_state.json").unlink()
            return names

        monkeypatch.setattr(intake, "storable_files", list_and_remove)
        with pytest.raises(SourceChangedError, match=r"trainer_state\.json vanished"):
            intake.take(tier, source, STEM, final=final)
        assert left_in(tier) == []

    def test_a_file_that_is_written_while_it_is_copied(
        self, tier: LocalTier, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy may be a mixture: refused, not stored."""
        send = os.sendfile

        def send_and_write(writer: int, reader: int, at: int, count: int) -> int:
            (source / "model.safetensors").write_bytes(b"x" * 6000)
            return send(writer, reader, at, count)

        monkeypatch.setattr(intake, "_reflink", lambda reader, writer: False)
        monkeypatch.setattr(os, "sendfile", send_and_write)
        with pytest.raises(SourceChangedError, match="was written to while it was copied"):
            intake.take(tier, source, STEM, final=False)
        assert left_in(tier) == []

    @pytest.mark.parametrize(
        ("number", "expected"), [(errno.ENOSPC, DiskFullError), (errno.EIO, PermanentBackendError)]
    )
    def test_a_disk_that_fails_leaves_nothing_behind(
        self,
        tier: LocalTier,
        source: Path,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
        expected: type[CkptmgrError],
    ) -> None:
        """After the first file, so that there is something to clean up."""
        send, calls = os.sendfile, [0]

        def fail_later(*arguments: int) -> int:
            calls[0] += 1
            if calls[0] > 1:
                raise OSError(number, os.strerror(number))
            return send(*arguments)

        monkeypatch.setattr(intake, "_reflink", lambda reader, writer: False)
        monkeypatch.setattr(os, "sendfile", fail_later)
        with pytest.raises(expected):
            intake.take(tier, source, STEM, final=False)
        assert calls[0] > 1
        assert left_in(tier) == []
        assert files_in(source) == FILES


class TestUnsharing:
    def test_a_directory_that_is_written_again_does_not_reach_through(self, tier: LocalTier, source: Path) -> None:
        """After `unshare` the framework may write in place; mode and times are as before, so that its own rotation sees no change."""
        (source / "model.safetensors").chmod(0o600)
        prepared = intake.take(tier, source, STEM)
        before = {name: (source / name).stat() for name in FILES}
        assert intake.unshare(source) == sum(map(len, FILES.values()))
        after = {name: (source / name).stat() for name in FILES}
        assert [(s.st_mode, s.st_mtime_ns, s.st_size) for s in after.values()] == [
            (s.st_mode, s.st_mtime_ns, s.st_size) for s in before.values()
        ]
        assert files_in(source) == FILES
        for name in FILES:
            (source / name).write_bytes(b"the next attempt")
        assert files_in(prepared) == FILES

    def test_it_costs_nothing_where_nothing_is_shared(self, source: Path, tmp_path: Path) -> None:
        """No file is touched; a directory that is not there is none of its business."""
        before = inodes(source)
        assert intake.unshare(source) == 0
        assert inodes(source) == before
        assert intake.unshare(tmp_path / "nothing") == 0


@pytest.fixture
def run(store: Store) -> RunDirectory:
    fs, root = open_store(f"{store.url}/run")
    return RunDirectory.open_or_create(f"{store.url}/run", uuid=UUID, fs=fs, root=root)


def test_k011_a_rename_or_removal_in_the_queue_does_not_matter(
    store: Store, run: RunDirectory, tier: LocalTier, source: Path
) -> None:
    """What the framework renames or rotates away while it waits for its upload is committed all the same."""
    manifest = commit(tier, intake.take(tier, source, STEM), run)
    source.rename(source.with_name("checkpoint-final"))
    shutil.rmtree(source.with_name("checkpoint-final"))
    assert upload_one(tier, run, manifest, tier.pending(run.url)[0][1]) == "committed"
    assert store.snapshot("run/checkpoints/") == {
        f"run/checkpoints/{STEM}/{name}": data for name, data in FILES.items()
    }


def written_in_place(tmp_path: Path) -> tuple[Path, Callable[[], None], dict[str, bytes]]:
    """A file that its trainer overwrites in place, how it does that, and both contents."""
    old, new = b"\x01" * (20 << 20), b"\x02" * (20 << 20)
    last = tmp_path / "last/model.safetensors"
    last.parent.mkdir()
    last.write_bytes(old)

    def overwrite() -> None:
        with last.open("r+b") as file:  # as torch.save does
            file.write(new)

    return last.parent, overwrite, {"old": old, "new": new}


def test_k059_a_file_overwritten_during_its_upload(
    store: Store, run: RunDirectory, tier: LocalTier, tmp_path: Path
) -> None:
    """Fault row 12: not final, so it was given bytes of its own; these are committed."""
    last, overwrite, data = written_in_place(tmp_path)
    manifest = commit(tier, intake.take(tier, last, STEM, final=False), run)
    moved: list[int] = []

    def overwrite_once(count: int) -> None:
        if not moved:
            overwrite()
        moved.append(count)

    assert upload_one(tier, run, manifest, tier.pending(run.url)[0][1], moved=overwrite_once) == "committed"
    assert moved
    assert store.get(f"run/checkpoints/{STEM}/model.safetensors") == data["old"]


def test_k059_a_linked_file_that_was_not_final_is_never_mixed(
    store: Store, run: RunDirectory, tier: LocalTier, tmp_path: Path
) -> None:
    """Its upload fails, visibly, and commits nothing; taken again it is committed as it is now."""
    last, overwrite, data = written_in_place(tmp_path)
    manifest = commit(tier, intake.take(tier, last, STEM), run)
    overwrite()
    with pytest.raises(SourceChangedError, match=r"model\.safetensors"):
        upload_one(tier, run, manifest, tier.pending(run.url)[0][1])
    assert store.keys("run/manifests/") == []
    failed = tier.journal.read(STEM)
    assert failed is not None
    assert (failed.state, "model.safetensors" in failed.error) == ("failed", True)
    again = Stem(1, 100, 2, "00000002")
    manifest = commit(tier, intake.take(tier, last, again, final=False), run, again)
    assert upload_one(tier, run, manifest, tier.pending(run.url)[0][1]) == "committed"
    assert store.get(f"run/checkpoints/{again}/model.safetensors") == data["new"]
    assert store.keys("run/manifests/") == [f"run/manifests/{again}.json"]
