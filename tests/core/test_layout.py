"""Names of a run directory: what is written is read back, and nothing else is taken for ours."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptmgr.core import layout
from ckptmgr.core.errors import ConfigError, ManifestError
from ckptmgr.core.layout import Stem, attempt_number, check_paths, check_relative_path, parse_stem, tag_key

STEM = Stem(3, 500, 2, "9f8e7d6c")

stems = st.builds(
    Stem,
    st.integers(1, 10**7),
    st.integers(0, 10**13),
    st.integers(1, 10**7),
    st.integers(0, 16**8 - 1).map(lambda n: f"{n:08x}"),
)


def test_every_key_of_a_run() -> None:
    """The layout is a promise: other tools and older releases read it."""
    text = "000003-000000000500-000002-9f8e7d6c"
    assert str(STEM) == text
    assert layout.manifest_key(STEM) == f"manifests/{text}.json"
    assert layout.data_prefix(STEM) == f"checkpoints/{text}"
    assert layout.data_key(STEM, "sub/model.safetensors") == f"checkpoints/{text}/sub/model.safetensors"
    assert layout.upload_key(STEM) == f"uploads/{text}.json"
    assert layout.attempt_key(3) == "attempts/000003.json"
    assert layout.attempt_bid_key(3, "9f8e7d6c") == "attempts/000003-9f8e7d6c.json"
    assert tag_key("best-v1.2_x") == "tags/best-v1.2_x.json"


@given(stem=stems)
def test_a_stem_is_read_back(stem: Stem) -> None:
    """Also one whose numbers outgrow their padding."""
    assert Stem.parse(str(stem)) == parse_stem(str(stem)) == stem


@given(one=stems, other=stems)
def test_stems_order_by_attempt_step_seq(one: Stem, other: Stem) -> None:
    """As numbers; and as names while the numbers fit their padding, so that LIST order is the same."""
    as_numbers = (one.attempt, one.step, one.seq, one.nonce) < (other.attempt, other.step, other.seq, other.nonce)
    assert (one < other) == as_numbers
    if len(str(one)) == len(str(other)) == len(str(STEM)):
        assert (str(one) < str(other)) == as_numbers
    assert (layout.STEM_ORDER(one) < layout.STEM_ORDER(other)) == (one < other)


FOREIGN = [
    "",
    "latest",
    "checkpoint-500",
    "000003-000000000500-000002-9f8e7d6",
    "000003-000000000500-000002-9f8e7d6cc",
    "000003-000000000500-000002-9F8E7D6C",
    "3-500-2-9f8e7d6c",
    "000003-000000000500-000002-9f8e7d6c\n",
    " 000003-000000000500-000002-9f8e7d6c",
    "-00003-000000000500-000002-9f8e7d6c",
    "000000-000000000500-000002-9f8e7d6c",
    "000003-000000000500-000000-9f8e7d6c",
    "0000003-000000000500-000002-9f8e7d6c",
    "٠٠٠٠٠٣-000000000500-000002-9f8e7d6c",
]


@pytest.mark.parametrize("text", FOREIGN)
def test_what_is_not_a_stem_is_foreign(text: str) -> None:
    """None for a listing, an error with a hint for a user; never a stem that is looked for under another key."""
    assert parse_stem(text) is None
    with pytest.raises(ConfigError, match="not a checkpoint id"):
        Stem.parse(text)


@given(text=st.text(max_size=60) | st.from_regex(r"\d{5,8}-\d{11,13}-\d{5,8}-[0-9a-f]{8}", fullmatch=True))
def test_a_name_parses_only_to_the_stem_that_writes_it(text: str) -> None:
    """Anything may lie in a bucket; listing it never fails."""
    found = parse_stem(text)
    assert found is None or str(found) == text


@pytest.mark.parametrize(
    "fields", [(0, 1, 1, "0" * 8), (1, -1, 1, "0" * 8), (1, 1, 0, "0" * 8), (1, 1, 1, "0" * 7), (1, 1, 1, "G" * 8)]
)
def test_a_stem_that_could_not_be_read_back_cannot_be_made(fields: tuple[int, int, int, str]) -> None:
    """A wrong number is found where it is made, not when the checkpoint is needed."""
    with pytest.raises(ConfigError, match="not a stem"):
        Stem(*fields)


def test_a_renamed_stem_is_the_same_save() -> None:
    """Only the nonce differs."""
    renamed = STEM.renamed("00000001")
    assert (renamed.attempt, renamed.position, renamed.nonce) == (STEM.attempt, STEM.position, "00000001")


@pytest.mark.parametrize(
    ("key", "number"),
    [
        ("attempts/000003.json", 3),
        ("attempts/000003-9f8e7d6c.json", 3),
        ("attempts/1000000.json", 1_000_000),
        ("attempts/.probe-9f8e7d6c", None),
        ("attempts/000003.json.claim", None),
        ("attempts/3.json", None),
        ("attempts/000003-.json", None),
        ("attempts/٠٠٠٠٠٣.json", None),
        ("attempts/notes.txt", None),
    ],
)
def test_which_attempt_a_key_claims(key: str, number: int | None) -> None:
    """Claims and bids count; anything else in the folder does not."""
    assert attempt_number(key) == number


@pytest.mark.parametrize("tag", ["", ".hidden", "-x", "a/b", "a b", "ü", "x" * 101, "..", "a\n"])
def test_what_is_not_a_tag(tag: str) -> None:
    """A tag is one plain file name on every file system."""
    with pytest.raises(ConfigError, match="is not a tag"):
        tag_key(tag)


K047 = [
    "../../outside.txt",
    "/abs/outside.txt",
    "a/../../outside.txt",
    "..\\outside.txt",
    "C:\\x",
    "C:x",
    "c:/x",
    "",
    ".",
    "..",
    "a/./b",
    "a//b",
    "a/",
    "nul\0byte",
    "new\nline",
    "del\x7f",
    "tab\t",
]


@pytest.mark.parametrize("path", K047)
def test_an_unsafe_path_is_refused(path: str) -> None:
    """K047: nothing that could lie outside the target, on any platform."""
    with pytest.raises(ManifestError) as caught:
        check_relative_path(path)
    assert caught.value.__dict__["path"] == path


@pytest.mark.parametrize(
    "path", ["a", "a/b", "model-00001-of-00002.safetensors", "a b", "ü/%2e%2e", "..a", "a..", "...", "xy:z"]
)
def test_an_odd_but_safe_path_is_accepted(path: str) -> None:
    """Names that only look unsafe stay usable."""
    assert check_relative_path(path) == path


@given(path=st.text("ab.0_-/:\\ \n\u00e9", max_size=8))
def test_a_path_that_looks_plain_is_safe(path: str) -> None:
    """The quick look at most paths lets nothing through that the thorough one would refuse."""
    if layout._PLAIN_PATH(path):
        assert check_relative_path(path) == path


@pytest.mark.parametrize("paths", [["a", "a"], ["a", "a/b"], ["a/b/c", "a/b"], ["x", "a/b", "a/b/c/d", "y"]])
def test_files_that_cannot_lie_beside_each_other_are_refused(paths: list[str]) -> None:
    """K047: a duplicate, or a file that is also a folder."""
    for order in (paths, paths[::-1]):
        with pytest.raises(ManifestError, match=r"twice|both as a file and as a folder"):
            check_paths(order)


def test_files_that_can_are_accepted() -> None:
    """A common beginning of names is not a common folder."""
    check_paths(["a", "ab", "a-b/c", "b/a", "b/ab"])
