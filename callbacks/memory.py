"""The callback that watches the memory of the host and the device, and says when it only grows."""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.base import Callback, TrainerControl, TrainerState
from ckptmgr.callbacks.windows import slope

_log = logging.getLogger(__name__)

_OWNER = "MemoryCallback"
_MIB = 1024 * 1024


class MemoryCallback(Callback):
    """Warn when the memory of this process, or what torch has allocated on its device, grows over a whole window of looks: it may leak.

    It is looked at every `interval` steps. Growth over a window of `window` looks is a leak if all of these hold: the lowest of its last third is above the
    highest of its first third; and the growth from the one to the other is at least `min_growth_mib`, and at least `min_growth` of the first. So neither
    a peak nor a saw-tooth, as caches and garbage collection make, nor the growth of the first steps is one: the window begins after `warmup_steps`.
    After a warning the window begins anew. Rules:

    - *Several ranks*: the first process of each machine looks at its own memory; no collective.
    - *Hosts and gradient accumulation* make no difference: optimizer steps are counted.
    - *What the system or torch does not tell* is not looked at: the host's memory without /proc, a device without CUDA.
    - *A resume* is another process: the window begins anew. It asks for nothing, and never stops a training.

    No look waits for a device.

    Args:
        interval: steps between two looks.
        window: looks that growth is over.
        min_growth_mib: see above.
        min_growth: see above; 0.05 is 5 %.
        warmup_steps: steps of this process before the first look.
        host_bytes, device_bytes: what to look at: functions that return bytes, or None if there is nothing. By default the resident set of this process,
            and what torch has allocated on the current device.

    Attributes:
        leaks: warnings so far.
        last: the newest look, in bytes, by "host" and "device".

    Raises:
        ConfigError: an argument that makes no sense.
    """

    def __init__(
        self,
        interval: int = 50,
        *,
        window: int = 12,
        min_growth_mib: float = 64,
        min_growth: float = 0.05,
        warmup_steps: int = 50,
        host_bytes: Callable[[], int | None] | None = None,
        device_bytes: Callable[[], int | None] | None = None,
    ) -> None:
        checks.whole(_OWNER, "interval", interval)
        checks.whole(_OWNER, "window", window, least=3)
        checks.number(_OWNER, "min_growth_mib", min_growth_mib, least=0)
        checks.number(_OWNER, "min_growth", min_growth, least=0)
        checks.whole(_OWNER, "warmup_steps", warmup_steps, least=0)
        self.interval = interval
        self.window = window
        self.min_growth_bytes = min_growth_mib * _MIB
        self.min_growth = min_growth
        self.warmup_steps = warmup_steps
        self.leaks = 0
        self.last: dict[str, int] = {}
        self._read = {"host": host_bytes or resident_bytes, "device": device_bytes or allocated_bytes}
        self._looks: dict[str, deque[tuple[int, int]]] = {name: deque(maxlen=window) for name in self._read}
        self._first_step: int | None = None

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin anew."""
        self._first_step = state.global_step
        for looks in self._looks.values():
            looks.clear()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Look, every `interval` steps."""
        if self._first_step is None:
            self._first_step = state.global_step - 1
        wanted = state.global_step % self.interval == 0 and state.global_step - self._first_step > self.warmup_steps
        if not wanted or not state.is_local_process_zero:
            return
        for name, read in self._read.items():
            found = read()
            if found is not None:
                self.last[name] = found
                self._looks[name].append((state.global_step, found))
                self._judge(name)

    def _judge(self, name: str) -> None:
        looks = self._looks[name]
        if len(looks) < self.window:
            return
        third = self.window // 3
        values = [found for _, found in looks]
        before, after = max(values[:third]), min(values[-third:])
        growth = after - before
        if growth <= 0 or growth < self.min_growth_bytes or growth < self.min_growth * before:
            return
        self.leaks += 1
        (first, _), (last, _) = looks[0], looks[-1]
        _log.warning(
            "%s memory grows: from %.0f MiB at step %d to %.0f MiB at step %d, %.3g MiB a step; something may be kept that is not needed any more",
            name,
            values[0] / _MIB,
            first,
            values[-1] / _MIB,
            last,
            slope(looks) / _MIB,
        )
        looks.clear()


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int | None:
    """The resident set of this process, now; None where the system does not say."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def allocated_bytes() -> int | None:
    """What torch has allocated on the current CUDA device, now; None without one. Waits for nothing, and sets nothing up."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.memory_allocated()) if cuda is not None and cuda.is_initialized() else None
