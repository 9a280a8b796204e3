"""What is left to look at when a command or a call is over: how it was refused, and what lies below a folder."""

from __future__ import annotations

import subprocess
from pathlib import Path


def refused(result: subprocess.CompletedProcess[str], code: int, *says: str) -> None:
    """Assert that a command failed as every command must: the exit code, nothing on stdout, and one line with what, why and what to do.

    Args:
        says: what is in the line.
    """
    assert (result.returncode, result.stdout) == (code, ""), result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("ckptmgr: error: ")
    for text in says:
        assert text in lines[0]


def files_in(directory: Path) -> dict[str, bytes]:
    """Every file below `directory` with its bytes, by path; links count as what they lead to."""
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


def paths_in(directory: Path) -> dict[str, bytes | None]:
    """As `files_in`, and every folder, with None."""
    folders = (path for path in directory.rglob("*") if path.is_dir())
    return {**files_in(directory), **{path.relative_to(directory).as_posix(): None for path in folders}}
