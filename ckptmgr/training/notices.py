"""Notices that a cloud takes its machine back, asked of the metadata service that the machine itself can reach.

- EC2 spot: `/latest/meta-data/spot/instance-action` is 404, or `{"action": "terminate", "time": "…Z"}` about two minutes before. With a session
  token (IMDSv2). AWS_EC2_METADATA_SERVICE_ENDPOINT names another address.
  Source: https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html
- Aliyun preemptible instances: `/latest/meta-data/instance/spot/termination-time` is 404 or empty, or a UTC time about five minutes
  before. With a session token (security hardening mode). CKPTMGR_ALIYUN_METADATA_ENDPOINT names another address.
  Source: https://www.alibabacloud.com/help/en/ecs/user-guide/query-the-interruption-events-of-preemptible-instances
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from urllib.parse import urlsplit

_log = logging.getLogger(__name__)

TIMEOUT_S = 1.0
_TOKEN_TTL_S = 21600
_LARGEST_ANSWER = 1 << 16
# Farther ahead than any cloud announces: the clock of this machine is wrong, or the answer is.
_FARTHEST_S = 3600.0


class MetadataNotice(ABC):
    """One kind of notice and the service that gives it. Not thread-safe; no proxy and no redirect is followed.

    Attributes:
        name: the source in a `Notice`.
    """

    name: str
    _variable: str
    _address: str
    _header: str
    _path: str

    def __init__(self) -> None:
        self._token = ""
        self._token_until = 0.0

    @property
    def url(self) -> str:
        """Where the service is."""
        return (os.environ.get(self._variable) or self._address).rstrip("/")

    @abstractmethod
    def when(self, answer: str) -> datetime | None:
        """The time in a successful answer, None if it announces nothing. Raises ValueError: this is no such answer."""

    def ask(self) -> datetime | None:
        """When the machine will be taken back; None if nothing is announced. Blocks for a few times `TIMEOUT_S` at most.

        Raises:
            OSError, http.client.HTTPException, ValueError: the service could not be asked, or answers nonsense. That is no notice.
        """
        status, answer = self._request("GET", self._path, {self._header: self._fresh_token()})
        if status == 401:
            # The token was made before the service restarted, or the clock jumped.
            self._token = ""
            status, answer = self._request("GET", self._path, {self._header: self._fresh_token()})
        if status == 404:
            return None
        if status != 200:
            raise ValueError(f"status {status}")
        return self.when(answer)

    def _fresh_token(self) -> str:
        now = time.monotonic()
        if not self._token or now >= self._token_until:
            status, answer = self._request(
                "PUT", "/latest/api/token", {f"{self._header}-ttl-seconds": str(_TOKEN_TTL_S)}
            )
            if status != 200:
                raise ValueError(f"status {status} for a session token")
            self._token, self._token_until = answer.strip(), now + _TOKEN_TTL_S / 2
        return self._token

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=TIMEOUT_S)
        try:
            connection.request(method, parts.path + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read(_LARGEST_ANSWER).decode("utf-8", "replace")
        finally:
            connection.close()


class Ec2Notice(MetadataNotice):
    """The interruption notice of an EC2 spot instance."""

    name = "ec2"
    _variable = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
    _address = "http://169.254.169.254"
    _header = "X-aws-ec2-metadata-token"
    _path = "/latest/meta-data/spot/instance-action"

    def when(self, answer: str) -> datetime | None:
        found = json.loads(answer)
        if not isinstance(found, dict) or found.get("action") not in ("terminate", "stop", "hibernate"):
            raise ValueError(f"no instance action: {answer[:80]!r}")
        return _utc(str(found.get("time")))


class AliyunNotice(MetadataNotice):
    """The release notice of an Aliyun preemptible instance."""

    name = "aliyun"
    _variable = "CKPTMGR_ALIYUN_METADATA_ENDPOINT"
    _address = "http://100.100.100.200"
    _header = "X-aliyun-ecs-metadata-token"
    _path = "/latest/meta-data/instance/spot/termination-time"

    def when(self, answer: str) -> datetime | None:
        return _utc(answer) if answer.strip() else None


NOTICES: dict[str, type[MetadataNotice]] = {kind.name: kind for kind in (Ec2Notice, AliyunNotice)}


class Poller:
    """Asks metadata services again and again, in a daemon thread, until the first notice of each or `stop`.

    A service that cannot be asked is logged once, and asked again: silence is no notice.

    Args:
        names: keys of `NOTICES`.
        poll_s: seconds from one round to the next.
        found: called in the thread with the name and the seconds that are left; None if the time of the notice makes no sense here, being
            past or hours away.
    """

    def __init__(self, names: Sequence[str], *, poll_s: float, found: Callable[[str, float | None], None]) -> None:
        self._services = [NOTICES[name]() for name in names]
        self._poll_s = poll_s
        self._found = found
        self._ended = threading.Event()
        self._failing: set[str] = set()
        self.thread = threading.Thread(target=self._main, name="ckptmgr-notices", daemon=True)

    def start(self) -> None:
        """Begin to ask, at once."""
        self.thread.start()

    def stop(self) -> None:
        """Let the thread end, after the request under way; does not wait for it."""
        self._ended.set()

    def _main(self) -> None:
        waiting = self._services
        while waiting and not self._ended.is_set():
            waiting = [service for service in waiting if not self._ask(service)]
            self._ended.wait(self._poll_s)

    def _ask(self, service: MetadataNotice) -> bool:
        """Whether this service has nothing more to say."""
        try:
            when = service.ask()
        except Exception as error:  # noqa: BLE001 - whatever goes wrong here, the training must neither end nor lose the other sources
            if service.name not in self._failing and not self._ended.is_set():
                self._failing.add(service.name)
                _log.warning(
                    "%s does not answer (%r): no %s notice until it does; in a container, the metadata service must be reachable from there",
                    service.url,
                    error,
                    service.name,
                )
            return False
        if when is None:
            return False
        left_s = when.timestamp() - time.time()
        self._found(service.name, left_s if 0.0 < left_s <= _FARTHEST_S else None)
        return True


def _utc(text: str) -> datetime:
    # "…Z" is read by fromisoformat from Python 3.11 on.
    when = datetime.fromisoformat(text.strip().replace("Z", "+00:00"))
    return when if when.tzinfo else when.replace(tzinfo=timezone.utc)
