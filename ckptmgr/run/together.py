"""Work on many files side by side, in threads, while the thread that asked for it tells progress and can be interrupted."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence

from ckptmgr.core.errors import CkptmgrError, TransientBackendError, in_one

#: Files at a time. Small ones wait for answers most of the time; each large one has several requests under way by itself.
SMALL_FILES = 12
LARGE_FILES = 2
#: What counts as large: more than one request moves it.
LARGE_BYTES = 32 << 20
# How often progress is told, and an interruption heard, in seconds.
_TICK_S = 0.2
# Whoever presses Ctrl-C does not wait for requests that nobody answers.
_INTERRUPTED_S = 2.0
# Of work that is done to the end, so many refusals with nothing that goes well meanwhile mean that there is no use.
_REFUSALS = 3


class EndedError(CkptmgrError):
    """This piece of work was ended because another one failed, or because the whole was interrupted."""


class Moved:
    """The part of an fsspec callback that backends use, for threads that move bytes and one that tells of them.

    Args:
        told: called with the number of bytes since the last call, also 0, by the thread that made this object; what it raises ends the work.
    """

    def __init__(self, told: Callable[[int], object] | None) -> None:
        self._told = told
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._news = 0
        self._ended = False

    def relative_update(self, count: int = 1) -> None:
        """`count` bytes were moved.

        Raises:
            EndedError: nobody wants the rest any more.
        """
        if threading.get_ident() == self._owner:
            self.tell(count)
            return
        if self._ended:
            raise EndedError("this transfer was ended")
        with self._lock:
            self._news += count

    def tell(self, count: int = 0) -> None:
        """Tell what has come together; for the thread that made this object."""
        with self._lock:
            news, self._news = self._news + count, 0
        if self._told is not None:
            self._told(news)

    def end(self) -> None:
        """Let whatever moves bytes in other threads raise EndedError at its next block."""
        self._ended = True


def together(
    work: Sequence[tuple[int, Callable[[], object]]], moved: Moved, *, most: int, to_the_end: bool = False
) -> None:
    """Do each piece of `work`, given with the bytes that it moves: small ones many at a time, large ones few, in the order given.

    Args:
        most: pieces at a time; 1 does one after the other, in this thread.
        to_the_end: where a piece fails with an error of ours, do the others nevertheless, as long as it looks as if they could go better.

    Returns when all threads have ended, but for those of an interrupted program.

    Raises:
        BaseException: the first that a piece, or the telling, raised; pieces that had not begun are not, the others end at their next block.
            With `to_the_end` one error of ours for all that failed, see `in_one`.
    """
    outcome = _Outcome(moved, to_the_end=to_the_end)
    if most < 2 or len(work) < 2:
        for _, call in work:
            if not outcome.is_over:
                outcome.do(call)
    else:
        crew = _Crew(work, moved, most, outcome)
        try:
            crew.wait()
        except BaseException as error:
            crew.end(patiently=not isinstance(error, KeyboardInterrupt))
            raise
    outcome.check()


class _Outcome:
    """How it goes with the pieces of one work. Safe from any thread.

    Attributes:
        is_over: nothing more is to be begun.
    """

    def __init__(self, moved: Moved, *, to_the_end: bool) -> None:
        self.is_over = False
        self._moved = moved
        self._to_the_end = to_the_end
        self._errors: list[BaseException] = []
        self._went_well = 0
        # Failures without anything that went well beside them, since something did.
        self._in_vain = 0
        self._lock = threading.Lock()

    def do(self, call: Callable[[], object]) -> None:
        """Do one piece; it does not raise."""
        before = self._went_well
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            with self._lock:
                self._failed(error, lonely=self._went_well == before)
        else:
            with self._lock:
                self._went_well += 1
                self._in_vain = 0

    def _failed(self, error: BaseException, *, lonely: bool) -> None:
        self._errors.append(error)
        if not self._to_the_end or not isinstance(error, CkptmgrError) or isinstance(error, EndedError):
            self.end()
            return
        self._in_vain += lonely
        # A store that was tried for so long, or that refuses whatever it is given, is not asked for each of a thousand files.
        most = 1 if isinstance(error, TransientBackendError) else _REFUSALS
        self.is_over |= self._in_vain >= most

    def end(self) -> None:
        """Begin nothing more, and let what is under way end at its next block."""
        self.is_over = True
        self._moved.end()

    def check(self) -> None:
        """Raise what has failed, if anything has."""
        ours = [error for error in self._errors if isinstance(error, CkptmgrError)]
        if not self._to_the_end or len(ours) < len(self._errors):
            for error in self._errors:
                if not self._to_the_end or error not in ours:
                    raise error
        elif ours:
            raise in_one([error for error in ours if not isinstance(error, EndedError)] or ours)


class _Crew:
    def __init__(
        self, work: Sequence[tuple[int, Callable[[], object]]], moved: Moved, most: int, outcome: _Outcome
    ) -> None:
        self._moved = moved
        self._outcome = outcome
        self._large = deque(call for size, call in work if size > LARGE_BYTES)
        self._small = deque(call for size, call in work if size <= LARGE_BYTES)
        # Those who move large files help with the small ones afterwards, never the other way round.
        jobs: list[tuple[deque[Callable[[], object]], ...]] = [(self._large, self._small)] * min(
            LARGE_FILES, len(self._large)
        )
        jobs += [(self._small,)] * min(SMALL_FILES, most, len(self._small))
        self._threads: list[threading.Thread] = []
        for queues in jobs:
            thread = threading.Thread(target=self._do, args=queues, name="ckptmgr-file")
            try:
                thread.start()
            except RuntimeError:  # at its end, some Pythons start none: then this one does it
                break
            self._threads.append(thread)
        if jobs and not self._threads:
            self._do(self._large, self._small)

    def _do(self, *queues: deque[Callable[[], object]]) -> None:
        for queue in queues:
            while not self._outcome.is_over:
                try:
                    call = queue.popleft()
                except IndexError:
                    break
                self._outcome.do(call)

    def wait(self) -> None:
        for thread in self._threads:
            while thread.is_alive():
                thread.join(_TICK_S)
                self._moved.tell()
        self._moved.tell()  # of those that had ended before they were looked at

    def end(self, *, patiently: bool) -> None:
        self._outcome.end()
        for thread in self._threads:
            with contextlib.suppress(KeyboardInterrupt):
                thread.join(None if patiently else _INTERRUPTED_S)
