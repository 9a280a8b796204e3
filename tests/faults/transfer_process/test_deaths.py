"""A transfer process, or the thread that has it, dies: it is started again, and shows."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from ckptmgr.core.layout import Stem
from ckptmgr.transfer.drain import drain
from ckptmgr.transfer.messages import Committed, Event, Failed
from ckptmgr.transfer.status import TransferFile
from ckptmgr.transfer.supervisor import Supervisor

Scene = Any
DEADLINE_S = 60.0


def test_a_process_that_was_killed_is_started_again_at_once(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    """The upload goes on, and the death shows: in the log, in the errors, in the status."""
    held = scene.hold(times=1)
    (stem,) = scene.save(100)
    uploader = scene.uploader()
    uploader.notify()
    assert held.reached.wait(DEADLINE_S)
    pid = scene.host()
    os.kill(pid, signal.SIGKILL)
    scene.wait_for(Committed)
    assert scene.manifests() == [str(stem)]
    (error,) = uploader.poll_errors()
    assert str(error) == f"the transfer process {pid} died (killed by SIGKILL) - it is started again"
    assert uploader.status().last_error == str(error)
    assert f"the transfer process {pid} died" in caplog.text
    assert scene.host() != pid
    assert uploader.close(DEADLINE_S) == []


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("how", ["hurry", "close"])
def test_after_a_second_death_it_waits_unless_there_is_no_time(scene: Scene, how: str) -> None:
    """No process is started over and over; a save alone does not change that, an emergency or the end does."""
    first, second = scene.hold(times=1), scene.hold(times=1)
    (older,) = scene.save(100)
    uploader = scene.uploader(pause_s=1000)
    uploader.notify()
    for held in (first, second):
        assert held.reached.wait(DEADLINE_S)
        os.kill(scene.host(), signal.SIGKILL)
        scene.wait_for(Failed)
    (newer,) = scene.save(200)
    uploader.notify()
    view = TransferFile(scene.tier.root).read()
    assert view is not None
    assert not view.alive
    assert scene.manifests() == []
    if how == "hurry":
        uploader.hurry()
        assert scene.wait_for(Committed).stem == newer
        assert scene.wait_for(Committed).stem == older
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == sorted([str(older), str(newer)])
    assert len(uploader.poll_errors()) == 2


@pytest.mark.usefixtures("in_order")
def test_a_process_that_dies_while_it_is_waited_for(scene: Scene) -> None:
    """Killed during `close`: a further one finishes. Killed again, it stays pending, and `close` ends."""
    holds = [scene.hold(times=1) for _ in range(2)]
    (stem,) = scene.save(100)
    uploader = scene.uploader(pause_s=1000)
    uploader.notify()
    left: list[Stem] = []
    closing = threading.Thread(target=lambda: left.extend(uploader.close(None)))
    closing.start()
    for held in holds:
        assert held.reached.wait(DEADLINE_S)
        os.kill(scene.host(), signal.SIGKILL)
    closing.join(DEADLINE_S)
    assert not closing.is_alive()
    assert left == [stem]
    assert drain(scene.tier, scene.run).committed == (stem,)


def test_the_uploader_thread_that_dies_is_started_again_by_the_next_save(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Row 48: a MemoryError in it: training goes on, the error shows, the process that it had goes on with its work, and nothing is done twice."""
    uploader = scene.uploader()
    note, dead = uploader.tally.note, threading.Event()

    def no_memory(event: Event) -> None:
        if not dead.is_set():
            dead.set()
            raise MemoryError
        note(event)

    monkeypatch.setattr(uploader.tally, "note", no_memory)
    stems = scene.save(100)
    uploader.notify()
    assert scene.wait_for(Failed).error.hint == "it is started again by the next save"
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-uploader":
            thread.join(DEADLINE_S)
    stems += scene.save(200)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert sorted(scene.manifests()) == sorted(map(str, stems))
    assert scene.were_sent_once(stems)
    assert [str(error) for error in uploader.poll_errors()] == [
        "the uploader thread died: MemoryError() - it is started again by the next save"
    ]
    assert "is started again" in caplog.text


def test_a_close_gives_what_a_dead_thread_has_left_a_last_try(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 48: no save comes after its death."""
    uploader = scene.uploader()

    def no_memory(supervisor: Supervisor) -> None:
        raise MemoryError

    (stem,) = scene.save(100)
    with monkeypatch.context() as patch:
        patch.setattr(Supervisor, "run", no_memory)
        uploader.notify()
        scene.wait_for(Failed)
    for thread in threading.enumerate():
        if thread.name == "ckptmgr-uploader":
            thread.join(DEADLINE_S)
    assert uploader.close(DEADLINE_S) == []
    assert scene.manifests() == [str(stem)]


def test_a_thread_that_cannot_be_started_is_no_failure_of_the_save(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of the machine on threads: it is said, and the next save tries again."""
    uploader = scene.uploader()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        stems = scene.save(100)
        uploader.notify()
    (error,) = uploader.poll_errors()
    assert "cannot be started: can't start new thread" in str(error)
    uploader.notify()
    assert uploader.close(DEADLINE_S) == []
    assert scene.manifests() == [str(stems[0])]
