"""Object stores for tests, on 127.0.0.1: moto's S3 and an OSS dialect with fault injection, and SeaweedFS, a real S3.

    with OssServer() as server:
        server.create_bucket("bkt")
        subprocess.run([...], env={**os.environ, **server.env})

`MotoServer` and `OssServer` run in threads of this process, keep everything in memory, and have `faults` and `log`. `WeedServer`
is a process of its own that checks signatures, checksums and conditional writes by itself. All three have the same
identities and the same raw access, which goes around signatures, faults and ckptmgr's backends. From a shell:

    python -m ckptmgr.testing.servers weed --bucket bkt

prints one line of JSON, `{"url", "env", "pid"}`, and serves until SIGTERM, SIGINT, the end of its input (`/dev/null` has none), or its
parent's end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ckptmgr.testing.faults import Faults
from ckptmgr.testing.identities import DEFAULT_IDENTITIES, Identity
from ckptmgr.testing.moto_core import BaseWSGIServer, MotoCore, QuietRequestHandler, make_server
from ckptmgr.testing.oss_dialect import OssApp
from ckptmgr.testing.s3_dialect import S3App
from ckptmgr.testing.serving import end_at_signals, wait_for_the_end
from ckptmgr.testing.store_app import LoggedRequest
from ckptmgr.testing.weed import WeedProcess

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MotoServer", "OssServer", "StoreServer", "WeedServer", "main"]

S3_REGION = "us-east-1"
OSS_REGION = "cn-hangzhou"


class StoreServer(ABC):
    """One object store on 127.0.0.1, from `start` (or `with`) to `close`.

    Between the two it may be stopped and started again: the endpoint and the data stay, and clients are refused meanwhile.

    Args:
        port: the port to listen on; 0 takes a free one.
        identities: who may use it; the first is the administrator.

    Attributes:
        url: the endpoint, `http://127.0.0.1:<port>`; "" before `start`.
    """

    kind: str

    def __init__(self, *, port: int = 0, identities: Sequence[Identity] = DEFAULT_IDENTITIES) -> None:
        self.identities = tuple(identities)
        self.url = ""
        self._port = port

    @abstractmethod
    def start(self) -> Self:
        """Begin to serve; returns the server itself once a request will be answered."""

    @abstractmethod
    def stop(self) -> None:
        """Stop serving as a crash would: requests in flight lose their connection. The data stays; may be called twice."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving and forget all data. May be called twice."""

    @abstractmethod
    def create_bucket(self, name: str) -> None:
        """Make sure that an empty bucket, or this bucket, exists."""

    @abstractmethod
    def remove_bucket(self, name: str) -> None:
        """Forget a bucket and all that is in it, so that it takes no more room; nothing happens when there is none."""

    @abstractmethod
    def raw_get(self, bucket: str, key: str) -> bytes:
        """The stored bytes, by another path than a backend's.

        Raises:
            KeyError: no such object.
        """

    @abstractmethod
    def raw_put(self, bucket: str, key: str, data: bytes) -> None:
        """Store bytes as another tool would: overwriting, without metadata and checksum headers."""

    @abstractmethod
    def raw_keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Every key that starts with `prefix`, sorted."""

    @abstractmethod
    def raw_uploads(self, bucket: str) -> dict[str, str]:
        """Unfinished multipart uploads: key by upload id."""

    @abstractmethod
    def raw_delete(self, bucket: str, key: str) -> None:
        """Remove one object; nothing happens when it is not there."""

    @property
    def env(self) -> dict[str, str]:
        """The environment that points a client at this server as its administrator."""
        return self.env_of(self.identities[0].name)

    def env_of(self, name: str) -> dict[str, str]:
        """The environment that points a client at this server as the identity `name`."""
        return self._env(self.identity(name))

    def identity(self, name: str) -> Identity:
        """The identity called `name`.

        Raises:
            KeyError: there is none.
        """
        for identity in self.identities:
            if identity.name == name:
                return identity
        raise KeyError(name)

    def _env(self, identity: Identity) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": identity.access_key,
            "AWS_SECRET_ACCESS_KEY": identity.secret_key,
            "AWS_DEFAULT_REGION": S3_REGION,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _MemoryServer(StoreServer):
    """A store in this process: one dialect application over a private moto, served by threads."""

    def __init__(self, *, port: int = 0, identities: Sequence[Identity] = DEFAULT_IDENTITIES) -> None:
        super().__init__(port=port, identities=identities)
        self.app = self._make_app()
        self._server: BaseWSGIServer | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _make_app(self) -> S3App | OssApp:
        """The application of this dialect."""

    @property
    def faults(self) -> Faults:
        """The fault rules; empty at first."""
        return self.app.faults

    @property
    def log(self) -> list[LoggedRequest]:
        """Every request that was finished, oldest first; `log.clear()` empties it."""
        return self.app.log

    def reset(self) -> None:
        """Take all faults out of force, empty the log, and behave normally again; the data stays. For between two tests."""
        self.app.reset()

    @property
    def _core(self) -> MotoCore:
        return self.app.core

    def start(self) -> Self:
        """Begin to serve, again on the same port after `stop`."""
        self.app.closing.clear()
        self._server = make_server(
            "127.0.0.1", self._port, self.app, threaded=True, request_handler=QuietRequestHandler
        )
        self._port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name=f"{self.kind}-server", daemon=True
        )
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop serving; what is held or delayed is let go, without an answer."""
        self.app.closing.set()
        self.faults.clear()
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._thread.join(10)
            self._server.server_close()
            self._server = None

    def close(self) -> None:
        """Stop serving and forget all data."""
        self.stop()
        self._core.close()

    def create_bucket(self, name: str) -> None:
        """Make the bucket; nothing happens when it is there."""
        self._core.call("PUT", name)
        if self._core.call("HEAD", name).status != 200:
            raise RuntimeError(f"bucket {name} was not created")

    def remove_bucket(self, name: str) -> None:
        """Forget the bucket."""
        self._core.remove_bucket(name)

    def raw_get(self, bucket: str, key: str) -> bytes:
        """The stored bytes."""
        reply = self._core.call("GET", bucket, key)
        if reply.status != 200:
            raise KeyError(f"{bucket}/{key}")
        return reply.body

    def raw_put(self, bucket: str, key: str, data: bytes) -> None:
        """Store bytes."""
        reply = self._core.call("PUT", bucket, key, body=data)
        if reply.status != 200:
            raise RuntimeError(f"cannot store {bucket}/{key}: {reply.status} {reply.body[:300]!r}")

    def raw_keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Every key, sorted."""
        return self._core.keys(bucket, prefix)

    def raw_delete(self, bucket: str, key: str) -> None:
        """Remove one object."""
        self._core.call("DELETE", bucket, key)

    def raw_uploads(self, bucket: str) -> dict[str, str]:
        """Unfinished multipart uploads: key by upload id."""
        return self._core.uploads(bucket)

    def raw_flip_bit(self, bucket: str, key: str, offset: int = 0) -> None:
        """Damage one stored byte; what the store says about the object (size, ETag, checksum) stays as it was.

        Raises:
            KeyError: no such object.
            IndexError: it is not that long.
        """
        self._core.flip_bit(bucket, key, offset)


class MotoServer(_MemoryServer):
    """moto's S3 with its gaps closed: checksums, atomic conditional writes, limits. Signatures are not checked."""

    kind = "moto"
    app: S3App

    def _make_app(self) -> S3App:
        return S3App(identities=self.identities)


class OssServer(_MemoryServer):
    """The OSS dialect; signatures are checked."""

    kind = "oss"
    app: OssApp

    def _make_app(self) -> OssApp:
        return OssApp(identities=self.identities)

    def raw_flip_bit(self, bucket: str, key: str, offset: int = 0) -> None:
        """Damage one stored byte; the stored CRC stays as it was."""
        self.app.keep_crc(bucket, key)
        super().raw_flip_bit(bucket, key, offset)

    def _env(self, identity: Identity) -> dict[str, str]:
        return {
            "OSS_ENDPOINT": self.url,
            "OSS_ACCESS_KEY_ID": identity.access_key,
            "OSS_ACCESS_KEY_SECRET": identity.secret_key,
            "OSS_REGION": OSS_REGION,
        }


class WeedServer(StoreServer):
    """SeaweedFS, a real S3 in a process of its own; data in a temporary directory that is removed at the end.

    Args:
        tls: `url` is https, with a certificate made at the start whose authority `env` names (AWS_CA_BUNDLE).
        under: where the temporary directory is made; None for the system's place.

    Attributes:
        plain_url: the http endpoint, which there is with `tls` too.
    """

    kind = "weed"

    def __init__(
        self,
        *,
        port: int = 0,
        identities: Sequence[Identity] = DEFAULT_IDENTITIES,
        tls: bool = False,
        under: Path | None = None,
    ) -> None:
        super().__init__(port=port, identities=identities)
        self._process = WeedProcess(identities=self.identities, tls=tls, under=under)
        self._client: Any = None
        self.plain_url = ""

    def start(self) -> Self:
        """Start the processes and wait until an object could be stored.

        Raises:
            MissingExtraError: the `weed` program is not installed.
            RuntimeError: it did not come up; the end of its log is in the message.
        """
        self.plain_url = self._process.start(self._port)
        self.url = self._process.tls_url or self.plain_url
        return self

    @property
    def authority(self) -> Path | None:
        """The certificate that a client must trust, in PEM; None without TLS."""
        return self._process.certificates.authority if self._process.certificates else None

    def _env(self, identity: Identity) -> dict[str, str]:
        trusted = {"AWS_CA_BUNDLE": str(self.authority)} if self.authority else {}
        return {**super()._env(identity), **trusted}

    def stop(self) -> None:
        """Kill the processes; what they had answered for is on disk."""
        if self._client is not None:
            self._client.close()
            self._client = None
        self._process.stop()

    def close(self) -> None:
        """Kill the processes and remove the data."""
        self.stop()
        self._process.close()

    @property
    def _s3(self) -> Any:
        if self._client is None:
            self._client = self._process.client(self.plain_url, self.identities[0])
        return self._client

    def create_bucket(self, name: str) -> None:
        """Make the bucket; nothing happens when it is there."""
        with contextlib.suppress(self._s3.exceptions.BucketAlreadyExists, self._s3.exceptions.BucketAlreadyOwnedByYou):
            self._s3.create_bucket(Bucket=name)
            self._process.make_room(name)

    def remove_bucket(self, name: str) -> None:
        """Remove the bucket; weed frees its volume."""
        with contextlib.suppress(self._s3.exceptions.NoSuchBucket):
            self._s3.delete_bucket(Bucket=name)

    def raw_get(self, bucket: str, key: str) -> bytes:
        """The stored bytes."""
        try:
            return bytes(self._s3.get_object(Bucket=bucket, Key=key)["Body"].read())
        except self._s3.exceptions.NoSuchKey:
            raise KeyError(f"{bucket}/{key}") from None

    def raw_put(self, bucket: str, key: str, data: bytes) -> None:
        """Store bytes."""
        self._s3.put_object(Bucket=bucket, Key=key, Body=data)

    def raw_keys(self, bucket: str, prefix: str = "") -> list[str]:
        """Every key, sorted."""
        pages = self._s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        return sorted(entry["Key"] for page in pages for entry in page.get("Contents", ()))

    def raw_delete(self, bucket: str, key: str) -> None:
        """Remove one object."""
        self._s3.delete_object(Bucket=bucket, Key=key)

    def raw_uploads(self, bucket: str) -> dict[str, str]:
        """Unfinished multipart uploads: key by upload id."""
        pages = self._s3.get_paginator("list_multipart_uploads").paginate(Bucket=bucket)
        return {entry["UploadId"]: entry["Key"] for page in pages for entry in page.get("Uploads", ())}


_SERVERS: dict[str, type[StoreServer]] = {"moto": MotoServer, "weed": WeedServer, "oss": OssServer}


def main(argv: Sequence[str] | None = None) -> int:
    """Serve one store from the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m ckptmgr.testing.servers",
        description="An object store for tests. Prints its URL and the variables to set, as JSON, and serves until SIGTERM, SIGINT, the end of its "
        "input (/dev/null has none), or the end of the process that started it.",
    )
    parser.add_argument("kind", choices=sorted(_SERVERS))
    parser.add_argument("--bucket", action="append", default=[], help="create this bucket; may be repeated")
    parser.add_argument("--port", type=int, default=0, help="listen on this port; 0 takes a free one")
    parser.add_argument("--tls", action="store_true", help="over https (weed only)")
    options = parser.parse_args(argv)
    if options.tls and options.kind != "weed":
        parser.error("--tls is for weed")
    server: StoreServer = (
        WeedServer(port=options.port, tls=True) if options.tls else _SERVERS[options.kind](port=options.port)
    )
    with server:
        for bucket in options.bucket:
            server.create_bucket(bucket)
        # Whoever reads the line may send the signal at once.
        ended = end_at_signals()
        print(json.dumps({"url": server.url, "env": server.env, "pid": os.getpid()}), flush=True)
        wait_for_the_end(ended)
    return 0


if __name__ == "__main__":
    sys.exit(main())
