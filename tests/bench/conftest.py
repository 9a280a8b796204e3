"""The benches as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports `bench/<name>.py` as it is when it is run: with its own directory on the path."""
    if not BENCH.exists():
        pytest.skip("only the tests are here, not the tree")

    def load(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(str(BENCH))
        for module in (name, "_report"):
            monkeypatch.delitem(sys.modules, module, raising=False)
        found = importlib.import_module(name)
        # Gone again after the test: these names are too common to stay.
        monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "_report", raising=False)
        return found

    return load
