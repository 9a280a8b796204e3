"""HTTP over kept connections, against a server that does what each test says."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from ckptmgr.backends import http
from ckptmgr.backends.http import (
    BLOCK_BYTES,
    Answer,
    BadAnswerError,
    BrokenConnectionError,
    ConnectError,
    HttpPool,
    StalledError,
)
from ckptmgr.testing.scripted import Peer, Server

DEADLINE_S = 60.0
GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
BIG = os.urandom(3 * BLOCK_BYTES + 17)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


def pool_of(server: Server, **options: float) -> HttpPool:
    return HttpPool("127.0.0.1", server.port, **{"connect_s": DEADLINE_S, "stall_s": DEADLINE_S, **options})  # type: ignore[arg-type]


@pytest.fixture
def pool(server: Server) -> Iterator[HttpPool]:
    made = pool_of(server)
    yield made
    made.close()


def put(length: int) -> bytes:
    return b"PUT / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % length


def read(answer: Answer) -> bytes:
    return answer.read(1 << 30)


class Source:
    """A body that is read as it is sent."""

    def __init__(self, data: bytes, *, cut: int | None = None) -> None:
        self._data = memoryview(data)
        self._length = len(data)
        self._left = len(data) if cut is None else cut
        self.read = 0

    def __len__(self) -> int:
        return self._length

    def readinto(self, view: memoryview) -> int:
        count = min(len(view), self._left)
        view[:count] = self._data[self.read : self.read + count]
        self.read += count
        self._left -= count
        return count


# --- answers --------------------------------------------------------------------------------------------------------------

HTTP = b"HTTP/1.1 200 OK\r\n"
BODIES = {
    "length": HTTP + b"Content-Length: 5\r\n\r\nhello",
    "spaces": HTTP + b"CONTENT-LENGTH:   5 \r\nx-empty:\r\n\r\nhello",
    "chunked": HTTP + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;a=b\r\nlo\r\n0\r\n\r\n",
    "chunked with trailers": HTTP + b"transfer-encoding: Chunked\r\n\r\n05\r\nhello\r\n0\r\nx-a: 1\r\nx-b: 2\r\n\r\n",
    "after 100": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Hints\r\nlink: x\r\n\r\n"
    + HTTP
    + b"content-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("pieces", [1, 1 << 20])
def test_bodies_end_where_they_say(server: Server, pool: HttpPool, name: str, pieces: int) -> None:
    """However an answer is framed, and cut on its way, its body is whole, and the connection is used again."""

    def play(peer: Peer) -> None:
        for _ in range(2):
            peer.request()
            for at in range(0, len(BODIES[name]), pieces):
                peer.send(BODIES[name][at : at + pieces])

    server.play = play
    for _ in range(2):
        answer = pool.request(GET)
        assert answer.status == 200
        assert read(answer) == b"hello"
    assert server.connections == 1


@pytest.mark.parametrize("how", ["block", "readinto", "read"])
def test_large_bodies(server: Server, pool: HttpPool, how: str) -> None:
    """All ways of reading give all bytes, chunked or not, and an empty end as often as one asks."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (BIG[:7], BIG[7:-1], BIG[-1:]))
    server.answers(
        HTTP + b"content-length: %d\r\n\r\n" % len(BIG) + BIG,
        HTTP + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
        OK,
    )
    for _ in range(2):
        answer, data = pool.request(GET), bytearray()
        if how == "block":
            while block := answer.block():
                data += block
            assert not answer.block()
        elif how == "readinto":
            view = memoryview(bytearray(100_003))
            while count := answer.readinto(view):
                data += view[:count]
            assert answer.readinto(view) == 0
        else:
            data += read(answer)
        assert data == BIG
    assert read(pool.request(GET)) == b"ok"
    assert server.connections == 1


def test_a_block_is_good_until_the_next_is_asked_for(server: Server, pool: HttpPool) -> None:
    """The connection, with its buffer, goes to nobody else before."""
    server.answers(HTTP + b"content-length: 5\r\n\r\nhello", OK)
    answer = pool.request(GET)
    block = answer.block()
    server.answers(OK)
    assert read(pool.request(GET)) == b"ok"
    assert bytes(block) == b"hello"
    assert not answer.block()
    assert server.connections == 2


def test_a_head_has_no_body(server: Server, pool: HttpPool) -> None:
    """Whatever length it tells; and neither has a 204."""
    server.answers(HTTP + b"content-length: 999\r\netag: e\r\n\r\n", b"HTTP/1.1 204 No\r\n\r\n", OK)
    answer = pool.request(GET, is_head=True)
    assert read(answer) == b""
    assert answer.headers == {"content-length": "999", "etag": "e"}
    assert read(pool.request(GET)) == b""
    assert read(pool.request(GET)) == b"ok"
    assert server.connections == 1


@pytest.mark.parametrize(
    "answer",
    [
        HTTP + b"\r\nhello",
        b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello",
        HTTP + b"connection: Close\r\ncontent-length: 5\r\n\r\nhello",
        HTTP + b"content-length: 5\r\n\r\nhello, and more than it says",
    ],
    ids=["to the end", "HTTP/1.0", "close", "more than it says"],
)
def test_connections_that_end(server: Server, pool: HttpPool, answer: bytes) -> None:
    """The body is right, and the next request has a connection of its own."""
    server.answers(answer)
    for _ in range(2):
        assert read(pool.request(GET)) == b"hello"
    assert server.connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 2",
        HTTP + b"content-length: 6\r\n\r\nhello",
        HTTP + b"transfer-encoding: chunked\r\n\r\n6\r\nhello",
        HTTP + b"transfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
    ids=["none", "in the head", "short", "in a chunk", "before the last chunk"],
)
def test_answers_that_are_cut(server: Server, pool: HttpPool, answer: bytes) -> None:
    """A short body is an error, and never taken for the whole."""
    server.answers(answer)
    with pytest.raises(BrokenConnectionError):
        read(pool.request(GET))
    server.answers(OK)
    assert read(pool.request(GET)) == b"ok"


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\nand more\r\n\r\n",
        b"<html>a captive portal</html>",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/1.1 101 Switching\r\n\r\n",
        HTTP + b"no colon\r\n\r\n",
        HTTP + b"a: b\r\n folded\r\n\r\n",
        HTTP + b"space : b\r\n\r\n",
        HTTP + b"content-length: -1\r\n\r\n",
        HTTP + b"content-length: 2\r\ncontent-length: 3\r\n\r\nabc",
        HTTP + b"content-length: \xb2\r\n\r\nab",
        HTTP + b"transfer-encoding: gzip\r\n\r\n",
        HTTP + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        HTTP + b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
        HTTP + b"transfer-encoding: chunked\r\n\r\n" + b"1" * 9000,
        HTTP + b"a: " + b"b" * BLOCK_BYTES,
    ],
)
def test_what_is_no_answer(server: Server, pool: HttpPool, answer: bytes) -> None:
    """Garbage is refused, not guessed at, and the connection is not used again."""
    server.answers(answer)
    with pytest.raises(BadAnswerError):
        read(pool.request(GET))
    server.answers(OK)
    assert read(pool.request(GET)) == b"ok"
    assert server.connections == 2


def test_an_answer_that_is_longer_than_expected(server: Server, pool: HttpPool) -> None:
    """Error documents are not read without end."""
    server.answers(HTTP + b"content-length: %d\r\n\r\n" % len(BIG) + BIG)
    with pytest.raises(BadAnswerError):
        pool.request(GET).read(1000)


def test_an_answer_that_is_closed_early(server: Server, pool: HttpPool) -> None:
    """Its connection is not used again: the rest would be taken for the next answer."""
    server.answers(HTTP + b"content-length: 5\r\n\r\nhello", OK)
    pool.request(GET).close()
    assert read(pool.request(GET)) == b"hello"
    assert server.connections == 2


# --- requests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 64 << 10, len(BIG)])
@pytest.mark.parametrize("kind", [bytes, Source])
def test_bodies_arrive(server: Server, pool: HttpPool, kind: Callable[[bytes], bytes | Source], size: int) -> None:
    """Bytes, and what is read as it is sent, of any size."""
    for _ in range(2):
        assert read(pool.request(put(size), kind(BIG[:size]))) == BIG[:size]
    assert server.bodies == [BIG[:size]] * 2
    assert server.connections == 1


def test_a_body_that_ends_too_early(server: Server, pool: HttpPool) -> None:
    """The request fails; it does not wait for bytes that do not come."""
    with pytest.raises(ValueError, match="length"):
        pool.request(put(len(BIG)), Source(BIG, cut=BLOCK_BYTES))
    assert server.bodies == []


@pytest.mark.parametrize("kind", [bytes, Source])
def test_a_refusal_ends_the_sending(server: Server, pool: HttpPool, kind: Callable[[bytes], bytes | Source]) -> None:
    """A store that refuses a body before it was sent is heard, and not sent the rest."""
    sent = kind(bytes(64 << 20))

    def refuse(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.send(b"HTTP/1.1 403 No\r\ncontent-length: 4\r\nconnection: close\r\n\r\nwhy?")
        # Not reset: what was answered would be lost with it.
        peer.sock.shutdown(socket.SHUT_WR)
        while peer.sock.recv(1 << 20):
            pass

    server.play = refuse
    answer = pool.request(put(64 << 20), sent)
    assert (answer.status, read(answer)) == (403, b"why?")
    if isinstance(sent, Source):
        assert sent.read < 64 << 20
    server.play = server.echo
    assert read(pool.request(GET)) == b""
    assert server.connections == 2


def test_leave_that_nobody_asked_for(server: Server, pool: HttpPool) -> None:
    """A "100 Continue" is no answer, also while the body is being sent."""

    def play(peer: Peer) -> None:
        peer.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        server.echo(peer)

    server.play = play
    for _ in range(2):
        assert read(pool.request(put(len(BIG)), Source(BIG))) == BIG
    assert server.connections == 1


def test_no_success_before_the_end(server: Server, pool: HttpPool) -> None:
    """Whoever says that it is stored before it has arrived is not believed."""

    def play(peer: Peer) -> None:
        peer.sock.recv(1000)
        peer.send(OK)
        while peer.sock.recv(1 << 20):
            pass

    server.play = play
    with pytest.raises(BadAnswerError, match="before"):
        pool.request(put(64 << 20), Source(bytes(64 << 20)))


# --- connections ----------------------------------------------------------------------------------------------------------


def test_a_connection_that_the_server_closed_is_not_used(server: Server, pool: HttpPool) -> None:
    """Stores close idle connections all the time: that fails no request."""
    closed = threading.Event()

    def play(peer: Peer) -> None:
        peer.request()
        peer.send(OK)
        peer.sock.shutdown(socket.SHUT_RDWR)
        closed.set()

    server.play = play
    for _ in range(3):
        assert read(pool.request(GET)) == b"ok"
        assert closed.wait(DEADLINE_S)
        closed.clear()
    assert server.connections == 3


def test_an_old_connection_is_not_used(server: Server, pool: HttpPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A balancer on the way may have forgotten it, without telling."""
    assert read(pool.request(GET)) == b""
    monkeypatch.setattr(http, "_IDLE_S", -1.0)
    assert read(pool.request(GET)) == b""
    assert server.connections == 2


def test_a_child_does_not_use_its_parents_connections(
    server: Server, pool: HttpPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another pid: another connection."""
    assert read(pool.request(GET)) == b""
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert read(pool.request(GET)) == b""
    assert server.connections == 2


def test_threads_have_connections_of_their_own(server: Server, pool: HttpPool) -> None:
    """Answers are not mixed up, and there are as many connections as requests under way."""

    def work(number: int) -> None:
        body = b"%d," % number * (1 + number % 7 * 5000)
        assert read(pool.request(put(len(body)), body)) == body

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(400)))
    assert server.connections <= 8
    assert len(server.bodies) == 400


def test_nobody_there() -> None:
    """Refused, and unknown names: nothing was sent."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for host in ("127.0.0.1", "no-such-host.invalid"):
        with pytest.raises(ConnectError):
            HttpPool(host, port, connect_s=DEADLINE_S, stall_s=DEADLINE_S).request(GET)


# --- silence --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", HTTP + b"content-length: 6\r\n\r\nhello"])
def test_silence_is_cut(server: Server, answer: bytes) -> None:
    """No answer, or one that stops: after the limit, and without waiting for the end of the connection."""

    def play(peer: Peer) -> None:
        peer.request()
        peer.send(answer)
        peer.gone.wait(DEADLINE_S)

    server.play = play
    with pytest.raises(StalledError):
        read(pool_of(server, stall_s=0.1).request(GET))


def test_a_server_that_takes_nothing_is_cut(server: Server) -> None:
    """The buffers on the way fill up, and then no byte goes out."""
    server.play = lambda peer: peer.gone.wait(DEADLINE_S)
    with pytest.raises(StalledError):
        pool_of(server, stall_s=0.1).request(put(64 << 20), Source(bytes(64 << 20)))


def test_whoever_is_slow_but_moves_is_not_cut(server: Server) -> None:
    """The limit is on silence, not on the whole, in both directions."""
    answer = HTTP + b"content-length: 3\r\n\r\nabc"
    pause = threading.Event()

    def play(peer: Peer) -> None:
        got = 0
        while got < 8 << 20:
            pause.wait(0.01)
            got += len(peer.sock.recv(1 << 18))
        for at in range(len(answer) - 6, len(answer)):
            peer.send(answer[:at] if at == len(answer) - 6 else answer[at - 1 : at])
            pause.wait(0.1)
        peer.send(answer[-1:])

    server.play = play
    head = put((8 << 20) - len(put(8 << 20)))
    assert read(pool_of(server, stall_s=0.3).request(head, Source(bytes((8 << 20) - len(head))))) == b"abc"
