"""Where AWS credentials come from, on 127.0.0.1: an instance's metadata service (IMDSv2), a container's endpoint, and STS for web identities.

    with AwsCredentialServer() as source:
        source.issue("first", lifetime_s=3600)
        env = source.env("instance")          # or "container", "web-identity"

One server stands for all three; what it hands out is what was issued last. The keys are made of the name, so that a test can tell them apart.
Sources: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/instance-metadata-security-credentials.html,
https://docs.aws.amazon.com/sdkref/latest/guide/feature-container-credentials.html,
https://docs.aws.amazon.com/STS/latest/APIReference/API_AssumeRoleWithWebIdentity.html
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import parse_qs

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SOURCES", "AwsCredentialServer", "IssuedKeys", "Source"]

Source = Literal["instance", "container", "web-identity"]
SOURCES: tuple[Source, ...] = ("instance", "container", "web-identity")

_ROLE_PATH = "/latest/meta-data/iam/security-credentials/"
_TOKEN_PATH = "/latest/api/token"
_CONTAINER_PATH = "/v2/credentials/of-the-test"
_ROLE = "role-of-the-test"
_STS = "https://sts.amazonaws.com/doc/2011-06-15/"


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedKeys:
    """What one `issue` hands out.

    Attributes:
        token: the session token, which is the name it was issued by.
        expires: when it is said to end.
    """

    access_key: str
    secret_key: str
    token: str
    expires: datetime


class AwsCredentialServer:
    """See the module's docstring. Listens from `__enter__` to `__exit__`; all members may be used from any thread.

    Attributes:
        url: the endpoint, `http://127.0.0.1:<port>`.
        asked: method and path of every request that was answered, oldest first.
    """

    def __init__(self) -> None:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self._respond))
        self._server.daemon_threads = True
        serve = partial(self._server.serve_forever, poll_interval=0.02)
        self._thread = threading.Thread(target=serve, name="aws-credential-server", daemon=True)
        self._lock = threading.Lock()
        self._keys: IssuedKeys | None = None
        self._refusal: tuple[int, str] | None = None
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.asked: list[tuple[str, str]] = []

    def issue(self, token: str, *, lifetime_s: float = 3600.0) -> IssuedKeys:
        """From now on hand out keys with this session token."""
        expires = datetime.now(timezone.utc) + timedelta(seconds=lifetime_s)
        keys = IssuedKeys(
            access_key=f"AKIA{token.upper()}", secret_key=f"secret-of-{token}", token=token, expires=expires
        )
        with self._lock:
            self._keys, self._refusal = keys, None
        return keys

    def refuse(self, status: int, code: str = "AccessDenied") -> None:
        """From now on refuse everybody."""
        with self._lock:
            self._refusal = status, code

    def env(self, source: Source, *, token_file: Path | None = None) -> dict[str, str]:
        """The variables that make `source` the one where credentials are found; static keys must be taken out of the environment.

        Args:
            token_file: for `web-identity`: the file with the token, as a platform mounts it.
        """
        if source == "instance":
            return {
                "AWS_EC2_METADATA_DISABLED": "false",
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": self.url,
                "AWS_METADATA_SERVICE_TIMEOUT": "5",
            }
        if source == "container":
            return {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{self.url}{_CONTAINER_PATH}"}
        if token_file is None:
            raise ValueError("a web identity needs a file with its token")
        token_file.write_text("token-of-the-platform")
        return {
            "AWS_ROLE_ARN": f"arn:aws:iam::123456789012:role/{_ROLE}",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(token_file),
            "AWS_ENDPOINT_URL_STS": self.url,
        }

    def close(self) -> None:
        """Stop; may be called twice. Whoever asks afterwards is refused a connection."""
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

    def _respond(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, str, str]:
        with self._lock:
            keys, refusal = self._keys, self._refusal
            self.asked.append((method, path))
        if method == "POST":
            return self._sts(keys, refusal, parse_qs(body.decode()))
        if refusal is not None or keys is None:
            status, code = refusal or (404, "NotFound")
            return status, "application/json", json.dumps({"Code": code, "Message": "refused by the test"})
        if method == "PUT" and path == _TOKEN_PATH:
            return 200, "text/plain", "metadata-token-of-the-test"
        if path == _CONTAINER_PATH:
            return 200, "application/json", _document(keys)
        if headers.get("X-aws-ec2-metadata-token") != "metadata-token-of-the-test":
            return 401, "text/plain", ""
        if path == _ROLE_PATH:
            return 200, "text/plain", _ROLE
        if path == _ROLE_PATH + _ROLE:
            return 200, "application/json", _document(keys)
        return 404, "text/plain", ""

    def _sts(
        self, keys: IssuedKeys | None, refusal: tuple[int, str] | None, form: dict[str, list[str]]
    ) -> tuple[int, str, str]:
        right = form.get("Action") == ["AssumeRoleWithWebIdentity"] and form.get("WebIdentityToken")
        if keys is None or refusal is not None or not right:
            status, code = refusal or (400, "InvalidIdentityToken")
            error = f"<Error><Type>Sender</Type><Code>{code}</Code><Message>refused by the test</Message></Error>"
            document = f'<ErrorResponse xmlns="{_STS}">{error}<RequestId>r</RequestId></ErrorResponse>'
            return status, "text/xml", document
        credentials = (
            f"<AccessKeyId>{keys.access_key}</AccessKeyId><SecretAccessKey>{keys.secret_key}</SecretAccessKey>"
            f"<SessionToken>{keys.token}</SessionToken><Expiration>{_stamp(keys.expires)}</Expiration>"
        )
        result = (
            f"<Credentials>{credentials}</Credentials><SubjectFromWebIdentityToken>s</SubjectFromWebIdentityToken>"
            f"<AssumedRoleUser><Arn>arn:aws:sts::123456789012:assumed-role/{_ROLE}/s</Arn>"
            "<AssumedRoleId>A:s</AssumedRoleId></AssumedRoleUser>"
        )
        name = "AssumeRoleWithWebIdentity"
        document = (
            f'<{name}Response xmlns="{_STS}"><{name}Result>{result}</{name}Result>'
            f"<ResponseMetadata><RequestId>r</RequestId></ResponseMetadata></{name}Response>"
        )
        return 200, "text/xml", document


Respond = Callable[[str, str, Any, bytes], tuple[int, str, str]]


def _handler_of(respond: Respond) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, kind, text = respond(self.command, self.path, self.headers, body)
            self.close_connection = True
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text.encode())))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_PUT = do_POST = _answer

        def log_message(self, format: str, *arguments: Any) -> None:
            """Nothing on stderr."""

    return Handler


def _document(keys: IssuedKeys) -> str:
    """The same fields in the instance's and the container's answer."""
    return json.dumps(
        {
            "Code": "Success",
            "Type": "AWS-HMAC",
            "AccessKeyId": keys.access_key,
            "SecretAccessKey": keys.secret_key,
            "Token": keys.token,
            "Expiration": _stamp(keys.expires),
        }
    )


def _stamp(when: datetime) -> str:
    return when.strftime("%Y-%m-%dT%H:%M:%SZ")
