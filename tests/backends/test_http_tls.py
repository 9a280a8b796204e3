"""HTTP over TLS: certificates, sessions, and connections that end or fall silent."""

from __future__ import annotations

import os
import socket
import ssl
from pathlib import Path

import pytest

from ckptmgr.backends.http import (
    BLOCK_BYTES,
    BrokenConnectionError,
    HttpPool,
    PlainHttpError,
    StalledError,
    UntrustedError,
)
from ckptmgr.testing.certificates import make_certificates
from ckptmgr.testing.scripted import Peer, Server

DEADLINE_S = 60.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
BIG = os.urandom(3 * BLOCK_BYTES + 17)


class Source:
    """A body that is read as it is sent."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self._length = len(data)

    def __len__(self) -> int:
        return self._length

    def readinto(self, view: memoryview) -> int:
        count = min(len(view), len(self._data))
        view[:count] = self._data[:count]
        self._data = self._data[count:]
        return count


def put(length: int) -> bytes:
    return b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For the server, and for a client that trusts it."""
    made = make_certificates(tmp_path_factory.mktemp("tls"))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.load_verify_locations(made.authority)
    return server, client


def tls_pool(server: Server, context: ssl.SSLContext, host: str = "127.0.0.1", **options: float) -> HttpPool:
    limits = {"connect_s": DEADLINE_S, "stall_s": DEADLINE_S, **options}
    return HttpPool(host, server.port, context=context, **limits)


def test_tls(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """The same over TLS; a further connection goes on with the session of the first."""
    reused: list[bool | None] = []
    with Server(contexts[0]) as server:

        def play(peer: Peer) -> None:
            assert isinstance(peer.sock, ssl.SSLSocket)
            reused.append(peer.sock.session_reused)
            server.echo(peer)

        server.play = play
        pool = tls_pool(server, contexts[1])
        for body in (b"", b"small", BIG, Source(BIG)):
            assert pool.request(put(len(body)), body).read(1 << 30) == (body if isinstance(body, bytes) else BIG)
        assert server.connections == 1
        first = pool.request(put(1), b"1")
        assert pool.request(put(1), b"2").read(1 << 30) == b"2"
        assert first.read(1 << 30) == b"1"
        assert server.connections == 2
        pool.close()
    assert reused == [False, True]


def test_certificates_are_checked(
    contexts: tuple[ssl.SSLContext, ssl.SSLContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown authority, and another host's certificate."""
    connect = socket.create_connection
    with Server(contexts[0]) as server:
        with pytest.raises(UntrustedError):
            tls_pool(server, ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)).request(GET)
        monkeypatch.setattr(socket, "create_connection", lambda address, timeout: connect(("127.0.0.1", server.port)))
        with pytest.raises(UntrustedError):
            tls_pool(server, contexts[1], "another.example").request(GET)
        assert server.bodies == []


def test_a_port_that_does_not_speak_tls(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """Told apart from a connection that broke: trying again is of no use."""

    def play(peer: Peer) -> None:
        peer.sock.recv(64)
        peer.send(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    with Server() as server:
        server.play = play
        with pytest.raises(PlainHttpError):
            tls_pool(server, contexts[1]).request(GET)


def test_tls_that_ends_without_saying_so(contexts: tuple[ssl.SSLContext, ssl.SSLContext], tmp_path: Path) -> None:
    """Whoever cuts the connection cannot make a short body look whole."""
    with Server(contexts[0]) as server:

        def play(peer: Peer) -> None:
            peer.request()
            peer.send(b"HTTP/1.1 200 OK\r\n\r\nhello")
            peer.sock.shutdown(socket.SHUT_RDWR)

        server.play = play
        with pytest.raises(BrokenConnectionError):
            tls_pool(server, contexts[1]).request(GET).read(1 << 30)


def test_silence_over_tls_is_cut(contexts: tuple[ssl.SSLContext, ssl.SSLContext]) -> None:
    """In the handshake, in the answer, and while sending."""
    with Server() as plain:
        plain.play = lambda peer: peer.gone.wait(DEADLINE_S)
        with pytest.raises(StalledError):
            tls_pool(plain, contexts[1], connect_s=0.1).request(GET)
    with Server(contexts[0]) as server:

        def play(peer: Peer) -> None:
            peer.sock.recv(1000)
            peer.gone.wait(DEADLINE_S)

        server.play = play
        for head, body in ((GET, None), (put(64 << 20), Source(bytes(64 << 20)))):
            with pytest.raises(StalledError):
                tls_pool(server, contexts[1], stall_s=0.2).request(head, body)
