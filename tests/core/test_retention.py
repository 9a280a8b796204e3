"""What is kept, and why (I8): the cases of this field, and properties that hold for any run and any rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.core.lineage import chain
from ckptmgr.core.manifest import FileEntry, Manifest
from ckptmgr.core.records import AttemptRecord
from ckptmgr.core.retention import (
    AnyRule,
    KeepBest,
    KeepEveryNSteps,
    KeepLast,
    KeepWithin,
    KeepWorst,
    Protection,
    RetentionPlan,
    RetentionRule,
    plan,
)

NOW = datetime(2026, 6, 1, tzinfo=timezone.utc)
NOTHING = Protection()


def saved(step: int, *, attempt: int = 1, seq: int = 1, size: int = 10, **fields: Any) -> Manifest:
    files = (FileEntry(path="model", size=size, blake3="0" * 64),)
    return Manifest(stem=Stem(attempt, step, seq, "00000000"), run_uuid="r", files=files, **fields)


def kept(result: RetentionPlan) -> list[int]:
    return [verdict.manifest.step for verdict in result.keep]


def deleted(result: RetentionPlan) -> list[int]:
    return [verdict.manifest.step for verdict in result.delete]


def decide(rule: RetentionRule, newest_last: Sequence[Manifest], **options: Any) -> RetentionPlan:
    options = {"protection": NOTHING, "now": NOW, **options}
    return plan(rule, list(newest_last)[::-1], **options)


def reasons(result: RetentionPlan) -> dict[int, tuple[str, ...]]:
    return {verdict.manifest.step: verdict.reasons for verdict in (*result.keep, *result.delete)}


# --- rules ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [range(12), range(6, 12), [10**11, 10**12, 10**12 + 1], [98, 99, 100, 101]])
def test_k017_the_last_are_the_last_as_numbers(steps: Sequence[int]) -> None:
    """K017: checkpoint 10 is after 8, in whatever style the numbers are written."""
    result = decide(KeepLast(3), [saved(step) for step in steps])
    assert kept(result) == list(steps)[-3:]
    assert deleted(result) == list(steps)[:-3]


def test_k104_the_best_is_not_rotated_away() -> None:
    """K104: mode max, a total of 2 with the best: after each save the newest and the best are there."""
    history: list[Manifest] = []
    after = []
    for step, accuracy in [(100, 0.9), (200, 0.5), (300, 0.6), (400, 0.4)]:
        history.append(saved(step, metrics={"accuracy": accuracy}))
        result = decide(KeepLast(1) | KeepBest("accuracy", mode="max"), history)
        history = [verdict.manifest for verdict in result.keep]
        after.append(kept(result))
    assert after == [[100], [100, 200], [100, 300], [100, 400]]


def test_k104_with_a_limit_of_one_both_stay() -> None:
    """K104: the best alone is asked for; the newest stays too, whatever the rules say."""
    history = [saved(100, metrics={"accuracy": 0.9}), saved(200, metrics={"accuracy": 0.5})]
    result = decide(KeepBest("accuracy", mode="max"), history)
    assert reasons(result) == {100: ("best:accuracy",), 200: ("newest",)}


def test_k061_nan_goes_first_and_among_equals_the_earlier_stays() -> None:
    """K061: mode min, k=2 over 0.3, NaN, 0.2, 0.2, 0.2: the same answer every time, and after a resume at 300."""
    values = [0.3, math.nan, 0.2, 0.2, 0.2]
    history = [saved(100 * place, metrics={"loss": value}) for place, value in enumerate(values, start=1)]
    resumed = [*history[:3], *(saved(m.step, attempt=2, metrics=m.metrics) for m in history[3:])]
    for run in (history, resumed):
        for _ in range(20):
            result = decide(KeepBest("loss", mode="min", k=2), run)
            assert kept(result) == [300, 400, 500]  # 500 is only the newest
            assert reasons(result)[500] == ("newest",)


def test_worst_is_the_other_end_of_the_same_mode() -> None:
    """The mode names the better direction for both; infinities are no measurements."""
    values = [0.1, 0.9, 0.5, math.inf, -math.inf]
    history = [saved(step, metrics={"loss": value}) for step, value in enumerate(values, start=1)]
    rule = KeepBest("loss", mode="min") | KeepWorst("loss", mode="min")
    assert reasons(decide(rule, history)) == {
        1: ("best:loss",),
        2: ("worst:loss",),
        3: ("no rule keeps it",),
        4: ("no rule keeps it",),
        5: ("newest",),
    }


def test_the_mode_is_the_one_that_was_recorded() -> None:
    """A policy wrote down which direction is better; the name is asked only after that."""
    history = [saved(s, metrics={"odd_loss": float(s)}, metric_modes={"odd_loss": "max"}) for s in (1, 2, 3)]
    assert kept(decide(KeepBest("odd_loss"), [*history, saved(4)])) == [3, 4]


def test_an_unknown_direction_stops_the_plan() -> None:
    """Guessing would delete the best half of the time."""
    with pytest.raises(ConfigError, match="accuracy"):
        decide(KeepBest("accuracy"), [saved(1, metrics={"accuracy": 1.0})])


def test_a_metric_that_nobody_has_blocks_nothing() -> None:
    """No checkpoint carries it, so the rule keeps none, and the others go on."""
    assert kept(decide(KeepBest("accuracy") | KeepLast(2), [saved(1), saved(2), saved(3)])) == [2, 3]


def test_every_n_keeps_the_multiples() -> None:
    """Step 0 is one."""
    assert kept(decide(KeepEveryNSteps(200), [saved(step) for step in range(0, 700, 100)])) == [0, 200, 400, 600]


def test_within_goes_by_the_recorded_time_and_keeps_what_has_none() -> None:
    """A time that is missing, unreadable or without zone is no reason to delete."""
    times = [
        "2026-05-24T23:59:59Z",
        "2026-05-25T00:00:00Z",
        "2026-05-31T12:00:00+02:00",
        None,
        "long ago",
        "2020-01-01T00:00:00",
        None,
    ]
    history = [saved(step, created_at=time) for step, time in enumerate(times)]
    assert deleted(decide(KeepWithin(7 * 86400.0), history)) == [0]


def test_rules_combine_to_one_flat_union() -> None:
    """`a | b | c` reads and prints as what it is, and every reason is given."""
    rule = KeepLast(1) | KeepEveryNSteps(100) | (KeepBest("loss") | KeepWithin(60.0))
    assert rule == AnyRule(rules=(KeepLast(1), KeepEveryNSteps(100), KeepBest("loss"), KeepWithin(60.0)))
    found = reasons(
        decide(
            rule,
            [saved(50, metrics={"loss": 2.0}, created_at="2020-01-01T00:00:00Z"), saved(100, metrics={"loss": 1.0})],
        )
    )
    assert found[100] == ("last:1", "every:100", "best:loss", "within:60s", "newest")
    assert found[50] == ("no rule keeps it",)


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        (KeepLast, (0,)),
        (KeepEveryNSteps, (0,)),
        (KeepBest, ("x", "min", 0)),
        (KeepWorst, ("x", "min", -1)),
        (KeepWithin, (0,)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_rule_that_keeps_nothing_is_a_mistake(rule: Any, arguments: tuple[Any, ...]) -> None:
    """Found when it is written, not when everything is gone."""
    with pytest.raises(ConfigError, match="nothing"):
        rule(*arguments)


# --- protection -----------------------------------------------------------------------------------------------------------


def test_what_is_protected_stays_with_its_reason() -> None:
    """I8: resumed from, tagged, in use, newest."""
    history = [saved(step) for step in (1, 2, 3, 4, 5)]
    protection = Protection(
        resumed_from=frozenset({history[0].stem}), tagged={"good": history[1].stem}, in_use=frozenset({history[2].stem})
    )
    assert reasons(decide(KeepLast(1), history, protection=protection)) == {
        1: ("resumed from",),
        2: ("tag:good",),
        3: ("in use by a reader",),
        4: ("no rule keeps it",),
        5: ("last:1", "newest"),
    }


def test_k100_higher_numbers_of_another_lineage_neither_count_nor_go() -> None:
    """K100: 500/600/700 are left over; the new lineage saves 100 with keep-last 3: nothing is deleted."""
    left_over = [saved(step, attempt=1) for step in (500, 600, 700)]
    new = saved(100, attempt=2)
    attempts = {
        1: AttemptRecord(number=1, how="auto"),
        2: AttemptRecord(number=2, how="fresh"),
    }
    assert chain([m.stem for m in (*left_over, new)], attempts) == [new.stem]
    result = decide(KeepLast(3), [new], others=left_over)
    assert deleted(result) == []
    assert reasons(result)[500] == ("another lineage",)


def test_other_lineages_go_only_when_asked_for() -> None:
    """With `all_lineages` they go unless protected, and still do not count for a rule."""
    others = [saved(step, attempt=1) for step in (500, 600)]
    result = decide(
        KeepLast(2),
        [saved(100, attempt=2), saved(110, attempt=2)],
        others=others,
        all_lineages=True,
        protection=Protection(tagged={"keep": others[0].stem}),
    )
    assert (kept(result), deleted(result)) == ([500, 100, 110], [600])
    assert result.freed_bytes == 10


def test_an_empty_run_has_an_empty_plan() -> None:
    """Nothing to keep is not an error."""
    result = decide(KeepLast(3), [])
    assert (result.keep, result.delete, result.freed_bytes) == ((), (), 0)


def test_freed_bytes_is_what_goes() -> None:
    """The number that the user decides by."""
    assert decide(KeepLast(1), [saved(1, size=3), saved(2, size=4), saved(3, size=5)]).freed_bytes == 7


# --- properties -----------------------------------------------------------------------------------------------------------

rules = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 5)),
        st.builds(KeepEveryNSteps, st.integers(1, 7)),
        st.builds(KeepBest, st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 4)),
        st.builds(KeepWorst, st.sampled_from(["loss", "acc"]), st.sampled_from(["min", "max"]), st.integers(1, 4)),
        st.builds(KeepWithin, st.floats(1, 1e6)),
    ),
    min_size=1,
    max_size=4,
).map(lambda parts: parts[0] if len(parts) == 1 else AnyRule(rules=tuple(parts)))


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[Manifest], list[Manifest], Protection]:
    """Chain (newest first), other lineages, and who is protected."""
    values = st.none() | st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.5, 1.0])
    positions = draw(
        st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(1, 3)), max_size=15, unique=True)
    )
    found = []
    for attempt, step, seq in sorted(positions, reverse=True):
        metrics = {name: value for name in ("loss", "acc") if (value := draw(values)) is not None}
        age = timedelta(seconds=draw(st.integers(0, 10**6)))
        created = draw(st.sampled_from([None, (NOW - age).isoformat()]))
        found.append(saved(step, attempt=attempt, seq=seq, metrics=metrics, created_at=created))
    left = draw(st.sampled_from([0, 1, 2]))
    present = [m for m in found if m.stem.attempt != left]
    some = st.sets(st.sampled_from([m.stem for m in found]), max_size=3) if found else st.just(set())
    protection = Protection(
        resumed_from=frozenset(draw(some)),
        tagged={f"t{place}": stem for place, stem in enumerate(sorted(draw(some)))},
        in_use=frozenset(draw(some)),
    )
    return present, [m for m in found if m.stem.attempt == left], protection


@given(run=runs(), rule=rules, all_lineages=st.booleans())
def test_nothing_that_i8_protects_is_ever_given_away(
    run: tuple[list[Manifest], list[Manifest], Protection], rule: RetentionRule, all_lineages: bool
) -> None:
    """The newest, the tagged, the one resumed from, the one in use, other lineages; and each checkpoint is decided once."""
    present, others, protection = run
    result = plan(rule, present, others, protection=protection, now=NOW, all_lineages=all_lineages)
    gone = {verdict.manifest.stem for verdict in result.delete}
    stay = {verdict.manifest.stem for verdict in result.keep}
    assert len(result.keep) + len(result.delete) == len(present) + len(others)
    assert gone | stay == {m.stem for m in (*present, *others)}
    assert not gone & (protection.resumed_from | protection.in_use | set(protection.tagged.values()))
    if present:
        assert present[0].stem not in gone
    if not all_lineages:
        assert not gone & {m.stem for m in others}
    assert all(verdict.reasons for verdict in (*result.keep, *result.delete))
    for verdicts in (result.keep, result.delete):
        stems = [verdict.manifest.stem for verdict in verdicts]
        assert stems == sorted(stems)


@given(run=runs(), rule=rules)
def test_pruning_again_deletes_nothing_more(
    run: tuple[list[Manifest], list[Manifest], Protection], rule: RetentionRule
) -> None:
    """A plan is stable: what it kept, it keeps when asked again."""
    present, others, protection = run
    first = plan(rule, present, others, protection=protection, now=NOW)
    stay = {verdict.manifest.stem for verdict in first.keep}
    again = plan(
        rule,
        [m for m in present if m.stem in stay],
        [m for m in others if m.stem in stay],
        protection=protection,
        now=NOW,
    )
    assert again.delete == ()


@given(run=runs(), rule=rules, more=rules)
def test_a_further_rule_only_keeps_more(
    run: tuple[list[Manifest], list[Manifest], Protection], rule: RetentionRule, more: RetentionRule
) -> None:
    """Rules are reasons to keep."""
    present, others, protection = run
    before = plan(rule, present, others, protection=protection, now=NOW)
    after = plan(rule | more, present, others, protection=protection, now=NOW)
    assert {v.manifest.stem for v in after.delete} <= {v.manifest.stem for v in before.delete}


@given(run=runs(), rule=rules, data=st.data())
def test_what_is_damaged_only_keeps_more(
    run: tuple[list[Manifest], list[Manifest], Protection], rule: RetentionRule, data: st.DataObject
) -> None:
    """A note of damage that is wrong costs room, no checkpoint; what it keeps is what the rule keeps of the whole ones."""
    present, others, protection = run
    damaged = {m.stem for m in present if data.draw(st.booleans())}
    before = plan(rule, present, others, protection=protection, now=NOW)
    after = plan(rule, present, others, protection=protection, now=NOW, damaged=damaged)
    assert {v.manifest.stem for v in after.delete} <= {v.manifest.stem for v in before.delete}
    whole = [m for m in present if m.stem not in damaged]
    assert {stem for stem, _ in rule.select(whole, NOW)} <= {v.manifest.stem for v in after.keep}
