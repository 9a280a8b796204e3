"""Push: commit a directory that somebody else wrote, synchronously."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ckptmgr.backends.registry import normalize_url
from ckptmgr.core.errors import ConfigError, ConflictError
from ckptmgr.core.layout import Stem, tag_key
from ckptmgr.core.manifest import Manifest, content_id
from ckptmgr.core.protocol import Committed
from ckptmgr.run import locks
from ckptmgr.run.contents import DIGESTING, describe, refuse_around, refuse_names, storable_files
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.identity import host_name, new_nonce, state_dir, utc_stamp
from ckptmgr.run.journal import Journal, UploadEntry
from ckptmgr.run.repair import repair
from ckptmgr.run.replicate import abort_multiparts, replicate
from ckptmgr.run.start import joined_attempt
from ckptmgr.run.tier import LocalTier, next_seq
from ckptmgr.run.verify import Damage

# In how many of the newest checkpoints a file is looked for that need not be sent again.
_LOOKED_AT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    """What a push did: `stem` in the store, whether it was there before, and what the store had lost or damaged of it and was sent again."""

    stem: Stem
    manifest: Manifest
    existed: bool
    repaired: tuple[Damage, ...] = ()


def journal_root(run_url: str) -> Path:
    """Where pushes to a run keep their journal when no local tier is given: the user's state directory."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", run_url.rsplit("/", 1)[-1])[:40]
    return state_dir() / "push" / f"{name}-{sha256(run_url.encode('utf-8', 'surrogateescape')).hexdigest()[:16]}"


def step_of(directory: Path, given: int | None) -> int:
    """The step of a trainer's directory: as given, else the trailing number of its name, else trainer_state.json.

    Raises:
        ConfigError: none of them says.
    """
    if given is not None:
        if given < 0:
            raise ConfigError(f"the step {given} is negative", hint="give --step N with N >= 0")
        return given
    match = re.search(r"(\d+)$", directory.name)
    if match:
        return int(match.group(1))
    try:
        step = json.loads((directory / "trainer_state.json").read_bytes())["global_step"]
    except (OSError, ValueError, KeyError, TypeError):
        step = None
    if isinstance(step, int) and not isinstance(step, bool) and step >= 0:
        return step
    raise ConfigError(
        f"cannot tell the step of {directory} from its name or a trainer_state.json", hint="give --step N"
    )


def check_pushable(directory: Path, *, step: int | None, tag: str | None, follow_links: bool = False, url: str) -> int:
    """Refuse what can be refused before a store is opened or a byte is read; returns the step.

    Raises:
        ConfigError: `directory` is none, is empty, holds what cannot be stored at `url`, its step is unknown, or the tag is malformed;
            or the run lies in it, or is a local tier.
    """
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise ConfigError(f"{directory} {what}", hint="give the directory of a checkpoint")
    if tag is not None:
        tag_key(tag)
    url = normalize_url(url)
    refuse_around(url, directory)
    scheme, _, place = url.partition("://")
    if scheme == "file" and LocalTier.is_at(place):
        raise ConfigError(
            f"{place} is a local tier, the queue of a training's own uploads, and nothing is pushed into it",
            hint="give the run in the store",
        )
    refuse_names(storable_files(directory, follow_links=follow_links), url)
    return step_of(Path(os.path.abspath(directory)), step)


def push(
    directory: Path,
    run: RunDirectory,
    *,
    step: int | None = None,
    metrics: Mapping[str, float] | None = None,
    tag: str | None = None,
    new_attempt: bool = False,
    follow_links: bool = False,
    journal: Journal | None = None,
    described: Callable[[Manifest], None] = lambda manifest: None,
    moved: Callable[[int], None] | None = None,
) -> Pushed:
    """Commit the files of `directory` as a checkpoint of `run`; returns after the commit only.

    The same step with the same bytes is the existing checkpoint, of which only what the store has lost or damaged is sent again (`repair`); the same
    step with other bytes is a further save. An interrupted push leaves
    its journal behind; repeating it sends only what is missing.

    Args:
        follow_links: also those that lead out of the folder that `directory` lies in.
        described: called with the manifest once the directory has been read, before anything is sent.

    Raises:
        ConfigError: the directory cannot be pushed; nothing was sent.
        SourceChangedError: a file changed or vanished meanwhile; no manifest was written, what was sent is kept for the repeat.
        BackendError: the store failed; the journal's entry stays pending.
    """
    at = check_pushable(directory, step=step, tag=tag, follow_links=follow_links, url=run.url)
    directory = Path(os.path.abspath(directory))
    journal = journal or Journal(journal_root(run.url), makes_root=True)
    files = describe(directory, workers=DIGESTING, follow_links=follow_links)
    history = run.history()
    content = content_id(files)
    # In the whole lineage, not in the highest attempt alone: saved again there, an old step would be the newest of the run.
    same = (m for m in history.readable_chain() if m.step == at and m.content_id == content)
    existing = None if new_attempt else next(same, None)
    attempt = existing.stem.attempt if existing is not None else joined_attempt(run, history, new=new_attempt)
    earlier = _interrupted(journal, directory, run.url, content, attempt, at)
    if existing is not None:
        if earlier is not None:
            abort_multiparts(earlier, run)
            journal.forget(earlier.stem)  # its commit was in time, only the answer was lost
        repaired = repair(existing, directory, run, described=described, moved=moved)
        if tag is not None:
            run.tag(tag, existing.stem)
        return Pushed(stem=existing.stem, manifest=existing, existed=True, repaired=repaired)
    stem = Stem(attempt, at, next_seq([*history.manifests, *history.broken, *history.closed], attempt), new_nonce())
    entry = earlier or UploadEntry(stem=stem, remote=stem, target=run.url, source=str(directory), content=content)
    manifest = Manifest(
        stem=entry.stem,
        run_uuid=run.uuid,
        files=files,
        created_at=utc_stamp(),
        reasons=("push",),
        metrics=metrics or {},
        producer={"framework": "push", "host": host_name()},
    )
    described(manifest)
    with locks.exclusive(run.uuid, entry.stem, "upload") as free:
        if not free:
            raise ConflictError(f"another process is pushing {directory} to {run.url}", hint="wait for it")
        outcome = replicate(
            manifest, directory, run, journal, entry, earlier=history.readable_chain()[:_LOOKED_AT], moved=moved
        )
    journal.forget(entry.stem)
    if not isinstance(outcome, Committed):
        raise ConflictError(f"{outcome.stem} was pruned while it was pushed", hint="push it again")
    if tag is not None:
        run.tag(tag, outcome.stem)
    return Pushed(stem=outcome.stem, manifest=manifest.renamed(outcome.stem), existed=False)


def _interrupted(
    journal: Journal, directory: Path, target: str, content: str, attempt: int, step: int
) -> UploadEntry | None:
    """The journal's entry of an earlier push of the same bytes from the same directory that did not end."""
    for entry in reversed(journal.entries()):
        same = (entry.source, entry.target, entry.content) == (str(directory), target, content)
        if same and entry.is_pending and (entry.stem.attempt, entry.stem.step) == (attempt, step):
            return entry
    return None
