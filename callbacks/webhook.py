"""Sends messages to a webhook from a thread of its own, so that training never waits for it."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from ckptmgr.backends.answers import retry_after_s
from ckptmgr.backends.retry import Retrier, RetryPolicy
from ckptmgr.core.errors import (
    AccessDeniedError,
    BackendError,
    BackendTimeoutError,
    ConfigError,
    PermanentBackendError,
    ThrottledError,
    TransientBackendError,
)

_log = logging.getLogger(__name__)

Format = Literal["json", "slack", "discord", "dingtalk", "wecom", "feishu"]
Message = Mapping[str, Any]

_LONGEST_DISCORD = 2000
# These answer 200 in any case, and say in the answer whether they took it.
_VERDICTS = {"dingtalk": "errcode", "wecom": "errcode", "feishu": "code"}
_MOST_ANSWER_BYTES = 65_536


def body_of(message: Message, form: Format) -> dict[str, Any]:
    """`message` as a service wants it: all of it as JSON, or its `text` alone."""
    text = str(message.get("text", ""))
    if form == "slack":
        return {"text": text}
    if form == "discord":
        return {"content": text[:_LONGEST_DISCORD]}
    if form == "feishu":
        return {"msg_type": "text", "content": {"text": text}}
    if form in ("dingtalk", "wecom"):
        return {"msgtype": "text", "text": {"content": text}}
    return dict(message)


class Webhook:
    """Posts one JSON object per message, in order, each until it is taken or given up.

    Tried again as requests to a store are (`ckptmgr.backends.retry`): connections that fail, 408, 425, 429 and 5xx, with growing waits and what
    `Retry-After` says. Any other answer is final. What is given up is logged once, until something is taken again, by the host's name alone: a URL of a
    webhook is a secret. When more than `capacity` messages wait, the oldest is dropped and counted.

    `send`, `ask` and `close` are for one thread, and none waits, but `close` for as long as it is told.

    Args:
        url: https or http.
        form: see `Format`.
        headers: more of them, for all requests.
        timeout_s: of one request.
        policy: how often, and how long.
        capacity: messages that may wait.
        post: sends `(url, body, headers, timeout_s)` and returns the answer's bytes; raises a `BackendError` (tests).
        sleep: replaces the waits between tries (tests).

    Attributes:
        sent: messages that were taken.
        lost: messages that were given up or dropped.

    Raises:
        ConfigError: the URL or the form is none.
    """

    def __init__(
        self,
        url: str,
        *,
        form: Format = "json",
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 10.0,
        policy: RetryPolicy | None = None,
        capacity: int = 32,
        post: Callable[[str, bytes, Mapping[str, str], float], bytes] | None = None,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        place = urlsplit(url) if isinstance(url, str) else None
        if place is None or place.scheme not in ("https", "http") or not place.hostname:
            raise ConfigError(
                "the URL of the webhook is none", hint="give one that begins with https:// or http://", argument="url"
            )
        if form not in get_args(Format):
            raise ConfigError(
                f"webhooks have no form {form!r}", hint=f"use one of {', '.join(map(repr, get_args(Format)))}"
            )
        self.host = place.hostname
        self.sent = 0
        self.lost = 0
        self._url = url
        self._form = form
        self._headers = {"Content-Type": "application/json", "User-Agent": "ckptmgr", **(headers or {})}
        self._timeout_s = timeout_s
        self._post = post or _post
        self._stop = threading.Event()
        self._retry = Retrier(
            policy or RetryPolicy(attempts=8, deadline_s=300.0, base_s=1.0, cap_s=60.0), stop=self._stop, sleep=sleep
        )
        self._jobs: deque[Callable[[], Message | None]] = deque()
        self._capacity = capacity
        self._changed = threading.Condition()
        self._is_busy = False
        self._is_closing = False
        self._is_failing = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, if it is not there. Before the interpreter ends: later, none can be started any more."""
        if self._thread is None:
            self._is_closing = False
            self._stop.clear()
            self._thread = threading.Thread(target=self._run, name="ckptmgr-webhook", daemon=True)
            self._thread.start()

    def send(self, message: Message) -> None:
        """Have `message` posted."""
        self.ask(lambda: message)

    def ask(self, job: Callable[[], Message | None]) -> None:
        """Have `job` run in the thread, in its turn, and what it returns posted; None: nothing."""
        self.begin()
        with self._changed:
            if len(self._jobs) >= self._capacity:
                self._jobs.popleft()
                self.lost += 1
            self._jobs.append(job)
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        """Wait until all is posted, for `timeout_s` at most, and end the thread; whether all that was sent was taken."""
        thread = self._thread
        if thread is None:
            return not self.lost
        until = time.monotonic() + timeout_s
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        thread.join(timeout_s)
        if thread.is_alive():
            self._stop.set()
            with self._changed:
                left = len(self._jobs)
                self.lost += len(self._jobs)
                self._jobs.clear()
            # A wait between two tries ends at once, and that message is said to be lost there; a request may go on.
            thread.join(max(0.0, min(0.2, until - time.monotonic() + 0.2)))
            if unsent := left + thread.is_alive():
                _log.warning("%d message(s) for %s could not be sent in %.0f s", unsent, self.host, timeout_s)
        self._thread = None
        return not self.lost

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closing)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
                self._is_busy = True
            try:
                self._do(job)
            finally:
                with self._changed:
                    self._is_busy = False

    def _do(self, job: Callable[[], Message | None]) -> None:
        try:
            message = job()
            if message is not None:
                body = json.dumps(body_of(message, self._form)).encode()
                self._retry(f"message to {self.host}", lambda: self._try(body))
                self.sent += 1
                self._is_failing = False
        except Exception as error:  # noqa: BLE001 - the thread has to live for the next message
            self.lost += 1
            if not self._is_failing:
                _log.warning("a message to %s was not sent: %s", self.host, error)
            self._is_failing = True

    def _try(self, body: bytes) -> None:
        answer = self._post(self._url, body, self._headers, self._timeout_s)
        name = _VERDICTS.get(self._form)
        if name is None:
            return
        try:
            said = json.loads(answer)
            code = said.get(name, 0)
        except (ValueError, AttributeError):
            return
        if code:
            reason = said.get("errmsg") or said.get("msg") or "no reason"
            raise PermanentBackendError(f"{self.host} refused the message: {reason} ({name} {code})")


def _post(url: str, body: bytes, headers: Mapping[str, str], timeout_s: float) -> bytes:
    """One request; raises a BackendError that says whether to try again, and never shows the URL."""
    # 20 ms, and only where messages are sent.
    import http.client
    import urllib.error
    import urllib.request

    host = urlsplit(url).hostname
    request = urllib.request.Request(url, data=body, headers=dict(headers), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return bytes(answer.read(_MOST_ANSWER_BYTES))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(host, error.code, dict(error.headers.items())) from None
    except TimeoutError:
        raise BackendTimeoutError(f"no answer from {host} in {timeout_s:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise TransientBackendError(f"{host} cannot be reached: {reason}") from None


def _refusal(host: str | None, code: int, headers: Mapping[str, Any]) -> BackendError:
    message = f"{host} answered {code}"
    wait_s = retry_after_s({name.lower(): value for name, value in headers.items()})
    if code == 429:
        return ThrottledError(message, retry_after_s=wait_s)
    if code in (408, 425) or code >= 500:
        return TransientBackendError(message, retry_after_s=wait_s)
    if code in (401, 403):
        return AccessDeniedError(message, hint="look at the URL of the webhook")
    return PermanentBackendError(message, hint="look at the URL and the format of the webhook")
