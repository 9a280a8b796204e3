"""The line between a trainer and its transfer process, and the file that the process writes to."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from ckptmgr.core.errors import AccessDeniedError, UploadError
from ckptmgr.core.layout import Stem
from ckptmgr.transfer import logfile
from ckptmgr.transfer.line import Line
from ckptmgr.transfer.messages import Close, Command, Event, Failed, Hurry, Logged, Moved, Notify, decode, encode

DEADLINE_S = 60.0
STEM = Stem(1, 100, 1, "0123abcd")
Pair = tuple[Line, Line]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a line."""
    ours, theirs = Line.pair()
    other = Line(Connection(theirs.detach()))
    yield ours, other
    ours.close()
    other.close()


def everything(line: Line) -> list[object]:
    """What has arrived."""
    found = []
    while (data := line.receive(0.0)) is not None:
        found.append(decode(data))
    return found


def test_what_is_said_arrives_in_order_and_whole(pair: Pair) -> None:
    ours, theirs = pair
    said: list[Command | Event] = [Logged(name="a", level=20, text="x" * 1000), Moved(stem=STEM, sent_bytes=5), Close()]
    for message in said:
        ours.send(message)
    assert everything(theirs) == said


def test_nobody_waits_for_the_other_side_to_read(pair: Pair) -> None:
    """Ten thousand messages that nobody reads; then all that count come, in order, and what was said twice meanwhile comes once."""
    ours, theirs = pair
    for number in range(900):
        ours.send(Logged(name="a", level=20, text=f"{number}"))
        ours.send(Moved(stem=STEM, sent_bytes=number))
    for _ in range(10_000):
        ours.send(Notify())
    ours.send(Hurry())
    found = []
    for _ in range(10_000):
        data = theirs.receive(0.0)
        if data is not None:
            found.append(decode(data))
        else:
            ours.flush(0.0)
            if (data := theirs.receive(0.0)) is None:
                break
            found.append(decode(data))
    logged = [int(message.text) for message in found if isinstance(message, Logged)]
    assert logged == list(range(900))
    assert found[-2:] == [Notify(), Hurry()]
    assert found.count(Notify()) == 1
    progress = [message.sent_bytes for message in found if isinstance(message, Moved)]
    assert progress == sorted(progress)
    assert 0 < len(progress) < 900


def test_only_the_newest_thousand_wait(pair: Pair) -> None:
    """A trainer that is stopped for days costs no memory."""
    ours, theirs = pair
    for number in range(5000):
        ours.send(Logged(name="a", level=20, text=f"{number}"))
    found = everything(theirs)
    while len(found) < 5000:
        ours.flush(0.0)
        more = everything(theirs)
        if not more:
            break
        found += more
    numbers = [int(message.text) for message in found if isinstance(message, Logged)]
    assert numbers[-1000:] == list(range(4000, 5000))
    assert len(numbers) < 3000


def test_what_waited_goes_out_with_a_look_for_something_to_receive(pair: Pair) -> None:
    """A side that only listens does not keep what it had to say."""
    ours, theirs = pair
    while True:  # until it is full
        ours.send(Logged(name="a", level=20, text="x" * 10_000))
        if ours._waiting:
            break
    ours.send(Close())
    everything(theirs)
    assert ours.receive(0.0) is None
    assert everything(theirs)[-1] == Close()


def test_a_flush_waits_for_a_reader(pair: Pair) -> None:
    """The last words are heard by a side that reads them late."""
    ours, theirs = pair
    while not ours._waiting:
        ours.send(Logged(name="a", level=20, text="x" * 10_000))
    ours.send(Close())
    flushing = threading.Thread(target=ours.flush, args=(DEADLINE_S,))
    flushing.start()
    found: list[object] = []
    while Close() not in found:
        data = theirs.receive(DEADLINE_S)
        assert data is not None
        found.append(decode(data))
    flushing.join(DEADLINE_S)
    assert not flushing.is_alive()


@pytest.mark.parametrize("end", ["hang up here", "hang up there", "die there"])
def test_the_end_wakes_a_reader_after_what_had_been_said(pair: Pair, end: str) -> None:
    ours, theirs = pair
    theirs.send(Close())
    heard: list[object] = []
    ended = threading.Event()

    def read() -> None:
        try:
            while True:
                data = ours.receive(DEADLINE_S)
                heard.append(None if data is None else decode(data))
        except EOFError:
            ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    (theirs.close if end == "die there" else ours.hang_up if end == "hang up here" else theirs.hang_up)()
    assert ended.wait(DEADLINE_S)
    assert heard == [Close()]


def test_a_line_that_has_ended_takes_everything(pair: Pair) -> None:
    """Whoever speaks into it is not told: the reader is."""
    ours, theirs = pair
    theirs.close()
    for _ in range(3):
        ours.send(Notify())
        ours.flush(DEADLINE_S)
    ours.hang_up()
    ours.close()
    ours.send(Notify())
    ours.hang_up()
    ours.close()
    with pytest.raises(EOFError):
        ours.receive(0.0)


def test_the_number_of_a_closed_line_is_not_touched_again(pair: Pair) -> None:
    """A file that is opened next gets it."""
    ours, _ = pair
    other, end = socket.socketpair()
    with other, end:
        number = ours._connection.fileno()
        ours.close()
        os.dup2(end.fileno(), number)
        try:
            ours.send(Notify())
            ours.hang_up()
            ours.forget()
            ours.close()
            os.write(number, b"alive")
            assert other.recv(100) == b"alive"
        finally:
            os.close(number)


def test_an_error_that_cannot_be_pickled_is_told_by_its_text() -> None:
    """A user's backend may put anything into an error."""
    event = Failed(error=AccessDeniedError("no right", hint="ask", lock=threading.Lock()), stem=STEM)
    told = decode(encode(event))
    assert isinstance(told, Failed)
    assert type(told.error) is UploadError
    assert (str(told.error), told.stem) == ("no right - ask", STEM)
    kept = decode(encode(Failed(error=AccessDeniedError("no right", key="a/b"), stem=STEM)))
    assert isinstance(kept, Failed)
    assert isinstance(kept.error, AccessDeniedError)
    assert kept.error.key == "a/b"


# --- the log file -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def appended(tmp_path: Path) -> Iterator[Callable[[int, bytes], None]]:
    """Appends to the log through one of two descriptors, as two processes would."""
    with logfile.log_file(tmp_path) as first, logfile.log_file(tmp_path) as second:
        fds = (os.dup(first), os.dup(second))

        def append(which: int, data: bytes) -> None:
            os.write(fds[which], data)
            logfile.keep_small(tmp_path, (fds[which],))

        yield append
        for fd in fds:
            os.close(fd)


def test_the_log_stays_small(tmp_path: Path, appended: Callable[[int, bytes], None]) -> None:
    """Two files, of about a megabyte each, and the newest lines in them."""
    line = b"x" * 9999 + b"\n"
    for number in range(1000):
        appended(number % 2, line)
    appended(0, b"the last from the first\n")
    appended(1, b"the last from the second\n")
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["transfer.log", "transfer.old.log"]
    assert all(path.stat().st_size <= logfile.MOST_BYTES + 3 * len(line) for path in tmp_path.iterdir())
    text = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert b"the last from the first" in text
    assert b"the last from the second" in text


def test_a_log_whose_folder_is_gone_stays_small_too(tmp_path: Path) -> None:
    folder = tmp_path / "tier"
    folder.mkdir()
    with logfile.log_file(folder) as fd:
        (folder / "transfer.log").unlink()
        folder.rmdir()
        for _ in range(300):
            os.write(fd, b"x" * 10_000)
            logfile.keep_small(folder, (fd,))
        assert os.fstat(fd).st_size <= logfile.MOST_BYTES
    with logfile.log_file(folder) as fd:
        assert os.readlink(f"/proc/self/fd/{fd}") == os.devnull
        logfile.keep_small(folder, (fd,))
