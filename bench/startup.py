"""How long the commands take to start, against the imports that they cannot do without.

    python bench/startup.py [--rounds N] [--assert] [--record docs/benchmarks.md]

`ckptmgr --help` may take twice as long as `python -c "import typer"`, `ckptmgr ls` on a local store with a run in it twice as long as
`python -c "import typer, fsspec"`. Each round times every command once, each time in another order, so that a machine which slows down
for a while slows all of them; what counts are the medians of one call. The last line of the output is a JSON object with the ratios
`help_vs_typer` and `ls_vs_typer_fsspec`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from time import perf_counter

LIMIT = 2.0
RATIOS = {"help_vs_typer": ("help", "typer"), "ls_vs_typer_fsspec": ("ls", "typer_fsspec")}
PACKAGES = ("ckptmgr", "typer", "rich", "fsspec", "msgspec")
CHECKPOINTS = 5


def ckptmgr(*arguments: str) -> list[str]:
    """The command as people start it: the console script, or the module where no script is installed."""
    script = Path(sys.executable).with_name("ckptmgr")
    return [str(script), *arguments] if script.exists() else [sys.executable, "-m", "ckptmgr.cli.main", *arguments]


def make_store(directory: Path) -> str:
    """Push a run of `CHECKPOINTS` small checkpoints into a store at `directory`; returns the run's URL."""
    url = (directory / "store" / "run").as_uri()
    for step in range(1, CHECKPOINTS + 1):
        checkpoint = directory / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "model.bin").write_bytes(bytes(step))
        pushed = subprocess.run(ckptmgr("push", str(checkpoint), url), check=False, capture_output=True, text=True)
        if pushed.returncode:
            sys.exit(f"error: cannot make a run to list: {pushed.stderr.strip()}")
    return url


def seconds(command: Sequence[str]) -> float:
    """How long `command` ran. Raises CalledProcessError when it failed: the time of a failure says nothing."""
    start = perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def medians(
    commands: dict[str, list[str]], rounds: int, time_it: Callable[[Sequence[str]], float] = seconds
) -> dict[str, float]:
    """Median seconds of each command over `rounds` interleaved rounds, after one round that fills the caches."""
    times: dict[str, list[float]] = {name: [] for name in commands}
    names = list(commands)
    for command in commands.values():
        time_it(command)
    for round_number in range(rounds):
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            times[name].append(time_it(commands[name]))
    return {name: median(values) for name, values in times.items()}


def ratios(times_s: dict[str, float]) -> dict[str, float]:
    """The two numbers that have a limit."""
    return {ratio: round(times_s[ours] / times_s[theirs], 3) for ratio, (ours, theirs) in RATIOS.items()}


def measure(rounds: int) -> dict[str, float]:
    """Medians in seconds of the two commands, of their yardsticks, and of an interpreter that does nothing."""
    with tempfile.TemporaryDirectory() as directory:
        url = make_store(Path(directory))
        commands = {
            "pass": [sys.executable, "-c", "pass"],
            "typer": [sys.executable, "-c", "import typer"],
            "help": ckptmgr("--help"),
            "typer_fsspec": [sys.executable, "-c", "import typer, fsspec"],
            "ls": ckptmgr("ls", url),
        }
        return medians(commands, rounds)


def machine() -> str:
    """One line: cores, processor, system, Python and the packages whose imports are measured."""
    try:
        model = re.search(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        model = None
    packages = ", ".join(f"{name} {metadata.version(name)}" for name in PACKAGES)
    processor = model[1] if model else platform.machine()
    return (
        f"{os.cpu_count()} cores of {processor}, {platform.system()}, CPython {platform.python_version()}, {packages}"
    )


def report(times_s: dict[str, float], rounds: int) -> str:
    """The measurement as a Markdown section."""
    titles = {
        "pass": '`python -c "pass"`',
        "typer": '`python -c "import typer"`',
        "help": "`ckptmgr --help`",
        "typer_fsspec": '`python -c "import typer, fsspec"`',
        "ls": f"`ckptmgr ls`, a local run of {CHECKPOINTS} checkpoints",
    }
    rows = [f"| {titles[name]} | {times_s[name] * 1000:.0f} |" for name in titles]
    verdicts = [f"`{name}` {value:.2f} (limit {LIMIT:g})" for name, value in ratios(times_s).items()]
    return "\n".join(
        [
            "## Start-up",
            "",
            f"`python bench/startup.py --rounds {rounds}`: medians of {rounds} interleaved rounds, in ms.",
            "",
            "| command | ms |",
            "| --- | ---: |",
            *rows,
            "",
            f"Ratios: {', '.join(verdicts)}.",
            "",
            f"{machine()}.",
            "",
        ]
    )


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when a ratio is above its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timings of each command (15)")
    parser.add_argument("--assert", dest="asserting", action="store_true", help="fail when a ratio is above its limit")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the result into this Markdown file")
    options = parser.parse_args(arguments)
    times_s = measure(options.rounds)
    section = report(times_s, options.rounds)
    print(section)
    if options.record:
        record(options.record, section)
    above = [name for name, value in ratios(times_s).items() if value > LIMIT]
    print(json.dumps(ratios(times_s)))
    if options.asserting and above:
        print(f"error: above {LIMIT:g}: {', '.join(above)}; python -X importtime tells why", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
