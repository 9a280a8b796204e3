"""HTTP/1.1 over kept-alive connections to one endpoint: what the standard library's client does, at a tenth of its price per request.

Every request is made once. A connection carries one request at a time and goes back to the pool when its answer was read to the end; anything
else closes it. Bytes go from the caller's buffer to the socket and back without a layer between.
"""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import ssl
import time
import weakref

from ckptmgr.backends.httpconnection import (
    BLOCK_BYTES,
    BadAnswerError,
    Body,
    BrokenConnectionError,
    ConnectError,
    Connection,
    HttpError,
    PlainHttpError,
    StalledError,
    TlsConnection,
    UntrustedError,
    number_in,
)

__all__ = [
    "BLOCK_BYTES",
    "Answer",
    "BadAnswerError",
    "Body",
    "BrokenConnectionError",
    "ConnectError",
    "HttpError",
    "HttpPool",
    "PlainHttpError",
    "StalledError",
    "UntrustedError",
]

# A firewall or a balancer forgets a silent connection without telling us; a new one costs a round trip, a forgotten one a stall.
_IDLE_S = 20.0
_MOST_IDLE = 32
#: OpenSSL's word for an answer that is not TLS.
NOT_TLS = "WRONG_VERSION_NUMBER"


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
        self._idle: collections.deque[Connection] = collections.deque()
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

    def _answer(self, connection: Connection, is_head: bool, *, keep: bool) -> Answer:
        status, headers = connection.read_head()
        if not keep and status < 400:
            raise BadAnswerError(f"answered {status} before the whole request was sent")
        return Answer(self, connection, status, headers, is_head, keep)

    def close(self) -> None:
        """Close the connections that no request uses."""
        _close_all(self._idle)

    def _take(self) -> Connection:
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

    def give_back(self, connection: Connection) -> None:
        """The connection's answer was read to its end."""
        if self._session is None:
            self._session = connection.tls_session
        connection.idle_since_s = time.monotonic()
        self._idle.append(connection)
        if len(self._idle) > _MOST_IDLE:
            with contextlib.suppress(IndexError):
                self._idle.popleft().close()

    def _connect(self) -> Connection:
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
                return Connection(sock, self._stall_s)
            tls = self._handshake(sock, self._context)
        except BaseException:
            sock.close()
            raise
        return TlsConnection(tls, self._stall_s)

    def _handshake(self, sock: socket.socket, context: ssl.SSLContext) -> ssl.SSLSocket:
        try:
            return context.wrap_socket(
                sock, server_hostname=self._address[0], suppress_ragged_eofs=False, session=self._session
            )
        except ssl.SSLCertVerificationError as error:
            raise UntrustedError(error.verify_message) from error
        except ssl.SSLError as error:
            self._session = None
            if error.reason == NOT_TLS:
                raise PlainHttpError("it does not speak TLS") from error
            raise BrokenConnectionError(f"no TLS connection: {error}") from error
        except TimeoutError as error:
            raise StalledError(f"no TLS connection within {self._connect_s:g} s") from error
        except OSError as error:
            # The next try does without the session that may have been the reason.
            self._session = None
            raise BrokenConnectionError(f"no TLS connection: {error}") from error


def _close_all(connections: collections.deque[Connection]) -> None:
    while connections:
        with contextlib.suppress(IndexError):
            connections.pop().close()


class Answer:
    """The answer to one request; for one thread. Read it to its end, or close it.

    Attributes:
        status: from 200 on.
        headers: names in lower case; what came twice is joined by a comma.
    """

    def __init__(
        self,
        pool: HttpPool,
        connection: Connection,
        status: int,
        headers: dict[str, str],
        is_head: bool,
        keep: bool,
    ) -> None:
        self.status = status
        self.headers = headers
        self._pool = pool
        self._connection: Connection | None = connection
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
            self._left = number_in(length, 10)
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

    def splice(self, pipe: int, most: int) -> int | None:
        """As `readinto`, at most `most` bytes into an empty pipe; None if the next ones must be read: they are in the buffer, or not as they came."""
        connection, left = self._connection, self._left
        if connection is None:
            return 0
        if left is None or self._is_chunked or connection.start != connection.end:
            return None
        try:
            count = connection.splice(pipe, min(left, most))
            if count == 0:
                raise BrokenConnectionError(f"closed with {left} bytes of the answer to come")
            if count is not None:
                self._took(connection, count)
            return count
        except BaseException:
            self.close()
            raise

    def _took(self, connection: Connection, count: int) -> None:
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

    def _next_chunk(self, connection: Connection) -> int:
        size = number_in(connection.line().partition(b";")[0].strip().decode("latin-1"), 16)
        if size == 0:
            while connection.line():
                # Trailers tell nothing that is needed.
                pass
        return size
