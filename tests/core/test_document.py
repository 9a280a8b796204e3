"""Documents: where each value stands, variables of the environment, and all mistakes at once."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from ckptmgr.core.document import UNFIT, Document, FromEnvironment, parse
from ckptmgr.core.errors import ConfigError, ConfigFileError

VARIABLES = {"JOB": "llama-7b", "STEPS": "500", "EMPTY": "", "TOKEN": 'hunter2\'s "key"', "MANY": "a: [1, 2]\nb: 3"}


def lines_of(document: Document) -> list[str]:
    """What is wrong, as a reader gets it."""
    with pytest.raises(ConfigFileError) as caught:
        document.raise_mistakes()
    assert list(caught.value.lines) == [str(each) for each in caught.value.mistakes]
    return list(caught.value.lines)


@pytest.mark.parametrize(
    ("written", "text", "read"),
    [
        ("s3://b/${JOB}", "s3://b/llama-7b", "s3://b/llama-7b"),
        ("${STEPS}", "500", 500),
        ("'${STEPS}'", "500", 500),
        ("${STEPS}.5", "500.5", 500.5),
        ("${NONE:-1e-3}", "1e-3", 0.001),
        ("${EMPTY:-true}", "true", True),
        ("x${NONE:-}", "x", "x"),
        ("${NONE:-s3://b:1/c-d}", "s3://b:1/c-d", "s3://b:1/c-d"),
        ("${JOB}-$${JOB}-$JOB-$$", "llama-7b-${JOB}-$JOB-$$", "llama-7b-${JOB}-$JOB-$$"),
        ("${MANY}", "a: [1, 2]\nb: 3", "a: [1, 2]\nb: 3"),
        ("${NONE:-2026-13-45}", "2026-13-45", "2026-13-45"),
    ],
)
def test_a_variable_is_put_into_a_value(written: str, text: str, read: object) -> None:
    """It brings text, which YAML reads anew; it cannot bring keys or lists."""
    found = parse(f"a: {written}", "f", VARIABLES).value["a"]
    assert isinstance(found, FromEnvironment)
    assert (found, found.read, type(found.read)) == (text, read, type(read))
    assert found.raw == written.strip("'")
    assert found.is_quoted is written.startswith("'")


def test_what_is_no_variable_stays() -> None:
    """A dollar alone, an escaped one, a key, a comment."""
    document = parse("a: $JOB\nb: $${JOB}  # ${NONE}\n${NONE}: 1\nc: '$$'\n", "f", VARIABLES)
    assert document.value == {"a": "$JOB", "b": "${JOB}", "${NONE}": 1, "c": "$$"}
    assert type(document.value["b"]) is str
    document.raise_mistakes()


def test_variables_that_are_not_there() -> None:
    """All of them are named, with their lines."""
    document = parse("a: ${NONE}\nb: [x, '${EMPTY}']\nc: ${1X}\nd: ${JOB\ne: ${A}${B:-${C}}\n", "f", VARIABLES)
    assert document.value == {"a": UNFIT, "b": ["x", UNFIT], "c": UNFIT, "d": UNFIT, "e": UNFIT}
    no_variable = "`${` begins no variable here - write ${NAME} or ${NAME:-default}; for a plain `${`, `$${`"
    assert lines_of(document) == [
        "f:1: a: the variable NONE is not set - set it, or write ${NONE:-default}",
        "f:2: b[1]: the variable EMPTY is empty - set it, or write ${EMPTY:-default}",
        f"f:3: c: {no_variable}",
        f"f:4: d: {no_variable}",
        "f:5: e: the variable A is not set - set it, or write ${A:-default}",
        f"f:5: e: {no_variable}",
        "f:5: e: the variable C is not set - set it, or write ${C:-default}",
    ]


def test_a_variable_within_braces_needs_quotes() -> None:
    """To YAML, its braces are a mapping."""
    with pytest.raises(
        ConfigFileError, match=r"f:2: this is no YAML: .* - within braces and brackets, a variable needs quotes"
    ):
        parse("x: 1\na: {b: ${JOB}}\n", "f", VARIABLES)
    assert parse("a: {b: '${JOB}'}", "f", VARIABLES).value == {"a": {"b": "llama-7b"}}


def test_what_a_variable_stands_for_is_never_said() -> None:
    """Neither by itself, nor as Python writes it, nor in what to do; nor are credentials of a URL."""
    document = parse("url: https://h/${TOKEN}\nn: ${STEPS}", "f", VARIABLES)
    document.mistake(("url",), f"{str(document.value['url'])!r} is no URL", f"not {document.value['url']}, s3://u:p@b")
    with document.at("n"):
        raise ConfigError(f"{VARIABLES['TOKEN']} is {VARIABLES['TOKEN']!r}")
    assert lines_of(document) == [
        "f:1: url: 'https://h/${TOKEN}' is no URL - not https://h/${TOKEN}, s3://…@b",
        "f:2: n: ${TOKEN} is '${TOKEN}'",
    ]


def test_what_is_shown_of_a_variable_is_not_looked_into() -> None:
    """A value may be the name of another variable, or a word of every message."""
    variables = {"A": "https://JOB/x", "B": "JOB/", "C": "true", "D": "abc"}
    document = parse("[ '${A}', '${B}', '${C}', '${D}' ]", "f", variables)
    document.mistake((), "https://JOB/x is not JOB/, it is true or abc")
    assert lines_of(document) == ["f:1: ${A} is not ${B}, it is true or abc"]


def test_all_mistakes_in_the_order_of_lines() -> None:
    """Of one there is one line; of several, the error has a heading, and survives a pipe between processes."""
    document = parse("a: 1\nb: {c: [2, 3]}\n2: x\na: 4\n? [d]\n: 1\n", "f", {})
    document.mistake(("b", "c", 1), "is odd", "try 4")
    document.mistake(("z", "y"), "is nowhere")
    assert document.value == {"a": 4, "b": {"c": [2, 3]}}
    with pytest.raises(ConfigFileError) as caught:
        document.raise_mistakes()
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.lines == caught.value.lines
    assert str(again).splitlines() == [
        "f has 5 mistakes:",
        "f:1: z.y: is nowhere",
        "f:2: b.c[1]: is odd - try 4",
        "f:3: the key 2 is no text - put it in quotes",
        "f:4: a: this key stands here for the second time - keep one",
        "f:5: a key is no text - put it in quotes",
    ]
    alone = Document(value={})
    alone.mistake(("a",), "is wrong", "mend it")
    with pytest.raises(ConfigFileError) as caught:
        alone.raise_mistakes()
    assert (str(caught.value), caught.value.hint) == ("a: is wrong - mend it", "mend it")


def test_merged_keys_give_way_to_own_ones() -> None:
    """As in YAML, also where what is merged in is used twice."""
    text = "x: &x {a: 1, b: 2}\ny: &y {<<: *x, b: 3}\nz: {<<: *y, a: 4}\nw: *y\n"
    document = parse(text, "f", {})
    document.raise_mistakes()
    assert document.value == {
        "x": {"a": 1, "b": 2},
        "y": {"a": 1, "b": 3},
        "z": {"a": 4, "b": 3},
        "w": {"a": 1, "b": 3},
    }


def test_a_date_that_is_none() -> None:
    """YAML's own reader raises for it what says nothing about the place."""
    assert lines_of(parse("a: 1\nb: 2026-13-45\n", "f", {})) == [
        "f:2: b: '2026-13-45' cannot be read: month must be in 1..12 - put it in quotes if it is text"
    ]


def test_what_is_refused_by_name_is_left_out_and_the_next_is_found() -> None:
    """All mistakes of a constructor, not the first."""

    def make(**given: Any) -> list[str]:
        for name in ("a", "b", "c"):
            if given.get(name, 0) < 0:
                raise ConfigError(f"{name} is negative", argument=name)
        if "c" not in given:
            raise ConfigError("c is missing")
        return sorted(given)

    document = Document()
    assert document.make(make, {"a": -1, "b": -1, "c": 1}, lambda name: (name,)) == ["c"]
    assert document.make(make, {"a": -1, "c": -1}, lambda name: ("x", name)) is None
    assert document.make(make, {"c": -1, "b": -1, "a": 1}, lambda name: ("y", name), needed={"b"}) is None
    assert document.make(make, {"a": 1}, lambda name: ("z", name)) is None
    assert lines_of(document) == [
        *("a: a is negative", "b: b is negative", "x.a: a is negative", "x.c: c is negative", "y.b: b is negative"),
        "z.: c is missing",
    ]
