"""What the benches have in common: options, interleaved rounds, limits, the machine in one line, and a page of results."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """What a ratio may be; both bounds belong to it. A ratio without one is only reported."""

    at_most: float | None = None
    at_least: float | None = None

    def allows(self, value: float) -> bool:
        """Whether `value` is within; NaN never is."""
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)

    def __str__(self) -> str:
        bounds = (("at most", self.at_most), ("at least", self.at_least))
        return ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options of every bench: `--rounds`, `--assert` (`options.asserting`) and `--record`.

    Args:
        doc: the docstring of the bench, whose first line describes it.
        rounds: by default.
    """
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--rounds", type=int, default=rounds, help=f"timings of each action ({rounds})")
    made.add_argument("--assert", dest="asserting", action="store_true", help="fail when a ratio breaks its limit")
    made.add_argument("--record", type=Path, metavar="FILE", help="write the result into this Markdown file")
    return made


def interleaved(actions: Mapping[str, Callable[[], T]], rounds: int, *, warm_up: bool = True) -> dict[str, list[T]]:
    """What each action returned (its seconds, say), per round.

    Each round runs every action once, each time another one first, so that a machine which slows down for a while slows all of them.

    Args:
        warm_up: run each once before, to fill the caches; what that returns counts for nothing.
    """
    names = list(actions)
    found: dict[str, list[T]] = {name: [] for name in names}
    if warm_up:
        for action in actions.values():
            action()
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            found[name].append(actions[name]())
    return found


def warn_if_busy() -> None:
    """Say on stderr that others use this machine: memory and disk are shared then, and even ratios of one round say little."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        print(
            f"warning: this machine is busy (load {load:.1f} on {cores} cores); measure on an idle one", file=sys.stderr
        )


def machine(packages: Sequence[str]) -> str:
    """One line: cores, processor, system, Python and the packages that matter here."""
    try:
        model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    processor = model[1] if model else platform.machine()
    return (
        f"{os.cpu_count()} cores of {processor}, {platform.system()}, CPython {platform.python_version()}, {versions}"
    )


def verdicts(ratios: Mapping[str, float], limits: Mapping[str, Limit]) -> str:
    """One line for the page: each ratio, with its limit if it has one."""
    words = [
        f"`{name}` {value:.2f}" + (f" ({limits[name]})" if name in limits else "") for name, value in ratios.items()
    ]
    return f"Ratios: {', '.join(words)}."


def record(path: Path, section: str) -> None:
    """Put `section` into the Markdown file at `path`, in place of the section with the same title if there is one."""
    text = path.read_text() if path.exists() else "# Benchmarks\n\nEach section names the command that wrote it.\n"
    title = section.splitlines()[0]
    old = re.search(rf"^{re.escape(title)}\n.*?(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if old:
        rest = text[old.end() :]
        text = text[: old.start()] + section + ("\n" + rest if rest else "")
    else:
        text = text.rstrip("\n") + "\n\n" + section
    path.write_text(text)


def finish(
    options: argparse.Namespace, section: str, ratios: Mapping[str, float], limits: Mapping[str, Limit], *, hint: str
) -> int:
    """Print the page and, as the last line, the ratios as one JSON object; record as asked.

    Args:
        options: of `parser`.
        section: Markdown that begins with a `## ` line and ends with a newline.
        hint: what to look at when a limit is broken.

    Returns:
        The exit code: 1 when a ratio breaks its limit and `--assert` is given.
    """
    print(section)
    if options.record:
        record(options.record, section)
    broken = [name for name, limit in limits.items() if not limit.allows(ratios[name])]
    if broken:
        words = ", ".join(f"{name} is {ratios[name]:g}, {limits[name]} is allowed" for name in broken)
        print(f"{'error' if options.asserting else 'warning'}: {words}; {hint}", file=sys.stderr)
    print(json.dumps(ratios), flush=True)
    return 1 if broken and options.asserting else 0
