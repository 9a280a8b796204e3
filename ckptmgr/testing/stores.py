"""A store for a test: one bucket or directory, and a way to its bytes that does not go through ckptmgr."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckptmgr.backends.retry import Retrier, RetryingBackend


class Store(ABC):
    """One empty store. Keys are relative to `url`.

    Attributes:
        name: `local`, `s3` (SeaweedFS, or moto as `moto`), or `oss`.
        url: its root; a run is `f"{url}/run"`.
        server: the server behind it; None for a directory. moto's and OSS's have `faults` and `log`.
        env: what a process needs in its environment to reach it.
    """

    name: str
    url: str
    server: Any
    env: dict[str, str]

    @abstractmethod
    def get(self, key: str) -> bytes:
        """The bytes at `key`; fails if there are none."""

    @abstractmethod
    def put(self, key: str, value: bytes) -> None:
        """Put bytes at `key`, whatever is there."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove `key`, which must be there."""

    @abstractmethod
    def keys(self, prefix: str = "") -> list[str]:
        """Every key below `prefix`, sorted."""

    def at(self, key: str) -> str:
        """The path of `key` for a backend."""
        return self.url.split("://")[1] + f"/{key}"

    def snapshot(self, prefix: str = "") -> dict[str, bytes]:
        """Every key below `prefix` and its bytes."""
        return {key: self.get(key) for key in self.keys(prefix)}


@dataclass
class DirectoryStore(Store):
    """A directory on local disk."""

    root: Path
    name: str = "local"
    server: Any = None
    env: dict[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"file://{self.root}"

    def get(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def put(self, key: str, value: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(value)

    def delete(self, key: str) -> None:
        path = self.root / key
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def keys(self, prefix: str = "") -> list[str]:
        found = (path.relative_to(self.root).as_posix() for path in self.root.rglob("*") if path.is_file())
        return sorted(key for key in found if key.startswith(prefix))


@dataclass
class BucketStore(Store):
    """A bucket of its own on one of the test servers."""

    name: str
    scheme: str
    server: Any
    bucket: str

    @property
    def url(self) -> str:  # type: ignore[override]
        return f"{self.scheme}://{self.bucket}/exp"

    @property
    def env(self) -> dict[str, str]:  # type: ignore[override]
        return dict(self.server.env)

    def get(self, key: str) -> bytes:
        return bytes(self.server.raw_get(self.bucket, f"exp/{key}"))

    def put(self, key: str, value: bytes) -> None:
        self.server.raw_put(self.bucket, f"exp/{key}", value)

    def delete(self, key: str) -> None:
        self.server.raw_delete(self.bucket, f"exp/{key}")

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(key.removeprefix("exp/") for key in self.server.raw_keys(self.bucket, f"exp/{prefix}"))

    def uploads(self) -> dict[str, str]:
        """Unfinished multipart uploads: key by id."""
        found: dict[str, str] = self.server.raw_uploads(self.bucket)
        return {upload: key.removeprefix("exp/") for upload, key in found.items()}


def retrying_backend(store: Store, retrier: Retrier, **options: Any) -> RetryingBackend:
    """A new backend of a bucket on a test server, which tries again as `retrier` says; its clients read the environment.

    Args:
        options: those of `S3Backend` or `OSSBackend`; with `part_bytes`, what is larger goes up in parts.
    """
    if "part_bytes" in options:
        options.setdefault("multipart_threshold", options["part_bytes"])
    if store.name == "oss":
        from ckptmgr.backends.oss import OSSBackend

        return RetryingBackend(OSSBackend(retrier=retrier, **options), retrier)
    from ckptmgr.backends.s3 import S3Backend

    return RetryingBackend(S3Backend(retrier=retrier, **options), retrier)
