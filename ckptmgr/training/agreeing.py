"""What each rank does for itself, and all of them have done: a rank that fails does not fail alone."""

from __future__ import annotations

import logging
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.training.ranks import any_rank, can_agree, gather_bytes, rank

logger = logging.getLogger(__name__)
T = TypeVar("T")
# Process groups give up a collective after minutes, and a download takes longer.
_ROUND_S = 10.0


@dataclass(frozen=True, slots=True)
class _Done(Generic[T]):
    result: T


@dataclass(frozen=True, slots=True)
class _Failed:
    error: BaseException


def on_all_ranks(part: Callable[[], T], *, aside: bool = False) -> list[T]:
    """What `part` returns on each rank, in the order of ranks. When it raises on one, all raise: no rank goes on, or waits, without the others.

    Some collectives if `can_agree`, as `any_rank`; else `part` is called, and that is all. What it returns must pickle. Of several errors the one of
    the lowest rank is raised; another rank's has its number in front. An exception that does not pickle is a CkptmgrError on the other ranks.

    Args:
        aside: `part` may take long, as a download does. It runs in a thread, and this one tells the others now and then that it still does.
            Must be the same on all ranks.
    """
    if not can_agree():
        return [part()]
    mine = _aside(part) if aside else _attempt(part)
    everyones: list[_Done[T] | _Failed] = [pickle.loads(each) for each in gather_bytes(_encode(mine))]
    for number, outcome in enumerate(everyones):
        if isinstance(outcome, _Failed):
            _raise(outcome.error, number, mine)
    return [outcome.result for outcome in everyones if isinstance(outcome, _Done)]


def with_all_ranks(part: Callable[[], T]) -> T:
    """As `on_all_ranks`, for a `part` whose result is this rank's own, and need not pickle."""
    mine: list[T] = []
    on_all_ranks(lambda: mine.append(part()))
    return mine[0]


def _raise(error: BaseException, number: int, mine: _Done[T] | _Failed) -> None:
    """Raise `error` of rank `number`, as it is, or as it came from there."""
    own = mine.error if isinstance(mine, _Failed) else None
    if own is not None and number == rank():
        error = own
    elif own is not None:
        logger.error("rank %d failed as well: %s", rank(), own)
    if number and isinstance(error, CkptmgrError):
        error.message = f"rank {number}: {error.message}"
    elif number != rank() and not isinstance(error, CkptmgrError):
        logger.error("rank %d failed: %r", number, error)
    raise error


def _attempt(part: Callable[[], T]) -> _Done[T] | _Failed:
    try:
        return _Done(part())
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
        return _Failed(error)


def _aside(part: Callable[[], T]) -> _Done[T] | _Failed:
    """As `_attempt`, in a thread, with a collective for each round that this or another rank takes longer."""
    found: list[_Done[T] | _Failed] = []
    ended = threading.Event()

    def work() -> None:
        try:
            found.append(_attempt(part))
        except BaseException as error:  # noqa: BLE001 - SystemExit: it ends a thread, and nobody would know
            found.append(_Failed(error))
        finally:
            ended.set()

    # A daemon: Ctrl-C must end a process that waits for a store.
    threading.Thread(target=work, name="ckptmgr-aside", daemon=True).start()
    while True:
        has_ended = ended.wait(_ROUND_S)
        if not any_rank(not has_ended):
            return found[0]


def _encode(outcome: _Done[T] | _Failed) -> bytes:
    if isinstance(outcome, _Done):
        return pickle.dumps(outcome)
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)
    except Exception:  # noqa: BLE001 - whatever a foreign exception's pickling raises
        return pickle.dumps(_Failed(CkptmgrError(f"{type(outcome.error).__name__}: {outcome.error}")))
    return data
