"""How the command line speaks: results on stdout, everything else on stderr, one line per error."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptmgr.core.manifest import encode_metric

if TYPE_CHECKING:
    from rich.table import Table


def say(text: str) -> None:
    """A line for the reader, on stderr."""
    print(text, file=sys.stderr)


def warn(text: str) -> None:
    """A line that the reader should not miss, on stderr."""
    print(f"ckptmgr: warning: {text}", file=sys.stderr)


def fail(text: str) -> None:
    """The one line of an error, on stderr."""
    print("ckptmgr: error: " + " ".join(text.split()), file=sys.stderr)


def emit(text: str) -> None:
    """A result for a person or a pipe, on stdout."""
    print(text)


def emit_json(document: Mapping[str, Any]) -> None:
    """The one document of `--json`, on stdout; strict JSON, so non-finite numbers must be encoded before."""
    json.dump(document, sys.stdout, indent=2, ensure_ascii=False, allow_nan=False)
    sys.stdout.write("\n")


def json_metrics(metrics: Mapping[str, float]) -> dict[str, float | str]:
    return {name: encode_metric(value) for name, value in metrics.items()}


def size(count: int) -> str:
    """`count` bytes for a reader: 512 B, 1.2 MB, 3.45 GB (powers of 1000)."""
    value, unit = float(count), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.3g} {unit}"


def when(stamp: str | None) -> str:
    """An ISO 8601 stamp to the minute."""
    return "" if not stamp else stamp[:16].replace("T", " ")


def number(value: float) -> str:
    """A metric for a reader."""
    return f"{value:.4g}"


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table with `columns`; those in `right` are right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(
            column,
            justify="right" if column in right else "left",
            no_wrap=column in ("id", "step", "size"),
            overflow="fold",
        )
    return made


def show_table(made: Table) -> None:
    """Print a table on stdout, without columns that are empty all the way; into a pipe it keeps its full width, so that nothing is cut."""
    from rich.console import Console

    made.columns = [column for column in made.columns if any(str(cell) for cell in column.cells)]
    console = Console(width=None if sys.stdout.isatty() else 400, highlight=False)
    with console.capture() as captured:
        console.print(made)
    emit("\n".join(line.rstrip() for line in captured.get().splitlines() if line.strip()))


@contextlib.contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while bytes move, where stderr is a terminal; yields what to call with the number of bytes of each block."""
    if not sys.stderr.isatty() or total == 0:
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)
