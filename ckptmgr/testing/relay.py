"""A network between a client and a test server: counts requests, is as slow as asked for, and stands still on demand.

    with Relay(server.url, bytes_per_s=1_000_000) as relay:
        os.environ["AWS_ENDPOINT_URL"] = relay.url

It passes bytes on unchanged, and so works in front of every server, also of one that checks signatures.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from typing_extensions import Self

_BLOCK_BYTES = 64 << 10
_REQUEST = re.compile(rb"(?:GET|PUT|POST|HEAD|DELETE) \S+ HTTP/1\.1\r\n")
_LINE_BYTES = 4096


class Relay:
    """Listens on 127.0.0.1 between `__enter__` and `__exit__`. All methods may be called from any thread.

    Args:
        target: the URL of the server.
        bytes_per_s: how much passes from clients to the server, all connections together; None for no limit.
        buffer_bytes: how much the kernel takes from a client beyond what was passed on: with little, a client notices at once that nothing is.
            None leaves it to the kernel, which takes some MiB.

    Attributes:
        url: the endpoint for clients.
        frozen: set while nothing passes.
    """

    def __init__(self, target: str, *, bytes_per_s: float | None = None, buffer_bytes: int | None = None) -> None:
        parts = urlsplit(target)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._s_per_byte = 0.0 if bytes_per_s is None else 1 / bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._passed = 0
        self._freeze_at: int | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self.frozen = threading.Event()
        self._closing = threading.Event()
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        if buffer_bytes is not None:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def requests(self, pattern: str = "") -> list[str]:
        """The first lines of the requests so far that `pattern` is found in, as `PUT /bucket/key?query`."""
        with self._lock:
            return [line for line in self._lines if re.search(pattern, line)]

    def forget(self) -> None:
        """Begin to count anew."""
        with self._lock:
            self._lines.clear()

    def freeze_after(self, count: int) -> None:
        """Stand still, in both directions, once `count` more bytes have passed to the server."""
        with self._lock:
            self._freeze_at = self._passed + count

    def thaw(self) -> None:
        """Let everything pass again, what is held first."""
        with self._lock:
            self._freeze_at = None
            self.frozen.clear()
            self._flowing.set()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._flowing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = [*self._sockets]
        for one in sockets:
            _close(one)

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._target)
            except OSError:
                return
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            threading.Thread(target=self._pass_up, args=(client, server), daemon=True).start()
            threading.Thread(target=self._pass_down, args=(server, client), daemon=True).start()

    def _pass_up(self, client: socket.socket, server: socket.socket) -> None:
        tail = b""
        with contextlib.suppress(OSError):
            while block := client.recv(_BLOCK_BYTES):
                tail = self._count(tail, block)
                self._wait_for_leave(len(block))
                server.sendall(block)
        self._end(client, server)

    def _pass_down(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while block := server.recv(_BLOCK_BYTES):
                self._flowing.wait()
                client.sendall(block)
        self._end(client, server)

    def _count(self, tail: bytes, block: bytes) -> bytes:
        """Note the requests that begin in `block`; returns what may be the beginning of a further one."""
        text = tail + block
        end = 0
        for found in _REQUEST.finditer(text):
            end = found.end()
            with self._lock:
                self._lines.append(found.group().rpartition(b" ")[0].decode("latin-1"))
        return text[max(end, len(text) - _LINE_BYTES) :]

    def _wait_for_leave(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + self._s_per_byte * count
            wait_s = self._free_at - now
            self._passed += count
            if self._freeze_at is not None and self._passed > self._freeze_at:
                self._flowing.clear()
                self.frozen.set()
        if self._s_per_byte:
            self._closing.wait(wait_s)
        self._flowing.wait()

    def _end(self, *sockets: socket.socket) -> None:
        for one in sockets:
            _close(one)
        with self._lock:
            self._sockets -= set(sockets)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
