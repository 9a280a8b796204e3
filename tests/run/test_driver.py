"""The driver on a store that does not decide create-only writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.backends.local import LocalBackend
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy
from ckptmgr.core.errors import TransientBackendError
from ckptmgr.core.operations import Create
from ckptmgr.core.records import RunRecord
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, transient


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
