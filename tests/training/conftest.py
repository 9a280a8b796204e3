"""A run on local disk, and managers of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.training.manager import CheckpointManager


@pytest.fixture(autouse=True)
def _uploads_in_a_thread(uploads_in_a_thread: None) -> None:
    """Transfer processes have tests of their own."""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Where the run is stored; made by the first manager that needs it."""
    return tmp_path / "store" / "run"


@pytest.fixture
def manager(run_dir: Path, tmp_path: Path) -> Callable[..., CheckpointManager]:
    """Makes managers of one run with one local directory, one process life each."""

    def make(**options: Any) -> CheckpointManager:
        return CheckpointManager(run_dir, **{"local_dir": tmp_path / "disk", **options})

    return make
