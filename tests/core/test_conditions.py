"""What training ran under: written, read, compared."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core.conditions import Conditions, Drift, drift, drift_names, incomparable, matches, refuse
from ckptmgr.core.errors import ConfigError, DriftError

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


def test_names_of_drifts_as_people_write_them() -> None:
    assert drift_names("world_size, versions.torch") == {"world_size", "versions.torch"}
    assert drift_names(["pieces", "git_commit batch_size", ""]) == {"pieces", "git_commit", "batch_size"}


@pytest.mark.parametrize("name", ["worldsize", "torch", "versions.", "world_size.x", ".torch"])
def test_a_name_that_no_drift_has_is_a_mistake(name: str) -> None:
    with pytest.raises(ConfigError, match="is no drift"):
        drift_names([name])


def test_only_what_is_to_be_refused_is_refused() -> None:
    found = drift(SAVED, replace(SAVED, world_size=4, versions={"torch": "2.14.0"}))
    refuse(found, frozenset({"batch_size", "versions.numpy"}), where="step 5")
    with pytest.raises(
        DriftError, match=r"^step 5 .*versions\.torch: 2\.13\.0 in the checkpoint, 2\.14\.0 now -"
    ) as refused:
        refuse(found, frozenset({"versions"}), where="step 5")
    assert refused.value.drift == found[1:]


def test_what_cannot_be_compared_is_known() -> None:
    names = frozenset({"world_size", "versions.torch", "versions.numpy", "pieces"})
    assert incomparable(SAVED, SAVED, names) == ()
    assert incomparable(SAVED, Conditions(world_size=8, versions={"torch": "2"}), names) == ("pieces", "versions.numpy")
