"""What is newest (I4): the chain of checkpoints that the highest claimed attempt descends from.

    newest = the last commit, by (step, seq), of the highest claimed attempt; if it has none, of its recorded parent's chain, and so on down.

After an automatic resume a later commit of the parent's attempt counts: it was on its way when the process died, and the resumed
attempt would have taken it had it arrived in time. After an explicit rewind only commits up to the parent do: the user turned away from the rest.
Modification times, wall clocks and string order play no part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter

from ckptmgr.core.layout import Stem
from ckptmgr.core.records import AttemptRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of one attempt that belongs to a chain: all its commits, or those up to `last` = (step, seq) inclusive."""

    attempt: int
    last: tuple[int, int] | None = None

    def holds(self, stem: Stem) -> bool:
        return stem.attempt == self.attempt and (self.last is None or stem.position <= self.last)


def spans(attempts: Mapping[int, AttemptRecord], committed_attempts: Iterable[int] = ()) -> list[Span]:
    """The attempts of the present lineage, newest first.

    Args:
        attempts: every claimed attempt by number; a number whose record cannot be read may be left out.
        committed_attempts: attempts that commits name. One without a record (a copied run, a record lost by hand), or that only another
            record names as its parent, still counts as claimed, as an automatic continuation of the highest one before it.
    """
    known = dict(attempts)
    for committed in committed_attempts:
        known.setdefault(committed, AttemptRecord(number=committed, how="auto"))
    for record in attempts.values():
        if record.parent is not None and record.parent.attempt < record.number:
            known.setdefault(record.parent.attempt, AttemptRecord(number=record.parent.attempt, how="auto"))
    lineages: dict[int, _Link] = {}
    previous: _Link | None = None
    for number in sorted(known):
        previous = lineages[number] = _Link(Span(attempt=number), _below(known[number], lineages, previous))
    return [] if previous is None else [link.span for link in previous]


@dataclass(frozen=True, slots=True)
class _Link:
    """The newest span of a lineage and what is below it. Lineages share what they have in common: an attempt is a start, and a run that is reclaimed
    every few minutes has thousands."""

    span: Span
    below: _Link | None

    def __iter__(self) -> Iterator[_Link]:
        link: _Link | None = self
        while link is not None:
            yield link
            link = link.below


def _below(record: AttemptRecord, lineages: Mapping[int, _Link], previous: _Link | None) -> _Link | None:
    """What the attempt of `record` goes on from.

    Args:
        lineages: of every lower attempt.
        previous: that of the highest lower attempt.
    """
    parent = record.parent
    if record.how == "fresh":
        return None
    if parent is None:
        # An automatic start that found nothing goes on from the attempt before it, whose first commit may still be on its way.
        return previous
    # A parent at or above the attempt itself would loop; such a record is wrong and ends the chain.
    if parent.attempt >= record.number:
        return None
    below = lineages[parent.attempt]
    if record.how == "explicit":
        return _Link(Span(attempt=parent.attempt, last=parent.position), below.below)
    # What an automatic start found lay in the lineage of the attempt before it: where a rewind had cut that, it stays cut, also if the
    # rewound attempt died before its first save (K124).
    return next((link for link in previous or () if link.span.holds(parent)), below)


def chain(stems: Iterable[Stem], attempts: Mapping[int, AttemptRecord]) -> list[Stem]:
    """Those of `stems` that the present lineage holds, newest first: the order of resume's fall-back and of keep-last.

    Args:
        stems: committed checkpoints, in any order.
        attempts: every claimed attempt by number.
    """
    committed: dict[int, list[Stem]] = {}
    for stem in sorted(set(stems), key=attrgetter("step", "seq", "nonce"), reverse=True):
        committed.setdefault(stem.attempt, []).append(stem)
    lineage = spans(attempts, committed)
    return [stem for span in lineage for stem in committed.get(span.attempt, ()) if span.holds(stem)]


def newest(stems: Iterable[Stem], attempts: Mapping[int, AttemptRecord]) -> Stem | None:
    """The newest checkpoint of the present lineage; None if the lineage has none."""
    return next(iter(chain(stems, attempts)), None)
