"""Work side by side: what it moved is told, whenever its threads end, and all that failed is named."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from ckptmgr.core.errors import AccessDeniedError, BackendTimeoutError, CkptmgrError, SourceChangedError
from ckptmgr.run.together import Moved, together


def test_what_moved_is_told_although_all_had_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that end before anybody looks at them have moved bytes nevertheless."""
    told: list[int] = []
    moved = Moved(told.append)
    start = threading.Thread.start

    def start_and_end(thread: threading.Thread) -> None:
        start(thread)
        thread.join(60)

    monkeypatch.setattr(threading.Thread, "start", start_and_end)
    together([(1, partial(moved.relative_update, 5))] * 4, moved, most=4)
    assert sum(told) == 20


class Work:
    """Pieces that are done or fail, by their number; `begun` are those that were."""

    def __init__(self, size: int, failures: dict[int, Exception]) -> None:
        self.begun: list[int] = []
        self.failures = failures
        self.pieces: list[tuple[int, Callable[[], object]]] = [(1, partial(self.do, number)) for number in range(size)]

    def do(self, number: int) -> None:
        self.begun.append(number)
        if number in self.failures:
            raise self.failures[number]

    def failing(self, *, most: int, to_the_end: bool = True) -> Exception:
        with pytest.raises((CkptmgrError, TypeError)) as caught:
            together(self.pieces, Moved(None), most=most, to_the_end=to_the_end)
        return caught.value


@pytest.mark.parametrize("most", [1, 4])
def test_all_that_failed_are_named(most: int) -> None:
    """The others are done; the error is of the kind that does not pass by itself, and has all of them."""
    failures: dict[int, Exception] = {
        5: AccessDeniedError("five", hint="ask", operation="put"),
        30: SourceChangedError("thirty", path="x"),
        49: BackendTimeoutError("forty-nine", operation="put"),
    }
    work = Work(50, failures)
    error = work.failing(most=most)
    assert sorted(work.begun) == list(range(50))
    assert type(error) is AccessDeniedError
    assert sorted(each.message for each in error.__dict__["errors"]) == ["five", "forty-nine", "thirty"]
    assert all(text in str(error) for text in ("3 failed: ", "five", "forty-nine", "thirty", " - ask"))


def test_those_that_say_the_same_are_named_by_their_keys() -> None:
    """A cause is said once, and how long each was tried does not make it another one; other words keep their own."""
    failures: dict[int, Exception] = {
        number: AccessDeniedError(
            f"cannot write bkt/run/f{number}: no (gave up after 6 tries in {number} s)", key=f"bkt/run/f{number}"
        )
        for number in (5, 15, 25)
    }
    failures[35] = SourceChangedError("f35 is gone", key="/here/f35")
    (line,) = Work(50, failures).failing(most=1).lines  # type: ignore[attr-defined]
    assert (
        line == "4 failed: cannot write bkt/run/f5: no (gave up after 6 tries in 5 s); likewise f15, f25; f35 is gone"
    )


def test_a_single_failure_is_raised_as_it_is() -> None:
    """And without `to_the_end` it ends the work."""
    error = AccessDeniedError("no")
    assert Work(3, {1: error}).failing(most=1) is error
    work = Work(3, {1: error})
    assert work.failing(most=1, to_the_end=False) is error
    assert work.begun == [0, 1]


@pytest.mark.parametrize(
    ("kind", "asked"),
    [(AccessDeniedError, 3), (BackendTimeoutError, 1)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_store_that_takes_nothing_is_left_in_peace(kind: type[CkptmgrError], asked: int) -> None:
    """Three refusals, or one that was tried for long, with nothing that goes well in between."""
    work = Work(50, {number: kind(str(number)) for number in range(50)})
    work.failing(most=1)
    assert len(work.begun) == asked
    # After something did go well it begins anew.
    work = Work(50, {number: kind(str(number)) for number in range(50) if number != 0})
    work.failing(most=1)
    assert len(work.begun) == 1 + asked


def test_a_bug_ends_it() -> None:
    """What is not an error of ours is raised before all that are."""
    work = Work(9, {1: AccessDeniedError("no"), 2: TypeError("a bug")})
    assert isinstance(work.failing(most=1), TypeError)
    assert work.begun == [0, 1, 2]
