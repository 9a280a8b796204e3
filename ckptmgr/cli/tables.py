"""Tables for a terminal: aligned columns that give way in a stated order when it is narrow, so that ids are never broken.

Into a pipe a table keeps its full width and carries no colours.
"""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from ckptmgr.cli.output import one_line, stdout_named

_GAP = "  "
_BOLD, _DIM, _PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column.

    Attributes:
        title: its head.
        right: align right, for numbers.
        least: may be cut, with an ellipsis, down to this many cells; None if never.
        leave: left out when the terminal is too narrow, the highest number first; 0 if never.
    """

    title: str
    right: bool = False
    least: int | None = None
    leave: int = 0


class Table:
    """Rows under `columns`; a column that is empty all the way down is not shown."""

    def __init__(self, *columns: Column) -> None:
        self._columns = columns
        self._rows: list[tuple[str, ...]] = []

    def add(self, *cells: str) -> None:
        """Append a row, one cell per column."""
        if len(cells) != len(self._columns):
            raise ValueError(f"{len(cells)} cells for {len(self._columns)} columns")
        self._rows.append(cells)

    def lines(self, *, width: int | None = None, styled: bool = False) -> list[str]:
        """The table's lines.

        Args:
            width: cells to fit into, if leaving out and cutting columns can bring that about; None for no limit.
            styled: bold heads and dim rules, by ANSI sequences.
        """
        # Column by column: of a table of 10,000 rows, each is printable and ASCII or not as a whole.
        filled = zip(self._columns, map(_lines, zip(*self._rows, strict=True)), strict=True) if self._rows else ()
        shown = [(column, [column.title, *cells]) for column, cells in filled if any(cells)]
        widths = _fit([column for column, _ in shown], [_widest(cells) for _, cells in shown], width)
        layout = [(column, cells, wide) for (column, cells), wide in zip(shown, widths, strict=True) if wide]
        padded = [_padded(cells, wide, column.right) for column, cells, wide in layout]
        head, *body = (_GAP.join(cells).rstrip() for cells in zip(*padded, strict=True)) if padded else ("",)
        rule = _GAP.join("─" * wide for _, _, wide in layout)
        if styled:
            head, rule = f"{_BOLD}{head}{_PLAIN}", f"{_DIM}{rule}{_PLAIN}"
        return [head, rule, *body]


def terminal_width() -> int | None:
    """Cells in a line where stdout is a terminal; None where it is not, and nothing needs to fit."""
    return shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else None


def show(table: Table) -> None:
    """Print `table` on stdout, as wide as the terminal allows."""
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    with stdout_named():
        print("\n".join(table.lines(width=terminal_width(), styled=styled)))


def _fit(columns: Sequence[Column], natural: Sequence[int], width: int | None) -> list[int]:
    """The width of each column, 0 for one that is left out."""
    widths = list(natural)
    if width is None:
        return widths
    for at in [
        -1,
        *sorted((at for at, column in enumerate(columns) if column.leave), key=lambda at: -columns[at].leave),
    ]:
        if at >= 0:
            widths[at] = 0
        over = sum(widths) + len(_GAP) * (sum(map(bool, widths)) - 1) - width
        slack = [
            max(0, cells - max(column.least, _cells(column.title))) if column.least is not None else 0
            for column, cells in zip(columns, widths, strict=True)
        ]
        if over <= sum(slack):
            break
    # What even that does not bring down to `width` is left to the terminal: a line that wraps still holds every id whole.
    while over > 0 and any(slack):
        widest = max((at for at in range(len(widths)) if slack[at]), key=lambda at: widths[at])
        widths[widest], slack[widest], over = widths[widest] - 1, slack[widest] - 1, over - 1
    return widths


def _lines(texts: Sequence[str]) -> list[str]:
    """Each of `texts` on one line, and nothing in it that drives a terminal."""
    stripped = [text.strip() for text in texts]
    return stripped if "".join(stripped).isprintable() else [one_line(text) for text in stripped]


def _widest(texts: Sequence[str]) -> int:
    return max(map(len if "".join(texts).isascii() else _cells, texts))


def _padded(texts: Sequence[str], cells: int, right: bool) -> list[str]:
    """Each of `texts` in so many cells, cut where it needs more."""
    if "".join(texts).isascii():
        cut = [text if len(text) <= cells else f"{text[: cells - 1]}…" for text in texts]
        return [text.rjust(cells) for text in cut] if right else [text.ljust(cells) for text in cut]
    cut = [_cut(text, cells) for text in texts]
    padding = [" " * (cells - _cells(text)) for text in cut]
    return [pad + text if right else text + pad for text, pad in zip(cut, padding, strict=True)]


def _cells(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text
    )


def _cut(text: str, cells: int) -> str:
    if _cells(text) <= cells:
        return text
    while text and _cells(text) >= cells:
        text = text[:-1]
    return f"{text}…"
