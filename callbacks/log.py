"""A callback that writes down what a training says: to a file, TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.base import Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.gradients import total_norm, with_gradients
from ckptmgr.callbacks.guarded import GuardedCallback
from ckptmgr.callbacks.log_sinks import Guarded, Histogram, Sink, labels, sink_of
from ckptmgr.callbacks.readings import numbers_of
from ckptmgr.core.errors import ConfigError
from ckptmgr.training import ranks

# Powers of ten of a gradient's elements: what is below underflows in every format, what is above has exploded.
_LOWEST, _HIGHEST, _BINS = -12.0, 4.0, 64


class LogCallback(GuardedCallback):
    """Write what the training logs, and every `log_interval` steps the learning rate and the gradient norm, to one or more sinks.

    Records are of one form on all nodes: UTC time, host, rank, kind, step, epoch, then the values (see `ckptmgr.callbacks.log_sinks`). Kinds: `begin`
    and `end` of a training; `log`, all numbers of the host's own logs, evaluations included, and of evaluations that it does not log; `step`:
    `learning_rate` of that step, or one per group of parameters (`learning_rate/0`, …), `grad_norm` over all gradients, unscaled, and every
    `histogram_interval` steps `grad_log10`, how many of their elements are of which power of ten.

    *Not finite*: written as they are; in JSON the strings "NaN", "Infinity", "-Infinity". *What is no number* is left out. *Accumulation*: norms are of
    the whole step. Where the host clips, as Hugging Face's Trainer and `TrainingArguments.max_grad_norm` do, the norm is that after clipping; the one
    before is what Hugging Face logs as `grad_norm`. *Several ranks*: the main process writes; with `all_ranks`, each rank also writes a file of its
    own (`log-rank1.jsonl`). Gradients in shards (DTensor) are summed by all ranks at these steps; otherwise there is no collective. *A GPU* is
    waited for at these steps only, once. *Resume*: files are gone on with; a step that comes again is written again, and the later one counts.

    Added with `run_async`, it gets no gradients, and writes the host's logs alone.

    A sink that fails loses records, says so once, and ends nothing (`lost` counts). One that is not installed is an error at once.

    Args:
        directory: for `log.jsonl` and `tensorboard/`.
        sinks: "jsonl", "tensorboard", "wandb", or `{name: {options}}`; or objects with the methods of `log_sinks.Sink`.
        log_interval: steps from one look at learning rate and gradients to the next; None: none.
        histogram_interval: steps from one histogram to the next; None: none.
        all_ranks: all ranks write their records, to JSON files.

    Raises:
        ConfigError: an argument that makes no sense.
        MissingExtraError: a sink's package is not installed.
    """

    priority = Priority.LOG

    def __init__(
        self,
        directory: str | Path = "logs",
        *,
        sinks: str | Mapping[str, Any] | Sequence[Any] = ("jsonl",),
        log_interval: int | None = 50,
        histogram_interval: int | None = None,
        all_ranks: bool = False,
    ) -> None:
        owner = type(self).__name__
        checks.whole(owner, "log_interval", log_interval, optional=True)
        checks.whole(owner, "histogram_interval", histogram_interval, optional=True)
        checks.choice(owner, "all_ranks", all_ranks, (True, False))
        specs = [sinks] if isinstance(sinks, (str, Mapping)) else list(sinks)
        if not specs:
            raise ConfigError(f"{owner}: sinks is {sinks!r}", hint="name at least one, such as 'jsonl'")
        super().__init__()
        self.log_interval = log_interval
        self.histogram_interval = histogram_interval
        self.all_ranks = all_ranks
        self._owner, self._specs, self._directory = owner, specs, Path(directory)
        # On all ranks, so that what is wrong or missing is so everywhere. Which rank this is may be known only later.
        self._main = [sink_of(owner, spec, self._directory) for spec in specs]
        self._sinks: list[Guarded] = []
        self._is_open = False
        self._can_look = True
        self._logged: tuple[int, frozenset[str]] = (-1, frozenset())
        self._found: dict[str, Any] = {}

    @property
    def sinks(self) -> tuple[Sink, ...]:
        """Those that this rank writes to; none before training begins."""
        return tuple(each.sink for each in self._sinks)

    @property
    def lost(self) -> int:
        """How often a sink failed."""
        return sum(each.failures for each in self._sinks)

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Open the sinks."""
        self._found = {}
        self._open(state)
        self._write("begin", state, {"world_size": ranks.world_size(), "max_steps": state.max_steps})

    def on_pre_optimizer_step(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **kwargs: Any,
    ) -> None:
        """Look at learning rates and gradients, every so many steps. A collective if gradients are in shards."""
        step = state.global_step + 1
        looks, counts = _is_due(step, self.log_interval), _is_due(step, self.histogram_interval)
        if self._can_look and (looks or counts):
            self._can_look = False
            self._guard(
                "look at the gradients (which is not tried again)", lambda: self._look(model, optimizer, looks, counts)
            )

    def _look(self, model: Any, optimizer: Any, looks: bool, counts: bool) -> None:
        parameters = with_gradients(model, optimizer)
        in_shards = any(hasattr(parameter.grad, "full_tensor") for parameter in parameters)
        if self._sinks or in_shards:
            if looks:
                self._found.update(_learning_rates(optimizer))
            if looks and parameters:
                self._found["grad_norm"] = total_norm(parameters)
            if counts and parameters:
                self._found["grad_log10"] = _counted(parameters)
        self._can_look = True

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write what was found of this step."""
        found, self._found = self._found, {}
        if found:
            self._write("step", state, {name: _read(value) for name, value in found.items()})

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write what the host logs."""
        self._logged = (state.global_step, frozenset(logs or ()))
        self._write("log", state, numbers_of(logs))

    def on_evaluate(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Write what the host has not logged of an evaluation."""
        step, names = self._logged
        told = numbers_of(metrics)
        if step == state.global_step:
            told = {name: value for name, value in told.items() if name not in names}
        self._write("log", state, told)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Close the sinks."""
        self._write("end", state, {"max_steps": state.max_steps})
        for sink in self._sinks:
            sink.close()
        self._is_open = False

    # --- writing ----------------------------------------------------------------------------------------------------------

    def _open(self, state: TrainerState) -> None:
        if self._is_open:
            return
        self._is_open = True
        own = _own_files(self._owner, self._specs, self._directory) if self.all_ranks else []
        known = {id(each.sink): each for each in self._sinks}
        here = self._main if state.is_world_process_zero else own
        self._sinks = [known.get(id(sink)) or Guarded(sink) for sink in here]
        for sink in self._sinks:
            sink.begin(state.global_step)

    def _write(self, kind: str, state: TrainerState, values: Mapping[str, Any]) -> None:
        # Also for an evaluation before the training, in a host that allows it.
        self._open(state)
        if not values or not self._sinks:
            return
        record = {**labels(kind, state.global_step), "epoch": state.epoch, **values}
        for sink in self._sinks:
            sink.write(record)


def _own_files(owner: str, specs: Sequence[Any], directory: Path) -> list[Sink]:
    """For a rank other than the main one: JSON files, named after it."""
    named = [spec if isinstance(spec, Mapping) else {spec: {}} for spec in specs if isinstance(spec, (str, Mapping))]
    if not any("jsonl" in each for each in named):
        return []
    return [sink_of(owner, "jsonl", directory, suffix=f"-rank{ranks.rank()}")]


def _is_due(step: int, interval: int | None) -> bool:
    return interval is not None and step % interval == 0


def _learning_rates(optimizer: Any) -> dict[str, float]:
    rates = [float(group["lr"]) for group in getattr(optimizer, "param_groups", ())]
    if len(set(rates)) <= 1:
        return {"learning_rate": rates[0]} if rates else {}
    return {f"learning_rate/{index}": rate for index, rate in enumerate(rates)}


def _counted(parameters: Sequence[Any]) -> Any:
    """Counts by power of ten, of this rank's part of the gradients, on their device."""
    import torch

    counts: Any = None
    for parameter in parameters:
        grad = parameter.grad
        local = grad.to_local() if hasattr(grad, "to_local") else grad
        # Zeros, what is outside of the bins, and what is not finite are in none.
        here = torch.histc(local.detach().abs().float().log10(), bins=_BINS, min=_LOWEST, max=_HIGHEST)
        counts = here if counts is None else counts + here.to(counts.device)
    return counts


def _read(value: Any) -> Any:
    """What was found, as a value of a record. Waits for its device."""
    if isinstance(value, float):
        return value
    if value.ndim:
        width = (_HIGHEST - _LOWEST) / _BINS
        edges = [_LOWEST + index * width for index in range(_BINS + 1)]
        return Histogram(edges=edges, counts=[int(count) for count in value.tolist()])
    return float(value)
