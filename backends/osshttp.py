"""What carries oss2's requests: our own HTTP in place of requests, at a third of its price per request and without memory made per block.

oss2 lets its `Session` be replaced, and knows of it only `do_request`. Requests through a proxy, which our HTTP does not know, still go through requests.
"""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from urllib.parse import SplitResult, quote, urlsplit

import oss2  # type: ignore[import-untyped, unused-ignore]
import requests.utils
from requests.structures import CaseInsensitiveDict

from ckptmgr.backends.http import Answer, HttpPool
from ckptmgr.core.errors import ConfigError

_MOST_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_POOL = 32


class OssResponse(Protocol):
    """What oss2 wants of an answer, and what we want of one with an object in it."""

    status: int
    headers: Mapping[str, str]
    request_id: str

    def read(self, amt: int | None = None) -> bytes:
        """The next `amt` bytes of the body, or all that is left."""

    def readinto(self, view: memoryview, /) -> int:
        """Put what arrives at the beginning of `view`; how many bytes, 0 at the end."""

    def close(self) -> None:
        """Nothing more is wanted."""


class HttpSession:
    """In place of `oss2.Session`. Any thread; a forked child gets connections of its own.

    Args:
        connect_s: seconds for a connection to come about.
        stall_s: seconds without a byte after which a request is cut.
    """

    def __init__(self, *, connect_s: float, stall_s: float) -> None:
        self._connect_s = connect_s
        self._stall_s = stall_s
        self._pools: dict[tuple[str, str], HttpPool] = {}
        self._authorities = os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or ""
        self._context: ssl.SSLContext | None = None
        self._proxied: Any = None
        self._lock = threading.Lock()

    def do_request(self, request: Any, timeout: Any) -> OssResponse:
        """One request of oss2's; its answer, of an object not yet read.

        Raises:
            HttpError, oss2.exceptions.RequestError: there is no whole answer.
        """
        url = urlsplit(request.url)
        if request.proxies and requests.utils.select_proxy(request.url, request.proxies):
            return _Proxied(self._through_proxy().do_request(request, timeout).response)
        answer = self._pool(url).request(_head(request, url), request.data, is_head=request.method == "HEAD")
        response = _Response(answer)
        if request.method != "GET":
            # oss2 does not look at what it does not expect, and the connection would be lost.
            response.hold()
        return response

    def _pool(self, url: SplitResult) -> HttpPool:
        where = url.scheme, url.netloc
        pool = self._pools.get(where)
        if pool is None:
            with self._lock:
                is_tls = url.scheme == "https"
                pool = self._pools[where] = self._pools.get(where) or HttpPool(
                    url.hostname or "",
                    url.port or (443 if is_tls else 80),
                    connect_s=self._connect_s,
                    stall_s=self._stall_s,
                    context=self._tls() if is_tls else None,
                )
        return pool

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            bundle = self._authorities or requests.utils.DEFAULT_CA_BUNDLE_PATH
            is_directory = os.path.isdir(bundle)
            try:
                context = ssl.create_default_context(
                    cafile=None if is_directory else bundle, capath=bundle if is_directory else None
                )
            except OSError as error:
                raise ConfigError(
                    f"the certificates in {bundle!r} cannot be read: {error}", hint="correct REQUESTS_CA_BUNDLE"
                ) from error
            # As requests: many a private authority's certificates are not as strict as newer Pythons would have them.
            context.verify_flags &= ~ssl.VERIFY_X509_STRICT
            self._context = context
        return self._context

    def _through_proxy(self) -> Any:
        with self._lock:
            if self._proxied is None:
                self._proxied = oss2.Session(pool_size=_POOL)
                # No password out of ~/.netrc in place of our signature.
                self._proxied.session.trust_env = False
                self._proxied.session.verify = self._authorities or True
            return self._proxied


def _head(request: Any, url: SplitResult) -> bytes:
    query = "&".join(f"{quote(name, safe='~')}={quote(str(value), safe='~')}" for name, value in request.params.items())
    headers = {name: value for name, value in request.headers.items() if value is not None}
    headers["Host"] = url.netloc
    if request.data is not None or request.method in ("PUT", "POST"):
        headers["Content-Length"] = str(0 if request.data is None else len(request.data))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ConfigError("a header for OSS holds a line break", hint="check CKPTMGR_SSE_KEY and CKPTMGR_STORAGE_CLASS")
    path = f"{url.path or '/'}{'?' if query else ''}{query}"
    return f"{request.method} {path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1")


class _Response:
    """An answer of our own HTTP."""

    def __init__(self, answer: Answer) -> None:
        self.status = answer.status
        self.headers: Mapping[str, str] = CaseInsensitiveDict(answer.headers)
        self.request_id = answer.headers.get("x-oss-request-id", "")
        self._answer = answer
        self._held: bytes | None = None

    def hold(self) -> None:
        """Receive all of it now."""
        self._held = self._answer.read(_MOST_BYTES)

    def read(self, amt: int | None = None) -> bytes:
        if self._held is None and (amt is None or self.status >= 300):
            self.hold()
        if self._held is not None:
            end = len(self._held) if amt is None else amt
            block, self._held = self._held[:end], self._held[end:]
            return block
        view = memoryview(bytearray(amt or 0))
        return bytes(view[: self._answer.readinto(view)])

    def readinto(self, view: memoryview, /) -> int:
        return self._answer.readinto(view)

    def close(self) -> None:
        self._answer.close()

    def __iter__(self) -> Iterator[bytes]:
        while block := self.read(_CHUNK_BYTES):
            yield block


class _Proxied(oss2.http.Response):  # type: ignore[misc, unused-ignore]
    """An answer of requests."""

    def __init__(self, response: Any) -> None:
        super().__init__(response)
        length = response.headers.get("content-length", "")
        self._left = int(length) if length.isdecimal() else None

    def readinto(self, view: memoryview, /) -> int:
        # oss2's own reader hands on 8 KiB at a time.
        block = self.response.raw.read(len(view))
        if not block and self._left:
            # urllib3 1.x takes a body that ends too early for complete.
            raise ConnectionError(f"{self._left} bytes are missing")
        if self._left is not None:
            self._left -= len(block)
        view[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self.response.close()
