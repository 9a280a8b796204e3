"""Artifacts: named, versioned directories, kept like checkpoints. `artifact_push` makes them; here they are looked at, tagged and fetched."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptmgr.backends.registry import normalize_url
from ckptmgr.core.artifacts import (
    KIND,
    LATEST,
    Source,
    check_name,
    check_tag,
    choose,
    metadata_of,
    no_tag,
    parse_version,
    source_of,
)
from ckptmgr.core.errors import CheckpointNotFoundError, ConfigError
from ckptmgr.core.files import FileEntry
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem, tag_key
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.selectors import Selector
from ckptmgr.run.creation import store_text
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.pull import pull
from ckptmgr.run.resume import Progress

if TYPE_CHECKING:
    from ckptmgr.run.verify import Damage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """One committed version of an artifact.

    Attributes:
        url: of the artifact, without a version.
        manifest: its files, metrics and what else is recorded of this version.
        tags: the tags that pointed to it when it was looked at.
        is_latest: whether it was the highest committed version then.
        existed: of a push: this version holds the same bytes already.
        repaired: of a push of what existed: what was missing or damaged in the store, and was sent again.
    """

    url: str
    manifest: Manifest
    tags: tuple[str, ...] = ()
    is_latest: bool = False
    existed: bool = False
    repaired: tuple[Damage, ...] = ()

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def version(self) -> int:
        return self.manifest.step

    @property
    def reference(self) -> str:
        """What names this version for good: `STORE/NAME@v3`."""
        return f"{self.url}@v{self.version}"

    @property
    def source(self) -> Source | None:
        """The checkpoint that it was made from, if that was said."""
        return source_of(self.manifest)

    @property
    def metadata(self) -> dict[str, Any]:
        return metadata_of(self.manifest)

    @staticmethod
    def of(run: RunDirectory, history: History, manifest: Manifest, *, existed: bool = False) -> Artifact:
        """The version `manifest` of the artifact that `run` is, as `history` has it."""
        return Artifact(
            url=run.url,
            manifest=manifest,
            tags=tuple(sorted(tag for tag, stem in history.tags.items() if stem == manifest.stem)),
            is_latest=history.newest() == manifest.stem,
            existed=existed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PulledArtifact:
    """An artifact, or a part of it, on local disk, every byte checked.

    Attributes:
        path: the directory; an artifact that is one file lies in it under its own name.
        artifact: what it is, all of it.
        files: those of its files that are there.
        fetched_bytes: how much of it came from the store now; the rest was there.
    """

    path: Path
    artifact: Artifact
    files: tuple[FileEntry, ...]
    fetched_bytes: int


# --- naming one -----------------------------------------------------------------------------------------------------------------


def artifact_url(text: str | os.PathLike[str]) -> str:
    """The URL of the artifact that `text` names, `STORE/NAME`, normalised.

    Raises:
        ConfigError: malformed, or no artifact can have that name.
    """
    url = normalize_url(text)
    scheme, _, path = url.partition("://")
    store, slash, name = path.rpartition("/")
    if not slash or not (store or scheme == "file"):
        raise ConfigError(f"{url} is a store and names no artifact in it", hint=f"write {url}/NAME")
    check_name(name)
    return url


def split_reference(text: str | os.PathLike[str]) -> tuple[str, str | None]:
    """`STORE/NAME[@VERSION|@TAG|@latest]` as the URL of the artifact and the word behind the `@`; None without one.

    Raises:
        ConfigError: as `artifact_url`, or what is behind the `@` is nothing that a version can be called.
    """
    words = os.fspath(text).rstrip("/")
    start = words.find("://") + 3 if "://" in words else 0
    if "/" not in words[start:] and start:
        return artifact_url(words), None  # an '@' here belongs to credentials, which are refused without being shown
    store, slash, last = words.rpartition("/")
    name, at, wanted = last.partition("@")
    if at and not wanted:
        raise ConfigError(f"{words!r} has nothing behind the '@'", hint=f"write {name}@v3, {name}@TAG or {name}@latest")
    if at and parse_version(wanted) is None:
        tag_key(wanted)
    return artifact_url(f"{store}{slash}{name}"), wanted or None


def open_artifact(url: str) -> RunDirectory:
    """The artifact at `url`.

    Raises:
        CheckpointNotFoundError: nothing is there, or a run of checkpoints.
        ConfigError, ManifestError, BackendError: as `RunDirectory.open`.
    """
    try:
        run = RunDirectory.open(url)
    except CheckpointNotFoundError as exc:
        place, below = normalize_url(url), getattr(exc, "runs", ())
        raise CheckpointNotFoundError(
            store_text(place, below, "an artifact") if below else f"there is no artifact at {place}",
            hint="see what the store holds with `ckptmgr artifact ls STORE`",
            url=url,
        ) from exc
    if run.record.kind != KIND:
        raise CheckpointNotFoundError(
            f"{run.url} is a run of checkpoints, not an artifact", hint="see `ckptmgr ls`, `ckptmgr resume`", url=url
        )
    return run


# --- looking ----------------------------------------------------------------------------------------------------------------------


def artifacts(url: str | os.PathLike[str]) -> list[Artifact]:
    """Every version of the artifact at `url`, lowest first. One whose manifest cannot be read is left out, and logged.

    Raises:
        CheckpointNotFoundError: there is no such artifact.
        BackendError: the store could not be asked (I7).
    """
    run = open_artifact(artifact_url(url))
    history = run.history()
    for stem, problem in sorted(history.broken.items()):
        logger.warning("version %d of %s is damaged: %s", stem.step, run.url, problem)
    return [Artifact.of(run, history, history.manifests[stem]) for stem in sorted(history.manifests)]


def chosen(run: RunDirectory, history: History, wanted: str | None) -> Artifact:
    """The version that a word means: a version, a tag, or `latest`, which is also what None means.

    Raises:
        CheckpointNotFoundError: no such version or tag.
        ManifestError: its manifest cannot be read.
    """
    stem = choose(wanted or LATEST, history.manifests.values(), history.newest(), history.tags, run.url)
    if stem in history.broken:
        raise history.broken[stem]
    if stem not in history.manifests:
        raise CheckpointNotFoundError(
            f"the tag {wanted!r} of {run.url} points to {stem}, which is no longer there",
            hint="see `ckptmgr artifact ls`",
        )
    return Artifact.of(run, history, history.manifests[stem])


def show_artifact(reference: str | os.PathLike[str]) -> Artifact:
    """The version that `STORE/NAME[@VERSION|@TAG|@latest]` means.

    Raises:
        CheckpointNotFoundError: there is none.
        ManifestError: it is damaged.
        BackendError: the store could not be asked (I7).
    """
    url, wanted = split_reference(reference)
    run = open_artifact(url)
    return chosen(run, run.history(), wanted)


# --- tags -------------------------------------------------------------------------------------------------------------------------


def tag_artifact(reference: str | os.PathLike[str], tag: str) -> Artifact:
    """Point `tag` at the version that `STORE/NAME[@…]` means, wherever it pointed before; returns that version.

    Raises:
        ConfigError: the tag is malformed, or reads as a version.
        CheckpointNotFoundError: there is no such version.
    """
    check_tag(tag)
    url, wanted = split_reference(reference)
    run = open_artifact(url)
    found = chosen(run, run.history(), wanted)
    run.tag(tag, found.manifest.stem)
    return Artifact.of(run, run.history(), found.manifest)


def untag_artifact(url: str | os.PathLike[str], tag: str) -> Stem:
    """Remove `tag`; the version that it pointed to stays, and is returned.

    Raises:
        CheckpointNotFoundError: there is no such tag.
    """
    check_tag(tag)
    run = open_artifact(artifact_url(url))
    tags = run.tags()
    if tag not in tags:
        raise no_tag(tag, tags, run.url)
    run.untag(tag)
    return tags[tag]


# --- fetching ---------------------------------------------------------------------------------------------------------------------


def pull_artifact(
    reference: str | os.PathLike[str],
    to: str | os.PathLike[str] | None = None,
    *,
    only: Sequence[str] = (),
    overwrite: bool = False,
    progress: Progress | None = None,
) -> PulledArtifact:
    """Put a version of an artifact, or some of its files, into a directory, verified.

    Bytes arrive in `<to>.partial`; the name appears only when all are right. A damaged latest version is an error: an older one is never
    given out in its place.

    Args:
        reference: `STORE/NAME[@VERSION|@TAG|@latest]`.
        to: None for `./NAME-v<version>`. Holding exactly these files, it stays as it is.
        only: roles (`weights`, `tokenizer`, …) or patterns of paths; none: everything.
        overwrite: replace whatever else `to` holds.

    Raises:
        CheckpointNotFoundError: there is no such artifact, version or tag, or no file that one of `only` means.
        CheckpointExistsError: `to` holds something else; nothing was changed.
        IntegrityError: what is stored is damaged.
        DiskFullError: no room for it; nothing was fetched.
        BackendError: the store could not be asked.
    """
    url, wanted = split_reference(reference)
    run = open_artifact(url)
    artifact = chosen(run, run.history(), wanted)
    directory = Path(to) if to is not None else Path(f"{artifact.name}-v{artifact.version}")
    which = Selector(kind="id", stem=artifact.manifest.stem)
    done = pull(run, which, directory, only=only, overwrite=overwrite, progress=progress)
    return PulledArtifact(path=done.directory, artifact=artifact, files=done.files, fetched_bytes=done.fetched_bytes)
