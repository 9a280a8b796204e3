"""An HTTP server on 127.0.0.1 that does to each connection what a test says: answers in pieces, garbage, silence, hang-ups.

with Server() as server:
    server.answers(b"HTTP/1.1 200 OK\\r\\ncontent-length: 2\\r\\n\\r\\nok")
    ...                                   # a client of http://127.0.0.1:<server.port>
    assert server.connections == 1
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

_DEADLINE_S = 60.0


class Peer:
    """The server's end of one connection.

    Attributes:
        number: of the connection, from 0.
        gone: set when the test is over.
    """

    def __init__(self, sock: socket.socket, number: int, gone: threading.Event) -> None:
        self.sock = sock
        self.number = number
        self.gone = gone
        self._held = b""

    def request(self) -> tuple[bytes, bytes]:
        """Head and body of the next request; ("", "") when the client has closed."""
        while b"\r\n\r\n" not in self._held:
            data = self.sock.recv(1 << 20)
            if not data:
                return b"", b""
            self._held += data
        head, _, rest = self._held.partition(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        blocks = [rest]
        got = len(rest)
        while got < length:
            data = self.sock.recv(1 << 20)
            if not data:
                return b"", b""
            blocks.append(data)
            got += len(data)
        body = b"".join(blocks)
        self._held = body[length:]
        return head, body[:length]

    def send(self, *data: bytes) -> None:
        """All of it."""
        self.sock.sendall(b"".join(data))


class Server:
    """Listens on 127.0.0.1; each connection is `play`'s, in a thread of its own, until it returns.

    Args:
        context: to speak TLS.

    Attributes:
        port: where it listens.
        play: what is done with a connection; `echo` unless said otherwise.
        connections: how many there were.
        bodies: of all requests that `echo` has seen.
    """

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.connections = 0
        self.bodies: list[bytes] = []
        self.play: Callable[[Peer], object] = self.echo
        self._context = context
        self._gone = threading.Event()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_DEADLINE_S)
        self.port = self._listener.getsockname()[1]

    def echo(self, peer: Peer) -> None:
        """Answer each request with its body."""
        while True:
            head, body = peer.request()
            if not head:
                return
            self.bodies.append(body)
            peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body)

    def answers(self, *answers: bytes) -> None:
        """Answer each request on a connection with the next of these, and close after the last."""

        def play(peer: Peer) -> None:
            for answer in answers:
                peer.request()
                peer.send(answer)

        self.play = play

    def __enter__(self) -> Self:
        accepting = threading.Thread(target=self._accept, daemon=True)
        accepting.start()
        self._threads.append(accepting)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gone.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(_DEADLINE_S)
            if thread.is_alive():
                raise TimeoutError("a connection of the scripted server does not end")

    def _accept(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:
                return
            number, self.connections = self.connections, self.connections + 1
            thread = threading.Thread(target=self._serve, args=(sock, number), daemon=True)
            thread.start()
            self._threads.append(thread)

    def _serve(self, sock: socket.socket, number: int) -> None:
        with sock, contextlib.suppress(OSError):
            sock.settimeout(_DEADLINE_S)
            if self._context is None:
                self.play(Peer(sock, number, self._gone))
                return
            with self._context.wrap_socket(sock, server_side=True) as tls:
                self.play(Peer(tls, number, self._gone))
