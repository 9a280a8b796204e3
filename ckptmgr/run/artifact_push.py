"""Push an artifact: claim a version, send what the store does not hold yet, commit, and link it from the checkpoint that it came from.

Each version is an attempt of the artifact's run, with the same number as its step: a version belongs to whoever created the attempt's record, so two pushers
at once get two of them, and nothing is ever overwritten. A push that ended before its commit keeps its claim in this machine's journal, for the repeat.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckptmgr.backends.atomic import digest_file
from ckptmgr.core import claims, layout, protocol
from ckptmgr.core.artifacts import (
    KIND,
    METADATA,
    SOURCE,
    check_metadata,
    check_tag,
    check_version,
    encode_source,
    metadata_of,
    source_of,
)
from ckptmgr.core.errors import AccessDeniedError, ConfigError, ConflictError, ManifestError
from ckptmgr.core.files import FileEntry, content_id
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.protocol import Committed
from ckptmgr.core.records import AttemptRecord
from ckptmgr.run import locks
from ckptmgr.run.artifact_links import Origin, link, origin_of
from ckptmgr.run.artifacts import Artifact, artifact_url
from ckptmgr.run.contents import DIGESTING, describe, refuse_around, refuse_names, storable_files
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.driver import StoreDriver, drive
from ckptmgr.run.identity import host_name, new_nonce, new_uuid, utc_stamp
from ckptmgr.run.journal import Journal, UploadEntry
from ckptmgr.run.push import journal_root
from ckptmgr.run.repair import repair
from ckptmgr.run.replicate import abort_multiparts, replicate
from ckptmgr.run.start import claim_attempt
from ckptmgr.run.verify import Damage

logger = logging.getLogger(__name__)


def push_artifact(
    path: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    version: int | None = None,
    tags: Iterable[str] = (),
    source: str | Origin | None = None,
    metrics: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    follow_links: bool = False,
    described: Callable[[Manifest], None] = lambda manifest: None,
    moved: Callable[[int], None] | None = None,
) -> Artifact:
    """Commit a directory, or a single file, as a version of the artifact at `url`; returns after the commit only.

    The same bytes as the latest version are that version: only what the store has lost of it, or damaged, is sent again. Files that an earlier version holds unchanged are copied within the store.
    An interrupted push is taken up by a repeat, under the version that it had, and sends only what is missing.

    Args:
        path: not to be written to meanwhile.
        url: `STORE/NAME`; created if there is none.
        version: None for the next one.
        tags: also point these at it, once it is committed.
        source: the checkpoint that it was made from, as `RUN[@SELECTOR]` or as a value.
        metrics: of this version, for `prune --keep-best`.
        metadata: anything that JSON can hold, kept in the manifest.
        follow_links: also those that lead out of the folder that `path` lies in, and are no weights.
        described: called with the manifest once the files have been read, before anything is sent.
        moved: called with the number of bytes sent since the last call.

    Raises:
        ConfigError: something is wrong with the arguments; nothing was changed.
        ConflictError: the version is taken, `url` is a run of checkpoints, or another process pushes the same; nothing was changed.
        CheckpointNotFoundError: `source` names nothing.
        SourceChangedError: a file changed meanwhile; no version was committed.
        BackendError: the store failed; what was sent is kept for the repeat.
    """
    where = artifact_url(url)
    pushed = _Pushed.of(Path(path), follow_links=follow_links)
    refuse_around(where, pushed.place)
    names = tuple(dict.fromkeys(check_tag(tag) for tag in tags))
    if version is not None:
        check_version(version)
    extra: dict[str, Any] = {METADATA: check_metadata(metadata)} if metadata else {}
    checked = _check_metrics(metrics or {})
    there = _existing(where)
    origin = origin_of(source) if isinstance(source, str) else source
    if origin is not None:
        extra[SOURCE] = encode_source(origin.seen_from(where))
    pushed.read()
    refuse_names((entry.path for entry in pushed.files), where)
    run = there or RunDirectory.open_or_create(where, kind=KIND)
    journal = Journal(journal_root(run.url), makes_root=True)
    history = run.history()
    draft = Manifest(
        stem=Stem(1, 1, 1, new_nonce()),
        run_uuid=run.uuid,
        kind=KIND,
        files=pushed.files,
        created_at=utc_stamp(),
        reasons=("push",),
        metrics=checked,
        producer={"framework": "artifact push", "host": host_name()},
        extra=extra,
    )
    found = _same(history, pushed.content, version, run)
    repaired: tuple[Damage, ...] = ()
    if found is None:
        committed = _commit(draft, pushed, run, history, journal, version, described, moved)
    else:
        committed = found
        repaired = repair(found, pushed.root, run, described=described, moved=moved)
        _end_interrupted(journal, pushed, run)
        _say_what_stays(run, found, draft)
    if origin is not None:
        link(origin, run, committed)
    for tag in names:
        run.tag(tag, committed.stem)
    now = _as_it_is_now(run, committed, history)
    return replace(now, existed=found is not None, repaired=repaired)


class _Pushed:
    """What is pushed: a directory or one file, and once read, its entries."""

    def __init__(self, place: Path, root: Path, name: str | None, *, follow_links: bool) -> None:
        self.place = place
        self.root = root
        self._name = name
        self._follow_links = follow_links
        self.files: tuple[FileEntry, ...] = ()

    @property
    def content(self) -> str:
        return content_id(self.files)

    @classmethod
    def of(cls, path: Path, *, follow_links: bool) -> _Pushed:
        """`path` to be pushed; not read yet.

        Raises:
            ConfigError: it is not there, is empty, or holds what cannot be stored.
        """
        place = Path(os.path.abspath(path))
        if place.is_dir():
            storable_files(place, follow_links=follow_links)
            return cls(place, place, None, follow_links=follow_links)
        if not place.is_file():
            what = "is neither a file nor a directory" if os.path.lexists(place) else "does not exist"
            raise ConfigError(f"{place} {what}", hint="give the directory, or the file, to keep")
        try:
            layout.check_relative_path(place.name)
        except ManifestError as exc:
            raise ConfigError(f"no store is given a file with the name {place.name!r}", hint="rename it") from exc
        return cls(place, place.parent, place.name, follow_links=follow_links)

    def read(self) -> None:
        """Read every byte.

        Raises:
            SourceChangedError: something was written to meanwhile.
        """
        if self._name is None:
            self.files = describe(self.root, workers=DIGESTING, follow_links=self._follow_links)
        else:
            self.files = (FileEntry.of(self._name, digest_file(self.place)),)


def _check_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    for name, value in metrics.items():
        if not isinstance(name, str) or not name or isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"the metric {name!r} = {value!r} is not a number with a name", hint="give name=number")
    return {name: float(value) for name, value in metrics.items()}


# --- where from, where to ---------------------------------------------------------------------------------------------------------


def _existing(url: str) -> RunDirectory | None:
    """The artifact at `url`; None if nothing is there, and one may be made.

    Raises:
        ConflictError: it is, or lies in, a run of checkpoints.
    """
    run = RunDirectory.find(url)
    if run is not None:
        return RunDirectory.open_or_create(url, kind=KIND, fs=run.fs, root=run.root)
    parent = None
    # What these credentials may not look at is not theirs to spoil.
    with contextlib.suppress(ConfigError, AccessDeniedError):
        parent = RunDirectory.find(url.rpartition("/")[0])
    if parent is not None:
        store = parent.url.rpartition("/")[0]
        raise ConflictError(
            f"{parent.url} is a run, and an artifact does not lie in one",
            hint=f"name it beside the run, {store}/{url.rpartition('/')[2]}, and link it with --from {parent.url}",
        )
    return None


def _say_what_stays(run: RunDirectory, found: Manifest, draft: Manifest) -> None:
    """A version is what it was when it was committed: tell whoever says more, or something else, about the same bytes."""
    said = {"the metrics": draft.metrics, "the metadata": metadata_of(draft), "the source": source_of(draft)}
    kept = {"the metrics": found.metrics, "the metadata": metadata_of(found), "the source": source_of(found)}
    # As text: NaN is not equal to itself.
    lost = [what for what, value in said.items() if value and str(value) != str(kept[what])]
    if lost:
        logger.warning(
            "v%d of %s holds the same bytes already, and what is recorded of it stays: not %s given now",
            found.step,
            run.url,
            ", ".join(lost),
        )


# --- which version --------------------------------------------------------------------------------------------------------------


def _same(history: History, content: str, version: int | None, run: RunDirectory) -> Manifest | None:
    """The version that holds these very bytes: the one asked for, else the latest; None if a new one is to be made.

    Raises:
        ConflictError: the one asked for holds, or held, something else.
    """
    if version is None:
        latest = history.newest()
        found = None if latest is None else history.manifests.get(latest)
        return found if found is not None and found.content_id == content else None
    for stem, manifest in sorted(history.manifests.items()):
        if stem.step == version:
            if manifest.content_id == content:
                return manifest
            raise _taken(run, version, "holds other files")
    for what, stems in (("is damaged", history.broken), ("was pruned", _pruned(history))):
        if any(stem.step == version for stem in stems):
            raise _taken(run, version, what)
    return None


def _pruned(history: History) -> list[Stem]:
    return [stem for stem, record in history.closed.items() if record.closed == "pruned"]


def _taken(run: RunDirectory, version: int, what: str) -> ConflictError:
    return ConflictError(
        f"version {version} of {run.url} {what}",
        hint="a version is never overwritten: push without --version for the next one",
        version=version,
    )


def _claim(run: RunDirectory, history: History, version: int | None) -> int:
    """The number of the version that is ours from now on: the next one, or `version`.

    Raises:
        ConflictError: somebody else has claimed `version`.
    """
    if version is None:
        return claim_attempt(run, how="auto", parent=None).number
    mine = AttemptRecord(number=version, how="auto", claim_id=new_uuid(), host=host_name(), created_at=utc_stamp())
    if not drive(claims.claim_number(mine, create_only=run.record.create_only, new_nonce=new_nonce), StoreDriver(run)):
        by = history.attempts.get(version)
        who = f" by {by.host} at {by.created_at}" if by is not None and by.host else ""
        raise _taken(run, version, f"was claimed{who}, and is not committed")
    return version


# --- commit -----------------------------------------------------------------------------------------------------------------------


def _commit(
    manifest: Manifest,
    pushed: _Pushed,
    run: RunDirectory,
    history: History,
    journal: Journal,
    version: int | None,
    described: Callable[[Manifest], None],
    moved: Callable[[int], None] | None,
) -> Manifest:
    """Commit `manifest` under a version of its own, and return it under the name that it got."""
    entry = next(
        (
            entry
            for entry in _interrupted(journal, pushed, run)
            if entry.content == pushed.content and version in (None, entry.stem.step)
        ),
        None,
    )
    if entry is None:
        old = _taken_back(journal, pushed, run, version)
        if old is not None:
            stem = Stem(old.attempt, old.step, old.seq + 1, new_nonce())
        else:
            number = _claim(run, history, version)
            stem = Stem(number, number, 1, new_nonce())
        entry = UploadEntry(stem=stem, remote=stem, target=run.url, source=str(pushed.place), content=pushed.content)
        journal.write(entry)  # from here on the claim is not lost to a kill
    manifest = manifest.renamed(entry.stem)
    described(manifest)
    with locks.exclusive(run.uuid, entry.stem, "upload") as free:
        if not free:
            raise ConflictError(f"another process is pushing {pushed.place} to {run.url}", hint="wait for it")
        outcome = replicate(manifest, pushed.root, run, journal, entry, earlier=history.readable_chain(), moved=moved)
    journal.forget(entry.stem)
    if not isinstance(outcome, Committed):
        raise ConflictError(f"version {outcome.stem.step} was pruned while it was pushed", hint="push it again")
    # An earlier try may have committed it, with what was said of it then.
    stored = run.manifest(outcome.stem) if entry.tries else None
    return stored if isinstance(stored, Manifest) else manifest.renamed(outcome.stem)


def _interrupted(journal: Journal, pushed: _Pushed, run: RunDirectory) -> Iterator[UploadEntry]:
    """The journal's entries of earlier pushes from the same place that did not end, newest first."""
    for entry in reversed(journal.entries()):
        if entry.is_pending and (entry.source, entry.target) == (str(pushed.place), run.url):
            yield entry


def _end_interrupted(journal: Journal, pushed: _Pushed, run: RunDirectory) -> None:
    """Forget earlier pushes of the same bytes: the commit of one was in time, and only the answer was lost."""
    for entry in _interrupted(journal, pushed, run):
        if entry.content == pushed.content:
            abort_multiparts(entry, run)
            journal.forget(entry.stem)


def _taken_back(journal: Journal, pushed: _Pushed, run: RunDirectory, version: int | None) -> Stem | None:
    """An earlier push from the same place whose files have changed since: what it sent is removed, and its version is still ours.

    Its name is closed first, as gc does, so that a manifest of it which is still on its way cannot commit. A store that does not decide
    create-only writes could let it: there the number is given up.
    """
    latest = max((stem.step for stem in run.stems()), default=0)
    for entry in _interrupted(journal, pushed, run):
        number = entry.stem.step
        if not run.record.create_only or (number != version if version is not None else number < latest):
            continue
        with locks.exclusive(run.uuid, entry.stem, "upload") as free:
            if not free:
                continue
            abort_multiparts(entry, run)
            collected = drive(protocol.collect(entry.remote, closed_at=utc_stamp()), StoreDriver(run))
            run.remove_empty_folders(entry.remote)
            journal.forget(entry.stem)
        if collected:
            return entry.remote
        if version is not None:
            raise _taken(run, number, "holds other files")
    return None


# --- afterwards -------------------------------------------------------------------------------------------------------------------


def _as_it_is_now(run: RunDirectory, committed: Manifest, history: History) -> Artifact:
    """What was pushed, among what others have committed by now."""
    higher = [stem for stem in run.stems() if stem.step > committed.step and stem not in history.closed]
    tags = tuple(sorted(tag for tag, stem in run.tags().items() if stem == committed.stem))
    return Artifact(url=run.url, manifest=committed, tags=tags, is_latest=not higher)
