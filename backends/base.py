"""What a store can do: the whole interface between ckptmgr and storage.

A backend *is* an fsspec filesystem. Above this package only these fsspec verbs are used: `pipe_file`, `put_file`, `get_file`,
`cat_file`, `cp_file`, `info`, `exists`, `find`, `ls`, `rm_file`, `rmdir`, plus six of ours, `capabilities`, `rm_files`, `stored_crc`, `abort_upload`, `list_uploads` and `bucket_facts`. Paths
have no protocol: `bucket/key` on object stores, an absolute path on local disk. `//` and trailing slashes are never part of a key.

Contract, for every implementation (the suite is `ckptmgr.testing.contract`):
- All methods may be called from any thread.
- A write is all or nothing: readers see the old bytes, the new bytes, or nothing; once it returns, the bytes are durable.
- Nothing is cached: a listing or a read sees what another process wrote before the call.
- Library errors become `ckptmgr.core.errors` at one place per backend, `raise … from exc`, and are only classified: whether to
  try again is decided in `retry.py`. "Not found" is raised only when the store said so; a refusal or a timeout never is (I7).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fsspec.spec import AbstractFileSystem

from ckptmgr.core.checksums import Digests
from ckptmgr.core.errors import BackendError, ObjectNotFoundError, TransientBackendError

if TYPE_CHECKING:
    from ckptmgr.backends.parts import PartJournal
    from ckptmgr.backends.profiles import Profile

CrcKind = Literal["crc64nvme", "crc64xz"]
WriteMode = Literal["overwrite", "create"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What one store is able to do, as far as its kind is known; a bucket's own ability is probed when a run is created.

    Attributes:
        create_only: `pipe_file(mode="create")` is decided by the store itself, atomically, among all writers.
        stored_crc: which CRC the store keeps with a whole object and hands out without a download; None if none.
        is_local: the files are on this machine, so hard links and `os` calls work on the paths.
        is_lasting: what is written outlives this process.
        etags: listings give the ETag of every object, and another one when its bytes have changed: what was read under it need not be read again.
    """

    create_only: bool
    stored_crc: CrcKind | None
    is_local: bool = False
    is_lasting: bool = True
    etags: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingUpload:
    """A multipart upload that was begun and neither completed nor aborted; its parts are paid for and seen by nobody.

    Attributes:
        path: the object that it would become.
        started_s: seconds since 1970 by the store's clock; None when the store does not say.
    """

    path: str
    upload_id: str
    started_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketFacts:
    """What a bucket is set to do by itself, as far as these credentials may ask; None means unknown.

    Attributes:
        versioning: `enabled` and `suspended` keep what is deleted; OSS ignores create-only on both.
        abort_days: the bucket's rule drops multipart uploads that are older; 0: there is no such rule.
        expires: whether a rule deletes objects by age.
        archives: whether a rule moves objects to where they cannot be read at once.
        noncurrent_days: a rule drops versions that many days after they were deleted or replaced; 0: there is no such rule.
    """

    versioning: Literal["off", "enabled", "suspended"] | None = None
    abort_days: int | None = None
    expires: bool | None = None
    archives: bool | None = None
    noncurrent_days: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How a store is reached. Never a secret: where credentials were found, not what they are.

    Attributes:
        endpoint: a URL; None for a store without one (a disk).
        addressing: where the bucket's name goes.
        profile: what is known in advance of this kind of store; None for kinds without profiles.
        credentials: where they come from, for a reader; None if there are none, or the kind needs none.
        is_temporary: whether the credentials are for a session, and so will expire.
        expires_s: when, in seconds since 1970; None if nobody says. Those that can be renewed are, by themselves, before that.
    """

    endpoint: str | None = None
    region: str | None = None
    addressing: str | None = None
    profile: Profile | None = None
    credentials: str | None = None
    is_temporary: bool = False
    expires_s: float | None = None


class Backend(AbstractFileSystem):  # type: ignore[misc,unused-ignore]
    """An fsspec filesystem with the guarantees of this module's docstring.

    Instances are not cached by fsspec and keep no listings: another process's commit must be visible at the next call (K112).

    Attributes:
        kind: the short name that errors carry as `backend`: "file", "s3", "oss", "memory", …
        capabilities: what this store can do.
    """

    cachable = False
    kind: str = ""
    capabilities: Capabilities

    def __init__(self, **storage_options: Any) -> None:
        super().__init__(use_listings_cache=False, skip_instance_cache=True, **storage_options)

    @property
    def unretried(self) -> Backend:
        """The same store with each request made once: for a caller that must look again before it tries again."""
        return self

    @property
    def retries(self) -> int:
        """Requests that were made again so far, after a failure that could pass."""
        return 0

    @property
    def concurrency(self) -> int:
        """How many requests are worth making side by side; 1 where they only get in each other's way."""
        return 8

    @abstractmethod
    def pipe_file(self, path: str, value: bytes, mode: WriteMode = "overwrite", **kwargs: Any) -> None:
        """Store `value` at `path` in one request, all or nothing; for small objects (manifests, records).

        Blocks until the object is durable.

        Raises:
            ObjectExistsError: `mode` is "create" and `path` exists; nothing was written.
            TransientBackendError: the outcome is unknown; read `path` back before judging.
        """

    @abstractmethod
    def put_file(
        self,
        lpath: str,
        rpath: str,
        callback: Any = None,
        mode: WriteMode = "overwrite",
        *,
        expected: Digests | None = None,
        parts: PartJournal | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the local file `lpath` at `rpath`, all or nothing.

        The bytes are digested while they are read, and never held in memory as a whole. With `expected`, the object only becomes visible, or
        stays, when what was read and what the store says it holds are both those bytes.

        Args:
            callback: an fsspec callback; `relative_update(n)` is called by this thread with the number of bytes moved since the last call,
                also 0. What it raises ends the transfer.
            expected: the digests of the file when it was described.
            parts: where the id of an upload in parts is kept. With it, an upload that was interrupted, killed, or failed in a way that may
                pass stays in the store, and a further call with the same journal sends what is missing. Failures that are for good (the source
                changed, the store refuses, except for credentials) still drop what was sent, as all failures do without it. Stores that
                have no such uploads ignore it.

        Raises:
            SourceChangedError: `lpath` vanished, or is not `expected` (any more); nothing stays at `rpath` (I10).
            ChecksumMismatchError: the store reports other bytes than were sent; nothing stays at `rpath`.
            ObjectExistsError: `mode` is "create" and `rpath` exists.
            TransientBackendError: the outcome is unknown.
        """

    @abstractmethod
    def get_file(
        self,
        rpath: str,
        lpath: str,
        callback: Any = None,
        *,
        expected: Digests | None = None,
        lasting: bool = True,
        **kwargs: Any,
    ) -> bool:
        """Write the object `rpath` to the local file `lpath`; its directory must exist.

        What was at `lpath` is unlinked first, never written through: it may be a hard link. Verifies the length it was promised, not the content, unless it can with
        `expected`: else the caller compares digests. Not durable until the caller syncs. A failure may leave a part of the file at `lpath`.

        Args:
            callback: as in `put_file`.
            expected: what the object should amount to. A backend that digests what arrives while it arrives compares it with this.

            lasting: the caller will sync the file: the disk may begin with it. Without it, the file is for this process only.

        Returns:
            whether the file was seen to have the size and the BLAKE3 of `expected`. False says nothing.

        Raises:
            ObjectNotFoundError: no such object.
            SizeMismatchError, ChecksumMismatchError: it is certainly not `expected`; nothing stays at `lpath`.
        """

    @abstractmethod
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes `[start, end)` of the object at `path`, negative offsets counting from its end as in a slice.

        Raises:
            ObjectNotFoundError: no such object.
        """

    @abstractmethod
    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """`{"name", "size", "type": "file" | "directory", "etag"?, "mtime"?}` of the object, or of the prefix, at `path`.

        A "directory" is a prefix that at least one key starts with (object stores) or a real directory (local). `etag` changes when
        the content does. `mtime` is in seconds since 1970 by the store's clock: good for the age of an orphan, never for what is newest (I4).

        Raises:
            ObjectNotFoundError: neither an object nor a prefix.
        """

    @abstractmethod
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The entries one level below `path`, sorted by name, as `info` records (`detail`) or names. A file lists itself.

        Raises:
            ObjectNotFoundError: neither an object nor a prefix.
        """

    @abstractmethod
    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> list[str] | dict[str, dict[str, Any]]:
        """Every file below `path`, sorted by name (any page size, any number); empty when there is none.

        With `detail`, a dict from name to `info` record. Only whole path components match: `run1` does not find `run10/x`, and a file
        is not below itself. `maxdepth=1` finds the files directly below; `withdirs` adds the directories in between.
        """

    @abstractmethod
    def rm_file(self, path: str) -> None:
        """Remove one object. Already gone is success, so that an interrupted clean-up can be repeated."""

    @abstractmethod
    def stored_crc(self, path: str) -> tuple[CrcKind, str] | None:
        """The CRC-64 that the store keeps for the whole object, as (kind, 16 hexadecimal digits), without a download.

        None when the store keeps none for this object (`capabilities.stored_crc` is None, or it was written by another tool).

        Raises:
            ObjectNotFoundError: no such object.
        """

    @abstractmethod
    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy one object within the store, without moving its bytes through this machine; all or nothing. Overwrites `path2`.

        Raises:
            ObjectNotFoundError: no object at `path1`.
            TransientBackendError: the outcome is unknown.
        """

    def abort_upload(self, path: str, upload_id: str) -> None:
        """Throw away the parts of an upload to `path` that a `PartJournal` tells of; one that the store does not know is fine."""

    def list_uploads(self, path: str) -> list[PendingUpload]:
        """The multipart uploads under way below `path` (whole path components); none where a store has no such thing."""
        return []

    def bucket_facts(self, path: str) -> BucketFacts:
        """What the bucket of `path` is set to do by itself. What may not be asked is None; nothing is raised for that."""
        return BucketFacts()

    def connection(self) -> Connection:
        """How the store is reached. Credentials may be fetched for it (from a metadata service); the store itself is not asked.

        Raises:
            BackendError: there are credentials, but they could not be fetched.
            ConfigError: the configuration is wrong.
        """
        return Connection()

    def rm_files(self, paths: Sequence[str]) -> None:
        """Remove many objects, as few requests as the store allows. Those already gone are fine.

        All are tried; what could not be removed is named in the one error raised at the end.

        Raises:
            BackendError: of the class of the first permanent failure, else of the first, with `failed`: a dict from path to error.
        """
        raise_failed(self._delete_each(paths))

    def _delete_each(self, paths: Sequence[str]) -> dict[str, BackendError]:
        failed: dict[str, BackendError] = {}
        for path in paths:
            try:
                self.rm_file(path)
            except BackendError as error:
                failed[path] = error
        return failed

    def rmdir(self, path: str) -> None:
        """Remove the directory at `path` if it is empty. Nothing to do where directories are only prefixes of keys."""

    def rm(self, path: str | list[str], recursive: bool = False, maxdepth: int | None = None) -> None:
        """Remove the object(s) at `path`; with `recursive` everything below too, and the directories that become empty."""
        roots = [path] if isinstance(path, str) else list(path)
        if not recursive:
            self.rm_files(roots)
            return
        records = {name: record for root in roots for name, record in self._below(root, maxdepth).items()}
        files = [name for name, record in records.items() if record["type"] == "file"]
        self.rm_files([*files, *(root for root in roots if self.isfile(root))])
        # The deepest first: only an empty directory can be removed.
        for directory in sorted({*records, *roots} - set(files), key=len, reverse=True):
            self.rmdir(directory)

    def _below(self, path: str, maxdepth: int | None) -> dict[str, dict[str, Any]]:
        found = self.find(path, maxdepth=maxdepth, withdirs=True, detail=True)
        assert isinstance(found, dict)
        return found

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        from ckptmgr.backends.openfile import ReadFile, WriteFile

        if mode == "rb":
            size = self.info(path)["size"] if self.isfile(path) else None
            if size is None:
                raise ObjectNotFoundError(f"no object {path!r}", backend=self.kind, operation="open", key=path)
            return ReadFile(self, path, "rb", block_size or "default", cache_options=cache_options, size=size)
        if mode in ("wb", "xb") and autocommit:
            return WriteFile(self, path, create=mode == "xb")
        raise ValueError(f"objects cannot be opened with mode {mode!r}{'' if autocommit else ' in a transaction'}")

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """As fsspec's: many objects at once, directories included."""
        self._bulk("get", rpath, lpath, recursive=recursive, **kwargs)

    def put(self, lpath: Any, rpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """As fsspec's: many files at once, directories included."""
        self._bulk("put", lpath, rpath, recursive=recursive, **kwargs)

    def copy(self, path1: Any, path2: Any, recursive: bool = False, **kwargs: Any) -> None:
        """As fsspec's: many objects at once, directories included."""
        self._bulk("copy", path1, path2, recursive=recursive, **kwargs)

    def _bulk(self, verb: str, source: Any, target: Any, **kwargs: Any) -> None:
        from ckptmgr.backends.bulk import BulkView

        getattr(AbstractFileSystem, verb)(BulkView(self), source, target, **kwargs)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether an object or a prefix is at `path`. Unlike fsspec's own, a failed look-up raises instead of saying no (I7)."""
        try:
            self.info(path, **kwargs)
        except ObjectNotFoundError:
            return False
        return True

    def isfile(self, path: str) -> bool:
        """Whether an object is at `path`; a failed look-up raises (I7)."""
        return self._type_at(path) == "file"

    def isdir(self, path: str) -> bool:
        """Whether a prefix or directory is at `path`; a failed look-up raises (I7)."""
        return self._type_at(path) == "directory"

    def _type_at(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except ObjectNotFoundError:
            return None

    def walk(
        self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "raise", **kwargs: Any
    ) -> Iterator[Any]:
        """As fsspec's, but a directory that cannot be read raises instead of looking empty (I7)."""
        walked: Iterator[Any] = super().walk(path, maxdepth=maxdepth, topdown=topdown, on_error=on_error, **kwargs)
        return walked


def raise_failed(failed: dict[str, BackendError]) -> None:
    """Raise one error that stands for all of `failed` (path -> error), if there are any."""
    if not failed:
        return
    # A permanent one first: as long as there is one, trying all again cannot succeed.
    first = min(failed.values(), key=lambda error: isinstance(error, TransientBackendError))
    if len(failed) > 1:
        first.message = f"{len(failed)} objects could not be removed; the first: {first.message}"
    first.__dict__.update(failed=failed)
    raise first
