"""One connection that speaks HTTP/1.1 on the client's side: a request goes out, the head of its answer comes in, and bytes of its body.

A limit on silence is kept by the kernel where it can be (`SO_RCVTIMEO`, `SO_SNDTIMEO`: they start anew whenever a byte moves), which saves two system
calls per block. Over TLS Python counts it per block, so blocks there are small enough for a slow link.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import struct
from typing import Protocol

from ckptmgr.backends.spliced import CANNOT

#: What is sent or received at a time, and the longest head of an answer.
BLOCK_BYTES = 512 << 10
_JOINED_BYTES = 64 << 10


class HttpError(Exception):
    """Raised when there is no whole answer. What became of the request is not known, except after ConnectError."""


class ConnectError(HttpError):
    """Raised when there is no connection: nothing was sent."""


class StalledError(HttpError):
    """Raised when no byte moved for the limit, or no connection came about within its own."""


class BrokenConnectionError(HttpError):
    """Raised when the connection ended in the middle of a request or its answer."""


class PlainHttpError(HttpError):
    """Raised when what answers the beginning of TLS does not speak TLS."""


class UntrustedError(HttpError):
    """Raised when the certificate is not one of the host's, or of no known authority."""


class BadAnswerError(HttpError):
    """Raised when something answers that does not speak HTTP/1.1, or not as it should."""


class Body(Protocol):
    """A body of known length that is read as it is sent."""

    def __len__(self) -> int: ...

    def readinto(self, view: memoryview) -> int:
        """Put the next bytes at the beginning of `view`; how many."""


class Connection:
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

    def splice(self, pipe: int, most: int) -> int | None:
        """As `receive`, into an empty pipe; None where that cannot be, with nothing received."""
        try:
            return os.splice(self._sock.fileno(), pipe, most)
        except (BlockingIOError, TimeoutError) as error:
            raise StalledError("nothing arrived") from error
        except OSError as error:
            if error.errno in CANNOT:
                return None
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


class TlsConnection(Connection):
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

    def splice(self, pipe: int, most: int) -> int | None:
        # What is on the socket is not yet the bytes.
        return None

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


def number_in(text: str, base: int) -> int:
    digits = "0123456789abcdefABCDEF" if base == 16 else "0123456789"
    if not text or len(text) > 18 or text.strip(digits):
        raise BadAnswerError(f"{text[:32]!r} is no length")
    return int(text, base)
