"""What training ran under: written, read, compared."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.conditions import Conditions, Drift, drift, matches

SAVED = Conditions(
    world_size=8,
    batch_size=4,
    accumulation=2,
    dataset_length=1000,
    dataset_fingerprint="a1",
    git_commit="0" * 40,
    versions={"torch": "2.13.0", "numpy": "2.4.6"},
    pieces={"optimizer": "torch.optim.adamw.AdamW"},
)


def test_the_same_conditions_have_no_drift() -> None:
    assert drift(SAVED, SAVED) == ()


def test_each_difference_is_named_with_both_values() -> None:
    now = replace(SAVED, world_size=4, dataset_fingerprint="b2", versions={"torch": "2.14.0", "numpy": "2.4.6"})
    assert drift(SAVED, now) == (
        Drift(what="world_size", saved="8", now="4"),
        Drift(what="dataset_fingerprint", saved="a1", now="b2"),
        Drift(what="versions.torch", saved="2.13.0", now="2.14.0"),
    )


def test_what_one_side_does_not_know_is_not_compared() -> None:
    assert drift(SAVED, Conditions()) == ()
    assert drift(Conditions(), SAVED) == ()
    assert drift(SAVED, replace(SAVED, versions={"transformers": "5.24.0"})) == ()


def test_it_comes_back_from_json_as_it_was() -> None:
    assert Conditions.of_document(json.loads(json.dumps(SAVED.as_document()))) == SAVED
    assert Conditions().as_document() == {}


@given(
    st.dictionaries(
        st.sampled_from([*Conditions.__dataclass_fields__, "new"]),
        st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.dictionaries(st.text(max_size=2), st.none()),
    )
)
def test_a_document_of_any_kind_is_read(document: dict[str, object]) -> None:
    known = Conditions.of_document(document)
    assert known.world_size is None
    assert known.versions == {}


def test_a_table_is_meant_by_its_name_or_by_one_entry() -> None:
    assert matches("versions.torch", frozenset({"versions"}))
    assert matches("versions.torch", frozenset({"versions.torch"}))
    assert not matches("versions.torch", frozenset({"versions.numpy", "world_size"}))
