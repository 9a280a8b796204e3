"""Which checkpoint a selector means, and what is no selector."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.errors import CheckpointNotFoundError, ConfigError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.selectors import Selector, better_direction, choose, parse_selector, rank_by_metric, split_metric

ID = "000001-000000000500-000002-9f8e7d6c"


def saved(step: int, *, attempt: int = 1, seq: int = 1, **fields: Any) -> Manifest:
    return Manifest(stem=Stem(attempt, step, seq, "00000000"), run_uuid="r", files=(), **fields)


@pytest.mark.parametrize(
    ("text", "selector"),
    [
        ("latest", Selector(kind="latest")),
        ("500", Selector(kind="step", step=500)),
        ("0", Selector(kind="step", step=0)),
        ("best:eval_loss", Selector(kind="best", metric="eval_loss")),
        ("best:eval_loss:min", Selector(kind="best", metric="eval_loss", mode="min")),
        ("worst:eval/acc@1:max", Selector(kind="worst", metric="eval/acc@1", mode="max")),
        ("best:a:b", Selector(kind="best", metric="a:b")),
        ("best:min", Selector(kind="best", metric="min")),
        ("tag:good-one", Selector(kind="tag", tag="good-one")),
        (f"id:{ID}", Selector(kind="id", stem=Stem(1, 500, 2, "9f8e7d6c"))),
    ],
)
def test_a_selector_is_read_and_written_back(text: str, selector: Selector) -> None:
    """`str` gives what the user wrote, so that messages can be copied."""
    assert parse_selector(text) == selector
    assert str(selector) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "newest",
        "-1",
        "5.0",
        " 500",
        "\u0665",
        "best",
        "best:",
        "tag:",
        "id:",
        "id:500",
        "tag:a/b",
        "step:5",
        "Latest",
    ],
)
def test_what_is_not_a_selector_is_a_mistake_of_usage(text: str) -> None:
    """Exit 2, before any store is asked."""
    with pytest.raises(ConfigError) as caught:
        parse_selector(text)
    assert caught.value.exit_code == 2
    assert caught.value.hint


@given(text=st.text(max_size=20) | st.from_regex(r"(best|worst|tag|id):\w*(:\w*)?", fullmatch=True))
def test_any_text_is_a_selector_or_a_config_error(text: str) -> None:
    """And what is one says the same again when it is written out."""
    try:
        selector = parse_selector(text)
    except ConfigError:
        return
    assert parse_selector(str(selector)) == selector


def test_only_latest_is_automatic() -> None:
    """Everything else is the user's decision and begins a lineage of its own (I4)."""
    assert not parse_selector("latest").is_explicit
    assert all(parse_selector(text).is_explicit for text in ("5", "best:x", "worst:x", "tag:x", f"id:{ID}"))


@pytest.mark.parametrize(
    ("text", "parts"),
    [("loss", ("loss", None)), ("loss:max", ("loss", "max")), ("a:b:min", ("a:b", "min")), (":min", (":min", None))],
)
def test_a_metric_and_its_mode(text: str, parts: tuple[str, str | None]) -> None:
    """Only a last part that is a mode is taken off."""
    assert split_metric(text) == parts


def test_the_better_direction_as_given_recorded_or_named() -> None:
    """In that order; and never guessed."""
    recorded = [saved(1, metric_modes={"eval_loss": "max"}), saved(2)]
    assert better_direction("eval_loss", "min", recorded) == "min"
    assert better_direction("eval_loss", None, recorded) == "max"
    assert better_direction("eval_loss", None, []) == "min"
    assert better_direction("valid/perplexity", None, []) == "min"
    for metric in ("accuracy", "loss_scale", ""):
        with pytest.raises(ConfigError, match="less or more"):
            better_direction(metric, None, recorded)


def test_records_that_contradict_each_other_decide_nothing() -> None:
    """The name does, or nobody."""
    recorded = [
        saved(1, metric_modes={"acc": "max", "loss": "max"}),
        saved(2, metric_modes={"acc": "min", "loss": "min"}),
    ]
    assert better_direction("loss", None, recorded) == "min"
    with pytest.raises(ConfigError, match="acc:min or acc:max"):
        better_direction("acc", None, recorded)


finite = st.sampled_from([0.0, -0.0, 1.0, 1.5, -3.0, 1e300])
anything = finite | st.sampled_from([math.nan, math.inf, -math.inf])


@given(
    values=st.lists(anything, max_size=8),
    mode=st.sampled_from(["min", "max"]),
    worst=st.booleans(),
    turned=st.booleans(),
)
def test_ranking_is_total_and_stable(values: list[float], mode: Any, worst: bool, turned: bool) -> None:
    """Non-finite values are out; among equals the earlier step comes first, whatever order they are given in (K061)."""
    manifests = [saved(step, metrics={"m": value}) for step, value in enumerate(values)]
    ranked = rank_by_metric([*reversed(manifests)] if turned else manifests, "m", mode, worst=worst)
    assert [m.step for m in ranked] == [
        step
        for _, step in sorted(
            (value if (mode == "min") != worst else -value, step)
            for step, value in enumerate(values)
            if math.isfinite(value)
        )
    ]


CHAIN = [
    saved(300, attempt=2, metrics={"loss": 0.3}),
    saved(200, attempt=2, seq=2, metrics={"loss": math.nan}),
    saved(200, attempt=2, seq=1, metrics={"loss": 0.1}),
    saved(200, attempt=1, metrics={"loss": 0.1}),
    saved(100, attempt=1),
]
OTHERS = [saved(900, attempt=1, metrics={"loss": 0.0})]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("latest", CHAIN[0]),
        ("200", CHAIN[1]),
        ("100", CHAIN[4]),
        ("900", None),
        ("150", None),
        ("best:loss", CHAIN[3]),
        ("best:loss:max", CHAIN[0]),
        ("worst:loss", CHAIN[0]),
        ("worst:loss:max", CHAIN[3]),
        ("best:reward:max", None),
        ("tag:left", OTHERS[0]),
        ("tag:gone", None),
        ("tag:unset", None),
        (f"id:{OTHERS[0].id}", OTHERS[0]),
        (f"id:{CHAIN[2].id}", CHAIN[2]),
        (f"id:{ID}", None),
    ],
)
def test_what_a_selector_means(text: str, meant: Manifest | None) -> None:
    """Steps and metrics within the lineage, tags and ids anywhere in the run."""
    tags = {"left": OTHERS[0].stem, "gone": Stem(1, 1, 1, "00000000")}
    assert choose(parse_selector(text), CHAIN, OTHERS, tags) is meant


def test_an_empty_run_has_nothing_to_choose() -> None:
    """None, for the caller knows whether that is an error."""
    assert choose(parse_selector("latest"), [], [], {}) is None
    assert choose(parse_selector("best:loss"), [], [], {}) is None


def test_best_of_an_unknown_direction_is_a_mistake_of_usage() -> None:
    """Exit 2: write the mode."""
    with pytest.raises(ConfigError, match="reward:min or reward:max"):
        choose(parse_selector("best:reward"), CHAIN, OTHERS, {})


def test_what_there_is_instead_is_named() -> None:
    """The newest steps, or the metrics, so that the next try can be right."""
    many = {
        stem: Manifest(stem=stem, run_uuid="u", files=()) for stem in (Stem(1, n, n, "00000000") for n in range(1, 12))
    }
    history = History(run_uuid="u", where="RUN", manifests=many)
    with pytest.raises(CheckpointNotFoundError, match="of its lineage are …, 4, 5, 6, 7, 8, 9, 10, 11 - "):
        history.choose(parse_selector("500"))
    measured = {stem: replace(manifest, metrics={"acc": 1.0, "eval_loss": 2.0}) for stem, manifest in many.items()}
    with pytest.raises(CheckpointNotFoundError, match="its metrics are acc, eval_loss - "):
        History(run_uuid="u", where="RUN", manifests=measured).choose(parse_selector("best:f1"))
    with pytest.raises(
        CheckpointNotFoundError, match="its metrics are acc, eval_loss - "
    ):  # its direction does not matter
        History(run_uuid="u", where="RUN", manifests=measured).choose(parse_selector("best:nope"))
    tagged = History(run_uuid="u", where="RUN", manifests=many, tags=dict.fromkeys(["good", "best"], next(iter(many))))
    with pytest.raises(CheckpointNotFoundError, match="its tags are best, good - "):
        tagged.choose(parse_selector("tag:x"))
