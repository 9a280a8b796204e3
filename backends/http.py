"""HTTP/1.1 over kept-alive connections to one endpoint: what the standard library's client does, at a tenth of its price per request.

Every request is made once. A connection carries one request at a time and goes back to the pool when its answer was read to the end; anything
else closes it. Bytes go from the caller's buffer to the socket and back without a layer between.

A limit on silence is kept by the kernel where it can be (`SO_RCVTIMEO`, `SO_SNDTIMEO`: they start anew whenever a byte moves), which saves two system
calls per block. Over TLS Python counts it per block, so blocks there are small enough for a slow link.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import socket
import ssl
import struct
import time
import weakref
from typing import Protocol

#: What is sent or received at a time, and the longest head of an answer.
BLOCK_BYTES = 512 << 10
# A firewall or a balancer forgets a silent connection without telling us; a new one costs a round trip, a forgotten one a stall.
_IDLE_S = 20.0
_MOST_IDLE = 32
_JOINED_BYTES = 64 << 10


class HttpError(Exception):
    """Raised when there is no whole answer. What became of the request is not known, except after ConnectError."""


class ConnectError(HttpError):
    """Raised when there is no connection: nothing was sent."""


class StalledError(HttpError):
    """Raised when no byte moved for the limit, or no connection came about within its own."""


class BrokenConnectionError(HttpError):
    """Raised when the connection ended in the middle of a request or its answer."""


class UntrustedError(HttpError):
    """Raised when the certificate is not one of the host's, or of no known authority."""


class BadAnswerError(HttpError):
    """Raised when something answers that does not speak HTTP/1.1, or not as it should."""


class Body(Protocol):
    """A body of known length that is read as it is sent."""

    def __len__(self) -> int: ...

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes at the beginning of `view`; how many."""


class HttpPool:
    """Connections to one endpoint. Safe from any thread; a forked child gets connections of its own.

    Args:
        host: a name or an address, without brackets.
        connect_s: seconds for a connection to come about.
        stall_s: seconds without a byte, in either direction, after which a request is cut.
        context: for TLS; None for plain HTTP.
    """

    def __init__(
        self, host: str, port: int, *, connect_s: float, stall_s: float, context: ssl.SSLContext | None = None
    ) -> None:
        self._address = (host, port)
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._context = context
        self._session: ssl.SSLSession | None = None
        self._idle: collections.deque[_Connection] = collections.deque()
        self._pid = os.getpid()
        # Not `__del__`: among garbage that refers to itself the sockets could go first, with a warning.
        weakref.finalize(self, _close_all, self._idle).atexit = False

    def request(self, head: bytes, body: bytes | Body | None = None, *, is_head: bool = False) -> Answer:
        """Send a request and read the head of its answer.

        Args:
            head: request line and headers, the length of the body among them, and the empty line.
            is_head: the request is a HEAD, whose answer has no body.

        Returns:
            the answer, whose body is still to be read, or closed.
        """
        connection = self._take()
        try:
            is_whole = True
            try:
                is_whole = connection.send_request(head, body)
            except BrokenConnectionError:
                # A server that refuses a body says so, and hangs up without reading it: what it said may have arrived.
                is_whole = False
                with contextlib.suppress(HttpError):
                    return self._answer(connection, is_head, keep=False)
                raise
            return self._answer(connection, is_head, keep=is_whole)
        except BaseException:
            connection.close()
            raise

    def _answer(self, connection: _Connection, is_head: bool, *, keep: bool) -> Answer:
        status, headers = connection.read_head()
        if not keep and status < 400:
            raise BadAnswerError(f"answered {status} before the whole request was sent")
        return Answer(self, connection, status, headers, is_head, keep)

    def close(self) -> None:
        """Close the connections that no request uses."""
        _close_all(self._idle)

    def _take(self) -> _Connection:
        if os.getpid() != self._pid:
            # The parent's: closing our copies of its sockets does not disturb it.
            self.close()
            self._pid, self._session = os.getpid(), None
        oldest_s = time.monotonic() - _IDLE_S
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return self._connect()
            if connection.idle_since_s > oldest_s and not connection.is_readable():
                return connection
            connection.close()

    def give_back(self, connection: _Connection) -> None:
        """The connection's answer was read to its end."""
        if self._session is None:
            self._session = connection.tls_session
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > _MOST_IDLE:
            with contextlib.suppress(IndexError):
                self._idle.popleft().close()

    def _connect(self) -> _Connection:
        try:
            sock = socket.create_connection(self._address, self._connect_s)
        except TimeoutError as error:
            raise StalledError(f"no connection within {self._connect_s:g} s") from error
        except OSError as error:
            raise ConnectError(str(error)) from error
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if self._context is None:
                return _Connection(sock, self._stall_s)
            tls = self._handshake(sock, self._context)
        except BaseException:
            sock.close()
            raise
        return _TlsConnection(tls, self._stall_s)

    def _handshake(self, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            return context.wrap_socket(
                sock, server_hostname=self._address[0], suppress_ragged_eofs=False, session=self._session
            )
        except ssl.SSLCertVerificationError as error:
            raise UntrustedError(error.verify_message) from error
        except TimeoutError as error:
            raise StalledError(f"no TLS connection within {self._connect_s:g} s") from error
        except OSError as error:
            # The next try does without the session that may have been the reason.
            self._session = None
            raise BrokenConnectionError(f"no TLS connection: {error}") from error


def _close_all(connections: collections.deque[_Connection]) -> None:
    while connections:
        with contextlib.suppress(IndexError):
            connections.pop().close()


class _Connection:
    """A plain connection, and the buffer through which all goes that it carries.

    Attributes:
        tls_session: what a further connection may begin with, at half the price.
    """

    tls_session: ssl.SSLSession | None = None

    def __init__(self, sock: socket.socket, stall_s: float) -> None:
        self._sock = sock
        self.idle_since_s = 0.0
        self._memory = bytearray(BLOCK_BYTES)
        self.view = memoryview(self._memory)
        # Bytes that were received and not yet asked for.
        self.start = self.end = 0
        self._is_informed = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._set_limit(stall_s)

    def _set_limit(self, stall_s: float) -> None:
        self._sock.settimeout(None)
        limit = struct.pack("@ll", int(stall_s), int(stall_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def close(self) -> None:
        self._sock.close()

    def is_readable(self) -> bool:
        """Whether something arrived without being asked for: the end, mostly."""
        return bool(self._poll.poll(0))

    def is_answered(self) -> bool:
        """Whether an answer proper begins to arrive while the request is still being sent."""
        if self._is_informed or not self.is_readable():
            return False
        with contextlib.suppress(OSError):
            # "100 Continue", unasked: it stays where it is, and what may follow is heard at the end.
            self._is_informed = self._sock.recv(10, socket.MSG_PEEK) == b"HTTP/1.1 1"
        return not self._is_informed

    def send(self, data: memoryview) -> None:
        while data:
            try:
                count = self._sock.send(data)
            except (BlockingIOError, TimeoutError) as error:
                raise StalledError("nothing could be sent") from error
            except OSError as error:
                raise BrokenConnectionError(str(error)) from error
            if count == len(data):
                return
            data = data[count:]

    def receive(self, view: memoryview) -> int:
        """Put what arrives at the beginning of `view`; how many bytes, 0 at the end of the connection."""
        try:
            return self._sock.recv_into(view)
        except (BlockingIOError, TimeoutError) as error:
            raise StalledError("nothing arrived") from error
        except OSError as error:
            raise BrokenConnectionError(str(error)) from error

    def send_request(self, head: bytes, body: bytes | Body | None) -> bool:
        """Send all of it, unless the answer comes before its end: then False."""
        self.start = self.end = 0
        self._is_informed = False
        if body is None:
            self.send(memoryview(head))
            return True
        if isinstance(body, bytes):
            if len(body) <= _JOINED_BYTES:
                self.send(memoryview(head + body))
                return True
            self.send(memoryview(head))
            return self._send_blocks(memoryview(body))
        return self._send_body(head, body)

    def _send_blocks(self, data: memoryview) -> bool:
        for at in range(0, len(data), BLOCK_BYTES):
            if self.is_answered():
                return False
            self.send(data[at : at + BLOCK_BYTES])
        return True

    def _send_body(self, head: bytes, body: Body) -> bool:
        view, left = self.view, len(body)
        used = len(head)
        view[:used] = head
        while True:
            count = body.readinto(view[used:]) if left else 0
            if left and not count:
                raise ValueError("the body ended before its length")
            self.send(view[: used + count])
            left -= count
            if not left:
                return True
            if self.is_answered():
                return False
            used = 0

    def read_head(self) -> tuple[int, dict[str, str]]:
        """Status and headers, names in lower case, of the answer proper."""
        while True:
            status, headers = _parse_head(self._receive_head())
            if status >= 200:
                return status, headers
            if status == 101:
                raise BadAnswerError("answered 101 to what it was not asked")

    def _receive_head(self) -> bytes:
        looked = self.start
        while True:
            at = self._memory.find(b"\r\n\r\n", looked, self.end)
            if at >= 0:
                head = bytes(self.view[self.start : at])
                self.start = at + 4
                return head
            looked = max(self.start, self.end - 3)
            if self.end - self.start > 16 and not self._memory.startswith(b"HTTP/1.", self.start):
                raise BadAnswerError(f"begins with {bytes(self.view[self.start : self.start + 16])!r}")
            if self.end == len(self.view):
                raise BadAnswerError("the head of the answer has no end")
            count = self.receive(self.view[self.end :])
            if not count:
                raise BrokenConnectionError(
                    "closed without an answer" if not self.end else "closed in an answer's head"
                )
            self.end += count

    def take(self, view: memoryview) -> int:
        """As `receive`, beginning with what was received before."""
        held = self.end - self.start
        if not held:
            return self.receive(view)
        count = min(held, len(view))
        view[:count] = self.view[self.start : self.start + count]
        self.start += count
        return count

    def refill(self) -> int:
        """Receive into the empty buffer; how many bytes, 0 at the end of the connection."""
        self.start = self.end = 0
        self.end = self.receive(self.view)
        return self.end

    def line(self) -> bytes:
        """The next line, without its end."""
        while True:
            at = self._memory.find(b"\r\n", self.start, self.end)
            if at >= 0:
                line = bytes(self.view[self.start : at])
                self.start = at + 2
                return line
            self._fill()

    def _fill(self) -> None:
        if self.start:
            held = bytes(self.view[self.start : self.end])
            self.view[: len(held)] = held
            self.start, self.end = 0, len(held)
        if self.end > 4096:
            raise BadAnswerError("a line in the answer has no end")
        count = self.receive(self.view[self.end :])
        if not count:
            raise BrokenConnectionError("closed in the middle of an answer")
        self.end += count


class _TlsConnection(_Connection):
    _sock: ssl.SSLSocket

    @property
    def tls_session(self) -> ssl.SSLSession | None:  # type: ignore[override]
        return self._sock.session

    def _set_limit(self, stall_s: float) -> None:
        self._sock.settimeout(stall_s)

    def is_readable(self) -> bool:
        return self._sock.pending() > 0 or super().is_readable()

    def is_answered(self) -> bool:
        # The server's session tickets make it look as if.
        return False

    def receive(self, view: memoryview) -> int:
        # OpenSSL gives one record of at most 16 KiB at a time: as many as have arrived, or whoever is above works for each.
        read, poll, wanted, filled = self._sock.read, self._poll.poll, len(view), 0
        try:
            while True:
                # typeshed knows neither this buffer nor this result.
                count: int = read(wanted - filled, view[filled:])  # type: ignore[assignment]
                filled += count
                if not count or filled == wanted or not poll(0):
                    return filled
        except OSError as error:
            if filled:
                # What arrived is good, and the next call meets the same.
                return filled
            if isinstance(error, TimeoutError):
                raise StalledError("nothing arrived") from error
            raise BrokenConnectionError(str(error)) from error


class Answer:
    """The answer to one request; for one thread. Read it to its end, or close it.

    Attributes:
        status: from 200 on.
        headers: names in lower case; what came twice is joined by a comma.
    """

    def __init__(
        self,
        pool: HttpPool,
        connection: _Connection,
        status: int,
        headers: dict[str, str],
        is_head: bool,
        keep: bool,
    ) -> None:
        self.status = status
        self.headers = headers
        self._pool = pool
        self._connection: _Connection | None = connection
        self._keep = keep and "close" not in headers.get("connection", "").lower()
        # Of the buffer's bytes, those that the last block was made of.
        self._given = 0
        # Bytes to come; of this chunk; or None until the connection is closed.
        self._left: int | None
        self._is_chunked = False
        coding = headers.get("transfer-encoding")
        length = headers.get("content-length")
        if is_head or status in (204, 304):
            self._left = 0
        elif coding is not None:
            if coding.lower() != "chunked":
                raise BadAnswerError(f"the answer is coded as {coding!r}")
            self._is_chunked = True
            self._left = self._next_chunk(connection)
        elif length is not None:
            self._left = _number(length, 10)
        else:
            self._left, self._keep = None, False
        if self._left == 0:
            self._end()

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes of the body at the beginning of `view`, as many as there are now; how many, 0 at the end."""
        connection = self._connection
        if connection is None or not view:
            return 0
        try:
            left = self._left
            count = connection.take(view if left is None or left >= len(view) else view[:left])
            if left is None:
                if not count:
                    self._end()
                return count
            if not count:
                raise BrokenConnectionError(f"closed with {left} bytes of the answer to come")
            self._took(connection, count)
            return count
        except BaseException:
            self.close()
            raise

    def _took(self, connection: _Connection, count: int) -> None:
        if self._left is None:
            return
        self._left -= count
        if self._left == 0:
            if self._is_chunked:
                if connection.line():
                    raise BadAnswerError("a chunk is longer than it says")
                self._left = self._next_chunk(connection)
            if self._left == 0:
                self._end()

    def block(self) -> memoryview:
        """The next bytes of the body as they arrive, good until the next call; empty at the end."""
        connection = self._connection
        try:
            # What was given is counted now: with the last byte the connection, and this buffer, may go to another thread.
            if connection is not None and self._given:
                connection.start += self._given
                self._took(connection, self._given)
                self._given = 0
                connection = self._connection
            if connection is None:
                return memoryview(b"")
            if connection.start == connection.end and not connection.refill():
                if self._left is not None:
                    raise BrokenConnectionError(f"closed with {self._left} bytes of the answer to come")
                self._end()
                return memoryview(b"")
            end = connection.end
            if self._left is not None:
                end = min(end, connection.start + self._left)
            self._given = end - connection.start
            return connection.view[connection.start : end]
        except BaseException:
            self.close()
            raise

    def read(self, most: int) -> bytes:
        """All of the body.

        Raises:
            BadAnswerError: it is longer than `most` bytes.
        """
        parts: list[bytes] = []
        total = 0
        while block := self.block():
            total += len(block)
            if total > most:
                self.close()
                raise BadAnswerError(f"an answer of more than {most} bytes")
            parts.append(bytes(block))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Be done with it; what has not been read is lost, and the connection with it."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _end(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        # What follows an answer that nobody asked for would be taken for the next one.
        if self._keep and connection.start == connection.end:
            self._pool.give_back(connection)
        else:
            connection.close()

    def _next_chunk(self, connection: _Connection) -> int:
        size = _number(connection.line().partition(b";")[0].strip().decode("latin-1"), 16)
        if size == 0:
            while connection.line():
                # Trailers tell nothing that is needed.
                pass
        return size


def _parse_head(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    status = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (status.isdecimal() and status.isascii() and len(status) == 3):
        raise BadAnswerError(f"begins with {first[:64]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name or name != name.strip():
            raise BadAnswerError(f"has the header {line[:64]!r}")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    if version == "HTTP/1.0":
        headers.setdefault("connection", "close")
    return int(status), headers


def _number(text: str, base: int) -> int:
    digits = "0123456789abcdefABCDEF" if base == 16 else "0123456789"
    if not text or len(text) > 18 or text.strip(digits):
        raise BadAnswerError(f"{text[:32]!r} is no length")
    return int(text, base)
