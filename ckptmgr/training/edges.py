"""The way back to the last step edge, from the middle of a step or of an evaluation that a preemption cuts off."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from ckptmgr.training.interruption import Interrupted
from ckptmgr.training.rng import RngMark

_log = logging.getLogger(__name__)

# Hooks that run between two edges: what they do to their callback's state must not get into the save of the edge before.
EPOCH_HOOKS = ("on_epoch_begin", "on_step_begin", "on_substep_end")
STEP_HOOKS = ("on_step_begin", "on_substep_end")
EVALUATION_HOOKS = ("on_evaluate_begin", "on_prediction_step")


class Callbacks(Protocol):
    """What is needed of a `CallbackManager`."""

    def state_dict(self, *, having: Collection[str] = ()) -> dict[str, Any]:
        """The states by name, of those callbacks that have a hook for one of the events `having`; of all, if there are none."""


class EdgeMark:
    """What may change between a step edge and the next one, as it is at this moment.

    Made at an edge. Weights and the optimizer need no mark: they change at the end of a step only. The random states are a few kB; of callbacks
    only those are asked that have a state and a hook which runs before the next edge, and buffers are copied for `mark_model` alone.

    Args:
        model: the model.
        callbacks: for the states of those with a hook for one of the events `hooks`.
        hooks: the hooks that may run before this mark is used.
        generators: those that may be drawn from before this mark is used, besides the global ones.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        callbacks: Callbacks,
        hooks: Collection[str] = (),
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        self._model = model
        self._callbacks = callbacks
        self._hooks = frozenset(hooks)
        self._rng = RngMark()
        self._generators = [(generator, generator.get_state()) for generator in generators]
        self._states = self._copy_states() if hooks else {}
        self._buffers: list[tuple[torch.nn.Module, str, torch.Tensor, torch.Tensor]] = []
        self._versions: list[int] = []

    def mark_model(self) -> None:
        """Mark the persistent buffers too, as before the first forward pass of several: BatchNorm's statistics move with each."""
        self._buffers = [
            (module, name, buffer, buffer.detach().clone())
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and name not in module._non_persistent_buffers_set
        ]
        self._versions = [parameter._version for parameter in self._model.parameters()]

    def mark_callbacks(self, hooks: Collection[str]) -> None:
        """Mark the states of callbacks as they are now, unless the hooks are among those that this mark was made for."""
        if not self._hooks.issuperset(hooks):
            self._hooks = frozenset(hooks)
            self._states = self._copy_states()

    @property
    def can_go_back(self) -> bool:
        """False once the model has changed its own parameters in a forward pass: those were not copied."""
        return not self._versions or self._versions == [parameter._version for parameter in self._model.parameters()]

    def go_back(self) -> None:
        """Put the random states, of the marked generators too, and the buffers back."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                buffer.copy_(value)
                module._buffers[name] = buffer
        for generator, state in self._generators:
            generator.set_state(state)
        self._rng.go_back()

    def states(self) -> dict[str, Any]:
        """The states of all callbacks: of the marked ones as they were, of the others as they are."""
        return {**self._callbacks.state_dict(), **self._states}

    def _copy_states(self) -> Mapping[str, Any]:
        try:
            return copy.deepcopy(self._callbacks.state_dict(having=self._hooks))
        except Exception as error:  # noqa: BLE001 - the state of a callback is other people's code
            _log.debug("the states of callbacks cannot be marked, they are saved as they will be: %r", error)
            return {}


class Edges:
    """Takes back what an `Interrupted` cuts off, so that the trainer is at its last edge again; its position in the data apart.

    Args:
        model, callbacks: the trainer's.
        marks: whether steps can be taken back. Without, an edge costs nothing, and nothing may interrupt a step.

    Attributes:
        marks: see above.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        callbacks: Callbacks,
        *,
        marks: bool,
    ) -> None:
        self.marks = marks
        self._model = model
        self._callbacks = callbacks
        self._mark: EdgeMark | None = None
        self._taken_back: EdgeMark | None = None

    def mark(self, hooks: Collection[str] = ()) -> None:
        """Here is an edge. `hooks`: those that run before the next look."""
        self._mark = EdgeMark(self._model, self._callbacks, hooks) if self.marks else None

    def mark_step(self) -> None:
        """A step of several micro-batches begins, between which it may be cut off."""
        if self._mark is not None:
            self._mark.mark_callbacks(STEP_HOOKS)
            self._mark.mark_model()

    @property
    def can_go_back(self) -> bool:
        """Whether the step that was marked can be taken back at this moment."""
        return self._mark is not None and self._mark.can_go_back

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Whatever interrupts in here is as if it had come at the edge before."""
        try:
            yield
        except Interrupted:
            if self._mark is not None:
                self._mark.go_back()
            self._taken_back = self._mark
            raise

    @contextlib.contextmanager
    def evaluation(self, generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
        """An evaluation, which changes nothing but random states, those of `generators` too, and callbacks; whatever interrupts it is as if it had come
        before."""
        mark = EdgeMark(self._model, self._callbacks, EVALUATION_HOOKS, generators)
        try:
            yield
        except Interrupted:
            mark.go_back()
            self._taken_back = mark
            raise

    def states(self) -> dict[str, Any] | None:
        """The states of callbacks as of the edge that was gone back to; None if there was none."""
        return None if self._taken_back is None else self._taken_back.states()
