"""What to keep, and why. Retention *selects*; `ckptmgr.run.prune` deletes.

Rules are small values that combine with `|`; a checkpoint is kept if any rule keeps it. The plan never gives away what invariant I8
protects, whatever the rules say, and every decision carries its reasons.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.metrics import may_be_same
from ckptmgr.core.policies import SavePolicy
from ckptmgr.core.selectors import Mode, better_direction, found_in, rank_by_metric


class RetentionRule(ABC):
    """One reason to keep checkpoints. Rules combine: `KeepLast(3) | KeepBest("eval_loss", k=2)`."""

    @abstractmethod
    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        """The checkpoints of `chain` (newest first) that this rule keeps, each with the reason."""

    @property
    def metric_names(self) -> tuple[str, ...]:
        """The metrics that it ranks by."""
        return ()

    def __or__(self, other: RetentionRule) -> RetentionRule:
        return AnyRule(rules=(*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True)
class KeepLast(RetentionRule):
    """The newest `n` of the lineage."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("KeepLast", self.n)

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        return [(manifest.stem, f"last:{self.n}") for manifest in chain[: self.n]]


@dataclass(frozen=True, slots=True)
class KeepEveryNSteps(RetentionRule):
    """Those whose step is a multiple of `n`."""

    n: int

    def __post_init__(self) -> None:
        _at_least_one("KeepEveryNSteps", self.n)

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        return [(manifest.stem, f"every:{self.n}") for manifest in chain if manifest.step % self.n == 0]


@dataclass(frozen=True, slots=True)
class KeepBest(RetentionRule):
    """The `k` with the best `metric`; `mode` says which direction is better (None: as recorded, else by name)."""

    metric: str
    mode: Mode | None = None
    k: int = 1

    def __post_init__(self) -> None:
        _at_least_one("KeepBest", self.k)

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        return _ranked(self.metric, self.mode, self.k, chain, worst=False)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (self.metric,)


@dataclass(frozen=True, slots=True)
class KeepWorst(RetentionRule):
    """The `k` with the worst `metric`; `mode` still names the better direction."""

    metric: str
    mode: Mode | None = None
    k: int = 1

    def __post_init__(self) -> None:
        _at_least_one("KeepWorst", self.k)

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        return _ranked(self.metric, self.mode, self.k, chain, worst=True)

    @property
    def metric_names(self) -> tuple[str, ...]:
        return (self.metric,)


@dataclass(frozen=True, slots=True)
class KeepWithin(RetentionRule):
    """Those created less than `seconds` ago by their own record; one without a creation time is kept."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"KeepWithin({self.seconds}) keeps nothing", hint="give a positive time")

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        edge = now - timedelta(seconds=self.seconds)
        return [
            (m.stem, f"within:{self.seconds:g}s") for m in chain if (created := _created(m)) is None or created >= edge
        ]


@dataclass(frozen=True, slots=True)
class AnyRule(RetentionRule):
    """The union of `rules`."""

    rules: tuple[RetentionRule, ...]

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        return [kept for rule in self.rules for kept in rule.select(chain, now)]

    @property
    def metric_names(self) -> tuple[str, ...]:
        return tuple(name for rule in self.rules for name in rule.metric_names)


def unkept_metrics(save: SavePolicy | None, keep: RetentionRule | None) -> tuple[str, ...]:
    """The metrics by which `save` chooses what to save, and `keep` keeps nothing."""
    if save is None or keep is None:
        return ()
    return tuple(metric for metric in save.modes() if not any(may_be_same(metric, name) for name in keep.metric_names))


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """What is never removed (I8), beyond the newest of the lineage.

    Attributes:
        resumed_from: parents of attempts: the checkpoint the highest attempt began from.
        tagged: tag -> checkpoint.
        in_use: checkpoints that a reader of this machine holds.
    """

    resumed_from: frozenset[Stem] = frozenset()
    tagged: Mapping[str, Stem] = field(default_factory=dict)
    in_use: frozenset[Stem] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One checkpoint and why it stays or goes."""

    manifest: Manifest
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPlan:
    """What stays and what goes, both oldest first.

    Attributes:
        unknown_metrics: those that a rule ranks by and no checkpoint of the lineage has: misspelled, or not evaluated yet.
        keeps_by_rule: whether any rule keeps anything; if not, what stays is only what is protected anyway.
    """

    keep: tuple[Verdict, ...]
    delete: tuple[Verdict, ...]
    unknown_metrics: tuple[str, ...] = ()
    keeps_by_rule: bool = True

    @property
    def freed_bytes(self) -> int:
        return sum(verdict.manifest.size_bytes for verdict in self.delete)


def plan(
    rule: RetentionRule,
    chain: Sequence[Manifest],
    others: Sequence[Manifest] = (),
    *,
    protection: Protection,
    now: datetime,
    all_lineages: bool = False,
    damaged: Collection[Stem] = (),
) -> RetentionPlan:
    """Decide for every committed checkpoint of a run.

    Args:
        chain: the present lineage, newest first.
        others: committed checkpoints of other lineages; they stay, unless `all_lineages`, and never count for a rule.
        now: for `KeepWithin`.
        all_lineages: also give away `others` that nothing protects.
        damaged: those of `chain` that stand for nothing: a rule that keeps one keeps the next whole one as well.

    Raises:
        ConfigError: a metric rule whose better direction is unknown.
    """
    reasons: dict[Stem, list[str]] = {}
    selected = rule.select(chain, now)
    for stem, reason in selected:
        reasons.setdefault(stem, []).append(reason)
        if stem in damaged:
            reasons[stem].append("damaged: not counted")
    if damaged:
        for stem, reason in rule.select([manifest for manifest in chain if manifest.stem not in damaged], now):
            reasons.setdefault(stem, []).append(reason)
    for stem, reason in _protected(chain, protection):
        reasons.setdefault(stem, []).append(reason)
    if not all_lineages:
        for manifest in others:
            reasons.setdefault(manifest.stem, []).append("another lineage")
    keep: list[Verdict] = []
    delete: list[Verdict] = []
    for manifest in sorted([*chain, *others], key=lambda m: m.stem):
        why = tuple(dict.fromkeys(reasons.get(manifest.stem, ())))
        (keep if why else delete).append(Verdict(manifest=manifest, reasons=why or ("no rule keeps it",)))
    return RetentionPlan(
        keep=tuple(keep),
        delete=tuple(delete),
        unknown_metrics=tuple(name for name in dict.fromkeys(rule.metric_names) if found_in(chain, name) is None),
        keeps_by_rule=bool(selected),
    )


def ranked(rule: RetentionRule, chain: Sequence[Manifest], now: datetime) -> list[Stem]:
    """Those of `chain` (newest first) that `rule` keeps for their metrics; each stands for all that it lets go."""
    return [stem for part in _parts(rule) if part.metric_names for stem, _ in part.select(chain, now)]


def is_by_age(rule: RetentionRule) -> bool:
    """Whether what `rule` keeps depends on the time."""
    return any(isinstance(part, KeepWithin) for part in _parts(rule))


def _protected(chain: Sequence[Manifest], protection: Protection) -> Iterable[tuple[Stem, str]]:
    if chain:
        yield chain[0].stem, "newest"
    for stem in protection.resumed_from:
        yield stem, "resumed from"
    for tag, stem in protection.tagged.items():
        yield stem, f"tag:{tag}"
    for stem in protection.in_use:
        yield stem, "in use by a reader"


def _parts(rule: RetentionRule) -> tuple[RetentionRule, ...]:
    return rule.rules if isinstance(rule, AnyRule) else (rule,)


def _ranked(
    metric: str, mode: Mode | None, k: int, chain: Sequence[Manifest], *, worst: bool
) -> list[tuple[Stem, str]]:
    if found_in(chain, metric) is None:
        return []
    best = rank_by_metric(chain, metric, better_direction(metric, mode, chain), worst=worst)[:k]
    return [(manifest.stem, f"{'worst' if worst else 'best'}:{metric}") for manifest in best]


def _created(manifest: Manifest) -> datetime | None:
    if manifest.created_at is None:
        return None
    try:
        created = datetime.fromisoformat(manifest.created_at.replace("Z", "+00:00"))
    except ValueError:
        return None
    return created if created.tzinfo is not None else None


def _at_least_one(name: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}({value!r}) would keep nothing", hint="give a whole number of at least 1")
