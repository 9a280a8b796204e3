"""Whether plain values are what an annotation wants: accepted, refused, converted, and what is said of it."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Optional, Union

import msgspec
import numpy as np
import pytest

from ckptmgr.core.document import UNFIT, Document, parse
from ckptmgr.core.shapes import annotation_of, fit, settled

# As older code writes them.
OPTIONAL, EITHER = Optional[int], Union[int, str]  # noqa: UP007, UP045


class Part(msgspec.Struct, kw_only=True):
    size: int
    mode: Literal["min", "max"] = "min"
    names: list[str] = []


class Color(Enum):
    RED = "red"


def mistakes_of(value: object, kind: object) -> list[str]:
    document = Document()
    fit(value, kind, ("x",), document)
    return [str(each).removeprefix("x") for each in document.mistakes]


FITTING: list[tuple[Any, Any]] = [
    (1, int), (1, float), (0.1, float), (float("nan"), float), (np.float32(1), float), (np.int64(1), int),
    (True, bool), ("a", str), (None, None), (None, OPTIONAL), (None, int | None), (3, EITHER),
    ("a", Literal["a", 1]), (1, Literal["a", 1]), ("a/b", Path), (Path("a"), str | Path | None),
    ([1, 2], list[int]), ((1, 2), tuple[int, ...]), ([0.9, 1], tuple[float, float]), (["a"], Sequence[str]),
    ([1, "a"], list), ({"a": 1}, dict[str, float]), ({"a": 1}, Mapping), ({"a": [1]}, dict[str, list[int]]),
    ("a", str | Sequence[str]), (["a"], str | Sequence[str]), (1, Annotated[int, "n"]), (0, Annotated[int | None, "n"]),
    # What is not looked into.
    ("cuda", Color), (3, Any), ("x", Callable[[], int]), ("x", int | Color), (["x"], list[Color]), (3, object), (3, NoReturn),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind"), FITTING, ids=repr)
def test_what_fits(value: object, kind: object) -> None:
    """It comes back as it was."""
    document = Document()
    made = fit(value, kind, (), document)
    assert document.mistakes == []
    assert type(made) is type(value)
    assert made is value or made == value


REFUSED: list[tuple[Any, Any, list[str]]] = [
    ("0.1", float, [": '0.1' does not fit - write 0.1 without quotes"]),
    ("true", bool, [": 'true' does not fit - write true without quotes"]),
    (1, bool, [": 1 does not fit - give true or false"]),
    (True, int, [": true does not fit - give a whole number"]),
    (True, float, [": true does not fit - give a number"]),
    (1.0, int, [": 1.0 does not fit - give a whole number"]),
    (None, int, [": null does not fit - give a whole number"]),
    ("x", int | None, [": 'x' does not fit - give a whole number or null"]),
    (1.1, str, [': 1.1 does not fit - write it in quotes: "1.1"']),
    (True, str | None, [': true does not fit - write it in quotes: "true"']),
    (datetime.date(2026, 11, 30), str, [': 2026-11-30 does not fit - write it in quotes: "2026-11-30"']),
    (3, Path, [": 3 does not fit - give a path"]),
    ("mim", Literal["min", "max"], [": 'mim' does not fit - did you mean min? (give one of min, max)"]),
    (True, Literal[1], [": true does not fit - give 1"]),
    ("a", list[str], [": 'a' does not fit - write [a]"]),
    ("a", list[int], [": 'a' does not fit - give a list"]),
    ({}, list[int], [": a mapping does not fit - give a list"]),
    ([], dict[str, int], [": a list does not fit - give a mapping"]),
    ([1, "a", 2, None], list[int], ["[1]: 'a' does not fit - give a whole number", "[3]: null does not fit - give a whole number"]),
    ({"a": 1, "b": "c"}, Mapping[str, int], [".b: 'c' does not fit - give a whole number"]),
    ([1, 2, 3], tuple[float, float], [": 3 values do not fit - give 2 of them"]),
    (["warn", "halt"], Literal["warn"] | Sequence[Literal["warn", "stop"]], ["[1]: 'halt' does not fit - give one of warn, stop"]),
    ("y" * 200, int, [": '" + "y" * 75 + " … does not fit - give a whole number"]),
    (3, str | Part, [": 3 does not fit - give text or a mapping with size, mode, names"]),
    ({}, Part, [": size is missing - add `size: …`"]),
    ({"sizze": 1}, Part, [".sizze: this key is not known - did you mean size? (there is mode, names, size)"]),
    ({"size": "1", "mode": "up", "q": 1}, str | Part | None, [
        ".q: this key is not known - there is mode, names, size",
        ".size: '1' does not fit - write 1 without quotes",
        ".mode: 'up' does not fit - give one of min, max",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("value", "kind", "said"), REFUSED, ids=repr)
def test_what_does_not_fit(value: object, kind: object, said: list[str]) -> None:
    """All that is wrong, each with its place and what to write instead."""
    assert mistakes_of(value, kind) == said


def test_what_is_left_when_something_does_not_fit() -> None:
    """The rest can be looked at all the same."""
    document = Document()
    assert fit([{"size": 1, "mode": 3}, {"mode": "max"}, {"size": 2}], list[Part], (), document) == [
        *(Part(size=1), UNFIT, Part(size=2)),
    ]
    assert fit({"a": 1, "b": "c"}, dict[str, int], (), document) == {"a": 1}
    assert fit("x", int, (), document) is UNFIT
    assert fit(UNFIT, int, (), document) is UNFIT
    assert len(document.mistakes) == 4


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (str, "3"),
        (int, 3),
        (float, 3),
        (int | None, 3),
        (str | int, "3"),
        (Literal[3], 3),
        (Literal["3"], "3"),
        (Path, "3"),
    ],
    ids=repr,
)
@pytest.mark.parametrize("quotes", ["", '"'])
def test_a_variable_becomes_what_is_wanted(kind: object, expected: object, quotes: str) -> None:
    """With quotes or without: within braces it cannot do without them."""
    document = parse(f"a: {quotes}${{N}}{quotes}", "f", {"N": "3"})
    made = fit(document.value["a"], kind, (), document)
    assert (made, type(made)) == (expected, type(expected))
    assert document.mistakes == []


def test_a_variable_that_does_not_fit_is_shown_as_it_is_written() -> None:
    """What it stands for may be a secret."""
    document = parse("a: ${TOKEN}", "f", {"TOKEN": "hunter2"})
    assert fit(document.value["a"], int | list[str], ("a",), document) is UNFIT
    assert [str(each) for each in document.mistakes] == [
        "f:1: a: ${TOKEN} does not fit - give a whole number or a list"
    ]


def test_variables_where_anything_fits() -> None:
    """As YAML reads them, and text in quotes."""
    document = parse("{a: ['${N}', {b: '${N}'}], c: 1}\n", "f", {"N": "3"})
    assert settled(fit(document.value, Any, (), document)) == {"a": ["3", {"b": "3"}], "c": 1}
    made = settled(parse("a: ${N}\nb: [x]", "f", {"N": "3"}).value)
    assert made == {"a": 3, "b": ["x"]}
    assert settled(parse("a: [1, '${NONE}']", "f", {}).value) is UNFIT


def test_annotations_as_text() -> None:
    """Those of `from __future__ import annotations`; what only a type checker could evaluate is not looked at."""
    names = {"Literal": Literal, "Part": Part}
    assert annotation_of("int | None", names) == int | None
    assert annotation_of(OPTIONAL, names) == int | None
    assert annotation_of(float, names) is float
    for text in ("torch.Tensor", "Sequence[int]", "1 +", "Literal['a'] | Tensor"):
        assert annotation_of(text, names) is Any
