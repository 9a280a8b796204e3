"""The queue's rules: what gives way, in which order, what never does, and what is said about it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import pytest

from ckptmgr.core.errors import ConfigError, ConflictError, DiskFullError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.run import locks
from ckptmgr.run.journal import UploadEntry
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.queue import QueueRules, evicted, forget_evicted, make_room, shortage, trim

SIZE = 8192
NO_FLOOR = QueueRules(min_free_bytes=0)


class DiskLike(Protocol):
    """See `conftest.Disk`."""

    tier: Any
    run: Any
    url: str
    save: Callable[..., Stem]
    upload: Callable[[], None]
    waiting: Callable[[], list[Stem]]
    here: Callable[[], list[Stem]]
    has_size: Callable[[int], None]


def budget(saves: float, **options: Any) -> QueueRules:
    """Rules with room for so many saves."""
    return QueueRules(max_bytes=int(saves * SIZE), min_free_bytes=0, **options)


def steps(stems: object) -> list[int]:
    assert isinstance(stems, list | tuple)
    return [stem.step for stem in stems]


# --- the byte budget ------------------------------------------------------------------------------------------------------


def test_within_the_budget_nothing_changes(disk: DiskLike) -> None:
    """To the last byte: what waits and what comes fit exactly."""
    disk.save(1)
    disk.save(2)
    room = make_room(disk.tier, disk.url, SIZE, budget(3))
    assert (room.admitted, room.why, room.dropped, room.freed_bytes) == (True, "", (), 0)
    assert steps(disk.waiting()) == [1, 2]


def test_the_oldest_gives_way_by_name(disk: DiskLike, caplog: pytest.LogCaptureFixture) -> None:
    """One byte over: the oldest goes, its data with it; the log, the journal and the answer name it (I6)."""
    stem, *others = [disk.save(step) for step in (1, 2, 3)]
    with caplog.at_level(logging.WARNING, "ckptmgr"):
        room = make_room(disk.tier, disk.url, SIZE + 1, budget(4))
    assert room.admitted
    assert room.dropped == (stem,)
    assert room.freed_bytes >= SIZE
    assert disk.waiting() == disk.here() == others
    (entry,) = evicted(disk.tier)
    assert (entry.stem, entry.state, entry.size_bytes) == (stem, "evicted", SIZE)
    assert entry.error == "saves of 24.6 kB wait for upload, one of 8.19 kB comes, and 32.8 kB may wait"
    assert [record.getMessage() for record in caplog.records] == [
        f"step 1 ({stem}, 8.19 kB) was given up before it was uploaded: {entry.error}"
    ]


def test_a_drop_is_counted_until_it_is_acknowledged(disk: DiskLike) -> None:
    """A start, which tidies the tier, a drain and an upload leave it in the list; `forget_evicted` takes it out, and the last trace with it."""
    stem = disk.save(1)
    disk.save(2)
    make_room(disk.tier, disk.url, SIZE, budget(2))
    disk.tier.clean()
    disk.upload()
    assert steps(disk.run.stems()) == [2]
    assert [entry.stem for entry in evicted(disk.tier)] == [stem]
    assert [entry.stem for entry in forget_evicted(disk.tier)] == [stem]
    assert evicted(disk.tier) == []
    assert not any(str(stem) in str(path) for path in disk.tier.root.rglob("*"))


def test_as_many_as_it_takes_and_no_more(disk: DiskLike) -> None:
    """A large save: the three oldest of five."""
    for step in range(1, 6):
        disk.save(step)
    room = make_room(disk.tier, disk.url, 3 * SIZE, budget(5))
    assert steps(room.dropped) == [1, 2, 3]
    assert steps(disk.waiting()) == [4, 5]


def test_what_was_not_begun_gives_way_first(disk: DiskLike) -> None:
    """The oldest was tried, and much of it may be in the store."""
    begun = disk.save(1)
    disk.save(2)
    disk.save(3)
    entry = disk.tier.journal.read(begun)
    disk.tier.journal.write(replace(entry, state="failed", tries=1, error="503"))
    assert steps(make_room(disk.tier, disk.url, SIZE, budget(3)).dropped) == [2]
    assert steps(make_room(disk.tier, disk.url, SIZE, budget(2)).dropped) == [1]


# --- what never gives way ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["sigterm", "sigusr1", "ec2", "aliyun", "stop_file", "jit_checkpoint", "ec2:spot"])
def test_an_emergency_save_stays(disk: DiskLike, reason: str) -> None:
    disk.save(1, reasons=["every_n_steps:1", reason])
    disk.save(2)
    disk.save(3)
    assert steps(make_room(disk.tier, disk.url, SIZE, budget(3)).dropped) == [2]


def test_the_best_by_each_metric_stays(disk: DiskLike) -> None:
    """One for each metric that a policy watches, in its direction; NaN is never the best, a metric that nobody watches counts for nothing."""
    modes = {"loss": "min", "accuracy": "max"}
    nan = float("nan")
    for step, loss, accuracy in (
        (1, 0.1, 0.1),
        (2, nan, 0.2),
        (3, 0.2, nan),
        (4, 0.3, 0.9),
        (5, 0.9, 0.3),
        (6, 0.8, 0),
    ):
        disk.save(step, metrics={"loss": loss, "accuracy": accuracy, "speed": -step}, modes=modes)
    room = make_room(disk.tier, disk.url, SIZE, budget(4))
    assert steps(room.dropped) == [2, 3, 5]
    assert steps(disk.waiting()) == [1, 4, 6]


@pytest.mark.parametrize("purpose", ["upload", "read"])
def test_what_is_in_use_stays(disk: DiskLike, purpose: Any) -> None:
    """Another process uploads the oldest, or resumes from it."""
    held = disk.save(1)
    disk.save(2)
    disk.save(3)
    holding = (
        locks.exclusive(disk.run.uuid, held, "upload") if purpose == "upload" else locks.reading(disk.run.uuid, held)
    )
    with holding:
        assert steps(make_room(disk.tier, disk.url, SIZE, budget(3)).dropped) == [2]
    assert steps(disk.waiting()) == [1, 3]


def test_nothing_is_given_up_in_vain(disk: DiskLike) -> None:
    """It does not fit even then: refused, with the numbers, and all are there."""
    disk.save(1, reasons=["sigterm"])
    disk.save(2)
    disk.save(3, reasons=["sigterm"])
    room = make_room(disk.tier, disk.url, SIZE, budget(2))
    assert not room.admitted
    assert room.why == "saves of 24.6 kB wait for upload, one of 8.19 kB comes, and 16.4 kB may wait"
    assert room.dropped == ()
    assert steps(disk.waiting()) == [1, 2, 3]
    assert evicted(disk.tier) == []


def test_the_newest_goes_only_when_there_is_a_newer_one(disk: DiskLike) -> None:
    """Room for one: the next may come, the one before stays until that is committed (K062), and goes then."""
    first = disk.save(1)
    room = make_room(disk.tier, disk.url, SIZE, budget(1))
    assert (room.admitted, room.dropped) == (True, ())
    assert disk.waiting() == [first]
    second = disk.save(2)
    room = trim(disk.tier, disk.url, budget(1))
    assert room.dropped == (first,)
    assert disk.waiting() == [second]


def test_the_newest_is_not_promised_away_while_it_is_uploaded(disk: DiskLike) -> None:
    """Then it could not go afterwards either: refused."""
    stem = disk.save(1)
    with locks.exclusive(disk.run.uuid, stem, "upload"):
        assert not make_room(disk.tier, disk.url, SIZE, budget(1)).admitted
    assert make_room(disk.tier, disk.url, SIZE, budget(1)).admitted


def test_a_save_larger_than_the_budget_is_taken_when_nothing_waits(disk: DiskLike) -> None:
    """Rather than none ever."""
    assert make_room(disk.tier, disk.url, 5 * SIZE, budget(1)).admitted
    disk.save(1, size=5 * SIZE, reasons=["sigterm"])
    assert not make_room(disk.tier, disk.url, 5 * SIZE, budget(1)).admitted


def test_the_newest_of_the_lineage_stays_among_abandoned_ones(disk: DiskLike) -> None:
    """A rewind: attempt 2 is abandoned, what attempt 3 began from is the newest there is."""
    from ckptmgr.core.records import AttemptRecord

    began_from = disk.save(1)
    abandoned = [disk.save(step, attempt=2) for step in (2, 3)]
    for number, parent in ((1, None), (2, began_from), (3, began_from)):
        record = AttemptRecord(number=number, how="explicit" if parent else "auto", parent=parent)
        disk.tier.note_attempt(record)
    assert disk.tier.run.history().newest() == began_from
    assert make_room(disk.tier, disk.url, SIZE, budget(3)).dropped == (abandoned[0],)


def test_saves_for_another_place_count_and_give_way(disk: DiskLike) -> None:
    """They take the same disk; the newest for this place stays."""
    elsewhere = disk.url.replace("/run", "/moved-away")
    for step in (1, 2, 3):
        disk.save(step, target=disk.url if step == 1 else elsewhere)
    assert steps(make_room(disk.tier, disk.url, SIZE, budget(3)).dropped) == [2]
    assert steps(make_room(disk.tier, elsewhere, SIZE, budget(2)).dropped) == [1]


def test_one_committed_just_now_is_not_given_up(disk: DiskLike, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploaded between the look and the lock: nothing has to go for it."""
    disk.save(1)
    disk.save(2)
    before = disk.tier.pending()
    disk.upload()
    monkeypatch.setattr(disk.tier, "pending", lambda: before)
    room = make_room(disk.tier, disk.url, SIZE, budget(2))
    assert (room.admitted, room.dropped) == (True, ())
    assert evicted(disk.tier) == []
    assert steps(disk.here()) == [1, 2]


# --- skip, wait, urgent -----------------------------------------------------------------------------------------------------


def test_skip_refuses_what_comes(disk: DiskLike) -> None:
    disk.save(1)
    disk.save(2)
    room = make_room(disk.tier, disk.url, SIZE, budget(2, when_full="skip"))
    assert not room.admitted
    assert "16.4 kB wait for upload, one of 8.19 kB comes, and 16.4 kB may wait" in room.why
    assert steps(disk.waiting()) == [1, 2]
    assert trim(disk.tier, disk.url, budget(1, when_full="skip")).dropped == ()


def test_wait_waits_for_uploads(disk: DiskLike, clock: Any) -> None:
    """An upload ends during the second pause: nothing has to go."""
    disk.save(1)
    disk.save(2)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.now += seconds
        if len(pauses) == 2:
            disk.upload()

    room = make_room(
        disk.tier, disk.url, SIZE, budget(2, when_full="wait"), pause=pause, clock=clock, hurry=lambda: False
    )
    assert (room.admitted, room.dropped, len(pauses)) == (True, (), 2)


def test_wait_waits_for_so_long_and_then_the_oldest_goes(disk: DiskLike, clock: Any) -> None:
    """Never longer than `max_block_s`."""
    disk.save(1)
    disk.save(2)
    began = clock.now

    def pause(seconds: float) -> None:
        clock.now += seconds

    rules = budget(2, when_full="wait", max_block_s=7.2)
    room = make_room(disk.tier, disk.url, SIZE, rules, pause=pause, clock=clock)
    assert steps(room.dropped) == [1]
    assert clock.now - began == pytest.approx(7.2)


def test_wait_ends_in_a_hurry(disk: DiskLike, clock: Any) -> None:
    """The machine is about to go: no waiting any more."""
    disk.save(1)
    disk.save(2)
    asked: list[float] = []

    def pause(seconds: float) -> None:
        asked.append(seconds)

    rules = budget(2, when_full="wait")
    room = make_room(disk.tier, disk.url, SIZE, rules, pause=pause, clock=clock, hurry=lambda: len(asked) == 3)
    assert (steps(room.dropped), len(asked)) == ([1], 3)


def test_wait_waits_for_the_disk(disk: DiskLike, clock: Any) -> None:
    """What an upload makes superfluous here is removed at once: nothing has to go unsent."""
    disk.save(1)
    disk.save(2)
    disk.has_size(3 * SIZE)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        disk.upload()

    rules = QueueRules(min_free_bytes=0, when_full="wait")
    room = make_room(disk.tier, disk.url, 2 * SIZE, rules, pause=pause, clock=clock)
    assert (room.admitted, room.dropped, room.freed_bytes, len(pauses)) == (True, (), SIZE, 1)
    assert steps(disk.here()) == [2]


def test_wait_does_not_wait_for_others(disk: DiskLike) -> None:
    """Nothing waits for an upload: no upload will make room on a disk that others have filled."""

    def pause(seconds: float) -> None:
        raise AssertionError("waited")

    disk.has_size(SIZE)
    rules = QueueRules(min_free_bytes=0, when_full="wait")
    assert not make_room(disk.tier, disk.url, 2 * SIZE, rules, pause=pause).admitted


def test_an_urgent_save_counts_for_no_budget(disk: DiskLike) -> None:
    for step in (1, 2, 3):
        disk.save(step)
    for how in ("keep-newest", "skip", "wait"):
        room = make_room(disk.tier, disk.url, SIZE, budget(1, when_full=how), urgent=True)
        assert (room.admitted, room.dropped) == (True, ())


# --- the disk -----------------------------------------------------------------------------------------------------------------


def test_a_save_leaves_the_floor_free(disk: DiskLike) -> None:
    """To the byte; one more, and both numbers are said."""
    disk.has_size(10 * SIZE)
    rules = QueueRules(min_free_bytes=2 * SIZE)
    assert make_room(disk.tier, disk.url, 8 * SIZE, rules).admitted
    room = make_room(disk.tier, disk.url, 8 * SIZE + 1, rules)
    assert not room.admitted
    assert room.why == (
        f"the disk of {disk.tier.root} has 81.9 kB free and must keep 16.4 kB, and the save takes 65.5 kB"
    )


def test_the_floor_is_a_hundredth_of_the_disk_and_a_gibibyte_at_most() -> None:
    assert QueueRules().floor_bytes(50_000) == 500
    assert QueueRules().floor_bytes(10 << 40) == 1 << 30
    assert QueueRules(min_free_bytes=0).floor_bytes(10 << 40) == 0


def test_uploaded_copies_go_before_anything_that_waits(disk: DiskLike) -> None:
    """The oldest of them first, and only as many as it takes; the newest of all stays, and what waits."""
    disk.save(1)
    disk.save(2)
    disk.save(3)
    disk.upload()
    disk.save(4)
    disk.has_size(6 * SIZE)
    room = make_room(disk.tier, disk.url, 4 * SIZE, NO_FLOOR)
    assert (room.admitted, room.dropped) == (True, ())
    assert room.freed_bytes == 2 * SIZE
    assert steps(disk.here()) == [3, 4]
    assert steps(disk.run.stems()) == [1, 2, 3]


def test_the_newest_stays_also_when_it_is_uploaded(disk: DiskLike) -> None:
    """It is what a restart on this machine reads (K062): the save is refused instead."""
    disk.save(1)
    disk.upload()
    disk.has_size(2 * SIZE)
    room = make_room(disk.tier, disk.url, 2 * SIZE, NO_FLOOR)
    assert not room.admitted
    assert "has 8.19 kB free, and the save takes 16.4 kB" in room.why
    assert steps(disk.here()) == [1]


def test_an_uploaded_copy_that_is_read_stays(disk: DiskLike) -> None:
    first = disk.save(1)
    disk.save(2)
    disk.save(3)
    disk.upload()
    disk.has_size(3 * SIZE)
    with locks.reading(disk.run.uuid, first):
        assert make_room(disk.tier, disk.url, SIZE, NO_FLOOR).admitted
    assert steps(disk.here()) == [1, 3]


def test_then_the_oldest_that_waits_gives_way(disk: DiskLike) -> None:
    """As far as it takes for the disk; an urgent save may use its last byte, another one not."""
    for step in (1, 2, 3):
        disk.save(step)
    disk.has_size(4 * SIZE)
    rules = QueueRules(min_free_bytes=SIZE)
    room = make_room(disk.tier, disk.url, SIZE, rules, urgent=True)
    assert (room.admitted, room.dropped) == (True, ())
    room = make_room(disk.tier, disk.url, SIZE, rules)
    assert steps(room.dropped) == [1]
    assert evicted(disk.tier)[0].error == (
        f"the disk of {disk.tier.root} has 8.19 kB free and must keep 8.19 kB, and the save takes 8.19 kB"
    )
    assert not make_room(disk.tier, disk.url, 4 * SIZE, rules, urgent=True).admitted
    assert steps(disk.waiting()) == [2, 3]


def test_links_free_nothing_and_stay(disk: DiskLike) -> None:
    """A save whose files a trainer's directory names as well: giving it up would not help the disk."""
    linked = disk.save(1)
    disk.save(2)
    disk.save(3)
    theirs = disk.tier.root.parent / "checkpoint-1.bin"
    os.link(disk.tier.data_dir(linked) / "model.bin", theirs)
    disk.has_size(3 * SIZE)
    assert steps(make_room(disk.tier, disk.url, SIZE, NO_FLOOR).dropped) == [2]


def test_a_save_of_links_takes_no_room_on_the_disk(disk: DiskLike) -> None:
    """But its bytes count for the budget: they have to be uploaded."""
    disk.save(1)
    disk.save(2)
    disk.has_size(2 * SIZE)
    assert make_room(disk.tier, disk.url, 9 * SIZE, NO_FLOOR, disk_bytes=0).dropped == ()
    assert steps(make_room(disk.tier, disk.url, SIZE, budget(2), disk_bytes=0).dropped) == [1]


def test_what_cannot_be_noted_is_not_given_up(disk: DiskLike, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk full to the last byte: refused with the reason, and the save is whole."""
    stem = disk.save(1)
    disk.save(2)

    def full(entry: UploadEntry) -> None:
        raise DiskFullError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(disk.tier.journal, "write", full)
        room = make_room(disk.tier, disk.url, SIZE, budget(2))
    assert not room.admitted
    assert room.why == f"step 1 ({stem}, 8.19 kB) cannot give way: no space left on device"
    assert steps(disk.waiting()) == steps(disk.here()) == [1, 2]


def test_without_limits_the_tier_is_not_even_read(disk: DiskLike, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual case, in the training thread, costs one question to the file system."""

    def read() -> list[tuple[Manifest, UploadEntry]]:
        raise AssertionError("read")

    monkeypatch.setattr(disk.tier, "pending", read)
    assert make_room(disk.tier, disk.url, SIZE, QueueRules()).admitted


# --- in two steps -------------------------------------------------------------------------------------------------------------


def test_a_drop_that_was_begun_is_taken_back(disk: DiskLike, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed before anything was removed: the save is whole, so it waits again and nobody is told of a loss."""
    stem = disk.save(1)
    disk.save(2)

    class Killed(BaseException):
        pass

    def die(stem: Stem) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(disk.tier, "_erase_data", die)
        with pytest.raises(Killed):
            make_room(disk.tier, disk.url, SIZE, budget(2))
    assert stem not in disk.waiting()
    assert evicted(disk.tier) == []
    assert stem in disk.waiting()
    disk.upload()
    assert steps(disk.run.stems()) == [1, 2]


def test_a_drop_under_way_in_another_process_is_not_taken_back(disk: DiskLike) -> None:
    """The one that has the lock ends what it began."""
    stem = disk.save(1)
    entry = disk.tier.journal.read(stem)
    disk.tier.journal.write(replace(entry, state="evicted", error="full"))
    with locks.exclusive(disk.run.uuid, stem, "upload"):
        assert evicted(disk.tier) == []
        assert disk.tier.journal.read(stem).state == "evicted"
    assert disk.tier.take_back() == [stem]


def test_only_what_waits_can_be_given_up(disk: DiskLike) -> None:
    """Not what is uploaded (I6): that is removed by another rule."""
    stem = disk.save(1)
    disk.upload()
    with pytest.raises(ConflictError, match="it is uploaded"):
        disk.tier.evict(stem, size_bytes=1, why="?")
    assert disk.here() == [stem]


def test_what_was_given_up_is_not_removed_as_uploaded(disk: DiskLike) -> None:
    stem = disk.save(1)
    disk.save(2)
    make_room(disk.tier, disk.url, SIZE, budget(2))
    assert stem not in disk.tier.uploaded()
    with pytest.raises(ConflictError):
        disk.tier.remove(stem)
    assert [entry.stem for entry in evicted(disk.tier)] == [stem]


def test_removing_twice_is_no_error(disk: DiskLike) -> None:
    """Retention and the queue free the same uploaded copy at once, in two processes."""
    stem = disk.save(1)
    disk.upload()
    disk.tier.remove(stem)
    disk.tier.remove(stem)
    assert disk.here() == []


def test_a_drain_passes_over_what_was_given_up(disk: DiskLike) -> None:
    gone = disk.save(1)
    stays = disk.save(2)
    make_room(disk.tier, disk.url, SIZE, budget(2))
    done = drain(disk.tier, disk.run)
    assert (done.committed, done.pending, done.errors) == ((stays,), (), {})
    assert gone not in disk.run.stems()


# --- shortage (K069) ----------------------------------------------------------------------------------------------------------


def test_enough_is_not_worth_a_word(disk: DiskLike) -> None:
    disk.has_size(100 * SIZE)
    assert shortage(disk.tier, 49 * SIZE, QueueRules()) is None


def test_a_checkpoint_that_does_not_fit_is_said_with_both_numbers(disk: DiskLike) -> None:
    disk.has_size(10 * SIZE)
    has = f"the disk of {disk.tier.root} has 81.9 kB free"
    assert shortage(disk.tier, 11 * SIZE, NO_FLOOR) == f"a checkpoint takes 90.1 kB, and {has}"
    floor = QueueRules(min_free_bytes=SIZE)
    assert shortage(disk.tier, 10 * SIZE, floor) == (
        f"a checkpoint takes 81.9 kB, and {has}, 8.19 kB of which must stay free"
    )


def test_two_must_fit(disk: DiskLike) -> None:
    """The older stays until the newer is whole."""
    disk.has_size(10 * SIZE)
    said = shortage(disk.tier, 6 * SIZE, NO_FLOOR)
    assert said is not None
    assert said.startswith("there must be room for two checkpoints of 49.2 kB, for one stays until the next is whole")
    assert shortage(disk.tier, 5 * SIZE, NO_FLOOR) is None


def test_what_the_tier_holds_already_is_room_but_for_the_newest(disk: DiskLike) -> None:
    for step in (1, 2, 3):
        disk.save(step, size=3 * SIZE)
    disk.has_size(10 * SIZE)
    assert shortage(disk.tier, 5 * SIZE, NO_FLOOR) is None
    assert shortage(disk.tier, 8 * SIZE, NO_FLOOR) is not None


def test_a_budget_below_one_checkpoint_is_said(disk: DiskLike) -> None:
    said = shortage(disk.tier, 3 * SIZE, budget(2))
    assert said is not None
    assert said.startswith("a checkpoint takes 24.6 kB, and 16.4 kB may wait for upload")


def test_a_real_disk_is_asked(disk: DiskLike) -> None:
    """Of the file system that the tier lies on."""
    free = shutil.disk_usage(disk.tier.root).free
    assert shortage(disk.tier, 1, NO_FLOOR) is None
    assert shortage(disk.tier, 2 * free, NO_FLOOR) is not None


# --- words --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"when_full": "drop"}, "when_full='drop'"),
        ({"when_busy": "drop"}, "when_busy='drop'"),
        ({"max_bytes": -1}, "max_bytes=-1"),
        ({"min_free_bytes": -1}, "min_free_bytes=-1"),
        ({"max_block_s": float("nan")}, "max_block_s=nan"),
    ],
)
def test_rules_that_make_no_sense_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        QueueRules(**options)
