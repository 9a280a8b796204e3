"""The line between a trainer and its transfer process: messages over a socket, neither side of which can hold up the other.

A trainer that is stopped in a debugger must not stall the uploads, and a transfer process that hangs must not stall a save: so nobody ever waits for
the other to read.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import weakref
from collections import deque
from multiprocessing.connection import Connection

from ckptmgr.transfer.messages import Command, Event, Moved, encode

_MOST_WAITING = 1000

# Open lines. A forked DataLoader worker closes its copies at once: it must not talk to the transfer process, nor keep the line open.
_open: weakref.WeakSet[Line] = weakref.WeakSet()


def _close_in_child() -> None:
    for line in list(_open):
        line.forget()


os.register_at_fork(after_in_child=_close_in_child)


class Line:
    """One end. `send`, `flush` and `hang_up` are safe from any thread; one thread receives, and closes.

    What the other side is too slow to read waits here, the newest thousand messages of it, and goes out with what is sent or received next;
    progress is dropped instead, and so is a repetition of what waits.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._room = select.poll()
        self._room.register(connection.fileno(), select.POLLOUT)
        _open.add(self)

    @classmethod
    def pair(cls) -> tuple[Line, socket.socket]:
        """A new line: this end, and the other one, to be given away."""
        ours, theirs = socket.socketpair()
        return cls(Connection(ours.detach())), theirs

    def send(self, message: Command | Event) -> None:
        """Send a message, now or soon. Never blocks, never fails; what is sent to somebody who is gone is lost."""
        data = encode(message)
        with self._sending:
            if self._write_waiting(0.0):
                self._write(data)
            elif not isinstance(message, Moved) and data not in self._waiting:
                self._waiting.append(data)

    def flush(self, timeout_s: float) -> None:
        """Send what waits, as far as the other side reads it within that time."""
        with self._sending:
            while self._waiting and self._write_waiting(timeout_s):
                pass

    def receive(self, timeout_s: float) -> bytes | None:
        """The next message, for `messages.decode`; None if none comes in time.

        Raises:
            EOFError: the other side is gone, or somebody has hung up. What had been sent before was received before.
        """
        # Not if another thread is sending: whoever listens must not wait for that.
        if self._sending.acquire(blocking=False):
            try:
                self._write_waiting(0.0)
            finally:
                self._sending.release()
        try:
            return self._connection.recv_bytes() if self._connection.poll(timeout_s) else None
        except OSError as error:
            raise EOFError from error

    def hang_up(self) -> None:
        """End the line, for a thread that is receiving here as well as for the other side."""
        # Not close: that would wake nobody, and leave a number that the next open file gets.
        with (
            self._sending,
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connection.fileno())) as same,
        ):
            same.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the descriptor back. By the thread that receives."""
        with self._sending:
            _open.discard(self)
            self._waiting.clear()
            self._connection.close()

    def forget(self) -> None:
        """As `close`, in a forked child, where another thread may have held the lock when it was made."""
        self._connection.close()

    # --- with the lock held -----------------------------------------------------------------------------------------------

    def _write_waiting(self, timeout_s: float) -> bool:
        """Send what waits; whether there is room for more."""
        while self._has_room(timeout_s if self._waiting else 0.0):
            if not self._waiting:
                return True
            self._write(self._waiting.popleft())
        return False

    def _has_room(self, timeout_s: float) -> bool:
        """Whether the next message will be taken at once: a socket says so when three quarters of its buffer are free.

        A line that is broken has room, too: writing will show it.
        """
        return self._connection.closed or bool(self._room.poll(timeout_s * 1000))

    def _write(self, data: bytes) -> None:
        try:
            self._connection.send_bytes(data)
        except OSError:
            self._waiting.clear()
