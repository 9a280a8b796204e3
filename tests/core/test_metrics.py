"""One rule of metric names: `acc` is found as `eval_acc` by policies, retention, selectors and callbacks, and the exact name wins."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from ckptmgr.callbacks.readings import metric_of
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.metrics import may_be_same, metric_name
from ckptmgr.core.policies import Best, Evaluated
from ckptmgr.core.retention import KeepBest, KeepLast, Protection, RetentionPlan, plan, unkept_metrics
from ckptmgr.core.selectors import better_direction, choose, parse_selector


def saved(step: int, modes: dict[str, str] | None = None, **metrics: float) -> Manifest:
    stem = Stem(1, step, step, "00000000")
    return Manifest(stem=stem, run_uuid="r", files=(), metrics=metrics, metric_modes=modes or {})


@pytest.mark.parametrize(
    ("asked", "present", "found"),
    [
        ("acc", {"acc", "eval_acc"}, "acc"),
        ("acc", {"eval_acc"}, "eval_acc"),
        ("eval_acc", {"acc"}, None),
        ("acc", {"eval_acc_top5"}, None),
    ],
)
def test_the_exact_name_wins(asked: str, present: set[str], found: str | None) -> None:
    assert metric_name(asked, present) == found
    assert metric_of(dict.fromkeys(present, 1.0), asked) == (None if found is None else 1.0)


def test_a_policy_finds_it_and_records_what_it_was_given() -> None:
    """The reason, the memory and the direction bear the name of the policy: a resumed run goes on with them."""
    policy = Best("acc", mode="max")
    decision = policy.decide(Evaluated(step=1, metrics={"eval_acc": 0.5}), {})
    assert (decision.reasons, decision.notices) == (("best:acc",), ())
    assert policy.modes() == {"acc": "max"}
    better: Any = policy.decide(Evaluated(step=2, metrics={"eval_acc": 0.1, "acc": 0.9}), decision.memory)
    assert better.memory[policy.key]["ranked"] == [[0.9, 2]]


def test_selectors_find_it_and_its_direction() -> None:
    """By either name, whichever of the two the policy was given; all are ranked by one metric."""
    chain = [saved(3, {"acc": "max"}, eval_acc=0.2), saved(2, {"acc": "max"}, eval_acc=0.7), saved(1, eval_acc=0.5)]
    history = History(run_uuid="r", manifests={each.stem: each for each in chain})
    for text in ("best:acc", "best:eval_acc"):
        found = choose(parse_selector(text), chain, (), {})
        assert found is not None
        assert found.step == 2
    assert better_direction("eval_acc", None, [saved(1, {"acc": "max", "eval_acc": "min"})]) == "min"
    mixed = choose(parse_selector("best:acc:max"), [saved(4, acc=0.1), *chain], (), {})
    assert mixed is not None
    assert mixed.step == 4
    assert history.choose(parse_selector("worst:acc:max")).step == 3


def test_retention_keeps_it_and_does_not_call_it_unknown() -> None:
    chain = [saved(3, eval_loss=0.9), saved(2, eval_loss=0.1), saved(1, eval_loss=0.5)]

    def kept(rule: Any) -> RetentionPlan:
        return plan(rule, chain, protection=Protection(), now=datetime.now(timezone.utc))

    found = kept(KeepBest("loss"))
    assert [verdict.manifest.step for verdict in found.keep] == [2, 3]
    assert found.unknown_metrics == ()
    assert kept(KeepBest("other", mode="min") | KeepLast(1)).unknown_metrics == ("other",)


def test_what_is_saved_by_one_name_is_kept_by_the_other() -> None:
    assert unkept_metrics(Best("acc", mode="max"), KeepBest("eval_acc")) == ()
    assert unkept_metrics(Best("acc", mode="max"), KeepBest("eval_loss")) == ("acc",)
    assert not may_be_same("acc", "eval_acc_top5")
