"""What a transfer process does when its trainer has died."""

from __future__ import annotations

import os
import shutil
import signal
from typing import Any

import pytest

from ckptmgr.testing.faults import Fault
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.messages import Busy, Committed
from ckptmgr.transfer.metrics import read_metrics
from ckptmgr.transfer.status import TransferFile

Scene = Any
DEADLINE_S = 60.0


def test_what_a_killed_trainer_had_saved_is_committed_by_the_process_it_left(scene: Scene) -> None:
    """SIGKILL with three saves pending: whoever waits for the trainer's output goes on at once, and the saves become durable all the same."""
    held = scene.hold()
    stems = scene.save(100, 200, 300)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, signal.SIGTERM)  # to the whole job, which ends then: nothing that it has to obey later either
    trainer.kill()
    assert scene.is_running(pid)
    held.release()
    assert scene.ends(pid)
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert scene.were_sent_once(stems)
    assert [scene.state_of(stem) for stem in stems] == ["uploaded"] * 3
    # Nobody else would record, or show, what it did alone.
    records = [record for record in read_metrics(scene.tier.root) if record["kind"] == "upload"]
    assert sorted(record["id"] for record in records) == sorted(map(str, stems))
    assert all(record["run"] == scene.run.url and record["seconds"] > 0 for record in records)
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert (view.alive, view.committed, view.pid) == (False, 3, pid)
    assert "the trainer is gone" in (scene.tier.root / "transfer.log").read_text()


def test_a_trainer_that_lives_records_its_uploads_itself(scene: Scene) -> None:
    """What it hears of is not recorded a second time by the process that did it."""
    scene.save(100)
    uploader = scene.uploader()
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert list(read_metrics(scene.tier.root)) == []
    assert (scene.tier.root / "transfer.log").read_text() == ""


def test_a_trainer_killed_before_its_process_has_read_a_word(scene: Scene) -> None:
    """The task lies in the socket by then, and is done."""
    stems = scene.save(100)
    held = scene.hold()
    trainer = scene.trainer()
    trainer.tell("notify_and_die")
    assert trainer.process.wait(DEADLINE_S) == -signal.SIGKILL
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    held.release()
    assert scene.ends(pid)
    assert scene.manifests() == [str(stems[0])]


def test_a_quick_restart_and_the_process_left_behind_do_no_work_twice(scene: Scene) -> None:
    """The first one has a save in hand when the second trainer starts: that waits for it, takes the others, and each object is sent once."""
    held = scene.hold(times=1)
    stems = scene.save(100, 200, 300)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    stems += scene.save(400)
    second = scene.uploader()
    second.notify()
    assert scene.wait_for(Busy).stem == stems[2]
    scene.wait_for(Committed, lambda event: event.stem == stems[0])
    assert scene.is_running(pid)
    held.release()
    assert second.close(DEADLINE_S) == []
    assert scene.ends(pid)
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert scene.were_sent_once(stems)
    assert second.poll_errors() == []


def test_linger_0_leaves_with_the_trainer(scene: Scene) -> None:
    """Whatever request it is in: what it had not committed stays pending."""
    held = scene.hold()
    (stem,) = scene.save(100)
    trainer = scene.trainer(linger_s=0)
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    assert scene.ends(pid)
    held.release()
    assert scene.manifests() == []
    assert drain(scene.tier, scene.run).committed == (stem,)


def test_it_lingers_until_the_store_is_back(scene: Scene) -> None:
    """An upload that had been given up for now is tried again soon: the process has no more than its linger time."""
    down = scene.faults.add(Fault(method="PUT", status=503, code="SlowDown", times=7))
    (stem,) = scene.save(100)
    # Three tries each: two uploads fail, and a trainer would have the second one repeated after 1000 s.
    trainer = scene.trainer(pause_s=1000)
    trainer("notify")
    assert down.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    assert scene.ends(pid)
    assert down.hits == 7
    assert scene.manifests() == [str(stem)]


@pytest.mark.usefixtures("in_order")
def test_it_leaves_when_everything_left_is_refused_for_good(scene: Scene) -> None:
    """Nobody is there who could give it better credentials."""
    refused = scene.faults.add(Fault(method="PUT", status=403, code="AccessDenied", times=None))
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert refused.reached.wait(DEADLINE_S)
    pid = scene.host()
    tried = refused.hits  # more than once on a machine that takes its time until here
    trainer.kill()
    assert scene.ends(pid)
    # Each of the two files in what was under way, and once more at the end.
    assert refused.hits <= tried + 2 * 2
    assert scene.state_of(stem) == "failed"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_are_the_trainers_business_while_it_lives(scene: Scene, number: signal.Signals) -> None:
    """Sent to every process of a job they end no upload; afterwards they mean what they say, and the journal stays whole."""
    first = scene.hold(times=1)
    second = scene.hold(key="*-000000000100-*", times=None)
    older, newer = scene.save(100, 200)
    trainer = scene.trainer()
    trainer("notify")
    assert first.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, number)
    first.release()
    # It has gone on to the next: the signal has changed nothing.
    assert second.reached.wait(DEADLINE_S)
    assert scene.manifests() == [str(newer)]
    assert scene.host() == pid
    trainer.kill()
    os.kill(pid, number)
    assert scene.ends(pid)
    second.release()
    assert (scene.state_of(newer), scene.state_of(older)) == ("uploaded", "uploading")
    assert drain(scene.tier, scene.run).committed == (older,)


def test_it_notices_the_end_although_others_hold_the_line(scene: Scene) -> None:
    """A forked worker, and a program that was given every socket of the trainer's, live on: no end of file ever comes."""
    held = scene.hold()
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    worker, holder = trainer("fork")["pid"], trainer("hold_line")
    try:
        assert holder["sockets"] >= 1
        trainer.process.kill()
        trainer.process.wait()
        held.release()
        assert scene.ends(pid)
        assert scene.is_running(worker)
        assert scene.is_running(holder["pid"])
        assert scene.manifests() == [str(stem)]
        assert "the trainer is gone" in (scene.tier.root / "transfer.log").read_text()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.kill(holder["pid"], signal.SIGKILL)


def test_it_leaves_at_once_when_the_tier_is_gone_as_well(scene: Scene) -> None:
    """A test's temporary directory, a job's scratch disk: nothing is made anew there."""
    held = scene.hold(times=None)
    scene.save(100, 200)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.kill()
    shutil.rmtree(scene.tier.root)
    assert scene.ends(pid)
    assert not scene.tier.root.exists()
    held.release()
