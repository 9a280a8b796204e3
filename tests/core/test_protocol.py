"""Single paths through the protocol's generators, operation by operation; every order of them is `test_protocol_explored.py`'s."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator
from typing import Any, TypeAlias

import pytest

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.claims import claim
from ckptmgr.core.errors import (
    AccessDeniedError,
    ConflictError,
    ManifestError,
    ObjectExistsError,
    SourceChangedError,
    TransientBackendError,
)
from ckptmgr.core.layout import ATTEMPTS, MANIFESTS, Stem, attempt_key, data_key, data_prefix, manifest_key
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest, encode_closing, encode_manifest
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
from ckptmgr.core.protocol import (
    SETTLE_TRIES,
    Committed,
    Dropped,
    Fetched,
    Unusable,
    collect,
    fetch,
    is_stale,
    prune,
    repair,
    replicate,
)
from ckptmgr.core.records import AttemptRecord, encode_attempt

STEM = Stem(1, 500, 1, "0badcafe")
A, B = (FileEntry.of(path, digest_bytes(path.encode())) for path in ("a", "sub/b"))
SAVE = Manifest(stem=STEM, run_uuid="run", files=(A, B))
KEY = manifest_key(STEM)
BODY = encode_manifest(SAVE)
AT = "2026-01-01T00:00:00Z"
PRUNED = encode_closing(ClosingRecord(stem=STEM, closed="pruned", closed_at=AT))
ABORTED = encode_closing(ClosingRecord(stem=STEM, closed="aborted", closed_at=AT))
SILENCE = TransientBackendError("no answer")
REFUSED = ObjectExistsError("exists")


Script: TypeAlias = tuple[tuple[Operation, Any], ...]


def run(process: Generator[Operation, Any, Any], *script: tuple[Operation, Any]) -> Any:
    """Expect exactly these operations, giving each its answer (an exception is thrown in); returns the outcome."""
    process = one_by_one(process)  # (of one that is one by one already, nothing changes)
    step: Callable[[], Operation] = lambda: next(process)
    for expected, answer in script:
        assert step() == expected
        if isinstance(answer, Exception):
            step = lambda answer=answer: process.throw(answer)  # type: ignore[misc]
        else:
            step = lambda answer=answer: process.send(answer)  # type: ignore[misc]
    with pytest.raises(StopIteration) as ended:
        pytest.fail(f"one more operation: {step()}")
    return ended.value.value


def upload(**options: Any) -> Generator[Operation, Any, Committed | Dropped]:
    return one_by_one(replicate(SAVE, new_nonce=lambda: "00000002", **options))


def put(entry: FileEntry, stem: Stem = STEM) -> PutFile:
    return PutFile(data_key(stem, entry.path), entry)


ALL_THERE: tuple[Operation, Any] = (Missing(data_prefix(STEM), SAVE.files), [])

CONFIRMED_A, CONFIRMED_B = Record("confirmed", STEM, "a"), Record("confirmed", STEM, "sub/b")


# --- commit ---------------------------------------------------------------------------------------------------------------


def test_data_then_manifest_then_the_local_record() -> None:
    """I2, I3, I6: the order of a commit, and nothing besides."""
    outcome = run(
        upload(),
        (put(A), None),
        (Record("confirmed", STEM, "a"), None),
        (put(B), None),
        (Record("confirmed", STEM, "sub/b"), None),
        ALL_THERE,
        (Create(KEY, BODY), None),
        (Record("uploaded", STEM), None),
    )
    assert outcome == Committed(STEM)


def test_a_resumed_upload_sends_only_what_is_missing() -> None:
    """What the journal confirmed, and is still there, is not sent again, nor what the store vouches for."""
    outcome = run(
        upload(confirmed=["a"], resumed=True),
        (Read(KEY), None),
        (IsStored(data_key(STEM, "sub/b"), B), True),
        (Record("confirmed", STEM, "sub/b"), None),
        ALL_THERE,
        (Create(KEY, BODY), None),
        (Record("uploaded", STEM), None),
    )
    assert outcome == Committed(STEM)


def test_a_commit_that_the_journal_missed_is_found_before_anything_is_sent() -> None:
    """Killed between commit and record: the next try reads its own manifest and is done."""
    outcome = run(upload(resumed=True), (Read(KEY), BODY), (Record("uploaded", STEM), None))
    assert outcome == Committed(STEM)


def test_a_checkpoint_that_was_pruned_meanwhile_is_dropped() -> None:
    """And recorded as such, not as uploaded: it cannot be restored from the store."""
    outcome = run(upload(resumed=True), (Read(KEY), PRUNED), (Record("dropped", STEM), None))
    assert outcome == Dropped(STEM)


def test_a_name_that_gc_took_is_given_up_and_everything_sent_again() -> None:
    """Nothing that was confirmed under the old name counts under the new one."""
    new = STEM.renamed("00000002")
    outcome = run(
        upload(confirmed=["a", "sub/b"], resumed=True),
        (Read(KEY), None),
        ALL_THERE,
        (Create(KEY, BODY), REFUSED),
        (Read(KEY), ABORTED),
        (Record("renamed", new), None),
        (put(A, new), None),
        (Record("confirmed", new, "a"), None),
        (put(B, new), None),
        (Record("confirmed", new, "sub/b"), None),
        (Missing(data_prefix(new), SAVE.files), []),
        (Create(manifest_key(new), encode_manifest(SAVE.renamed(new))), None),
        (Record("uploaded", new), None),
    )
    assert outcome == Committed(new)


def test_a_name_that_is_too_old_is_closed_before_it_is_given_up() -> None:
    """So that a commit that is still on its way loses."""
    process = upload(confirmed=["a", "sub/b"], resumed=True, stale_at=AT)
    assert process.send(None) == Create(KEY, ABORTED)
    assert process.send(None) == Record("renamed", STEM.renamed("00000002"))
    assert process.send(None) == put(A, STEM.renamed("00000002"))


@pytest.mark.parametrize(("found", "event", "outcome"), [(BODY, "uploaded", Committed), (PRUNED, "dropped", Dropped)])
def test_a_name_that_is_too_old_may_be_decided_already(found: bytes, event: Any, outcome: Any) -> None:
    """Committed, or pruned since, without the journal knowing: sending it again would bring it back, or make a second one."""
    script: Script = ((Create(KEY, ABORTED), REFUSED), (Read(KEY), found), (Record(event, STEM), None))
    assert run(upload(resumed=True, stale_at=AT), *script) == outcome(STEM)


def test_silence_is_settled_by_reading_back() -> None:
    """I3: unanswered and absent is tried again; found to be ours is done."""
    outcome = run(
        upload(confirmed=["a", "sub/b"]),
        ALL_THERE,
        (Create(KEY, BODY), SILENCE),
        (Read(KEY), None),
        (Create(KEY, BODY), SILENCE),
        (Read(KEY), BODY),
        (Record("uploaded", STEM), None),
    )
    assert outcome == Committed(STEM)


@pytest.mark.parametrize("answer", [SILENCE, REFUSED])
def test_a_store_that_never_settles_ends_the_try(answer: Exception) -> None:
    """After a bounded number of creates; the error is the store's own where it gave one."""
    process = upload(confirmed=["a", "sub/b"])
    assert process.send(None) == ALL_THERE[0]
    operation: Any = process.send(ALL_THERE[1])
    for _ in range(SETTLE_TRIES - 1):
        assert operation == Create(KEY, BODY)
        assert process.throw(answer) == Read(KEY)
        operation = process.send(None)
    assert process.throw(answer) == Read(KEY)
    with pytest.raises(TransientBackendError) as caught:
        process.send(None)
    assert (caught.value is SILENCE) == (answer is SILENCE)
    assert answer is SILENCE or caught.value.key == KEY


@pytest.mark.parametrize(
    "other",
    [
        Manifest(stem=STEM, run_uuid="run", files=(A,)),
        Manifest(stem=STEM, run_uuid="run", files=(A, FileEntry.of("sub/b", digest_bytes(b"other")))),
        Manifest(stem=STEM, run_uuid="another run", files=(A, B)),
    ],
    ids=["fewer files", "other bytes", "another run"],
)
def test_another_checkpoint_under_this_name_is_a_conflict(other: Manifest) -> None:
    """Never taken for ours, never overwritten."""
    process = upload(resumed=True)
    assert process.send(None) == Read(KEY)
    with pytest.raises(ConflictError, match="already committed") as caught:
        process.send(encode_manifest(other))
    assert caught.value.__dict__["key"] == KEY


@pytest.mark.parametrize("confirmed", [True, False], ids=["of an earlier try", "sent just now"])
def test_what_is_gone_by_the_commit_is_sent_again(confirmed: bool) -> None:
    """Somebody has cleaned up in between, or the store is another one, and empty: no manifest before all is there."""
    first = () if confirmed else ((put(A), None), (CONFIRMED_A, None), (put(B), None), (CONFIRMED_B, None))
    outcome = run(
        upload(confirmed=["a", "sub/b"] if confirmed else []),
        *first,
        (ALL_THERE[0], ["a"]),
        (Read(KEY), None),
        (put(A), None),
        (CONFIRMED_A, None),
        ALL_THERE,
        (Create(KEY, BODY), None),
        (Record("uploaded", STEM), None),
    )
    assert outcome == Committed(STEM)


def test_what_gc_has_taken_is_not_sent_again_under_its_name() -> None:
    """Its claim stands in the manifest's place: the rest goes under a new name."""
    process = upload(confirmed=["a", "sub/b"])
    assert process.send(None) == ALL_THERE[0]
    assert process.send(["a", "sub/b"]) == Read(KEY)
    assert process.send(ABORTED) == Record("renamed", STEM.renamed("00000002"))


def test_what_vanishes_each_time_ends_the_try() -> None:
    """No manifest, and an error that says what; the journal keeps the upload for later."""
    again: Script = ((ALL_THERE[0], ["a"]), (Read(KEY), None), (put(A), None), (CONFIRMED_A, None))
    with pytest.raises(TransientBackendError, match="a vanished from the store each time"):
        run(upload(confirmed=["a", "sub/b"]), *again, *again, (ALL_THERE[0], ["a"]), (Read(KEY), None))


def test_who_may_not_list_looks_at_each_file_that_was_confirmed() -> None:
    """What was sent just now needs no look: it was answered."""
    outcome = run(
        upload(confirmed=["a"]),
        (put(B), None),
        (CONFIRMED_B, None),
        (ALL_THERE[0], AccessDeniedError("no permission to list")),
        (IsStored(put(A).key, A), True),
        (CONFIRMED_A, None),
        (Create(KEY, BODY), None),
        (Record("uploaded", STEM), None),
    )
    assert outcome == Committed(STEM)


OLD = "checkpoints/000001-000000000400-000001-0badf00d/a"


def test_an_unchanged_file_is_copied_in_the_store() -> None:
    """What the store cannot copy, or cannot vouch for, is sent."""
    script = (
        (CopyFile(OLD, put(A).key, A), True),
        (Record("confirmed", STEM, "a"), None),
        (put(B), None),
        (Record("confirmed", STEM, "sub/b"), None),
        ALL_THERE,
        (Create(KEY, BODY), None),
        (Record("uploaded", STEM), None),
    )
    assert run(upload(copies={"a": OLD}), *script) == Committed(STEM)
    unproven = ((script[0][0], False), (put(A), None), *script[1:])
    assert run(upload(copies={"a": OLD}), *unproven) == Committed(STEM)


def test_a_file_that_is_there_is_not_copied_either() -> None:
    script = (
        (Read(KEY), None),
        (IsStored(put(A).key, A), True),
        (Record("confirmed", STEM, "a"), None),
        (IsStored(put(B).key, B), False),
        (put(B), None),
        (Record("confirmed", STEM, "sub/b"), None),
        ALL_THERE,
        (Create(KEY, BODY), None),
        (Record("uploaded", STEM), None),
    )
    assert run(upload(copies={"a": OLD}, resumed=True), *script) == Committed(STEM)


def test_the_order_of_the_files_is_nobodys_business() -> None:
    forwards, backwards = (
        list(itertools.islice(one_by_one(replicate(SAVE, new_nonce=lambda: "00000002"), backwards=back), 5))
        for back in (False, True)
    )
    assert forwards[:4] == backwards[2:4] + backwards[:2]
    assert forwards[4] == backwards[4] == ALL_THERE[0]


@pytest.mark.parametrize("error", [SILENCE, SourceChangedError("changed", path="a")])
def test_a_file_that_cannot_be_sent_ends_the_try_without_a_manifest(error: Exception) -> None:
    """I10, I1: what lies there without a manifest does not exist."""
    process = upload()
    assert process.send(None) == put(A)
    with pytest.raises(type(error)):
        process.throw(error)


@pytest.mark.parametrize(("age_s", "stale"), [(0, False), (50, False), (50.001, True), (-0.001, True), (1e9, True)])
def test_an_upload_is_stale_after_half_of_the_grace(age_s: float, stale: bool) -> None:
    """And when the clock has jumped back, for then nobody knows."""
    assert is_stale(1000.0, 1000.0 + age_s, grace_s=100.0) is stale


# --- repair -----------------------------------------------------------------------------------------------------------------


def test_a_repair_sends_what_is_damaged_and_looks_whether_it_is_still_wanted() -> None:
    """I2: the same bytes, under a manifest that stands before and after."""
    script: Script = ((Read(KEY), BODY), (put(B), None), (Read(KEY), BODY))
    assert run(repair(SAVE, ["sub/b"]), *script) is True


@pytest.mark.parametrize("found", [None, PRUNED, ABORTED], ids=["gone", "pruned", "aborted"])
def test_a_repair_of_what_was_removed_leaves_nothing(found: bytes | None) -> None:
    """Before it began: nothing is sent. While it was sent: that goes again, unless nobody has closed the name (I8)."""
    assert run(repair(SAVE, ["a"]), (Read(KEY), found)) is False
    script: Script = ((Read(KEY), BODY), (put(A), None), (Read(KEY), found))
    removal: Script = ((ListKeys(data_prefix(STEM)), DATA[:1]), (Delete(DATA[0]), None))
    assert run(repair(SAVE, ["a"]), *script, *(removal if found else ())) is False


# --- prune and gc ---------------------------------------------------------------------------------------------------------

DATA = [data_key(STEM, "a"), data_key(STEM, "sub/b")]


def test_prune_closes_then_deletes() -> None:
    """The record stands where the manifest was, before the first object goes."""
    script: Script = (
        (Read(KEY), BODY),
        (Replace(KEY, PRUNED), None),
        (ListKeys(data_prefix(STEM)), DATA),
        (Delete(DATA[0]), None),
        (Delete(DATA[1]), None),
    )
    assert run(prune(STEM, closed_at=AT), *script) is True


@pytest.mark.parametrize("closed", [PRUNED, ABORTED])
def test_prune_finishes_what_was_begun(closed: bytes) -> None:
    """A prune or a gc that was killed: its record is not written again, for it says when."""
    script: Script = ((Read(KEY), closed), (ListKeys(data_prefix(STEM)), DATA[1:]), (Delete(DATA[1]), None))
    assert run(prune(STEM, closed_at="2027-01-01T00:00:00Z"), *script) is True


def test_prune_leaves_what_has_no_manifest_or_an_unreadable_one() -> None:
    """I8: that is gc's, or a human's."""
    assert run(prune(STEM, closed_at=AT), (Read(KEY), None)) is False
    process = prune(STEM, closed_at=AT)
    process.send(None)
    with pytest.raises(ManifestError):
        process.send(BODY[:-40])


def test_prune_deletes_nothing_unless_the_record_was_confirmed() -> None:
    """Unanswered is not closed."""
    process = prune(STEM, closed_at=AT)
    process.send(None)
    assert process.send(BODY) == Replace(KEY, PRUNED)
    with pytest.raises(TransientBackendError):
        process.throw(SILENCE)


def test_gc_claims_then_deletes() -> None:
    """Create-only, so that it loses against a commit."""
    script: Script = ((Create(KEY, ABORTED), None), (ListKeys(data_prefix(STEM)), DATA[:1]), (Delete(DATA[0]), None))
    assert run(collect(STEM, closed_at=AT), *script) is True


def test_gc_leaves_what_proves_to_be_committed() -> None:
    """It was slow, not abandoned."""
    assert run(collect(STEM, closed_at=AT), (Create(KEY, ABORTED), REFUSED), (Read(KEY), BODY)) is False


def test_gc_goes_on_behind_any_closing_record() -> None:
    """Its own unanswered one, another gc's, or prune's."""
    for found in (ABORTED, PRUNED):
        script: Script = ((Create(KEY, ABORTED), REFUSED), (Read(KEY), found), (ListKeys(data_prefix(STEM)), []))
        assert run(collect(STEM, closed_at=AT), *script) is True


# --- read -----------------------------------------------------------------------------------------------------------------


def test_a_reader_checks_every_file() -> None:
    """I5: accepted only when all of them are right."""
    script: Script = (
        (Read(KEY), BODY),
        (Fetch(data_key(STEM, "a"), A), None),
        (Fetch(data_key(STEM, "sub/b"), B), None),
    )
    assert run(fetch(STEM, "run"), *script) == Fetched(SAVE)


@pytest.mark.parametrize(("found", "why"), [(None, "no longer"), (PRUNED, "was pruned"), (ABORTED, "was aborted")])
def test_what_was_removed_is_not_damaged(found: bytes | None, why: str) -> None:
    """The next older may be taken without an alarm."""
    outcome = run(fetch(STEM, "run"), (Read(KEY), found))
    assert isinstance(outcome, Unusable)
    assert outcome.removed
    assert why in outcome.why


FOREIGN = encode_manifest(Manifest(stem=STEM, run_uuid="another run", files=(A, B)))
COPIED = encode_manifest(SAVE.renamed(STEM.renamed("00000001")))


@pytest.mark.parametrize(
    "found", [BODY[:-40], b"", FOREIGN, COPIED], ids=["torn", "empty", "another run", "another id"]
)
def test_a_manifest_that_is_not_this_checkpoints_is_damage(found: bytes) -> None:
    """Nothing of it is fetched."""
    outcome = run(fetch(STEM, "run"), (Read(KEY), found))
    assert isinstance(outcome, Unusable)
    assert (outcome.removed, outcome.file) == (False, KEY)


@pytest.mark.parametrize(
    ("then", "removed"), [(BODY, False), (BODY[:-40], False), (PRUNED, True), (ABORTED, True), (None, True)]
)
def test_a_missing_file_sends_the_reader_back_to_the_manifest(then: bytes | None, removed: bool) -> None:
    """Pruned meanwhile, or damaged: the manifest says which. One that became unreadable is no proof of a removal."""
    script: Script = (
        (Read(KEY), BODY),
        (Fetch(data_key(STEM, "a"), A), None),
        (Fetch(data_key(STEM, "sub/b"), B), "is missing"),
        (Read(KEY), then),
    )
    outcome = run(fetch(STEM, "run"), *script)
    assert isinstance(outcome, Unusable)
    assert (outcome.file, outcome.removed) == ("sub/b", removed)
    assert removed or outcome.why == "is missing"


# --- claim ----------------------------------------------------------------------------------------------------------------


def record(number: int, previous: int | None, claim_id: str = "mine") -> AttemptRecord:
    return AttemptRecord(number=number, how="auto", previous=previous, claim_id=claim_id)


def start(**options: Any) -> Generator[Operation, Any, AttemptRecord]:
    return claim(record, new_nonce=lambda: "00000002", **{"create_only": True, **options})


@pytest.mark.parametrize(
    ("attempts", "manifests", "number"),
    [
        ([], [], 1),
        (["attempts/000004.json", "attempts/000002.json"], [], 5),
        (["attempts/000004-00000001.json"], [], 5),
        (["attempts/000001.json"], [KEY, manifest_key(Stem(7, 1, 1, "00000000"))], 8),
        ([], [KEY], 2),
        (["attempts/readme.txt"], ["manifests/readme.json", "manifests/x"], 1),
    ],
)
def test_the_number_is_above_every_claim_and_every_commit(
    attempts: list[str], manifests: list[str], number: int
) -> None:
    """I4: a run that was copied without its claims must not have new commits mixed with old ones under one number."""
    previous = number - 1 or None
    claimed = record(number, previous)
    script: Script = (
        (ListKeys(ATTEMPTS), attempts),
        (ListKeys(MANIFESTS), manifests),
        (Create(attempt_key(number), encode_attempt(claimed)), None),
    )
    assert run(start(), *script) == claimed


@pytest.mark.parametrize("found", [encode_attempt(record(1, None, "theirs")), b"garbage"])
def test_a_number_that_somebody_took_is_passed_over(found: bytes) -> None:
    """Whoever it was; a record that cannot be read is somebody's too."""
    script: Script = (
        (ListKeys(ATTEMPTS), []),
        (ListKeys(MANIFESTS), []),
        (Create(attempt_key(1), encode_attempt(record(1, None))), REFUSED),
        (Read(attempt_key(1)), found),
        (Create(attempt_key(2), encode_attempt(record(2, 1))), SILENCE),
        (Read(attempt_key(2)), encode_attempt(record(2, 1))),
    )
    assert run(start(), *script) == record(2, 1)


def test_the_first_of_several_bids_waits_for_the_others_to_go() -> None:
    """Or two that start together would chase each other for ever."""
    own, other = "attempts/000001-00000002.json", "attempts/000001-00000003.json"
    script: Script = (
        (ListKeys(ATTEMPTS), []),
        (ListKeys(MANIFESTS), []),
        (Replace(own, encode_attempt(record(1, None))), None),
        (ListKeys(ATTEMPTS), [own, other]),
        (ListKeys(ATTEMPTS), [own, other]),
        (ListKeys(ATTEMPTS), [own]),
    )
    assert run(start(create_only=False), *script) == record(1, None)


@pytest.mark.parametrize("other", ["attempts/000001-00000001.json", "attempts/000001-00000003.json", attempt_key(1)])
def test_a_bid_that_is_not_alone_is_withdrawn(other: str) -> None:
    """At once behind an earlier name, after a bounded wait before a later one; and the last try ends as a conflict."""
    own = "attempts/000001-00000002.json"
    looks = 1 if other < own else SETTLE_TRIES
    process = start(create_only=False, tries=1)
    assert process.send(None) == ListKeys(ATTEMPTS)
    assert process.send([]) == ListKeys(MANIFESTS)
    assert process.send([]) == Replace(own, encode_attempt(record(1, None)))
    answer: Any = None
    for _ in range(looks):
        assert process.send(answer) == ListKeys(ATTEMPTS)
        answer = sorted([own, other])
    assert process.send(answer) == Delete(own)
    with pytest.raises(ConflictError, match="no attempt number"):
        process.send(None)
