"""Metadata notices over a real socket: tokens, what is a notice and what is not, and a poller that never gets in the way."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ckptmgr.testing.metadata import ALIYUN_PATH, EC2_PATH, TOKEN_PATH, MetadataServer
from ckptmgr.training import notices
from ckptmgr.training.notices import AliyunNotice, Ec2Notice, MetadataNotice, Poller
from ckptmgr.training.preemption import Preemption

DEADLINE_S = 60.0
KINDS: dict[str, tuple[type[MetadataNotice], str]] = {
    "ec2": (Ec2Notice, EC2_PATH),
    "aliyun": (AliyunNotice, ALIYUN_PATH),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataServer]:
    """Both metadata services; proxies of the environment must not matter."""
    with MetadataServer() as server:
        for name, value in server.env.items():
            monkeypatch.setenv(name, value)
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def poller() -> Iterator[Callable[..., tuple[Poller, Any]]]:
    """Starts pollers, and ends them; with the notices that each found and an event for the first."""
    started: list[Poller] = []

    def start(*names: str) -> tuple[Poller, Any]:
        found: list[tuple[str, float | None]] = []
        event = threading.Event()

        def note(name: str, left_s: float | None) -> None:
            found.append((name, left_s))
            event.set()

        poller = Poller(names, poll_s=0.01, found=note)
        started.append(poller)
        poller.start()
        return poller, (found, event)

    yield start
    for each in started:
        each.stop()
        each.thread.join(DEADLINE_S)
        assert not each.thread.is_alive()


def announce(server: MetadataServer, kind: str, when: datetime) -> None:
    (server.announce_ec2 if kind == "ec2" else server.announce_aliyun)(when)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_announced_is_no_notice(kind: str, server: MetadataServer) -> None:
    """A session token is asked for once and used again; 404 says that all is well."""
    make, path = KINDS[kind]
    service = make()
    assert service.ask() is None
    assert service.ask() is None
    asked = [(request.method, request.path, request.status) for request in server.requests]
    assert asked == [("PUT", TOKEN_PATH, 200), ("GET", path, 404), ("GET", path, 404)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_announcement_has_its_time(kind: str, server: MetadataServer) -> None:
    """In UTC, to the second."""
    when = datetime(2031, 5, 6, 7, 8, 9, tzinfo=timezone(timedelta(hours=8)))
    announce(server, kind, when)
    assert KINDS[kind][0]().ask() == when


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_that_was_forgotten_is_renewed(kind: str, server: MetadataServer) -> None:
    """A service that restarted refuses it; the same question gets a new one."""
    service = KINDS[kind][0]()
    service.ask()
    server.forget_tokens()
    announce(server, kind, datetime(2031, 5, 6, tzinfo=timezone.utc))
    assert service.ask() is not None
    assert [request.status for request in server.requests][-3:] == [401, 200, 200]


def test_an_empty_answer_of_aliyun_is_no_notice(server: MetadataServer) -> None:
    """An older form of its answer to the same question."""
    server.answer(ALIYUN_PATH, "\n")
    assert AliyunNotice().ask() is None


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ec2", "<html>Please log in to the guest network</html>"),
        ("ec2", '{"action": "none", "time": "2031-05-06T07:08:09Z"}'),
        ("ec2", '{"action": "terminate", "time": "soon"}'),
        ("ec2", "[]"),
        ("aliyun", "<html>Please log in to the guest network</html>"),
    ],
)
def test_nonsense_is_no_notice(kind: str, text: str, server: MetadataServer) -> None:
    """A network that answers everything with 200 must not end a training."""
    make, path = KINDS[kind]
    server.answer(path, text)
    with pytest.raises(ValueError, match=r"."):
        make().ask()


@pytest.mark.parametrize("kind", KINDS)
def test_a_preemption_learns_of_it(kind: str, server: MetadataServer) -> None:
    """Through its poller; the time of the notice is the deadline."""
    preemption = Preemption(signals=(), notices=[kind], poll_s=0.01)
    preemption.install()
    try:
        assert server.wait_for(2, KINDS[kind][1], timeout_s=DEADLINE_S)
        assert preemption.notice is None
        announce(server, kind, datetime.now(timezone.utc) + timedelta(seconds=100))
        # An answer later than the announcement, and one more: the first may have been under way.
        asked = len(server.requests)
        assert preemption._poller is not None
        preemption._poller.thread.join(DEADLINE_S)
        notice = preemption.notice
        assert notice is not None
        assert notice.source == kind
        assert 60 < notice.deadline - time.monotonic() <= 100
        assert 57 < preemption.remaining_s() <= 97
        assert preemption.save_wanted
        assert len(server.requests) <= asked + 2, "it goes on asking"
    finally:
        preemption.uninstall()


@pytest.mark.parametrize("seconds", [-5, 5 * 3600])
def test_a_time_that_makes_no_sense_leaves_the_usual_grace(
    seconds: float, server: MetadataServer, poller: Callable[..., tuple[Poller, Any]]
) -> None:
    """Past, or hours ahead: a clock is wrong, the notice is not."""
    server.announce_ec2(datetime.now(timezone.utc) + timedelta(seconds=seconds))
    _, (found, event) = poller("ec2")
    assert event.wait(DEADLINE_S)
    assert found == [("ec2", None)]


def test_both_services_are_asked_by_one_thread(
    server: MetadataServer, poller: Callable[..., tuple[Poller, Any]]
) -> None:
    """The notice of one does not end the questions to the other."""
    server.announce_ec2(datetime.now(timezone.utc) + timedelta(seconds=100))
    poller_, (found, event) = poller("ec2", "aliyun")
    assert event.wait(DEADLINE_S)
    assert server.wait_for(3, ALIYUN_PATH, timeout_s=DEADLINE_S)
    server.announce_aliyun(datetime.now(timezone.utc) + timedelta(seconds=200))
    poller_.thread.join(DEADLINE_S)
    assert [name for name, _ in found] == ["ec2", "aliyun"]
    assert poller_.thread.daemon


@pytest.mark.parametrize("status", [403, 500])
def test_a_failing_service_is_named_once_and_asked_again(
    status: int, server: MetadataServer, poller: Callable[..., tuple[Poller, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Silence is no notice, and a service that comes back is heard."""
    server.fail(status)
    _, (found, event) = poller("ec2")
    assert server.wait_for(3, TOKEN_PATH, timeout_s=DEADLINE_S)
    assert found == []
    server.announce_ec2(datetime.now(timezone.utc) + timedelta(seconds=100))
    server.fail(None)
    assert event.wait(DEADLINE_S)
    (line,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"{server.url} does not answer" in line.getMessage()
    assert f"status {status}" in line.getMessage()


def test_a_service_that_never_answers_holds_up_nobody(
    server: MetadataServer,
    poller: Callable[..., tuple[Poller, Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each request has its time; the other service is asked all the same, and `stop` does not wait."""
    monkeypatch.setattr(notices, "TIMEOUT_S", 0.05)
    with MetadataServer() as dead:
        dead.keep_silent()
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", dead.url)
        poller_, (found, _) = poller("ec2", "aliyun")
        assert server.wait_for(2, ALIYUN_PATH, timeout_s=DEADLINE_S)
        assert found == []
        assert f"{dead.url} does not answer" in caplog.text
        poller_.stop()
        poller_.thread.join(DEADLINE_S)
        assert not poller_.thread.is_alive()


def test_the_server_refuses_what_the_real_ones_refuse(server: MetadataServer) -> None:
    """No token, a token's lifetime out of range, and requests that came through a proxy."""
    service = Ec2Notice()
    assert service._request("GET", EC2_PATH, {})[0] == 401
    header = "X-aws-ec2-metadata-token"
    assert service._request("PUT", TOKEN_PATH, {f"{header}-ttl-seconds": "21601"})[0] == 400
    assert service._request("PUT", TOKEN_PATH, {})[0] == 400
    forwarded = {f"{header}-ttl-seconds": "60", "X-Forwarded-For": "10.0.0.1"}
    assert service._request("PUT", TOKEN_PATH, forwarded)[0] == 403
