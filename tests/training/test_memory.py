"""How much memory is left, as Linux and its control groups say it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptmgr.training.memory import available_memory_bytes

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A machine with 64 GiB to spare, and no control groups."""
    made = tmp_path / "proc"
    (made / "self").mkdir(parents=True)
    made.joinpath("meminfo").write_text(
        f"MemTotal: {99 << 20} kB\nMemFree: 1 kB\nMemAvailable: {64 << 20} kB\nHuge: 0\n"
    )
    return made


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    made = tmp_path / "cgroup"
    made.mkdir()
    return made


def group(path: Path, **files: object) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (path / name.replace("memory_", "memory.")).write_text(f"{text}\n")


def test_without_groups_it_is_what_the_machine_has(proc: Path, cgroups: Path) -> None:
    """The kernel's own estimate."""
    assert available_memory_bytes(proc=proc, cgroups=cgroups) == 64 * GIB


def test_a_system_that_says_nothing_is_not_guessed_about(tmp_path: Path) -> None:
    """Not Linux, or nothing mounted."""
    assert available_memory_bytes(proc=tmp_path, cgroups=tmp_path) is None


def test_the_tightest_group_above_counts(proc: Path, cgroups: Path) -> None:
    """Version 2; a group's file cache gives way, so it is room."""
    (proc / "self" / "cgroup").write_text("0::/slurm/job7/step0\n")
    group(cgroups / "slurm" / "job7" / "step0", memory_max="max", memory_current=5 * GIB)
    stat = f"anon 1\ninactive_file {2 * GIB}\nactive_file {GIB}\n"
    group(cgroups / "slurm" / "job7", memory_max=8 * GIB, memory_current=7 * GIB, memory_stat=stat)
    group(cgroups / "slurm", memory_max=100 * GIB, memory_current=7 * GIB)
    assert available_memory_bytes(proc=proc, cgroups=cgroups) == 4 * GIB


def test_in_a_container_the_root_is_its_own(proc: Path, cgroups: Path) -> None:
    """The path is the host's, and not to be seen."""
    (proc / "self" / "cgroup").write_text("0::/kubepods/pod1/abc\n")
    group(cgroups, memory_max=3 * GIB, memory_current=GIB)
    assert available_memory_bytes(proc=proc, cgroups=cgroups) == 2 * GIB


def test_the_first_version_of_groups(proc: Path, cgroups: Path) -> None:
    """With controllers of their own; no limit is a very large one there."""
    (proc / "self" / "cgroup").write_text("9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    stat = f"inactive_file 5\ntotal_inactive_file {GIB}\ntotal_active_file {GIB}\n"
    names = {"memory_limit_in_bytes": 9 * GIB, "memory_usage_in_bytes": 8 * GIB, "memory_stat": stat}
    group(cgroups / "memory" / "docker" / "abc", **names)
    group(cgroups / "memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=8 * GIB)
    assert available_memory_bytes(proc=proc, cgroups=cgroups) == 3 * GIB


def test_a_group_over_its_limit_leaves_nothing(proc: Path, cgroups: Path) -> None:
    """Not less than nothing; and garbage is passed over."""
    (proc / "self" / "cgroup").write_text("garbage\n0::/a\n")
    group(cgroups / "a", memory_max=GIB, memory_current=2 * GIB)
    group(cgroups, memory_max="what?", memory_current=GIB)
    assert available_memory_bytes(proc=proc, cgroups=cgroups) == 0


def test_this_machine_has_some() -> None:
    """Here it says so, in bytes."""
    found = available_memory_bytes()
    assert found is None or found > 1 << 20
