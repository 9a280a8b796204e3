"""A callback that says where the time of a training goes, and what holds it up."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ckptmgr.callbacks import checks
from ckptmgr.callbacks.base import Callback, Priority, TrainerControl, TrainerState
from ckptmgr.callbacks.breakdown import ADVICE, Breakdown
from ckptmgr.callbacks.device_marks import device_of, marks_on, peak_bytes
from ckptmgr.callbacks.log_sinks import Guarded, JsonlSink, labels
from ckptmgr.callbacks.memory import resident_bytes
from ckptmgr.callbacks.spans import Spans
from ckptmgr.callbacks.traces import Trace
from ckptmgr.training import ranks

_log = logging.getLogger(__name__)

_KEPT_WINDOWS = 1000


class PerformanceProfilerCallback(Callback):
    """Tell, every `log_interval` steps and at the end, how long steps take, what in them takes it, and name the bottleneck.

    *Phases* (`ckptmgr.callbacks.spans.PHASES`): `data`, from the end of a step to the beginning of the next one; `forward`, what the model takes;
    `backward`, the rest up to the optimizer, a loss outside the model and clipping included; `optimizer`, with the scheduler; `callbacks`, all hooks, if
    it runs in a `CallbackManager`, as in the embedded Trainer; elsewhere they count where they run, most of all in `data`. `evaluation` and
    `save` as far as the host says when they are; what callbacks do to save counts as `save`. The first step is left out: it starts workers, compiles,
    and fills caches.

    Forward and backward are told apart by two hooks on the model, at one step in `sample_interval`, each time another one of so many; they are gone
    afterwards. A model compiled in place (`model.compile()`) gets none, and one whose parts are called in its place, as in Lightning, calls none: there the two
    are `compute`. On a GPU the sampled steps are measured by events
    in its queue, and nothing waits for it: there `data` is what the GPU waits for the host.

    *Several ranks*: each measures itself, the main process says what it found; no collective. Rates are its own times the number of ranks. Where the
    host brings no batch, as Hugging Face's Trainer, samples are those of its arguments, and tokens those that it counts
    (`include_num_input_tokens_seen`). *Accumulation*: a step is one of the optimizer, with all its micro-batches. *Resume*: times of one process;
    nothing is saved.

    Args:
        log_interval: steps from one report to the next.
        sample_interval: steps of which one is looked at closely; 1: all.
        path: also append each report to this file, as JSON lines.
        trace_dir: write a trace of `torch.profiler` there, by the main process, once.
        trace_step: the first step of the trace.
        trace_steps: how many steps it has.
        clock: seconds from any origin.

    Attributes:
        windows: the newest reports, oldest first.
        total: of all steps that were measured; None before the first report.

    Raises:
        ConfigError: an argument that makes no sense.
    """

    # Before all others in each event: what they take is what comes after.
    priority = Priority.FIRST
    may_run_async = False

    def __init__(
        self,
        log_interval: int = 100,
        *,
        sample_interval: int = 10,
        path: str | Path | None = None,
        trace_dir: str | Path | None = None,
        trace_step: int = 10,
        trace_steps: int = 3,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        owner = type(self).__name__
        checks.whole(owner, "log_interval", log_interval)
        checks.whole(owner, "sample_interval", sample_interval)
        checks.whole(owner, "trace_step", trace_step)
        checks.whole(owner, "trace_steps", trace_steps)
        self.log_interval = log_interval
        self.sample_interval = sample_interval
        self.windows: deque[Breakdown] = deque(maxlen=_KEPT_WINDOWS)
        self.total: Breakdown | None = None
        self._clock = clock
        self._path = None if path is None else Path(path)
        self._trace = None if trace_dir is None else Trace(Path(trace_dir), trace_step, trace_steps)
        self._dispatcher: Any = None
        self._spent_s = self._saving_s = 0.0
        self._spans = Spans(clock)
        self._sink: Guarded | None = None
        self._device: Any = None
        self._handles: list[Any] = []
        self._can_hook = False
        self._begin_window(0)
        self._is_warm = self._has_sampled = False

    def joined(self, dispatcher: Any) -> None:
        """A manager of callbacks has taken this one in: what its hooks take can be told."""
        self._dispatcher = dispatcher

    # --- events -----------------------------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """Begin to measure, with the second step."""
        self._is_warm = self._has_sampled = False
        self.total = None
        self._can_hook = hasattr(model, "register_forward_pre_hook") and not getattr(model, "_compiled_call_impl", None)
        self._device = device_of(model)
        self._spans = Spans(self._clock, None if self._device is None else marks_on(self._device))
        if self._path is not None and state.is_world_process_zero:
            self._sink = Guarded(JsonlSink(self._path))
            self._sink.begin(state.global_step)
        self._enter("data")

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The first batch of an epoch is waited for."""
        self._enter("data")

    def on_step_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        """The data are there."""
        if self._trace is not None and state.is_world_process_zero:
            self._trace.step_begins(state.global_step + 1)
        if self._is_sampled(state.global_step + 1) and self._can_hook:
            self._handles = [
                model.register_forward_pre_hook(lambda *_: self._enter("forward")),
                model.register_forward_hook(lambda *_: self._enter("backward")),
            ]
        self._enter("compute")

    def on_substep_end(
        self, args: Any, state: TrainerState, control: TrainerControl, batch: Any = None, **kwargs: Any
    ) -> None:
        """A micro-batch is done, and another one begins."""
        self._count(batch)
        self._enter("compute")

    def on_pre_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Gradients are there."""
        self._enter("optimizer")

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The scheduler follows."""
        self._enter("optimizer")

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, batch: Any = None, **kwargs: Any
    ) -> None:
        """A step is done; every `log_interval` steps, report."""
        step = state.global_step
        self._has_sampled = self._has_sampled or self._is_sampled(step)
        self._unhook()
        self._count(batch)
        self._enter(_next(control))
        self._spans.sample(False)
        self._steps += 1
        if self._trace is not None:
            self._trace.step_ended()
        if not self._is_warm:
            self._is_warm = True
            self._begin_window(step, state)
            self._spans.take()
        elif step % self.log_interval == 0:
            self._report(args, state)
        if self._is_sampled(step + 1) and _next(control) == "data":
            self._spans.sample(True)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """What comes next is known better now."""
        self._go_on(control)

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Maybe an evaluation and a save follow."""
        self._go_on(control)

    def on_evaluate_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation begins."""
        self._spans.sample(False)
        self._enter("evaluation")

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """In a host that does not say when an evaluation begins, it has begun."""
        self._enter("evaluation")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """An evaluation ended."""
        self._enter("save" if control.should_save else "data")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """The host has written its checkpoint, or callbacks write it now."""
        self._enter("data")
        self._saves = True

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Report what is left, and the whole. Also after an exception, in the embedded Trainer."""
        self._unhook()
        self._spans.sample(False)
        if self._trace is not None:
            self._trace.close()
        if self._is_warm:
            self._enter(None)
            self._report(args, state)
        if self.total is not None and state.is_world_process_zero:
            _log.info("in all, %s", self._told(self.total))
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    # --- measuring --------------------------------------------------------------------------------------------------------

    def _enter(self, phase: str | None) -> None:
        spent_s, saving_s = (0.0, 0.0) if (of := self._dispatcher) is None else (of.spent_s, of.host_saving_s)
        # What callbacks did since the last mark, and saves of a host that tells of no event then; saving is what callbacks did in on_save, too.
        aside = {"callbacks": spent_s - self._spent_s, "save": saving_s - self._saving_s}
        if self._saves:
            aside["save"] += aside.pop("callbacks")
        self._spans.enter(phase, aside=aside)
        self._spent_s, self._saving_s, self._saves = spent_s, saving_s, False

    def _go_on(self, control: TrainerControl) -> None:
        if _next(control) != "data":
            self._spans.sample(False)
        self._enter(_next(control))

    def _is_sampled(self, step: int) -> bool:
        if not self._has_sampled:
            return self._is_warm
        # Not every n-th: what happens every n-th step would be in all of them, or in none.
        window, place = divmod(step, self.sample_interval)
        return place == (window * 2654435761 >> 7) % self.sample_interval

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    # --- reporting --------------------------------------------------------------------------------------------------------

    def _begin_window(self, step: int, state: Any = None) -> None:
        self._first_step = step + 1
        self._steps = 0
        self._samples: int | None = None
        self._tokens: int | None = None
        self._saves = False
        self._tokens_seen = int(getattr(state, "num_input_tokens_seen", 0) or 0)

    def _count(self, batch: Any) -> None:
        samples, tokens = _size_of(batch)
        if samples:
            self._samples = (self._samples or 0) + samples
        if tokens:
            self._tokens = (self._tokens or 0) + tokens

    def _report(self, args: Any, state: TrainerState) -> None:
        seconds = self._spans.take()
        if not self._steps and not seconds:
            return  # nothing after the last report
        world_size = ranks.world_size()
        samples, tokens = self._samples, self._tokens
        if samples is None and isinstance(each := getattr(args, "train_batch_size", None), int):
            samples = self._steps * each * int(getattr(args, "gradient_accumulation_steps", 1) or 1)
        if tokens is None and (seen := int(getattr(state, "num_input_tokens_seen", 0) or 0)) > self._tokens_seen:
            # It counts those of all ranks.
            tokens = (seen - self._tokens_seen) // world_size
        found = Breakdown(
            first_step=self._first_step,
            last_step=state.global_step,
            steps=self._steps,
            seconds=seconds,
            samples=samples,
            tokens=tokens,
            world_size=world_size,
            host_bytes=resident_bytes(),
            device_bytes=None if self._device is None else peak_bytes(self._device),
        )
        self._begin_window(state.global_step, state)
        self.windows.append(found)
        self.total = found if self.total is None else self.total.with_more(found)
        if found.steps and state.is_world_process_zero:
            _log.info("%s", self._told(found))
            if self._sink is not None:
                self._sink.write({**labels("profile", state.global_step), **found.as_json()})

    def _told(self, found: Breakdown) -> str:
        advice = ADVICE.get(found.bottleneck, "")
        if found.bottleneck == "callbacks" and self._dispatcher is not None:
            took = {name: sum(each.total_s for each in of.values()) for name, of in self._dispatcher.timings.items()}
            advice = f"{max(took, key=took.__getitem__, default='')} takes most; {advice}"
        return f"{found}; bottleneck: {found.bottleneck or 'none'}" + (f" ({advice})" if advice else "")


def _next(control: TrainerControl) -> str:
    """What a host does next, between two steps."""
    return "evaluation" if control.should_evaluate else "save" if control.should_save else "data"


def _size_of(batch: Any) -> tuple[int, int]:
    """Samples and tokens of a batch; 0 for what nobody can tell."""
    values = list(batch.values()) if isinstance(batch, Mapping) else batch
    values = values if isinstance(values, (list, tuple)) else [values]
    shapes = [value.shape for value in values if getattr(value, "ndim", 0)]
    count = getattr(batch.get("input_ids") if isinstance(batch, Mapping) else None, "numel", None)
    return (int(shapes[0][0]) if shapes else 0, int(count()) if callable(count) else 0)
