"""Which checkpoint an artifact was made from, and the note of it that lies with the checkpoint."""

from __future__ import annotations

import contextlib
import logging
import re
from dataclasses import dataclass

from ckptmgr.core.artifacts import (
    KIND,
    Link,
    Source,
    decode_link,
    encode_link,
    link_key,
    links_prefix,
    relative_location,
    resolve_location,
    source_of,
)
from ckptmgr.core.errors import CheckpointNotFoundError, CkptmgrError, ConfigError, ManifestError, ObjectExistsError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord, Manifest
from ckptmgr.core.selectors import parse_selector
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import utc_stamp

logger = logging.getLogger(__name__)
# A metric may hold an '@' of its own (`best:hits@10`), so it is the first one with a selector behind it that counts.
_SELECTOR = re.compile(r"@(?=(?:latest|[0-9]+|(?:best|worst|tag|id):.*)\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The checkpoint that an artifact is made from: `stem` of `run`. It need not be in the store yet."""

    run: RunDirectory
    stem: Stem

    def seen_from(self, url: str) -> Source:
        """As the artifact at `url` records it."""
        location = relative_location(self.run.url, url)
        return Source(run=self.run.name, run_uuid=self.run.uuid, stem=self.stem, location=location)


def origin_of(text: str) -> Origin:
    """The committed checkpoint that `RUN[@SELECTOR]` means.

    Raises:
        ConfigError: it is malformed, or names an artifact.
        CheckpointNotFoundError: there is no such run or checkpoint.
        BackendError: the store could not be asked.
    """
    match = _SELECTOR.search(text)
    url, selector = (text, "latest") if match is None else (text[: match.start()], text[match.end() :])
    parsed = parse_selector(selector)
    run = RunDirectory.open(url)
    if run.record.kind == KIND:
        raise ConfigError(
            f"{run.url} is an artifact, and no run that one comes from", hint="give the run of its checkpoint"
        )
    return Origin(run=run, stem=run.history().choose(parsed).stem)


def link(origin: Origin, artifact: RunDirectory, committed: Manifest) -> None:
    """Note with the checkpoint that the version `committed` was made from it, unless that one says otherwise itself.

    The manifest of the artifact is what counts: where the run may not be written to, this is a warning.
    """
    came = source_of(committed)
    if came is None or (came.run_uuid, came.stem) != (origin.run.uuid, origin.stem):
        return  # the same bytes were pushed before, from another checkpoint
    note = Link(
        name=artifact.name,
        uuid=artifact.uuid,
        stem=committed.stem,
        location=relative_location(artifact.url, origin.run.url),
        created_at=utc_stamp(),
    )
    try:
        with contextlib.suppress(ObjectExistsError):
            origin.run.fs.pipe_file(origin.run.path(link_key(origin.stem, note)), encode_link(note), mode="create")
    except CkptmgrError as exc:
        logger.warning("the artifact is committed, but could not be linked from %s: %s", origin.run.url, exc)


def links_of(run: RunDirectory, checkpoint: Stem) -> list[tuple[Link, str | None]]:
    """The artifacts that were made from `checkpoint`, by name and version; each with its URL where that is known. Information only."""
    found = []
    keys = run.keys(links_prefix(checkpoint))
    for key, data in zip(keys, run.map(run.read, keys), strict=True):
        if data is None:
            continue
        try:
            link = decode_link(data, where=f"{run.url}/{key}")
        except ManifestError as exc:
            logger.warning("%s; passed over", exc)
            continue
        found.append((link, None if link.location is None else resolve_location(link.location, run.url)))
    return sorted(found, key=lambda item: (item[0].name, item[0].version, item[0].uuid))


def is_removed(link: Link, url: str | None) -> bool:
    """Whether the store says that the version at `url` is gone; of what could not be looked at, that is not said."""
    if url is None:
        return False
    try:
        return isinstance(RunDirectory.open(url).manifest(link.stem), ClosingRecord)
    except CheckpointNotFoundError:
        return True
    except CkptmgrError as exc:
        logger.info("%s: not known whether v%d is still there: %s", url, link.version, exc)
        return False
