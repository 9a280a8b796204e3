"""A model checker for the commit protocol: it runs the shipped generators of `ckptmgr.core.protocol` in every order, with every fault.

    result = explore(Scenario(name="commit against gc", actors=(writer(), collector()), faults=2))
    assert result.violation is None, result.violation

The world is a strongly consistent store, atomic per key, and one local journal. An `Actor` is a process that runs a protocol generator; one
move performs one operation of one actor. Every operation may also go wrong, within the scenario's budget of `faults`:

    crash       the actor dies; the operation never arrives                 dies        it dies while the operation is on its way
    rejected    the store does not answer and did nothing                   lost        the store did it, the answer is lost
    late        no answer; the effect comes at any later moment, or never, even after its actor has ended

After every move the invariants of `ckptmgr.core.protocol` are checked (`ckptmgr.testing.explorer_checks`). `explore` takes every schedule: generators cannot be copied,
but they are deterministic, so an actor is where its answers have brought it, and two schedules that lead to one state share what follows.
`walk` takes schedules at random, for worlds too large for that. A counter-example is a path of moves, as text; `replay` shows it in full.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from ckptmgr.core.errors import CkptmgrError
from ckptmgr.core.operations import Operation, one_by_one
from ckptmgr.testing.explorer_checks import Broken
from ckptmgr.testing.explorer_world import Actor, Move, Process, Scenario, World

__all__ = [
    "Actor",
    "Exploration",
    "Move",
    "Process",
    "Rewrite",
    "Scenario",
    "Violation",
    "explore",
    "replay",
    "rewritten",
    "walk",
]

Rewrite: TypeAlias = Callable[[Operation], Generator[Operation, Any, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken invariant, and the schedule that breaks it: `path` for `replay`, `trace` for reading."""

    message: str
    path: str
    trace: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((self.message, f"path: {self.path}", *self.trace))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exploration:
    """What an exploration covered.

    Attributes:
        schedules: complete schedules covered; those that run through a common state share the work from there on.
        states: distinct states seen (0 for random walks, which do not merge).
        moves: moves performed and checked.
        violation: the first one found (by `explore`: a shortest one), or None.
    """

    schedules: int
    states: int
    moves: int
    violation: Violation | None = None


# --- schedules ------------------------------------------------------------------------------------------------------------


def explore(scenario: Scenario, *, max_states: int = 2_000_000) -> Exploration:
    """Take every schedule of `scenario`, the short ones first; stop at the first violation.

    Raises:
        MemoryError: more than `max_states` states: make the scenario smaller, or `walk` it.
    """
    world = World(scenario)
    first = world.initial()
    numbers = {first: 0}
    came_from: list[tuple[int, Move] | None] = [None]
    following: list[list[int]] = []
    waiting = deque([first])
    moves = 0
    while waiting:
        state = waiting.popleft()
        here = len(following)
        following.append([])
        for move in world.moves(state):
            moves += 1
            try:
                after = world.step(state, move)
            except Broken as broken:
                path = [*_path_to(here, came_from), move]
                violation = Violation(message=str(broken), path=_text(path), trace=tuple(_trace(scenario, path)))
                return Exploration(schedules=1, states=len(numbers), moves=moves, violation=violation)
            number = numbers.setdefault(after, len(numbers))
            following[here].append(number)
            if number == len(came_from):
                came_from.append((here, move))
                waiting.append(after)
        if len(numbers) > max_states:
            raise MemoryError(f"{scenario.name}: more than {max_states} states; make it smaller or walk it")
    return Exploration(
        schedules=_count_schedules(following, [world.has_ended(state) for state in numbers]),
        states=len(numbers),
        moves=moves,
    )


def walk(scenario: Scenario, *, seed: int, walks: int) -> Exploration:
    """Take `walks` schedules of `scenario` at random; the same ones for the same `seed`. Stops at the first violation."""
    chance = random.Random(seed)
    world = World(scenario)
    moves = 0
    for done in range(walks):
        state = world.initial()
        path: list[Move] = []
        while options := world.moves(state):
            # Faults are rarer than progress, so that a walk gets somewhere before its budget is spent.
            calm = [move for move in options if move.how in ("ok", "start") or move.who == "late"]
            path.append(chance.choice(calm if calm and chance.random() < 0.8 else options))
            moves += 1
            try:
                state = world.step(state, path[-1])
            except Broken as broken:
                violation = Violation(message=str(broken), path=_text(path), trace=tuple(_trace(scenario, path)))
                return Exploration(schedules=done + 1, states=0, moves=moves, violation=violation)
    return Exploration(schedules=walks, states=0, moves=moves)


def replay(scenario: Scenario, path: str) -> list[str]:
    """The schedule `path` (as a violation prints it), one line a move; the last line says which invariant broke, if one did."""
    moves = []
    for text in path.split():
        who, _, how = text.partition(":")
        moves.append(Move(who, how or "ok"))
    return _trace(scenario, moves)


def rewritten(process: Process, rewrite: Rewrite) -> Process:
    """`process` with every operation replaced by what `rewrite` does instead: it yields operations and returns the answer.

    For variants of the protocol that are known to be wrong: a check that cannot fail proves nothing.
    """
    process = one_by_one(process)
    step: Callable[[], Operation] = partial(next, process)
    while True:
        try:
            operation = step()
        except StopIteration as end:
            return end.value
        try:
            answer = yield from rewrite(operation)
        except CkptmgrError as error:
            step = partial(process.throw, error)
        else:
            step = partial(process.send, answer)


def _trace(scenario: Scenario, path: Iterable[Move]) -> list[str]:
    world = World(scenario)
    state = world.initial()
    lines = []
    for move in path:
        lines.append(world.describe(state, move))
        try:
            state = world.step(state, move)
        except Broken as broken:
            return [*lines, f"broken: {broken}"]
    return lines


def _text(path: Iterable[Move]) -> str:
    return " ".join(map(str, path))


def _path_to(number: int, came_from: list[tuple[int, Move] | None]) -> list[Move]:
    path = []
    while (step := came_from[number]) is not None:
        number, move = step
        path.append(move)
    return path[::-1]


def _count_schedules(following: list[list[int]], ended: list[bool]) -> int:
    """How many schedules lead from state 0 to an end. Moves only go forward (histories grow, budgets shrink), so there is no cycle.

    A state in which all have ended is an end of a schedule, though late operations may still arrive: they also may never.
    """
    counts: list[int | None] = [None] * len(following)
    stack = [0]
    while stack:
        top = stack[-1]
        unknown = [child for child in following[top] if counts[child] is None]
        if unknown:
            stack.extend(unknown)
            continue
        counts[top] = int(ended[top]) + sum(counts[child] or 0 for child in following[top])
        stack.pop()
    return counts[0] or 0
