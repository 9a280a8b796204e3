"""The metadata services of EC2 and Aliyun, on 127.0.0.1, as far as notices of preemption and the keys of Aliyun's RAM roles go.

    with MetadataServer() as server:
        server.announce_ec2(datetime.now(timezone.utc) + timedelta(seconds=120))
        subprocess.run([...], env={**os.environ, **server.env})

Both insist on a session token (IMDSv2, security hardening mode), as the real ones do where they are configured well.
Sources: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instancedata-data-retrieval.html,
https://www.alibabacloud.com/help/en/ecs/user-guide/view-instance-metadata
"""

from __future__ import annotations

import json
import secrets
import threading
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MetadataServer", "Request"]

EC2_PATH = "/latest/meta-data/spot/instance-action"
ALIYUN_PATH = "/latest/meta-data/instance/spot/termination-time"
ALIYUN_ROLES_PATH = "/latest/meta-data/ram/security-credentials/"
TOKEN_PATH = "/latest/api/token"
_TOKEN_HEADERS = ("X-aws-ec2-metadata-token", "X-aliyun-ecs-metadata-token")
_LONGEST_TOKEN_S = 21600


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request that was answered."""

    method: str
    path: str
    status: int


class MetadataServer:
    """Answers as the metadata services of both clouds, each under its own paths, from `with` to its end. All members from any thread.

    Attributes:
        url: the endpoint, `http://127.0.0.1:<port>`.
    """

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.metadata = self  # type: ignore[attr-defined]
        self._server.daemon_threads = True
        # How often it looks whether it is to end.
        serve = partial(self._server.serve_forever, poll_interval=0.02)
        self._thread = threading.Thread(target=serve, name="metadata-server", daemon=True)
        self._changed = threading.Condition()
        self._answers: dict[str, str] = {}
        self._tokens: set[str] = set()
        self._requests: list[Request] = []
        self._status: int | None = None
        self._silent = False
        self._released = threading.Event()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def env(self) -> dict[str, str]:
        """The variables that lead ckptmgr here in place of the machine's own services."""
        return {"AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url, "CKPTMGR_ALIYUN_METADATA_ENDPOINT": self.url}

    @property
    def requests(self) -> tuple[Request, ...]:
        """All that were answered, oldest first."""
        with self._changed:
            return tuple(self._requests)

    def announce_ec2(self, when: datetime, *, action: Literal["terminate", "stop", "hibernate"] = "terminate") -> None:
        """The spot instance will be interrupted at `when`, which has a time zone."""
        self.answer(EC2_PATH, json.dumps({"action": action, "time": _stamp(when)}))

    def announce_aliyun(self, when: datetime) -> None:
        """The preemptible instance will be released at `when`, which has a time zone."""
        self.answer(ALIYUN_PATH, _stamp(when))

    def attach_aliyun_role(
        self, role: str, *, access_key: str, secret_key: str, token: str, expires: datetime, code: str = "Success"
    ) -> None:
        """The instance has this RAM role, and these are its keys of now; `expires` has a time zone."""
        keys = {"AccessKeyId": access_key, "AccessKeySecret": secret_key, "SecurityToken": token}
        times = {"Expiration": _stamp(expires), "LastUpdated": _stamp(datetime.now(timezone.utc))}
        self.answer(ALIYUN_ROLES_PATH, role)
        self.answer(ALIYUN_ROLES_PATH + role, json.dumps({**keys, **times, "Code": code}))

    def detach_aliyun_role(self) -> None:
        """The instance has no RAM role (any more)."""
        with self._changed:
            self._answers = {
                path: text for path, text in self._answers.items() if not path.startswith(ALIYUN_ROLES_PATH)
            }

    def answer(self, path: str, text: str) -> None:
        """Answer a path with any text, with a valid token; without this it is 404."""
        with self._changed:
            self._answers[path] = text

    def fail(self, status: int | None) -> None:
        """Answer everything with `status`; None: as usual again."""
        with self._changed:
            self._status = status

    def keep_silent(self) -> None:
        """Take requests, and never answer them."""
        with self._changed:
            self._silent = True

    def forget_tokens(self) -> None:
        """As after a restart: tokens that were given out are refused with 401."""
        with self._changed:
            self._tokens.clear()

    def wait_for(self, count: int, path: str, *, timeout_s: float) -> bool:
        """Block until `path` was answered `count` times; whether it was."""
        with self._changed:
            return self._changed.wait_for(
                lambda: sum(request.path == path for request in self._requests) >= count, timeout_s
            )

    def close(self) -> None:
        """Stop; may be called twice."""
        self._released.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _respond(self, method: str, path: str, headers: Any) -> tuple[int, str] | None:
        with self._changed:
            silent = self._silent
        if silent:
            self._released.wait()
            return None
        with self._changed:
            status, text = (self._status, "") if self._status is not None else self._look_up(method, path, headers)
            self._requests.append(Request(method=method, path=path, status=status))
            self._changed.notify_all()
            return status, text

    def _look_up(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        if headers.get("X-Forwarded-For") is not None:
            return 403, ""
        if method == "PUT" and path == TOKEN_PATH:
            asked = [headers.get(f"{name}-ttl-seconds") for name in _TOKEN_HEADERS]
            lifetimes = [int(value) for value in asked if value is not None and value.isdecimal()]
            if len(lifetimes) != 1 or not 1 <= lifetimes[0] <= _LONGEST_TOKEN_S:
                return 400, ""
            token = secrets.token_urlsafe(24)
            self._tokens.add(token)
            return 200, token
        expected = _TOKEN_HEADERS[path == ALIYUN_PATH or path.startswith(ALIYUN_ROLES_PATH)]
        if headers.get(expected) not in self._tokens:
            return 401, ""
        return (200, self._answers[path]) if path in self._answers else (404, "<h1>404 - Not Found</h1>")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_PUT(self) -> None:
        self._answer()

    def _answer(self) -> None:
        found = self.server.metadata._respond(self.command, self.path, self.headers)  # type: ignore[attr-defined]
        self.close_connection = True
        if found is None:
            return
        status, text = found
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


def _stamp(when: datetime) -> str:
    return when.astimezone(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
