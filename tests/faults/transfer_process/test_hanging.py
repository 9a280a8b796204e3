"""A transfer process, a trainer or a store hangs, or somebody does not want to wait: nobody else is held up."""

from __future__ import annotations

import os
import signal
from typing import Any

from ckptmgr.testing.faults import Fault
from ckptmgr.testing.waits import Stopwatch
from ckptmgr.transfer.drain import drain

Scene = Any
DEADLINE_S = 60.0


def test_a_process_that_hangs_holds_up_neither_a_save_nor_the_end(scene: Scene) -> None:
    """Stopped: thousands of saves are told to it at once, `close` keeps its time and names what is left; woken up, it commits that."""
    held = scene.hold(times=None)
    (first,) = scene.save(100)
    uploader = scene.uploader()
    uploader.notify()
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, signal.SIGSTOP)
    try:
        (second,) = scene.save(200)
        watch = Stopwatch()
        for _ in range(3000):
            uploader.notify()
        uploader.hurry()
        assert uploader.close(0.5) == [second, first]
        assert watch.seconds < 5
        held.release()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert scene.ends(pid)
    assert sorted(scene.manifests()) == sorted([str(first), str(second)])


def test_a_trainer_that_hangs_does_not_hold_up_the_uploads(scene: Scene) -> None:
    """Stopped, it reads nothing of what the process has to say; every save becomes durable all the same."""
    trainer = scene.trainer()
    held = scene.hold(times=1)
    stems = scene.save(*range(1, 101), files={"a.bin": b"a"})
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    os.kill(trainer.process.pid, signal.SIGSTOP)
    try:
        last = scene.faults.add(Fault(method="PUT", key=f"*/manifests/{stems[0]}.json", hold="after"))
        held.release()
        assert last.reached.wait(DEADLINE_S)
        last.release()
    finally:
        os.kill(trainer.process.pid, signal.SIGCONT)
    assert trainer("close", timeout_s=60)["left"] == []
    assert len(scene.manifests()) == 100


def test_a_store_that_hangs_does_not_hold_up_the_end(scene: Scene) -> None:
    """`close` keeps its time and names what is left; the process goes on, and commits it once the store is back."""
    held = scene.hold(times=None)
    stems = scene.save(100, 200)
    uploader = scene.uploader()
    uploader.notify()
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    watch = Stopwatch()
    assert uploader.close(0.3) == stems[::-1]
    assert uploader.close(0.3) == stems[::-1]
    assert watch.seconds < 5
    assert scene.is_running(pid)
    held.release()
    assert scene.ends(pid)
    assert uploader.close(0.3) == []
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert scene.were_sent_once(stems)


def test_a_close_that_comes_before_the_process_is_up(scene: Scene) -> None:
    """No time at all: the process is started all the same, let go at once, and does its work."""
    stems = scene.save(100, 200)
    held = scene.hold(times=1)
    uploader = scene.uploader()
    uploader.notify()
    watch = Stopwatch()
    assert uploader.close(0) == stems[::-1]
    assert watch.seconds < 5
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    held.release()
    assert scene.ends(pid)
    assert sorted(scene.manifests()) == sorted(map(str, stems))


def test_ctrl_c_while_waiting_ends_both(scene: Scene) -> None:
    """In `close`: KeyboardInterrupt is raised at once, the transfer process is killed, and the program is gone within three seconds."""
    held = scene.hold(times=None)
    (stem,) = scene.save(100)
    trainer = scene.trainer()
    trainer("notify")
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    trainer.tell("close", timeout_s=None)
    assert trainer.process.stderr is not None
    assert any("waiting for 1 upload(s)" in line for line in trainer.process.stderr)
    watch = Stopwatch()
    trainer.process.send_signal(signal.SIGINT)
    assert watch.end_of(trainer.process, 3) in (-signal.SIGINT, 130)
    assert scene.ends(pid)
    held.release()
    assert scene.manifests() == []
    assert drain(scene.tier, scene.run).committed == (stem,)
