"""Rows 16 and 17: stores that nobody reaches for a while, and endpoints that are not what they are taken for."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ckptmgr.backends.options import StoreOptions
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.checksums import digest_bytes
from ckptmgr.core.errors import PermanentBackendError, TransientBackendError
from ckptmgr.testing.certificates import make_certificates
from ckptmgr.testing.stores import Store, retrying_backend
from ckptmgr.testing.waits import Waits

PART_BYTES = 5 << 20
DATA = os.urandom(2 * PART_BYTES + 1)

MakeStore = Callable[[str], Store]


@pytest.fixture(params=["moto", "oss"])
def store(request: pytest.FixtureRequest, make_store: MakeStore) -> Store:
    """Both dialects."""
    return make_store(request.param)


@pytest.fixture(params=["moto raw", "moto boto3", "oss"])
def engine(request: pytest.FixtureRequest, make_store: MakeStore) -> tuple[Store, dict[str, Any]]:
    """Both dialects, and both engines of S3: a store, and the options of its backend."""
    kind, _, engine = request.param.partition(" ")
    return make_store(kind), {"store_options": StoreOptions(engine="boto3")} if engine == "boto3" else {}


def test_a_store_that_is_down_for_a_while(store: Store, tmp_path: Path) -> None:
    """Rows 16 and 17: connections are refused, then accepted again: uploads and downloads go on, and the endpoint is named while it lasts."""
    (tmp_path / "f").write_bytes(DATA)
    said: list[str] = []

    class Back(Retrier):
        def _count(self) -> None:
            # The second try of whichever request comes first finds it up again.
            store.server.start()
            super()._count()

    retrier = Back(RetryPolicy(attempts=6, base_s=0.001, cap_s=0.002))
    backend = retrying_backend(store, retrier, part_bytes=PART_BYTES)
    backend.pipe_file(store.at("k"), b"1")
    for call in (
        lambda: backend.put_file(str(tmp_path / "f"), store.at("f"), expected=digest_bytes(DATA)),
        lambda: backend.get_file(store.at("f"), str(tmp_path / "got")),
        lambda: backend.pipe_file(store.at("k"), b"2"),
    ):
        store.server.stop()
        with pytest.raises(TransientBackendError) as caught:
            retrying_backend(store, Retrier(RetryPolicy(attempts=1))).find(store.at(""))
        said.append(str(caught.value))
        before = backend.retries
        call()
        assert backend.retries > before
    assert (tmp_path / "got").read_bytes() == DATA
    assert store.get("k") == b"2"
    assert all(store.server.url in text for text in said)


def test_an_endpoint_that_does_not_speak_tls(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 16: https to a port that speaks http does not pass by itself; the message names the endpoint, and what to write."""
    endpoint = store.server.url.replace("http://", "https://")
    monkeypatch.setenv("OSS_ENDPOINT" if store.name == "oss" else "AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(PermanentBackendError, match="use http://") as caught:
        retrying_backend(store, Retrier(RetryPolicy(attempts=1))).pipe_file(store.at("k"), b"1")
    assert endpoint in str(caught.value)


class Tls:
    """Speaks TLS on 127.0.0.1 with a certificate of its own authority, and hangs up after that; `closed` are the connections so far."""

    def __init__(self, directory: Path) -> None:
        self.certificates = make_certificates(directory)
        self.closed = 0
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(self.certificates.certificate, self.certificates.key)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection = self._listener.accept()[0]
            except OSError:
                return
            with contextlib.suppress(OSError), self._context.wrap_socket(connection, server_side=True):
                self.closed += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_certificate_that_nobody_knows(
    engine: tuple[Store, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Row 16: an unknown authority is no trouble that passes: said at once, with the endpoint and the variable that names authorities. With the right
    one, a connection that breaks in the middle of TLS may pass."""
    store, options = engine
    server = Tls(tmp_path)
    try:
        is_oss = store.name == "oss"
        monkeypatch.setenv("OSS_ENDPOINT" if is_oss else "AWS_ENDPOINT_URL", server.url)
        waits = Waits()
        backend = retrying_backend(store, waits.retrier(RetryPolicy()), **options)
        bundle = "REQUESTS_CA_BUNDLE" if is_oss else "AWS_CA_BUNDLE"
        for call in (lambda: backend.cat_file(store.at("k")), lambda: backend.pipe_file(store.at("k"), b"1")):
            with pytest.raises(PermanentBackendError, match="not trusted") as caught:
                call()
            assert server.url in str(caught.value)
            assert bundle in caught.value.hint
        assert waits.asked == []
        assert server.closed == 0

        monkeypatch.setenv(bundle, str(server.certificates.authority))
        waits = Waits()
        again = retrying_backend(store, waits.retrier(RetryPolicy(attempts=3)), **options)
        with pytest.raises(TransientBackendError, match="gave up after 3 tries") as broken:
            again.cat_file(store.at("k"))
        assert server.url in str(broken.value)
        assert server.closed >= 3
    finally:
        server.close()
