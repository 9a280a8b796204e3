"""The actors of `ckptmgr.testing.explorer`: one save, and everybody who may touch it, as the shipped generators of the protocol.

`SAVE` is the checkpoint at stake: two files, attempt 1, step 200. `OLDER` was committed before it and is never removed; `SHARING` may be.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

from ckptmgr.core.checksums import blake3_hex, digest_bytes
from ckptmgr.core.claims import claim
from ckptmgr.core.errors import ConflictError
from ckptmgr.core.layout import CHECKPOINTS, MANIFESTS, Stem, data_key, manifest_key, parse_stem
from ckptmgr.core.lineage import chain
from ckptmgr.core.manifest import FileEntry, Manifest, encode_manifest
from ckptmgr.core.operations import Fetch, ListKeys, Operation
from ckptmgr.core.protocol import Fetched, collect, fetch, prune, repair, replicate
from ckptmgr.core.records import AttemptRecord
from ckptmgr.testing.explorer import Actor, Process, Scenario, rewritten
from ckptmgr.testing.explorer_checks import Journal, Reading

RUN_UUID = "7f6a1c9e"
_CLOSED_AT = "2026-01-01T00:00:00Z"


def save_of(step: int, *paths: str) -> Manifest:
    """A save of attempt 1 at `step`; each file holds its own name and the step."""
    files = tuple(FileEntry.of(path, digest_bytes(f"{path}@{step}".encode())) for path in paths)
    return Manifest(stem=Stem(1, step, 1, f"{step:08d}"), run_uuid=RUN_UUID, files=files)


OLDER = save_of(100, "a")
SAVE = save_of(200, "a", "b")
# Committed before, with one file that `SAVE` has unchanged; it may be pruned.
SHARING = replace(save_of(150), files=SAVE.files[1:])


def committed(manifest: Manifest) -> dict[str, bytes]:
    """What the store holds once `manifest` is committed."""
    data = {data_key(manifest.stem, entry.path): entry.blake3.encode() for entry in manifest.files}
    return {**data, manifest_key(manifest.stem): encode_manifest(manifest)}


def scenario(name: str, *actors: Actor, **options: Any) -> Scenario:
    """A scenario about `SAVE`; with `OLDER` in the store if somebody reads, so that there is always something to find."""
    if any(actor.name.startswith("reader") for actor in actors):
        options["store"] = {**committed(OLDER), **options.get("store", {})}
    return Scenario(
        name=name,
        actors=actors,
        journal=options.pop("journal", Journal(stem=SAVE.stem)),
        saves=(OLDER, SHARING, SAVE),
        **options,
    )


def claiming(name: str, *actors: Actor, **options: Any) -> Scenario:
    """A scenario in which attempts are claimed; a claimer may give up after its `tries`."""
    return Scenario(name=name, actors=actors, may_fail=(ConflictError,), **options)


def altered(actor: Actor, alter: Callable[[Process], Process]) -> Actor:
    """`actor` with its generator wrapped, for variants that are known to be wrong."""

    def start(journal: Journal | None) -> Process | None:
        process = actor.start(journal)
        return None if process is None else alter(process)

    return replace(actor, start=start)


def writer(name: str = "writer", *, retries: int = 0) -> Actor:
    """Uploads `SAVE` for the first time."""
    return Actor(name=name, retries=retries, start=lambda journal: replicate(SAVE, new_nonce=_nonces(name)))


def copier(name: str = "writer", *, retries: int = 0) -> Actor:
    """A writer that takes the file which `SHARING` has too from there."""
    copies = {entry.path: data_key(SHARING.stem, entry.path) for entry in SHARING.files}
    return Actor(
        name=name,
        retries=retries,
        start=lambda journal: replicate(SAVE, new_nonce=_nonces(name), copies=copies),
    )


def resumer(name: str = "second", *, after: str | None = "writer", retries: int = 0, stale: bool = False) -> Actor:
    """A further incarnation of the uploader, from the journal as it then is.

    Args:
        after: it starts once this one has ended; None: also while that one still runs, a zombie.
        stale: so much later that the name must be given up.
    """

    def start(journal: Journal | None) -> Process | None:
        if journal is None or journal.state != "pending":
            return None
        manifest = SAVE.renamed(journal.stem)
        return replicate(
            manifest,
            new_nonce=_nonces(name),
            confirmed=sorted(journal.confirmed),
            resumed=True,
            stale_at=_CLOSED_AT if stale else None,
        )

    return Actor(name=name, retries=retries, waits=True, after=after, start=start)


def pruner(name: str = "prune", *, stem: Stem | None = SAVE.stem) -> Actor:
    """Prunes `stem`; None: whatever name of `SAVE` it finds listed."""

    def listed() -> Generator[Operation, Any, None]:
        for key in (yield ListKeys(MANIFESTS)):
            found = _listed_stem(key)
            if found is not None and found.position == SAVE.stem.position:
                yield from prune(found, closed_at=_CLOSED_AT)

    return Actor(name=name, start=lambda journal: listed() if stem is None else prune(stem, closed_at=_CLOSED_AT))


def repairer(name: str = "repair") -> Actor:
    """Puts a file of `SAVE`, which is committed, there again: in this world one that is there, for nothing here loses any."""
    return Actor(name=name, start=lambda journal: repair(SAVE, [SAVE.files[0].path]))


def collector(name: str = "gc", *, stem: Stem | None = SAVE.stem) -> Actor:
    """Takes `stem` for abandoned, wrongly; None: whatever data it finds without a manifest."""

    def listed() -> Generator[Operation, Any, None]:
        stems = sorted({key.split("/")[1] for key in (yield ListKeys(CHECKPOINTS))})
        manifests = set((yield ListKeys(MANIFESTS)))
        for text in stems:
            found = Stem.parse(text)
            if manifest_key(found) not in manifests:
                yield from collect(found, closed_at=_CLOSED_AT)

    return Actor(name=name, start=lambda journal: listed() if stem is None else collect(stem, closed_at=_CLOSED_AT))


def reader(name: str = "reader") -> Actor:
    """Resumes: the newest of the lineage, falling back along the chain over those that were removed meanwhile."""
    return Actor(name=name, start=lambda journal: _read_newest())


def claimer(name: str, *, create_only: bool, retries: int = 0, tries: int = 3) -> Actor:
    """A process that starts the run and claims its attempt."""

    def make(number: int, previous: int | None) -> AttemptRecord:
        return AttemptRecord(number=number, how="auto", previous=previous, claim_id=name)

    return Actor(
        name=name,
        retries=retries,
        start=lambda journal: claim(make, create_only=create_only, new_nonce=_nonces(name), tries=tries),
    )


def _read_newest() -> Generator[Operation, Any, Reading]:
    names = yield ListKeys(MANIFESTS)
    for stem in chain((stem for name in names if (stem := _listed_stem(name))), {}):
        files: dict[str, str] = {}

        def noted(operation: Operation, files: dict[str, str] = files) -> Generator[Operation, Any, Any]:
            answer = yield operation
            if isinstance(operation, Fetch) and answer is None:
                files[operation.entry.path] = operation.entry.blake3
            return answer

        outcome = yield from rewritten(fetch(stem, RUN_UUID), noted)
        if isinstance(outcome, Fetched):
            return Reading(stem=stem, files=files)
        if not outcome.removed:
            return Reading(stem=None, files={}, damaged=outcome)
    return Reading(stem=None, files={})


def _listed_stem(key: str) -> Stem | None:
    return parse_stem(key.rsplit("/", 1)[-1].removesuffix(".json"))


def _nonces(name: str) -> Callable[[], str]:
    """Nonces that no other actor draws, the same ones each time the actor is started."""
    count = itertools.count(1)
    return lambda: f"{blake3_hex(name.encode())[:4]}{next(count):04x}"
