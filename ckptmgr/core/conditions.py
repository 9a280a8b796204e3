"""What a training ran under when it saved, apart from its state, and how that differs from what it resumes under.

A resumed run is exact only if these are as they were. The manifest carries them, so that they can be compared before anything is loaded and
for trees that a framework wrote itself. What nobody knows is None, and is not compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckptmgr.core.errors import ConfigError, DriftError

_NUMBERS = ("world_size", "batch_size", "accumulation", "dataset_length")
_TEXTS = ("dataset_fingerprint", "git_commit")
_TABLES = ("versions", "pieces")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a training runs under.

    Attributes:
        world_size: ranks that train.
        batch_size: samples per micro-batch and rank.
        accumulation: micro-batches per optimizer step.
        dataset_length: samples in the training dataset.
        dataset_fingerprint: of its content, as far as it has one (a `datasets` fingerprint, or a digest of some samples).
        git_commit: 40 hex digits of the working tree's commit, with `+changes` behind them if files of it were changed.
        versions: of Python and the libraries that decide about bits, by name: `python`, `torch`, `numpy`, `transformers`, …
        pieces: for each piece of the state, the class that it is an object of.
    """

    world_size: int | None = None
    batch_size: int | None = None
    accumulation: int | None = None
    dataset_length: int | None = None
    dataset_fingerprint: str | None = None
    git_commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    pieces: Mapping[str, str] = field(default_factory=dict)

    def as_document(self) -> dict[str, Any]:
        """JSON values of what is known, as the manifest has them."""
        values = {name: getattr(self, name) for name in (*_NUMBERS, *_TEXTS)}
        tables = {name: dict(sorted(getattr(self, name).items())) for name in _TABLES}
        return {name: value for name, value in values.items() if value is not None} | {
            name: table for name, table in tables.items() if table
        }

    @classmethod
    def of_document(cls, document: Mapping[str, Any]) -> Conditions:
        """What `as_document` gave; values of another kind, of a newer version or another writer, count as unknown."""
        known: dict[str, Any] = {name: _table(document.get(name)) for name in _TABLES}
        known |= {name: document[name] for name in _NUMBERS if type(document.get(name)) is int}
        known |= {name: document[name] for name in _TEXTS if isinstance(document.get(name), str)}
        return cls(**known)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One thing that is not as it was: `what`, its value in the checkpoint, and the value now.

    `what` is the name of a field of `Conditions`, with the entry for a table: `batch_size`, `versions.torch`, `pieces.optimizer`.
    """

    what: str
    saved: str
    now: str

    def __str__(self) -> str:
        return f"{self.what}: {self.saved} in the checkpoint, {self.now} now"


def drift(saved: Conditions, now: Conditions) -> tuple[Drift, ...]:
    """What differs, of all that both know, in the order of the fields."""
    found = []
    for name in (*_NUMBERS, *_TEXTS):
        before, after = getattr(saved, name), getattr(now, name)
        if before is not None and after is not None and before != after:
            found.append(Drift(what=name, saved=str(before), now=str(after)))
    for name in _TABLES:
        before, after = getattr(saved, name), getattr(now, name)
        for entry in sorted(before.keys() & after.keys()):
            if before[entry] != after[entry]:
                found.append(Drift(what=f"{name}.{entry}", saved=before[entry], now=after[entry]))
    return tuple(found)


def matches(what: str, names: frozenset[str]) -> bool:
    """Whether a drift of `what` is one of `names`: by its own name, or by that of the table that it is in."""
    return what in names or what.partition(".")[0] in names


def drift_names(texts: Iterable[str] | str) -> frozenset[str]:
    """Names of drifts as people write them, several in one text with commas or blanks between them.

    Raises:
        ConfigError: there is no such drift: a misspelled one would never be found.
    """
    names = frozenset(
        name for text in ([texts] if isinstance(texts, str) else texts) for name in text.replace(",", " ").split()
    )
    for name in sorted(names):
        table, dot, entry = name.partition(".")
        if not (table in _TABLES and entry if dot else name in (*_NUMBERS, *_TEXTS, *_TABLES)):
            known = ", ".join((*_NUMBERS, *_TEXTS, *_TABLES))
            raise ConfigError(
                f"{name!r} is no drift that could be refused", hint=f"use {known}, or an entry such as versions.torch"
            )
    return names


def refuse(found: Iterable[Drift], names: frozenset[str], *, where: str) -> None:
    """Raise DriftError if one of `names` is among what was `found` to differ.

    Args:
        where: names the checkpoint, for the message.
    """
    refused = tuple(each for each in found if matches(each.what, names))
    if refused:
        raise DriftError(
            f"{where} was made under other conditions: {'; '.join(map(str, refused))}",
            hint="make it as it was, or do not refuse it (refuse_drift, --refuse-drift, CKPTMGR_REFUSE_DRIFT); nothing was loaded",
            drift=refused,
        )


def incomparable(saved: Conditions, now: Conditions, names: frozenset[str]) -> tuple[str, ...]:
    """Those of `names` that one side does not know, sorted, so that their drift would go unnoticed."""
    return tuple(name for name in sorted(names) if not (_knows(saved, name) and _knows(now, name)))


def _knows(conditions: Conditions, name: str) -> bool:
    field_name, dot, entry = name.partition(".")
    value = getattr(conditions, field_name)
    return entry in value if dot else value not in (None, {})


def _table(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict):
        return {}
    return {key: text for key, text in value.items() if isinstance(key, str) and isinstance(text, str)}
