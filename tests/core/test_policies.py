"""When to save: each rule, combinations, and memory that survives a resume."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.policies import (
    AnyOf,
    Best,
    Decision,
    EpochEnded,
    Evaluated,
    EveryMinutes,
    EveryNEpochs,
    EveryNSteps,
    Memory,
    Moment,
    SavePolicy,
    StepEnded,
    Worst,
)

NAN = math.nan


def decide_all(policy: SavePolicy, moments: Sequence[Moment], memory: Memory | None = None) -> list[Decision]:
    """The decisions on `moments` one after the other; each one's memory goes into the next."""
    decisions = []
    for moment in moments:
        decision = policy.decide(moment, memory or {})
        memory = decision.memory
        decisions.append(decision)
    return decisions


def evaluations(*values: Any, metric: str = "eval_loss") -> list[Moment]:
    """One evaluation every 100 steps."""
    return [Evaluated(step=100 * (i + 1), metrics={metric: value}) for i, value in enumerate(values)]


def saved(policy: SavePolicy, moments: Sequence[Moment]) -> list[int]:
    """The steps at which `policy` saves."""
    return [m.step for m, d in zip(moments, decide_all(policy, moments), strict=True) if d.should_save]


def test_every_n_steps_counts_over_epochs() -> None:
    """K038: 110 steps an epoch and every 120 steps saves 120 and 240, although no epoch has 120 steps."""
    moments: list[Moment] = []
    for step in range(1, 331):
        moments.append(StepEnded(step=step, epoch=step / 110))
        if step % 110 == 0:
            moments.append(EpochEnded(step=step, epoch=step // 110))
    assert saved(EveryNSteps(120), moments) == [120, 240]


def test_every_n_epochs_counts_finished_epochs() -> None:
    """Every second epoch, by the number of finished ones; steps do not matter."""
    moments: list[Moment] = [EpochEnded(step=10 * n, epoch=n) for n in range(1, 6)]
    assert saved(EveryNEpochs(2), moments) == [20, 40]
    assert saved(EveryNEpochs(2), [StepEnded(step=2, epoch=2.0)]) == []


def timed(*times: float | None, first: int = 1) -> list[Moment]:
    """Steps that end at these seconds."""
    return [StepEnded(step=first + i, time_s=time_s) for i, time_s in enumerate(times)]


def test_every_minutes_counts_from_its_last_save() -> None:
    """The first step that is late enough saves; what it was too late is not made up for."""
    assert saved(EveryMinutes(1), timed(5, 64.9, 65, 70, 124.9, 131, 190, 191)) == [3, 6, 8]
    assert saved(EveryMinutes(0.5), timed(0, 29, 30, 200, 229, 230)) == [3, 4, 6]
    assert decide_all(EveryMinutes(30), timed(0, 1800))[-1].reasons == ("every_minutes:30",)


def test_every_minutes_is_not_put_off_by_other_reasons() -> None:
    """Only saves of its own start the count anew: two policies with a minute each are as one."""
    policy = EveryNSteps(2) | EveryMinutes(1)
    reasons = [d.reasons for d in decide_all(policy, timed(0, 30, 60, 90, 120))]
    assert reasons == [(), ("every_n_steps:2",), ("every_minutes:1",), ("every_n_steps:2",), ("every_minutes:1",)]


def test_every_minutes_looks_at_steps_only() -> None:
    """Evaluations and ends of epochs bring no time, and change nothing."""
    (first,) = decide_all(EveryMinutes(1), timed(0))
    others: list[Moment] = [Evaluated(step=1, metrics={}), EpochEnded(step=1, epoch=1)]
    assert [d.memory for d in decide_all(EveryMinutes(1), others, first.memory)] == [first.memory] * 2
    assert EveryMinutes(1).decide(timed(60)[0], first.memory).should_save


@pytest.mark.parametrize("restart_s", [0.0, 7.5], ids=["new clock", "clock of a slow start"])
def test_every_minutes_goes_on_after_a_resume(restart_s: float) -> None:
    """The seconds that had been waited count, the time between two processes does not."""
    before = decide_all(EveryMinutes(1), timed(100, 140))[-1]
    memory = json.loads(json.dumps(before.memory))
    after = timed(restart_s, restart_s + 19.9, restart_s + 20.1, first=3)
    assert [d.should_save for d in decide_all(EveryMinutes(1), after, memory)] == [False, False, True]


def test_every_minutes_without_a_time_says_so_once() -> None:
    """A policy that never saves must not be silent about it; times that come later count."""
    decisions = decide_all(EveryMinutes(1), timed(None, None, NAN, 0, None, 60))
    notices = [notice for decision in decisions for notice in decision.notices]
    assert len(notices) == 1
    assert "every_minutes:1 never saves" in notices[0]
    assert [d.should_save for d in decisions] == [False] * 5 + [True]


def test_reasons_are_stable_words() -> None:
    """Manifests keep these strings."""
    policy = EveryNSteps(100) | EveryNEpochs(1) | Best("eval_loss") | Worst("eval_loss")
    moments: list[Moment] = [
        StepEnded(step=100),
        Evaluated(step=100, metrics={"eval_loss": 1.0}),
        EpochEnded(step=100, epoch=1),
    ]
    reasons = [decision.reasons for decision in decide_all(policy, moments)]
    assert reasons == [("every_n_steps:100",), ("best:eval_loss", "worst:eval_loss"), ("every_n_epochs:1",)]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Best("eval_loss"), [100, 200, 500]),
        (Best("eval_loss", mode="max"), [100, 300]),
        (Worst("eval_loss"), [100, 300]),
        (Worst("eval_loss", mode="max"), [100, 200, 500]),
        (Best("eval_loss", k=2), [100, 200, 400, 500]),
        (Worst("eval_loss", k=2), [100, 200, 300]),
    ],
)
def test_best_and_worst_look_at_their_end(policy: SavePolicy, expected: list[int]) -> None:
    """`mode` names the better direction for both."""
    assert saved(policy, evaluations(0.5, 0.4, 0.9, 0.45, 0.1)) == expected


def test_ties_and_nan() -> None:
    """K061: among equals the earlier steps win and stay, and NaN never wins; also when the memory is reloaded at 300."""
    policy = Best("eval_loss", mode="min", k=2)
    moments = evaluations(0.3, NAN, 0.2, 0.2, 0.2)
    decisions = decide_all(policy, moments)
    assert [d.should_save for d in decisions] == [True, False, True, True, False]
    assert decisions[-1].memory["best:eval_loss:min"]["ranked"] == [[0.2, 300], [0.2, 400]]
    reloaded = json.loads(json.dumps(decisions[2].memory))
    assert decide_all(policy, moments[3:], reloaded)[-1].memory == decisions[-1].memory


@pytest.mark.parametrize("value", [NAN, math.inf, -math.inf, "0.1", None])
@pytest.mark.parametrize("policy", [Best("eval_loss"), Worst("eval_loss"), Best("eval_loss", mode="max")])
def test_what_is_no_finite_number_never_wins(policy: SavePolicy, value: Any) -> None:
    """At neither end, and it is said each time."""
    decision = policy.decide(evaluations(value)[0], {})
    assert not decision.should_save
    assert "ranked" not in decision.memory[policy.key]  # type: ignore[attr-defined]
    assert len(decision.notices) == 1


def test_a_missing_metric_is_reported_once_and_blocks_nothing() -> None:
    """K115: the names present are listed, periodic saving goes on, and it works from the evaluation that has the metric."""
    policy = EveryNSteps(100) | Best("val_loss")
    moments: list[Moment] = []
    for step in (100, 200, 300):
        moments.append(StepEnded(step=step))
        metrics = {"eval_a_loss": 1.0, "eval_custom_loss": 2.0} | ({"val_loss": 0.5} if step == 300 else {})
        moments.append(Evaluated(step=step, metrics=metrics))
    decisions = decide_all(policy, moments)
    (notice,) = [notice for decision in decisions for notice in decision.notices]
    assert "'val_loss'" in notice
    assert "eval_a_loss, eval_custom_loss" in notice
    assert [reason for decision in decisions for reason in decision.reasons] == [
        "every_n_steps:100",
        "every_n_steps:100",
        "every_n_steps:100",
        "best:val_loss",
    ]


@pytest.mark.parametrize("first", ["eval_a_loss", "eval_b_loss"])
def test_several_evaluation_sets_are_several_evaluations_of_a_step(first: str) -> None:
    """The metric of one is not missing in the others; what none of a step has is, with the names of all, at the next step or the end."""
    other = {"eval_a_loss": "eval_b_loss", "eval_b_loss": "eval_a_loss"}[first]
    policy = Best("eval_b_loss") | Best("eval_c_loss")
    moments: list[Moment] = []
    for step, value in ((1, 0.5), (2, 0.7), (3, math.nan)):  # step 2 is not the best, and 3 is not ranked
        moments += [
            StepEnded(step=step),
            *(Evaluated(step=step, metrics={name: value}) for name in (first, other)),
        ]
    decisions = decide_all(policy, moments)
    notice, nan = [notice for decision in decisions for notice in decision.notices]
    assert nan == "eval_b_loss is nan at step 3: not ranked"
    assert notice.startswith("best:eval_c_loss has nothing to rank: the evaluation at step 1 ")
    assert "present: eval_a_loss, eval_b_loss. " in notice
    assert notice in decisions[3].notices
    assert policy.unmet(decisions[2].memory) == (notice,)
    assert policy.unmet(decisions[-1].memory) == ()
    assert [reason for decision in decisions for reason in decision.reasons] == ["best:eval_b_loss"]


def test_a_step_evaluated_twice_counts_once() -> None:
    """Two evaluations of one step do not take two of the k places."""
    policy = Best("eval_loss", k=2)
    moments = [
        Evaluated(step=step, metrics={"eval_loss": value}) for step, value in [(1, 0.5), (2, 0.4), (2, 0.3), (2, 0.9)]
    ]
    decisions = decide_all(policy, moments)
    assert decisions[-1].memory["best:eval_loss:min"]["ranked"] == [[0.3, 2], [0.5, 1]]
    assert not decisions[-1].should_save


def test_k_may_change_between_attempts() -> None:
    """A resumed run with a larger k goes on from what is remembered, with a smaller one it forgets the rest."""
    memory = decide_all(Best("eval_loss", k=2), evaluations(0.5, 0.4))[-1].memory
    assert not Best("eval_loss", k=1).decide(Evaluated(step=900, metrics={"eval_loss": 0.45}), memory).should_save
    assert Best("eval_loss", k=3).decide(Evaluated(step=900, metrics={"eval_loss": 0.9}), memory).should_save


def test_policies_are_values() -> None:
    """Equal ones are equal, flat and counted once."""
    a, b, c = EveryNSteps(1), Best("x"), EveryNEpochs(2)
    assert (a | b) | c == a | (b | c) == AnyOf((a, b, c))
    assert a | a == AnyOf((a,))
    assert len({a | b, a | b}) == 1
    assert EveryMinutes(30) | EveryMinutes(30.0) == AnyOf((EveryMinutes(30),))
    assert (Best("x") | Worst("y", mode="max")).modes() == {"x": "min", "y": "max"}


MISTAKES: dict[str, Any] = {
    "no steps": lambda: EveryNSteps(0),
    "a fraction": lambda: EveryNSteps(1.5),  # type: ignore[arg-type]
    "a bool": lambda: EveryNSteps(True),
    "negative epochs": lambda: EveryNEpochs(-1),
    "no minutes": lambda: EveryMinutes(0),
    "minutes without end": lambda: EveryMinutes(math.inf),
    "a bool of minutes": lambda: EveryMinutes(True),
    "minutes in a string": lambda: EveryMinutes("30"),  # type: ignore[arg-type]
    "no metric": lambda: Best(""),
    "unknown mode": lambda: Best("x", mode="lower"),  # type: ignore[arg-type]
    "no places": lambda: Worst("x", k=0),
    "two modes": lambda: Best("x", mode="min") | Worst("x", mode="max"),
    "two k": lambda: Best("x", k=1) | Best("x", k=2),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_refused_when_made(mistake: str) -> None:
    """Not hours later, at the first evaluation."""
    with pytest.raises(ConfigError):
        MISTAKES[mistake]()


POLICY = EveryNSteps(3) | EveryNEpochs(2) | Best("a", k=2) | Worst("a") | Best("b", mode="max", k=3)
METRICS = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.one_of(st.integers(0, 4).map(float), st.just(NAN), st.just(math.inf))
)


@given(st.lists(METRICS, max_size=12), st.data())
def test_decisions_do_not_depend_on_reloading(metrics: list[dict[str, float]], data: st.DataObject) -> None:
    """A run whose memory goes through JSON at any points decides exactly as the one that was never interrupted."""
    moments: list[Moment] = []
    for i, each in enumerate(metrics):
        moments += [
            StepEnded(step=i + 1),
            Evaluated(step=i + 1, metrics=each),
            EpochEnded(step=i + 1, epoch=i + 1),
        ]
    whole = decide_all(POLICY, moments)
    memory: Memory = {}
    for moment, expected in zip(moments, whole, strict=True):
        if data.draw(st.booleans()):
            memory = json.loads(json.dumps(memory, allow_nan=False))
        before = json.dumps(memory)
        decision = POLICY.decide(moment, memory)
        assert json.dumps(memory) == before, "the memory handed in was changed"
        assert decision == expected
        memory = decision.memory


@given(st.lists(st.integers(0, 5), min_size=1, max_size=15), st.integers(1, 4), st.sampled_from(["min", "max"]))
def test_the_ranking_is_the_top_k_of_all_values(values: list[int], k: int, mode: Any) -> None:
    """Against a plain sort: best by value, then by step."""
    moments = evaluations(*values)
    memory = decide_all(Best("eval_loss", mode=mode, k=k), moments)[-1].memory
    sign = 1 if mode == "min" else -1
    expected = sorted(([float(v), 100 * (i + 1)] for i, v in enumerate(values)), key=lambda e: (sign * e[0], e[1]))[:k]
    assert memory[f"best:eval_loss:{mode}"]["ranked"] == expected
