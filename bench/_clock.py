"""What an action takes inside a process that has imported all that it needs."""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path


def measured(action: Callable[[], object], facts: Callable[[], Mapping[str, float]] = dict) -> None:
    """Run `action` and print, as one line of JSON, its seconds (wall, user, system), and the MiB resident before it and at its peak.

    Args:
        facts: asked afterwards for more of that line.
    """
    modules = len(sys.modules)
    # From now on the peak is counted anew: importing takes memory for a moment.
    Path("/proc/self/clear_refs").write_text("5")
    base_kib, before, start = _status_kib("VmRSS"), _used_s(), time.perf_counter()
    action()
    wall_s, after = time.perf_counter() - start, _used_s()
    found = {
        "wall_s": wall_s,
        "user_s": after[0] - before[0],
        "sys_s": after[1] - before[1],
        "base_mib": base_kib / 1024,
        "peak_mib": _status_kib("VmHWM") / 1024,
        "imported": len(sys.modules) - modules,
        **facts(),
    }
    print(json.dumps(found), flush=True)


def _used_s() -> tuple[float, float]:
    """User and system seconds of this process, and of its children that ended."""
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + children.ru_utime, own.ru_stime + children.ru_stime


def _status_kib(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"the system does not tell {name}")
