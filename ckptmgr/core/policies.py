"""When to save: small values that combine with `|`, and read aloud.

    EveryNSteps(500) | EveryNEpochs(1) | EveryMinutes(30) | Best("eval_loss", mode="min", k=2) | Worst("eval_loss", mode="min", k=1)

A policy is pure: it gets one `Moment` of the training and its memory of the earlier ones, and answers with a `Decision` that holds
its reasons and the new memory. The memory is a JSON value which the caller keeps and saves with the checkpoint, so the decisions
of a resumed run are those of the uninterrupted one.

Rules:
- `mode` always names the better direction of a metric; `Worst` looks at the other end.
- NaN and ±inf never win, at neither end.
- Ties: the earlier step wins and stays.
- A metric is found by its name, or by `eval_` and its name (`ckptmgr.core.metrics`).
- A metric that is in no evaluation of a step is reported once, at the next step or the end, with the names that are there, and blocks nothing.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from ckptmgr.core.errors import ConfigError
from ckptmgr.core.metrics import metric_name

Mode = Literal["min", "max"]

Memory: TypeAlias = Mapping[str, Any]
"""What policies remember: one JSON object per policy that remembers anything, under the policy's own key. Never changed in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEnded:
    """An optimizer step was finished.

    Attributes:
        step: optimizer steps finished in the whole run, resumed ones included.
        epoch: epochs gone by, a fraction within one; None when the host does not know.
        time_s: when, in seconds of a clock that never goes back within a process (`time.monotonic()` less a value taken when the process
            began to train); None when the host does not know. Only differences within a process count: a moment with a smaller time than
            the one before it comes from a new process.
    """

    step: int
    epoch: float | None = None
    time_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnded:
    """An epoch was finished; `epoch` is the number of finished ones, so 1 after the first."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """An evaluation was finished, with these metrics."""

    step: int
    metrics: Mapping[str, Any]


Moment: TypeAlias = StepEnded | EpochEnded | Evaluated


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy says about one moment.

    Attributes:
        memory: what to hand in at the next moment; to be saved with the checkpoint.
        reasons: why to save now, e.g. `every_n_steps:500` or `best:eval_loss`; empty: do not save.
        notices: things the user should read, such as a metric that is not there.
    """

    memory: Memory
    reasons: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def should_save(self) -> bool:
        """Whether there is a reason to save."""
        return bool(self.reasons)


class SavePolicy(ABC):
    """A rule that says when to save. A frozen value: compare it, hash it, combine it with `|`."""

    __slots__ = ()

    @abstractmethod
    def decide(self, moment: Moment, memory: Memory) -> Decision:
        """Whether to save at `moment`, given what is remembered of all earlier ones ({} at the start of a run).

        Moments must come in the order they happened. Neither argument is changed.
        """

    def modes(self) -> dict[str, Mode]:
        """The better direction of each metric that this policy ranks; manifests record it."""
        return {}

    def unmet(self, memory: Memory) -> tuple[str, ...]:
        """What is left to say when training ends."""
        return ()

    def __or__(self, other: SavePolicy) -> AnyOf:
        """Save when either policy has a reason; one save with all reasons when both have."""
        if not isinstance(other, SavePolicy):
            return NotImplemented
        return AnyOf((*_parts(self), *_parts(other)))


@dataclass(frozen=True, slots=True)
class EveryNSteps(SavePolicy):
    """Save when the number of optimizer steps of the whole run is a multiple of `n`: epochs and resumes do not restart the count."""

    n: int

    def __post_init__(self) -> None:
        _require_positive("EveryNSteps", "n", self.n)

    def decide(self, moment: Moment, memory: Memory) -> Decision:
        due = isinstance(moment, StepEnded) and moment.step > 0 and moment.step % self.n == 0
        return Decision(memory=memory, reasons=(f"every_n_steps:{self.n}",) if due else ())


@dataclass(frozen=True, slots=True)
class EveryNEpochs(SavePolicy):
    """Save at the end of an epoch when the number of finished epochs is a multiple of `n`."""

    n: int = 1

    def __post_init__(self) -> None:
        _require_positive("EveryNEpochs", "n", self.n)

    def decide(self, moment: Moment, memory: Memory) -> Decision:
        due = isinstance(moment, EpochEnded) and moment.epoch > 0 and moment.epoch % self.n == 0
        return Decision(memory=memory, reasons=(f"every_n_epochs:{self.n}",) if due else ())


@dataclass(frozen=True, slots=True)
class EveryMinutes(SavePolicy):
    """Save at the first step that ends `n` minutes of training, or more, after the last save that this policy asked for.

    It counts from the first step it sees, in seconds of training: a resumed run goes on with the seconds that its checkpoint had waited, and the
    time between two processes does not count. Saves for other reasons do not put it off. A step without a time counts as nothing.
    """

    n: float

    def __post_init__(self) -> None:
        number = isinstance(self.n, (int, float)) and not isinstance(self.n, bool)
        if not number or not math.isfinite(self.n) or self.n <= 0:
            raise ConfigError(
                f"EveryMinutes: n is {self.n!r}", hint="n must be a number of minutes above 0, such as 30"
            )
        # 30 and 30.0 are one policy, with one reason and one memory.
        object.__setattr__(self, "n", float(self.n))

    @property
    def key(self) -> str:
        """Where the memory of this policy is, and the reason that it gives."""
        return f"every_minutes:{self.n:g}"

    def decide(self, moment: Moment, memory: Memory) -> Decision:
        if not isinstance(moment, StepEnded):
            return Decision(memory=memory)
        mine = memory.get(self.key, {})
        if moment.time_s is None or not math.isfinite(moment.time_s):
            return self._report_no_time(memory)
        before = mine.get("at_s", moment.time_s)
        waited = mine.get("waited_s", 0.0) + max(0.0, moment.time_s - before)
        due = waited >= self.n * 60.0
        mine = {**mine, "at_s": moment.time_s, "waited_s": 0.0 if due else waited}
        return Decision(memory={**memory, self.key: mine}, reasons=(self.key,) if due else ())

    def _report_no_time(self, memory: Memory) -> Decision:
        mine = memory.get(self.key, {})
        if mine.get("no_time_reported"):
            return Decision(memory=memory)
        notice = f"{self.key} never saves while steps end without a time: hand over StepEnded(step=…, time_s=…)"
        return Decision(memory={**memory, self.key: {**mine, "no_time_reported": True}}, notices=(notice,))


@dataclass(frozen=True, slots=True)
class _Ranked(SavePolicy):
    """Save when a metric, by its name or by `eval_` and its name, enters the `k` most extreme values seen so far, at one end."""

    metric: str
    mode: Mode = "min"
    k: int = 1

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.metric, str) or not self.metric:
            raise ConfigError(
                f"{name}: metric is {self.metric!r}", hint="name a metric of the evaluation, such as 'eval_loss'"
            )
        if self.mode not in get_args(Mode):
            raise ConfigError(
                f"{name}({self.metric!r}): mode is {self.mode!r}",
                hint="use 'min' when a smaller value is better, 'max' when a larger one is",
            )
        _require_positive(f"{name}({self.metric!r})", "k", self.k)

    @property
    def end(self) -> str:
        """Which end of the ranking this policy looks at: "best" or "worst"."""
        return type(self).__name__.lower()

    @property
    def key(self) -> str:
        """Where the memory of this policy is; without `k`, which a resumed run may have changed."""
        return f"{self.end}:{self.metric}:{self.mode}"

    def modes(self) -> dict[str, Mode]:
        return {self.metric: self.mode}

    def decide(self, moment: Moment, memory: Memory) -> Decision:
        memory, said = self._report_missing(moment.step, memory)
        if not isinstance(moment, Evaluated):
            return Decision(memory=memory, notices=said)
        name = metric_name(self.metric, moment.metrics)
        if name is None:
            return Decision(memory=self._missed(moment, memory), notices=said)
        value = _finite(moment.metrics[name])
        memory = self._seen(moment.step, memory)
        if value is None:
            shown = moment.metrics[name]
            said = (*said, f"{name} is {shown} at step {moment.step}: not ranked")
            return Decision(memory=memory, notices=said)
        return replace(self._rank([value, moment.step], memory), notices=said)

    def unmet(self, memory: Memory) -> tuple[str, ...]:
        return self._report_missing(None, memory)[1]

    def _rank(self, entry: list[Any], memory: Memory) -> Decision:
        mine = memory.get(self.key, {})
        ranked: list[list[Any]] = []
        # A step evaluated twice is one save: it counts once, with the better of its values for this end.
        for candidate in sorted([*mine.get("ranked", ()), entry], key=self._order):
            if all(candidate[1] != step for _, step in ranked):
                ranked.append(list(candidate))
        ranked = ranked[: self.k]
        entered = entry in ranked and entry not in [list(old) for old in mine.get("ranked", ())]
        return Decision(
            memory={**memory, self.key: {**mine, "ranked": ranked}},
            reasons=(f"{self.end}:{self.metric}",) if entered else (),
        )

    def _order(self, entry: list[Any]) -> tuple[float, int]:
        value, step = entry
        small_first = (self.mode == "min") == (self.end == "best")
        return (value if small_first else -value, step)

    # --- a metric that is not there ---
    # A host with several evaluation sets makes an evaluation of each, at one step: what the first one lacks the second may have.

    def _missed(self, moment: Evaluated, memory: Memory) -> Memory:
        mine = memory.get(self.key, {})
        if mine.get("missing_reported") or mine.get("seen") == moment.step:
            return memory
        present = {*mine.get("missing", {}).get("present", ()), *moment.metrics}
        return {**memory, self.key: {**mine, "missing": {"step": moment.step, "present": sorted(present)}}}

    def _seen(self, step: int, memory: Memory) -> Memory:
        mine = {name: value for name, value in memory.get(self.key, {}).items() if name != "missing"}
        return {**memory, self.key: {**mine, "seen": step}}

    def _report_missing(self, step: int | None, memory: Memory) -> tuple[Memory, tuple[str, ...]]:
        """What is to be said once `step`, or the end, shows that no evaluation of an earlier step had the metric."""
        mine = memory.get(self.key, {})
        missing = mine.get("missing")
        if missing is None or missing["step"] == step:
            return memory, ()
        notice = (
            f"{self.end}:{self.metric} has nothing to rank: the evaluation at step {missing['step']} has no metric {self.metric!r}; "
            f"present: {', '.join(missing['present']) or 'none'}. It counts from the first evaluation that has it."
        )
        left = {name: value for name, value in mine.items() if name != "missing"}
        return {**memory, self.key: {**left, "missing_reported": True}}, (notice,)


@dataclass(frozen=True, slots=True)
class Best(_Ranked):
    """Save when `metric` is among the `k` best values of the run so far."""


@dataclass(frozen=True, slots=True)
class Worst(_Ranked):
    """Save when `metric` is among the `k` worst values of the run so far; `mode` still names the better direction."""


@dataclass(frozen=True, slots=True)
class AnyOf(SavePolicy):
    """Save when any of `policies` has a reason; what `|` makes. Equal policies count once.

    Raises:
        ConfigError: two policies rank one metric in ways that contradict each other.
    """

    policies: tuple[SavePolicy, ...]

    def __post_init__(self) -> None:
        flat = tuple(dict.fromkeys(part for policy in self.policies for part in _parts(policy)))
        object.__setattr__(self, "policies", flat)
        modes: dict[str, Mode] = {}
        keys: set[str] = set()
        for policy in flat:
            for metric, mode in policy.modes().items():
                if modes.setdefault(metric, mode) != mode:
                    raise ConfigError(
                        f"save policies give metric {metric!r} both mode 'min' and mode 'max'",
                        hint="mode names the better direction, for Worst too; use one",
                    )
            if isinstance(policy, _Ranked):
                if policy.key in keys:
                    raise ConfigError(
                        f"two save policies keep the {policy.end} of metric {policy.metric!r}, with different k",
                        hint="keep the one with the larger k; it includes the other",
                    )
                keys.add(policy.key)

    def modes(self) -> dict[str, Mode]:
        return {metric: mode for policy in self.policies for metric, mode in policy.modes().items()}

    def unmet(self, memory: Memory) -> tuple[str, ...]:
        return tuple(notice for policy in self.policies for notice in policy.unmet(memory))

    def decide(self, moment: Moment, memory: Memory) -> Decision:
        reasons: list[str] = []
        notices: list[str] = []
        for policy in self.policies:
            decision = policy.decide(moment, memory)
            memory = decision.memory
            reasons += decision.reasons
            notices += decision.notices
        return Decision(memory=memory, reasons=tuple(reasons), notices=tuple(notices))


def _parts(policy: SavePolicy) -> tuple[SavePolicy, ...]:
    return policy.policies if isinstance(policy, AnyOf) else (policy,)


def _require_positive(owner: str, name: str, value: object) -> None:
    # bool is an int: EveryNSteps(True) would save at every step.
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{owner}: {name} is {value!r}", hint=f"{name} must be a whole number, 1 or more")


def _finite(value: object) -> float | None:
    """`value` as a float, also from a NumPy scalar or a 0-d tensor; None when it is not a finite number."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    # A number in a string ranks as nothing: a host that sends strings means something else by them.
    return number if math.isfinite(number) and not isinstance(value, str) else None
