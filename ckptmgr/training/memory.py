"""How much memory this process may still take: what the machine has, and what its control group (a container, a SLURM job) allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
# cgroup v1 says "no limit" as the largest multiple of a page; no machine has half of that.
_NO_LIMIT = 1 << 62


def available_memory_bytes(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """Bytes that can be taken before the machine swaps or this process is killed for memory; None where the system does not say.

    The least of the kernel's own estimate (MemAvailable) and the room below the limit of each memory control group above this process.
    Page cache counts as available in both: it gives way. One look: others may take it a moment later.

    Args:
        proc, cgroups: where the system shows these.
    """
    found = [room for room in (_machine(proc), *_rooms(proc, cgroups)) if room is not None]
    return max(0, min(found)) if found else None


def _machine(proc: Path) -> int | None:
    fields = _fields(proc / "meminfo")
    return fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else None


def _rooms(proc: Path, cgroups: Path) -> Iterator[int | None]:
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from (_room_v2(group) for group in _upward(cgroups, path))
        elif "memory" in controllers.split(","):
            yield from (_room_v1(group) for group in _upward(cgroups / "memory", path))


def _upward(root: Path, path: str) -> Iterator[Path]:
    """The group and those above it. In a container the path is the host's and may not exist; the root is the container's own then."""
    group = root / path.strip("/")
    while group != root and root in group.parents:
        yield group
        group = group.parent
    yield root


def _room_v2(group: Path) -> int | None:
    return _room(group, "memory.max", "memory.current", "")


def _room_v1(group: Path) -> int | None:
    return _room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _room(group: Path, limit_name: str, usage_name: str, prefix: str) -> int | None:
    try:
        limit, usage = int(_text(group / limit_name)), int(_text(group / usage_name))
    except ValueError:  # "max", or not there
        return None
    if limit >= _NO_LIMIT:
        return None
    stat = _fields(group / "memory.stat")
    cache = sum(stat.get(f"{prefix}{name}", 0) for name in ("inactive_file", "active_file"))
    return limit - usage + cache


def _fields(path: Path) -> dict[str, int]:
    """The numbers of a file of `name number …` lines."""
    words = [line.split() for line in _text(path).splitlines()]
    return {word[0]: int(word[1]) for word in words if len(word) > 1 and word[1].isdigit()}


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
