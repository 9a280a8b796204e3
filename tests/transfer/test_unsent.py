"""Older saves that retention would remove right after their commit are not sent: what is in the store in the end is the same, whatever the history."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from ckptmgr.core.errors import PermanentBackendError
from ckptmgr.core.layout import Stem
from ckptmgr.core.manifest import Manifest
from ckptmgr.core.retention import KeepBest, KeepEveryNSteps, KeepLast, KeepWithin, RetentionRule
from ckptmgr.run import locks
from ckptmgr.run.directory import RunDirectory
from ckptmgr.run.prune import would_delete
from ckptmgr.run.start import claim_attempt
from ckptmgr.testing.faulty import FaultyBackend, StoreFault, denied
from ckptmgr.transfer.loop import ReplicationLoop
from ckptmgr.transfer.messages import Event, Failed
from ckptmgr.transfer.tidying import Retention, Tidying

Disk = Any  # of conftest.py
MakeDisk = Callable[[Path], Disk]

ALL_HERE = KeepLast(100)


@dataclass(frozen=True, slots=True)
class EverySecond(RetentionRule):
    """A rule of a user's by which one checkpoint changes what becomes of all older ones."""

    def select(self, chain: Sequence[Manifest], now: datetime) -> list[tuple[Stem, str]]:
        return [(manifest.stem, "second") for manifest in chain[::2]]


def upload(
    disk: Disk,
    keep: RetentionRule | None,
    *,
    skips: bool = True,
    attempt: int = 1,
    local: RetentionRule = ALL_HERE,
    run: RunDirectory | None = None,
    hurry: bool = False,
) -> list[Event]:
    """What a host of the loop does until nothing is left, with retention after each commit; what it reported."""
    events: list[Event] = []
    tidying = Tidying(run or disk.run, disk.tier, attempt=attempt, retention=Retention(store=keep, local=local))
    loop = ReplicationLoop(
        disk.tier,
        run or disk.run,
        stop=threading.Event(),
        report=events.append,
        after_commit=tidying,
        unwanted=tidying.unwanted if skips else lambda manifest: "",
    )
    if hurry:
        loop.hurry()
    loop.close()
    loop.run()
    return events


def errors(events: Sequence[Event]) -> list[Failed]:
    return [told for told in events if isinstance(told, Failed)]


def states(disk: Disk) -> dict[int, str]:
    return {entry.stem.step: entry.state for entry in disk.tier.journal.entries()}


def in_store(disk: Disk) -> list[int]:
    """The steps that are committed; nothing else has any data."""
    stems = [stem for stem in disk.run.history(cached=False).manifests]
    assert {key.split("/")[1] for key in disk.run.keys("checkpoints")} == {str(stem) for stem in stems}
    return [stem.step for stem in stems]


@dataclass(frozen=True, slots=True)
class Save:
    """One of a drawn history: in attempt 1 or 2, uploaded before or after retention begins, in the first queue or the second."""

    rewound: bool
    step: int
    loss: float | None
    mode: str | None
    age_s: float
    when: int
    failed: bool


SAVES = st.builds(
    Save,
    rewound=st.booleans(),
    step=st.integers(1, 12),
    loss=st.none() | st.sampled_from([0.1, 0.2, 0.3, float("nan")]),
    mode=st.none() | st.sampled_from(["min", "max"]),
    age_s=st.sampled_from([0.0, 5000.0]),
    when=st.sampled_from([0, 1, 1, 1, 2]),
    failed=st.booleans(),
)
PARTS = (
    st.builds(KeepLast, st.integers(1, 3))
    | st.builds(KeepBest, st.just("loss"), st.sampled_from([None, "min", "max"]), st.integers(1, 2))
    | st.builds(KeepEveryNSteps, st.integers(2, 5))
    | st.just(KeepWithin(1000.0))
    | st.just(EverySecond())
)


def saved(step: int, *, when: int, loss: float | None = None) -> Save:
    return Save(rewound=False, step=step, loss=loss, mode=None, age_s=0.0, when=when, failed=False)


THREE = [saved(step, when=1) for step in (1, 2, 3)]
# What is between the newest and the oldest, which stays only because of it.
BETWEEN = [saved(1, when=0), saved(2, when=0), saved(3, when=1), saved(4, when=1)]
NEXT_BEST = [saved(1, when=0, loss=0.1), saved(2, when=1, loss=0.2), saved(3, when=1, loss=0.3)]
RULES = PARTS | st.builds(lambda one, other: one | other, PARTS, PARTS)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    saves=st.lists(SAVES, min_size=2, max_size=7),
    keep=RULES,
    how=st.sampled_from(["auto", "explicit", "fresh"]),
    odd=st.sampled_from(["", "", "tagged", "damaged", "newer attempt", "read"]),
)
@example(saves=THREE, keep=KeepLast(1), how="auto", odd="read")
@example(saves=THREE, keep=KeepLast(1), how="auto", odd="newer attempt")
@example(saves=BETWEEN, keep=EverySecond(), how="auto", odd="")
@example(saves=NEXT_BEST, keep=KeepBest("loss", "min"), how="auto", odd="damaged")
def test_the_store_is_the_same(make_disk: MakeDisk, saves: list[Save], keep: RetentionRule, how: Any, odd: str) -> None:
    """One history twice, once with each older save sent and pruned, once without: the same checkpoints, and no other data, after each queue."""
    with tempfile.TemporaryDirectory() as folder:
        ours = make_disk(Path(folder) / "ours")
        saves = sorted(saves, key=lambda save: save.rewound)
        claim_attempt(ours.run, how="fresh", parent=None)
        stems = [_save(ours, save) for save in saves if save.when == 0]
        ours.upload()
        if any(save.rewound for save in saves):
            first = [stem for stem in stems if stem.attempt == 1]
            claim_attempt(ours.run, how=how, parent=first[0] if first and how != "fresh" else None)
        attempt = max(ours.run.attempts())
        if odd == "newer attempt":
            claim_attempt(ours.run, how="auto", parent=None)
        if stems and odd == "tagged":
            ours.run.tag("mine", stems[0])
        if stems and odd == "damaged":
            _cut(ours, stems[len(stems) // 2])
        shutil.copytree(folder, twin := tempfile.mkdtemp(), dirs_exist_ok=True)
        theirs = make_disk(Path(twin) / "ours")
        try:
            for when in (1, 2):
                waiting = [_save(ours, save) for save in saves if save.when == when]
                for stem in waiting:
                    _copy(ours, theirs, stem)
                read = locks.reading(ours.run.uuid, waiting[0]) if waiting and odd == "read" else nullcontext()
                with read:
                    upload(ours, keep, attempt=attempt)
                    upload(theirs, keep, attempt=attempt, skips=False)
                assert ours.waiting() == theirs.waiting() == []
                assert in_store(ours) == in_store(theirs)
                assert ours.run.history().manifests == theirs.run.history().manifests
        finally:
            shutil.rmtree(twin)
        event("some not sent" if "dropped" in states(ours).values() else "all sent")


def _save(disk: Disk, save: Save) -> Stem:
    metrics = {} if save.loss is None else {"loss": save.loss}
    modes = {} if save.loss is None or save.mode is None else {"loss": save.mode}
    made: Stem = disk.save(
        save.step, size=64, attempt=1 + save.rewound, metrics=metrics, modes=modes, age_s=save.age_s, target=""
    )
    if save.failed:
        disk.tier.journal.write(replace(disk.tier.journal.read(made), state="failed", tries=1))
    return made


def _cut(disk: Disk, stem: Stem) -> None:
    """What is left of a checkpoint's data in the store is not what was saved."""
    (Path(disk.run.root) / "checkpoints" / str(stem) / "model.bin").write_bytes(b"cut")


def _copy(one: Disk, other: Disk, stem: Stem) -> None:
    for name in (f"checkpoints/{stem}", f"uploads/{stem}.json", f"manifests/{stem}.json"):
        source, to = one.tier.root / name, other.tier.root / name
        to.parent.mkdir(exist_ok=True)
        (shutil.copytree if source.is_dir() else shutil.copyfile)(source, to)


def six(disk: Disk, **options: Any) -> list[Stem]:
    claim_attempt(disk.run, how="fresh", parent=None)
    return [disk.save(step, **options) for step in range(10, 70, 10)]


def behind_faults(disk: Disk) -> tuple[RunDirectory, FaultyBackend]:
    faulty = FaultyBackend(disk.run.fs)
    return replace(disk.run, fs=faulty), faulty


def test_two_of_six_are_sent(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    """And the local copies of the others go by the local rule, as those of uploaded ones do."""
    six(disk)
    run, log = behind_faults(disk)
    with caplog.at_level("INFO", "ckptmgr"):
        assert errors(upload(disk, KeepLast(2), run=run, local=KeepLast(3))) == []
    assert in_store(disk) == [50, 60]
    assert len(log.calls("put_file")) == 2
    assert [stem.step for stem in disk.here()] == [40, 50, 60]
    assert states(disk) == {40: "dropped", 50: "uploaded", 60: "uploaded"}
    assert "step 40 is not sent: keep=KeepLast(n=2) would remove it at once" in caplog.messages


def test_an_emergency_is_sent_and_so_is_all_in_a_hurry(disk: Disk) -> None:
    disk.save(1, reasons=("sigterm",))
    six(disk)
    run, log = behind_faults(disk)
    upload(disk, KeepLast(2), run=run)
    assert len(log.calls("put_file", "*/000001-000000000001-*")) == 1
    disk.save(2)
    disk.save(3)
    upload(disk, KeepLast(1), run=run, hurry=True)
    assert {2, 3} < set(in_store(disk))


def test_what_was_begun_is_ended(disk: Disk) -> None:
    """A file of it is in the store: it would stay there without a checkpoint, so the rest is sent, and retention removes it as a whole."""
    stems = six(disk)
    disk.run.fs.pipe_file(disk.run.path(f"checkpoints/{stems[0]}/model.bin"), b"begun")
    upload(disk, KeepLast(2))
    assert in_store(disk) == [50, 60]
    assert states(disk)[10] == "uploaded"
    assert states(disk)[20] == "dropped"


def test_a_superseded_attempt_skips_nothing(disk: Disk) -> None:
    """It prunes nothing (I12), so everything that it sends stays; also if the newer one was claimed a moment ago."""
    stems = six(disk)
    older = disk.tier.run.manifest(stems[0])
    disk.upload()
    disk.run.fs.rm_file(disk.run.path(f"manifests/{stems[0]}.json"))
    disk.run.fs.rm_file(disk.run.path(f"checkpoints/{stems[0]}/model.bin"))
    assert would_delete(disk.run, KeepLast(2), older, attempt=1)
    claim_attempt(disk.run, how="auto", parent=None)
    assert not would_delete(disk.run, KeepLast(2), older, attempt=1)
    assert would_delete(disk.run, KeepLast(2), older, attempt=2)


@pytest.mark.parametrize("what", ["a damaged newest", "a rule that raises", "no listing"])
def test_what_cannot_be_said_holds_nothing_back(disk: Disk, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then everything is sent, as without the question."""
    *_, newest = six(disk)
    keep: RetentionRule = KeepLast(2)
    run, faulty = behind_faults(disk)
    if what == "a damaged newest":
        disk.upload()
        _cut(disk, newest)
        disk.save(5)
    elif what == "no listing":
        faulty.add(StoreFault(verb="find", path="*/tags*", times=None, error=denied))
    else:
        monkeypatch.setattr(KeepLast, "select", lambda *_: 1 / 0)
        keep = KeepLast(2)
    told = errors(upload(disk, keep, run=run, local=KeepEveryNSteps(1)))
    assert "dropped" not in states(disk).values()
    assert set(states(disk).values()) == {"uploaded"}
    assert told
    assert all(failed.stem is None for failed in told), told
    assert not any(isinstance(failed.error, PermanentBackendError) for failed in told) or what == "no listing"
