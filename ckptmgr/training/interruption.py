"""Where the Trainer looks for a preemption, and how it leaves from the middle of things."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from ckptmgr.training import ranks
from ckptmgr.training.data_position import end_workers
from ckptmgr.training.fast_forward import batches_per_epoch
from ckptmgr.training.preemption import Preempted, Preemption

_log = logging.getLogger(__name__)


class Control(Protocol):
    """What is needed of a `TrainerControl`."""

    should_interrupt: bool


class Interrupted(BaseException):
    """Training leaves here, in order. Raised and caught by the Trainer; no `Exception`, so that what runs in between cannot take it for one."""


class Interruption:
    """The looks of one `train` call. Makes no look and costs nothing without a `Preemption`, except at `is_due`.

    With several ranks every look is a collective, so all of them look at the same edges: within steps and evaluations only if all have the
    same number of batches.

    Args:
        preemption: what to look at; None: only at the control's flag.
        control: `should_interrupt` is set once there is a notice, and stays.

    Attributes:
        cuts_steps: whether a step can be left between micro-batches.
        together: whether all ranks leave, and at the same edge; not so when one has lost its data loader.
    """

    def __init__(self, preemption: Preemption | None, control: Control) -> None:
        self.preemption = preemption
        self.cuts_steps = False
        self.together = False
        self._control = control

    def begin(self, length: int | None) -> None:
        """Agree with the other ranks on where to look; `length`: of the training data's loader. A collective with several ranks."""
        self.cuts_steps = self.preemption is not None and _same_everywhere(length)

    def is_due(self) -> bool:
        """Whether to leave at this edge. A collective with several ranks."""
        if not self._control.should_interrupt and self.preemption is not None and self.preemption.agreed() is not None:
            self.together = True
            self._leave()
        return self._control.should_interrupt

    def leave_if_due(self) -> None:
        """Raise `Interrupted` if so. A collective with several ranks."""
        if self.is_due():
            raise Interrupted

    def _leave(self) -> None:
        self._control.should_interrupt = True
        if self.preemption is not None:
            # Workers are ended by us too, not all of them in a state in which they end without an error.
            self.preemption.expect_dead_workers()

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which a batch is waited for."""
        return contextlib.nullcontext() if self.preemption is None else self.preemption.waiting()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around all that has to do with a loader: a signal that ends its wait, or its workers, ends the training in order.

        Workers are in the process group of the trainer: what is sent to the group ends them first.
        """
        try:
            yield
        except Preempted as error:
            self._leave()
            raise Interrupted from error
        except (RuntimeError, OSError, EOFError) as error:
            if self.preemption is None or self.preemption.notice is None:
                raise
            _log.warning(
                "the data loader failed during the preemption (%s): leaving at the last step", _first_line(error)
            )
            self._control.should_interrupt = True
            raise Interrupted from error

    def watched(self, loader: Iterable[Any], *, by_others: bool) -> Iterable[Any]:
        """`loader`, with a look before each batch. A collective with several ranks.

        Args:
            by_others: it is iterated by code that may leave some batches out, on some ranks.
        """
        if (
            self.preemption is None
            or (ranks.can_agree() and by_others)
            or not _same_everywhere(batches_per_epoch(loader))
        ):
            return loader
        return _Watched(loader, self)


class _Watched:
    """A loader that leaves between two batches. All else is the loader's own."""

    def __init__(self, loader: Iterable[Any], interruption: Interruption) -> None:
        self._loader = loader
        self._interruption = interruption

    def __iter__(self) -> Iterator[Any]:
        with self._interruption.loading():
            batches = iter(self._loader)
        left = batches_per_epoch(self._loader)
        try:
            # After the last batch the evaluation is as good as done.
            while left is None or left > 0:
                self._interruption.leave_if_due()
                with self._interruption.loading():
                    try:
                        with self._interruption.waiting():
                            batch = next(batches)
                    except StopIteration:
                        return
                left = None if left is None else left - 1
                yield batch
        except Interrupted:
            end_workers(batches)
            raise
        # What the loader does at its end, and batches beyond the length that it gave.
        yield from batches

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _same_everywhere(length: int | None) -> bool:
    """Whether ranks can count on each other to have as many batches. Always with one rank."""
    return not ranks.can_agree() or (ranks.same_on_all_ranks(-1 if length is None else length) and length is not None)


def _first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]
