"""Which checkpoint the user means: `latest`, `500`, `best:METRIC[:MODE]`, `worst:METRIC[:MODE]`, `tag:NAME`, `id:STEM`.

METRIC is a name, or what follows `eval_` in it (`ckptmgr.core.metrics`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.layout import Stem, tag_key
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.metrics import may_be_same, metric_name

Mode = Literal["min", "max"]
_FORMS = "latest, a step such as 500, best:METRIC[:min|max], worst:METRIC[:min|max], tag:NAME, id:ID"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """A parsed selector. `kind` says which of the other fields matters."""

    kind: Literal["latest", "step", "best", "worst", "tag", "id"]
    step: int | None = None
    metric: str = ""
    mode: Mode | None = None
    tag: str = ""
    stem: Stem | None = None

    def __str__(self) -> str:
        match self.kind:
            case "step":
                return str(self.step)
            case "best" | "worst":
                return f"{self.kind}:{self.metric}" + (f":{self.mode}" if self.mode else "")
            case "tag":
                return f"tag:{self.tag}"
            case "id":
                return f"id:{self.stem}"
        return "latest"

    @property
    def is_explicit(self) -> bool:
        """Whether resuming by it is a decision of the user's, which begins a lineage of its own, and not an automatic one."""
        return self.kind != "latest"


def parse_selector(text: str) -> Selector:
    """The selector written as `text`.

    Raises:
        ConfigError: it is none; the message lists the forms.
    """
    if text == "latest":
        return Selector(kind="latest")
    if text.isdecimal() and text.isascii():
        return Selector(kind="step", step=int(text))
    kind, colon, rest = text.partition(":")
    if colon and rest:
        if kind in ("best", "worst"):
            metric, mode = split_metric(rest)
            return Selector(kind="best" if kind == "best" else "worst", metric=metric, mode=mode)
        if kind == "tag":
            tag_key(rest)
            return Selector(kind="tag", tag=rest)
        if kind == "id":
            return Selector(kind="id", stem=Stem.parse(rest))
    raise ConfigError(f"{text!r} is not a selector", hint=f"use one of: {_FORMS}")


def split_metric(text: str) -> tuple[str, Mode | None]:
    """`eval_loss:min` as (name, mode); a name without a mode, or whose last part is not one, as (text, None)."""
    name, colon, mode = text.rpartition(":")
    if colon and name and mode in ("min", "max"):
        return name, "min" if mode == "min" else "max"
    return text, None


def split_ranked(text: str) -> tuple[str, Mode | None, int]:
    """`METRIC[:MODE[:K]]` as (name, mode or None, k); the name itself may hold colons, so that K needs a MODE before it."""
    head, colon, tail = text.rpartition(":")
    if colon and tail.isdecimal():
        name, mode = split_metric(head)
        if mode is not None:
            return name, mode, int(tail)
    return (*split_metric(text), 1)


def better_direction(metric: str, given: Mode | None, manifests: Iterable[Manifest]) -> Mode:
    """Whether less or more of `metric` is better: as given, else as a policy recorded it, else by its name.

    Raises:
        ConfigError: none of them says so.
    """
    if given is not None:
        return given
    known = {pair for manifest in manifests for pair in manifest.metric_modes.items() if pair[1] in ("min", "max")}
    recorded = {mode for name, mode in known if name == metric} or {
        mode for name, mode in known if may_be_same(name, metric)
    }
    if len(recorded) == 1:
        return "min" if recorded == {"min"} else "max"
    mode = mode_by_name(metric)
    if mode is not None:
        return mode
    raise ConfigError(
        f"cannot tell whether less or more of {metric!r} is better", hint=f"write {metric}:min or {metric}:max"
    )


def mode_by_name(metric: str) -> Mode | None:
    """The better direction of a metric, where its name tells: less of a loss and of a perplexity. None: it does not."""
    return "min" if metric.endswith(("loss", "perplexity")) else None


def rank_by_metric(manifests: Iterable[Manifest], metric: str, mode: Mode, *, worst: bool = False) -> list[Manifest]:
    """Those that carry a finite value of `metric`, the best (or worst) first; among equals the earlier step (K061).

    All are ranked by one metric: that of this very name if any of them has it.
    """
    down = (mode == "max") != worst
    among = list(manifests)
    name = found_in(among, metric) or metric
    usable = [manifest for manifest in among if math.isfinite(manifest.metrics.get(name, math.nan))]
    return sorted(usable, key=lambda m: (-m.metrics[name] if down else m.metrics[name], m.stem))


def found_in(manifests: Iterable[Manifest], metric: str) -> str | None:
    """The name under which any of `manifests` has `metric`; None if none does."""
    return metric_name(metric, {name for manifest in manifests for name in manifest.metrics})


def choose(
    selector: Selector, chain: Sequence[Manifest], others: Sequence[Manifest], tags: Mapping[str, Stem]
) -> Manifest | None:
    """The checkpoint that `selector` means; None if there is none.

    Args:
        chain: the present lineage, newest first.
        others: committed checkpoints of other lineages; reached only through `tag:` and `id:`.
        tags: where each tag points.

    Raises:
        ConfigError: `best:`/`worst:` and the better direction is unknown.
    """
    match selector.kind:
        case "latest":
            return next(iter(chain), None)
        case "step":
            return next((manifest for manifest in chain if manifest.step == selector.step), None)
        case "best" | "worst":
            mode = better_direction(selector.metric, selector.mode, chain)
            return next(iter(rank_by_metric(chain, selector.metric, mode, worst=selector.kind == "worst")), None)
    wanted = tags.get(selector.tag) if selector.kind == "tag" else selector.stem
    return next((manifest for manifest in [*chain, *others] if manifest.stem == wanted), None)
