"""The explorer's checks on hand-made states: each of them can fail. The known-bad protocols of `test_protocol_explored.py` cover the rest."""

from __future__ import annotations

from typing import Any

import pytest

from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.layout import data_key, manifest_key
from ckptmgr.core.manifest import ClosingRecord, FileEntry, Manifest, encode_closing, encode_manifest
from ckptmgr.core.operations import PutFile, Record, Replace
from ckptmgr.core.protocol import Committed, Dropped
from ckptmgr.core.records import AttemptRecord, encode_attempt
from ckptmgr.testing.explorer import explore
from ckptmgr.testing.explorer_actors import OLDER, RUN_UUID, SAVE, collector, committed, scenario, writer
from ckptmgr.testing.explorer_checks import Broken, Checks, Journal, Reading

CHECKS = Checks(saves=(OLDER, SAVE))
KEY = manifest_key(SAVE.stem)
A, B = SAVE.files
PRUNED = encode_closing(ClosingRecord(stem=SAVE.stem, closed="pruned"))
UPLOADED = Journal(stem=SAVE.stem, state="uploaded")
WHOLE = {entry.path: entry.blake3 for entry in SAVE.files}


@pytest.mark.parametrize(
    ("key", "entry", "message"),
    [
        ("checkpoints/elsewhere/a", A, "outside the checkpoint"),
        ("a", A, "outside the checkpoint"),
        (data_key(SAVE.stem, "b"), A, "outside the checkpoint"),
        (data_key(SAVE.stem, "a"), FileEntry.of("a", digest_bytes(b"changed")), "I10"),
        (data_key(SAVE.stem, "c"), FileEntry.of("c", digest_bytes(b"c")), "I10"),
    ],
)
def test_data_in_the_wrong_place_or_with_wrong_bytes(key: str, entry: FileEntry, message: str) -> None:
    """I2, I10."""
    with pytest.raises(Broken, match=message):
        CHECKS.transition({}, {key: entry.blake3.encode()}, PutFile(key, entry))


def test_a_manifest_over_another_one() -> None:
    """I2: only its closing record may take its place."""
    other = encode_manifest(Manifest(stem=SAVE.stem, run_uuid=RUN_UUID, files=(A,)))
    with pytest.raises(Broken, match="another manifest"):
        CHECKS.transition({KEY: encode_manifest(SAVE)}, {KEY: other}, Replace(KEY, other))
    CHECKS.transition({KEY: encode_manifest(SAVE)}, {KEY: PRUNED}, Replace(KEY, PRUNED))


def test_a_manifest_that_names_something_else() -> None:
    """I10: whole as it may be, it is not what was saved."""
    other = Manifest(stem=SAVE.stem, run_uuid=RUN_UUID, files=(A,))
    with pytest.raises(Broken, match="does not name what was saved"):
        CHECKS.state(committed(other), None)


@pytest.mark.parametrize(
    ("journal", "store", "message"),
    [
        (UPLOADED, {}, "says uploaded"),
        (UPLOADED, {KEY: encode_closing(ClosingRecord(stem=SAVE.stem, closed="aborted"))}, "says uploaded"),
        (Journal(stem=SAVE.stem, state="dropped"), committed(SAVE), "says dropped"),
        (Journal(stem=SAVE.stem, state="dropped"), {}, "says dropped"),
    ],
)
def test_a_journal_that_says_what_is_not_so(journal: Journal, store: dict[str, bytes], message: str) -> None:
    """I6: the local copy would go, or never be sent."""
    with pytest.raises(Broken, match=message):
        CHECKS.state(store, journal)
    CHECKS.state(committed(SAVE), UPLOADED)
    CHECKS.state({KEY: PRUNED}, Journal(stem=SAVE.stem, state="dropped"))


@pytest.mark.parametrize(
    ("reading", "message"),
    [
        (Reading(stem=SAVE.stem, files={"a": A.blake3}), "I5"),
        (Reading(stem=SAVE.stem, files={**WHOLE, "b": A.blake3}), "I5"),
        (Reading(stem=None, files={}), "found nothing"),
        (Reading(stem=OLDER.stem, files={"a": OLDER.files[0].blake3}), "but it found"),
    ],
)
def test_a_reader_that_accepts_a_part_or_misses_the_newest(reading: Reading, message: str) -> None:
    """I5, I6: what was committed before it began is found, and whole."""
    store = {**committed(OLDER), **committed(SAVE)}
    with pytest.raises(Broken, match=message):
        CHECKS.outcome(reading, [], store, UPLOADED)
    CHECKS.outcome(Reading(stem=SAVE.stem, files=WHOLE), [], store, UPLOADED)


def test_a_claim_without_its_record() -> None:
    """A number counts because it can be seen."""
    mine = AttemptRecord(number=2, how="auto", claim_id="mine")
    theirs = {"attempts/000002.json": encode_attempt(AttemptRecord(number=2, how="auto", claim_id="theirs"))}
    with pytest.raises(Broken, match="its record is not there"):
        CHECKS.outcome(mine, [], theirs, None)
    CHECKS.outcome(mine, [None], {"attempts/000002.json": encode_attempt(mine)}, None)


@pytest.mark.parametrize(
    ("store", "journal", "outcome", "message"),
    [
        (committed(SAVE), Journal(stem=SAVE.stem), Committed(SAVE.stem), "still says pending"),
        ({KEY: PRUNED}, Journal(stem=SAVE.stem), Dropped(SAVE.stem), "still says pending"),
        ({}, UPLOADED, Committed(SAVE.stem), "is not committed"),
        (
            {**committed(SAVE), **committed(SAVE.renamed(SAVE.stem.renamed("00000001")))},
            UPLOADED,
            Committed(SAVE.stem),
            "committed 2 times",
        ),
    ],
)
def test_an_end_that_is_none(store: dict[str, bytes], journal: Journal, outcome: Any, message: str) -> None:
    """When all are done, the save is committed once, or pruned, and the journal knows."""
    with pytest.raises(Broken, match=message):
        CHECKS.end(store, journal, [outcome])
    CHECKS.end(committed(SAVE), UPLOADED, [Committed(SAVE.stem)])


def test_a_journal_takes_only_what_is_about_its_present_name() -> None:
    """A zombie's news about the old name neither confirm a file of the new one nor reopen what is decided."""
    new = SAVE.stem.renamed("00000001")
    journal = Journal(stem=SAVE.stem).after(Record("confirmed", SAVE.stem, "a")).after(Record("renamed", new))
    assert journal == Journal(stem=new)
    assert journal.after(Record("confirmed", SAVE.stem, "b")) == journal
    done = journal.after(Record("uploaded", new))
    assert done.after(Record("renamed", SAVE.stem)) == done.after(Record("confirmed", new, "a")) == done


def test_a_world_that_is_too_large_says_so() -> None:
    """Cut short is not explored."""
    with pytest.raises(MemoryError, match="make it smaller or walk it"):
        explore(scenario("large", writer(), collector(), faults=2), max_states=100)
