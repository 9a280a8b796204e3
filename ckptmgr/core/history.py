"""One look at a run: everything committed, closed or unreadable, the attempts, and the tags, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ckptmgr.core.errors import CheckpointNotFoundError, ManifestError
from ckptmgr.core.layout import Stem, tag_key
from ckptmgr.core.lineage import chain
from ckptmgr.core.manifest import ClosingRecord, Manifest
from ckptmgr.core.records import AttemptRecord
from ckptmgr.core.selectors import Selector, choose, found_in

_STEPS_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """What a run directory held at one moment.

    Attributes:
        run_uuid: the run.
        where: how the user names the run, for messages.
        manifests: committed checkpoints whose manifest can be read.
        broken: manifests that are there but cannot be read; the checkpoint counts as damaged, and is never deleted or trusted.
        closed: closing records of pruned and aborted ones.
        attempts: every claimed attempt.
        tags: where each tag points.
        unreadable: claims of attempts and tags that are there but cannot be read, by key. Such a claim counts as an automatic continuation; whatever
            deletes must not go by that.
    """

    run_uuid: str
    where: str = "this run"
    manifests: Mapping[Stem, Manifest] = field(default_factory=dict)
    broken: Mapping[Stem, ManifestError] = field(default_factory=dict)
    closed: Mapping[Stem, ClosingRecord] = field(default_factory=dict)
    attempts: Mapping[int, AttemptRecord] = field(default_factory=dict)
    tags: Mapping[str, Stem] = field(default_factory=dict)
    unreadable: Mapping[str, ManifestError] = field(default_factory=dict)
    _chain: list[Stem] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def highest_attempt(self) -> int | None:
        """The highest attempt claimed, or named by a commit; None on a run without either."""
        stems = (stem.attempt for stem in (*self.manifests, *self.broken, *self.closed))
        return max((*self.attempts, *stems), default=None)

    @property
    def has_commits(self) -> bool:
        """Whether anything was ever committed and not pruned, readable or not."""
        return bool(self.manifests or self.broken)

    def chain(self) -> list[Stem]:
        """The present lineage, newest first, unreadable ones included: fall-back must name those."""
        if self._chain is None:
            # Asked for again and again, and the work is in proportion to the run's length. What it is made of never changes.
            object.__setattr__(self, "_chain", chain([*self.manifests, *self.broken], self.attempts))
        return list(self._chain or ())

    def readable_chain(self) -> list[Manifest]:
        """The present lineage, newest first, without unreadable ones."""
        return [self.manifests[stem] for stem in self.chain() if stem in self.manifests]

    def others(self) -> list[Manifest]:
        """Committed checkpoints outside the present lineage, oldest first."""
        present = set(self.chain())
        return [self.manifests[stem] for stem in sorted(self.manifests.keys() - present)]

    def newest(self) -> Stem | None:
        return next(iter(self.chain()), None)

    def choose(self, selector: Selector) -> Manifest:
        """The checkpoint that `selector` means.

        Raises:
            CheckpointNotFoundError: none does.
            ManifestError: the one it means cannot be read, or the tag.
        """
        if selector.kind == "tag" and (spoiled := self.unreadable.get(tag_key(selector.tag))) is not None:
            raise spoiled
        meant = self.meant(selector)
        if meant is not None and meant in self.broken:
            raise self.broken[meant]
        unknown = selector.kind in ("best", "worst") and found_in(self.readable_chain(), selector.metric) is None
        found = None if unknown else choose(selector, self.readable_chain(), self.others(), self.tags)
        if found is None:
            raise CheckpointNotFoundError(
                f"no checkpoint of {self.where} matches {selector}: {self._what_there_is(selector)}",
                hint="see `ckptmgr ls --all`",
            )
        return found

    def _what_there_is(self, selector: Selector) -> str:
        """What the user could have meant, for the message that nothing matches."""
        if selector.kind == "tag":
            return f"its tags are {', '.join(sorted(self.tags))}" if self.tags else "it has no tags"
        chain = self.readable_chain()
        if not chain:
            return "its lineage has no checkpoint"
        if selector.kind in ("best", "worst"):
            metrics = sorted({name for manifest in chain for name in manifest.metrics})
            return f"its metrics are {', '.join(metrics)}" if metrics else "none of its lineage has a metric"
        steps = [str(manifest.step) for manifest in reversed(chain)]
        earlier = "…, " if len(steps) > _STEPS_NAMED else ""
        return f"the steps of its lineage are {earlier}{', '.join(steps[-_STEPS_NAMED:])}"

    def meant(self, selector: Selector) -> Stem | None:
        """The stem that `selector` means as far as names alone tell, whether its manifest can be read or not; None for metrics.

        A stem of `id:` or of a tag may be one that is not there.
        """
        match selector.kind:
            case "latest":
                return self.newest()
            case "step":
                return next((stem for stem in self.chain() if stem.step == selector.step), None)
            case "tag":
                return self.tags.get(selector.tag)
        return selector.stem  # None for metrics
