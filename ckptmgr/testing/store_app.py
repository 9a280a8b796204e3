"""An object store as a WSGI application: parsing, faults and the request log, without a dialect.

`StoreApp` is the part that the S3 and the OSS stand-ins have in common. A dialect says how a request is answered (`answer`)
and what an error looks like (`error`). Bodies are held in memory: these servers are for tests, with objects of some hundred MB.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn
from urllib.parse import parse_qsl, quote

from ckptmgr.testing.faults import ActiveFault, Faults, Seen

# A held request must not outlive a test that forgot to release it; the suite's own limit is above this.
_HOLD_LIMIT_S = 120.0
# How long a pause a trickling answer makes, at most.
_TRICKLE_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request as it arrived.

    Attributes:
        method: GET, PUT, …
        bucket: "" for the service itself.
        key: decoded; "" for the bucket itself.
        query: parameters with their values, "" where there is none.
        raw_query: the query string as sent.
        headers: names in lower case; values as sent, one character per byte.
        body: the whole body, transfer encoding removed.
    """

    method: str
    bucket: str
    key: str
    query: dict[str, str] = field(default_factory=dict)
    raw_query: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def path(self) -> str:
        """The percent-encoded path: `/`, `/bucket` or `/bucket/key`."""
        return quote(f"/{self.bucket}/{self.key}" if self.key else f"/{self.bucket}", safe="/")

    @property
    def seen(self) -> Seen:
        """What fault rules look at."""
        return Seen(method=self.method, bucket=self.bucket, key=self.key, query=self.query, headers=self.headers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One answer; header names in lower case. `body` is the error document of a HEAD too, which is not sent."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRequest:
    """One request in the log, in the order in which they were finished.

    Attributes:
        time_s: `time.monotonic()` when it had arrived completely.
        method, bucket, key, query, headers: as in `Request`.
        size_bytes: length of the body that arrived.
        status: the HTTP status that was answered; None when the connection was reset without an answer.
    """

    time_s: float
    method: str
    bucket: str
    key: str
    query: dict[str, str]
    headers: dict[str, str]
    size_bytes: int
    status: int | None


class ConnectionLost(Exception):
    """The connection ends here without an answer: the client went away, or a fault says so."""


class StoreApp(ABC):
    """A WSGI application that speaks one dialect and injects faults.

    Attributes:
        faults: the rules in force.
        log: every request, oldest first; `log.clear()` is allowed at any time.
        live_tokens: the session tokens that are not expired; None lets every request pass.
        closing: set while the server is stopped; whoever waits in a request loses its connection.
    """

    def __init__(self) -> None:
        self.faults = Faults()
        self.log: list[LoggedRequest] = []
        self.live_tokens: set[str] | None = None
        self.closing = threading.Event()

    def reset(self) -> None:
        """Take all faults out of force, empty the log, and behave normally again; the data stays."""
        self.faults.clear()
        self.log.clear()
        self.live_tokens = None

    @abstractmethod
    def answer(self, request: Request) -> Reply:
        """Apply one request and say what is answered. Called from many threads at once."""

    @abstractmethod
    def error(self, status: int, code: str, message: str) -> Reply:
        """An error answer in this dialect."""

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Serve one request (PEP 3333)."""
        arrived_s = time.monotonic()
        request = _parse(environ)
        active, reply = None, None
        try:
            request = replace(request, body=_read_body(environ))
            arrived_s = time.monotonic()
            if self.closing.is_set():
                raise ConnectionLost
            active = self.faults.pick(request.seen)
            reply = self._serve(request, active)
        except ConnectionLost:
            pass
        # Logged before the client can know: a test that sees the answer, or the reset, finds it in the log.
        self.log.append(
            LoggedRequest(
                time_s=arrived_s,
                method=request.method,
                bucket=request.bucket,
                key=request.key,
                query=request.query,
                headers=request.headers,
                size_bytes=len(request.body),
                status=None if reply is None else reply.status,
            )
        )
        if reply is None:
            _reset(environ)
        return self._send(environ, start_response, request, reply, active)

    def _serve(self, request: Request, active: ActiveFault | None) -> Reply:
        if active is None:
            return self.answer(request)
        fault = active.fault
        if fault.latency_s and self.closing.wait(fault.latency_s):
            raise ConnectionLost
        if fault.hold == "before":
            self._hold(active)
        if fault.hold is None:
            active.reached.set()
        if fault.drop == "before":
            raise ConnectionLost
        if fault.ignore_headers:
            kept = {name: value for name, value in request.headers.items() if name not in fault.ignore_headers}
            request = replace(request, headers=kept)
        if fault.corrupt_request:
            request = replace(request, body=_flip_a_bit(request.body))
        if fault.status is not None:
            reply = self.error(fault.status, fault.code, fault.message)
            if fault.document is not None:
                reply = replace(reply, body=fault.document)
            if fault.retry_after_s is not None:
                reply.headers["retry-after"] = str(fault.retry_after_s)
        else:
            reply = self.answer(request)
        if fault.hold == "after":
            self._hold(active)
        if fault.drop == "after":
            raise ConnectionLost
        return replace(reply, body=_flip_a_bit(reply.body)) if fault.corrupt else reply

    def _hold(self, active: ActiveFault) -> None:
        # A server that closes must not wait for a test that failed before it released the gate.
        if not active.wait(_HOLD_LIMIT_S) or self.closing.is_set():
            raise ConnectionLost

    def _send(
        self,
        environ: dict[str, Any],
        start_response: Callable[..., Any],
        request: Request,
        reply: Reply,
        active: ActiveFault | None,
    ) -> Iterable[bytes]:
        headers = dict(reply.headers)
        bodiless = request.method == "HEAD" or reply.status in (204, 304)
        if reply.status == 204:
            headers.pop("content-length", None)
        elif not bodiless:
            headers["content-length"] = str(len(reply.body))
        start_response(f"{reply.status} X", list(headers.items()))
        if bodiless:
            return [b""]
        if active is not None and active.fault.trickle_bytes_s is not None:
            return self._trickling_body(environ, reply.body, active, active.fault.trickle_bytes_s)
        if active is not None and (active.fault.cut_body is not None or active.fault.hold == "body"):
            return self._broken_body(environ, reply.body, active)
        return [reply.body]

    def _trickling_body(
        self, environ: dict[str, Any], body: bytes, active: ActiveFault, bytes_s: float
    ) -> Iterator[bytes]:
        at, step = len(body) // 2, max(1, int(bytes_s * _TRICKLE_S))
        yield body[:at]
        while at < len(body):
            if not active.wait(step / bytes_s):
                if self.closing.is_set():
                    _reset(environ)
                yield body[at : at + step]
                at += step
            else:
                yield body[at:]
                return

    def _broken_body(self, environ: dict[str, Any], body: bytes, active: ActiveFault) -> Iterator[bytes]:
        cut = active.fault.cut_body
        middle = len(body) // 2 if cut is None else cut
        yield body[:middle]
        if active.fault.hold == "body":
            try:
                self._hold(active)
            except ConnectionLost:
                _reset(environ)
        if cut is not None:
            _reset(environ, linger=active.fault.cut_by == "reset")
        yield body[middle:]


def _parse(environ: dict[str, Any]) -> Request:
    path = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "surrogateescape")
    bucket, _, key = path.lstrip("/").partition("/")
    raw_query = environ.get("QUERY_STRING", "")
    # werkzeug drops header names with an underscore, which S3 metadata may have; moto's request handler keeps them here.
    kept = environ.get("moto.preserved_header_names") or {}
    headers = {
        kept.get(name, name[5:].replace("_", "-")).lower(): value
        for name, value in environ.items()
        if name.startswith("HTTP_")
    }
    for name in ("CONTENT_TYPE", "CONTENT_LENGTH"):
        if environ.get(name):
            headers[name.lower().replace("_", "-")] = environ[name]
    return Request(
        method=environ["REQUEST_METHOD"],
        bucket=bucket,
        key=key,
        query=dict(parse_qsl(raw_query, keep_blank_values=True)),
        raw_query=raw_query,
        headers=headers,
    )


def _read_body(environ: dict[str, Any]) -> bytes:
    """The whole body.

    Raises:
        ConnectionLost: the client went away in the middle; nothing of the request may be applied.
    """
    stream = environ["wsgi.input"]
    length = environ.get("CONTENT_LENGTH")
    try:
        if not length and environ.get("wsgi.input_terminated"):
            return bytes(stream.read())
        expected = int(length or 0)
        body = bytes(stream.read(expected)) if expected else b""
    except OSError as exc:
        raise ConnectionLost from exc
    if len(body) < expected:
        raise ConnectionLost
    return body


def _flip_a_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :] if data else data


def _reset(environ: dict[str, Any], *, linger: bool = True) -> NoReturn:
    connection = environ.get("werkzeug.socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            if linger:
                # Linger on, zero seconds: the kernel sends RST instead of FIN, so the client cannot take it for an orderly end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError("the connection was reset on purpose")
