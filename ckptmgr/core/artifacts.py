"""Artifacts as values: their names and versions, the checkpoint that one came from, and the record that links the two.

An artifact is a run of kind `artifact`. Each version is an attempt of its own, and its step is the same number: the create-only claim of the attempt
decides who gets a version, and the newest of the lineage is the highest committed version, whatever the order in which uploads end.

The manifest of a version carries two fields of its own, which survive a round trip like any that a reader does not know:
    "source"    {"run", "run_uuid", "id", "step", "location"?}    the checkpoint that it was made from
    "metadata"  {…}                                               what the user wanted to be kept with it
"""

from __future__ import annotations

import difflib
import json
import posixpath
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ckptmgr.core.errors import CheckpointNotFoundError, ConfigError, ManifestError
from ckptmgr.core.layout import ARTIFACTS, Stem, parse_stem, tag_key
from ckptmgr.core.manifest import FORMAT, VERSION, Manifest, canonical_json, convert_record, decode_record

KIND = "artifact"
LATEST = "latest"
SOURCE, METADATA = "source", "metadata"
MAX_METADATA_BYTES = 64 << 10
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_VERSION = re.compile(r"[vV]?([0-9]{1,12})")
_VERSIONS_NAMED = 8


# --- words ----------------------------------------------------------------------------------------------------------------


def check_name(name: str) -> str:
    """`name` itself if an artifact may have it.

    Raises:
        ConfigError: it may not.
    """
    if _NAME.fullmatch(name):
        return name
    if re.fullmatch(r"[^:]+:(v?[0-9]+|latest)", name):
        hint = f"a version is named with '@', as in {name.replace(':', '@')}"
    else:
        hint = "use letters, digits, '.', '_' and '-', at most 100, beginning with a letter or digit: STORE/NAME"
    raise ConfigError(f"{name!r} is not the name of an artifact", hint=hint)


def check_version(version: int) -> int:
    """`version` itself if one can have that number.

    Raises:
        ConfigError: none can.
    """
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version < 10**12:
        raise ConfigError(f"{version!r} is not a version", hint="versions are whole numbers from 1")
    return version


def parse_version(text: str) -> int | None:
    """The version written as `text` (`3` or `v3`); None if it is some other word, such as a tag.

    Raises:
        ConfigError: it is a number that no version has.
    """
    match = _VERSION.fullmatch(text)
    return None if match is None else check_version(int(match.group(1)))


def check_tag(tag: str) -> str:
    """`tag` itself if it can point to a version: as the tags of a run, but nothing that reads as a version.

    Raises:
        ConfigError: it cannot.
    """
    tag_key(tag)
    if tag == LATEST or _VERSION.fullmatch(tag):
        what = "always the highest version" if tag == LATEST else "a version"
        raise ConfigError(f"{tag!r} is {what}, and cannot be a tag", hint="use another word, such as 'production'")
    return tag


def check_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """`metadata` as it will be kept.

    Raises:
        ConfigError: JSON cannot hold it, or it is too large for what every listing reads.
    """
    try:
        text = json.dumps(dict(metadata), allow_nan=False)
        kept = json.loads(text)
    except (TypeError, ValueError, RecursionError) as exc:
        raise ConfigError(
            f"the metadata cannot be written as JSON: {exc}", hint="use words, numbers and lists"
        ) from exc
    if len(text) > MAX_METADATA_BYTES:
        raise ConfigError(
            f"the metadata is {len(text)} bytes long, and every listing reads it",
            hint=f"put what is longer than {MAX_METADATA_BYTES} bytes into a file of the artifact",
        )
    if kept.keys() != set(metadata) or "" in kept:
        raise ConfigError("the names in the metadata must be words", hint="use non-empty strings")
    return dict(kept)


def choose(
    wanted: str, versions: Iterable[Manifest], latest: Stem | None, tags: Mapping[str, Stem], where: str
) -> Stem:
    """The save that a version, a tag or `latest` means.

    Args:
        versions: committed versions that can be read.
        latest: the newest of the lineage, readable or not.
        where: how the user names the artifact, for messages.

    Raises:
        CheckpointNotFoundError: there is no such version or tag; the message names the nearest.
        ConfigError: `wanted` is neither.
    """
    known = {manifest.step: manifest.stem for manifest in sorted(versions, key=lambda manifest: manifest.stem)}
    if wanted == LATEST:
        if latest is None:
            raise CheckpointNotFoundError(f"{where} has no version yet", hint="see `ckptmgr artifact ls`")
        return latest
    version = parse_version(wanted)
    if version is None:
        tag_key(wanted)
        if wanted not in tags:
            raise no_tag(wanted, tags, where)
        return tags[wanted]
    if latest is not None and version == latest.step:
        return latest
    if version not in known:
        raise CheckpointNotFoundError(
            f"{where} has no version {version}: {_there_is(known)}", hint="see `ckptmgr artifact ls`"
        )
    return known[version]


def no_tag(tag: str, tags: Iterable[str], where: str) -> CheckpointNotFoundError:
    """The error for a tag that is not there, naming the nearest."""
    there = sorted(tags)
    close = difflib.get_close_matches(tag, there, n=1)
    known = f"its tags are {', '.join(there[:_VERSIONS_NAMED])}" if there else "it has no tags"
    return CheckpointNotFoundError(
        f"{where} has no tag {tag!r}: {known}{', …' if len(there) > _VERSIONS_NAMED else ''}",
        hint=f"did you mean {close[0]}?" if close else "see `ckptmgr artifact ls`",
    )


def _there_is(known: Iterable[int]) -> str:
    numbers = [f"v{number}" for number in sorted(known)]
    if not numbers:
        return "it has none that can be read"
    return f"there is {'…, ' if len(numbers) > _VERSIONS_NAMED else ''}{', '.join(numbers[-_VERSIONS_NAMED:])}"


# --- where it came from -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The checkpoint that an artifact was made from.

    Attributes:
        run: the name of its run.
        run_uuid: the identity of that run, wherever it lies by now.
        stem: the checkpoint.
        location: the run as seen from the artifact (`../run`), when both lie in one store; else None.
    """

    run: str
    run_uuid: str
    stem: Stem
    location: str | None = None


class _SourceDoc(msgspec.Struct, kw_only=True):
    id: str
    run_uuid: str
    run: str = ""
    location: str | None = None


def encode_source(source: Source) -> dict[str, Any]:
    """`source` as the manifest of the artifact carries it."""
    document = {"run": source.run, "run_uuid": source.run_uuid, "id": str(source.stem), "step": source.stem.step}
    return document if source.location is None else {**document, "location": source.location}


def source_of(manifest: Manifest) -> Source | None:
    """The checkpoint that a manifest says its artifact was made from; None if it says none, or in a way that this version cannot read."""
    try:
        doc = msgspec.convert(manifest.extra.get(SOURCE), _SourceDoc)
    except msgspec.ValidationError:
        return None
    stem = parse_stem(doc.id)
    if stem is None:
        return None
    return Source(run=doc.run, run_uuid=doc.run_uuid, stem=stem, location=doc.location)


def metadata_of(manifest: Manifest) -> dict[str, Any]:
    """What the user wanted to be kept with an artifact."""
    found = manifest.extra.get(METADATA)
    return dict(found) if isinstance(found, Mapping) else {}


def relative_location(url: str, start: str) -> str | None:
    """`url` as seen from `start`, both normalised, when they lie in one store (bucket, or folder of a disk); else None.

    What a record carries must hold wherever the store is reached from, and never be an absolute path of a machine.
    """
    (scheme, path), (its_scheme, its_path) = (_apart(text) for text in (url, start))
    if scheme != its_scheme or path.split("/")[0] != its_path.split("/")[0]:
        return None
    relative = posixpath.relpath(path, its_path)
    # On a disk, climbing further than out of the two's common folder says more about the machine than about the artifact.
    climbs = len(re.findall(r"(?:^|/)\.\.(?=/|$)", relative))
    return None if scheme == "file" and climbs >= its_path.count("/") else relative


def resolve_location(location: str, start: str) -> str:
    """The inverse of `relative_location`."""
    scheme, path = _apart(start)
    return f"{scheme}://{posixpath.normpath(posixpath.join(path, location))}"


def _apart(url: str) -> tuple[str, str]:
    scheme, _, path = url.partition("://")
    return scheme, path


# --- the link, in the run of the checkpoint -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """`artifacts/<stem>/<uuid>-<version>.json` of a run: this artifact was made from that checkpoint.

    Information: the manifest of the artifact is what counts. Neither keeps the other from being removed.

    Attributes:
        name: of the artifact.
        uuid: of the artifact.
        stem: the version.
        location: the artifact as seen from the run, when both lie in one store; else None.
    """

    name: str
    uuid: str
    stem: Stem
    location: str | None = None
    created_at: str | None = None

    @property
    def version(self) -> int:
        return self.stem.step


class _LinkDoc(msgspec.Struct, kw_only=True):
    artifact: str
    uuid: str
    id: str
    location: str | None = None
    created_at: str | None = None


def links_prefix(checkpoint: Stem) -> str:
    return f"{ARTIFACTS}/{checkpoint}"


def link_key(checkpoint: Stem, link: Link) -> str:
    """Where `link` is kept: one key for one version of one artifact, so that a repeat makes no second one."""
    uuid = re.sub(r"[^A-Za-z0-9-]", "_", link.uuid)[:64]
    return f"{links_prefix(checkpoint)}/{uuid}-{link.version:06d}.json"


def encode_link(link: Link) -> bytes:
    return canonical_json(
        {
            "format": FORMAT,
            "version": VERSION,
            "artifact": link.name,
            "uuid": link.uuid,
            "id": str(link.stem),
            "location": link.location,
            "created_at": link.created_at,
        }
    )


def decode_link(data: bytes, *, where: str) -> Link:
    """Raises ManifestError when `data` is not a link."""
    doc = convert_record(decode_record(data, where=where), _LinkDoc, where)
    stem = parse_stem(doc.id)
    if stem is None:
        raise ManifestError(f"{where} names the version {doc.id!r}, which is not an id", key=where)
    return Link(name=doc.artifact, uuid=doc.uuid, stem=stem, location=doc.location, created_at=doc.created_at)
