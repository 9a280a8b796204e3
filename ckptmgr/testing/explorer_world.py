"""The simulated world of `ckptmgr.testing.explorer`: actors, one store, one journal, the moves that are possible and what they do."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from ckptmgr.core.errors import CkptmgrError, ObjectExistsError, TransientBackendError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.operations import (
    CopyFile,
    Create,
    Delete,
    Fetch,
    IsStored,
    ListKeys,
    Missing,
    Operation,
    PutFile,
    Read,
    Record,
    Replace,
    one_by_one,
)
from ckptmgr.testing.explorer_checks import Broken, Checks, Journal, Store

Process: TypeAlias = Generator[Operation, Any, Any]

_FAULTS_OF_WRITES = ("rejected", "lost", "late", "crash", "dies")
_FAULTS_OF_READS = ("rejected", "crash")
_FAULTS_OF_RECORDS = ("crash",)
_WRITES = (PutFile, CopyFile, Create, Replace, Delete)


@dataclass(frozen=True, slots=True, kw_only=True)
class Actor:
    """A process in the simulated world.

    Attributes:
        name: one word, used in paths.
        start: makes its generator from the journal as it is when the actor starts; None if there is nothing to do. It must be
            deterministic: it is called again for every replay.
        retries: how often its driver repeats an unanswered operation before it throws `TransientBackendError` into the generator.
        waits: whether starting is a move of its own, at any time, so that the journal of that moment is read; else it starts at once.
        after: with `waits`: it starts only once the actor of this name has ended or crashed; None also while all others run.
    """

    name: str
    start: Callable[[Journal | None], Process | None]
    retries: int = 0
    waits: bool = False
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What is explored.

    Attributes:
        actors: the processes, with different names.
        faults: how many may happen in one schedule.
        store: what the store holds at the beginning.
        saves: what the writers save; the checks know from it which bytes are right.
        journal: what the local journal says at the beginning; None if nobody uploads.
        duplicates: how many commits of the one save are allowed at the end. More than 1 only where two incarnations run at the
            same time and gc takes the name from both: each goes on under a name of its own, and both are whole.
        may_fail: errors that an actor may end with besides `TransientBackendError` after a fault.
        is_pruned: for variants that do not close the manifest: whether they count a checkpoint as removed on purpose.
    """

    name: str
    actors: tuple[Actor, ...]
    saves: tuple[Manifest, ...] = ()
    journal: Journal | None = None
    faults: int = 0
    store: Mapping[str, bytes] = field(default_factory=dict)
    duplicates: int = 1
    may_fail: tuple[type[Exception], ...] = ()
    is_pruned: Callable[[Store, Stem], bool] | None = None


class Move(NamedTuple):
    """`who` is an actor, or `late` for the delivery of a late operation; `how` is `ok`, a fault, `start`, or the late one's place."""

    who: str
    how: str

    def __str__(self) -> str:
        return self.who if self.how == "ok" else f"{self.who}:{self.how}"


# --- actors, as far as their answers have brought them --------------------------------------------------------------------

_SILENT = ("silent", None)
_EXISTS = ("exists", None)
_Answer: TypeAlias = tuple[str, Any]


class _Node:
    """One generator after one sequence of answers: its next operation, or how it ended."""

    __slots__ = ("answers", "children", "error", "number", "operation", "outcome", "root")

    def __init__(self, root: Callable[[], Process], answers: tuple[_Answer, ...], number: int) -> None:
        self.root = root
        self.answers = answers
        self.number = number
        self.children: dict[_Answer, _Node] = {}
        self.operation: Operation | None = None
        self.outcome: Any = None
        self.error: Exception | None = None
        process = one_by_one(root())
        try:
            self.operation = next(process)
            for kind, value in answers:
                self.operation = None
                if kind == "value":
                    self.operation = process.send(list(value) if isinstance(value, tuple) else value)
                else:
                    self.operation = process.throw(_error(kind))
        except StopIteration as end:
            self.outcome = end.value
        except Exception as error:  # noqa: BLE001 what a generator raises is its outcome, and judged as such
            self.error = error


def _error(kind: str) -> CkptmgrError:
    if kind == "exists":
        return ObjectExistsError("simulated: the key exists", hint="")
    return TransientBackendError("simulated: no answer", hint="try again")


class _Seat(NamedTuple):
    """Where an actor is: the number of its node, or `_WAITING`, or `_CRASHED`; tries of its operation so far; what it saw at its start."""

    node: int
    tries: int = 0
    note: int = -1


_WAITING = -1
_CRASHED = -2


class State(NamedTuple):
    """All of the world, as numbers of interned values: hashable, small, and equal only if nothing that follows can differ."""

    store: int
    journal: int
    seats: tuple[_Seat, ...]
    late: tuple[int, ...]
    faults: int


class World:
    """The moves of a scenario and their effects."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.checks = Checks(saves=scenario.saves, duplicates=scenario.duplicates, is_pruned=scenario.is_pruned)
        self.places = {actor.name: place for place, actor in enumerate(scenario.actors)}
        self.nodes: list[_Node] = []
        self.stores: list[dict[str, bytes]] = []
        self.journals: list[Journal | None] = []
        self._store_numbers: dict[frozenset[tuple[str, bytes]], int] = {}
        self._journal_numbers: dict[Journal | None, int] = {}
        self._roots: dict[tuple[int, int], _Node | None] = {}
        self._results: dict[tuple[int, int], tuple[int, _Answer]] = {}
        self._checked: set[tuple[int, int]] = set()

    def initial(self) -> State:
        journal = self._journal_number(self.scenario.journal)
        seats = [
            _Seat(_WAITING) if actor.waits else self._seat_at(place, journal)
            for place, actor in enumerate(self.scenario.actors)
        ]
        return State(self._store_number(dict(self.scenario.store)), journal, tuple(seats), (), self.scenario.faults)

    def moves(self, state: State) -> list[Move]:
        moves: list[Move] = []
        for actor, seat in zip(self.scenario.actors, state.seats, strict=True):
            if seat.node == _WAITING:
                if actor.after is None or self._has_ended(state.seats[self.places[actor.after]]):
                    moves.append(Move(actor.name, "start"))
                continue
            operation = None if seat.node == _CRASHED else self.nodes[seat.node].operation
            if operation is None:
                continue
            moves.append(Move(actor.name, "ok"))
            if state.faults:
                moves.extend(Move(actor.name, fault) for fault in self._faults_of(operation))
        moves.extend(Move("late", str(place)) for place in range(len(state.late)))
        return moves

    def has_ended(self, state: State) -> bool:
        return all(self._has_ended(seat) for seat in state.seats)

    def step(self, state: State, move: Move) -> State:
        """The state after `move`.

        Raises:
            Broken: an invariant does not hold any more.
        """
        if move.who == "late":
            place = int(move.how)
            store, _ = self._perform(state.store, self.nodes[state.late[place]])
            state = state._replace(store=store, late=state.late[:place] + state.late[place + 1 :])
        else:
            state = self._act(state, self.places[move.who], move.how)
        if (state.store, state.journal) not in self._checked:
            self.checks.state(self.stores[state.store], self.journals[state.journal])
            self._checked.add((state.store, state.journal))
        if self.has_ended(state):
            self.checks.end(self.stores[state.store], self.journals[state.journal], self._outcomes(state))
        return state

    def describe(self, state: State, move: Move) -> str:
        if move.who == "late":
            return f"(late)      {show(self.nodes[state.late[int(move.how)]].operation)}"
        seat = state.seats[self.places[move.who]]
        what = "" if seat.node < 0 else show(self.nodes[seat.node].operation)
        return f"{move.who:<11} {what or 'starts'}" + ("" if move.how in ("ok", "start") else f"  -> {move.how}")

    def _act(self, state: State, place: int, how: str) -> State:
        seat = state.seats[place]
        if how == "start":
            return self._seated(state, place, self._seat_at(place, state.journal))
        if seat.note < 0:
            seat = seat._replace(note=state.journal)
        node = self.nodes[seat.node]
        if how != "ok":
            state = state._replace(faults=state.faults - 1)
        if how in ("late", "dies"):
            state = state._replace(late=tuple(sorted((*state.late, node.number))))
        if how in ("crash", "dies"):
            return self._seated(state, place, _Seat(_CRASHED))
        answer = _SILENT
        if how in ("ok", "lost"):
            if isinstance(node.operation, Record):
                journal = self.journals[state.journal]
                assert journal is not None, "an actor records progress in a scenario without a journal"
                state = state._replace(journal=self._journal_number(journal.after(node.operation)))
                answer = ("value", None)
            else:
                store, answer = self._perform(state.store, node)
                state = state._replace(store=store)
        if how == "ok" or seat.tries >= self.scenario.actors[place].retries:
            following = self._child(node, _SILENT if how != "ok" else answer)
            self._judge_end(state, place, following, seat.note)
            return self._seated(state, place, _Seat(following.number, 0, seat.note))
        return self._seated(state, place, seat._replace(tries=seat.tries + 1))

    def _perform(self, store: int, node: _Node) -> tuple[int, _Answer]:
        """The store after the operation of `node`, and its answer; remembered, for schedules come by here often."""
        known = self._results.get((store, node.number))
        if known is None:
            after, answer = perform(self.stores[store], node.operation)
            self.checks.transition(self.stores[store], after, node.operation)
            known = self._results[store, node.number] = self._store_number(after), answer
        return known

    def _judge_end(self, state: State, place: int, node: _Node, note: int) -> None:
        if node.operation is not None:
            return
        expected = isinstance(node.error, self.scenario.may_fail)
        expected |= isinstance(node.error, TransientBackendError) and state.faults < self.scenario.faults
        if node.error is not None and not expected:
            raise Broken(f"{self.scenario.actors[place].name} ended with {type(node.error).__name__}: {node.error}")
        if node.error is None:
            others = [o for i, o in enumerate(self._outcomes(state)) if i != place]
            self.checks.outcome(
                node.outcome, others, self.stores[state.store], self.journals[note] if note >= 0 else None
            )

    def _outcomes(self, state: State) -> list[Any]:
        """What each actor returned: None if it has not, or crashed, or failed."""
        return [self.nodes[seat.node].outcome if seat.node >= 0 else None for seat in state.seats]

    def _has_ended(self, seat: _Seat) -> bool:
        return seat.node == _CRASHED or (seat.node >= 0 and self.nodes[seat.node].operation is None)

    def _faults_of(self, operation: Operation) -> tuple[str, ...]:
        if isinstance(operation, Record):
            return _FAULTS_OF_RECORDS
        return _FAULTS_OF_WRITES if isinstance(operation, _WRITES) else _FAULTS_OF_READS

    def _seated(self, state: State, place: int, seat: _Seat) -> State:
        return state._replace(seats=(*state.seats[:place], seat, *state.seats[place + 1 :]))

    def _seat_at(self, place: int, journal: int) -> _Seat:
        key = (place, journal)
        if key not in self._roots:
            start, snapshot = self.scenario.actors[place].start, self.journals[journal]
            self._roots[key] = None if start(snapshot) is None else self._node(lambda: _started(start, snapshot), ())
        root = self._roots[key]
        return _Seat(_CRASHED if root is None else root.number)

    def _child(self, node: _Node, answer: _Answer) -> _Node:
        child = node.children.get(answer)
        if child is None:
            child = node.children[answer] = self._node(node.root, (*node.answers, answer))
        return child

    def _node(self, root: Callable[[], Process], answers: tuple[_Answer, ...]) -> _Node:
        self.nodes.append(_Node(root, answers, len(self.nodes)))
        return self.nodes[-1]

    def _store_number(self, store: dict[str, bytes]) -> int:
        number = self._store_numbers.setdefault(frozenset(store.items()), len(self.stores))
        if number == len(self.stores):
            self.stores.append(store)
        return number

    def _journal_number(self, journal: Journal | None) -> int:
        number = self._journal_numbers.setdefault(journal, len(self.journals))
        if number == len(self.journals):
            self.journals.append(journal)
        return number


def _started(start: Callable[[Journal | None], Process | None], journal: Journal | None) -> Process:
    process = start(journal)
    assert process is not None, "an actor must start the same way every time"
    return process


def perform(store: dict[str, bytes], operation: Operation | None) -> tuple[dict[str, bytes], _Answer]:
    """The store after one operation (the same object if nothing changed), and the answer."""
    match operation:
        case Read(key=key):
            return store, ("value", store.get(key))
        case ListKeys(prefix=prefix):
            return store, ("value", tuple(sorted(key for key in store if key.startswith(prefix + "/"))))
        case IsStored(key=key, entry=entry):
            return store, ("value", store.get(key) == entry.blake3.encode())
        case Missing(prefix=prefix, entries=entries):
            wanted = {entry.path: entry.blake3.encode() for entry in entries}
            return store, ("value", tuple(path for path in wanted if store.get(f"{prefix}/{path}") != wanted[path]))
        case Fetch(key=key, entry=entry):
            there = store.get(key)
            return store, (
                "value",
                "is missing" if there is None else None if there == entry.blake3.encode() else "differs",
            )
        case Create(key=key) if key in store:
            return store, _EXISTS
        case Create(key=key, body=body) | Replace(key=key, body=body):
            return {**store, key: body}, ("value", None)
        case PutFile(key=key, entry=entry):
            # An object stands for its content: the store holds the BLAKE3 of the bytes in place of the bytes.
            return {**store, key: entry.blake3.encode()}, ("value", None)
        case CopyFile(source=source, key=key, entry=entry):
            content = store.get(source)
            after = store if content is None else {**store, key: content}
            return after, ("value", content == entry.blake3.encode())
        case Delete(key=gone):
            return {key: body for key, body in store.items() if key != gone}, ("value", None)
    raise AssertionError(f"unknown operation {operation!r}")


def show(operation: Operation | None) -> str:
    if isinstance(operation, Record):
        return f"Record {operation.event} {operation.path or operation.stem}"
    where = getattr(operation, "key", None) or getattr(operation, "prefix", "")
    return f"{type(operation).__name__} {where}"
