"""A run with two steps of one tree, whose stored bytes can be spoiled and put right again."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ckptmgr.testing.damages import PushedTree
from ckptmgr.testing.stores import Store


@pytest.fixture(autouse=True)
def _no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of small files, none of which must outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@pytest.fixture
def push_tree(make_store: Callable[[str], Store], tmp_path: Path) -> Callable[..., PushedTree]:
    """Pushes two steps of a tree: `push_tree("T5")`, or into a store of another kind than `local`."""

    def make(name: str, kind: str = "local") -> PushedTree:
        return PushedTree.of(name, make_store(kind), tmp_path / "trained")

    return make


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """Chance that falls the same way whenever the same test runs."""
    return random.Random(request.node.name)
