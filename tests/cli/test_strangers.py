"""An endpoint where no store answers - an ingress without its backend, a portal, a web server: exit 4, one line, never "nothing there" (I7)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from ckptmgr.testing.scripted import Peer, Server

Result = subprocess.CompletedProcess[str]
Cli = Callable[..., Result]
MakeCheckpoint = Callable[..., Path]

_PAGE = b"<html><body>Welcome</body></html>"
_LOCATION = "http://portal.invalid/login"
#: status, headers, body, and what the line says.
_ANSWERS = {
    "404-page": (404, b"", _PAGE, "answered 404 without an {store} error: it is not a store"),
    "404-empty": (404, b"", b"", "answered 404 without an {store} error: it is not a store"),
    "404-other-xml": (
        404,
        b"",
        b"<Error><Message>x</Message></Error>",
        "answered 404 without an {store} error: it is not a store",
    ),
    "403-page": (403, b"", _PAGE, "answered 403 without an {store} error: it is not a store"),
    "400-page": (400, b"", _PAGE, "answered 400 without an {store} error: it is not a store"),
    "405-empty": (405, b"", b"", "answered 405 without an {store} error: it is not a store"),
    "301": (
        301,
        b"location: %s?token=secret\r\n" % _LOCATION.encode(),
        b"",
        f"answered 301, a redirect to {_LOCATION}",
    ),
    "302": (
        302,
        b"location: %s?token=secret\r\n" % _LOCATION.encode(),
        b"",
        f"answered 302, a redirect to {_LOCATION}",
    ),
    "307": (
        307,
        b"location: %s?token=secret\r\n" % _LOCATION.encode(),
        b"",
        f"answered 307, a redirect to {_LOCATION}",
    ),
    "308": (
        308,
        b"location: %s?token=secret\r\n" % _LOCATION.encode(),
        b"",
        f"answered 308, a redirect to {_LOCATION}",
    ),
    "200-page": (200, b"", _PAGE, "it is not a store"),
    "200-empty": (200, b"", b"", "it is not a store"),
    "200-json": (200, b"", b'{"ok": true}', "it is not a store"),
}


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture(params=["s3", pytest.param("s3-boto3", marks=pytest.mark.slow), "oss"])
def scheme(request: pytest.FixtureRequest, server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the commands at the server; "s3" or "oss"."""
    # Without the waits between tries.
    monkeypatch.setattr("ckptmgr.backends.retry._JITTER", SimpleNamespace(uniform=lambda low, high: 0.0))
    endpoint = f"http://127.0.0.1:{server.port}"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "OSS_ACCESS_KEY_ID", "OSS_ACCESS_KEY_SECRET"):
        monkeypatch.setenv(name, "x")
    values = {"AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1", "OSS_ENDPOINT": endpoint}
    for name, value in {**values, "OSS_REGION": "cn-hangzhou", "CKPTMGR_ADDRESSING": "path"}.items():
        monkeypatch.setenv(name, value)
    if request.param == "s3-boto3":
        monkeypatch.setenv("CKPTMGR_S3_ENGINE", "boto3")
    return str(request.param).partition("-")[0]


def _answer(status: int, headers: bytes, body: bytes) -> Callable[[Peer], None]:
    def play(peer: Peer) -> None:
        head, _ = peer.request()
        more = b"connection: close\r\ncontent-type: text/html\r\ncontent-length: %d\r\n\r\n" % len(body)
        peer.send(b"HTTP/1.1 %d X\r\n%s%s" % (status, headers, more), b"" if head.startswith(b"HEAD") else body)

    return play


@pytest.mark.parametrize("which", list(_ANSWERS))
def test_no_store(
    server: Server, scheme: str, cli_here: Cli, make_checkpoint: MakeCheckpoint, tmp_path: Path, which: str
) -> None:
    """Looking, resuming and pushing end with 4 and a line that names the endpoint and its variable; COMMAND is not started."""
    status, headers, body, says = _ANSWERS[which]
    server.play = _answer(status, headers, body)
    url, started = f"{scheme}://bkt-strange/run", tmp_path / "STARTED"
    for words in (
        ["ls", url],
        ["ls", f"{scheme}://bkt-strange"],
        ["resume", url, "--to", tmp_path / "to", "--or-start", "--", "touch", started],
        ["push", make_checkpoint(100), url],
    ):
        result = cli_here(*words)
        assert result.returncode == 4, (words, result.stderr)
        assert result.stdout == ""
        (line,) = result.stderr.splitlines()
        assert line.startswith("ckptmgr: error: ")
        if not (scheme == "oss" and which.startswith("200")):
            assert says.format(store=scheme.upper()) in line, words
            assert f"http://127.0.0.1:{server.port} answered {status}" in line
        assert f"http://127.0.0.1:{server.port}" in line
        assert "OSS_ENDPOINT" in line if scheme == "oss" else "AWS_ENDPOINT_URL" in line
        assert "secret" not in line
    assert server.connections > 0
    assert not started.exists()
