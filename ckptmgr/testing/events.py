"""Which events a host fires, in which order, with which arguments: recorded, and compared with the page that says so (docs/events.md).

    recorder = EventRecorder()
    …  # a training of two epochs of four micro-batches, two to a step, logged every second step, evaluated and saved at the end of each epoch
    assert documented("transformers", page) == recorder.told()

With UPDATE_EVENTS_PAGE=1, `agree` writes what was recorded into the page instead.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckptmgr.callbacks.base import EVENTS, Callback, Priority

UPDATE_ENV = "UPDATE_EVENTS_PAGE"

#: What an event brings of its own. What most events bring in most hosts is told in words.
OWN = ("batch", "outputs", "metrics", "logs", "grad_norm", "checkpoint", "exception", "resume_from")
# In an order of events, these begin a line.
_BEGIN = {"epoch_begin", "step_begin", "evaluate_begin", "epoch_end", "train_end"}
_FIRES, _SILENT = "·", "-"


@dataclass(frozen=True, slots=True)
class Told:
    """What is said of one host.

    Attributes:
        order: its events, without `on_`, in lines.
        arguments: by event, what it brings of its own, as a cell of the table.
    """

    order: tuple[str, ...]
    arguments: Mapping[str, str] = field(default_factory=dict)


class EventRecorder(Callback):
    """Notes every event, newer ones of a host included, and what came with it. It runs last, and changes nothing."""

    priority = Priority.LOG

    def __init__(self) -> None:
        self.events: list[str] = []
        self.brought: dict[str, set[str]] = {}

    def note(self, event: str, arguments: Mapping[str, Any]) -> None:
        """One event."""
        name = event.removeprefix("on_")
        self.events.append(name)
        came = {each for each in OWN if arguments.get(each) is not None}
        self.brought[name] = self.brought.get(name, set()) | came

    def told(self) -> Told:
        """What was recorded, in the form of the page."""
        cells = {name: ", ".join(each for each in OWN if each in came) or _FIRES for name, came in self.brought.items()}
        return Told(tuple(_lines(self.events)), cells)

    def __getattr__(self, name: str) -> Any:
        # An event that a newer host adds.
        return partial(_noting(name), self) if name.startswith("on_") else super().__getattr__(name)


def _noting(event: str) -> Any:
    def hook(self: EventRecorder, args: Any = None, state: Any = None, control: Any = None, **arguments: Any) -> None:
        self.note(event, arguments)

    return hook


for _event in (*EVENTS, "on_push_begin"):
    setattr(EventRecorder, _event, _noting(_event))


def _lines(events: list[str]) -> list[str]:
    lines: list[list[str]] = [[]]
    for name in events:
        if name in _BEGIN and lines[-1]:
            lines.append([])
        lines[-1].append(name)
    return [" ".join(line) for line in lines]


def documented(host: str, page: str) -> Told:
    """What `page` says of `host`; nothing where it does not know it."""
    block = re.search(rf"^### {re.escape(host)}\n.*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = _rows(page)
    column = rows[0].index(host) if rows and host in rows[0] else None
    cells = {} if column is None else {row[0].strip("`"): row[column] for row in rows[2:] if row[column] != _SILENT}
    return Told(tuple(block[1].splitlines()) if block else (), cells)


def agree(host: str, told: Told, path: Path) -> None:
    """Raise AssertionError unless the page at `path` says of `host` what was recorded; with UPDATE_EVENTS_PAGE=1, write it there."""
    page = path.read_text(encoding="utf-8")
    if os.environ.get(UPDATE_ENV) == "1":
        page = updated(host, told, page)
        path.write_text(page, encoding="utf-8")
    known = documented(host, page)
    assert known.order == told.order, f"{host}: the order of events is\n" + "\n".join(told.order)
    assert known.arguments == told.arguments, f"{host}: events bring {dict(told.arguments)}"


def updated(host: str, told: Told, page: str) -> str:
    """`page` with what was recorded of `host` in place of what it said; the host must have a heading and a column there."""
    block = "\n".join(told.order)
    page = re.sub(
        rf"(^### {re.escape(host)}\n.*?^```\n).*?(^```)",
        lambda match: f"{match[1]}{block}\n{match[2]}",
        page,
        count=1,
        flags=re.MULTILINE | re.DOTALL,
    )
    rows = _rows(page)
    column = rows[0].index(host)
    listed = {row[0].strip("`") for row in rows[2:]}
    known = [event.removeprefix("on_") for event in (*EVENTS, "on_push_begin")]
    rows += [
        [f"`{name}`", *[_SILENT] * (len(rows[0]) - 1)]
        for name in known
        if name in told.arguments and name not in listed
    ]
    rows[2:] = sorted(rows[2:], key=lambda row: known.index(row[0].strip("`")))
    for row in rows[2:]:
        row[column] = told.arguments.get(row[0].strip("`"), _SILENT)
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return re.sub(r"(^\| event .*?\n)(?:^\|.*?\n)*", lambda match: table, page, count=1, flags=re.MULTILINE)


def _rows(page: str) -> list[list[str]]:
    """The table of arguments, its heading and its rule included."""
    table = re.search(r"^\| event .*?\n(?:^\|.*?\n)*", page, re.MULTILINE)
    lines = table[0].splitlines() if table else []
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
