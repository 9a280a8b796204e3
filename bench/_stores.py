"""The stores of `transfer.py`, each started when it is first asked for: SeaweedFS over http and https, and the null server."""

from __future__ import annotations

import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _null_s3 import NullS3

from ckptmgr.testing.servers import WeedServer

_numbers = itertools.count(1)


class Place(ABC):
    """One endpoint.

    Attributes:
        endpoint: its URL.
        environment: what points a client at it.
    """

    endpoint: str
    environment: Mapping[str, str]

    @contextlib.contextmanager
    def bucket(self) -> Iterator[str]:
        """An empty bucket, gone at the end, and its disk space with it."""
        name = f"bench-{next(_numbers)}"
        self._make(name)
        try:
            yield name
        finally:
            self._drop(name)

    @abstractmethod
    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        """What is stored: size by key."""

    @abstractmethod
    def read(self, bucket: str, key: str) -> bytes:
        """A small object."""

    @abstractmethod
    def write(self, bucket: str, key: str, data: bytes) -> None:
        """Store a small object; from any thread."""

    @abstractmethod
    def _make(self, bucket: str) -> None: ...

    @abstractmethod
    def _drop(self, bucket: str) -> None: ...


def _sizes(client: Any, bucket: str, prefix: str) -> dict[str, int]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", ())}


class WeedPlace(Place):
    """One of the two endpoints of a SeaweedFS. Its volumes are per bucket, and go with it."""

    def __init__(self, server: WeedServer, *, tls: bool) -> None:
        self._server = server
        self.endpoint = server.url if tls else server.plain_url
        self.environment = {**server.env, "AWS_ENDPOINT_URL": self.endpoint, "SSL_CERT_FILE": str(server.authority)}
        if not tls:
            del self.environment["AWS_CA_BUNDLE"], self.environment["SSL_CERT_FILE"]

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        return _sizes(self._server._s3, bucket, prefix)

    def read(self, bucket: str, key: str) -> bytes:
        return self._server.raw_get(bucket, key)

    def write(self, bucket: str, key: str, data: bytes) -> None:
        self._server.raw_put(bucket, key, data)

    def _make(self, bucket: str) -> None:
        self._server.create_bucket(bucket)
        # The first write makes the bucket's volumes, which is nobody's to pay for.
        self._server.raw_put(bucket, "first", bytes(10_000))

    def _drop(self, bucket: str) -> None:
        self._server._s3.delete_bucket(Bucket=bucket)


class NullPlace(Place):
    """The server that hashes and keeps nothing."""

    def __init__(self, server: NullS3) -> None:
        import boto3
        from botocore.config import Config

        self.server, self.environment = server, server.environment
        self.endpoint = self.environment["AWS_ENDPOINT_URL"]
        self._client = boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id="bench",
            aws_secret_access_key="bench",
            config=Config(s3={"addressing_style": "path"}),
        )

    def sizes(self, bucket: str, prefix: str) -> dict[str, int]:
        return _sizes(self._client, bucket, prefix)

    def read(self, bucket: str, key: str) -> bytes:
        return bytes(self._client.get_object(Bucket=bucket, Key=key)["Body"].read())

    def write(self, bucket: str, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=bucket, Key=key, Body=data)

    def _make(self, bucket: str) -> None:
        pass

    def _drop(self, bucket: str) -> None:
        for key in self.sizes(bucket, ""):
            self._client.delete_object(Bucket=bucket, Key=key)


class Stores:
    """Those that were asked for, until `close` (or the end of `with`).

    Args:
        directory: where they may write.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._weed: WeedServer | None = None
        self._places: dict[str, Place] = {}

    def place(self, name: str) -> Place:
        """`http`, `https` or `null`."""
        if name not in self._places:
            self._places[name] = self._null() if name == "null" else WeedPlace(self._start_weed(), tls=name == "https")
        return self._places[name]

    def _start_weed(self) -> WeedServer:
        if self._weed is None:
            self._weed = self._stack.enter_context(WeedServer(tls=True, under=self._directory))
        return self._weed

    def _null(self) -> NullPlace:
        return NullPlace(self._stack.enter_context(NullS3(self._directory)))

    def __enter__(self) -> Stores:  # noqa: PYI034 - typing.Self needs Python 3.11
        return self

    def __exit__(self, *ignored: object) -> None:
        self._stack.close()
