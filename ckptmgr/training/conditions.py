"""What this process trains under, and how that differs from what a checkpoint was made under."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ckptmgr.core.conditions import Conditions, Drift, drift, incomparable
from ckptmgr.core.manifest import Manifest
from ckptmgr.run.conditions import git_commit, refuse_drift, versions_in_use, versions_of
from ckptmgr.training.ranks import is_size_told, world_size
from ckptmgr.training.restore_report import RestoreReport, piece_kinds

logger = logging.getLogger(__name__)


class Described:
    """What a host says of its training, and what is known besides."""

    def __init__(self) -> None:
        self._said = Conditions()

    def add(self, conditions: Conditions) -> None:
        """What is None in `conditions` stays as it is known already."""
        self._said = combined(self._said, conditions)

    def now(self, pieces: Mapping[str, Any] | None = None) -> Conditions:
        """What training runs under now; see `present`."""
        return present(self._said, pieces)

    def before_training(self) -> Conditions:
        """What is known before a host has begun. It may start its ranks only then, so that of a process by itself nothing follows for their number."""
        known = self.now()
        return known if is_size_told() else replace(known, world_size=self._said.world_size)


def combined(*parts: Conditions) -> Conditions:
    """All of `parts` as one: what is known in a later one counts; tables are joined."""
    values: dict[str, Any] = {}
    for part in parts:
        for field in fields(Conditions):
            value = getattr(part, field.name)
            if isinstance(value, Mapping):
                values[field.name] = {**values.get(field.name, {}), **value}
            elif value is not None:
                values[field.name] = value
    return Conditions(**values)


def present(described: Conditions, pieces: Mapping[str, Any] | None = None) -> Conditions:
    """What training runs under now.

    Args:
        described: what a host knows; it counts where this module would say otherwise.
        pieces: of the state: their classes, and what those say themselves that have a `conditions()`, such as `ResumableLoader`.
    """
    known = Conditions(world_size=world_size(), git_commit=_commit_of_the_code(), versions=versions_in_use())
    if pieces is None:
        return combined(known, described)
    return combined(known, *_said_by(pieces), described, Conditions(pieces=piece_kinds(pieces)))


def compare(manifest: Manifest, now: Conditions) -> tuple[Drift, ...]:
    """What differs between the checkpoint's conditions and `now`; libraries that are not imported yet count by what is installed."""
    saved = Conditions.of_document(manifest.conditions)
    return drift(saved, _with_installed(saved, now))


def compare_or_refuse(manifest: Manifest, now: Conditions, refused: frozenset[str]) -> tuple[Drift, ...]:
    """As `compare`, for what is about to be loaded.

    Args:
        refused: drifts that are an error, by `drift_names`.

    Raises:
        DriftError: one of `refused` is among what differs.
    """
    found = compare(manifest, now)
    refuse_drift(found, refused, where=f"step {manifest.step} ({manifest.id})")
    return found


def with_drift(report: RestoreReport, found: Iterable[Drift]) -> RestoreReport:
    """`report` with what was found to differ; of other classes of pieces only what was restored."""
    pieces = {f"pieces.{name}" for name in report.restored}
    differs = tuple(found)
    return replace(
        report,
        changed=tuple(each for each in differs if each.what in pieces),
        drift=tuple(each for each in differs if not each.what.startswith("pieces.")),
    )


def log_report(report: RestoreReport) -> None:
    """Log `report` line by line: as information what is as it should be, as a warning what is not."""
    good = replace(report, missing=(), changed=(), drift=(), notes=()).lines()
    for line in report.lines():
        logger.log(logging.INFO if line in good else logging.WARNING, "%s", line)


def compare_all(manifest: Manifest, now: Conditions, refused: frozenset[str]) -> tuple[Drift, ...]:
    """As `compare_or_refuse`, where all is known that will be: what is refused and cannot be compared is logged, for the checkpoint or the host
    does not say."""
    found = compare_or_refuse(manifest, now, refused)
    saved = Conditions.of_document(manifest.conditions)
    for name in incomparable(saved, _with_installed(saved, now), refused):
        logger.warning("%s: a drift of %s would be refused, but it cannot be compared", manifest.id, name)
    return found


def _with_installed(saved: Conditions, now: Conditions) -> Conditions:
    return replace(now, versions={**versions_of(saved.versions), **now.versions})


def _said_by(pieces: Mapping[str, Any]) -> Iterable[Conditions]:
    for name, piece in pieces.items():
        ask = getattr(piece, "conditions", None)
        if not callable(ask) or isinstance(piece, type):
            continue
        try:
            said = ask()
        except Exception as error:  # the user's code: what it cannot say is unknown, and no save fails for it (I9)
            logger.warning("the conditions of %r are unknown: %r", name, error, exc_info=True)
            continue
        if isinstance(said, Conditions):
            yield said


@cache
def _commit_of_the_code() -> str | None:
    """The commit of the program's tree, else of the working directory's. Once: what a process runs is what it has loaded at its start."""
    program = getattr(sys.modules.get("__main__"), "__file__", None)
    commit = None if program is None else git_commit(Path(program).resolve().parent)
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed
        commit = commit or git_commit(Path.cwd())
    return commit
