"""A bucket on a test server, and backends for it with and without retries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptmgr.backends.base import Backend
from ckptmgr.backends.retry import Retrier, RetryingBackend, RetryPolicy

#: Small enough for tests, as large as S3 demands.
PART_BYTES = 5 << 20
QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.002, deadline_s=60.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerStore:
    """A server, a bucket on it, and backends for it.

    Attributes:
        server: the test server, with its faults, log and raw access.
        bucket: an existing bucket that nothing else uses.
        make: a new backend, given its retrier.
        setenv: sets an environment variable until the end of the test.
    """

    server: Any
    bucket: str
    make: Callable[[Retrier], Backend]
    setenv: Callable[[str, str], None]

    def at(self, key: str) -> str:
        """The path of a key in the bucket."""
        return f"{self.bucket}/{key}"

    def plain(self) -> Backend:
        """A new backend that tries everything once."""
        return self.make(Retrier(RetryPolicy(attempts=1)))

    def retrying(self) -> Backend:
        """A new backend that tries again, quickly."""
        retrier = Retrier(QUICK)
        return RetryingBackend(self.make(retrier), retrier)

    def as_identity(self, name: str) -> Backend:
        """A new backend with the keys of another identity of the server."""
        for variable, value in self.server.env_of(name).items():
            self.setenv(variable, value)
        return self.plain()


def open_server_store(server: Any, bucket: str, setenv: Callable[[str, str], None]) -> ServerStore:
    """A bucket on `server` (of any kind), with the environment pointing at it; files of more than 5 MiB go in parts."""
    server.create_bucket(bucket)
    for variable, value in server.env.items():
        setenv(variable, value)

    def make(retrier: Retrier) -> Backend:
        if server.kind == "oss":
            from ckptmgr.backends.oss import OSSBackend

            return OSSBackend(retrier=retrier, multipart_threshold=PART_BYTES, part_bytes=PART_BYTES)
        from ckptmgr.backends.s3 import S3Backend

        return S3Backend(retrier=retrier, multipart_threshold=PART_BYTES, part_bytes=PART_BYTES)

    return ServerStore(server=server, bucket=bucket, make=make, setenv=setenv)
