"""The driver on a store that does not decide create-only writes, and what it says is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import ConflictError, TransientBackendError
from ckptmgr.core.files import FileEntry
from ckptmgr.core.operations import Create, Missing
from ckptmgr.core.records import RunRecord
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, transient
from ckptmgr.testing.stores import Store


def test_a_lost_answer_is_not_followed_by_a_blind_write(tmp_path: Path) -> None:
    """Without create-only, a retry that does not look again could write over a closing record; so the write is made once."""
    faulty = FaultyBackend(LocalBackend())
    faulty.add(StoreFault(verb="pipe_file", error=transient, when="after"))
    retrying = RetryingBackend(faulty, Retrier(RetryPolicy(attempts=5), sleep=lambda seconds: None))
    run = RunDirectory(
        fs=retrying, root=str(tmp_path), url=str(tmp_path), record=RunRecord(uuid="u", create_only=False)
    )
    with pytest.raises(TransientBackendError):
        StoreDriver(run)(Create("manifests/x.json", b"mine"))
    assert (tmp_path / "manifests/x.json").read_bytes() == b"mine"
    assert len(faulty.calls("pipe_file")) == 1


def test_missing_is_what_is_not_there_in_its_size(store: Store) -> None:
    """On every kind of store; names of every kind. And where the whole run is gone, nothing is sent into the place where it was."""
    run = RunDirectory.open_or_create(f"{store.url}/run")
    entries = [FileEntry.of(path, digest_bytes(b"12345")) for path in ("a", "sub/b", "深/ü +%.bin", "short", "gone")]
    for entry in entries[:3]:
        store.put(f"run/checkpoints/x/{entry.path}", b"12345")
    store.put("run/checkpoints/x/short", b"1234")
    store.put("run/checkpoints/x/beside", b"12345")
    missing = StoreDriver(run)
    assert missing(Missing("checkpoints/x", entries)) == ["short", "gone"]
    assert missing(Missing("checkpoints/x", entries[:3])) == []
    store.delete("run/run.json")
    assert missing(Missing("checkpoints/x", entries[:3])) == []
    with pytest.raises(ConflictError, match="is gone"):
        missing(Missing("checkpoints/x", entries))
