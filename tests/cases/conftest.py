"""Helpers of the case tests: toy trees, and the documents of the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

Tree = Callable[..., Path]
Ask = Callable[..., Any]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Writes a directory below `tmp_path` that holds exactly `files`, and returns it."""

    def write(name: str, files: Mapping[str, bytes]) -> Path:
        directory = tmp_path / name
        if directory.exists():
            for path in sorted(directory.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        for relative, data in files.items():
            (directory / relative).parent.mkdir(parents=True, exist_ok=True)
            (directory / relative).write_bytes(data)
        return directory

    return write


@pytest.fixture
def ask(cli_here: Callable[..., subprocess.CompletedProcess[str]]) -> Ask:
    """Runs a command line that must succeed, and returns its JSON document."""

    def run(*arguments: object) -> Any:
        done = cli_here(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run
