"""Reading a run: what its listings name, out of the cache where nothing has changed, and the rest from the store, several at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptmgr.core import layout
from ckptmgr.core.errors import BackendError, ManifestError, ManifestVersionError
from ckptmgr.core.history import History
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import ClosingRecord, Manifest, decode_manifest
from ckptmgr.core.records import AttemptRecord, decode_attempt, decode_tag
from ckptmgr.run.loose import names_below

if TYPE_CHECKING:
    from ckptmgr.run.cache import RunCache
    from ckptmgr.run.directory import RunDirectory

logger = logging.getLogger(__name__)

# What stands in the place of a manifest: None if it is gone by now.
Outcome = Manifest | ClosingRecord | ManifestError | None


def read_history(run: RunDirectory, *, cached: bool) -> History:
    """As `RunDirectory.history`."""
    # The commits first: an attempt is claimed before its first commit, so that whatever this listing has is claimed in the next one, and no commit is
    # taken for the continuation of a lineage that its attempt turned away from.
    looks: list[Callable[[], Any]] = [partial(run.records, layout.MANIFESTS)]
    if cached and run.fs.capabilities.etags:
        looks.append(partial(_open_cache, run))  # read while the store makes its listing
    commits, *caches = run.map(lambda look: look(), looks)
    claims, pointers = run.map(run.records, [layout.ATTEMPTS, layout.TAGS])
    if not commits and not claims:
        _refuse_blind_listing(run)
    stems = stems_in(commits)
    attempts = [key for key in claims if layout.attempt_number(key) is not None]
    tags = [key for key in pointers if key.endswith(".json")]
    cache = _compared(caches[0], {**commits, **claims, **pointers}) if caches else None
    try:
        outcomes = _outcomes(run, stems, cache)
        data = _data(run, [*attempts, *tags], cache)
    finally:
        if cache is not None:
            cache.save()  # what was read before a failure, or before somebody lost patience, too
    unreadable: dict[str, ManifestError] = {}
    return History(
        run_uuid=run.uuid,
        where=run.url,
        manifests={stem: found for stem, found in outcomes.items() if isinstance(found, Manifest)},
        broken={stem: found for stem, found in outcomes.items() if isinstance(found, ManifestError)},
        closed={stem: found for stem, found in outcomes.items() if isinstance(found, ClosingRecord)},
        attempts=attempts_of(run, {key: data[key] for key in attempts}, unreadable),
        tags=tags_of(run, {key: data[key] for key in tags}, unreadable),
        unreadable=unreadable,
    )


def _refuse_blind_listing(run: RunDirectory) -> None:
    """Raise BackendError if the store lists nothing of a run whose run.json it has: what it lists says nothing of checkpoints then (I7)."""
    if run.fs.capabilities.is_local or run.is_made_here:
        return
    if layout.RUN_FILE not in names_below(run, "") and run.read(layout.RUN_FILE) is not None:
        raise BackendError(
            f"the store lists nothing below {run.url}, not even the {layout.RUN_FILE} that it has there: its listing is behind, or wrong",
            hint="repeat it once the store lists what it has; nothing was changed",
            url=run.url,
        )


def _open_cache(run: RunDirectory) -> RunCache:
    from ckptmgr.run.cache import RunCache  # nothing for a local run to load

    return RunCache(run.url, run.uuid)


def _compared(cache: RunCache, listed: Mapping[str, Mapping[str, Any]]) -> RunCache:
    from ckptmgr.run.cache import Seen

    cache.compare({key: Seen.of(record) for key, record in listed.items()})
    return cache


def _outcomes(run: RunDirectory, stems: Mapping[Stem, str], cache: RunCache | None) -> dict[Stem, Outcome]:
    outcomes: dict[Stem, Outcome] = {
        stem: None if cache is None else cache.record_of(stem, key) for stem, key in stems.items()
    }
    missing = [stem for stem, outcome in outcomes.items() if outcome is None]

    def read(stem: Stem) -> Outcome:
        key = stems[stem]
        data = run.read(key)
        outcome = None if data is None else judged(run, stem, data)
        if cache is not None and data is not None and isinstance(outcome, Manifest | ClosingRecord):
            cache.keep(key, data, outcome)
        return outcome

    outcomes.update(zip(missing, run.map(read, missing), strict=True))
    return outcomes


def _data(run: RunDirectory, keys: Sequence[str], cache: RunCache | None) -> dict[str, bytes | None]:
    known = {key: None if cache is None else cache.data_of(key) for key in keys}
    missing = [key for key, data in known.items() if data is None]

    def read(key: str) -> bytes | None:
        data = run.read(key)
        if cache is not None and data is not None:
            cache.keep_data(key, data)
        return data

    known.update(zip(missing, run.map(read, missing), strict=True))
    return known


def stems_in(keys: Mapping[str, Any]) -> dict[Stem, str]:
    """The keys of what stands in a manifest's place, by stem, in (attempt, step, seq) order."""
    found = {}
    for key in keys:
        stem = layout.parse_stem(key[len(layout.MANIFESTS) + 1 : -len(".json")]) if key.endswith(".json") else None
        if stem is not None:
            found[stem] = key
    return {stem: found[stem] for stem in sorted(found, key=layout.STEM_ORDER)}


def judged(run: RunDirectory, stem: Stem, data: bytes) -> Manifest | ClosingRecord | ManifestError:
    """What `data`, read from the manifest's place of `stem`, amounts to."""
    key = layout.manifest_key(stem)
    where = f"{run.url}/{key}"
    try:
        record = decode_manifest(data, where=where)
    except ManifestError as exc:
        return exc
    if record.stem != stem or (isinstance(record, Manifest) and run.uuid and record.run_uuid != run.uuid):
        return ManifestError(
            f"{where} belongs to another checkpoint or run ({record.stem})",
            hint="it was copied here by hand; `ckptmgr push` brings it in properly",
            key=key,
        )
    return record


def attempts_of(
    run: RunDirectory, data: Mapping[str, bytes | None], unreadable: dict[str, ManifestError] | None = None
) -> dict[int, AttemptRecord]:
    """As `RunDirectory.attempts`, out of what lies at their keys.

    Args:
        unreadable: is given what cannot be read.
    """
    found: dict[int, AttemptRecord] = {}
    for key, text in data.items():
        number = layout.attempt_number(key)
        if text is None or number is None or number in found:
            continue
        try:
            record = decode_attempt(text, where=f"{run.url}/{key}")
            if record.number != number:
                raise ManifestError(f"{run.url}/{key} is the claim of attempt {record.number}", key=key)
        except ManifestVersionError:
            raise
        except ManifestError as exc:
            logger.warning("%s; taken as an automatic continuation", exc)
            record = AttemptRecord(number=number, how="auto")
            if unreadable is not None:
                unreadable[key] = exc
        found[number] = record
    return found


def tags_of(
    run: RunDirectory, data: Mapping[str, bytes | None], unreadable: dict[str, ManifestError] | None = None
) -> dict[str, Stem]:
    """As `RunDirectory.tags`, out of what lies at their keys.

    Args:
        unreadable: is given what cannot be read; without it that is an error.
    """
    found: dict[str, Stem] = {}
    for key, text in data.items():
        if text is None:
            continue
        try:
            record = decode_tag(text, where=f"{run.url}/{key}")
            if layout.TAGS + f"/{record.tag}.json" != key:
                raise ManifestError(f"{run.url}/{key} is the tag {record.tag!r}", key=key)
        except ManifestVersionError:
            raise
        except ManifestError as exc:
            if unreadable is None:
                raise
            logger.warning("%s; the tag is passed over", exc)
            unreadable[key] = exc
        else:
            found[record.tag] = record.stem
    return found
