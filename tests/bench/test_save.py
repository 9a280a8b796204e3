"""The save bench: what it compares, that it runs, and that it asks for room first."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TIMES_S = {
    "save": [0.1, 0.2, 0.4],
    "copy": [0.1, 0.1, 0.1],
    "torch_save": [1.0, 4.0, 4.0],
    "async_save": [1.0, 1.0, 1.0],
}


@pytest.fixture
def save(bench: Callable[[str], ModuleType]) -> ModuleType:
    """bench/save.py as a module."""
    return bench("save")


@pytest.mark.slow
def test_one_small_real_round_ends_with_the_three_ratios(save: ModuleType, tmp_path: Path) -> None:
    """Every way to save runs, and the last line is one JSON object; nothing is left behind."""
    command = [sys.executable, str(save.__file__), "--size-mib", "16", "--rounds", "1", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found) == ["stall_vs_async_save", "stall_vs_copy", "stall_vs_torch_save"]
    assert all(value > 0 for value in found.values())
    assert list(tmp_path.iterdir()) == []


def test_ratios_are_medians_over_the_rounds(save: ModuleType) -> None:
    """Of the ratios of each round, not ratios of medians: rounds differ in what else the machine did."""
    assert save.ratios(TIMES_S) == {"stall_vs_torch_save": 0.1, "stall_vs_copy": 2.0, "stall_vs_async_save": 0.2}


@pytest.mark.parametrize(("copy_s", "code"), [(0.16, 0), (0.159, 1)])
def test_assert_fails_above_a_limit(
    save: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], copy_s: float, code: int
) -> None:
    """A quarter more than the copy is allowed; PyTorch's asynchronous save has no limit."""
    times_s = {**TIMES_S, "copy": [copy_s] * 3, "async_save": [0.01] * 3}
    monkeypatch.setattr(save, "measure", lambda size_mib, rounds, directory: times_s)
    assert save.main(["--assert", "--size-mib", "1"]) == code
    printed = capsys.readouterr()
    assert ("stall_vs_copy" in printed.err) == bool(code)
    assert "| `torch.save` and fsync | 4.000 | 1.000 | 4.000 |" in printed.out


@pytest.mark.parametrize(("memory_gib", "disk_gib", "missing"), [(12, 99, "memory"), (99, 17, "disk"), (None, 99, "")])
def test_a_machine_that_is_too_small_is_refused(
    save: ModuleType, monkeypatch: pytest.MonkeyPatch, memory_gib: int | None, disk_gib: int, missing: str
) -> None:
    """Before anything is made: half a measurement would only have the process killed. What the system does not say is not guessed."""
    memory = None if memory_gib is None else memory_gib << 30
    monkeypatch.setattr(save, "available_memory_bytes", lambda: memory)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=disk_gib << 30))
    monkeypatch.setattr(save, "measure", lambda size_mib, rounds, directory: TIMES_S)
    if missing:
        with pytest.raises(SystemExit, match=f"error: .* of {missing} are needed"):
            save.main([])
    else:
        assert save.main([]) == 0
