"""How long the commands take to start, against the imports that they cannot do without.

    python bench/startup.py [--rounds N] [--assert] [--record docs/benchmarks.md]

`ckptmgr --help` may take twice as long as `python -c "import typer"`, `ckptmgr ls` on a local store with a run in it twice as long as
`python -c "import typer, fsspec"`. Each round times every command once, each time in another order, so that a machine which slows down
for a while slows all of them; what counts are the medians of one call. The last line of the output is a JSON object with the ratios
`help_vs_typer` and `ls_vs_typer_fsspec`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter

from _report import Limit, finish, interleaved, machine, parser, verdicts

RATIOS = {"help_vs_typer": ("help", "typer"), "ls_vs_typer_fsspec": ("ls", "typer_fsspec")}
LIMITS = {ratio: Limit(at_most=2.0) for ratio in RATIOS}
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
    actions = {name: (lambda command=command: time_it(command)) for name, command in commands.items()}
    return {name: median(times_s) for name, times_s in interleaved(actions, rounds).items()}


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
            verdicts(ratios(times_s), LIMITS),
            "",
            f"{machine(PACKAGES)}.",
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, record; with `--assert`, 1 when a ratio is above its limit."""
    options = parser(__doc__, rounds=15).parse_args(arguments)
    times_s = measure(options.rounds)
    section = report(times_s, options.rounds)
    return finish(options, section, ratios(times_s), LIMITS, hint="python -X importtime tells why")


if __name__ == "__main__":
    sys.exit(main())
