"""Which checkpoint to resume, over the store and the local tier together."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from ckptmgr.core.errors import (
    AccessDeniedError,
    CheckpointNotFoundError,
    ConflictError,
    ManifestError,
    NotCommittedError,
)
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord
from ckptmgr.core.selectors import Selector
from ckptmgr.run.directory import RunDirectory, same_run
from ckptmgr.run.store import holds_anything
from ckptmgr.run.tier import LocalTier

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One place that a checkpoint can be read from."""

    stem: Stem
    run: RunDirectory
    source: Literal["local", "remote"]


def seen(run: RunDirectory, selector: Selector | None = None, *, cached: bool = True) -> History:
    """The run's history; for `id:` with credentials that may not list, of that one checkpoint alone.

    Args:
        cached: as for `RunDirectory.history`.

    Raises:
        CheckpointNotFoundError: it is pruned, or not there.
        BackendError: could not look (I7).
    """
    try:
        return run.history(cached=cached)
    except AccessDeniedError:
        stem = None if selector is None else selector.stem
        if stem is None:
            raise
    logger.info("%s may not be listed with these credentials; going by the manifest of %s alone", run.url, stem)
    try:
        there = run.manifest(stem)
    except ManifestError as error:
        return History(run_uuid=run.uuid, where=run.url, broken={stem: error})
    if isinstance(there, ClosingRecord):
        raise CheckpointNotFoundError(f"checkpoint {stem} of {run.url} was {there.closed}", hint="name another one")
    return History(run_uuid=run.uuid, where=run.url, manifests={stem: there})


def look(run: RunDirectory, tier: LocalTier | None, selector: Selector | None = None) -> tuple[History, History | None]:
    """The histories of the store's run and of the local tier.

    Args:
        selector: as for `seen`.

    Raises:
        ConflictError: the tier is another run's, or one id means different bytes in the two.
    """
    remote = seen(run, selector)
    if tier is None:
        return remote, None
    same_run(tier.run, run)
    local = tier.run.history()
    for stem in local.manifests.keys() & remote.manifests.keys():
        if not local.manifests[stem].same_content(remote.manifests[stem]):
            raise ConflictError(
                f"checkpoint {stem} differs between {tier.root} and {run.url}: one id, two contents",
                hint="decide by hand which one is right and move the other away; nothing was changed",
                local=str(tier.root),
                remote=run.url,
            )
    return remote, local


def merged(remote: History, local: History | None) -> History:
    """Both as one: what either has committed and the store has not closed, with the store's word on attempts and tags."""
    if local is None:
        return remote
    manifests = {stem: manifest for stem, manifest in local.manifests.items() if stem not in remote.closed}
    manifests.update(remote.manifests)
    broken = {stem: error for stem, error in {**local.broken, **remote.broken}.items() if stem not in manifests}
    return History(
        run_uuid=remote.run_uuid,
        where=remote.where,
        manifests=manifests,
        broken=broken,
        closed=remote.closed,
        attempts={**local.attempts, **remote.attempts},
        tags={**local.tags, **remote.tags},
        unreadable=remote.unreadable,
    )


def candidates(
    selector: Selector, run: RunDirectory, tier: LocalTier | None, *, fall_back: bool, durable: bool = False
) -> tuple[list[list[Candidate]], History]:
    """The checkpoints to try, in order; each with the places to read it from, the local tier first.

    Args:
        fall_back: for `latest`, the whole chain; otherwise the one that is meant.
        durable: only what the store has; the local tier is a place to read it from, no more.

    Returns:
        The places per checkpoint, and the history that was chosen from.

    Raises:
        CheckpointNotFoundError: nothing matches.
        NotCommittedError: there is data, but none of it is committed (I1): nothing is resumed, nothing is "empty" either.
        ManifestError: the one that is meant cannot be read.
    """
    remote, local = look(run, tier, selector)
    history = remote if durable else merged(remote, local)
    if not history.has_commits or (selector.kind == "latest" and not history.chain()):
        if tier is not None and durable and (here := merged(remote, local).chain()):
            raise NotCommittedError(
                f"{run.url} does not have checkpoint {here[0]} yet: it is only in {tier.root}",
                hint=f"upload it first: `ckptmgr drain {tier.root}`",
                empty=False,
                only_in=str(tier.root),
            )
        raise nothing_committed(run, history)
    if selector.kind == "latest":
        wanted = history.chain()
        if not fall_back:
            wanted = wanted[:1]
    else:
        wanted = [history.choose(selector).stem]
    result = []
    for stem in wanted:
        places = []
        if tier is not None and local is not None and stem in local.manifests:
            places.append(Candidate(stem=stem, run=tier.run, source="local"))
        if stem in remote.manifests or stem in remote.broken:
            places.append(Candidate(stem=stem, run=run, source="remote"))
        result.append(places or [Candidate(stem=stem, run=tier.run if tier is not None else run, source="local")])
    return result, history


def nothing_committed(run: RunDirectory, history: History) -> CheckpointNotFoundError | NotCommittedError:
    """The error for a run without a checkpoint to resume: "without any data" or not."""
    if history.has_commits:
        return NotCommittedError(
            f"{run.url} has checkpoints, but none in the present lineage",
            hint="see `ckptmgr ls --all` and name one with id:ID",
            empty=False,
        )
    # A kill before the first byte leaves a bare folder on a local disk, which is no data.
    loose = [data for data in run.loose_data([*history.manifests, *history.closed]) if data.state != "bare"]
    pruned = [stem for stem, record in history.closed.items() if record.closed == "pruned"]
    if loose or pruned:
        what = f"{len(loose)} uncommitted or foreign" if loose else f"{len(pruned)} pruned"
        return NotCommittedError(
            f"{run.url} holds data ({what}) but no committed checkpoint",
            hint="with the local tier of the process that was killed (--local-dir) it may be resumed; "
            "to train from scratch use another run name; see `ckptmgr ls --all`",
            empty=False,
        )
    return CheckpointNotFoundError(f"{run.url} has no checkpoint yet", hint="nothing to resume", empty=True)


def open_to_resume(url: str, tier: LocalTier | None) -> RunDirectory:
    """The run at `url`, as `RunDirectory.open`; one that the store does not have (yet) may still be in the local tier.

    Raises:
        CheckpointNotFoundError: neither has it; with `empty` True, for the store has nothing at all there.
        NotCommittedError: the store holds something there, but neither a run nor runs below.
        ConfigError, ManifestError, BackendError: as `RunDirectory.open`.
    """
    try:
        return RunDirectory.open(url)
    except CheckpointNotFoundError as exc:
        if hasattr(exc, "lost") or hasattr(exc, "runs"):
            raise
        if holds_anything(url):
            raise NotCommittedError(
                f"{exc.message}, but there is something else",
                hint="use another run name",
                empty=False,
            ) from exc
        if tier is not None and tier.run.history().has_commits:
            logger.warning("%s; going by the local tier %s alone", exc.message, tier.root)
            return RunDirectory.absent(url, tier.run.record)
        exc.__dict__.update(empty=True)
        raise
