"""What is newest (I4), in every way that attempts can follow each other."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.layout import Stem
from ckptmgr.core.lineage import Span, chain, newest, spans
from ckptmgr.core.manifest import How
from ckptmgr.core.records import AttemptRecord


def stem(attempt: int, step: int, seq: int = 1) -> Stem:
    return Stem(attempt, step, seq, f"{step % 16**8:08x}")


def attempts(*records: tuple[int, How, Stem | None]) -> dict[int, AttemptRecord]:
    return {number: AttemptRecord(number=number, how=how, parent=parent) for number, how, parent in records}


FIRST: tuple[int, How, None] = (1, "auto", None)


def test_newest_of_one_attempt_is_by_step_and_seq() -> None:
    """A second save of one step is newer than the first, and steps count as numbers."""
    stems = [stem(1, 900), stem(1, 1000, 3), stem(1, 1000, 4), stem(1, 99)]
    assert chain(stems, attempts(FIRST)) == [stem(1, 1000, 4), stem(1, 1000, 3), stem(1, 900), stem(1, 99)]


def test_numbers_that_outgrow_their_padding_stay_in_order() -> None:
    """Attempt 1,000,000 is after 999,999, though its name sorts before it."""
    older, newer = stem(999_999, 10**12), stem(1_000_000, 5)
    assert chain([newer, older], {}) == [newer, older]
    assert chain([stem(1, 10**12), stem(1, 10**12 - 1)], {}) == [stem(1, 10**12), stem(1, 10**12 - 1)]


def test_an_empty_run_has_no_newest() -> None:
    """No commit, no newest, whatever was claimed."""
    assert newest([], {}) is None
    assert newest([], attempts(FIRST, (2, "auto", None))) is None


def test_the_highest_attempt_wins_over_higher_steps() -> None:
    """A zombie that is further in steps is not newer than the attempt that replaced it."""
    claimed = attempts(FIRST, (2, "auto", stem(1, 100)))
    assert newest([stem(1, 100), stem(1, 900), stem(2, 150)], claimed) == stem(2, 150)


def test_after_an_automatic_resume_a_late_commit_of_the_parent_counts() -> None:
    """It was on its way when the process died."""
    claimed = attempts(FIRST, (2, "auto", stem(1, 100)))
    late = stem(1, 200)
    assert newest([stem(1, 100), late], claimed) == late
    assert chain([stem(1, 100), late, stem(2, 150)], claimed) == [stem(2, 150), late, stem(1, 100)]


def test_after_an_explicit_rewind_a_late_commit_of_the_parent_does_not_count() -> None:
    """The user turned away from what came after the checkpoint that was chosen."""
    claimed = attempts(FIRST, (2, "explicit", stem(1, 100)))
    assert newest([stem(1, 100), stem(1, 200)], claimed) == stem(1, 100)


def test_a_rewind_cuts_at_the_very_save() -> None:
    """Of several saves of one step, those up to the chosen one stay."""
    claimed = attempts(FIRST, (2, "explicit", stem(1, 100, 2)))
    assert chain([stem(1, 100, 1), stem(1, 100, 2), stem(1, 100, 3)], claimed) == [stem(1, 100, 2), stem(1, 100, 1)]


def test_k124_saves_after_a_rewind_are_the_newest() -> None:
    """K124: 100/200/300, rewound to 100, saved 200 again: the new 200 goes on, the old 300 never."""
    old = [stem(1, 100), stem(1, 200), stem(1, 300)]
    claimed = attempts(FIRST, (2, "explicit", old[0]))
    assert chain(old, claimed) == [old[0]]
    again = stem(2, 200)
    assert chain([*old, again], claimed) == [again, old[0]]
    resumed = attempts(FIRST, (2, "explicit", old[0]), (3, "auto", again))
    assert chain([*old, again], resumed) == [again, old[0]]


def test_k124_a_rewind_that_dies_before_its_first_save_stays_a_rewind() -> None:
    """K124: rewound to 100, killed, started again automatically from 100: the old 300 is not the newest, now or later."""
    old = [stem(1, 100), stem(1, 200), stem(1, 300)]
    claimed = attempts(FIRST, (2, "explicit", old[0]), (3, "auto", old[0]))
    assert chain(old, claimed) == [old[0]]
    again = attempts(FIRST, (2, "explicit", old[0]), (3, "auto", old[0]), (4, "auto", old[0]), (5, "auto", None))
    assert chain(old, again) == [old[0]]
    assert chain([*old, stem(4, 150)], again) == [stem(4, 150), old[0]]


def test_an_automatic_start_from_outside_the_last_lineage_goes_by_its_parent() -> None:
    """A record that names a checkpoint which the attempt before it had left: its word is taken."""
    stems = [stem(1, 100), stem(1, 300), stem(2, 50)]
    claimed = attempts(FIRST, (2, "fresh", None), (3, "auto", stem(1, 300)))
    assert chain(stems, claimed) == [stem(1, 300), stem(1, 100)]


def test_an_attempt_without_commits_hands_on_to_its_parent_and_so_down() -> None:
    """Three crashes before the first save in a row still find the last commit."""
    base = stem(1, 100)
    claimed = attempts(FIRST, (2, "auto", base), (3, "auto", base), (4, "explicit", base))
    assert newest([base], claimed) == base


def test_a_rewind_inside_a_rewind_cuts_both() -> None:
    """Each explicit start cuts the attempt that it left."""
    stems = [stem(1, 100), stem(1, 200), stem(2, 150), stem(2, 250), stem(3, 260)]
    claimed = attempts(FIRST, (2, "explicit", stem(1, 100)), (3, "explicit", stem(2, 150)))
    assert chain(stems, claimed) == [stem(3, 260), stem(2, 150), stem(1, 100)]
    assert spans(claimed) == [Span(attempt=3), Span(attempt=2, last=(150, 1)), Span(attempt=1, last=(100, 1))]


def test_an_automatic_resume_after_a_rewind_keeps_the_cut_below() -> None:
    """Attempt 3 goes on from all of 2; 2 still only from 100 of 1."""
    stems = [stem(1, 100), stem(1, 300), stem(2, 150), stem(2, 250)]
    claimed = attempts(FIRST, (2, "explicit", stem(1, 100)), (3, "auto", stem(2, 150)))
    assert chain(stems, claimed) == [stem(2, 250), stem(2, 150), stem(1, 100)]


def test_a_rewind_may_go_back_to_a_lineage_that_was_left() -> None:
    """300 of attempt 1 was abandoned by attempt 2 and is chosen again by attempt 3."""
    stems = [stem(1, 100), stem(1, 300), stem(2, 200)]
    claimed = attempts(FIRST, (2, "explicit", stem(1, 100)), (3, "explicit", stem(1, 300)))
    assert chain(stems, claimed) == [stem(1, 300), stem(1, 100)]


def test_a_fresh_lineage_stands_alone() -> None:
    """What was there before it is not part of it, even while it has nothing."""
    claimed = attempts(FIRST, (2, "fresh", None))
    assert newest([stem(1, 900)], claimed) is None
    assert chain([stem(1, 900), stem(2, 10)], claimed) == [stem(2, 10)]


def test_an_automatic_start_after_an_empty_fresh_one_stays_in_its_lineage() -> None:
    """It found nothing, because the fresh one had nothing yet; it must not fall back across the user's decision."""
    claimed = attempts(FIRST, (2, "fresh", None), (3, "auto", None))
    assert newest([stem(1, 900)], claimed) is None
    assert newest([stem(1, 900), stem(2, 10)], claimed) == stem(2, 10)


def test_an_automatic_start_that_found_nothing_goes_on_from_the_one_before() -> None:
    """The first commit of attempt 1 arrives after attempt 2 has started from scratch."""
    claimed = attempts(FIRST, (2, "auto", None))
    assert newest([stem(1, 100)], claimed) == stem(1, 100)
    assert chain([stem(1, 100), stem(2, 50)], claimed) == [stem(2, 50), stem(1, 100)]


def test_a_gap_in_the_numbers_is_crossed() -> None:
    """A number used up by an unanswered claim has no record."""
    assert newest([stem(1, 100)], attempts(FIRST, (4, "auto", None))) == stem(1, 100)


@pytest.mark.parametrize("claimed", [{}, attempts(FIRST), attempts((2, "auto", None))])
def test_commits_without_a_record_of_their_attempt_count(claimed: dict[int, AttemptRecord]) -> None:
    """A run copied without its claims, or with some of them, is resumed at its newest."""
    assert chain([stem(1, 100), stem(3, 50)], claimed) == [stem(3, 50), stem(1, 100)]


def test_a_parent_without_record_or_commits_leads_on_down() -> None:
    """Attempt 2 was pruned whole and its record lost; attempt 3 has nothing yet: attempt 1 is still there."""
    claimed = attempts(FIRST, (3, "explicit", stem(2, 500)))
    assert newest([stem(1, 100)], claimed) == stem(1, 100)


@pytest.mark.parametrize("parent", [stem(2, 100), stem(5, 100)])
def test_a_parent_that_is_not_below_ends_the_chain(parent: Stem) -> None:
    """A record that names itself or a later attempt is wrong; it must not loop."""
    claimed = attempts(FIRST, (2, "auto", parent))
    assert chain([stem(1, 100), stem(2, 150)], claimed) == [stem(2, 150)]


# --- properties -----------------------------------------------------------------------------------------------------------

stems_of_runs = st.lists(
    st.builds(stem, st.integers(1, 6), st.integers(0, 5), st.integers(1, 3)), max_size=25, unique=True
)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Stem], dict[int, AttemptRecord]]:
    """Commits and claims of any kind: with gaps, without parents, with parents that are wrong."""
    stems = draw(stems_of_runs)
    claimed = {}
    for number in draw(st.sets(st.integers(1, 7), max_size=7)):
        parent = draw(st.none() | st.sampled_from(stems)) if stems else None
        how: How = draw(st.sampled_from(("auto", "explicit", "fresh")))
        claimed[number] = AttemptRecord(number=number, how=how, parent=parent)
    return stems, claimed


@given(run=runs(), seed=st.integers(0, 9))
def test_the_chain_is_in_order_and_does_not_depend_on_listing_order(
    run: tuple[list[Stem], dict[int, AttemptRecord]], seed: int
) -> None:
    """Each attempt is one block, attempts and positions descend, nothing comes twice."""
    stems, claimed = run
    result = chain(stems, claimed)
    assert result == sorted(set(result), key=lambda s: (s.attempt, s.position), reverse=True)
    assert set(result) <= set(stems)
    shuffled = stems[:]
    random.Random(seed).shuffle(shuffled)
    assert chain(shuffled, dict(reversed(claimed.items()))) == result


@given(run=runs())
def test_the_newest_of_the_highest_attempt_is_the_newest(run: tuple[list[Stem], dict[int, AttemptRecord]]) -> None:
    """If the highest attempt has commits, nothing an older one commits changes what is newest."""
    stems, claimed = run
    highest = max([*claimed, *(s.attempt for s in stems)], default=0)
    own = [s for s in stems if s.attempt == highest]
    if own:
        assert newest(stems, claimed) == max(own, key=lambda s: s.position)
        assert newest([*stems, stem(highest, 99), *(stem(n, 10**6) for n in range(1, highest))], claimed) == stem(
            highest, 99
        )


@given(stems=stems_of_runs)
def test_automatic_attempts_lose_nothing(stems: list[Stem]) -> None:
    """Where every start was automatic, every commit is in the chain."""
    claimed = {number: AttemptRecord(number=number, how="auto") for number in range(1, 8)}
    assert set(chain(stems, claimed)) == set(stems)
