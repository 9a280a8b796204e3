"""Commands for tests of every command at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Commands = Callable[[str, Path], list[list[str]]]


@pytest.fixture
def every_command() -> Commands:
    """One line of each command that takes a run: of the run's URL and a directory to push, beside which `STARTED` would appear."""

    def commands(url: str, directory: Path) -> list[list[str]]:
        return [
            ["ls", url],
            ["show", url],
            ["verify", url],
            ["resume", url],
            ["resume", url, "--or-start", "--", "touch", str(directory.parent / "STARTED")],
            ["push", str(directory), url],
            ["prune", url, "--keep-last", "1", "--yes"],
            ["pull", url, "--to", str(directory.parent / "pulled")],
            ["gc", url, "--yes"],
        ]

    return commands


@pytest.fixture
def some_commands(every_command: Commands) -> Commands:
    """One that reads, one that would start from scratch, one that writes."""

    def commands(url: str, directory: Path) -> list[list[str]]:
        every = every_command(url, directory)
        return [every[0], every[4], every[5]]

    return commands
