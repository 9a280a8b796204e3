"""The writer thread: one slot, one job at a time, nothing lost at the end of a program or of a job."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest

from ckptmgr.training.writer import BackgroundWriter

DEADLINE_S = 60.0


class Held:
    """A job that goes on when it is told to."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.thread = ""

    def __call__(self) -> None:
        self.thread = threading.current_thread().name
        self.begun.set()
        assert self.go_on.wait(DEADLINE_S)


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    made = BackgroundWriter("a-writer")
    yield made
    assert made.close(DEADLINE_S)


@pytest.fixture
def held(writer: BackgroundWriter) -> Iterator[Held]:
    """A job in flight."""
    job = Held()
    assert writer.acquire(0)
    writer.submit(job)
    assert job.begun.wait(DEADLINE_S)
    yield job
    job.go_on.set()


def threads_named(name: str) -> list[threading.Thread]:
    """By name, for a count of all would see threads that earlier tests of this process leave behind for a moment."""
    return [thread for thread in threading.enumerate() if thread.name == name]


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def test_nothing_runs_before_it_is_needed_or_after_it_is_done(writer: BackgroundWriter) -> None:
    """A thread only while there is a job, of the name given, and no daemon: a program that ends waits for it."""
    assert writer.acquire(0)
    writer.give_back()
    assert not threads_named("a-writer")
    job = Held()
    assert writer.acquire(0)
    writer.submit(job)
    assert job.begun.wait(DEADLINE_S)
    (thread,) = threads_named("a-writer")
    assert not thread.daemon
    job.go_on.set()
    assert writer.wait(DEADLINE_S)
    thread.join(DEADLINE_S)
    assert not threads_named("a-writer")
    assert job.thread == "a-writer"


def test_the_slot_is_taken_while_a_job_is_in_flight(writer: BackgroundWriter, held: Held) -> None:
    """Who will not wait gets none; who waits gets it when the job is done."""
    assert not writer.acquire(0)
    assert not writer.acquire(0.01)
    assert not writer.wait(0)
    thread, results = in_thread(lambda: writer.acquire(None))
    held.go_on.set()
    thread.join(DEADLINE_S)
    assert results == [True]
    assert writer.wait(0)
    assert not writer.acquire(0)
    writer.give_back()
    assert writer.acquire(0)
    writer.give_back()


def test_jobs_run_one_after_another(writer: BackgroundWriter) -> None:
    """Never two at once, in the order of submitting, each once."""
    order: list[int] = []
    running = threading.Lock()

    def job(number: int) -> Callable[[], None]:
        def run() -> None:
            assert running.acquire(blocking=False)
            order.append(number)
            running.release()

        return run

    for number in range(50):
        assert writer.acquire(DEADLINE_S)
        writer.submit(job(number))
    assert writer.wait(DEADLINE_S)
    assert order == list(range(50))


def test_a_job_needs_the_slot(writer: BackgroundWriter, held: Held) -> None:
    """Without it, or a second time with it, is a mistake of the caller."""
    with pytest.raises(RuntimeError, match="without acquire"):
        writer.submit(lambda: None)
    held.go_on.set()
    assert writer.wait(DEADLINE_S)
    with pytest.raises(RuntimeError, match="without acquire"):
        writer.submit(lambda: None)


def test_giving_back_after_submitting_does_not_free_the_slot(writer: BackgroundWriter, held: Held) -> None:
    """A caller that cleans up after an error must not let a second job in beside the first."""
    writer.give_back()
    assert not writer.acquire(0)


def test_a_job_that_raises_costs_nothing_but_itself(writer: BackgroundWriter, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged with its traceback; the next one runs."""

    def fail() -> None:
        raise KeyError("it")

    assert writer.acquire(0)
    writer.submit(fail)
    assert writer.wait(DEADLINE_S)
    (record,) = caplog.records
    assert "a-writer" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError
    done = threading.Event()
    assert writer.acquire(DEADLINE_S)
    writer.submit(done.set)
    assert done.wait(DEADLINE_S)


def test_after_close_there_is_no_slot(writer: BackgroundWriter, held: Held) -> None:
    """Who waits for it is told at once; the job in flight goes on and can be waited for."""
    thread, results = in_thread(lambda: writer.acquire(None))
    assert not writer.close(0.01)
    thread.join(DEADLINE_S)
    assert results == [False]
    held.go_on.set()
    assert writer.close(DEADLINE_S)
    assert writer.close(0)
    assert not writer.acquire(None)


def test_where_no_thread_can_be_started_the_job_runs_all_the_same(
    writer: BackgroundWriter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the caller's thread, with a warning; the next one gets a thread again if there is one."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    names: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert writer.acquire(0)
        writer.submit(lambda: names.append(threading.current_thread().name))
    assert names == [threading.current_thread().name]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert writer.acquire(0)
    writer.submit(lambda: names.append(threading.current_thread().name))
    assert writer.wait(DEADLINE_S)
    assert names[1:] == ["a-writer"]


PRELUDE = """
import os, sys, threading
from ckptmgr.training.writer import BackgroundWriter
writer = BackgroundWriter()
held = threading.Event()
"""


def run(script: str, *, code: int = 0) -> str:
    """The output of a program that must end with `code` and say nothing on stderr."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


@pytest.mark.parametrize("ending", ["", "sys.exit(3)"], ids=["end", "exit"])
def test_a_program_that_ends_finishes_the_save(ending: str) -> None:
    """Before what registered earlier (the uploader) has its last look, although nobody waits for it or closes."""
    script = """
from ckptmgr.transfer.ending import call_at_end
class At:
    def uploader_end(self):
        print("last look", flush=True)
    def first_end(self):
        print("ending", flush=True)
        held.set()
def job():
    assert held.wait(60)
    print("written", flush=True)
at = At()
call_at_end(at.uploader_end)
assert writer.acquire(0)
writer.submit(job)
call_at_end(at.first_end)
"""
    assert run(script + ending, code=3 if ending else 0).split("\n") == ["ending", "written", "last look", ""]


def test_an_idle_writer_keeps_no_program_alive() -> None:
    """Also one whose slot was taken and never given back."""
    run("assert writer.acquire(0); writer.submit(held.set); assert writer.wait(60); assert writer.acquire(0)")


def test_a_forked_child_owns_no_writer() -> None:
    """There is no slot in it and nothing to wait for, even when it was forked in the middle of everything; the parent's job is not disturbed."""
    script = """
assert writer.acquire(0)
writer.submit(held.wait)
with writer._changed:  # as if another thread were in it
    pid = os.fork()
    if pid == 0:
        assert not writer.acquire(0) and not writer.acquire(None)
        assert writer.wait() and writer.close(None)
        sys.exit(42)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
assert not writer.wait(0)
held.set()
assert writer.wait(60)
"""
    if hasattr(os, "fork"):
        run(script)
