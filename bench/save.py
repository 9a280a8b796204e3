"""How long a save stops training, against `torch.save`, a plain copy, and PyTorch's own asynchronous save.

    python bench/save.py [--size-mib 1024] [--rounds N] [--dir DIR] [--assert] [--record docs/benchmarks.md]

A model of 1 GiB and its Adam state of 2 GiB, on one CPU thread. Each round does each of these once, each time another one first:

- `save`: `CheckpointManager.save` until it returns, as a training loop calls it: room in the queue, the copy, the hand-over. What follows in
  the background (write, fsync, commit, upload to a store on the same disk) is waited for before the next one, and not counted.
- `torch_save`: `torch.save` of the same state dicts and a fsync, on the same disk.
- `copy`: `copy_` of each tensor into memory that was used before, the least that any save can take; just before `save`, so that both meet the
  same machine.
- `async_save`: `torch.distributed.checkpoint.async_save` until it returns, with its default staging; also waited for.

The last line of the output is a JSON object with the medians, over the rounds, of `stall_vs_torch_save`, `stall_vs_copy` and
`stall_vs_async_save`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _report import Limit, finish, interleaved, machine, parser, verdicts, warn_if_busy

from ckptmgr.core.retention import KeepLast
from ckptmgr.training.manager import CheckpointManager
from ckptmgr.training.memory import available_memory_bytes

RATIOS = {"stall_vs_torch_save": "torch_save", "stall_vs_copy": "copy", "stall_vs_async_save": "async_save"}
LIMITS = {"stall_vs_torch_save": Limit(at_most=0.15), "stall_vs_copy": Limit(at_most=1.25)}
TITLES = {
    "save": "`manager.save`, until it returns",
    "copy": "`copy_` of each tensor into reused memory",
    "torch_save": "`torch.save` and fsync",
    "async_save": "`torch.distributed.checkpoint.async_save`, until it returns",
}
PACKAGES = ("ckptmgr", "torch", "blake3", "fastcrc")
LAYER_MIB = 16
UPLOADED_WITHIN_S = 600.0
MIB = 1 << 20


def make_state(size_mib: int) -> dict[str, Any]:
    """A model of float32 layers of 16 MiB, and an Adam with a state that random numbers stand in for."""
    width = 2048  # 2048 x 2048 float32 are 16 MiB
    model = torch.nn.Sequential(
        *(
            torch.nn.utils.skip_init(torch.nn.Linear, width, width, bias=False)
            for _ in range(max(1, size_mib // LAYER_MIB))
        )
    )
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter)
        moments = {name: torch.rand_like(parameter, requires_grad=False) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **moments}
    return {"model": model, "optimizer": optimizer}


def tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """Each tensor of the state."""
    moments = [value for entry in state["optimizer"].state_dict()["state"].values() for value in entry.values()]
    return [*state["model"].state_dict().values(), *moments]


def timed(action: Callable[[], object]) -> float:
    """The seconds that `action` blocks."""
    start = perf_counter()
    action()
    return perf_counter() - start


class Saves:
    """The four ways to save one state, each of which returns the seconds that training stops."""

    def __init__(self, state: dict[str, Any], directory: Path, manager: CheckpointManager) -> None:
        self._state = state
        self._directory = directory
        self._manager = manager
        self._step = 0
        self.copies_s: list[float] = []
        self._sources = tensors(state)
        self._targets = [torch.zeros_like(tensor) for tensor in self._sources]

    def save(self) -> float:
        """Ours; what it does in the background is waited for. A plain copy comes before it."""
        self.copies_s.append(self.copy())
        self._step += 1
        stall_s = timed(lambda: self._manager.save(self._step, self._state))
        self._manager.wait_saved()
        deadline = monotonic() + UPLOADED_WITHIN_S
        while (status := self._manager.status()).uploads.pending and monotonic() < deadline:
            sleep(0.05)
        if status.save_failures or status.uploads.pending:
            sys.exit(f"error: the save of step {self._step} did not get into the store: {status}")
        return stall_s

    def copy(self) -> float:
        """The copy alone."""
        return timed(
            lambda: [target.copy_(source) for target, source in zip(self._targets, self._sources, strict=True)]
        )

    def torch_save(self) -> float:
        """All of it in the training thread."""
        path = self._directory / "torch.pt"

        def save() -> None:
            torch.save({name: piece.state_dict() for name, piece in self._state.items()}, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

        stall_s = timed(save)
        path.unlink()
        return stall_s

    def async_save(self) -> float:
        """PyTorch's, which copies into fresh memory by default; the writing is waited for."""
        path = self._directory / "dcp"
        trees = {name: piece.state_dict() for name, piece in self._state.items()}
        futures: list[Any] = []
        stall_s = timed(lambda: futures.append(dcp.async_save(trees, storage_writer=dcp.FileSystemWriter(path))))
        futures[0].result()
        shutil.rmtree(path)
        return stall_s


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """What `async_save` cannot do without, also in a single process."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def measure(size_mib: int, rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds of each action per round."""
    torch.set_num_threads(1)
    state = make_state(size_mib)
    keep = KeepLast(1)
    manager = CheckpointManager(directory / "store" / "run", local_dir=directory / "disk", keep=keep, keep_local=keep)
    with one_process_group(), warnings.catch_warnings(), manager:
        warnings.simplefilter("ignore")  # PyTorch about its own future
        saves = Saves(state, directory, manager)
        actions = {"torch_save": saves.torch_save, "save": saves.save, "async_save": saves.async_save}
        times_s = interleaved(actions, rounds)
        return {**times_s, "copy": saves.copies_s[-rounds:]}  # the first one was to warm up


def ratios(times_s: dict[str, list[float]]) -> dict[str, float]:
    """Medians of the ratios of one round."""
    ours = times_s["save"]
    return {
        name: round(median(a / b for a, b in zip(ours, times_s[other], strict=True)), 3)
        for name, other in RATIOS.items()
    }


def report(times_s: dict[str, list[float]], size_mib: int, rounds: int) -> str:
    """The measurement as a Markdown section."""
    rows = [
        f"| {title} | {median(times_s[name]):.3f} | {min(times_s[name]):.3f} | {max(times_s[name]):.3f} |"
        for name, title in TITLES.items()
    ]
    return "\n".join(
        [
            "## Stall of a save",
            "",
            f"`python bench/save.py --size-mib {size_mib} --rounds {rounds}`: a model of {size_mib} MiB and its Adam state of {2 * size_mib} MiB, one CPU",
            f"thread, {rounds} interleaved rounds, in seconds of the training thread. The save's writing and its upload to a store on the same disk follow in",
            "the background, and are waited for before the next measurement.",
            "",
            "| | median | least | most |",
            "| --- | ---: | ---: | ---: |",
            *rows,
            "",
            verdicts(ratios(times_s), LIMITS),
            "",
            f"{machine(PACKAGES)}.",
            "",
        ]
    )


def refuse_small_machine(size_mib: int, directory: Path) -> None:
    """Exit where the measurement would swap, be killed, or fill the disk: the state four times in memory, six times on disk."""
    state_bytes = 3 * size_mib * MIB
    available, free = available_memory_bytes(), shutil.disk_usage(directory).free
    if available is not None and available < 4.3 * state_bytes:
        sys.exit(f"error: {4.3 * state_bytes / MIB:.0f} MiB of memory are needed, {available / MIB:.0f} are available")
    if free < 6 * state_bytes:
        sys.exit(f"error: {6 * state_bytes / MIB:.0f} MiB of disk are needed, {free / MIB:.0f} are free in {directory}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when a ratio is above its limit."""
    options_of = parser(__doc__, rounds=5)
    options_of.add_argument(
        "--size-mib", type=int, default=1024, help="size of the model (1024); Adam's state is twice as large"
    )
    options_of.add_argument("--dir", type=Path, help="where to write; by default the directory for temporary files")
    options = options_of.parse_args(arguments)
    warn_if_busy()
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        refuse_small_machine(options.size_mib, Path(directory))
        times_s = measure(options.size_mib, options.rounds, Path(directory))
    section = report(times_s, options.size_mib, options.rounds)
    return finish(
        options,
        section,
        ratios(times_s),
        LIMITS,
        hint="is the machine idle, and its disk?",
    )


if __name__ == "__main__":
    sys.exit(main())
