"""The commit protocol in every order and with every fault (I1-I6), and proof that the checks would notice a wrong protocol."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest

from ckptmgr.core.claims import claim
from ckptmgr.core.errors import ObjectExistsError, TransientBackendError
from ckptmgr.core.layout import ATTEMPTS, MANIFESTS, Stem, data_key, data_prefix, manifest_key
from ckptmgr.core.manifest import encode_manifest
from ckptmgr.core.operations import Create, Delete, IsStored, ListKeys, Missing, Operation, PutFile, Read, Replace
from ckptmgr.core.protocol import replicate
from ckptmgr.core.records import AttemptRecord
from ckptmgr.testing.explorer import Actor, Process, Rewrite, Scenario, explore, replay, rewritten, walk
from ckptmgr.testing.explorer_actors import (
    SAVE,
    SHARING,
    altered,
    claimer,
    claiming,
    collector,
    committed,
    copier,
    pruner,
    reader,
    repairer,
    resumer,
    scenario,
    writer,
)
from ckptmgr.testing.explorer_checks import Journal, Store

Steps = Generator[Operation, Any, Any]
UPLOADED = {"store": committed(SAVE), "journal": Journal(stem=SAVE.stem, state="uploaded")}
ZOMBIE = resumer("zombie", after=None)
SHARED = committed(SHARING)
UNSHARE = pruner(stem=SHARING.stem)

# Each with the schedules it is known to cover at least, so that a scenario that explores nothing does not pass.
EXHAUSTIVE = [
    (scenario("a writer alone", writer(), faults=3), 700),
    (scenario("a writer, then its next incarnation", writer(), resumer(), faults=3), 9_000),
    (scenario("the same, long after", writer(), resumer(stale=True), faults=2), 2_000),
    (scenario("long after, and gc", writer(), resumer(stale=True), collector(), faults=1), 900_000),
    (scenario("long after, and prune", writer(), resumer(stale=True), pruner(), faults=1), 10_000),
    (scenario("a writer and gc", writer(), collector(), faults=2), 40_000_000),
    (scenario("a retrying writer and gc", writer(retries=1), collector(), faults=2), 80_000_000),
    (scenario("a writer and prune", writer(), pruner(), faults=2), 7_000),
    (scenario("a retrying writer and prune", writer(retries=1), pruner(), faults=3), 500_000),
    (scenario("two incarnations and gc", writer(), resumer(), collector(), faults=1), 900_000),
    (scenario("two incarnations and prune", writer(), resumer(), pruner(), faults=2), 69_000),
    (scenario("a writer and a zombie", writer(), ZOMBIE, faults=1), 390_000),
    (scenario("a zombie and prune", writer(), ZOMBIE, pruner(), faults=0), 300_000),
    (scenario("a zombie and gc", writer(), ZOMBIE, collector(), faults=0, duplicates=2), 1_000_000),
    (scenario("a writer and a reader", writer(), reader(), faults=2), 30_000),
    (scenario("a writer, prune and a reader", writer(), pruner(), reader(), faults=1), 230_000),
    (scenario("prune and a reader", pruner(), reader(), faults=2, **UPLOADED), 9_000),
    (scenario("two prunes and a reader", pruner(), pruner("prune2"), reader(), faults=1, **UPLOADED), 5_000_000),
    (scenario("a repair and prune", repairer(), pruner(), faults=2, **UPLOADED), 1_000),
    (scenario("a repair, prune and a reader", repairer(), pruner(), reader(), faults=1, **UPLOADED), 10_000),
    (scenario("two repairs and prune", repairer(), repairer("other"), pruner(), faults=1, **UPLOADED), 10_000),
    (scenario("a copying writer, then its next incarnation", copier(), resumer(), faults=2, store=SHARED), 1_000),
    (scenario("a copying writer and the pruning of its source", copier(), UNSHARE, faults=2, store=SHARED), 5_000),
    (scenario("a copying writer, that pruning and gc", copier(), UNSHARE, collector(), store=SHARED), 5_000),
    (claiming("two claims", claimer("x", create_only=True), claimer("y", create_only=True), faults=3), 4_000_000),
    (claiming("three claims", *(claimer(name, create_only=True) for name in "xyz")), 15_000),
    (
        claiming("claims, retried", *(claimer(name, create_only=True, retries=1) for name in "xy"), faults=2),
        10_000,
    ),
    (claiming("two bids", claimer("x", create_only=False), claimer("y", create_only=False), faults=1), 14_000_000),
    (claiming("bids, retried", *(claimer(n, create_only=False, retries=1) for n in "xy"), faults=1), 300_000_000),
    (claiming("three bids", *(claimer(name, create_only=False, tries=1) for name in "xyz")), 14_000_000),
]

EVERYTHING = scenario(
    "everybody at once",
    writer(retries=1),
    resumer(),
    resumer("zombie", after=None),
    pruner(stem=None),
    collector(stem=None),
    reader(),
    reader("reader2"),
    faults=4,
    duplicates=3,
)


@pytest.mark.parametrize(("world", "at_least"), EXHAUSTIVE, ids=lambda value: getattr(value, "name", ""))
def test_every_schedule_keeps_the_invariants(world: Scenario, at_least: int) -> None:
    """No order of moves and no fault within the budget breaks an invariant."""
    result = explore(world)
    assert result.violation is None, str(result.violation)
    assert result.schedules >= at_least


@pytest.mark.parametrize("seed", range(4))
def test_random_schedules_of_everybody_keep_the_invariants(seed: int) -> None:
    """10,000 schedules, each run from its beginning to its end, with all actors and up to four faults."""
    result = walk(EVERYTHING, seed=seed, walks=2_500)
    assert result.violation is None, f"seed {seed}: {result.violation}"
    assert result.schedules == 2_500
    assert result.moves > 2_500 * 15


def test_a_schedule_can_be_replayed_from_its_text() -> None:
    """A path tells everything: it runs again, move by move, and ends as it did."""
    lines = replay(scenario("replayed", writer(), faults=1), "writer writer:crash")
    assert lines == [
        f"writer      PutFile {data_key(SAVE.stem, 'a')}",
        "writer      Record confirmed a  -> crash",
    ]


# --- known-bad protocols: the checks must be able to fail -----------------------------------------------------------------


def wrong(actor: Actor, make: Callable[[], Rewrite]) -> Actor:
    """`actor` with a fresh `make()` between it and the store."""
    return altered(actor, lambda process: rewritten(process, make()))


def caught(world: Scenario, message: str, path: str) -> None:
    """Exploring `world` finds that it breaks the invariant of `message`; `path` is a counter-example, and what was found is no longer."""
    violation = explore(world).violation
    assert violation is not None, f"{world.name}: nothing was noticed"
    assert message in violation.message, str(violation)
    assert replay(world, violation.path)[-1] == f"broken: {violation.message}"
    assert len(violation.path.split()) <= len(path.split()), str(violation)
    by_hand = replay(world, path)
    assert by_hand[-1].startswith("broken: "), "\n".join(by_hand)
    assert message in by_hand[-1]


def is_manifest(operation: Operation) -> bool:
    return getattr(operation, "key", "").startswith(MANIFESTS)


def plain_put() -> Rewrite:
    def rewrite(operation: Operation) -> Steps:
        if isinstance(operation, Create):
            operation = Replace(operation.key, operation.body)
        return (yield operation)

    return rewrite


def head_before_commit() -> Rewrite:
    """Look whether all data is still there, then write the manifest without a condition."""

    def rewrite(operation: Operation) -> Steps:
        if not isinstance(operation, Create):
            return (yield operation)
        for entry in SAVE.files:
            if not (yield IsStored(data_key(SAVE.stem, entry.path), entry)):
                raise TransientBackendError("the data vanished: give up")
        return (yield Replace(operation.key, operation.body))

    return rewrite


def without_claim() -> Rewrite:
    """gc that only looks for a manifest before it deletes."""

    def rewrite(operation: Operation) -> Steps:
        if not isinstance(operation, Create):
            return (yield operation)
        if (yield Read(operation.key)) is not None:
            raise ObjectExistsError("committed")
        return None

    return rewrite


def test_a_manifest_before_its_data_is_caught() -> None:
    """I2: the commit comes last."""

    def manifest_first() -> Rewrite:
        is_written = False

        def rewrite(operation: Operation) -> Steps:
            nonlocal is_written
            if isinstance(operation, PutFile) and not is_written:
                yield Create(manifest_key(SAVE.stem), encode_manifest(SAVE))
                is_written = True
            return None if isinstance(operation, Create) else (yield operation)

        return rewrite

    caught(scenario("manifest first", wrong(writer(), manifest_first)), "I1: ", "writer")


def test_a_commit_that_may_overwrite_is_caught() -> None:
    """I3: without create-only, a commit goes over gc's claim and names data that is gone."""
    world = scenario("plain put", wrong(writer(), plain_put), collector(), faults=0)
    caught(world, "its closing record was overwritten", "gc writer writer writer writer writer writer")


def test_a_retried_commit_that_may_overwrite_is_caught() -> None:
    """I3: written but unanswered, pruned, written again: what was removed is back, without data."""
    world = scenario("plain put, retried", wrong(writer(retries=1), plain_put), pruner(), faults=1)
    caught(
        world, "its closing record was overwritten", "writer writer writer writer writer writer:lost prune prune writer"
    )


def test_looking_for_the_data_before_the_commit_does_not_help() -> None:
    """I3: between the look and the commit gc deletes; only a claim on the manifest's key settles it."""
    world = scenario("look, then put", wrong(writer(), head_before_commit), wrong(collector(), without_claim))
    path = "writer writer writer writer writer writer writer gc gc gc writer"
    caught(world, f"I1: {SAVE.stem} is committed, but its file 'a' is missing", path)


def test_gc_that_does_not_claim_is_caught() -> None:
    """A create-only commit alone does not stop gc from deleting the data of one that is about to be."""
    world = scenario("gc without claim", writer(), wrong(collector(), without_claim))
    caught(world, "I1: ", "writer writer writer writer writer gc gc gc writer")


def test_a_tombstone_beside_the_manifest_is_caught() -> None:
    """Created but unanswered, pruned, created again: in the manifest's own place the record would have made the retry lose."""

    def tombstone(stem: Stem) -> str:
        return f"tombstones/{stem}.json"

    def beside() -> Rewrite:
        def rewrite(operation: Operation) -> Steps:
            if isinstance(operation, Replace):
                yield Replace(tombstone(SAVE.stem), operation.body)
                operation = Delete(operation.key)
            return (yield operation)

        return rewrite

    def looks_first() -> Rewrite:
        def rewrite(operation: Operation) -> Steps:
            if isinstance(operation, Create) and (yield Read(tombstone(SAVE.stem))) is not None:
                raise TransientBackendError("pruned: give up")
            return (yield operation)

        return rewrite

    def is_pruned(store: Store, stem: Stem) -> bool:
        return tombstone(stem) in store

    actors = wrong(writer(retries=1), looks_first), wrong(pruner(), beside)
    world = scenario("tombstone", *actors, faults=1, is_pruned=is_pruned)
    lost = "writer writer writer writer writer writer writer:lost"
    caught(world, "I1: ", f"{lost} prune prune prune prune prune writer")


def test_deleting_data_before_the_record_is_closed_is_caught() -> None:
    """Prune closes first: a kill in between would leave a checkpoint that looks complete."""

    def data_first() -> Rewrite:
        def rewrite(operation: Operation) -> Steps:
            if isinstance(operation, Replace):
                for key in (yield ListKeys(data_prefix(SAVE.stem))):
                    yield Delete(key)
            return (yield operation)

        return rewrite

    caught(scenario("data first", wrong(pruner(), data_first), **UPLOADED), "I1: ", "prune prune prune")


def test_taking_a_refused_commit_for_our_own_is_caught() -> None:
    """I3: a refusal may be gc's claim; who does not read it back tells the trainer that its checkpoint is safe."""

    def refused_is_done() -> Rewrite:
        def rewrite(operation: Operation) -> Steps:
            try:
                return (yield operation)
            except ObjectExistsError:
                return None

        return rewrite

    world = scenario("refused is done", wrong(writer(), refused_is_done), collector())
    caught(world, "I6: the journal says uploaded", "gc writer writer writer writer writer writer writer")


def test_taking_an_unanswered_commit_for_done_is_caught() -> None:
    """I3: silence is not success."""

    def silent_is_done() -> Rewrite:
        def rewrite(operation: Operation) -> Steps:
            try:
                return (yield operation)
            except TransientBackendError:
                return [] if isinstance(operation, Missing) else None

        return rewrite

    world = scenario("silent is done", wrong(writer(), silent_is_done), faults=1)
    caught(world, "I6: the journal says uploaded", "writer writer writer writer writer writer:rejected writer")


def test_keeping_what_was_confirmed_under_another_name_is_caught() -> None:
    """After gc took the name, everything is sent again; here without the look before the commit, which would notice."""

    def sends_once() -> Rewrite:
        sent: set[str] = set()

        def rewrite(operation: Operation) -> Steps:
            if isinstance(operation, Missing):
                return []
            if isinstance(operation, PutFile):
                if operation.entry.path in sent:
                    return None
                sent.add(operation.entry.path)
            return (yield operation)

        return rewrite

    world = scenario("sends once", wrong(writer(), sends_once), collector())
    path = "gc writer writer writer writer writer writer writer writer writer writer"
    caught(world, "I1: ", path)


def test_giving_up_an_old_name_without_closing_it_is_caught() -> None:
    """A commit that was on its way when the first process died arrives beside the one under the new name."""

    def renames_only(journal: Journal | None) -> Process | None:
        if journal is None or journal.state != "pending":
            return None
        return replicate(SAVE.renamed(journal.stem.renamed("0badbad0")), new_nonce=lambda: "1badbad0")

    late = Actor(name="second", start=renames_only, waits=True, after="writer")
    late_one = "writer writer writer writer writer writer:dies"
    path = f"{late_one} second:start second second second second second second second late:0"
    caught(scenario("renames only", writer(), late, faults=1), "the one save is committed 2 times", path)


def test_a_reader_that_does_not_look_again_is_caught() -> None:
    """What is pruned during a download is removed, not damaged: an alarm for nothing, or a fall-back that is refused."""

    def looks_once() -> Rewrite:
        seen: dict[str, bytes | None] = {}

        def rewrite(operation: Operation) -> Steps:
            if isinstance(operation, Read) and is_manifest(operation):
                if operation.key not in seen:
                    seen[operation.key] = yield operation
                return seen[operation.key]
            return (yield operation)

        return rewrite

    world = scenario("looks once", pruner(), wrong(reader(), looks_once), **UPLOADED)
    caught(world, f"a reader calls {SAVE.stem} damaged", "reader reader prune prune prune prune reader")


def test_two_winners_of_a_plain_claim_are_caught() -> None:
    """Attempts are claimed create-only; a plain write lets both win."""
    actors = (wrong(claimer(name, create_only=True), plain_put) for name in "xy")
    caught(claiming("plain claims", *actors), "attempts/000001.json was overwritten", "x x y y x y")


def test_a_bid_that_wins_by_its_name_is_caught() -> None:
    """Without create-only, first in LIST order is not enough: a bid with an earlier name may come after one that has won alone."""

    def first_wins() -> Rewrite:
        bid = ""

        def rewrite(operation: Operation) -> Steps:
            nonlocal bid
            answer = yield operation
            if isinstance(operation, Replace):
                bid = operation.key
            if isinstance(operation, ListKeys) and operation.prefix == ATTEMPTS and bid and min(answer) == bid:
                return [bid]
            return answer

        return rewrite

    def bidder(name: str, nonce: str) -> Actor:
        def make(number: int, previous: int | None) -> AttemptRecord:
            return AttemptRecord(number=number, how="auto", claim_id=name)

        return wrong(
            Actor(name=name, start=lambda journal: claim(make, create_only=False, new_nonce=lambda: nonce)), first_wins
        )

    world = claiming("first wins", bidder("x", "22222222"), bidder("y", "11111111"))
    caught(world, "two processes both claimed attempt 1", "x x y y x x y y")


def test_a_repair_leaves_nothing_under_a_name_that_was_pruned_meanwhile() -> None:
    """It sends, prune has listed the data already, and whoever is last takes away what was sent: no order leaves any of it."""
    seen = set()

    def then_looks(process: Process) -> Process:
        yield from process
        seen.add(tuple((yield ListKeys(data_prefix(SAVE.stem)))))

    last = Actor(
        name="last",
        start=lambda journal: then_looks(repairer().start(journal) or pytest.fail("does not start")),
    )
    assert explore(scenario("repair, then a look", last, pruner(), **UPLOADED)).violation is None
    whole = tuple(data_key(SAVE.stem, entry.path) for entry in SAVE.files)
    # Whole: prune had not begun, or not deleted yet.
    assert () in seen
    assert seen <= {(), whole, whole[1:]}
