"""The words of artifacts: names, versions, tags, where one lies as seen from another, and what a manifest says of its source."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckptmgr.core.artifacts import (
    MAX_METADATA_BYTES,
    Link,
    Source,
    check_metadata,
    check_name,
    check_tag,
    choose,
    decode_link,
    encode_link,
    encode_source,
    link_key,
    metadata_of,
    parse_version,
    relative_location,
    resolve_location,
    source_of,
)
from ckptmgr.core.errors import CheckpointNotFoundError, ConfigError, ManifestError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest, decode_manifest, encode_manifest


def version(number: int) -> Manifest:
    return Manifest(stem=Stem(number, number, 1, "0123abcd"), run_uuid="u", files=(), kind="artifact")


VERSIONS = [version(number) for number in (1, 2, 7)]
LATEST = VERSIONS[-1].stem


@pytest.mark.parametrize("name", ["final-model", "a", "Llama-3.1_8B", "0", "x" * 100])
def test_a_name(name: str) -> None:
    """Letters, digits, '.', '_' and '-'."""
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "a\\b", "a b", "a@b", ".hidden", "-x", "a\n", "ü", "x" * 101, "a\0", "C:"]
)
def test_no_name(name: str) -> None:
    """What a file system, a URL or a shell would take for something else (K047)."""
    with pytest.raises(ConfigError, match="not the name of an artifact"):
        check_name(name)


def test_a_version_is_named_behind_an_at_sign() -> None:
    """As in other tools, `name:v3`, is a mistake that is told."""
    with pytest.raises(ConfigError, match="as in model@v3"):
        check_name("model:v3")


@pytest.mark.parametrize(
    ("text", "number"), [("3", 3), ("v3", 3), ("V12", 12), ("007", 7), ("rc", None), ("v3a", None)]
)
def test_a_version_as_written(text: str, number: int | None) -> None:
    """With or without the letter; other words are none."""
    assert parse_version(text) == number


def test_there_is_no_version_zero() -> None:
    """A number that no version has is a mistake, not a tag."""
    with pytest.raises(ConfigError, match="from 1"):
        parse_version("v0")


@pytest.mark.parametrize("tag", ["latest", "3", "v3", "V3", "a/b", "", "a b"])
def test_no_tag(tag: str) -> None:
    """A tag that reads as a version, or as the latest, would mean two things."""
    with pytest.raises(ConfigError):
        check_tag(tag)


@pytest.mark.parametrize(("wanted", "number"), [("latest", 7), ("v2", 2), ("1", 1), ("7", 7), ("prod", 2)])
def test_which_version_is_meant(wanted: str, number: int) -> None:
    """A number, a tag, or the highest."""
    assert choose(wanted, VERSIONS, LATEST, {"prod": VERSIONS[1].stem}, "s3://b/m").step == number


def test_a_damaged_latest_version_is_still_the_latest() -> None:
    """Not the highest that can be read: that would hand out an older one in silence."""
    assert choose("latest", VERSIONS[:2], LATEST, {}, "s3://b/m") == LATEST
    assert choose("7", VERSIONS[:2], LATEST, {}, "s3://b/m") == LATEST


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("9", "has no version 9: there is v1, v2, v7"),
        ("producton", "did you mean production?"),
        ("other", "its tags are production - see"),
    ],
)
def test_nothing_is_meant(wanted: str, says: str) -> None:
    """The message names what there is, and the nearest tag."""
    with pytest.raises(CheckpointNotFoundError, match="m has no") as caught:
        choose(wanted, VERSIONS, LATEST, {"production": VERSIONS[1].stem}, "s3://b/m")
    assert says in str(caught.value)


def test_an_artifact_without_a_version() -> None:
    """Latest of nothing is nothing."""
    with pytest.raises(CheckpointNotFoundError, match="has no version yet"):
        choose("latest", [], None, {}, "s3://b/m")


@pytest.mark.parametrize(
    ("url", "start", "relative"),
    [
        ("s3://b/exp/run", "s3://b/exp/model", "../run"),
        ("s3://b/run", "s3://b/a/b/model", "../../../run"),
        ("s3://other/exp/run", "s3://b/exp/model", None),
        ("oss://b/exp/run", "s3://b/exp/model", None),
        ("file:///data/exp/run", "file:///data/exp/model", "../run"),
        ("file:///home/me/run", "file:///data/exp/model", None),
    ],
)
def test_where_a_run_lies(url: str, start: str, relative: str | None) -> None:
    """Relative within one store, and nothing else: no path of this machine gets into a record."""
    assert relative_location(url, start) == relative
    if relative is not None:
        assert resolve_location(relative, start) == url


SOURCE = Source(run="run", run_uuid="5f0c", stem=Stem(1, 500, 2, "9f8e7d6c"), location="../run")


@pytest.mark.parametrize("source", [SOURCE, replace(SOURCE, location=None)])
def test_the_source_survives_a_round_trip(source: Source) -> None:
    """In the manifest's bytes, beside the user's own words."""
    extra = {"source": encode_source(source), "metadata": {"dataset": "v2", "shots": [0, 5]}}
    again = decode_manifest(encode_manifest(replace(VERSIONS[0], extra=extra)), where="here")
    assert isinstance(again, Manifest)
    assert source_of(again) == source
    assert metadata_of(again) == extra["metadata"]


@pytest.mark.parametrize(
    "found", [None, "text", {}, {"id": "nonsense", "run_uuid": "u"}, {"id": 3, "run_uuid": "u"}, {"id": "x"}]
)
def test_a_source_of_another_shape(found: Any) -> None:
    """Somebody else's field of that name does not keep an artifact from being read."""
    assert source_of(replace(VERSIONS[0], extra={"source": found, "metadata": found})) is None
    assert metadata_of(replace(VERSIONS[0], extra={"metadata": "text"})) == {}


@pytest.mark.parametrize(
    "metadata", [{"x": float("nan")}, {"x": object()}, {1: "x"}, {"": "x"}, {"x": "y" * MAX_METADATA_BYTES}]
)
def test_metadata_that_cannot_be_kept(metadata: Any) -> None:
    """Told before anything is sent."""
    with pytest.raises(ConfigError, match="metadata"):
        check_metadata(metadata)


def test_a_link_survives_a_round_trip() -> None:
    """Under a key that a second push of the same version would use again, and that no name can lead astray."""
    link = Link(name="model", uuid="../../x", stem=LATEST, location="../model", created_at="2026-01-01T00:00:00Z")
    assert decode_link(encode_link(link), where="here") == link
    assert link_key(SOURCE.stem, link) == f"artifacts/{SOURCE.stem}/______x-000007.json"


def test_a_link_that_points_to_no_version() -> None:
    """Damaged, and said so."""
    with pytest.raises(ManifestError, match="not an id"):
        decode_link(encode_link(Link(name="m", uuid="u", stem=LATEST)).replace(str(LATEST).encode(), b"x"), where="k")
