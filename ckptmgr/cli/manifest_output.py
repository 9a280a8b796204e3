"""One manifest, for people: facts, a line each, and a table of its files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ckptmgr.cli.output import count, emit, size
from ckptmgr.cli.tables import Column, Table
from ckptmgr.cli.tables import show as show_table

if TYPE_CHECKING:
    from ckptmgr.core.manifest import Manifest


def emit_manifest(facts: Iterable[tuple[str, str]], manifest: Manifest) -> None:
    """Show `facts`, as (label, value), but for those without a value, and the files of `manifest`."""
    for label, value in facts:
        if value:
            emit(f"{label + ':':<12}{value}")
    table = Table(
        Column(title="file", least=20),
        Column(title="role", leave=1),
        Column(title="size", right=True),
        Column(title="blake3", least=16),
    )
    for entry in manifest.files:
        table.add(entry.path, entry.role, size(entry.size), entry.blake3)
    show_table(table)


def size_text(manifest: Manifest) -> str:
    return f"{size(manifest.size_bytes)} in {count(len(manifest.files), 'file')}"


def producer_text(manifest: Manifest) -> str:
    """What wrote it, with versions; "" if it does not say."""
    return ", ".join(f"{name} {value}" for name, value in sorted(manifest.producer.items()))
